"""Which home a request goes to."""

from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.routing.base import HomeLoad, Question, pressure
from edge_runtime.routing.baselines import LeastPressure

loads = st.builds(
    HomeLoad,
    st.sampled_from(["a", "b", "c", "d"]),
    st.integers(0, 50),
    st.integers(1, 16),
    st.sampled_from([0.5, 1.0, 2.0]),
)


def choose_home(loads):
    """The home with the least pressure."""
    return loads[LeastPressure().choose(Question(), loads)].node


def test_the_first_of_equals_is_taken():
    assert choose_home([HomeLoad("a", 2, 8), HomeLoad("b", 2, 8)]) == "a"


def test_one_that_waits_weighs_as_four_that_run():
    assert pressure(HomeLoad("a", 3, 2)) == 4 + 2
    assert choose_home([HomeLoad("a", 3, 2), HomeLoad("b", 5, 8)]) == "b"


def test_a_home_twice_as_fast_takes_twice_as_many():
    assert choose_home([HomeLoad("slow", 3, 8), HomeLoad("fast", 5, 8, speed=2.0)]) == "fast"
    assert choose_home([HomeLoad("slow", 3, 8), HomeLoad("fast", 7, 8, speed=2.0)]) == "slow"


@given(st.lists(loads, min_size=1, max_size=6, unique_by=lambda load: load.node))
def test_nobody_has_less_pressure_than_the_chosen_one(loads):
    chosen = choose_home(loads)
    [load] = [load for load in loads if load.node == chosen]
    assert pressure(load) == min(map(pressure, loads))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 40))
def test_equal_homes_that_are_filled_one_by_one_differ_by_one_at_most(slots, count):
    in_flight = [0] * len(slots)
    for _ in range(count):
        loads = [HomeLoad(str(i), n, 8) for i, n in enumerate(in_flight)]
        in_flight[int(choose_home(loads))] += 1
    assert max(in_flight) - min(in_flight) <= 1
