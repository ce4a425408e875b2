"""Quality budgets over stages: what is exact stays so to the bit, and no ledger is overdrawn, whatever is lost on the way."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.engine.engine import Ended
from edge_runtime.engine.pipeline import PipelineEngine
from edge_runtime.engine.request import Request, SamplingParams
from edge_runtime.engine.step_books import WAYS
from edge_runtime.protocol import Allowance
from tests.support.elsewhere import Elsewhere, books_on, budget_engine, selector_of, some_elsewhere
from tests.support.engines import (
    Whole,
    answers_of,
    assert_nothing_left,
    engine_of,
    pipeline_of,
    run_to_end,
    turn,
)

HOSTS = some_elsewhere(6, 32)
HERE = np.zeros_like(HOSTS)
PROMPTS = {"a": [5, 80, 900, 33, 7], "b": [1000, 5, 6, 42] * 6, "c": list(range(300, 350))}
CUTS = [[3], [1, 3, 4]]


@pytest.fixture(scope="module")
def exact(whole: Whole) -> dict[str, list[int]]:
    return answers_of(engine_of(whole), PROMPTS)


def engine_with_books(
    whole: Whole, cuts: list[int], policy: str = "live", *, here: str = "", **options: object
) -> PipelineEngine:
    """Stages that hold a part of their experts each; those named in `here` hold all."""

    def port(name: str) -> Elsewhere:
        if name in here:
            return Elsewhere(whole, HERE, None)
        return Elsewhere(whole, HOSTS, selector_of(6, 32, 2, policy=policy, **options))

    engine = pipeline_of(whole, cuts, port=port)
    engine.books = books_on(engine.runner.port)
    return engine


def request(name: str, quality: object = "exact", *, tokens: int = 16, **options: object) -> Request:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, quality=quality)  # type: ignore[arg-type]
    return Request(name, PROMPTS[name[0]], params, 0.0, **options)  # type: ignore[arg-type]


def run(engine: PipelineEngine, *requests: Request) -> dict[str, Ended]:
    for each in requests:
        engine.submit(each)
    ended = run_to_end(engine)
    assert not len(engine.books), "a spending is left of a request that ended"
    return ended


@pytest.mark.parametrize("cuts", CUTS)
def test_a_budget_of_zero_is_the_exact_run_whoever_else_spends(whole, exact, cuts) -> None:
    ended = run(engine_with_books(whole, cuts), request("a"), request("b", 0.5), request("c", 0))
    assert ended["a"].request.output_ids == exact["a"] and ended["c"].request.output_ids == exact["c"]
    for name in "ac":
        bill = ended[name].bill
        assert bill["substituted"] == bill["dropped"] == bill["budget_spent"] == 0.0


@pytest.mark.parametrize("cuts", CUTS)
def test_stages_spend_one_budget_and_the_bill_adds_up(whole, cuts) -> None:
    engine = engine_with_books(whole, cuts)
    found = run(engine, request("b", 0.5, tokens=64, trace=True))["b"]
    bill = found.bill
    shares = [bill[key] for key in ("exact_here", "exact_elsewhere", "substituted", "deferred", "dropped")]
    assert sum(shares) == pytest.approx(1.0) and min(shares) >= 0
    assert bill["substituted"] > 0.05 and 0 < bill["budget_spent"] <= 64 * 0.5
    assert [entry["layer"] for entry in found.trace] == list(range(6))
    for way in ("exact_here", "exact_elsewhere", "substituted", "dropped"):
        assert np.mean([entry[way] for entry in found.trace]) == pytest.approx(bill[way], abs=1e-5)
    first, last = found.trace[0], found.trace[-1]
    assert first["substituted"] > 0 and last["substituted"] > 0, (
        "the first stage leaves something to the others"
    )
    prompt = {"exact_here", "exact_elsewhere"}
    assert run(engine_with_books(whole, cuts), request("b", 1.0, tokens=1))["b"].bill.keys() >= prompt


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(
    "options",
    [{}, {"policy": "paper"}, {"power": 2.0, "coherence": 0.5, "left_out": 0.03}],
    ids=["live", "paper", "deviations add up"],
)
def test_a_request_alone_spends_over_stages_what_it_spends_on_one_node(whole, cuts, options) -> None:
    """What earlier layers deviate and have spent is known to later ones wherever they are."""
    one = budget_engine(whole, Elsewhere(whole, HOSTS, selector_of(6, 32, 2, **options)))
    expected = run(one, request("b", 0.03, tokens=24))["b"]
    found = run(engine_with_books(whole, cuts, **options), request("b", 0.03, tokens=24))["b"]
    assert expected.bill["budget_spent"] > 0
    assert found.request.output_ids == expected.request.output_ids
    assert found.request.ledger == pytest.approx(expected.request.ledger)
    assert found.bill == pytest.approx(expected.bill, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("cuts", CUTS)
def test_what_comes_late_comes_within_a_stage_and_is_on_the_bill(whole, exact, cuts) -> None:
    engine = engine_with_books(whole, cuts, late=1e-6, loss=10.0)
    ended = run(engine, request("b", 0.01, tokens=40, trace=True), request("c"))
    bill, trace = ended["b"].bill, ended["b"].trace
    assert bill["deferred"] > 0.03 and 0 < bill["budget_spent"] <= 40 * 0.01
    assert sum(bill[way] for way in WAYS) == pytest.approx(1.0)
    assert all(trace[end - 1]["deferred"] == 0.0 for end in [*cuts, 6])
    assert ended["c"].request.output_ids == exact["c"]


def test_of_a_request_that_is_aborted_under_way_nothing_is_left(whole) -> None:
    engine = engine_with_books(whole, [3])
    engine.submit(request("b", 0.1, tokens=40))
    while not (engine.num_under_way and engine.books.ledgers.of("request b").spent):
        turn(engine)
    assert engine.abort("b").ended.bill["budget_left"] > 0
    while not engine.is_idle or engine.num_under_way:
        turn(engine)
    assert len(engine.books) == len(engine.books.ledgers) == 0


def test_where_the_first_stage_has_all_its_experts_the_others_tell_what_spending_is_worth(whole) -> None:
    engine = engine_with_books(whole, [3], here="n1")
    bill = run(engine, request("b", 0.3, tokens=40))["b"].bill
    assert engine.books._prices.start > 0 and bill["substituted"] > 0


asked = st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.002, 0.01, 0.1]))


@settings(max_examples=8, deadline=None)
@given(
    st.lists(asked, min_size=1, max_size=4),
    st.sampled_from(["paper", "live"]),
    st.booleans(),
    st.sampled_from(CUTS),
    st.sets(st.integers(1, 40), max_size=4),
)
def test_nobody_spends_more_than_the_tokens_have_earned_with_several_steps_under_way(
    whole, asked, policy, shared, cuts, lost
) -> None:
    """After some turns everything that is under way is lost."""
    engine = engine_with_books(whole, cuts, policy)
    requests = [
        request(f"{name}{at}", budget, tokens=8, user="ann" if shared else "")
        for at, (name, budget) in enumerate(asked)
    ]
    for each in requests:
        engine.submit(each)
    ended: dict[str, Ended] = {}
    for number in range(2000):
        ended |= {each.request_id: each.ended for each in turn(engine) if each.ended}
        if engine.is_idle:
            break
        if number in lost:
            engine.stages.results.clear()
            engine.abandon_all()
    assert_nothing_left(engine)
    spent = {each.request_id: ended[each.request_id].bill["budget_spent"] for each in requests}
    ledger = engine.books.ledgers.of("ann")
    if shared:
        assert sum(spent.values()) <= sum(8 * each.budget for each in requests) * (1 + 1e-9)
        assert ledger.spent == pytest.approx(sum(spent.values()), abs=1e-12)
        assert ledger.held == pytest.approx(0, abs=1e-12) and ledger.credit >= 0
    else:
        assert all(spent[each.request_id] <= 8 * each.budget * (1 + 1e-9) for each in requests)
        assert len(engine.books.ledgers) == 1, "ledgers of requests without a user go with them"


@pytest.mark.parametrize(
    "lie",
    [
        lambda each: Allowance(each.row, 0.0, 0.0, each.spent + 99.0),
        lambda each: Allowance(each.row + 1, 0.0, 0.0, 0.0),
        lambda each: Allowance(each.row, float("inf"), 0.0, 0.0),
    ],
)
def test_a_stage_that_spends_what_it_was_not_given_is_not_believed(whole, lie) -> None:
    engine = engine_with_books(whole, [3])
    engine.submit(request("b", 0.5))
    for _ in range(200):
        turn(engine)
        if engine.stages.results and engine.stages.results[0][0].allowances:
            break
    result, *tensors = engine.stages.results.popleft()
    wrong = msgspec.structs.replace(result, allowances=[lie(each) for each in result.allowances])
    assert engine.take(wrong, *tensors) == [] and engine.num_under_way == 0
    assert engine.books.ledgers.of("request b").held == 0.0
    found = run_to_end(engine)["b"]
    assert len(found.request.output_ids) == 16 and found.bill["budget_spent"] <= 16 * 0.5


def test_spendings_go_along_to_another_engine_and_what_was_held_is_given_back(whole) -> None:
    old, new = (engine_with_books(whole, [3]) for _ in range(2))
    old.submit(request("b", 0.5, user="ann"))
    while not (old.num_under_way and old.books.ledgers.of("ann").spent):
        turn(old)
    spent = old.books.ledgers.of("ann").spent
    assert new.take_over(old) == []
    assert new.books.ledgers.of("ann").held == pytest.approx(0.0)
    ended = run_to_end(new)["b"]
    assert ended.bill["budget_spent"] > spent
    assert new.books.ledgers.of("ann").spent == pytest.approx(ended.bill["budget_spent"])
