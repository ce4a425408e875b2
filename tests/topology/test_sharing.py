"""Steps that share processors: alone nothing changes, and no machine ever gives more than it has."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology.sharing import WAKE_S, Turn, shared_seconds

PARTS = st.floats(1e-4, 1e-2)


def turn(serial: float, *, wire: float = 0.0, beside: float = 0.0, machine: str = "m") -> Turn:
    """A step of one machine."""
    return Turn(serial + wire, {machine: serial}, {machine: serial + beside})


def test_alone_on_processors_enough_a_step_takes_what_it_takes() -> None:
    assert shared_seconds([turn(1.0, wire=2.0)], {"m": 2.0}) == pytest.approx([3.0])
    assert shared_seconds([turn(1.0)] * 9, {}) == [1.0] * 9, "a machine of unknown size has enough"


@pytest.mark.parametrize(("count", "cores"), [(4, 2.0), (8, 2.0), (9, 3.0)])
def test_whoever_only_computes_gets_its_share_of_the_processors(count: int, cores: float) -> None:
    assert shared_seconds([turn(1.0)] * count, {"m": cores}) == pytest.approx(
        [count / cores] * count, rel=0.1
    )


def test_time_on_the_wire_is_shared_with_nobody() -> None:
    found = shared_seconds([turn(0.001, wire=0.04)] * 4, {"m": 2.0})
    assert found == pytest.approx([0.041] * 4, rel=0.01)


def test_threads_of_others_and_readers_take_their_part() -> None:
    [calm], [busy] = (shared_seconds([turn(1.0)], {"m": 2.0}, busy) for busy in (0.0, 3.0))
    assert calm == pytest.approx(1.0) and busy == pytest.approx(2.0, rel=0.15)
    [read] = shared_seconds([turn(1.0)], {"m": 1.0}, beside=[{"m": 1.0}])
    assert read == pytest.approx(2.0, rel=0.1)


def test_who_takes_no_more_than_its_share_is_not_held_up_by_others_who_always_want_more() -> None:
    """A quarter of a processor is below an even share of two among six; three quarters are above."""
    [light] = shared_seconds([turn(0.001, wire=0.003)], {"m": 2.0}, 5.0)
    assert light == pytest.approx(0.004)
    [heavy] = shared_seconds([turn(0.003, wire=0.001)], {"m": 2.0}, 5.0)
    assert heavy == pytest.approx(0.004 * (0.75 + 5 * 0.75) / 2)


def test_every_thread_that_is_woken_waits_for_whoever_of_the_others_is_on_its_processor() -> None:
    alone = turn(0.001, wire=0.01)._replace(wakes={"m": 20.0, "elsewhere": 99.0})
    [calm], [one], [two] = (shared_seconds([alone], {"m": 2.0}, busy) for busy in (0.0, 1.0, 2.0))
    assert calm == pytest.approx(0.011)
    assert one - calm == pytest.approx(20 * WAKE_S / 2) and two - one == pytest.approx(one - calm)


def test_a_turn_of_many_light_processes_is_held_up_by_the_hungriest_only() -> None:
    work = {"m": {"a": 0.0008, "b": 0.0006, "c": 0.0006}}
    together = Turn(0.002, {"m": 0.002}, {"m": 0.002})
    apart = together._replace(by_process=work)
    [one], [several] = (shared_seconds([each], {"m": 2.0}, 2.0) for each in (together, apart))
    assert one == pytest.approx(0.003) and several == pytest.approx(0.002)


def test_another_machine_is_not_waited_for() -> None:
    both = shared_seconds([turn(1.0), turn(1.0, machine="n")], {"m": 1.0, "n": 1.0})
    assert both == pytest.approx([1.0, 1.0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(PARTS, PARTS, PARTS), min_size=1, max_size=8), st.integers(1, 4), st.floats(0, 4))
def test_no_step_is_quicker_than_alone_and_no_processor_does_two_things(
    parts: list[tuple[float, float, float]], cores: int, busy: float
) -> None:
    turns = [turn(serial, wire=wire, beside=beside) for serial, wire, beside in parts]
    found = shared_seconds(turns, {"m": float(cores)}, busy)
    assert all(took >= alone.seconds * (1 - 1e-9) for took, alone in zip(found, turns, strict=True))
    given_ = sum(alone.work_s["m"] / took for alone, took in zip(turns, found, strict=True))
    assert given_ <= cores * 1.1
    calm = shared_seconds(turns, {"m": float(cores)})
    assert all(less <= more * (1 + 1e-6) for less, more in zip(calm, found, strict=True))
