"""The random model: written in pieces, equal for equal seeds, and read by the runtime as a model folder."""

import json

import torch

from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.tokenizer import Tokenizer
from testbed.medium import Shape, in_shards, planned_tensors, random_tensor, write_tokenizer, write_weights
from topology.ids import ExpertId

TINY = Shape(D=32, L=2, H=4, G=2, P=16, E=4, K=2, F=16, V=400, context_tokens=64)


def write_tiny(folder, seed=0):
    folder.mkdir()
    write_tokenizer(folder, TINY, num_bytes=20_000)
    write_weights(folder, TINY, seed, shard_bytes=20_000)
    (folder / "config.json").write_text(json.dumps(TINY.config()))
    return folder


def test_a_written_model_is_one_that_the_runtime_opens(tmp_path):
    folder = write_tiny(tmp_path / "tiny")
    checkpoint = Checkpoint.open(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert (checkpoint.spec.num_layers, checkpoint.spec.width, checkpoint.spec.vocab_size) == (2, 32, 400)
    with checkpoint.read(checkpoint.expert_parts(ExpertId(1, 3))) as tensors:
        assert [list(tensor.shape) for tensor in tensors] == [[16, 32], [16, 32], [32, 16]]


def test_files_hold_the_numbers_that_name_and_seed_give(tmp_path):
    from safetensors import safe_open

    folder = write_tiny(tmp_path / "tiny", seed=5)
    planned = {tensor.name: tensor for tensor in planned_tensors(TINY)}
    seen = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                assert torch.equal(file.get_tensor(name), random_tensor(planned[name], 5)), name
                seen.add(name)
    assert seen == set(planned)


def test_no_two_tensors_and_no_two_seeds_have_the_same_numbers():
    first, second = [t for t in planned_tensors(TINY) if "experts.0" in t.name][:2]
    assert not torch.equal(random_tensor(first, 0), random_tensor(second, 0))
    assert not torch.equal(random_tensor(first, 0), random_tensor(first, 1))
    assert torch.equal(random_tensor(first, 3), random_tensor(first, 3))


def test_the_medium_model_has_1_3_billion_parameters_in_shards_of_a_gigabyte():
    shards = in_shards(planned_tensors(Shape()), 1 << 30)
    sizes = [sum(tensor.nbytes for tensor in shard) for shard in shards]
    assert 1.313e9 < sum(sizes) / 2 < 1.314e9
    assert max(sizes) <= 1 << 30
    assert len(shards) == 3


def test_the_tokenizer_gives_ids_below_the_vocabulary_and_the_text_back(tmp_path):
    write_tokenizer(tmp_path, TINY, num_bytes=20_000)
    (tmp_path / "config.json").write_text(json.dumps(TINY.config()))
    ids = Tokenizer.open(tmp_path).encode("def f(x): return 2 * x  # Gr\u00f6\u00dfe")
    assert ids and max(ids) < TINY.V
