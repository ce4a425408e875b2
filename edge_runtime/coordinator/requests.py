"""Requests on their way through the coordinator: carries out what `streams` keeps and `routes` chooses.

Which node answers, what goes to which client, and who goes on when a home is lost. Knows how to send to a connection;
nothing of how nodes join, and no placement but the one that counts.
"""

import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from edge_runtime.clock import Clock
from edge_runtime.coordinator.deploy import experts_without_host
from edge_runtime.coordinator.epochs import Epochs
from edge_runtime.coordinator.outbox import Outbox
from edge_runtime.coordinator.routes import Routes
from edge_runtime.coordinator.streams import Delivery, Loss, Phase, Stream, Streams
from edge_runtime.protocol import (
    Abort,
    Accepted,
    Attach,
    BadMessage,
    Credit,
    Failed,
    FetchAhead,
    Finished,
    Generate,
    Handoff,
    HeartbeatReply,
    Message,
    PeerAddress,
    Prefilled,
    Prefilling,
    Refused,
    StillRunning,
    Submit,
    Tokens,
)
from edge_runtime.routing.base import HomeLoad
from edge_runtime.transport.interface import Sent
from edge_runtime.transport.keys import Keys
from topology.cluster import PREFILL, find_node

log = logging.getLogger(__name__)

RETRY_S = 1.0
HOME_IS_GONE = ("stopping", "not_ready", "moving", "stage_lost")  # failures of a home, not of the request
SEED_BITS = 63
FORSAKEN_S = 60.0  # how long an answer of the coordinator before is kept for its client
NODES_BACK_S = 10.0  # after a start, in which nodes come back and tell what runs there
ATTACH_AGAIN_S = 0.5


class Send(Protocol):
    def __call__(
        self, peer: bytes, message: Message, call_id: int = 0, tensors: Sequence[np.ndarray] = ()
    ) -> Sent:
        """Send to a connection, and say what became of it. Never waits."""


class Requests:
    """All requests. Called on the coordinator's loop."""

    def __init__(
        self,
        found: Epochs,
        routes: Routes,
        clock: Clock,
        send: Send,
        *,
        keys: Keys | None,
        homeless_s: float,
        client_gone: Callable[[bytes], None],
    ) -> None:
        """homeless_s: how long one waits for another home, seconds; client_gone: told of clients that are not there."""
        self._epochs = found
        self._routes = routes
        self._clock = clock
        self._send = send
        self._keys = keys
        self._homeless_s = homeless_s
        self._tell_gone = client_gone
        self._started_s = clock.now()
        self.streams = Streams()
        self.speeds: dict[str, float] = {}  # home -> how fast it decodes, against the mean
        self.outbox = Outbox(send)

    def tick(self) -> None:
        """Homes for those without one; messages whose clients have room again."""
        self._routes.follow_lanes(self._loads(), self._clock.now())
        self.find_homes()
        for client in self.outbox.flush():
            self.client_gone(client)

    def probe(self) -> None:
        """Notice clients that are gone, or do not come back: nothing else would tell."""
        self._end_forsaken()
        for client in self.streams.stalled_clients():
            # A message that says nothing: only the attempt tells whether anybody is there.
            if self._send(client, HeartbeatReply(0), 0) is Sent.UNREACHABLE:
                self.client_gone(client)

    def end_all(self, why: str) -> None:
        """The cluster stops: nobody is to wait for anything."""
        for request_id in list(self.streams):
            self._deliver(self.streams.end(Failed(request_id, "cluster", "stopping", why)))

    # What nodes say of them.

    def take_from_node(
        self, name: str, peer: bytes, message: Message, tensors: Sequence[np.ndarray] = ()
    ) -> bool:
        """Take in what a node says of a request. False if it is of something else."""
        request_id = getattr(message, "request_id", "")
        is_its = self.streams.node_of(request_id) == name
        match message:
            case Tokens():
                if is_its:
                    self._deliver(self.streams.tokens(message))
                else:
                    self._send(peer, Abort(request_id), 0)  # ended here; the node does not know yet
            case Failed(reason=reason) if reason in HOME_IS_GONE:
                if is_its:
                    loss: Loss = (
                        "moving" if reason == "moving" else "ended" if reason == "stopping" else "away"
                    )
                    self.streams.lose_home(request_id, message.detail, self._clock.now(), loss)
                    self.find_homes(but=name)
            case Finished(finish_reason="abort") if not self.streams.is_aborted(request_id):
                pass  # of a time when the request was here before: it was taken away, and has come back since
            case Prefilling():
                if is_its:
                    self._fetch_ahead(name, request_id, *tensors)
            case Prefilled():
                if is_its:
                    self._prefilled(name, message, *tensors)
            case StillRunning():
                self._adopt(name, peer, message)
            case Finished() | Failed():
                if is_its:
                    self._forget_ahead(request_id)
                    self._deliver(self.streams.end(message))
            case _:
                return False
        return True

    # What clients say of them.

    def take_from_client(self, peer: bytes, message: Message, call_id: int) -> bool:
        """Take in what a client wants of a request. False if it is something else."""
        match message:
            case Submit():
                self._submit(peer, message, call_id)
            case Attach():
                self._attach(peer, message, call_id)
            case Credit(request_id=request_id, count=count):
                if self.streams.client_of(request_id) == peer:
                    self._deliver(self.streams.grant(request_id, count))
            case Abort(request_id=request_id):
                if self.streams.client_of(request_id) == peer:
                    self._abort(request_id)
            case _:
                return False
        return True

    def _submit(self, peer: bytes, submit: Submit, call_id: int) -> None:
        request_id = submit.request_id
        refused = self._why_not(submit)
        if submit.sampling.get("seed") is None:  # drawn here, so that another home would draw the same tokens
            seed = secrets.randbits(SEED_BITS)
            submit = msgspec.structs.replace(submit, sampling={**submit.sampling, "seed": seed})
        separates = self._routes.separates and not submit.output_ids
        worker = self._choose_worker(submit) if separates and refused is None else ""
        phase: Phase = "prefill" if worker else "decode"
        tier = self._routes.tier_of(submit)
        home = "" if refused else worker or self._choose_home(tier=tier) or ""
        if refused is None and not home:
            detail = f"no node can answer now: waiting for {self._epochs.state.waiting_for()}"
            refused = Refused("not_ready", self._with_remedy(detail), RETRY_S, request_id)
        refused = refused or self._send_to(home, submit, prefill_only=bool(worker))
        if refused is not None:
            self.outbox.send(peer, refused, call_id)
            return
        self.streams.open(submit, peer, home, phase)
        if phase == "decode":
            self._routes.sent(home, (), self._epochs.placement.plan_of(home).kv_blocks, tier)
        if not self.outbox.send(peer, Accepted(request_id, home), call_id):
            self.client_gone(peer)

    def _adopt(self, name: str, peer: bytes, message: StillRunning) -> None:
        """A request runs at a node since before this coordinator; its client may come back for it."""
        request_id, now = message.request_id, self._clock.now()
        if request_id not in self.streams:
            match message.ended:
                case Failed(reason=reason, detail=detail) if reason in HOME_IS_GONE:
                    self.streams.adopt(msgspec.structs.replace(message, ended=None), name, now)
                    self.streams.lose_home(request_id, detail, now, "away")
                case _:
                    self.streams.adopt(message, name, now)
            log.info("request %s runs at %s: %d tokens so far", request_id, name, len(message.output_ids))
        elif self.streams.node_of(request_id) != name:  # it moved meanwhile
            self._send(peer, Abort(request_id), 0)

    def _attach(self, peer: bytes, message: Attach, call_id: int) -> None:
        request_id = message.request_id
        deliveries = self.streams.attach(
            request_id, peer, message.num_tokens, message.num_chars, message.credit
        )
        if deliveries is None and request_id in self.streams:  # its connection broke, and only that
            self._abort(request_id)
            self.streams.end(Finished(request_id, "abort"))
            detail = "the answer was ended since its client was gone; it may be gone on with"
            self.outbox.send(peer, Refused("unknown_request", detail, None, request_id), call_id)
            return
        if deliveries is None:
            # A node that is ready has said what runs there; one that has not come by then is not waited for.
            is_early = self._clock.now() - self._started_s < NODES_BACK_S and not self._epochs.state.is_ready
            detail = "the answer that was begun under another coordinator runs nowhere any more"
            wait_s = ATTACH_AGAIN_S if is_early else None
            self.outbox.send(peer, Refused("unknown_request", detail, wait_s, request_id), call_id)
            return
        if not self.outbox.send(peer, Accepted(request_id, self.streams.node_of(request_id) or ""), call_id):
            self.client_gone(peer)
            return
        self._deliver(deliveries)

    def _end_forsaken(self) -> None:
        """Answers whose clients have not come back."""
        for request_id in self.streams.forsaken(self._clock.now() - FORSAKEN_S):
            log.info("request %s: its client did not come back", request_id)
            self.streams.abort(request_id)
            self._abort_at_home(request_id)
            self.streams.end(Finished(request_id, "abort"))

    def _send_to(
        self, home: str, submit: Submit, *, prefill_only: bool = False, handoff: Handoff | None = None
    ) -> Refused | None:
        """Hand a request to its home; the answer says why that did not work."""
        fields = {name: getattr(submit, name) for name in submit.__struct_fields__}
        generate = Generate(**fields, prefill_only=prefill_only, handoff=handoff)
        try:
            sent = self._send(self._epochs.state.nodes[home].peer, generate, 0)
        except (BadMessage, RecursionError) as error:  # nested deeper than we would send ourselves
            return Refused("request", f"the request cannot be passed on: {error}", None, submit.request_id)
        if not sent:
            return Refused("not_ready", f"node {home} cannot be reached now", RETRY_S, submit.request_id)
        return None

    def _why_not(self, submit: Submit) -> Refused | None:
        if not submit.request_id:
            return Refused("request", "a request needs an id")
        if submit.ledger:
            detail = "a ledger is for a request that moves from home to home; a client gives none"
            return Refused("request", detail, None, submit.request_id)
        if submit.request_id in self.streams:
            return Refused("request", f"request id {submit.request_id} is in use", None, submit.request_id)
        may_come = any(not r.serves and not r.has_served for r in self._epochs.state.nodes.values())
        unhosted = (
            experts_without_host(self._epochs.placement, set(self._epochs.state.alive)) if may_come else 0
        )
        if (
            unhosted
        ):  # somebody may still bring them; once all have been here, requests that need them fail and say so
            waiting_for = self._epochs.state.waiting_for()
            detail = (
                f"the cluster is not ready: {unhosted} experts have no host yet, waiting for {waiting_for}"
            )
            return Refused("not_ready", self._with_remedy(detail), RETRY_S, submit.request_id)
        return None

    def _with_remedy(self, detail: str) -> str:
        return "; ".join(filter(None, (detail, self._epochs.state.to_start())))

    def _choose_worker(self, submit: Submit, but: str = "") -> str:
        """Who computes the prompt; empty if nobody can, so that its home does."""
        workers = [
            node.name
            for node in self._epochs.cluster.nodes
            if PREFILL in node.roles and self._epochs.state.nodes[node.name].serves and node.name != but
        ]
        workers = [name for name in workers if name not in self._epochs.leaving] or workers
        if not workers:
            return ""
        loads = {name: self.streams.in_flight(name, "prefill") for name in workers}
        return self._routes.choose_worker(submit, workers, loads)

    def _prefilled(self, name: str, message: Prefilled, counts: np.ndarray, hashes: np.ndarray) -> None:
        """A prompt is computed and its first token on its way: choose the home of what follows."""
        handoff = Handoff(
            self._address_of(name), message.cached_tokens, timing=message.timing, served=message.served
        )
        signature = self._routes.signature(counts)
        self._routes.see(signature, self._clock.now())
        named = [row.tobytes() for row in hashes]
        self.streams.prefilled(message.request_id, handoff, named, signature, self._clock.now())
        self.find_homes()

    def _fetch_ahead(self, name: str, request_id: str, counts: np.ndarray, hashes: np.ndarray) -> None:
        """A part of a prompt is computed: let its likely home fetch that part while the rest is."""
        stream, state = self.streams.get(request_id), self._epochs.state
        if stream is None or stream.phase != "prefill" or stream.is_aborted:
            return
        home = stream.ahead if stream.ahead in state.alive else None
        named = [row.tobytes() for row in hashes]
        if home is None:
            home = self._routes.choose_home(
                self._loads(request_id=request_id),
                self._routes.signature(counts),
                source=name,
                hashes=named,
                tier=self._routes.tier_of(stream.submit),
            )
        if home is None or home == name or self._routes.hits(home, named) == len(named):
            return
        message = FetchAhead(request_id, self._address_of(name))
        if self._send(state.nodes[home].peer, message, tensors=(hashes,)):
            self.streams.look_ahead(request_id, home, len(named))

    def _forget_ahead(self, request_id: str, home: str = "") -> None:
        """Nothing more of this prompt is to be fetched by a node that is not its home."""
        stream = self.streams.get(request_id)
        if stream is not None and stream.ahead not in ("", home):
            record = self._epochs.state.nodes.get(stream.ahead)
            if record is not None:
                self._send(record.peer, Abort(request_id))

    def _handoff_of(self, stream: Stream) -> Handoff | None:
        """What its next home is told of the prompt; nobody is asked for blocks who is gone."""
        handoff = stream.prefilled
        if handoff is not None and handoff.source.name not in self._epochs.state.alive:
            return msgspec.structs.replace(handoff, source=PeerAddress(handoff.source.name, ""))
        return handoff

    def _address_of(self, name: str) -> PeerAddress:
        key = self._keys.of_peer(name).decode() if self._keys else ""
        return PeerAddress(name, find_node(self._epochs.cluster, name).address, key)

    def _loads(self, but: str = "", request_id: str = "") -> list[HomeLoad]:
        """The first nodes of the decode groups whose nodes all serve; `but` is in none, nor who leaves if it can be helped.

        request_id  the request that asks: it is not expected anywhere itself
        """
        alive, leaving = set(self._epochs.state.alive), self._epochs.leaving
        whole = [
            group.nodes
            for group in self._epochs.placement.groups
            if alive.issuperset(group.nodes) and but not in group.nodes
        ]
        staying = [nodes for nodes in whole if leaving.isdisjoint(nodes)]
        return [
            HomeLoad(
                home,
                self.streams.in_flight(home, "decode") + self.streams.expected(home, but=request_id),
                self._epochs.cluster.max_requests,
                self.speeds.get(home, 1.0),
            )
            for home, *_ in staying or whole
        ]

    def _choose_home(self, but: str = "", stream: Stream | None = None, tier: int = 0) -> str | None:
        """The home that a request goes to, or goes on at."""
        if stream is None:
            return self._routes.choose_home(self._loads(but), tier=tier)
        source = stream.prefilled.source.name if stream.prefilled is not None else ""
        return self._routes.choose_home(
            self._loads(but, stream.request_id),
            stream.signature,
            source=source if source in self._epochs.state.alive else "",
            hashes=stream.hashes,
            ahead=stream.ahead,
            num_ahead=stream.num_ahead,
            tier=tier,
        )

    def find_homes(self, but: str = "") -> None:
        """Let another node go on with each request that lost its home: prompt and tokens so far are prefilled there.

        It waits for one as long as a client would; `Stream.is_hopeless` says when it is given up.
        """
        now = self._clock.now()
        for stream in self.streams.homeless():
            request_id = stream.request_id
            if stream.is_aborted:
                self._deliver(self.streams.end(Finished(request_id, "abort")))
            elif stream.is_hopeless(now, self._homeless_s):
                why = f"{stream.why}, and no other node went on with it"
                failed = Failed(request_id, "cluster", "node_lost", why, node=stream.lost_node)
                self._deliver(self.streams.end(failed))
            elif stream.may_try(now):
                self._find_home(stream, but)

    def _find_home(self, stream: Stream, but: str) -> None:
        request_id = stream.request_id
        if not stream.token_ids and self._routes.separates:
            worker = self._choose_worker(stream.submit, but)
            if worker and self._send_to(worker, stream.submit, prefill_only=True) is None:
                log.info("request %s: its prompt is computed at %s", request_id, worker)
                self.streams.move(request_id, worker, self._clock.now(), "prefill")
                return
        tier = self._routes.tier_of(stream.submit)
        home = self._choose_home(but, stream, tier)
        if home is None:
            return
        resumed = msgspec.structs.replace(
            stream.submit, output_ids=list(stream.token_ids), ledger=list(stream.ledger)
        )
        if self._send_to(home, resumed, handoff=self._handoff_of(stream)) is not None:
            return
        log.info("request %s goes on at %s after %d tokens", request_id, home, len(stream.token_ids))
        self._forget_ahead(request_id, home)
        blocks = self._epochs.placement.plan_of(home).kv_blocks
        self._routes.sent(home, stream.hashes, blocks, tier, stream.signature)
        self.streams.move(request_id, home, self._clock.now())
        if stream.lost is None and not self.outbox.send(stream.client, Accepted(request_id, home)):
            self.client_gone(stream.client)

    def _abort(self, request_id: str) -> None:
        """The client wants no more of it."""
        self._forget_ahead(request_id)
        if self.streams.node_of(request_id) == "":
            self._deliver(self.streams.end(Finished(request_id, "abort")))
        else:
            self.streams.abort(request_id)
            self._abort_at_home(request_id)

    def _abort_at_home(self, request_id: str) -> None:
        node = self.streams.node_of(request_id)
        if node:
            self._send(self._epochs.state.nodes[node].peer, Abort(request_id), 0)

    def _deliver(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            if not self.outbox.send(delivery.client, delivery.message):
                self.client_gone(delivery.client)

    def client_gone(self, client: bytes) -> None:
        """Nobody waits for these answers any more: their blocks are freed within a step."""
        self._tell_gone(client)
        self.outbox.forget(client)
        for request_id in self.streams.of_client(client):
            log.info("request %s: its client is gone", request_id)
            self._abort(request_id)
            self.streams.end(Finished(request_id, "abort"))

    def move_from(self, name: str, why: str, *, has_ended: bool) -> None:
        """A node is gone: whatever it was home to, or ran some layers of, goes on elsewhere.

        has_ended  its process is, which the request may have done
        """
        self._routes.forget(name)
        homes = {name} | {group.nodes[0] for group in self._epochs.serving_groups() if name in group.nodes}
        for home in sorted(homes):
            for request_id in self.streams.of_node(home):
                self._abort_at_home(request_id)
                loss: Loss = "ended" if has_ended else "away"
                self.streams.lose_home(request_id, why, self._clock.now(), loss)
        self.find_homes(but=name)
