"""The coordinator: one socket for nodes and clients. Carries out what `epochs` decides; requests are `requests`' part."""

import logging
import math
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import psutil

from edge_runtime.clock import Clock
from edge_runtime.coordinator import epochs
from edge_runtime.coordinator import state as states
from edge_runtime.coordinator.deploy import deploy_for
from edge_runtime.coordinator.home_speeds import home_speeds
from edge_runtime.coordinator.planner import Planner
from edge_runtime.coordinator.planning import Ask, Found
from edge_runtime.coordinator.requests import FORSAKEN_S, NODES_BACK_S, Requests
from edge_runtime.coordinator.routes import Routes
from edge_runtime.coordinator.snapshot import Snapshot
from edge_runtime.coordinator.status import status_body
from edge_runtime.coordinator.wishes import Wishes
from edge_runtime.protocol import (
    MAX_HEADER_BYTES,
    Activate,
    Activated,
    Apply,
    Deployed,
    DeployFailed,
    DeployProgress,
    Drain,
    Envelope,
    GiveUp,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Message,
    PeersChanged,
    Refused,
    Release,
    StatusQuery,
    StatusReply,
    Stop,
    Stopping,
    Welcome,
    refuse_mismatch,
)
from edge_runtime.transport.endpoint import Sent, Server, Waker, wait_any
from edge_runtime.transport.keys import Keys
from edge_runtime.weights.service import BUSY_S, WeightsService
from edge_runtime.weights.stores import Store
from topology.cluster import Cluster
from topology.costs import ModelFootprint
from topology.errors import TopologyError
from topology.placement import Placement
from topology.traits import ExpertTraits

log = logging.getLogger(__name__)

TICK_S = 0.1
LATE_BEATS = 1.2  # of silence before it is tried whether a node's connection has ended
SPEEDS_S = 2.0  # how often it is looked how fast homes are
KEEP_AGAIN_S = 30.0  # after a disk was found full
PROBE_S = 1.0  # how often a client that takes nothing is looked for
MAX_BACKLOG = 1000  # messages taken before time is looked at
HOMELESS_S = 60.0  # how long a request waits for another home
SEED_BITS = 63
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
            absent_s=epochs.ABSENT_S if before is None else NODES_BACK_S,
        )
        self._keep = keep
        self._kept: tuple[int, int, epochs.Outcome | None] = (0, 0, None)
        self._keep_again_s = 0.0
        self._routes = routes or Routes(cluster, footprint, None, seed=secrets.randbits(SEED_BITS))
        self._routes.follow(cluster, placement)
        self._epochs.joint = self._routes.joint
        self._routed = (cluster, placement)
        self._refitting: threading.Thread | None = None
        self._speeds_at_s = 0.0
        self._footprint = footprint
        self._clock = clock
        self._keys = keys
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
        self._waker = Waker()
        self._planner = Planner(self._waker.wake)
        self._requests = Requests(
            self._epochs,
            self._routes,
            clock,
            self._send,
            keys=keys,
            homeless_s=homeless_s,
            client_gone=lambda client: self._clients.pop(client, None),
        )
        self._wishes = Wishes(
            self._epochs,
            self._planner,
            self._routes,
            clock,
            footprint=footprint,
            keys=keys,
            carry_out=self._carry_out,
        )
        self._node_of: dict[bytes, str] = {}  # connection -> node
        self._clients: dict[bytes, None] = {}  # greeted connections of clients
        self._loaders: dict[bytes, str] = {}  # and of nodes that ask for weights
        self._weights = WeightsService(weights, clock, cluster.weights_rate_bps, gives_digests=True)
        self._started_s = clock.now()
        self._tick_at_s = 0.0
        self._probe_at_s = 0.0
        self._stopping = self._ends_answers = False

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
        """End the loop soon; may be called from a signal handler. Answers go on at their nodes, for the next coordinator."""
        self._stopping = True

    def end(self) -> None:
        """The same where the whole cluster stops: whoever waits for an answer is told."""
        self._ends_answers = self._stopping = True

    def run(self) -> None:
        """Serve until stopped."""
        log.info("cluster %s: listening on %s", self._cluster.name, self.address)
        try:
            while not self._stopping:
                received = self._server.receive(0)
                if received is not None:
                    self._take(*received)
                else:
                    wait_any([self._server, self._waker], BUSY_S if self._weights.is_busy else TICK_S)
                    self._waker.clear()
                self._planner.deliver()
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
        self._requests.tick()
        self._refit(now)
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
            self._requests.probe()

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
            oldest = next(
                (client for client in self._clients if not self._requests.streams.of_client(client)), None
            )
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
            case DeployFailed(epoch=epoch, reason=reason, whose=whose):
                self._carry_out(self._epochs.cannot_load(name, epoch, reason, self._clock.now(), whose))
            case Activated(epoch=epoch):
                self._carry_out(self._epochs.switched(name, epoch, self._clock.now()))
            case Stopping(reason=reason):
                self._apply(states.Left(name, reason))
                self._node_of.pop(peer, None)
            case Refused(detail=detail):
                log.warning("%s refused: %s", name, detail)
            case _ if not self._requests.take_from_node(name, peer, message, tensors):
                log.warning(
                    "node %s sent %s, which a coordinator does not take", name, type(message).__name__
                )

    def _take_from_client(self, peer: bytes, message: Message, call_id: int) -> None:
        match message:
            case Apply():
                seek = self._wishes.preview if message.only_plan else self._wishes.apply
                seek(message, self._answer_to(peer, call_id))
            case Drain(node=node):
                self._wishes.drain(node, self._answer_to(peer, call_id))
            case GiveUp(epoch=epoch, why=why):
                self._carry_out(self._epochs.give_up(epoch, why, self._clock.now()))
            case StatusQuery():
                body = status_body(
                    self._cluster,
                    self._placement,
                    self._state,
                    self._requests.streams,
                    coordinator={
                        "address": self.address,
                        "pid": os.getpid(),
                        "uptime_s": round(self._clock.now() - self._started_s, 3),
                        "rss_bytes": psutil.Process().memory_info().rss,
                        "bad_frames": self._server.bad_messages,
                    },
                    routing=self._routes.body() | {"speeds": self._requests.speeds},
                    change=self._epochs.change_text(),
                    leaving=self._epochs.leaving,
                    outcomes=list(self._epochs.outcomes),
                    measured=self._epochs.measured(),
                    now=self._clock.now(),
                )
                self._requests.outbox.send(peer, StatusReply(body), call_id)
            case _ if not self._requests.take_from_client(peer, message, call_id):
                detail = f"the coordinator takes no {type(message).__name__} from a client"
                self._server.send(peer, Refused("unexpected", detail), call_id=call_id)

    def _answer_to(self, client: bytes, call_id: int) -> Callable[[Message], None]:
        def answer(reply: Message) -> None:
            self._requests.outbox.send(client, reply, call_id)

        return answer

    def _send(
        self, peer: bytes, message: Message, call_id: int = 0, tensors: Sequence[np.ndarray] = ()
    ) -> Sent:
        return self._server.send(peer, message, call_id=call_id, tensors=tensors)

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
        if now < self._speeds_at_s:
            return
        measured, began_s = self._epochs.measured(), self._clock.now()
        self._routes.measured(measured.links)
        self._speeds_at_s = math.inf
        cluster, placement = self._cluster, self._placement

        def found(future: Future[dict[str, float]]) -> None:
            self._requests.speeds = future.result()
            ended_s = self._clock.now()
            self._speeds_at_s = ended_s + max(SPEEDS_S, 20 * (ended_s - began_s))

        self._planner.submit(lambda: home_speeds(cluster, self._footprint, placement, measured), found)

    def _follow_placement(self) -> None:
        """Let the router know when another file or placement counts."""
        cluster, placement = self._routed
        if cluster is not self._cluster or placement is not self._placement:
            self._routed = (self._cluster, self._placement)
            self._routes.follow(*self._routed)

    def _take_down(self, counting: tuple[int, int, epochs.Outcome | None]) -> None:
        """Keep where the cluster is. A disk that is full costs the next coordinator what it would know, and no answer."""
        now = self._clock.now()
        if now < self._keep_again_s:
            return
        try:
            self._keep(self._epochs)
        except OSError as error:
            self._keep_again_s = now + KEEP_AGAIN_S
            log.warning(
                "where the cluster is could not be written (%s): a coordinator that is started anew now goes back to what "
                "was written last; trying again after %.0f s",
                error,
                KEEP_AGAIN_S,
            )
            return
        self._kept = counting

    def _carry_out(self, commands: Sequence[epochs.Command]) -> None:
        self._follow_placement()
        outcomes = self._epochs.outcomes
        counting = self._epochs.active, self._epochs.newest, outcomes[-1] if outcomes else None
        if counting != self._kept:  # before anybody is told: the next coordinator has to know as much as they
            self._take_down(counting)
        for command in commands:
            match command:
                case states.Note(text):
                    log.info("%s", text)
                case states.Greet(name) | states.SendShare(name):  # the shares follow
                    self._welcome(name)
                case states.RefuseJoin(peer, reason, retry_after_s):
                    log.warning("%s", reason)
                    self._server.send(peer, Refused("name_in_use", reason, retry_after_s))
                case states.MoveRequests(name, why, has_ended):
                    self._requests.move_from(name, why, has_ended=has_ended)
                case epochs.SendDeploy(name, epoch):
                    self._send_deploy(name, epoch)
                case epochs.SendActivate(name, epoch):
                    self._tell(name, Activate(epoch))
                case epochs.SendRelease(name, epoch):
                    self._tell(name, Release(epoch))
                case epochs.Dismiss(peer, why):
                    self._server.send(peer, Stop(why))
                    self._node_of.pop(peer, None)
                case epochs.WorkOut(ask):
                    self._work_out(ask)
                case epochs.Announce(epoch, alive, replacing):
                    for name in alive:
                        self._tell(name, PeersChanged(epoch, alive, replacing=replacing))

    def _work_out(self, ask: Ask) -> None:
        def worked_out(future: Future[Found]) -> None:
            found: Found | TopologyError
            try:
                found = future.result()
            except TopologyError as error:
                found = error
            self._carry_out(self._epochs.worked_out(ask, found, self._clock.now()))

        self._planner.submit(lambda: self._epochs.work_out(ask), worked_out)

    def _tell(self, name: str, message: Message) -> None:
        record = self._state.nodes.get(name)
        if record is not None:
            self._server.send(record.peer, message)

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

    def _shut_down(self) -> None:
        if self._ends_answers:
            self._requests.end_all("the cluster was stopped while the request was being answered")
        elif len(self._requests.streams):
            log.info(
                "%d answers go on at their nodes: start the coordinator again within %.0f s",
                len(self._requests.streams),
                FORSAKEN_S,
            )
        self._requests.outbox.flush()
        self._planner.stop()
        self._weights.stop()
        self._clock.sleep(0.05)  # let the last messages leave: linger is 0
        self._server.close()
        self._waker.close()
