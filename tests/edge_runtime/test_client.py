"""The client against a coordinator that is played from a script, over real sockets."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from edge_runtime.client import CREDIT, Answer, Client, Prompt
from edge_runtime.clock import SystemClock
from edge_runtime.errors import (
    EXIT_CLUSTER,
    EXIT_USER,
    ClusterError,
    ConfigError,
    DeadlinePassed,
    PeerError,
    Refusal,
)
from edge_runtime.log import Reminder
from edge_runtime.protocol import (
    Abort,
    Accepted,
    Attach,
    Credit,
    Failed,
    Finished,
    HeartbeatReply,
    Hello,
    Message,
    Refused,
    StatusQuery,
    StatusReply,
    Submit,
    Timing,
    TokenLogprobs,
    Tokens,
    Welcome,
)
from edge_runtime.transport.endpoint import Server

SOON_S = 10.0
Send = Callable[[Message], None]


class Played:
    """Answers Hello, and gives every other message to `script(message, send)`. Keeps all that came."""

    def __init__(self, script: Callable[[Message, Send], None], address: str = "127.0.0.1:0") -> None:
        self.server = Server(address)
        self.script = script
        self.came: list[Message] = []
        self.is_stopping = False
        self._changed = threading.Condition()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        while not self.is_stopping:
            received = self.server.receive(0.05)
            if received is None:
                continue
            peer, envelope = received
            message = envelope.message
            with self._changed:
                self.came.append(message)
                self._changed.notify_all()
            if isinstance(message, Hello):
                self.server.send(peer, Welcome("coordinator", role="coordinator"), call_id=envelope.call_id)
            elif isinstance(message, StatusQuery):
                self.server.send(peer, StatusReply({"ready": True}), call_id=envelope.call_id)
            else:
                self.script(message, lambda answer, peer=peer: self.server.send(peer, answer))
        self.server.close()

    def of(self, kind: type[Message]) -> list:
        return [message for message in self.came if isinstance(message, kind)]

    def wait_for(self, kind: type[Message]) -> list:
        with self._changed:
            assert self._changed.wait_for(lambda: self.of(kind), SOON_S), f"no {kind.__name__} came"
            return self.of(kind)


@contextmanager
def played(script: Callable[[Message, Send], None]) -> Iterator[tuple[Played, Client]]:
    coordinator = Played(script)
    coordinator.thread.start()
    try:
        with Client(coordinator.server.address, None, SystemClock()) as client:
            client.connect(SOON_S)
            yield coordinator, client
    finally:
        coordinator.is_stopping = True
        coordinator.thread.join(SOON_S)


def answer_each(message: Message, send: Send) -> None:
    """Two tokens of text for every prompt: the prompt and a full stop."""
    if isinstance(message, Submit):
        request_id = message.request_id
        send(Accepted(request_id, "n1"))
        send(Tokens(request_id, 0, [1], str(message.prompt)))
        send(Tokens(request_id, 1, [2], "."))
        send(Finished(request_id, "length", 3, 2, nodes={"n1": {"role": "home"}}, bill={"exact_here": 1.0}))


def test_answers_come_in_the_order_of_the_prompts():
    def backwards(message: Message, send: Send) -> None:
        waiting.append(message)
        if len(waiting) == 5:
            for each in reversed(waiting):
                answer_each(each, send)

    waiting: list[Message] = []
    with played(backwards) as (_, client):
        answers = client.run([Prompt(prompt=f"p{i}") for i in range(5)], wait_ready_s=1)
    assert [answer.text for answer in answers] == [f"p{i}." for i in range(5)]
    assert all(answer.error() is None and answer.ended for answer in answers)


def test_the_json_of_an_answer_has_what_scripts_count_on():
    with played(answer_each) as (_, client):
        [answer] = client.run([Prompt(prompt="Hi")], wait_ready_s=1)
    result = json.loads(json.dumps(answer.as_json()))
    assert (result["text"], result["token_ids"], result["finish_reason"]) == ("Hi.", [1, 2], "length")
    assert result["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "cached_tokens": 0,
    }
    assert result["nodes"] == {"n1": {"role": "home"}} and result["bill"] == {"exact_here": 1.0}
    assert result["timing"]["ttft_s"] >= 0 and result["timing"]["tpot_s"] >= 0
    assert set(result["timing"]["home"]) == set(Timing.__struct_fields__)
    assert "logprobs" not in result


def test_the_submitted_message_says_all_of_the_prompt():
    prompt = Prompt(
        messages=[{"role": "user", "content": "x"}], sampling={"max_tokens": 3, "stop": ["a"]}, trace=True
    )
    with played(answer_each) as (coordinator, client):
        client.run([prompt], wait_ready_s=1)
        [submit] = coordinator.of(Submit)
    seed = {
        "seed": submit.sampling["seed"]
    }  # drawn here: whoever goes on with the answer draws the same tokens
    assert (submit.messages, submit.sampling, submit.trace, submit.credit) == (
        prompt.messages,
        {**prompt.sampling, **seed},
        True,
        CREDIT,
    )


def test_no_prompts_are_no_answers():
    with played(answer_each) as (coordinator, client):
        assert client.run([], wait_ready_s=1) == []
        assert coordinator.of(Submit) == []


def test_tokens_are_told_as_they_come():
    told: list[str] = []
    with played(answer_each) as (_, client):
        client.run(
            [Prompt(prompt="Hi")], wait_ready_s=1, on_tokens=lambda answer, tokens: told.append(tokens.text)
        )
    assert told == ["Hi", "."]


def test_credit_is_granted_again_in_halves():
    def many(message: Message, send: Send) -> None:
        if isinstance(message, Submit):
            send(Accepted(message.request_id, "n1"))
            for index in range(CREDIT):
                send(Tokens(message.request_id, index, [index], "x"))
        elif isinstance(message, Credit):
            granted.append(message.count)
            if len(granted) == 2:
                send(Finished(message.request_id, "length"))

    granted: list[int] = []
    with played(many) as (_, client):
        [answer] = client.run([Prompt(prompt="x")], wait_ready_s=1)
    assert granted == [CREDIT // 2, CREDIT // 2] and answer.token_ids == list(range(CREDIT))


def test_a_cluster_that_loads_is_asked_again_until_it_is_ready():
    def later(message: Message, send: Send) -> None:
        attempts.append(message)
        if len(attempts) < 4:
            send(Refused("not_ready", "waiting for n2 absent", 0.0, message.request_id))
        else:
            answer_each(message, send)

    attempts: list[Message] = []
    with played(later) as (_, client):
        [answer] = client.run([Prompt(prompt="x")], wait_ready_s=30)
    assert answer.error() is None and len(attempts) == 4


def test_a_cluster_that_is_not_ready_in_time_is_an_error_of_the_cluster():
    def never(message: Message, send: Send) -> None:
        send(Refused("not_ready", "waiting for n2 absent", 0.0, message.request_id))

    with played(never) as (_, client):
        [answer] = client.run([Prompt(prompt="x")], wait_ready_s=0)
    error = answer.error()
    assert error is not None and str(error) == "waiting for n2 absent" and error.exit_code == EXIT_CLUSTER
    assert answer.as_json()["error"]["reason"] == "not_ready" and answer.as_json()["finish_reason"] == "error"


def test_what_is_the_users_fault_says_so_and_costs_nobody_else():
    def picky(message: Message, send: Send) -> None:
        if message.prompt == "bad":
            send(Failed(message.request_id, "user", "request", "top_k is -1", node="n1"))
        elif message.prompt == "no":
            send(Refused("request", "request id is in use", None, message.request_id))
        else:
            answer_each(message, send)

    with played(picky) as (_, client):
        bad, no, good = client.run([Prompt(prompt=text) for text in ("bad", "no", "good")], wait_ready_s=5)
    assert [answer.error().exit_code for answer in (bad, no)] == [EXIT_USER, EXIT_USER]
    assert str(bad.error()) == "top_k is -1" and good.text == "good."


UNSENDABLE = {
    "half of a surrogate pair": Prompt(prompt="\ud800"),
    "a text that is too long": Prompt(prompt="x" * (3 << 20)),
    "a number of more than 64 bits": Prompt(prompt="x", sampling={"seed": 2**70}),
    "an option that is a map": Prompt(prompt="x", sampling={"temperature": {"a": 1}}),
    "a user's name that is too long": Prompt(prompt="x", user="u" * 257),
    "a salt that is too long": Prompt(prompt="x", salt="s" * 257),
    "a token id out of range": Prompt(prompt_ids=[2**40]),
    "a token id that is text": Prompt(prompt_ids=["x"]),  # type: ignore[list-item]
}


@pytest.mark.parametrize("prompt", UNSENDABLE.values(), ids=UNSENDABLE.keys())
def test_what_cannot_be_sent_is_its_own_prompts_fault_and_the_others_are_answered(prompt):
    with played(answer_each) as (coordinator, client):
        bad, good = client.run([prompt, Prompt(prompt="good")], wait_ready_s=1)
        assert len(coordinator.of(Submit)) == 1
    error = bad.error()
    assert error is not None and error.exit_code == EXIT_USER and "cannot be sent" in str(error)
    assert "\n" not in str(error) and len(str(error)) < 300
    assert good.text == "good."


def test_a_name_that_is_too_long_is_told_with_its_length():
    with played(answer_each) as (_, client):
        [answer] = client.run([Prompt(prompt="x", user="u" * 257)], wait_ready_s=1)
    assert str(answer.error()).endswith("user has 257 characters; allowed are at most 256")


def test_a_message_nested_without_end_is_told_or_sent_but_ends_nothing():
    inner: list = []
    for _ in range(5000):
        inner = [inner]
    with played(answer_each) as (_, client):
        bad, good = client.run(
            [Prompt(messages=[{"role": "user", "content": inner}]), Prompt(prompt="good")], wait_ready_s=1
        )
    assert bad.error() is not None and bad.error().exit_code == EXIT_USER
    assert good.text == "good."


def test_a_coordinator_that_knows_the_client_no_more_is_greeted_again():
    def forgetful(message: Message, send: Send) -> None:
        if isinstance(message, Submit):
            submits.append(message)
            if len(submits) == 1:
                send(Refused("handshake", "only after a Hello", 0.0, message.request_id))
            else:
                answer_each(message, send)

    submits: list[Message] = []
    with played(forgetful) as (coordinator, client):
        [answer] = client.run([Prompt(prompt="x")], wait_ready_s=10)
        assert [type(m) for m in coordinator.came[:4]] == [Hello, Submit, Hello, Submit]
    assert answer.text == "x."


def test_messages_that_belong_to_no_answer_are_passed_over():
    def chatty(message: Message, send: Send) -> None:
        send(HeartbeatReply(0))
        send(Tokens("of another", 0, [5], "x"))
        answer_each(message, send)

    with played(chatty) as (_, client):
        [answer] = client.run([Prompt(prompt="x")], wait_ready_s=1)
    assert answer.text == "x."


def test_an_answer_that_is_none_of_ours_ends_the_run_and_aborts_it():
    def odd(message: Message, send: Send) -> None:
        if isinstance(message, Submit):
            send(Abort(message.request_id))

    with played(odd) as (coordinator, client):
        with pytest.raises(PeerError, match="answered a prompt with Abort"):
            client.run([Prompt(prompt="x")], wait_ready_s=1)
        [abort] = coordinator.wait_for(Abort)
        assert abort.request_id == coordinator.of(Submit)[0].request_id


def test_whoever_interrupts_a_run_has_its_requests_aborted_the_accepted_and_the_others():
    def interrupt(answer: Answer, tokens: Tokens) -> None:
        raise KeyboardInterrupt

    def one_of_two(message: Message, send: Send) -> None:
        if isinstance(message, Submit) and message.prompt == "accepted":
            send(Accepted(message.request_id, "n1"))
            send(Tokens(message.request_id, 0, [1], "x"))

    with played(one_of_two) as (coordinator, client):
        with pytest.raises(KeyboardInterrupt):
            client.run(
                [Prompt(prompt="accepted"), Prompt(prompt="sent")], wait_ready_s=1, on_tokens=interrupt
            )
        client.status(SOON_S)  # everything before it has come
        assert {m.request_id for m in coordinator.of(Abort)} == {m.request_id for m in coordinator.of(Submit)}


def test_prompts_follow_answers_that_end_and_each_end_is_told_once():
    told: list[str] = []

    def following(ended: list[Answer]) -> list[Prompt]:
        told.extend(answer.text or "error" for answer in ended)
        return [Prompt(prompt=f"{answer.text}x") for answer in ended if len(answer.text) < 6 and answer.text]

    def picky(message: Message, send: Send) -> None:
        if message.prompt == "no":
            send(Failed(message.request_id, "user", "request", "top_k is -1", node="n1"))
        elif message.prompt == "a.x" and len(asked) < 2:
            asked.append(message)
            send(Refused("not_ready", "waiting for n2 absent", 0.0, message.request_id))
        else:
            answer_each(message, send)

    asked: list[Message] = []
    unsendable = Prompt(prompt="\ud800")
    with played(picky) as (_, client):
        prompts = [Prompt(prompt="a"), Prompt(prompt="no"), unsendable, Prompt(prompt="b")]
        answers = client.run(prompts, wait_ready_s=30, on_ended=following)
    assert [answer.prompt for answer in answers[:4]] == prompts
    assert sorted(answer.text for answer in answers[4:]) == ["a.x.", "a.x.x.", "b.x.", "b.x.x."]
    assert sorted(told) == sorted(answer.text or "error" for answer in answers) and len(asked) == 2


def test_who_cannot_keep_an_answer_ends_the_run_and_what_runs_is_called_off():
    def first_only(message: Message, send: Send) -> None:
        if isinstance(message, Submit) and message.prompt == "first":
            answer_each(message, send)

    def full_disk(ended: list[Answer]) -> list[Prompt]:
        raise ClusterError("no space left")

    with played(first_only) as (coordinator, client):
        prompts = [Prompt(prompt="first"), Prompt(prompt="second")]
        with pytest.raises(ClusterError, match="no space left"):
            client.run(prompts, wait_ready_s=1, on_ended=full_disk)
        [abort] = coordinator.wait_for(Abort)
        [second] = [submit for submit in coordinator.of(Submit) if submit.prompt == "second"]
    assert abort.request_id == second.request_id


def test_a_coordinator_that_goes_away_for_good_ends_the_run():
    def leave(message: Message, send: Send) -> None:
        coordinator.is_stopping = True

    with (
        played(leave) as (coordinator, client),
        pytest.raises(ClusterError, match="went away while.*come back"),
    ):
        client.run([Prompt(prompt="x")], wait_ready_s=1, lost_s=0.3)


def test_what_had_ended_before_the_coordinator_went_away_for_good_is_kept():
    def leave(message: Message, send: Send) -> None:
        if isinstance(message, Submit) and message.prompt == "first":
            answer_each(message, send)

    def gone_then(ended: list[Answer]) -> list[Prompt]:
        coordinator.is_stopping = True
        return []

    with played(leave) as (coordinator, client):
        prompts = [Prompt(prompt="first"), Prompt(prompt="second")]
        options = {"on_ended": gone_then, "keeps_ended": True}
        first, second = client.run(prompts, wait_ready_s=1, lost_s=0.3, **options)
    assert first.text == "first." and first.error() is None
    assert isinstance(second.error(), ClusterError) and "come back" in second.as_json()["error"]["message"]


def test_a_coordinator_that_comes_back_is_asked_for_the_rest():
    """The first one leaves after two tokens; the next one does not know the answer yet, then does."""
    asked: list[Attach] = []
    prompts = [Prompt(prompt="begun"), Prompt(prompt="not begun")]

    def leave(message: Message, send: Send) -> None:
        if isinstance(message, Submit) and message.prompt == "begun":
            send(Accepted(message.request_id, "n1"))
            send(Tokens(message.request_id, 0, [1, 2], "one two "))

    def came(answer: Answer, tokens: Tokens) -> None:
        coordinator.is_stopping = True

    def go_on(message: Message, send: Send) -> None:
        if isinstance(message, Submit):
            answer_each(message, send)
        if not isinstance(message, Attach):
            return
        asked.append(message)
        request_id, is_begun = message.request_id, message.num_tokens > 0
        if not is_begun or len([one for one in asked if one.request_id == request_id]) == 1:
            send(Refused("unknown_request", "not yet", 0.05 if is_begun else None, request_id))
            return
        send(Accepted(request_id, "n1"))
        send(Tokens(request_id, 2, [3], "three"))
        send(Finished(request_id, "length", 1, 3))

    with played(leave) as (coordinator, client):
        address = coordinator.server.address

        def next_one() -> None:
            coordinator.thread.join(SOON_S)
            while not following:  # the port is free once the one before has let it go
                try:
                    following.append(Played(go_on, address))
                except ConfigError:
                    assert not given_up.wait(0.02)
            following[0].thread.start()

        following: list[Played] = []
        given_up = threading.Event()
        starter = threading.Thread(target=next_one)
        starter.start()
        said: list[str] = []
        begun, fresh = client.run(prompts, wait_ready_s=5, on_tokens=came, on_wait=said.append, lost_s=SOON_S)
        starter.join(SOON_S)
        following[0].is_stopping = True
        following[0].thread.join(SOON_S)
    assert (begun.text, begun.token_ids) == ("one two three", [1, 2, 3]) and fresh.text == "not begun."
    assert {(one.num_tokens, one.num_chars) for one in asked} == {(2, 8), (0, 0)}
    assert any("its answers go on" in line for line in said)


def test_an_answer_that_no_node_knows_is_asked_for_again_after_what_has_come():
    """Nothing is asked twice but what was lost, and the text has no seam, whatever the second home sends of its end."""

    def forget(message: Message, send: Send) -> None:
        if not isinstance(message, Submit):
            return
        request_id = message.request_id
        send(Accepted(request_id, "n1"))
        if not message.output_ids:
            send(Tokens(request_id, 0, [1, 2], "one two "))
            send(Refused("unknown_request", "it runs nowhere", None, request_id))
        elif len(coordinator.of(Submit)) == 2:
            send(Refused("not_ready", "waiting for n2", 0.0, request_id))
        elif len(message.output_ids) == 2:
            send(Tokens(request_id, 2, [3], "thr"))
            send(Tokens(request_id, 3, [], "ee"))
            send(Refused("unknown_request", "it runs nowhere", None, request_id))
        else:
            send(Tokens(request_id, 3, [], "ee"))
            send(Finished(request_id, "length", 1, 3))

    with played(forget) as (coordinator, client):
        [answer] = client.run([Prompt(prompt="x", sampling={"temperature": 1.0})], wait_ready_s=0)
        submits = coordinator.of(Submit)
    assert (answer.text, answer.token_ids) == ("one two three", [1, 2, 3])
    assert len({submit.sampling["seed"] for submit in submits}) == 1
    assert [submit.output_ids for submit in submits] == [[], [1, 2], [1, 2], [1, 2, 3]]


def test_nobody_at_the_address_is_told_in_time():
    with (
        Client("127.0.0.1:1", None, SystemClock()) as client,
        pytest.raises(DeadlinePassed, match="127.0.0.1:1"),
    ):
        client.connect(0.1)


@pytest.mark.parametrize(
    ("welcome", "cluster", "expected"),
    [
        (
            Welcome("attic", role="node"),
            "home",
            "is node attic, expected a coordinator; look at `coordinator`",
        ),
        (
            Welcome("coordinator", "coordinator", cluster="work"),
            "home",
            "cluster: client has home, coordinator has work",
        ),
        (Welcome("coordinator", "coordinator", cluster="home"), "home", None),
        (Welcome("coordinator", "coordinator", cluster="home"), "", None),
    ],
)
def test_another_clusters_coordinator_or_a_node_at_the_address_is_told(welcome, cluster, expected):
    def answer() -> None:
        peer, envelope = server.receive(SOON_S)
        assert envelope.message.cluster == cluster
        server.send(peer, welcome, call_id=envelope.call_id)

    with Server("127.0.0.1:0") as server:
        thread = threading.Thread(target=answer)
        thread.start()
        with Client(server.address, None, SystemClock(), cluster) as client:
            if expected is None:
                client.connect(SOON_S)
            else:
                with pytest.raises(ClusterError, match=expected):
                    client.connect(SOON_S)
        thread.join()


def test_a_refused_greeting_says_why():
    server = Server("127.0.0.1:0")
    thread = threading.Thread(target=lambda: _refuse_one(server))
    thread.start()
    with Client(server.address, None, SystemClock()) as client, pytest.raises(Refusal, match="not today"):
        client.connect(SOON_S)
    thread.join()
    server.close()


def _refuse_one(server: Server) -> None:
    received = server.receive(SOON_S)
    assert received is not None
    peer, envelope = received
    server.send(peer, Refused("role", "not today"), call_id=envelope.call_id)


class FastClock(SystemClock):
    """Lets a second pass at every look, so that long waits are short."""

    def __init__(self) -> None:
        self.offset = 0.0

    def now(self) -> float:
        self.offset += Reminder.FIRST_S / 4
        return super().now() + self.offset


def test_a_wait_tells_what_is_awaited_and_ends_after_long_silence():
    def accept(message: Message, send: Send) -> None:
        if isinstance(message, Submit):
            send(Accepted(message.request_id, "n1"))

    lines: list[str] = []
    with played(accept) as (_, client):
        client._clock = FastClock()
        with pytest.raises(ClusterError, match="nothing came for"):
            client.run([Prompt(prompt="x")], wait_ready_s=1, on_wait=lines.append, idle_s=5)
    assert lines and "waiting for n1" in lines[-1] and "1 answers run, 0 tokens came" in lines[-1]


def test_a_wait_for_a_cluster_that_loads_says_what_it_lacks():
    def never(message: Message, send: Send) -> None:
        send(Refused("not_ready", "waiting for n2 absent", 0.0, message.request_id))

    lines: list[str] = []
    with played(never) as (_, client):
        client._clock = FastClock()
        [answer] = client.run([Prompt(prompt="x")], wait_ready_s=30, on_wait=lines.append)
    assert answer.error() is not None and any("waiting for n2 absent" in line for line in lines)


def test_times_and_logprobs_are_gathered_over_all_messages():
    done = Finished("r", "stop", 2, 3)
    answer = Answer("r", Prompt(prompt="x"), sent_s=1.0, node="n1", finished=done)
    answer.token_ids, answer.first_token_s, answer.last_token_s = [1, 2, 3], 1.5, 2.5
    answer.logprobs = [TokenLogprobs(1, -0.5, [(1, -0.5), (2, -1.0)])]
    result = answer.as_json()
    assert (result["timing"]["ttft_s"], result["timing"]["tpot_s"]) == (0.5, 0.5)
    assert result["logprobs"] == [{"token_id": 1, "logprob": -0.5, "top": [(1, -0.5), (2, -1.0)]}]


def test_an_answer_of_one_token_or_none_has_no_time_between_tokens():
    for ids in ([], [7]):
        answer = Answer("r", Prompt(prompt="x"), sent_s=1.0, finished=Finished("r", "stop"))
        answer.token_ids, answer.last_token_s = ids, 1.25
        assert answer.as_json()["timing"]["tpot_s"] == 0.0
