"""Whatever tokens, credits and ends come in whatever order: the client gets what the node sent, in its window."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from edge_runtime.coordinator.streams import MERGED_CHARS, MERGED_TOKENS, Delivery, Stream, Streams
from edge_runtime.protocol import Failed, Finished, StillRunning, Submit, TokenLogprobs, Tokens, encode

LETTERS = st.text("abc\u00e9\U0001f600", max_size=3)


class Windows(RuleBasedStateMachine):
    """Requests of two clients on two nodes. The model keeps what each node sent and what each client got."""

    @initialize()
    def start(self) -> None:
        self.streams = Streams()
        self.opened: dict[str, tuple[bytes, str, int]] = {}  # running: client, node, credit at first
        self.sent: dict[str, list] = defaultdict(list)
        self.got: dict[str, list[Tokens]] = defaultdict(list)
        self.granted: dict[str, int] = {}
        self.ends = {"finished": 0, "failed": 0, "refused": 0}

    @rule(
        client=st.sampled_from([b"c1", b"c2"]), node=st.sampled_from(["n1", "n2"]), credit=st.integers(0, 4)
    )
    def opens(self, client: bytes, node: str, credit: int) -> None:
        request_id = f"r{len(self.granted)}"
        self.streams.open(Submit(request_id, prompt="p", credit=credit), client, node)
        self.opened[request_id] = (client, node, max(1, credit))
        self.granted[request_id] = max(1, credit)

    @precondition(lambda self: self.opened)
    @rule(data=st.data(), to=st.sampled_from(["n1", "n2"]))
    def loses_its_home_and_finds_another(self, data, to: str) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.opened)))
        client, node, credit = self.opened[request_id]
        before = self.streams.in_flight(node)
        self.streams.lose_home(request_id, "gone", 1.0)
        assert self.streams.in_flight(node) == before - 1 and self.streams.node_of(request_id) == ""
        [stream] = self.streams.homeless()
        assert stream.token_ids == [token for part in self.sent[request_id] for token in part.token_ids]
        self.streams.move(request_id, to, 2.0)
        self.opened[request_id] = (client, to, credit)

    def take(self, request_id: str, deliveries: list[Delivery]) -> None:
        client, _, _ = self.opened[request_id]
        for delivery in deliveries:
            assert delivery.client == client and isinstance(delivery.message, Tokens)
            assert delivery.message.request_id == request_id
            self.got[request_id].append(delivery.message)

    def check_window(self, request_id: str) -> None:
        """At most as many messages as were granted, and nothing is held back while there is credit."""
        assert len(self.got[request_id]) <= self.granted[request_id]
        if len(self.got[request_id]) < self.granted[request_id]:
            assert self.joined(request_id) == self.sent_joined(request_id)
        client, _, _ = self.opened[request_id]
        stalled = {self.opened[name][0] for name in self.opened if len(self.got[name]) == self.granted[name]}
        assert self.streams.stalled_clients() == stalled and client in {c for c, _, _ in self.opened.values()}

    @precondition(lambda self: self.opened)
    @rule(data=st.data(), num_tokens=st.integers(0, 2), text=LETTERS, with_logprobs=st.booleans())
    def tokens_come(self, data, num_tokens: int, text: str, with_logprobs: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.opened)))
        index = sum(len(part.token_ids) for part in self.sent[request_id])
        ids = [index + i for i in range(num_tokens)]
        logprobs = [TokenLogprobs(token, -0.5) for token in ids] if with_logprobs else None
        message = Tokens(request_id, index, ids, text, logprobs)
        self.sent[request_id].append(message)
        self.take(request_id, self.streams.tokens(message))
        self.check_window(request_id)

    @precondition(lambda self: self.opened)
    @rule(data=st.data(), count=st.integers(0, 3))
    def credit_comes(self, data, count: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.opened)))
        self.granted[request_id] += count
        self.take(request_id, self.streams.grant(request_id, count))
        self.check_window(request_id)

    @precondition(lambda self: self.opened)
    @rule(data=st.data(), how=st.sampled_from(["finished", "failed", "refused"]))
    def it_ends(self, data, how: str) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.opened)))
        whose = "user" if how == "refused" else "cluster"
        end = Finished(request_id, "stop") if how == "finished" else Failed(request_id, whose, "x", "y")
        *before, last = self.streams.end(end)
        self.take(request_id, before)
        assert last == Delivery(self.opened[request_id][0], end)
        assert self.joined(request_id) == self.sent_joined(request_id)
        del self.opened[request_id]
        self.ends[how] += 1

    @rule()
    def strangers_speak(self) -> None:
        """Ids that are unknown or have ended bring nothing."""
        for name in {"nobody", *self.granted} - set(self.opened):
            assert self.streams.tokens(Tokens(name, 0, [1], "x")) == []
            assert self.streams.grant(name, 5) == []
            assert self.streams.end(Finished(name, "stop")) == []
            assert self.streams.node_of(name) is None and self.streams.client_of(name) is None

    @rule()
    def counts_agree(self) -> None:
        assert len(self.streams) == len(self.opened)
        for node in ("n1", "n2"):
            mine = [name for name, (_, at, _) in self.opened.items() if at == node]
            assert self.streams.of_node(node) == mine and self.streams.in_flight(node) == len(mine)
        for client in (b"c1", b"c2"):
            mine = [name for name, (of, _, _) in self.opened.items() if of == client]
            assert self.streams.of_client(client) == mine
        counts = (self.streams.num_finished, self.streams.num_failed, self.streams.num_refused)
        assert counts == tuple(self.ends.values())

    def joined(self, request_id: str) -> tuple:
        return _joined(self.got[request_id])

    def sent_joined(self, request_id: str) -> tuple:
        return _joined(self.sent[request_id])

    def teardown(self) -> None:
        for request_id in list(self.opened):
            self.streams.end(Finished(request_id, "abort"))
        assert len(self.streams) == 0
        assert self.streams.in_flight("n1") == self.streams.in_flight("n2") == 0


def _joined(parts: list[Tokens]) -> tuple:
    """Ids, text and logprobs of messages one after another; each must say how many tokens came before."""
    ids: list[int] = []
    for part in parts:
        assert part.index == len(ids)
        ids += part.token_ids
    return ids, "".join(part.text for part in parts), [p for part in parts for p in part.logprobs or ()]


TestWindows = Windows.TestCase


def test_a_long_answer_that_waits_with_all_its_logprobs_stays_within_what_can_be_sent():
    streams = Streams()
    streams.open(Submit("r", prompt="p", credit=1), b"c", "n1")
    top = [(2**31 - 1, -0.123456789)] * 20
    for index in range(3 * MERGED_TOKENS):
        streams.tokens(Tokens("r", index, [index], "word", [TokenLogprobs(index, -0.1, top)]))
    deliveries = streams.end(Finished("r", "length"))
    for delivery in deliveries:
        encode(delivery.message)
    assert 4 <= len(deliveries) <= 5
    ids = [token for delivery in deliveries[:-1] for token in delivery.message.token_ids]
    assert ids == list(range(1, 3 * MERGED_TOKENS))


def test_texts_that_wait_are_cut_where_a_message_would_become_too_long():
    streams = Streams()
    streams.open(Submit("r", prompt="p", credit=1), b"c", "n1")
    for index in range(9):
        streams.tokens(Tokens("r", index, [index], "\u20ac" * (MERGED_CHARS // 2)))
    deliveries = streams.grant("r", 100)
    assert [len(delivery.message.token_ids) for delivery in deliveries] == [2, 2, 2, 2]


def test_a_credit_of_none_still_lets_one_message_out():
    streams = Streams()
    streams.open(Submit("r", prompt="p", credit=0), b"c", "n1")
    assert len(streams.tokens(Tokens("r", 0, [1]))) == 1
    assert streams.tokens(Tokens("r", 1, [2])) == []


def test_the_same_id_cannot_run_twice():
    streams = Streams()
    streams.open(Submit("r", prompt="p", credit=1), b"c", "n1")
    with pytest.raises(AssertionError, match="already running"):
        streams.open(Submit("r", prompt="p", credit=1), b"d", "n2")


def test_tokens_that_do_not_come_next_are_dropped():
    streams = Streams()
    streams.open(Submit("r", prompt="p", credit=9), b"c", "n1")
    assert len(streams.tokens(Tokens("r", 0, [5]))) == 1
    assert streams.tokens(Tokens("r", 0, [5])) == [] and streams.tokens(Tokens("r", 2, [7])) == []
    assert len(streams.tokens(Tokens("r", 1, [6]))) == 1


def test_a_request_without_a_home_can_end():
    streams = Streams()
    streams.open(Submit("r", prompt="p", credit=9), b"c", "n1")
    streams.lose_home("r", "node n1 was lost", 5.0)
    [stream] = streams.homeless()
    assert (stream.lost_node, stream.why, stream.moves, stream.homeless_s) == (
        "n1",
        "node n1 was lost",
        1,
        5.0,
    )
    assert len(streams.end(Finished("r", "abort"))) == 1
    assert len(streams) == 0 and streams.in_flight("n1") == 0


PARTS = st.lists(st.tuples(st.integers(1, 2), LETTERS), max_size=12)


@settings(max_examples=60, deadline=None)
@given(PARTS, st.data(), st.booleans())
def test_a_client_that_comes_back_gets_the_rest_of_its_answer_once(parts, data, ends: bool) -> None:
    """Whatever it had when the coordinator went, and however much came before it was back."""
    had = data.draw(st.integers(0, len(parts)))
    told = data.draw(st.integers(had, len(parts)))
    back = data.draw(st.integers(told, len(parts)))
    ids = [[index] * count for index, (count, _) in enumerate(parts)]
    texts = [text for _, text in parts]

    def flat(lists: list[list[int]]) -> list[int]:
        return [token for each in lists for token in each]

    streams = Streams()
    streams.adopt(
        StillRunning("r", prompt="p", output_ids=flat(ids[:told]), text="".join(texts[:told])), "n1", 5.0
    )
    assert streams.in_flight("n1") == 1 and streams.stalled_clients() == set()
    got: list[Delivery] = []

    def come(index: int) -> None:
        nonlocal got
        got += streams.tokens(Tokens("r", len(flat(ids[:index])), ids[index], texts[index]))

    for index in range(told, back):
        come(index)
    finished = Finished("r", "length")
    is_early = ends and back == len(parts) and data.draw(st.booleans())
    if is_early:
        assert streams.end(finished) == [] and len(streams) == 0, "it is kept for its client"
    assert got == []
    num_chars = len("".join(texts[:had]))
    attached = streams.attach("r", b"c", len(flat(ids[:had])), num_chars, 64)
    assert attached is not None
    got += attached
    for index in range(back, len(parts)):
        come(index)
    if not is_early:
        got += streams.end(finished)
    assert [delivery.client for delivery in got] == [b"c"] * len(got)
    messages = [delivery.message for delivery in got]
    assert messages[-1] == finished and streams.in_flight("n1") == 0
    tokens = [message for message in messages if isinstance(message, Tokens)]
    assert [token for message in tokens for token in message.token_ids] == flat(ids[had:])
    assert "".join(message.text for message in tokens) == "".join(texts[had:])
    assert streams.attach("r", b"c", 0, 0, 1) is None and "r" not in streams


def test_an_answer_that_nobody_comes_back_for_is_forsaken_and_dropped() -> None:
    streams = Streams()
    streams.adopt(StillRunning("runs", prompt="p"), "n1", 5.0)
    streams.adopt(StillRunning("over", prompt="p", ended=Finished("over", "stop")), "n1", 6.0)
    assert len(streams) == 1 and streams.in_flight("n1") == 1 and streams.homeless() == []
    assert streams.forsaken(5.5) == ["runs"]
    for request_id in streams.forsaken(9.0):
        streams.abort(request_id)
        assert streams.end(Finished(request_id, "abort")) == []
    assert list(streams) == [] and streams.in_flight("n1") == 0


def test_logprobs_come_back_with_the_tokens_that_a_client_lacks() -> None:
    streams, logprobs = Streams(), [TokenLogprobs(token, -1.0) for token in (1, 2, 3)]
    told = StillRunning("r", prompt="p", output_ids=[1, 2, 3], text="abc", logprobs=logprobs)
    streams.adopt(told, "n1", 0.0)
    [delivery] = streams.attach("r", b"c", 1, 1, 4) or []
    assert delivery.message == Tokens("r", 1, [2, 3], "bc", logprobs[1:])


def homeless_stream(streams: Streams) -> Stream:
    [stream] = streams.homeless()
    return stream


def test_a_request_is_given_up_after_three_processes_that_ended_with_it_and_no_token() -> None:
    streams = Streams()
    streams.open(Submit("r", prompt="p"), b"c", "n1")
    for _ in range(
        10
    ):  # what a change of placement wants is no loss, and who is only cut off was not ended by it
        streams.lose_home("r", "another placement", 1.0, "moving")
        streams.move("r", "n1", 1.0)
        streams.lose_home("r", "not heard from", 1.0, "away")
        streams.move("r", "n1", 1.0)
    for num_ended in range(1, 5):
        streams.lose_home("r", "its connection ended", 1.0, "ended")
        assert homeless_stream(streams).is_hopeless(1.0, 60.0) == (num_ended > 3)
        streams.move("r", "n2", 1.0)
    streams.tokens(Tokens("r", 0, [5], "x"))
    streams.lose_home("r", "its connection ended", 1.0, "ended")
    assert not homeless_stream(streams).is_hopeless(1.0, 60.0), "whoever brought a token was not ended by it"


def test_waits_for_a_home_add_up_until_a_token_comes_and_homes_that_give_it_back_are_asked_less_often() -> (
    None
):
    streams = Streams()
    streams.open(Submit("r", prompt="p"), b"c", "n1")
    streams.lose_home("r", "not heard from", 10.0, "away")
    streams.move("r", "n2", 40.0)
    streams.lose_home("r", "not heard from", 100.0, "away")
    assert not homeless_stream(streams).is_hopeless(130.0, 60.0)
    assert homeless_stream(streams).is_hopeless(130.5, 60.0)
    assert homeless_stream(streams).may_try(100.0)
    for _ in range(3):
        streams.move("r", "n2", 101.0)
        streams.lose_home("r", "no engine", 101.0, "away")
    assert not homeless_stream(streams).may_try(101.1) and homeless_stream(streams).may_try(101.6)


def test_what_a_home_says_of_a_ledger_is_for_the_next_home_and_not_for_the_client():
    streams = Streams()
    streams.open(Submit("r", prompt="p", credit=9), b"c", "n1")
    for index, ledger in enumerate(([0.5, 0.1], [], [0.4, 0.3])):
        (delivery,) = streams.tokens(Tokens("r", index, [7], "x", ledger=ledger))
        assert delivery.message == Tokens("r", index, [7], "x")
    streams.lose_home("r", "gone", 1.0)
    (stream,) = streams.homeless()
    assert stream.ledger == [0.4, 0.3]
    again = Streams()
    again.adopt(StillRunning("r", prompt="p", output_ids=[7, 7, 7], text="xxx", ledger=[0.4, 0.3]), "n1", 5.0)
    again.lose_home("r", "gone", 6.0)
    (stream,) = again.homeless()
    assert stream.ledger == [0.4, 0.3] and stream.submit.ledger == []
