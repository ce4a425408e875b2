"""Requests at several tiers in one engine: each runs what it asked for, and the full tier is the plain model."""

import numpy as np
import pytest
import torch

from edge_runtime.artifacts import Artifact, write_section
from edge_runtime.elastic.gates import ProxyGates
from edge_runtime.elastic.sub_experts import SubExperts, read_sub_experts
from edge_runtime.engine.dropped import Dropped, DroppedMass, sliced_bill
from edge_runtime.engine.request import Request, SamplingParams
from edge_runtime.model.build import add_experts, empty_store
from edge_runtime.model.moe import LocalExperts
from tests.support.decoders import all_experts
from tests.support.engines import Whole, engine_of, placed_experts, whole_model

N, FULL = 4, 16


@pytest.fixture(scope="module")
def plain(demo_model) -> Whole:
    return whole_model(demo_model)


@pytest.fixture(scope="module")
def parts(plain, tmp_path_factory) -> SubExperts:
    """Neurons in random order: any order is the same model at the full tier."""
    folder = tmp_path_factory.mktemp("artifact")
    generator = torch.Generator().manual_seed(0)
    order = torch.stack(
        [torch.stack([torch.randperm(96, generator=generator) for _ in range(32)]) for _ in range(6)]
    )
    meta = {"num_parts": N, "layers": list(range(6))}
    hash_ = plain.checkpoint.model_hash
    write_section(folder, "partition", {"permutation": order.short()}, meta, model_hash=hash_)
    gate = {"slopes": torch.rand(6, 32, N), "offsets": torch.rand(6, 32, N)}
    write_section(folder, "proxy_gate", gate, meta | {"gate_neurons": 4}, model_hash=hash_)
    found = read_sub_experts(Artifact.open(folder), plain.checkpoint.spec)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def split(plain, parts) -> Whole:
    store = empty_store(plain.checkpoint.spec)
    add_experts(
        store,
        plain.checkpoint,
        all_experts(plain.checkpoint.spec),
        order_of=lambda expert: parts.layers[expert.layer].permutation[expert.index],
    )
    return Whole(plain.checkpoint, store, plain.trunk)


@pytest.fixture(scope="module")
def gates(plain, parts) -> ProxyGates:
    return ProxyGates(plain.checkpoint, parts, range(6))


class Watched:
    """Counts the slices that run; else the port it stands before."""

    def __init__(self, port):
        self.port, self.host_names, self.slices = port, port.host_names, []

    def __getattr__(self, name):
        return getattr(self.port, name)

    def add_here(self, layer, x, expert_ids, gate_weights, hidden, out, slices=None):
        masks = torch.full(expert_ids.shape, 15) if slices is None else slices.masks
        self.slices.append(sum((masks >> s) & 1 for s in range(N)).sum(1))
        return self.port.add_here(
            layer, x, expert_ids, gate_weights, hidden, out, *(() if slices is None else (slices,))
        )


def answers(whole, tiers, gates=None, watch=None, max_rows=64):
    port = placed_experts(whole)
    engine = engine_of(whole, port=Watched(port) if watch is not None else port, max_rows=max_rows)
    engine.runner.gates = gates
    prompts = [[5 + 7 * i, 90 + i, 400, 33, 12 + i] for i in range(len(tiers))]
    for i, (tier, prompt) in enumerate(zip(tiers, prompts, strict=True)):
        params = SamplingParams(max_tokens=6, seed=0, ignore_eos=True)
        engine.submit(Request(f"r{i}", prompt, params, 0.0, tier=tier))
    ended = {}
    while not engine.is_idle:
        for output in engine.step():
            if output.ended is not None:
                ended[output.request_id] = output.ended
    if watch is not None:
        watch += engine.runner.port.slices
    return [ended[f"r{i}"] for i in range(len(tiers))]


def texts(ended):
    return [each.request.output_ids for each in ended]


def test_the_full_tier_of_split_experts_answers_as_the_plain_model(plain, split, gates):
    assert texts(answers(split, [0, 0, 0], gates)) == texts(answers(plain, [0, 0, 0]))


def test_every_row_runs_exactly_its_tier(split, gates):
    seen: list[torch.Tensor] = []
    answers(split, [4, 9, 0, 15], gates, seen)
    counts = {int(count) for rows in seen for count in rows}
    assert counts == {4, 9, 15, FULL}
    decode = [rows for rows in seen if len(rows) == 4]
    assert decode and all(rows.tolist() == [4, 9, FULL, 15] for rows in decode)


def test_a_tier_in_a_batch_answers_as_alone(split, gates):
    together = texts(answers(split, [6, 0, 11], gates))
    for index, tier in enumerate([6, 0, 11]):
        alone = [0, 0, 0]
        alone[index] = tier
        assert texts(answers(split, alone, gates))[index] == together[index]
    assert texts(answers(split, [6, 0, 11], gates, max_rows=9)) == together, "prompts in chunks"


def test_the_bill_says_the_tier_and_what_was_dropped(split, gates):
    bills = [each.bill for each in answers(split, [4, 8, 12, 0], gates)]
    assert [bill.get("K") for bill in bills] == [4, 8, 12, None]
    dropped = [bill["dropped"] for bill in bills]
    assert dropped == sorted(dropped, reverse=True) and dropped[0] > 0 and dropped[3] == 0
    for bill in bills:
        shares = sum(
            bill[name] for name in ("exact_here", "exact_elsewhere", "substituted", "deferred", "dropped")
        )
        assert shares == pytest.approx(1)


def test_blocks_of_one_tier_are_not_those_of_another():
    tags = {Request("r", [5], SamplingParams(), 0.0, tier=tier).exactness for tier in range(16)}
    assert len(tags) == 16 and "exact" in tags


def test_dropped_mass_is_weighed_by_layer_and_booked_by_request():
    mass = DroppedMass({0: 0.5, 1: 2.0})
    mass.begin_step(np.array([0, 0, 1]), 2)
    mass.add_layer(0, np.array([0.2, 0.4, 0.0], dtype=np.float32))
    mass.add_layer(1, np.array([0.1, 0.1, 0.3], dtype=np.float32))
    mass.end_step(["a", "b"])
    found = mass.take("a")
    assert found.mass == pytest.approx(0.2) and found.loss == pytest.approx((0.3 + 0.4) / 2)
    assert mass.take("b").loss == pytest.approx(0.6)
    assert mass.take("b") == Dropped(0.0, 0.0)
    assert sliced_bill({"exact_here": 1.0}, 9, found)["exact_here"] == pytest.approx(0.8)


def test_all_slices_here_are_the_experts_to_1e_5(split, parts):
    from edge_runtime.model.moe import Slices

    x, ids = torch.randn(7, 256), torch.stack([torch.randperm(32)[:4] for _ in range(7)]).int()
    local = LocalExperts(split.store)
    whole, out = torch.empty(28, 256), torch.empty(28, 256)
    local.run(1, x, ids, whole)
    total = torch.zeros(28, 256)
    for s in range(N):
        local.run(1, x, ids, out, None, Slices(torch.full((7, 4), 1 << s, dtype=torch.int32), N))
        total += out
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5)
