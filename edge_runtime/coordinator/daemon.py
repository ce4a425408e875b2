"""The coordinator: one socket for nodes and clients. Carries out what `state`, `routing` and `streams` decide."""

import logging
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import psutil

from edge_runtime.clock import Clock
from edge_runtime.coordinator import epochs
from edge_runtime.coordinator import state as states
from edge_runtime.coordinator.deploy import deploy_for, experts_without_host, refuse_unchangeable
from edge_runtime.coordinator.home_speeds import home_speeds
from edge_runtime.coordinator.outbox import Outbox
from edge_runtime.coordinator.preview import preview_of
from edge_runtime.coordinator.routes import Routes
from edge_runtime.coordinator.snapshot import Snapshot
from edge_runtime.coordinator.status import status_body
from edge_runtime.coordinator.streams import Delivery, Phase, Stream, Streams
from edge_runtime.errors import ArtifactError, ConfigError, Refusal
from edge_runtime.protocol import (
    MAX_HEADER_BYTES,
    Abort,
    Accepted,
    Activate,
    Activated,
    Apply,
    Applying,
    Attach,
    BadMessage,
    Credit,
    Deployed,
    DeployFailed,
    DeployProgress,
    Drain,
    Envelope,
    Failed,
    FetchAhead,
    Finished,
    Generate,
    GiveUp,
    Handoff,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Message,
    PeerAddress,
    PeersChanged,
    Planned,
    Prefilled,
    Prefilling,
    Refused,
    Release,
    StatusQuery,
    StatusReply,
    StillRunning,
    Stop,
    Stopping,
    Submit,
    Tokens,
    Welcome,
    refuse_mismatch,
)
from edge_runtime.routing.base import HomeLoad
from edge_runtime.transport.endpoint import Sent, Server
from edge_runtime.transport.keys import Keys
from edge_runtime.weights.service import BUSY_S, WeightsService
from edge_runtime.weights.stores import Store
from topology.cluster import PREFILL, Cluster, find_node
from topology.costs import ModelFootprint
from topology.errors import TopologyError
from topology.files import read_cluster_text
from topology.placement import Placement
from topology.traits import ExpertTraits

log = logging.getLogger(__name__)

TICK_S = 0.1
LATE_BEATS = 1.2  # of silence before it is tried whether a node's connection has ended
RETRY_S = 1.0
SPEEDS_S = 2.0  # how often it is looked how fast homes are
PROBE_S = 1.0  # how often a client that takes nothing is looked for
MAX_BACKLOG = 1000  # messages taken before time is looked at
MAX_MOVES = 3  # homes a request may lose, without a token of any, before it is given up
HOMELESS_S = 30.0  # how long a request waits for another home
HOME_IS_GONE = ("stopping", "not_ready", "moving", "stage_lost")  # failures of a home, not of the request
SEED_BITS = 63
FORSAKEN_S = 60.0  # how long an answer of the coordinator before is kept for its client
NODES_BACK_S = 10.0  # after a start, in which nodes come back and tell what runs there
ATTACH_AGAIN_S = 0.5
MAX_LOADERS = 1024
MAX_CLIENTS = 4096  # connections remembered; the oldest idle one must greet again


class CoordinatorDaemon:
    """Owns membership, the placement epoch, routing and token streams. One thread, one loop."""

    def __init__(
        self,
        cluster: Cluster,
        footprint: ModelFootprint,
        placement: Placement,
        *,
        model_hash: str,
        keys: Keys | None,
        clock: Clock,
        homeless_s: float = HOMELESS_S,
        before: Snapshot | None = None,
        keep: Callable[[epochs.Epochs], None] = lambda found: None,
        traits: ExpertTraits | None = None,
        weights: Store | None = None,
        routes: Routes | None = None,
    ) -> None:
        """homeless_s: how long a request whose home is gone waits for another, seconds.

        traits   what calibration found of the experts
        weights  the model's files, for nodes that lack them
        routes   who chooses homes; None: as the file says, without calibration
        before   what the coordinator before left, whether or not `placement` is its
        keep     takes down where the cluster is, whenever that has changed
        """
        self._epochs = epochs.Epochs(
            cluster,
            footprint,
            placement,
            clock.now(),
            traits,
            newest=before.newest if before is not None else 0,
            outcomes=before.outcomes if before is not None else (),
        )
        self._keep = keep
        self._kept: tuple[int, int, epochs.Outcome | None] = (0, 0, None)
        self._routes = routes or Routes(cluster, footprint, None, seed=secrets.randbits(SEED_BITS))
        self._routes.follow(cluster, placement)
        self._epochs.joint = self._routes.joint
        self._routed = (cluster, placement)
        self._refitting: threading.Thread | None = None
        self._speeds: dict[str, float] = {}  # home -> how fast it decodes, against the mean
        self._speeds_at_s = 0.0
        self._beside = ThreadPoolExecutor(1, "beside")
        self._speeding: Future[tuple[dict[str, float], float]] | None = None
        self._footprint = footprint
        self._clock = clock
        self._keys = keys
        self._homeless_s = homeless_s
        self._identity = Welcome(
            node="coordinator",
            role="coordinator",
            cluster=cluster.name,
            model_hash=model_hash,
            pid=os.getpid(),
            incarnation=secrets.token_hex(8),
        )
        # It takes no tensors: whoever sends a frame that no header has is cut off before it is all there.
        self._server = Server(cluster.coordinator, keys=keys, max_frame_bytes=MAX_HEADER_BYTES)
        self._streams = Streams()
        self._outbox = Outbox(
            lambda client, message, call_id: self._server.send(client, message, call_id=call_id)
        )
        self._node_of: dict[bytes, str] = {}  # connection -> node
        self._clients: dict[bytes, None] = {}  # greeted connections of clients
        self._loaders: dict[bytes, str] = {}  # and of nodes that ask for weights
        self._weights = WeightsService(weights, clock, cluster.weights_rate_bps, gives_digests=True)
        self._started_s = clock.now()
        self._tick_at_s = 0.0
        self._probe_at_s = 0.0
        self._stopping = False

    @property
    def _cluster(self) -> Cluster:
        return self._epochs.cluster

    @property
    def _placement(self) -> Placement:
        return self._epochs.placement

    @property
    def _state(self) -> states.ClusterState:
        return self._epochs.state

    @property
    def address(self) -> str:
        return self._server.address

    def stop(self) -> None:
        """End the loop soon; may be called from a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Serve until stopped."""
        log.info("cluster %s: listening on %s", self._cluster.name, self.address)
        try:
            while not self._stopping:
                received = self._server.receive(BUSY_S if self._weights.is_busy else TICK_S)
                if received is not None:
                    self._take(*received)
                if self._weights.is_busy:
                    self._send_weights()
                if self._clock.now() >= self._tick_at_s:
                    self._tick()
        finally:
            self._shut_down()

    def _tick(self) -> None:
        # What waits is heard first: a coordinator that was held up must not take its own silence for the nodes'.
        for _ in range(MAX_BACKLOG):
            received = self._server.receive(0)
            if received is None:
                break
            self._take(*received)
        now = self._clock.now()
        self._tick_at_s = now + TICK_S
        self._apply(states.Tick())
        self._take_speeds(now)
        self._routes.follow_lanes(self._loads(), now)
        self._find_homes()
        self._refit(now)
        for client in self._outbox.flush():
            self._client_gone(client)
        for record in list(self._state.nodes.values()):
            silent_s = now - record.last_heard_s
            is_late = (
                record.phase in ("ready", "suspect") and silent_s > LATE_BEATS * self._cluster.heartbeat_s
            )
            # Only an attempt to send tells a connection that ended from a node that is busy.
            if is_late and self._server.send(record.peer, HeartbeatReply(0)) is Sent.UNREACHABLE:
                self._apply(states.Unreachable(record.name))
        if now >= self._probe_at_s:
            self._probe_at_s = now + PROBE_S
            self._end_forsaken()
            for client in self._streams.stalled_clients():
                # A message that says nothing: only the attempt tells whether anybody is there.
                if self._server.send(client, HeartbeatReply(0)) is Sent.UNREACHABLE:
                    self._client_gone(client)

    def _send_weights(self) -> None:
        for reply in self._weights.replies():
            self._server.send(
                reply.peer, reply.message, call_id=reply.call_id, tensors=reply.tensors, zero_copy=True
            )

    # Messages.

    def _take(self, peer: bytes, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, Hello):
            self._greet(peer, message, envelope.call_id)
        elif peer in self._node_of:
            self._take_from_node(self._node_of[peer], peer, message, envelope.tensors)
        elif peer in self._clients:
            self._take_from_client(peer, message, envelope.call_id)
        elif peer in self._loaders:
            refused = self._weights.offer(peer, envelope.call_id, message)
            if refused is not None:
                self._server.send(peer, refused, call_id=envelope.call_id)
        else:
            request_id = getattr(message, "request_id", "")
            detail = "the coordinator takes messages only after a Hello"
            refused = Refused("handshake", detail, 0.0, request_id)
            self._server.send(peer, refused, call_id=envelope.call_id)

    def _greet(self, peer: bytes, hello: Hello, call_id: int) -> None:
        ours = Hello(node="coordinator", cluster=self._cluster.name, model_hash=self._identity.model_hash)
        refused = refuse_mismatch(hello, ours)
        if refused is None and self._keys and hello.role != "client" and self._server.key_owner != hello.node:
            refused = Refused("key", f"the key used is {self._server.key_owner}'s, not {hello.node}'s")
        if refused is None and hello.role == "coordinator":
            refused = Refused("role", "this address is a coordinator's; a second one cannot join it")
        if refused is None and hello.role != "client" and hello.node not in self._state.nodes:
            names = ", ".join(self._state.nodes)
            refused = Refused(
                "unknown_node", f"no node is called {hello.node}; the topology file has {names}"
            )
        if refused is not None:
            log.warning("refused %s: %s", hello.node, refused.detail)
            self._server.send(peer, refused, call_id=call_id)
            if hello.role not in ("client", "loader"):
                self._carry_out(self._epochs.cannot_join(hello.node, refused.detail, self._clock.now()))
            return
        if hello.role == "loader":
            while len(self._loaders) >= MAX_LOADERS:
                del self._loaders[next(iter(self._loaders))]
            self._loaders[peer] = hello.node
            self._server.send(peer, self._identity, call_id=call_id)
            return
        if hello.role == "client":
            self._remember_client(peer)
            self._server.send(peer, self._identity, call_id=call_id, epoch=self._placement.epoch)
            return
        self._apply(states.Joined(hello.node, peer, hello.incarnation, hello.pid, hello.numerics))

    def _remember_client(self, peer: bytes) -> None:
        while len(self._clients) >= MAX_CLIENTS:
            oldest = next((client for client in self._clients if not self._streams.of_client(client)), None)
            if oldest is None:
                break
            del self._clients[oldest]
        self._clients[peer] = None

    def _take_from_node(
        self, name: str, peer: bytes, message: Message, tensors: Sequence[np.ndarray] = ()
    ) -> None:
        match message:
            case Heartbeat(sequence=sequence, report=report):
                self._server.send(peer, HeartbeatReply(sequence))
                self._apply(states.Beat(name, report))
            case DeployProgress(epoch=epoch, bytes_done=done, bytes_total=total, what=what):
                self._carry_out(self._epochs.progressed(name, epoch, done, total, self._clock.now(), what))
            case Deployed(epoch=epoch, weight_bytes=weight_bytes):
                self._carry_out(self._epochs.loaded(name, epoch, weight_bytes, self._clock.now()))
            case DeployFailed(epoch=epoch, reason=reason):
                self._carry_out(self._epochs.cannot_load(name, epoch, reason, self._clock.now()))
            case Activated(epoch=epoch):
                self._carry_out(self._epochs.switched(name, epoch, self._clock.now()))
            case Tokens():
                if self._streams.node_of(message.request_id) != name:
                    self._server.send(
                        peer, Abort(message.request_id)
                    )  # ended here; the node does not know yet
                else:
                    self._deliver(self._streams.tokens(message))
            case Failed(reason=reason) if reason in HOME_IS_GONE:
                if self._streams.node_of(message.request_id) == name:
                    self._streams.lose_home(
                        message.request_id, message.detail, self._clock.now(), is_planned=reason == "moving"
                    )
                    self._find_homes(but=name)
            case Finished(finish_reason="abort") if not self._streams.is_aborted(message.request_id):
                pass  # of a time when the request was here before: it was taken away, and has come back since
            case Prefilling():
                if self._streams.node_of(message.request_id) == name:
                    self._fetch_ahead(name, message.request_id, *tensors)
            case Prefilled():
                if self._streams.node_of(message.request_id) == name:
                    self._prefilled(name, message, *tensors)
            case StillRunning():
                self._adopt(name, peer, message)
            case Finished() | Failed():
                if self._streams.node_of(message.request_id) == name:
                    self._forget_ahead(message.request_id)
                    self._deliver(self._streams.end(message))
            case Stopping(reason=reason):
                self._apply(states.Left(name, reason))
                self._node_of.pop(peer, None)
            case Refused(detail=detail):
                log.warning("%s refused: %s", name, detail)
            case _:
                log.warning(
                    "node %s sent %s, which a coordinator does not take", name, type(message).__name__
                )

    def _take_from_client(self, peer: bytes, message: Message, call_id: int) -> None:
        match message:
            case Submit():
                self._submit(peer, message, call_id)
            case Attach():
                self._attach(peer, message, call_id)
            case Credit(request_id=request_id, count=count):
                if self._streams.client_of(request_id) == peer:
                    self._deliver(self._streams.grant(request_id, count))
            case Abort(request_id=request_id):
                if self._streams.client_of(request_id) == peer:
                    self._abort(request_id)
            case Apply():
                self._change(peer, call_id, lambda: self._apply_file(message))
            case Drain(node=node):
                self._change(peer, call_id, lambda: self._epochs.drain(node, self._clock.now()))
            case GiveUp(epoch=epoch, why=why):
                self._carry_out(self._epochs.give_up(epoch, why, self._clock.now()))
            case StatusQuery():
                body = status_body(
                    self._cluster,
                    self._placement,
                    self._state,
                    self._streams,
                    coordinator={
                        "address": self.address,
                        "pid": os.getpid(),
                        "uptime_s": round(self._clock.now() - self._started_s, 3),
                        "rss_bytes": psutil.Process().memory_info().rss,
                        "bad_frames": self._server.bad_messages,
                    },
                    routing=self._routes.body() | {"speeds": self._speeds},
                    change=self._epochs.change_text(),
                    leaving=self._epochs.leaving,
                    outcomes=list(self._epochs.outcomes),
                    measured=self._epochs.measured(),
                    now=self._clock.now(),
                )
                self._outbox.send(peer, StatusReply(body), call_id)
            case _:
                detail = f"the coordinator takes no {type(message).__name__} from a client"
                self._server.send(peer, Refused("unexpected", detail), call_id=call_id)

    # Requests.

    def _submit(self, peer: bytes, submit: Submit, call_id: int) -> None:
        request_id = submit.request_id
        refused = self._why_not(submit)
        if submit.sampling.get("seed") is None:  # drawn here, so that another home would draw the same tokens
            seed = secrets.randbits(SEED_BITS)
            submit = msgspec.structs.replace(submit, sampling={**submit.sampling, "seed": seed})
        worker = "" if refused or not self._routes.separates else self._choose_worker(submit)
        phase: Phase = "prefill" if worker else "decode"
        tier = self._routes.tier_of(submit)
        home = "" if refused else worker or self._choose_home(tier=tier) or ""
        if refused is None and not home:
            detail = f"no node can answer now: waiting for {self._state.waiting_for()}"
            gone = [record.name for record in self._state.nodes.values() if record.phase in ("lost", "left")]
            if gone:
                detail += f"; if it does not come by itself, run `edge-runtime node {gone[0]}` on its machine"
            refused = Refused("not_ready", detail, RETRY_S, request_id)
        refused = refused or self._send_to(home, submit, prefill_only=bool(worker))
        if refused is not None:
            self._outbox.send(peer, refused, call_id)
            return
        self._streams.open(submit, peer, home, phase)
        if phase == "decode":
            self._routes.sent(home, (), self._placement.plan_of(home).kv_blocks, tier)
        if not self._outbox.send(peer, Accepted(request_id, home), call_id):
            self._client_gone(peer)

    def _adopt(self, name: str, peer: bytes, message: StillRunning) -> None:
        """A request runs at a node since before this coordinator; its client may come back for it."""
        request_id = message.request_id
        if request_id not in self._streams:
            self._streams.adopt(message, name, self._clock.now())
            log.info("request %s runs at %s: %d tokens so far", request_id, name, len(message.output_ids))
        elif self._streams.node_of(request_id) != name:  # it moved meanwhile
            self._server.send(peer, Abort(request_id))

    def _attach(self, peer: bytes, message: Attach, call_id: int) -> None:
        request_id = message.request_id
        deliveries = self._streams.attach(
            request_id, peer, message.num_tokens, message.num_chars, message.credit
        )
        if deliveries is None:
            is_early = self._clock.now() - self._started_s < NODES_BACK_S or not self._state.is_ready
            detail = "the answer that was begun under another coordinator runs nowhere any more"
            wait_s = ATTACH_AGAIN_S if is_early else None
            self._outbox.send(peer, Refused("unknown_request", detail, wait_s, request_id), call_id)
            return
        if not self._outbox.send(
            peer, Accepted(request_id, self._streams.node_of(request_id) or ""), call_id
        ):
            self._client_gone(peer)
            return
        self._deliver(deliveries)

    def _end_forsaken(self) -> None:
        """Answers whose clients have not come back."""
        for request_id in self._streams.forsaken(self._clock.now() - FORSAKEN_S):
            log.info("request %s: its client did not come back", request_id)
            self._streams.abort(request_id)
            self._abort_at_home(request_id)
            self._streams.end(Finished(request_id, "abort"))

    def _send_to(
        self, home: str, submit: Submit, *, prefill_only: bool = False, handoff: Handoff | None = None
    ) -> Refused | None:
        """Hand a request to its home; the answer says why that did not work."""
        fields = {name: getattr(submit, name) for name in submit.__struct_fields__}
        generate = Generate(**fields, prefill_only=prefill_only, handoff=handoff)
        try:
            sent = self._server.send(self._state.nodes[home].peer, generate)
        except (BadMessage, RecursionError) as error:  # nested deeper than we would send ourselves
            return Refused("request", f"the request cannot be passed on: {error}", None, submit.request_id)
        if not sent:
            return Refused("not_ready", f"node {home} cannot be reached now", RETRY_S, submit.request_id)
        return None

    def _why_not(self, submit: Submit) -> Refused | None:
        if not submit.request_id:
            return Refused("request", "a request needs an id")
        if submit.output_ids or submit.ledger:
            detail = (
                "output_ids and ledger are for a request that moves from home to home; a client gives none"
            )
            return Refused("request", detail, None, submit.request_id)
        if submit.request_id in self._streams:
            return Refused("request", f"request id {submit.request_id} is in use", None, submit.request_id)
        may_come = any(not r.serves and not r.has_served for r in self._state.nodes.values())
        unhosted = experts_without_host(self._placement, set(self._state.alive)) if may_come else 0
        if (
            unhosted
        ):  # somebody may still bring them; once all have been here, requests that need them fail and say so
            waiting_for = self._state.waiting_for()
            detail = (
                f"the cluster is not ready: {unhosted} experts have no host yet, waiting for {waiting_for}"
            )
            return Refused("not_ready", detail, RETRY_S, submit.request_id)
        return None

    def _choose_worker(self, submit: Submit, but: str = "") -> str:
        """Who computes the prompt; empty if nobody can, so that its home does."""
        workers = [
            node.name
            for node in self._cluster.nodes
            if PREFILL in node.roles and self._state.nodes[node.name].serves and node.name != but
        ]
        workers = [name for name in workers if name not in self._epochs.leaving] or workers
        if not workers:
            return ""
        loads = {name: self._streams.in_flight(name, "prefill") for name in workers}
        return self._routes.choose_worker(submit, workers, loads)

    def _prefilled(self, name: str, message: Prefilled, counts: np.ndarray, hashes: np.ndarray) -> None:
        """A prompt is computed and its first token on its way: choose the home of what follows."""
        handoff = Handoff(
            self._address_of(name), message.cached_tokens, timing=message.timing, served=message.served
        )
        signature = self._routes.signature(counts)
        self._routes.see(signature, self._clock.now())
        named = [row.tobytes() for row in hashes]
        self._streams.prefilled(message.request_id, handoff, named, signature, self._clock.now())
        self._find_homes()

    def _fetch_ahead(self, name: str, request_id: str, counts: np.ndarray, hashes: np.ndarray) -> None:
        """A part of a prompt is computed: let its likely home fetch that part while the rest is."""
        stream = self._streams.get(request_id)
        if stream is None or stream.phase != "prefill" or stream.is_aborted:
            return
        home = stream.ahead if stream.ahead in self._state.alive else None
        named = [row.tobytes() for row in hashes]
        if home is None:
            home = self._routes.choose_home(
                self._loads(request_id=request_id),
                self._routes.signature(counts),
                source=name,
                hashes=named,
                tier=self._routes.tier_of(stream.submit),
            )
        if home in (None, name) or self._routes.hits(home, named) == len(named):
            return
        message = FetchAhead(request_id, self._address_of(name))
        if self._server.send(self._state.nodes[home].peer, message, tensors=(hashes,)):
            self._streams.look_ahead(request_id, home, len(named))

    def _forget_ahead(self, request_id: str, home: str = "") -> None:
        """Nothing more of this prompt is to be fetched by a node that is not its home."""
        stream = self._streams.get(request_id)
        if stream is not None and stream.ahead not in ("", home):
            self._tell(stream.ahead, Abort(request_id))

    def _handoff_of(self, stream: Stream) -> Handoff | None:
        """What its next home is told of the prompt; nobody is asked for blocks who is gone."""
        handoff = stream.prefilled
        if handoff is not None and handoff.source.name not in self._state.alive:
            return msgspec.structs.replace(handoff, source=PeerAddress(handoff.source.name, ""))
        return handoff

    def _address_of(self, name: str) -> PeerAddress:
        key = self._keys.of_peer(name).decode() if self._keys else ""
        return PeerAddress(name, find_node(self._cluster, name).address, key)

    def _loads(self, but: str = "", request_id: str = "") -> list[HomeLoad]:
        """The first nodes of the decode groups whose nodes all serve; `but` is in none, nor who leaves if it can be helped.

        request_id  the request that asks: it is not expected anywhere itself
        """
        alive, leaving = set(self._state.alive), self._epochs.leaving
        whole = [
            group.nodes
            for group in self._placement.groups
            if alive.issuperset(group.nodes) and but not in group.nodes
        ]
        staying = [nodes for nodes in whole if leaving.isdisjoint(nodes)]
        return [
            HomeLoad(
                home,
                self._streams.in_flight(home, "decode") + self._streams.expected(home, but=request_id),
                self._cluster.max_requests,
                self._speeds.get(home, 1.0),
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
            source=source if source in self._state.alive else "",
            hashes=stream.hashes,
            ahead=stream.ahead,
            num_ahead=stream.num_ahead,
            tier=tier,
        )

    def _find_homes(self, but: str = "") -> None:
        """Let another node go on with each request that lost its home: prompt and tokens so far are prefilled there.

        A request waits for a home as long as a client would; one that lost three homes without a token of any is not
        tried on a fourth.
        """
        now = self._clock.now()
        for stream in self._streams.homeless():
            request_id = stream.request_id
            if stream.is_aborted:
                self._deliver(self._streams.end(Finished(request_id, "abort")))
                continue
            if stream.moves <= MAX_MOVES and not stream.token_ids and self._routes.separates:
                worker = self._choose_worker(stream.submit, but)
                if worker and self._send_to(worker, stream.submit, prefill_only=True) is None:
                    log.info("request %s: its prompt is computed at %s", request_id, worker)
                    self._streams.move(request_id, worker, "prefill")
                    continue
            tier = self._routes.tier_of(stream.submit)
            home = self._choose_home(but, stream, tier) if stream.moves <= MAX_MOVES else None
            if home is not None:
                resumed = msgspec.structs.replace(
                    stream.submit, output_ids=list(stream.token_ids), ledger=list(stream.ledger)
                )
                if self._send_to(home, resumed, handoff=self._handoff_of(stream)) is None:
                    log.info(
                        "request %s goes on at %s after %d tokens", request_id, home, len(stream.token_ids)
                    )
                    self._forget_ahead(request_id, home)
                    most_blocks = self._placement.plan_of(home).kv_blocks
                    self._routes.sent(home, stream.hashes, most_blocks, tier, stream.signature)
                    self._streams.move(request_id, home)
                    accepted = Accepted(request_id, home)
                    if stream.lost is None and not self._outbox.send(stream.client, accepted):
                        self._client_gone(stream.client)
            elif stream.moves > MAX_MOVES or now - stream.homeless_s > self._homeless_s:
                self._deliver(
                    self._streams.end(
                        Failed(request_id, "cluster", "node_lost", stream.why, node=stream.lost_node)
                    )
                )

    def _abort(self, request_id: str) -> None:
        """The client wants no more of it."""
        self._forget_ahead(request_id)
        if self._streams.node_of(request_id) == "":
            self._deliver(self._streams.end(Finished(request_id, "abort")))
        else:
            self._streams.abort(request_id)
            self._abort_at_home(request_id)

    def _abort_at_home(self, request_id: str) -> None:
        node = self._streams.node_of(request_id)
        if node:
            self._server.send(self._state.nodes[node].peer, Abort(request_id))

    def _deliver(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            if not self._outbox.send(delivery.client, delivery.message):
                self._client_gone(delivery.client)

    def _client_gone(self, client: bytes) -> None:
        """Nobody waits for these answers any more: their blocks are freed within a step."""
        self._clients.pop(client, None)
        self._outbox.forget(client)
        for request_id in self._streams.of_client(client):
            log.info("request %s: its client is gone", request_id)
            self._abort(request_id)
            self._streams.end(Finished(request_id, "abort"))

    # State.

    def _apply(self, event: states.Event) -> None:
        self._carry_out(self._epochs.apply(event, self._clock.now()))

    def _refit(self, now: float) -> None:
        """Let the router follow what is asked, beside the loop: one thread at a time, and one write at its end."""
        if self._refitting is None or not self._refitting.is_alive():
            refit = self._routes.refit_due(now)
            if refit is not None:
                self._refitting = threading.Thread(target=refit, name="refit", daemon=True)
                self._refitting.start()

    def _take_speeds(self, now: float) -> None:
        """Let the router know what nodes and links have turned out to be; worked out beside the loop, since it takes 0.2 s for
        8 homes of 48 layers of 128 experts."""
        if self._speeding is not None and self._speeding.done():
            self._speeds, took_s = self._speeding.result()
            self._speeding, self._speeds_at_s = None, now + max(SPEEDS_S, 20 * took_s)
        if self._speeding is None and now >= self._speeds_at_s:
            measured = self._epochs.measured()
            self._routes.measured(measured.links)
            asked = self._cluster, self._footprint, self._placement, measured

            def work() -> tuple[dict[str, float], float]:
                began = self._clock.now()
                return home_speeds(*asked), self._clock.now() - began

            self._speeding = self._beside.submit(work)

    def _follow_placement(self) -> None:
        """Let the router know when another file or placement counts."""
        cluster, placement = self._routed
        if cluster is not self._cluster or placement is not self._placement:
            self._routed = (self._cluster, self._placement)
            self._routes.follow(*self._routed)

    def _carry_out(self, commands: Sequence[epochs.Command]) -> None:
        self._follow_placement()
        outcomes = self._epochs.outcomes
        counting = self._epochs.active, self._epochs.newest, outcomes[-1] if outcomes else None
        if counting != self._kept:  # before anybody is told: the next coordinator has to know as much as they
            self._kept = counting
            self._keep(self._epochs)
        for command in commands:
            match command:
                case states.Note(text):
                    log.info("%s", text)
                case states.Greet(name) | states.SendShare(name):  # the shares follow
                    self._welcome(name)
                case states.RefuseJoin(peer, reason, retry_after_s):
                    log.warning("%s", reason)
                    self._server.send(peer, Refused("name_in_use", reason, retry_after_s))
                case states.MoveRequests(name, why):
                    self._move_requests(name, why)
                case epochs.SendDeploy(name, epoch):
                    self._send_deploy(name, epoch)
                case epochs.SendActivate(name, epoch):
                    self._tell(name, Activate(epoch))
                case epochs.SendRelease(name, epoch):
                    self._tell(name, Release(epoch))
                case epochs.Dismiss(peer, why):
                    self._server.send(peer, Stop(why))
                    self._node_of.pop(peer, None)
                case epochs.Announce(epoch, alive, replacing):
                    for name in alive:
                        self._tell(name, PeersChanged(epoch, alive, replacing=replacing))

    def _tell(self, name: str, message: Message) -> None:
        record = self._state.nodes.get(name)
        if record is not None:
            self._server.send(record.peer, message)

    def _move_requests(self, name: str, why: str) -> None:
        """A node is gone: whatever it was home to, or ran some layers of, goes on elsewhere."""
        self._routes.forget(name)
        homes = {name} | {group.nodes[0] for group in self._epochs.serving_groups() if name in group.nodes}
        for home in sorted(homes):
            for request_id in self._streams.of_node(home):
                self._abort_at_home(request_id)
                self._streams.lose_home(request_id, why, self._clock.now())
        self._find_homes(but=name)

    def _welcome(self, name: str) -> None:
        """From now on the node speaks over this connection, and no other does for it."""
        peer = self._state.nodes[name].peer
        self._node_of = {other: node for other, node in self._node_of.items() if node != name}
        self._node_of[peer] = name
        self._server.send(peer, self._identity, epoch=self._epochs.active)

    def _send_deploy(self, name: str, epoch: int) -> None:
        record, plan, keys = self._state.nodes.get(name), self._epochs.plans.get(epoch), self._keys
        if record is None or plan is None:  # over already
            return
        names = plan.cluster.node_names
        deploy = deploy_for(
            name,
            plan.cluster,
            self._footprint,
            plan.placement,
            model_hash=self._identity.model_hash,
            public_keys={node: keys.of_peer(node).decode() for node in names} if keys else {},
            counts_now=epoch == self._epochs.active,
        )
        if not self._server.send(record.peer, deploy):
            log.warning("%s cannot be reached; it will be sent its share when it greets again", name)

    # What people want of the placement.

    def _change(
        self, client: bytes, call_id: int, begin: Callable[[], tuple[int, list[epochs.Command]] | Planned]
    ) -> None:
        """Begin a change and tell the client its epoch, or why not; what is refused changes nothing."""
        try:
            begun = begin()
        except (TopologyError, ConfigError, ArtifactError) as error:
            self._outbox.send(client, Refused("topology", str(error)), call_id)
            return
        except (ValueError, ArithmeticError, OSError, RecursionError) as error:
            # A value that no reader foresaw: the file's fault, and none that running answers should pay for.
            log.exception("a change was asked for that cannot be worked out")
            detail = f"the file cannot be worked out: {type(error).__name__}: {error}"
            self._outbox.send(client, Refused("topology", detail[:1000]), call_id)
            return
        except Refusal as refusal:
            self._outbox.send(client, Refused.of(refusal), call_id)
            return
        if isinstance(begun, Planned):
            self._outbox.send(client, begun, call_id)
            return
        epoch, commands = begun
        self._outbox.send(client, Applying(epoch), call_id)
        self._carry_out(commands)

    def _apply_file(self, message: Apply) -> tuple[int, list[epochs.Command]] | Planned:
        wanted = read_cluster_text(message.text, Path(message.source))
        refuse_unchangeable(self._cluster, wanted, self._footprint.context_tokens)
        self._routes.refuse(wanted)
        if self._keys:
            for name in wanted.node_names:
                self._keys.of_peer(name)
        plan = self._epochs.plan(wanted)
        if message.only_plan:
            present = {record.name for record in self._state.nodes.values() if record.phase in epochs.HERE}
            return preview_of(
                self._cluster,
                self._placement,
                present,
                plan,
                self._footprint,
                self._epochs.traits,
                self._epochs.measured(),
            )
        return self._epochs.apply_plan(plan, f"{message.source} was applied", self._clock.now())

    def _shut_down(self) -> None:
        self._beside.shutdown(cancel_futures=True)
        for request_id in list(self._streams):
            why = "the coordinator was stopped while the request was being answered"
            self._deliver(self._streams.end(Failed(request_id, "cluster", "stopping", why)))
        self._outbox.flush()
        self._weights.stop()
        self._clock.sleep(0.05)  # let the last messages leave: linger is 0
        self._server.close()
