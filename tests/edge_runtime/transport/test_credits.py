import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.errors import ProtocolError
from edge_runtime.transport.credits import Window


@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 25)), max_size=60))
def test_what_is_on_its_way_never_passes_the_limit_and_equals_takes_minus_gives(limit, steps):
    window, expected = Window(limit), 0
    for takes, count in steps:
        if takes:
            came = window.take(count)
            assert came is (expected + count <= limit)
            expected += count * came
        elif count <= expected:
            window.give(count)
            expected -= count
        else:
            with pytest.raises(ProtocolError):
                window.give(count)
        window.check()
        assert (window.in_flight, window.free) == (expected, limit - expected)


def test_a_peer_that_gives_back_more_than_was_taken_is_at_fault():
    window = Window(4)
    window.take(2)
    with pytest.raises(ProtocolError, match="3 credits were given back but 2"):
        window.give(3)
    with pytest.raises(ProtocolError):
        window.give(-1)


def test_a_new_connection_starts_with_all_credits():
    window = Window(2)
    assert window.take(2)
    assert not window.take()
    window.reset()
    assert window.take()
