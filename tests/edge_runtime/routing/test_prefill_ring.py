"""Prefill routing by the beginning of a prompt."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.routing.prefill_ring import MOST_LOAD, PrefillRing

PROMPTS = [f"prompt number {i}".encode() for i in range(600)]


def test_prompts_that_begin_alike_go_to_one_worker():
    ring = PrefillRing(["a", "b", "c"])
    beginning = b"x" * 1024
    assert {ring.choose(beginning + tail, {}) for tail in PROMPTS} == {ring.choose(beginning, {})}
    assert len({ring.choose(beginning[:1000] + tail, {}) for tail in PROMPTS}) == 3


def test_each_worker_has_its_part():
    shares = Counter(PrefillRing(["a", "b", "c", "d"]).choose(prompt, {}) for prompt in PROMPTS)
    assert min(shares.values()) > 80


def test_a_worker_more_moves_only_what_it_takes():
    small, large = PrefillRing(["a", "b", "c"]), PrefillRing(["a", "b", "c", "d"])
    for prompt in PROMPTS:
        before, after = small.choose(prompt, {}), large.choose(prompt, {})
        assert after in (before, "d")


def test_an_overloaded_worker_is_passed_over_for_the_first_of_the_least_loaded():
    ring = PrefillRing(["a", "b", "c"])
    owner = ring.choose(PROMPTS[0], {})
    others = [worker for worker in ring.workers if worker != owner]
    assert ring.choose(PROMPTS[0], {owner: 2, others[0]: 1, others[1]: 1}) == owner  # 2 <= 1.25 * 5 / 3
    assert ring.choose(PROMPTS[0], {owner: 3, others[0]: 1, others[1]: 1}) == others[0]
    assert ring.choose(PROMPTS[0], {owner: 3, others[0]: 1}) == others[1]


@given(st.lists(st.integers(0, 599), max_size=80), st.integers(1, 5))
def test_no_worker_gets_much_more_than_the_mean(order, num_workers):
    ring = PrefillRing([f"w{i}" for i in range(num_workers)])
    loads: Counter[str] = Counter()
    for index in order:
        worker = ring.choose(PROMPTS[index], loads)
        assert loads[worker] <= MOST_LOAD * (loads.total() + 1) / num_workers
        loads[worker] += 1


def test_a_ring_without_workers_is_refused():
    with pytest.raises(ValueError, match="at least one worker"):
        PrefillRing([])
