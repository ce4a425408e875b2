"""Talks to a coordinator as a client: submits prompts, gathers answers, asks for status. Knows no terminal."""

import contextlib
import secrets
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from edge_runtime.clock import Clock
from edge_runtime.errors import ClusterError, EdgeError, PeerError, RequestError
from edge_runtime.log import Reminder
from edge_runtime.protocol import (
    NAME_CHARS,
    Abort,
    Accepted,
    Apply,
    Applying,
    Attach,
    BadMessage,
    Credit,
    Drain,
    Failed,
    Finished,
    GiveUp,
    Hello,
    Message,
    Planned,
    Refused,
    StatusQuery,
    StatusReply,
    Submit,
    TokenLogprobs,
    Tokens,
    Welcome,
    refuse_mismatch,
)
from edge_runtime.transport.endpoint import Channel, Sent, next_call_id
from edge_runtime.transport.keys import Keys

CONNECT_S = 5.0
CHANGE_S = 30.0  # the coordinator plans before it answers
RECEIVE_S = 0.25
RETRY_S = 0.2
SEED_BITS = 63
CREDIT = 64  # Tokens messages on their way at most; granted again in halves
LOST_S = 60.0  # how long a coordinator that is gone is waited for: its answers go on meanwhile
RECONNECT_S = 1.0
TOGETHER_S = 0.005  # answers that end within it are told of together
IDLE_S = 300.0  # an answer that brings nothing for so long is given up


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client asks: exactly one of prompt, messages and prompt_ids, and how to sample."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_ids: list[int] | None = None
    sampling: dict[str, Any] = {}
    trace: bool = False
    salt: str = ""
    """Prompts of another salt are not found in each other's KV."""
    user: str = ""


@dataclass
class Answer:
    """One answer as it comes. `error` and `exit_code` are set if it failed; times are this client's, in seconds."""

    request_id: str
    prompt: Prompt
    sent_s: float
    node: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    first_token_s: float | None = None
    last_token_s: float = 0.0
    finished: Finished | None = None
    failed: Failed | None = None
    refused: Refused | None = None
    retry_at_s: float = 0.0
    give_up_s: float = 0.0
    """Until when a refusal that says so is tried again."""
    submitted: bool = False
    seed: int = field(default_factory=lambda: secrets.randbits(SEED_BITS))
    """Where the prompt names none: whoever goes on with the answer has to draw the same tokens."""
    has_rest: bool = False
    """What the text still lacked when the last token had come is there."""
    attach_at_s: float | None = None
    """When a coordinator that came back is asked for it; None otherwise."""
    ungranted: int = 0

    @property
    def ended(self) -> bool:
        return self.finished is not None or self.failed is not None

    def error(self) -> EdgeError | None:
        """Why it failed, None if it did not."""
        if self.failed is None:
            return None
        if self.failed.kind != "user":
            return ClusterError(self.failed.detail)
        option = self.failed.option
        if option == "prompt" and self.prompt.messages is not None:
            option = "messages"
        return RequestError(self.failed.detail, option or None)

    def as_json(self) -> dict[str, Any]:
        """The object that `submit --json` prints."""
        if self.failed is not None:
            error = {
                "kind": self.failed.kind,
                "reason": self.failed.reason,
                "message": self.failed.detail,
                "node": self.failed.node or None,
            }
            return {"error": error, "text": self.text, "token_ids": self.token_ids, "finish_reason": "error"}
        assert self.finished is not None, "an answer that still runs has no result"
        done = self.finished
        num_tokens = len(self.token_ids)
        first_s = self.first_token_s if self.first_token_s is not None else self.last_token_s
        tpot_s = (self.last_token_s - first_s) / (num_tokens - 1) if num_tokens > 1 else 0.0
        result: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": done.finish_reason,
            "usage": {
                "prompt_tokens": done.prompt_tokens,
                "completion_tokens": done.completion_tokens,
                "total_tokens": done.prompt_tokens + done.completion_tokens,
                "cached_tokens": done.cached_tokens,
            },
            "timing": {
                "ttft_s": round(first_s - self.sent_s, 6),
                "tpot_s": round(tpot_s, 6),
                "home": {name: round(value, 6) for name, value in msgspec.to_builtins(done.timing).items()},
            },
            "nodes": done.nodes,
            "bill": done.bill,
            "home": self.node,
            "request_id": self.request_id,
        }
        if done.trace is not None:
            result["trace"] = done.trace
        if self.logprobs:
            result["logprobs"] = [
                {"token_id": entry.token_id, "logprob": entry.logprob, "top": entry.top}
                for entry in self.logprobs
            ]
        return result


class Client:
    """A connection to one coordinator. One thread."""

    def __init__(self, address: str, keys: Keys | None, clock: Clock, cluster: str = "") -> None:
        """cluster: the name it must have, empty for any."""
        self.address = address
        self._hello = Hello(node="client", role="client", cluster=cluster)
        self._clock = clock
        self._channel = Channel(address, name="coordinator", keys=keys)

    def connect(self, timeout_s: float = CONNECT_S) -> None:
        """Greet the coordinator. Raises PeerError or Refusal with one sentence, ClusterError if it is none, or another's."""
        welcome = self._channel.request(self._hello, Welcome, timeout_s).message
        assert isinstance(welcome, Welcome)
        if welcome.role != "coordinator":
            raise ClusterError(
                f"{self.address} is node {welcome.node}, expected a coordinator; look at `coordinator` in the topology file"
            )
        if (mismatch := refuse_mismatch(welcome, self._hello)) is not None:
            raise mismatch.as_error()

    def reconnect(self) -> None:
        """Start over with a new connection; `connect` comes next."""
        self._channel.reconnect()

    def status(self, timeout_s: float = CONNECT_S) -> dict[str, Any]:
        """What `status --json` prints."""
        reply = self._channel.request(StatusQuery(), StatusReply, timeout_s).message
        assert isinstance(reply, StatusReply)
        return reply.body

    def apply(self, text: str, source: str) -> int:
        """Begin to change the cluster to a topology file. Returns the epoch of the change, 0 if it changes nothing."""
        reply = self._channel.request(Apply(text, source), Applying, CHANGE_S).message
        assert isinstance(reply, Applying)
        return reply.epoch

    def plan(self, text: str, source: str) -> Planned:
        """What a topology file would change."""
        reply = self._channel.request(Apply(text, source, only_plan=True), Planned, CHANGE_S).message
        assert isinstance(reply, Planned)
        return reply

    def drain(self, node: str) -> int:
        """Begin to move everything off a node. Returns the epoch of the change."""
        reply = self._channel.request(Drain(node), Applying, CHANGE_S).message
        assert isinstance(reply, Applying)
        return reply.epoch

    def give_up(self, epoch: int, why: str) -> None:
        """A change that was begun cannot work out: it is rolled back if its shares are still being loaded."""
        self._channel.send(GiveUp(epoch, why))

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        wait_ready_s: float,
        on_tokens: Callable[[Answer, Tokens], None] = lambda answer, tokens: None,
        on_wait: Callable[[str], None] = lambda line: None,
        on_turn: Callable[[], None] = lambda: None,
        idle_s: float = IDLE_S,
        lost_s: float = LOST_S,
        after_s: Sequence[float] = (),
        on_ended: Callable[[list[Answer]], Sequence[Prompt]] = lambda ended: (),
        keeps_ended: bool = False,
    ) -> list[Answer]:
        """Submit all prompts and return their answers in the same order, behind them those of prompts that came later.

        wait_ready_s  how long a cluster that is still loading is waited for
        on_tokens     called as tokens come; on_wait with a line while nothing comes, as often as `Reminder` says
        on_turn       called once a second at least, and may raise to take all back
        lost_s        how long a coordinator that goes away is waited for; its answers go on where they were
        after_s       when each is submitted, seconds from now; without it all at once
        on_ended      called once with each answer that has ended, with several that end together; says what to submit next
        keeps_ended   what the coordinator's loss leaves unanswered fails by it, and what had ended is returned too

        Raises ClusterError when the coordinator goes away for good, or when nothing comes for `idle_s`.
        """
        now = self._clock.now()
        give_up_s = now + wait_ready_s
        due_s = [now + each for each in after_s] or [now] * len(prompts)
        answers = [
            Answer(uuid.uuid4().hex, prompt, due, retry_at_s=due, give_up_s=give_up_s)
            for prompt, due in zip(prompts, due_s, strict=True)
        ]
        by_id = {answer.request_id: answer for answer in answers}
        running, ended = list(answers), list[Answer]()
        heard_s = ended_s = now
        reminder = Reminder(now)
        is_more = False  # a message came, and others may wait behind it
        try:
            while running or ended:
                on_turn()
                now = self._clock.now()
                if any(answer.ended for answer in running):
                    ended_s = ended_s if ended else now
                    ended += [answer for answer in running if answer.ended]
                    running = [answer for answer in running if not answer.ended]
                if ended and not (running and is_more and now - ended_s <= TOGETHER_S):
                    following = [
                        Answer(uuid.uuid4().hex, prompt, now, retry_at_s=now, give_up_s=now + wait_ready_s)
                        for prompt in on_ended(ended)
                    ]
                    by_id |= {answer.request_id: answer for answer in following}
                    answers += following
                    running += following
                    ended = []
                    continue
                try:
                    self._submit_due(running, now)
                    self._attach_due(running, now)
                    rest_s = min(
                        (a.retry_at_s - now for a in running if not (a.submitted or a.ended)), default=1.0
                    )
                    message = self._receive(0.0 if ended else rest_s)
                    is_more = message is not None
                except _CoordinatorGone as gone:
                    self._come_back(running, lost_s, gone, on_wait, on_turn)
                    heard_s = self._clock.now()
                    reminder.restart(heard_s)
                    continue
                now = self._clock.now()
                if message is not None:
                    answer = by_id.get(getattr(message, "request_id", ""))
                    if answer is not None:
                        self._take(answer, message, now, lost_s, on_tokens)
                        if not isinstance(message, Refused):
                            heard_s = now
                            reminder.restart(now)
                            continue
                if reminder.is_due(now, _waiting_line(running, 0)):
                    on_wait(_waiting_line(running, now - heard_s))
                if now - heard_s > max(idle_s, wait_ready_s):
                    raise ClusterError(
                        f"nothing came for {now - heard_s:.0f} s: {_waiting_line(running, idle_s)}"
                    )
        except BaseException as error:
            self._abort(answer.request_id for answer in running if answer.submitted)
            if not (keeps_ended and isinstance(error, ClusterError)):
                raise
            for answer in running:
                answer.failed = Failed(answer.request_id, "cluster", "lost", str(error))
        return answers

    def _submit_due(self, answers: Iterable[Answer], now: float) -> None:
        for answer in answers:
            if answer.submitted or answer.ended or now < answer.retry_at_s:
                continue
            try:
                sent = self._channel.send(_submit_message(answer))
            except (BadMessage, msgspec.ValidationError, RecursionError) as error:
                detail = f"the prompt or its options cannot be sent: {error}"
                answer.failed = Failed(answer.request_id, "user", "request", detail)
                continue
            if sent is Sent.UNREACHABLE:
                raise _CoordinatorGone(f"the coordinator at {self.address} cannot be reached: {sent.value}")
            answer.submitted = bool(sent)  # a full queue empties as answers come

    def _receive(self, due_s: float) -> Message | None:
        envelope = self._channel.receive(min(RECEIVE_S, max(due_s, 0.001)))
        if envelope is None:
            if self._channel.is_lost():
                raise _CoordinatorGone(f"the coordinator at {self.address} went away while it was answering")
            return None
        return envelope.message

    def _come_back(
        self,
        answers: Sequence[Answer],
        lost_s: float,
        gone: "_CoordinatorGone",
        on_wait: Callable[[str], None],
        on_turn: Callable[[], None],
    ) -> None:
        """Wait for the coordinator, or the next one, and ask it for what was being answered."""
        until = self._clock.now() + lost_s
        on_wait(f"{gone}; waiting for it, {lost_s:g} s at most: its answers go on")
        reminder = Reminder(self._clock.now())
        while True:
            on_turn()
            self._channel.reconnect()
            try:
                self.connect(min(RECONNECT_S, lost_s))
                break
            except PeerError as error:
                now = self._clock.now()
                if now >= until:
                    raise ClusterError(f"{gone}, and did not come back within {lost_s:g} s") from error
                if reminder.is_due(now):
                    waited_s = now - reminder.began_s
                    on_wait(f"waiting for the coordinator at {self.address}, {waited_s:.0f} s: {error}")
                self._clock.sleep(min(RETRY_S, max(0.0, until - now)))
        now = self._clock.now()
        for answer in answers:
            if answer.submitted and not answer.ended:
                answer.attach_at_s, answer.ungranted = now, 0

    def _attach_due(self, answers: Iterable[Answer], now: float) -> None:
        for answer in answers:
            if answer.attach_at_s is None or now < answer.attach_at_s or answer.ended:
                continue
            message = Attach(answer.request_id, len(answer.token_ids), len(answer.text), CREDIT)
            sent = self._channel.send(message)
            if sent is Sent.UNREACHABLE:
                raise _CoordinatorGone(f"the coordinator at {self.address} cannot be reached: {sent.value}")
            if sent:
                answer.attach_at_s = None

    def _take(
        self,
        answer: Answer,
        message: Message,
        now: float,
        lost_s: float,
        on_tokens: Callable[[Answer, Tokens], None],
    ) -> None:
        match message:
            case Accepted(node=node):
                answer.node = node
            case Tokens() if not message.token_ids and answer.has_rest:
                pass  # of an answer that was gone on with when nothing but its end was lacking
            case Tokens():
                answer.has_rest = not message.token_ids
                answer.text += message.text
                answer.token_ids += message.token_ids
                answer.logprobs += message.logprobs or ()
                if message.token_ids:
                    answer.last_token_s = now
                    if answer.first_token_s is None:
                        answer.first_token_s = now
                on_tokens(answer, message)
                answer.ungranted += 1
                if answer.ungranted >= CREDIT // 2:
                    self._channel.send(Credit(answer.request_id, answer.ungranted))
                    answer.ungranted = 0
            case Finished():
                answer.finished = message
            case Failed():
                answer.failed = message
            case Refused(reason="unknown_request") if message.retry_after_s is not None:
                answer.attach_at_s = now + message.retry_after_s
            case Refused(reason="unknown_request"):  # no node knows it: another goes on after what came
                answer.submitted, answer.retry_at_s = False, now
                answer.give_up_s = now + lost_s
            case Refused():
                answer.refused = message
                answer.submitted = False
                if message.reason == "handshake":  # it knows us no more: greet, then ask again
                    self._channel.send(self._hello, call_id=next_call_id())
                if message.retry_after_s is not None and now < answer.give_up_s:
                    answer.retry_at_s = now + message.retry_after_s
                else:
                    answer.failed = Failed(
                        answer.request_id,
                        "user" if message.reason == "request" else "cluster",
                        message.reason,
                        message.detail,
                    )
            case _:
                raise PeerError(f"the coordinator answered a prompt with {type(message).__name__}")

    def _abort(self, request_ids: Iterable[str]) -> None:
        with contextlib.suppress(EdgeError):
            for request_id in request_ids:
                self._channel.send(Abort(request_id))


class _CoordinatorGone(ClusterError):
    """The connection to the coordinator has ended."""


def _submit_message(answer: Answer) -> Submit:
    """BadMessage or ValidationError for what the coordinator could not read: it would drop that without a word."""
    prompt = answer.prompt
    for name, text in (("user", prompt.user), ("salt", prompt.salt)):
        if len(text) > NAME_CHARS:
            raise BadMessage("field", f"{name} has {len(text)} characters; allowed are at most {NAME_CHARS}")
    has_seed = prompt.sampling.get("seed") is not None
    message = Submit(
        request_id=answer.request_id,
        prompt=prompt.prompt,
        messages=prompt.messages,
        prompt_ids=prompt.prompt_ids,
        sampling=prompt.sampling if has_seed else {**prompt.sampling, "seed": answer.seed},
        credit=CREDIT,
        trace=prompt.trace,
        salt=prompt.salt,
        user=prompt.user,
        output_ids=answer.token_ids,
    )
    return msgspec.convert(msgspec.to_builtins(message), Submit)


def _waiting_line(answers: Sequence[Answer], seconds: float) -> str:
    running = [answer for answer in answers if answer.node and not answer.ended]
    refused = next(
        (answer.refused for answer in answers if answer.refused and not answer.node and not answer.ended),
        None,
    )
    if running:
        nodes = ", ".join(sorted({answer.node for answer in running}))
        tokens = sum(len(answer.token_ids) for answer in running)
        return f"waiting for {nodes}, {seconds:.0f} s: {len(running)} answers run, {tokens} tokens came"
    if refused is not None:
        return f"waiting, {seconds:.0f} s: {refused.detail}"
    return f"waiting for the coordinator, {seconds:.0f} s"
