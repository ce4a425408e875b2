"""Replays of gate choices: what is drawn, what is counted, who wins where homes differ."""

import numpy as np
import pytest

from edge_runtime.errors import ConfigError
from edge_runtime.routing.baselines import RoundRobin, ShortestQueue
from testbed.routing.experiment import Bench, Row, append_csv, read_csv, run_table, table, workloads
from testbed.routing.overhead import overheads
from testbed.routing.overhead import table as overhead_table
from testbed.routing.replay import Arrival, Costs, arrivals, curves, replay
from testbed.routing.traces import Geometry, Traces, load, save, saving, synthetic

SMALL = Geometry("small", 8, 32, 4, fewer=0.25, correlation=0.9, layers=2)
COSTS = Costs(fixed=1e-3, per_row=0.0, per_expert=1e-5, base_experts=0.0, prefill_per_token=1e-6)


@pytest.fixture(scope="module")
def drawn() -> Traces:
    return synthetic(SMALL, 300)


def two_requests() -> Traces:
    """Request 0 always uses experts 0 and 1, request 1 experts 2 and 3; one layer of four."""
    choices = [np.tile([[[0, 1]]], (3, 1, 1)), np.tile([[[2, 3]]], (3, 1, 1))]
    prefill = np.array([[[5, 5, 0, 0]], [[0, 0, 5, 5]]], dtype=np.int16)
    return Traces(prefill, prefill / 10, choices, np.array([0, 1]), ("a", "b"), np.array([10, 10]))


def test_domains_are_drawn_as_far_apart_as_wanted(drawn):
    assert saving(drawn, 32, 5) == pytest.approx(SMALL.fewer, abs=0.07)
    K = drawn.choices[0].shape[2]
    assert all(len(set(token)) == K for token in drawn.choices[0].reshape(-1, K).tolist())
    assert (drawn.decode_counts.sum(axis=2) == 64 * K).all()


def test_what_is_kept_is_what_was_recorded(drawn, tmp_path):
    save(drawn, tmp_path / "traces.npz")
    again = load(tmp_path / "traces.npz")
    assert (again.prefill == drawn.prefill).all() and again.domains == drawn.domains
    assert all((a == b).all() for a, b in zip(again.choices, drawn.choices, strict=True))


def test_masks_are_the_choices_bit_by_bit(drawn):
    _, L, E = drawn.prefill.shape
    for choices, masks in zip(drawn.choices[:3], drawn.masks[:3], strict=True):
        for token, mask in zip(choices, masks, strict=True):
            bits = {layer * E + int(expert) for layer in range(L) for expert in token[layer]}
            assert {bit for bit in range(L * E) if mask >> bit & 1} == bits


def test_a_step_costs_what_its_distinct_experts_cost():
    work = [Arrival(0, 0.0), Arrival(1, 0.0)]
    signatures = np.zeros((2, 1), dtype=np.float32)
    apart = replay(two_requests(), work, RoundRobin(), signatures, COSTS, num_homes=2, warm_up=0.0)
    together = replay(two_requests(), work, RoundRobin(), signatures, COSTS, num_homes=1, warm_up=0.0)
    assert apart.distinct == 2 and apart.tpot_p50 == pytest.approx(1.02)
    assert together.distinct == 3 and together.tpot_p50 > apart.tpot_p50
    held = np.array([[[True, True, False, False]], [[True, True, False, False]]])
    away = replay(
        two_requests(), work, RoundRobin(), signatures, COSTS, num_homes=2, resident=held, warm_up=0.0
    )
    assert away.remote_calls == 1  # the second request's two of every two, the first one's none


def test_every_request_is_served_once_and_order_of_ties_is_fixed(drawn):
    shares = workloads(drawn.domains)["even"]
    work = arrivals(drawn, 120, 200.0, np.random.default_rng(1), shares)
    assert all(a.at_s < b.at_s for a, b in zip(work, work[1:], strict=False))
    signatures = np.zeros((300, 1), dtype=np.float32)
    first, again = (replay(drawn, work, ShortestQueue(3), signatures, COSTS, num_homes=3) for _ in range(2))
    assert first == again


def test_eldr_touches_fewer_experts_than_round_robin_and_joint_placement_calls_less(drawn, tmp_path):
    fit, serve = drawn.of(range(180)), drawn.of(range(180, 300))
    options = {
        "num_homes": 4,
        "loads": [8.0],
        "seeds": 2,
        "costs": COSTS,
        "num_requests": 200,
        "only": ["even"],
    }
    policies = ["round_robin", "eldr", "eldr joint", "eldr tau=1"]
    path = tmp_path / "rows.csv"
    run_table(fit, serve, **options, policies=policies[:2], keep=lambda row: append_csv(row, path))
    known = read_csv(path)
    made = []
    rows = run_table(fit, serve, **options, policies=policies, known=known, keep=made.append)
    assert [row.policy for row in made] == policies[2:], "what was kept is not made again"
    of = {row.policy: row for row in rows}
    assert of["eldr"].values("distinct")[0] < 0.93 * of["round_robin"].values("distinct")[0]
    assert of["eldr joint"].values("remote_calls")[0] < 0.9 * of["eldr"].values("remote_calls")[0]
    assert table(rows).count("\n") == 5
    assert len(path.read_text().splitlines()) == 1 + 2 * 2
    assert known[0].values("tpot_p50")[0] == pytest.approx(rows[0].values("tpot_p50")[0], rel=1e-5)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="is no table of routers"):
        read_csv(path)


def test_all_homes_hold_equally_many_and_every_expert_is_somewhere(drawn):
    bench = Bench(drawn, drawn, workloads(drawn.domains)["even"], 4)
    for kind in ("joint", "blind"):
        held = bench.resident(kind)
        assert (held.sum(axis=2) == 16).all() and held.any(axis=0).all()


def test_language_shares_are_skewed_and_the_drift_changes_half_way():
    names = ("c", "de", "en_prose", "fr", "ru", "sql")
    found = workloads(names)
    language = found["language"](0.0)
    assert sorted(language)[-2:] == pytest.approx([0.3, 0.45]) and language.sum() == pytest.approx(1)
    assert (found["drift"](0.2) == found["task"](0.0)).all()
    assert (found["drift"](0.9) == language).all()
    assert Row("task", 2, 1.0, "x", ()).num_homes == 2


def test_steps_are_held_against_batches_of_their_size(drawn):
    even = np.ones(len(drawn.domains))
    found = curves(drawn, even, 16, np.random.default_rng(2))
    assert found.mixed[0] == 0 and found.mixed[1] == pytest.approx(4) == found.alone[1]
    assert (np.diff(found.mixed) > 0).all() and (found.alone[4:] < found.mixed[4:]).all()
    shares = workloads(drawn.domains)["even"]
    work = arrivals(drawn, 300, 400.0, np.random.default_rng(1), shares)
    signatures = np.zeros((300, 1), dtype=np.float32)
    outcome = replay(drawn, work, RoundRobin(), signatures, COSTS, num_homes=4, compared=[found, found])
    assert outcome.saved == pytest.approx(0, abs=0.03) and abs(outcome.gap) < 0.15
    one = curves(drawn, np.eye(len(drawn.domains))[0], 16, np.random.default_rng(2))
    assert one.mixed == pytest.approx(one.alone, rel=0.1), "a mix of one domain has no gap"


def test_the_default_rule_gains_without_making_homes_unequal(drawn):
    fit, serve = drawn.of(range(180)), drawn.of(range(180, 300))
    rows = run_table(
        fit,
        serve,
        num_homes=4,
        loads=[8.0],
        seeds=2,
        costs=COSTS,
        num_requests=300,
        only=["skewed"],
        policies=["jsq", "eldr", "eldr fixed", "eldr counts", "eldr affinity=1", "eldr tau=0.1"],
    )
    of = {row.policy: row for row in rows}
    assert of["eldr"].values("gap")[0] > 0.3 > 0.15 > abs(of["jsq"].values("gap")[0])
    assert of["eldr"].values("tpot_p50")[0] < of["jsq"].values("tpot_p50")[0]
    assert of["eldr"].values("imbalance")[0] < 1.5
    assert len(overhead_table(overheads(layers=2, experts=8, homes=2, prompt_tokens=40)).splitlines()) == 11
