"""What a fetch of blocks asks for, and what it takes, whatever the link and the source do."""

from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.cache.handoff import MAX_LOSSES, WINDOW, Ask, BlockFetch


def fetch(num_blocks: int = 10, chunk: int = 4, now: float = 0.0) -> BlockFetch:
    return BlockFetch(num_blocks, chunk_blocks=chunk, now=now, deadline_s=10.0, stall_s=2.0)


def test_chunks_are_asked_for_in_order_a_few_at_a_time():
    found = fetch()
    assert found.asks(0.0) == [Ask(1, 0, 4), Ask(2, 4, 4)]
    assert found.asks(0.1) == []
    assert found.came(1, 4, 0.2, is_sound=True) == Ask(1, 0, 4)
    assert found.asks(0.2) == [Ask(3, 8, 2)]
    assert found.came(2, 4, 0.3, is_sound=True) == Ask(2, 4, 4)
    assert found.came(3, 2, 0.4, is_sound=True) == Ask(3, 8, 2)
    assert found.is_over and found.num_taken == 10 and not found.why


def test_what_was_lost_is_asked_for_again_from_where_it_broke():
    found = fetch()
    found.asks(0.0)
    found.came(1, 4, 0.1, is_sound=True)
    found.lost("the connection broke")
    assert [ask[1:] for ask in found.asks(0.2)] == [(4, 4), (8, 2)]
    assert found.came(2, 4, 0.3, is_sound=True) is None, "an answer to what was asked before the break"
    assert found.num_taken == 4


def test_a_source_that_gave_blocks_away_ends_the_fetch_there():
    found = fetch()
    found.asks(0.0)
    assert found.came(1, 3, 0.1, is_sound=True) == Ask(1, 0, 3)
    assert found.is_over and found.num_taken == 3 and "any more" in found.why
    assert found.came(2, 4, 0.2, is_sound=True) is None


def test_damaged_chunks_are_not_taken_and_not_tried_for_ever():
    found = fetch()
    for _ in range(MAX_LOSSES):
        asks = found.asks(0.0)
        assert found.came(asks[0].number, 4, 0.1, is_sound=False) is None
    assert found.is_over and found.num_taken == 0 and found.why == "a chunk came damaged"


def test_more_blocks_than_were_asked_for_are_damage():
    found = fetch()
    found.asks(0.0)
    assert found.came(1, 5, 0.1, is_sound=True) is None
    assert found.losses == 1


def test_a_source_that_falls_silent_is_not_waited_for():
    found = fetch()
    found.asks(0.0)
    found.came(1, 4, 1.5, is_sound=True)
    assert found.asks(3.4) and not found.is_over
    assert found.asks(3.5) == [] and found.is_over and found.num_taken == 4
    slow = fetch(num_blocks=100, chunk=1)
    now = 0.0
    while not slow.is_over:
        for ask in slow.asks(now):
            slow.came(ask.number, 1, now, is_sound=True)
        now += 1.9
    assert now < 14, "steady, but too slow altogether"


events = st.one_of(
    st.tuples(st.just("came"), st.integers(0, WINDOW), st.sampled_from([1.0, 1.0, 1.0, 0.5]), st.booleans()),
    st.tuples(st.just("stale"), st.integers(1, 40), st.just(1.0), st.just(True)),
    st.tuples(st.just("lost"), st.just(0), st.just(0.0), st.just(True)),
    st.tuples(st.just("wait"), st.integers(0, 3), st.just(0.0), st.just(True)),
)


@given(st.integers(0, 20), st.integers(1, 6), st.lists(events, max_size=60))
def test_blocks_are_taken_once_and_in_order_whatever_happens(num_blocks, chunk, happening):
    found, now = fetch(num_blocks, chunk), 0.0
    on_the_way: list[Ask] = []
    taken: list[int] = []
    for what, number, share, is_sound in happening:
        on_the_way += found.asks(now)
        found.check()
        answer = None
        if what == "came" and number < len(on_the_way):
            ask = on_the_way.pop(number)  # in any order
            answer = found.came(
                ask.number, int(share * ask.num_blocks), now, is_sound=is_sound or share == 1.0
            )
        elif what == "stale":
            answer = found.came(number + 1000, 1, now, is_sound=True)
        elif what == "lost":
            found.lost("cut")
        elif what == "wait":
            now += number
        if answer is not None:
            taken += range(answer.first, answer.first + answer.num_blocks)
        found.check()
        assert taken == list(range(found.num_taken)) and found.num_taken <= num_blocks
    if found.is_over:
        assert found.asks(now) == []
    found.lost("cut")
    while not found.is_over:  # from here on all goes well
        for ask in found.asks(now):
            answer = found.came(ask.number, ask.num_blocks, now, is_sound=True)
            taken += range(answer.first, answer.first + answer.num_blocks)
    assert taken == list(range(found.num_taken))
    assert found.why or found.num_taken == num_blocks
