"""Requests at several tiers in one engine: each runs what it asked for, and the full tier is the plain model."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.artifacts import Artifact, write_section
from edge_runtime.elastic.gates import ProxyGates
from edge_runtime.elastic.sub_experts import SubExperts, read_sub_experts
from edge_runtime.engine.dropped import Dropped, DroppedMass, sliced_bill
from edge_runtime.engine.request import Request, SamplingParams
from edge_runtime.errors import ArtifactError
from edge_runtime.model.build import add_experts, empty_store
from edge_runtime.model.moe import LocalExperts
from tests.support.decoders import all_experts
from tests.support.elsewhere import Elsewhere, books_on, budget_engine, selector_of, some_elsewhere
from tests.support.engines import Whole, engine_of, pipeline_of, placed_experts, run_to_end, whole_model

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

    def banks_here(self):
        return {}  # so that every layer comes by here

    def add_here(self, layer, x, expert_ids, gate_weights, hidden, out, slices=None):
        masks = torch.full(expert_ids.shape, 15) if slices is None else slices.masks
        self.slices.append(sum((masks >> s) & 1 for s in range(N)).sum(1))
        return self.port.add_here(
            layer, x, expert_ids, gate_weights, hidden, out, *(() if slices is None else (slices,))
        )


def answers(whole, tiers, gates=None, watch=None, max_rows=64, cuts=()):
    if cuts:
        engine = pipeline_of(whole, cuts, max_rows=max_rows)
        for runner in (engine.runner, *(stage.runner for stage in engine.stages.stages)):
            runner.gates = gates
    else:
        port = placed_experts(whole)
        engine = engine_of(whole, port=Watched(port) if watch is not None else port, max_rows=max_rows)
        engine.runner.gates = gates
    prompts = [[5 + 7 * i, 90 + i, 400, 33, 12 + i] for i in range(len(tiers))]
    for i, (tier, prompt) in enumerate(zip(tiers, prompts, strict=True)):
        params = SamplingParams(max_tokens=6, seed=0, ignore_eos=True)
        engine.submit(Request(f"r{i}", prompt, params, 0.0, tier=tier))
    ended = run_to_end(engine)
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


@pytest.mark.parametrize("cuts", [[3], [1], [1, 3, 4]])
@pytest.mark.parametrize("tiers", [[6, 0, 11, 15], [4], [0, 0]])
def test_tiers_over_stages_are_those_of_one_node_tokens_and_bill(split, gates, cuts, tiers):
    expected, found = answers(split, tiers, gates), answers(split, tiers, gates, cuts=cuts)
    assert texts(found) == texts(expected)
    for one, staged in zip(expected, found, strict=True):
        assert staged.bill == pytest.approx(one.bill, rel=1e-6)


def test_a_stage_with_whole_experts_refuses_rows_at_a_tier(split, gates):
    engine = pipeline_of(split, [3])
    engine.runner.gates = gates
    engine.submit(Request("r", [5, 90, 400], SamplingParams(max_tokens=2), 0.0, tier=4))
    engine.step()
    result, *_ = engine.stages.results[0]
    assert result.outcome == "lost" and "experts are whole here" in result.why


def test_the_bill_says_the_tier_and_what_was_dropped(split, gates):
    bills = [each.bill for each in answers(split, [4, 8, 12, 0], gates)]
    assert [bill.get("K") for bill in bills] == [4, 8, 12, 16]
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
    mass = DroppedMass()
    mass.begin_step(np.array([0, 0, 1]), 2)
    for dropped, sensitivity, ran in (([0.2, 0.4, 0.0], 0.5, [4, 4, 16]), ([0.1, 0.1, 0.3], 2.0, [8, 4, 16])):
        share = np.array(dropped, dtype=np.float32)
        mass.add_layer(share, sensitivity * share, np.array(ran))
    mass.end_step(["a", "b"])
    found = mass.take("a")
    assert found.mass == pytest.approx(0.2) and found.loss == pytest.approx((0.3 + 0.4) / 2)
    assert found.ran == 5
    assert mass.take("b").loss == pytest.approx(0.6)
    assert mass.take("b") == Dropped(0.0, 0.0)
    bill = sliced_bill({"exact_here": 0.9, "dropped": 0.1}, 9, found)
    assert bill["exact_here"] == pytest.approx(0.72) and bill["dropped"] == pytest.approx(0.28)


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


def priced(parts: SubExperts, loss: float) -> SubExperts:
    """The same experts, of which leaving all of a layer out costs so much."""
    return parts._replace(drop_loss=dict.fromkeys(range(6), loss), power=2.0)


def with_budgets(split, gates, asked, *, hosts=None, tokens=12, cuts=(), **options):
    """Requests of (tier, quality) in one engine with books, or over stages: how each ended, and what rows ran."""

    def port(name: str = "") -> Elsewhere:
        return Elsewhere(
            split, np.zeros((6, 32), np.int32) if hosts is None else hosts, selector_of(6, 32, 2)
        )

    if cuts:
        engine = pipeline_of(split, cuts, port=port)
        engine.books = books_on(engine.runner.port)
        runners = [engine.runner, *(stage.runner for stage in engine.stages.stages)]
    else:
        engine = budget_engine(split, port())
        runners = [engine.runner]
    for runner in runners:
        runner.gates = gates
    for i, (tier, quality) in enumerate(asked):
        params = SamplingParams(max_tokens=tokens, seed=0, ignore_eos=True, quality=quality)
        engine.submit(Request(f"r{i}", [5 + 7 * i, 90 + i, 400], params, 0.0, tier=tier, **options))
    ended = run_to_end(engine)
    assert not len(engine.books)
    return [ended[f"r{i}"] for i in range(len(asked))]


def test_what_a_tier_leaves_out_is_paid_from_the_ledger_and_without_a_budget_by_nobody(plain, split, parts):
    gates = ProxyGates(plain.checkpoint, priced(parts, 0.02), range(6))
    paid, free = with_budgets(split, gates, [(6, 0.5), (6, "exact")])
    assert paid.bill["budget_spent"] == pytest.approx(11 * paid.bill["dropped_loss"], rel=0.5)
    assert paid.bill["K_run"] == free.bill["K_run"] == 6, "a budget that is rich enough changes nothing"
    assert free.bill["budget_spent"] == 0 and free.bill["dropped_loss"] > 0
    [alone] = with_budgets(split, gates, [(6, "exact")])
    assert alone.request.output_ids == paid.request.output_ids


@settings(max_examples=10)
@given(
    st.lists(
        st.tuples(st.sampled_from([2, 6, 11, 0]), st.sampled_from([0.0005, 0.003, 0.02])),
        min_size=1,
        max_size=4,
    ),
    st.floats(0.01, 2.0),
    st.booleans(),
)
def test_nobody_overdraws_and_nobody_runs_below_its_tier(plain, split, parts, asked, loss, is_here):
    gates = ProxyGates(plain.checkpoint, priced(parts, loss), range(6))
    ended = with_budgets(
        split, gates, asked, hosts=None if is_here else some_elsewhere(6, 32), tokens=6, user="ann"
    )
    earned = sum(6 * quality for _, quality in asked)
    assert sum(each.bill["budget_spent"] for each in ended) <= earned * (1 + 1e-9)
    for each, (tier, _) in zip(ended, asked, strict=True):
        if tier:
            assert tier <= each.bill["K_run"] <= FULL
        shares = [
            each.bill[name]
            for name in ("exact_here", "exact_elsewhere", "substituted", "deferred", "dropped")
        ]
        assert sum(shares) == pytest.approx(1) and min(shares) >= 0


@pytest.mark.parametrize("cuts", [[3], [1, 3, 4]])
def test_tiers_that_pay_from_a_ledger_raise_k_over_stages_as_on_one_node(plain, split, parts, cuts):
    gates = ProxyGates(plain.checkpoint, priced(parts, 2.0), range(6))
    asked = [(4, 0.01), (9, 0.003), (6, "exact"), (0, 0.1)]
    expected = with_budgets(split, gates, asked)
    found = with_budgets(split, gates, asked, cuts=cuts)
    assert expected[0].bill["K_run"] > 4
    for one, staged in zip(expected, found, strict=True):
        assert staged.request.output_ids == one.request.output_ids
        assert staged.bill == pytest.approx(one.bill, rel=1e-6, abs=1e-9)


def test_k_is_raised_to_what_a_budget_covers(plain, split, parts):
    dear = ProxyGates(plain.checkpoint, priced(parts, 5.0), range(6))
    ran = [with_budgets(split, dear, [(4, quality)])[0].bill for quality in (0.0001, 0.01, 0.1, 1.0)]
    raised = [bill["K_run"] for bill in ran]
    assert raised == sorted(raised, reverse=True) and raised[0] > raised[-1] > 4
    assert [bill["K"] for bill in ran] == [4] * 4
    assert all(
        bill["budget_spent"] <= 12 * quality
        for bill, quality in zip(ran, (0.0001, 0.01, 0.1, 1.0), strict=True)
    )


def test_the_least_tier_that_fits_is_found_and_no_lower_one():
    from edge_runtime.elastic.gates import least_within

    wanted = torch.tensor([5, 6, 11, 16, 15], dtype=torch.int32)
    found = least_within(torch.tensor([4, 4, 10, 1, 14], dtype=torch.int32), 16, lambda tier: tier >= wanted)
    assert torch.equal(found, wanted)


def test_the_trace_says_what_each_layer_left_out(plain, split, parts):
    gates = ProxyGates(plain.checkpoint, priced(parts, 0.02), range(6))
    [cheap] = with_budgets(split, gates, [(5, "exact")], trace=True)
    assert len(cheap.trace) == 6
    for layer in cheap.trace:
        assert 0 < layer["dropped"] < 1
        assert layer["dropped"] + layer["exact_here"] == pytest.approx(1, abs=1e-5)
    mean = sum(layer["dropped"] for layer in cheap.trace) / 6
    assert mean == pytest.approx(cheap.bill["dropped"], rel=1e-3)
    [whole] = with_budgets(split, gates, [(0, "exact")], trace=True)
    assert all(layer["dropped"] == 0 for layer in whole.trace)


def uneven(parts: SubExperts) -> SubExperts:
    """Layers that lose the more the deeper they are."""
    losses = {layer: tuple((layer + 1) * (16 - K) ** 2 / 256 for K in range(1, 17)) for layer in range(6)}
    return parts._replace(tier_losses=losses)


def test_a_tier_that_is_split_over_layers_is_met_on_average_and_least_where_it_hurts_least(
    plain, split, parts
):
    known = uneven(parts)
    spread = known.with_splits()
    assert spread.digest != known.digest, "nodes that split and nodes that do not must not work together"
    gates = ProxyGates(plain.checkpoint, spread, range(6))
    seen: list[torch.Tensor] = []
    [cheap, whole] = answers(split, [6, 0], gates, seen)
    decode = torch.stack([rows for rows in seen if len(rows) == 2]).view(-1, 6, 2)
    assert (decode[..., 1] == FULL).all()
    own = decode[0, :, 0].tolist()
    assert own == list(known.split_of(6).values()) and sum(own) == 6 * 6 and own == sorted(own)
    assert own[0] < 6 < own[-1] and (decode[..., 0] == decode[0, :, 0]).all()
    assert cheap.bill["K"] == 6 and cheap.bill["K_run"] == pytest.approx(6)
    assert whole.request.output_ids == answers(plain, [0, 0])[1].request.output_ids
    assert known.split_of(FULL) == dict.fromkeys(range(6), FULL)


def test_splitting_needs_a_measurement(parts):
    with pytest.raises(ArtifactError, match="no section tier_losses; run `edge-runtime calibrate tiers`"):
        parts.with_splits()
