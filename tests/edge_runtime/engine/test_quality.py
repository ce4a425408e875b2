"""Requests with a quality budget in an engine: what is exact stays so to the bit, and what is spent is on the bill."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.cache.prefix import chain_seed
from edge_runtime.engine.engine import Ended
from edge_runtime.engine.quality import WAYS, user_of
from edge_runtime.engine.request import Request, SamplingParams, check_params
from edge_runtime.errors import RequestError
from tests.support.elsewhere import Elsewhere, budget_engine, selector_of, some_elsewhere
from tests.support.engines import Whole, answers_of, engine_of, run_to_end

HOSTS = some_elsewhere(6, 32)
PROMPTS = {"a": [5, 80, 900, 33, 7], "b": [1000, 5, 6, 42] * 6, "c": list(range(300, 350))}


@pytest.fixture(scope="module")
def exact(whole) -> dict[str, list[int]]:
    return answers_of(engine_of(whole), PROMPTS)


def port(whole: Whole, **options: object) -> Elsewhere:
    return Elsewhere(whole, HOSTS, selector_of(6, 32, 2, **options))


def request(name: str, quality: object = "exact", *, tokens: int = 16, **options: object) -> Request:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, quality=quality)  # type: ignore[arg-type]
    return Request(name, PROMPTS[name[0]], params, 0.0, **options)  # type: ignore[arg-type]


def run(engine, *requests: Request) -> dict[str, Ended]:
    for each in requests:
        engine.submit(each)
    ended = run_to_end(engine)
    assert not len(engine.books), "a spending is left of a request that ended"
    return ended


@pytest.mark.parametrize("policy", ["paper", "live"])
def test_budget_zero_is_the_exact_run_whoever_else_spends(whole, exact, policy):
    engine = budget_engine(whole, port(whole, policy=policy))
    ended = run(engine, request("a"), request("b", 0.5), request("c", 0))
    assert ended["a"].request.output_ids == exact["a"] and ended["c"].request.output_ids == exact["c"]
    for name in "ac":
        bill = ended[name].bill
        assert bill["substituted"] == bill["dropped"] == bill["budget_spent"] == 0.0


def test_alone_with_a_budget_nobody_is_called_where_the_loss_is_worth_it(whole):
    thrifty, generous = port(whole), port(whole)
    run(budget_engine(whole, thrifty), request("b", tokens=96))
    ended = run(budget_engine(whole, generous), request("b", 0.5, tokens=96))
    prompt_calls = 6 * 2
    assert generous.calls - prompt_calls < 0.5 * (thrifty.calls - prompt_calls)
    bill = ended["b"].bill
    shares = [bill[key] for key in ("exact_here", "exact_elsewhere", "substituted", "deferred", "dropped")]
    assert sum(shares) == pytest.approx(1.0) and min(shares) >= 0
    assert bill["substituted"] > 0.05 and 0 < bill["budget_spent"] <= 96 * 0.5


@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.002, 0.01, 0.1])), min_size=1, max_size=5
    ),
    st.sampled_from(["paper", "live"]),
    st.booleans(),
)
def test_nobody_spends_more_than_the_tokens_have_earned(whole, asked, policy, shared):
    engine = budget_engine(whole, port(whole, policy=policy))
    requests = [
        request(f"{name}{at}", budget, tokens=8, user="ann" if shared else "")
        for at, (name, budget) in enumerate(asked)
    ]
    ended = run(engine, *requests)
    spent = {each.request_id: ended[each.request_id].bill["budget_spent"] for each in requests}
    if shared:
        assert sum(spent.values()) <= sum(8 * each.budget for each in requests) * (1 + 1e-9)
        assert engine.books.ledgers.of("ann").spent == pytest.approx(sum(spent.values()), abs=1e-12)
    else:
        assert all(spent[each.request_id] <= 8 * each.budget * (1 + 1e-9) for each in requests)
        assert len(engine.books.ledgers) == 0, "ledgers of requests without a user go with them"


def test_the_prompt_is_computed_exactly_whatever_the_budget(whole, exact):
    engine = budget_engine(whole, port(whole))
    ended = run(engine, request("b", 1.0, tokens=1), request("c", 1.0, tokens=1))
    assert [ended[name].request.output_ids[0] for name in "bc"] == [exact["b"][0], exact["c"][0]]
    assert all(ended[name].bill["budget_spent"] == 0 for name in "bc")


def test_an_exact_request_never_finds_blocks_of_one_that_spends_nor_one_of_a_smaller_budget(whole, exact):
    engine = budget_engine(whole, port(whole))
    first = run(engine, request("b", 0.5, tokens=40))["b"].request
    for name, quality, finds in (("b1", "exact", 0), ("b2", 0.01, 0), ("b3", 0.5, 48)):
        again = request(name, quality)
        again.prompt_ids = list(first.tokens)
        again.tokens = list(first.tokens)
        assert run(engine, again)[name].request.num_cached == finds, quality
    seeds = {chain_seed("m", "t", "", request("a", quality).exactness) for quality in ("exact", 0, 0.5, 0.01)}
    assert len(seeds) == 3


def test_a_trace_tells_of_each_layer_and_adds_up_to_the_bill(whole):
    engine = budget_engine(whole, port(whole, policy="paper"))
    ended = run(engine, request("b", 0.5, trace=True), request("c", trace=True), request("a"))
    assert ended["a"].trace is None
    for name in "bc":
        trace, bill = ended[name].trace, ended[name].bill
        assert [entry["layer"] for entry in trace] == list(range(6))
        for way in WAYS:
            mean = np.mean([entry[way] for entry in trace])
            assert mean == pytest.approx(bill[way], abs=1e-5), "every layer has the same weight"
    assert any(entry["substituted"] > 0 for entry in ended["b"].trace)


def test_what_is_dropped_is_on_the_bill_and_nobody_is_called_for_it(whole):
    dropping = port(whole, left_out=1e-6)
    ended = run(budget_engine(whole, dropping), request("b", 0.5, trace=True))
    bill = ended["b"].bill
    assert bill["dropped"] > 0.1 and bill["substituted"] == 0.0
    assert sum(bill[way] for way in ("exact_here", "exact_elsewhere", "dropped")) == pytest.approx(1.0)
    assert dropping.calls <= 6 * 2, "the prompt's, and none after"


def test_what_comes_late_is_on_the_bill_and_costs_little_beside_stand_ins(whole, exact):
    late = port(whole, late=1e-6, loss=10.0)
    ended = run(budget_engine(whole, late), request("b", 0.01, tokens=40, trace=True), request("c"))
    bill, trace = ended["b"].bill, ended["b"].trace
    assert late.lates > 0 and bill["deferred"] > 0.05 and bill["substituted"] == 0.0
    assert sum(bill[way] for way in WAYS) == pytest.approx(1.0)
    assert trace[-1]["deferred"] == 0.0, "behind the last layer there is none"
    assert 0 < bill["budget_spent"] <= 40 * 0.01
    assert ended["c"].request.output_ids == exact["c"]


def test_what_comes_late_is_added_whole_one_layer_on(whole):
    """The sum of all outputs is what it was: a model whose next layer does not look at it gives the same."""
    late, exact_port = port(whole, late=0.0, loss=10.0), Elsewhere(whole, HOSTS, None)
    found, expected = budget_engine(whole, late), engine_of(whole, port=exact_port)
    for engine, quality in ((found, 0.01), (expected, "exact")):
        engine.submit(request("b", quality, tokens=2))
    ended = [run_to_end(engine)["b"].request.output_ids for engine in (found, expected)]
    assert ended[0][0] == ended[1][0] and late.lates > 0


def test_spendings_go_along_to_another_engine(whole):
    old, new = (budget_engine(whole, port(whole)) for _ in range(2))
    old.submit(request("b", 0.5, user="ann"))
    for _ in range(6):
        old.step()
    spent = old.books.ledgers.of("ann").spent
    assert spent > 0 and new.take_over(old) == []
    ended = run_to_end(new)["b"]
    assert ended.bill["budget_spent"] > spent
    assert new.books.ledgers.of("ann").spent == pytest.approx(ended.bill["budget_spent"])


def test_a_request_that_moves_home_goes_on_with_what_it_had_earned_and_spent(whole):
    """As where the first home is lost: the second one knows the tokens and what the first one said of the ledger."""
    first, second, other = (budget_engine(whole, port(whole)) for _ in range(3))
    begun = request("b", 0.05, tokens=60)
    first.submit(begun)
    while len(begun.output_ids) < 20:
        first.step()
    credit, spent = begun.ledger
    assert credit == first.books.ledgers.left(user_of(begun)) > 0 and 0 < spent <= 20 * 0.05

    def moved(ledger: tuple[float, float], user: str = "") -> Request:
        params = SamplingParams(max_tokens=60, ignore_eos=True, quality=0.05)
        made = Request("b", PROMPTS["b"], params, 0.0, ledger=ledger, user=user)
        made.output_ids, made.tokens = list(begun.output_ids), list(begun.tokens)
        return made

    bill = run(second, moved((credit, spent)))["b"].bill
    assert spent < bill["budget_spent"] <= 60 * 0.05 * (1 + 1e-9)
    huge = run(other, moved((1e9, spent)))["b"].bill
    assert huge["budget_spent"] + huge["budget_left"] <= spent + (32 + 40) * 0.05 * (1 + 1e-9), (
        "as full as one gets"
    )
    named = budget_engine(whole, port(whole))
    assert run(named, moved((credit, spent), user="ann"))["b"].bill["budget_spent"] > spent
    ledger = named.books.ledgers.of("ann")
    assert ledger.earned <= 40 * 0.05 * (1 + 1e-9), "a user's other requests may have it elsewhere"


@pytest.mark.parametrize("quality", [-0.1, 1.01, 1e300, "best", float("nan")])
def test_budgets_out_of_range_are_refused_in_one_sentence(quality):
    with pytest.raises(
        RequestError, match=r'quality is .*; allowed is "exact", "balanced", "fast", or a mean'
    ):
        check_params(SamplingParams(quality=quality), 100)
