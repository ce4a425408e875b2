"""Loading a share: the bytes that were planned, nothing else read, nothing left of the files."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from edge_runtime.cache.pages import KVPages
from edge_runtime.model.build import load_experts, load_trunk, packed_format
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.decoder import Decoder
from edge_runtime.model.footprint import footprint
from edge_runtime.node.share import signatures_for
from kernels.packing import FORMATS
from tests.support.decoders import Sequences, all_experts
from tests.support.families import CASES, write_variant
from tests.support.tiny_models import Reference, read_tensors, write_tensors, write_tiny_qwen3_moe
from topology.costs import kv_block_bytes, trunk_bytes
from topology.ids import ExpertId


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_what_is_loaded_takes_the_bytes_that_were_planned(tmp_path, family, variant):
    checkpoint = Checkpoint.open(write_variant(family, variant, tmp_path))
    spec, planned = checkpoint.spec, footprint(checkpoint, context_tokens=64)
    last_layer = spec.num_layers
    shares = any(layer.attention.kv_shared_with is not None for layer in spec.layers)
    for first, last in ((0, last_layer), (0, 1), (1, 2), (last_layer - 1, last_layer), (1, last_layer)):
        trunk = load_trunk(checkpoint, spec, first, last, context_tokens=64)
        assert trunk.nbytes == trunk_bytes(planned, first, last), (first, last)
        if shares and (first, last) != (0, last_layer):
            continue  # pages that are shared are not cut apart
        pages = KVPages(3, spec.kv_shapes(first, last))
        signatures = signatures_for(spec, first, last, 3, max_rows=40)
        counted = signatures.nbytes if signatures is not None else 0
        assert pages.nbytes + counted == 3 * kv_block_bytes(planned, first, last)
        assert counted <= 0.01 * pages.nbytes
        kept = {p.data_ptr(): p.nbytes for i in range(first, last) for p in (pages.k(i), pages.v(i))}
        assert sum(kept.values()) == pages.nbytes
        decoder = Decoder(spec, trunk, pages, max_rows=40)
        buffers = sum(buffer.nbytes for buffer in decoder._buffers.values())
        assert buffers == 40 * planned.row_workspace_bytes
    for trunk_format in ("int8", "int4", "float32"):
        trunk = load_trunk(checkpoint, spec, 0, last_layer, context_tokens=64, trunk_format=trunk_format)
        assert trunk.nbytes == trunk_bytes(planned, 0, last_layer, trunk_format), trunk_format
    for weight_format in ("as_stored", *FORMATS):
        store = load_experts(checkpoint, spec, all_experts(spec), weight_format=weight_format)
        sizes = planned.expert_bytes[weight_format]
        assert store.nbytes == sum(sizes) * planned.experts_per_layer
        assert [size > 0 for size in sizes] == [layer.kind == "moe" for layer in spec.layers]


def test_buffers_and_pages_take_the_bytes_that_were_planned(demo_model):
    checkpoint = Checkpoint.open(demo_model)
    spec, planned = checkpoint.spec, footprint(checkpoint)
    assert (planned.num_layers, planned.experts_per_layer, planned.context_tokens) == (6, 32, 512)
    assert len(planned.experts()) == 192 and planned.head_is_tied
    trunk = load_trunk(checkpoint, spec, 2, 4, context_tokens=512)
    pages = KVPages(5, spec.kv_shapes(2, 4))
    assert pages.nbytes == 5 * 16 * sum(planned.kv_bytes_per_token[2:4])
    decoder = Decoder(spec, trunk, pages, max_rows=40)
    assert sum(buffer.nbytes for buffer in decoder._buffers.values()) == 40 * planned.row_workspace_bytes


def test_weights_of_several_dtypes_in_one_model_are_widened_only_where_they_are_packed_together(tmp_path):
    folder = write_tiny_qwen3_moe(tmp_path)
    tensors = read_tensors(folder)
    for name in tensors:
        if name.endswith((".k_proj.weight", "norm.weight", "experts.3.up_proj.weight")):
            tensors[name] = tensors[name].float() * 1.0001
    write_tensors(folder, tensors)
    checkpoint = Checkpoint.open(folder)
    spec, planned = checkpoint.spec, footprint(checkpoint, context_tokens=128)
    assert load_trunk(checkpoint, spec, 0, 3, context_tokens=128).nbytes == trunk_bytes(planned, 0, 3)
    store = load_experts(checkpoint, spec, all_experts(spec))
    assert {store.bank(0)._experts[i].format for i in (2, 3)} == {"bfloat16", "float32"}
    ids = list(range(5, 45))
    logits = Sequences(checkpoint).whole(ids)
    assert (logits - Reference(folder).logits(ids)).abs().max() < 1e-4


def test_formats_that_differ_meet_in_float32():
    assert packed_format(["BF16", "BF16"], "as_stored") == "bfloat16"
    assert packed_format(["BF16", "F16"], "as_stored") == "float32"
    assert packed_format(["BF16", "F32"], "float16") == "float16"


def test_only_the_assigned_experts_are_read(demo_model, tmp_path):
    wanted = [ExpertId(2, 7), ExpertId(5, 0)]
    reads: list[str] = []

    class Watched(Checkpoint):
        def read(self, parts):
            reads.extend(part.name for part in parts)
            return super().read(parts)

    checkpoint = Watched.open(demo_model)
    store = load_experts(checkpoint, checkpoint.spec, wanted)
    assert list(store) == wanted
    assert sorted(reads) == sorted(part.name for part in checkpoint.expert_names(wanted)) and len(reads) == 6

    reads.clear()
    load_trunk(checkpoint, checkpoint.spec, 2, 3, context_tokens=16)
    assert reads and all(name.startswith("model.layers.2.") and ".experts." not in name for name in reads)


def test_progress_counts_every_byte_and_ends_at_the_total(demo_model):
    checkpoint = Checkpoint.open(demo_model)
    spec, calls = checkpoint.spec, []
    load_experts(checkpoint, spec, all_experts(spec), progress=lambda *call: calls.append(call))
    done, totals, what = zip(*calls, strict=True)
    total = sum(checkpoint.stored_bytes(name) for name in checkpoint.expert_names(all_experts(spec)))
    assert set(totals) == {total} and done[-1] == total and list(done) == sorted(done)
    assert what[0] == "layer 0 expert 0" and what[-1] == "layer 5 expert 31"

    calls.clear()
    load_trunk(checkpoint, spec, 0, 6, context_tokens=16, progress=lambda *call: calls.append(call))
    assert calls[-1][0] == calls[-1][1]
    assert total + calls[-1][1] == sum(tensor.nbytes for tensor in read_tensors(demo_model).values())


@pytest.mark.parametrize(("first", "last"), [(0, 7), (3, 3), (-1, 2), (4, 2)])
def test_layers_that_are_not_there_are_not_loaded(demo_model, first, last):
    checkpoint = Checkpoint.open(demo_model)
    with pytest.raises(ValueError, match="in a model of 6"):
        load_trunk(checkpoint, checkpoint.spec, first, last, context_tokens=16)


def test_weights_stay_as_they_were_loaded_when_the_file_changes_afterwards(tmp_path):
    folder = write_tiny_qwen3_moe(tmp_path / "tiny", num_shards=1)
    checkpoint = Checkpoint.open(folder)
    sequences = Sequences(checkpoint)
    ids = list(range(5, 25))
    expected = sequences.whole(ids)
    (path,) = folder.glob("*.safetensors")
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\x7f" * (path.stat().st_size // 2))
    sequences.lengths = [0]
    assert torch.equal(sequences.whole(ids), expected)


MEASURE = """
import sys
import torch
from pathlib import Path
from edge_runtime.model.build import load_experts, load_trunk
from edge_runtime.model.checkpoint import Checkpoint
from kernels import ops
from tests.support.decoders import all_experts

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

small = Checkpoint.open(sys.argv[1])
load_trunk(small, small.spec, 0, 3, context_tokens=128), load_experts(small, small.spec, all_experts(small.spec))
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = status("VmRSS")
checkpoint = Checkpoint.open(sys.argv[2])
spec = checkpoint.spec
trunk = load_trunk(checkpoint, spec, 0, spec.num_layers, context_tokens=128)
store = load_experts(checkpoint, spec, all_experts(spec))
print(trunk.nbytes + store.nbytes, status("VmRSS") - before, status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the memory counters of Linux")
def test_loading_holds_the_packed_copy_and_never_a_second_one_of_a_shard(tmp_path, repository):
    """A model of 50 MB whose largest tensor is 4 MB: neither at the end nor at the peak is more than 8 MB beside it."""
    small = write_tiny_qwen3_moe(tmp_path / "small")
    large = write_tiny_qwen3_moe(
        tmp_path / "large",
        num_shards=3,
        vocab_size=8192,
        hidden_size=256,
        moe_intermediate_size=256,
        num_experts=32,
        num_hidden_layers=4,
    )
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, small, large],
        cwd=repository,
        capture_output=True,
        text=True,
        check=True,
    )
    packed, resident, peak = map(int, run.stdout.split())
    shutil.rmtree(large)
    assert packed > 50_000_000
    assert resident < packed + 8_000_000, f"{resident} bytes resident for {packed} bytes of weights"
    assert peak < packed + 8_000_000, f"{peak} bytes at the peak for {packed} bytes of weights"
