"""A node's trial of its own share: the speed that it finds predicts the steps that were tried."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from edge_runtime.cache.pages import KVPages
from edge_runtime.clock import SystemClock
from edge_runtime.errors import CheckpointError
from edge_runtime.model.build import load_experts, load_trunk
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.decoder import Decoder
from edge_runtime.model.footprint import footprint
from edge_runtime.node.trial import BATCHES, _Part, send_seconds, try_experts, try_home, typical
from topology.ids import ExpertId
from topology.speeds import NodeSpeed

CLOCK = SystemClock()


@pytest.fixture(scope="module")
def checkpoint(demo_model) -> Checkpoint:
    torch.set_num_threads(1)
    return Checkpoint.open(demo_model)


def tried(
    checkpoint: Checkpoint, experts: range, first: int = 0, last: int = 6, blocks: int = 32
) -> NodeSpeed:
    """Of a node that runs layers [first, last) and holds these experts of each."""
    spec = checkpoint.spec
    held = [ExpertId(layer, index) for layer in spec.moe_layers for index in experts]
    trunk = load_trunk(checkpoint, spec, first, last, context_tokens=64)
    decoder = Decoder(spec, trunk, KVPages(blocks, spec.kv_shapes(first, last)), max_rows=256)
    return try_home(
        footprint(checkpoint, context_tokens=64),
        decoder,
        load_experts(checkpoint, spec, held),
        weight_format="as_stored",
        num_blocks=blocks,
        max_rows=256,
        context_tokens=64,
        clock=CLOCK,
    )


@pytest.mark.parametrize(
    ("experts", "first", "last", "blocks"),
    [(range(32), 0, 6, 32), (range(3, 9), 0, 6, 32), (range(32), 2, 4, 32), (range(32), 0, 6, 2)],
    ids=["everything", "some experts", "a stage", "two blocks of KV"],
)
def test_whatever_a_home_holds_it_finds_its_speed(checkpoint, experts, first, last, blocks) -> None:
    speed = tried(checkpoint, experts, first, last, blocks)
    assert speed is not None and speed.experts is not None
    assert 0 < speed.step_overhead_s < 1 and 0 < speed.layer_overhead_s < 1
    assert speed.send_overhead_s == NodeSpeed.send_overhead_s, "that is measured apart"


@pytest.fixture(scope="module")
def spoilt(demo_model, tmp_path_factory):
    """Make a model in which all numbers of a tensor are huge: finite as they are stored, and no longer once multiplied."""
    made = {}

    def spoil(what: str, value: float = 3e38) -> Checkpoint:
        if (what, value) not in made:
            folder = tmp_path_factory.mktemp("spoilt") / "model"
            shutil.copytree(demo_model, folder, ignore=shutil.ignore_patterns("calibration"))
            index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
            name = next(name for name in index if what in name)
            tensors = load_file(folder / index[name])
            tensors[name][:] = value
            save_file(tensors, folder / index[name])
            made[what, value] = Checkpoint.open(folder)
        return made[what, value]

    return spoil


def test_weights_that_give_nan_are_named_by_layer_and_expert(spoilt) -> None:
    broken = spoilt("layers.3.mlp.experts.7.down_proj")
    with pytest.raises(CheckpointError, match="layer 3 experts 7 on .* not finite; look for NaN"):
        tried(broken, range(32))
    spec = broken.spec
    store = load_experts(broken, spec, [ExpertId(3, index) for index in range(32)])
    with pytest.raises(CheckpointError, match="layer 3 experts 7 gave numbers that are not finite"):
        try_experts(footprint(broken, context_tokens=64), store, weight_format="as_stored", clock=CLOCK)


def test_what_attention_spoils_is_not_put_down_to_experts(spoilt) -> None:
    with pytest.raises(
        CheckpointError, match="attention or a norm of layer 2 on .* not finite; look for NaN"
    ):
        tried(spoilt("layers.2.self_attn.o_proj"), range(32))


@pytest.mark.parametrize(
    "what", ["embed_tokens", "layers.1.self_attn.k_proj", "layers.4.mlp.gate", "layers.0.input_layernorm"]
)
def test_numbers_that_are_stored_as_nan_are_named_by_tensor_when_they_are_read(spoilt, what) -> None:
    with pytest.raises(
        CheckpointError, match=rf"safetensors: tensor model.*{what}.weight has .* the first nan at .0"
    ):
        tried(spoilt(what, float("nan")), range(1))
    broken = spoilt("layers.3.mlp.experts.7.down_proj", float("inf"))
    for format in ("as_stored", "mxfp4"):
        with pytest.raises(CheckpointError, match="experts.7.down_proj.weight has .* the first inf at"):
            load_experts(broken, broken.spec, [ExpertId(3, 7)], weight_format=format)


def test_a_home_without_experts_of_its_own_has_no_speed_of_experts(checkpoint) -> None:
    found = tried(checkpoint, range(0))
    assert found is not None and found.experts is None


def test_where_not_even_one_request_has_room_nothing_is_tried(checkpoint) -> None:
    assert tried(checkpoint, range(1), blocks=1) is None


def test_an_expert_host_finds_the_speed_of_its_experts(checkpoint) -> None:
    sizes, spec = footprint(checkpoint, context_tokens=64), checkpoint.spec
    store = load_experts(checkpoint, spec, [ExpertId(2, index) for index in range(5)])
    speed = try_experts(sizes, store, weight_format="as_stored", clock=CLOCK)
    assert speed.experts is not None and speed.memory_bytes_per_s == speed.experts.bytes_per_s
    nothing = try_experts(sizes, load_experts(checkpoint, spec, []), weight_format="as_stored", clock=CLOCK)
    assert nothing == NodeSpeed()
    assert 0 < send_seconds(sizes, CLOCK) < 0.1


def test_disturbed_steps_do_not_count() -> None:
    steps = [_Part(1, 1.0, 2.0, 3.0, 4.0, 4, 4, 10)] * 6 + [_Part(1, 90.0, 90.0, 90.0, 90.0, 4, 4, 30)] * 2
    [found] = typical(steps)
    assert found == _Part(1, 1.0, 2.0, 3.0, 4.0, 4, 4, 15)
    assert [part.rows for part in typical([_Part(rows, *[1.0] * 7) for rows in BATCHES])] == [1, 4, 16]
