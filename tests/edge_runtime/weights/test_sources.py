"""From whom weights are taken: reliable before fast, peers before the coordinator, never one that has just failed."""

from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.weights.pacing import Pacer
from edge_runtime.weights.sources import MAX_RETRY_S, Source, choose_source, failed

COORDINATOR = Source("coordinator", is_coordinator=True)
FAST, SLOW = Source("fast", 1e9), Source("slow", 1e6)
ALL = [COORDINATOR, SLOW, FAST]


def test_a_peer_comes_before_the_coordinator_and_a_fast_one_before_a_slow_one():
    assert choose_source(ALL, {"coordinator": 4, "slow": 4, "fast": 1}, "me", 0.0) == "fast"
    assert choose_source(ALL, {"coordinator": 4, "slow": 4}, "me", 0.0) == "slow"
    assert choose_source(ALL, {"coordinator": 4, "slow": 0}, "me", 0.0) == "coordinator"
    assert choose_source(ALL, {}, "me", 0.0) is None


def test_one_that_failed_comes_last_and_not_before_its_time():
    broken = failed(FAST, 10.0)
    assert choose_source([COORDINATOR, broken], {"coordinator": 1, "fast": 1}, "me", 100.0) == "coordinator"
    assert choose_source([broken], {"fast": 1}, "me", 10.5) is None
    assert choose_source([broken], {"fast": 1}, "me", 11.0) == "fast"


def test_takers_of_equal_sources_spread():
    equal = [Source(f"s{i}", 1e9) for i in range(4)]
    held = {source.name: 1 for source in equal}
    assert len({choose_source(equal, held, f"n{i}", 0.0) for i in range(20)}) == 4


@given(st.integers(1, 40))
def test_a_source_that_fails_again_and_again_is_still_tried_now_and_then(times):
    source = FAST
    for _ in range(times):
        source = failed(source, 100.0)
    assert 100.0 < source.retry_at_s <= 100.0 + MAX_RETRY_S


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=20), st.floats(1e3, 1e9))
def test_what_leaves_keeps_to_the_rate(sizes, rate_bps):
    pacer, now = Pacer(rate_bps), 5.0
    for size in sizes:
        now += pacer.wait_s(now)
        pacer.spend(size, now)
    assert now + pacer.wait_s(now) >= 5.0 + 8 * sum(sizes) / rate_bps * (1 - 1e-9)
    assert Pacer(None).wait_s(now) == 0.0


def test_idle_time_is_not_saved_up():
    pacer = Pacer(8.0)
    pacer.spend(1, 0.0)
    assert pacer.wait_s(100.0) == 0.0
    pacer.spend(10, 100.0)
    assert pacer.wait_s(100.0) == 10.0
