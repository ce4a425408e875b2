"""The proxy gates of every decoder family: what they hold is planned, and what they choose is what the tier says."""

import pytest
import torch

from edge_runtime.elastic.gates import ProxyGates
from edge_runtime.elastic.sub_experts import LayerParts, SubExperts
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.footprint import footprint
from tests.support.families import VARIANTS, write_variant

CASES = [(family, "plain") for family in sorted(VARIANTS)] + [
    ("gpt_oss", "mxfp4"),
    ("qwen3_moe", "layer 0 dense"),
    ("qwen2_moe", "every second layer dense"),
]


def some_parts(checkpoint: Checkpoint, num_parts: int, gate_neurons: int) -> SubExperts:
    """Experts split at random."""
    spec, draw = checkpoint.spec, torch.Generator().manual_seed(0)
    layers = {}
    for layer in spec.moe_layers:
        gate = spec.layers[layer].gate
        assert gate is not None
        E, F = gate.num_experts, spec.layers[layer].ffn.width
        order = torch.stack([torch.randperm(F, generator=draw) for _ in range(E)])
        layers[layer] = LayerParts(
            order, torch.rand(E, num_parts, generator=draw), torch.rand(E, num_parts, generator=draw)
        )
    return SubExperts(num_parts, gate_neurons, layers)


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_gates_take_the_planned_bytes_and_keep_as_many_slices_as_the_tier_says(family, variant, tmp_path):
    checkpoint = Checkpoint.open(write_variant(family, variant, tmp_path))
    spec = checkpoint.spec
    parts = some_parts(checkpoint, 2, 2)
    gates = ProxyGates(checkpoint, parts, range(spec.num_layers))
    with_gates, without = footprint(checkpoint, gate_neurons=4), footprint(checkpoint)
    assert sum(with_gates.layer_bytes) - sum(without.layer_bytes) == gates.nbytes > 0
    for name, sizes in with_gates.trunks.items():
        assert sum(sizes.layer_bytes) - sum(without.trunks[name].layer_bytes) == gates.nbytes
    dense = set(range(spec.num_layers)) - set(spec.moe_layers)
    assert all(with_gates.layer_bytes[layer] == without.layer_bytes[layer] for layer in dense)
    full, layer = gates.elasticity.full_tier, spec.moe_layers[0]
    gate = spec.layers[layer].gate
    assert gate is not None
    draw = torch.Generator().manual_seed(1)
    tiers = torch.tensor([1, full - 1, 0], dtype=torch.int32)
    ids = torch.stack(
        [torch.randperm(gate.num_experts, generator=draw)[: gate.top_k] for _ in range(3)]
    ).int()
    weights = torch.rand(3, gate.top_k, generator=draw).sort(descending=True).values
    chosen = gates.choose(layer, torch.randn(3, spec.width, generator=draw), ids, weights, tiers)
    if full == 1:
        return
    assert chosen is not None
    kept = sum((chosen.slices.masks >> part) & 1 for part in range(2)).sum(1)
    assert kept.tolist() == [1, full - 1, full] and float(chosen.dropped[2]) == 0.0
    for layer in dense:
        assert gates.choose(layer, torch.randn(3, spec.width), ids, weights, tiers) is None
