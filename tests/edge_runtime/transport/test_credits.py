import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.transport.credits import MAX_FREE, Window


@given(st.integers(0, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 25)), max_size=60))
def test_never_more_is_taken_than_was_granted_and_all_of_that_can_be(first, steps):
    window, granted, taken = Window(first), first, 0
    for takes, count in steps:
        if takes:
            came = window.take(count)
            assert came is (taken + count <= granted)
            taken += count * came
        else:
            window.give(count)
            granted += count
        assert window.free == granted - taken >= 0


def test_a_receiver_that_grants_without_end_is_not_counted_without_end():
    window = Window(2**62)
    window.give(2**62)
    assert window.free == MAX_FREE


def test_less_than_nothing_is_our_own_fault():
    for wrong in (lambda: Window(-1), lambda: Window(1).take(-1), lambda: Window(1).give(-1)):
        with pytest.raises(AssertionError):
            wrong()
