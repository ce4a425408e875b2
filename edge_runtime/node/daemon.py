"""The node daemon: one process per machine. Carries out what the coordinator says and reports what is.

Its control loop (this module) is the main thread; the engine, the expert service and the loader have threads of
their own and reach it through a queue and a waker. It survives coordinators: it keeps its share and greets again.
"""

import collections
import logging
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from edge_runtime.clock import Clock
from edge_runtime.engine.engine import Engine, Output
from edge_runtime.engine.pipeline import PipelineEngine
from edge_runtime.errors import ProtocolError
from edge_runtime.log import Reminder
from edge_runtime.model.architectures.table import Part
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.folder import tokenizer_of
from edge_runtime.node.answering import Answering
from edge_runtime.node.expert_service import ExpertService, Residents
from edge_runtime.node.gauge import Gauge, peers_to_probe
from edge_runtime.node.handoff import BlockReceivers
from edge_runtime.node.prober import LinkProber
from edge_runtime.node.report import node_report
from edge_runtime.node.resident import give_back, resident_bytes, trim_heap
from edge_runtime.node.share import (
    Fetch,
    LoadedShare,
    Progress,
    ShareLoader,
    learned_by,
    load_share,
    measured,
    num_experts,
    share_digest,
    sub_experts_by,
)
from edge_runtime.node.stage_service import StageService
from edge_runtime.protocol import (
    Abort,
    Activate,
    Activated,
    Deploy,
    Deployed,
    DeployFailed,
    DeployProgress,
    Envelope,
    FetchAhead,
    Generate,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Message,
    PeersChanged,
    Refused,
    Release,
    StageResult,
    StageStep,
    Stop,
    Stopping,
    Welcome,
)
from edge_runtime.transport.endpoint import Channel, Server, Waker, next_call_id, wait_any
from edge_runtime.transport.heartbeat import Beats, beat_rule, heard, liveness
from edge_runtime.transport.keys import Keys
from edge_runtime.weights.locate import fetcher_for
from edge_runtime.weights.manifest import chunks_of
from edge_runtime.weights.service import WeightsService
from edge_runtime.weights.stores import CacheFolder, FullFolder, chunk_ranges
from kernels import backends
from topology.cluster import Cluster, Node

log = logging.getLogger(__name__)

STOP_S = 2.0
WAIT_S = 0.25  # longest sleep of the control loop: timers are this exact
GREET_AGAIN_S = 1.0
LOADER_ENDS_S = 2.0  # how long a share that is being loaded may take to be given up when the node stops
PROBER_END_S = 1.0
SWITCH_INTERVAL_S = 0.0005  # Python's default of 5 ms would hold an engine step up for as long
ACTIVATION_DTYPE = "float32"


class NodeDaemon:
    """One node of a cluster. `run` returns when it was told to stop; a fault of ours is raised."""

    def __init__(
        self,
        cluster: Cluster,
        node: Node,
        checkpoint: Checkpoint,
        keys: Keys | None,
        clock: Clock,
        cache: CacheFolder | None = None,
    ) -> None:
        """cache: where the checkpoint lies, if it is not whole and what it lacks is fetched."""
        self._cluster = cluster
        self._node = node
        self._checkpoint = checkpoint
        self._tokenizer = tokenizer_of(checkpoint)
        self._learned = learned_by(cluster, node, checkpoint)
        self._keys = keys
        self._clock = clock
        self._parts = sub_experts_by(cluster, checkpoint)
        self._identity = Hello(
            node=node.name,
            cluster=cluster.name,
            role="home" if node.holds_trunk else "node",
            model_hash=checkpoint.model_hash,
            calibration_hash=self._parts.digest if self._parts is not None else "",
            dtype=ACTIVATION_DTYPE,
            numerics=backends.numerics(),
            pid=os.getpid(),
            incarnation=secrets.token_hex(8),
        )
        self._waker = Waker()
        self._events: collections.deque[Callable[[], None]] = collections.deque()
        self._server = Server(node.address, keys=keys)
        self._cache = cache
        self._weights = WeightsService(cache or FullFolder(checkpoint), clock, cluster.weights_rate_bps)
        self._bytes_fetched = 0
        self._service = ExpertService(self._server, self._identity, clock, self._wake_up, self._weights)
        self._service.take_stage = self._take_stage
        self._stages = StageService(node.name, clock, self._wake_up)
        self._coordinator = Channel(cluster.coordinator, name="coordinator", keys=keys)
        self._shares: dict[int, LoadedShare] = {}  # by epoch; two while the cluster changes its placement
        self._active = 0  # the epoch whose share the engine steps by
        self._trims = False  # a share was closed: its room in the heap is to go back to the system
        self._waiting: list[Deploy] = []  # for the loader, in the order in which they came
        self._unsaid: set[int] = (
            set()
        )  # epochs that the coordinator has not named since it told what counts now
        self._loader: ShareLoader | None = None
        self._coordinator_is = ""  # incarnation of the one that greeted last
        self._gauge = Gauge()
        self._prober: LinkProber | None = None
        self._receivers = BlockReceivers(
            self._identity, keys, clock, deadline_s=cluster.call_deadline_s, died=self._wake_up
        )
        self._answering = Answering(
            node.name,
            self._tokenizer,
            checkpoint.spec.encoder,
            clock,
            self._receivers,
            serves_by=lambda: self._share,
            tell=self._tell,
            post=self._post,
        )
        self._stopping = False
        self._greeted = False
        self._greet_at_s = 0.0
        self._reminder = Reminder(clock.now())  # of the coordinator, while it is waited for
        self._progress_at_s = 0.0
        self._beat_at_s = 0.0
        self._beats = 0
        self._rule = beat_rule(cluster.heartbeat_s, cluster.lost_after_s)
        self._coordinator_beats = Beats(clock.now())

    @property
    def _share(self) -> LoadedShare | None:
        return self._shares.get(self._active)

    @property
    def address(self) -> str:
        return self._server.address

    def stop(self) -> None:
        """End the loop soon; may be called from a signal handler."""
        self._stopping = True
        self._wake_up()

    def run(self) -> None:
        """Serve until stopped."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        backends.set_num_threads(self._node.threads)
        torch.set_num_threads(self._node.threads)
        self._service.start()
        self._stages.start()
        log.info("listening on %s, roles %s", self.address, ", ".join(sorted(self._node.roles)))
        try:
            while not self._stopping:
                wait_any([self._coordinator, self._waker], WAIT_S)
                self._waker.clear()
                self._take_events()
                self._take_messages()
                if not self._stopping:
                    self._keep_contact()
                self._raise_faults()
        except BaseException:
            self._shut_down("ended on a fault of its own, which its log shows,")
            raise
        self._shut_down("was told to stop")

    # What other threads bring.

    def _wake_up(self) -> None:
        self._waker.wake()

    def _post(self, event: Callable[[], None]) -> None:
        self._events.append(event)
        self._waker.wake()

    def _take_events(self) -> None:
        while self._events:
            self._events.popleft()()

    def _raise_faults(self) -> None:
        for thread in (self._service, self._stages, self._answering.engine):
            if thread is not None and thread.fault is not None:
                raise thread.fault
        if self._receivers.fault is not None:
            raise self._receivers.fault

    # The coordinator.

    def _keep_contact(self) -> None:
        now = self._clock.now()
        is_silent = self._greeted and liveness(self._coordinator_beats, now, self._rule) == "lost"
        if self._coordinator.is_lost() or is_silent:
            log.warning("the coordinator at %s is gone; greeting it again", self._cluster.coordinator)
            self._forget_coordinator(now)
        self._answering.forget(now, None if self._greeted else now - self._reminder.began_s)
        if not self._greeted:
            self._greet(now)
        elif now >= self._beat_at_s:
            self._beat_at_s = now + self._cluster.heartbeat_s
            self._beats += 1
            moved = {
                "weights_fetched_bytes": float(self._bytes_fetched),
                "weights_served_bytes": float(self._weights.bytes_served),
                "blocks_fetched": float(self._receivers.num_blocks),
                "blocks_fetched_ahead": float(self._receivers.num_ahead),
                "block_bytes_fetched": float(self._receivers.num_bytes),
            }
            self._measure_links(now)
            if self._trims:  # nobody holds it by now
                trim_heap()
                self._trims = False
            report = node_report(
                self._share,
                self._service,
                self._loader,
                self._answering.engine,
                self._gauge,
                self._clock,
                moved,
            )
            self._send(Heartbeat(self._beats, report))

    def _measure_links(self, now: float) -> None:
        """Probe the links of a home to those that it calls, where that is due; in a thread of its own."""
        share = self._share
        if share is None or self._prober is not None:
            return
        experts, own = share.experts, self._node.name
        if experts is not None:
            self._gauge.served(experts.traffic)
        hosts = [*experts.host_names, *share.stages, *self._receivers.sources] if experts is not None else []
        alive = experts.alive if experts is not None else ()
        due = self._gauge.due(peers_to_probe(hosts, alive, own), now, is_idle=self._answering.is_idle)
        addresses = {peer.name: peer for peer in share.peers}
        itself = None if self._gauge.knows_call else addresses.get(own)
        if not due and itself is None:
            return
        self._prober = LinkProber(
            itself,
            [addresses[peer] for peer in due if peer in addresses],
            self._identity,
            self._keys,
            self._clock,
            lambda prober: self._post(lambda: self._links_measured(prober)),
        )
        self._prober.start()

    def _links_measured(self, prober: LinkProber) -> None:
        prober.join()
        self._prober = None
        self._gauge.probed(prober.links, prober.call, self._clock.now())

    def _forget_coordinator(self, now: float) -> None:
        """Requests go on: the next one is told of them, and their clients come back to it."""
        self._coordinator.reconnect()
        self._greeted = False
        self._tell_experts(here=False)
        self._greet_at_s = now
        self._coordinator_beats = Beats(now)
        self._reminder.restart(now)

    def _tell_experts(self, *, here: bool) -> None:
        for share in self._shares.values():
            if share.experts is not None:
                share.experts.coordinator_is(here=here)

    def _tell_requests(self, coordinator: str) -> None:
        """Tell a coordinator that does not know them which requests run here; one that does has moved them away."""
        knows_them, self._coordinator_is = coordinator == self._coordinator_is, coordinator
        if knows_them:
            self._answering.end_all()
            return
        if self._loader is not None:  # for a change that ended with the coordinator before
            self._loader.is_wanted = False
        self._waiting = []
        self._answering.tell_all()

    def _greet(self, now: float) -> None:
        if now >= self._greet_at_s and self._coordinator.is_up():
            self._greet_at_s = now + GREET_AGAIN_S
            self._coordinator.send(self._identity, call_id=next_call_id())
        if self._reminder.is_due(now):
            waited = now - self._reminder.began_s
            log.info("waiting for the coordinator at %s, %.0f s", self._cluster.coordinator, waited)

    def _send(self, message: Message, tensors: Sequence[Any] = ()) -> None:
        sent = self._coordinator.send(message, tensors=tensors)
        if not sent:
            log.warning("%s not sent to the coordinator: %s", type(message).__name__, sent.value)

    def _tell(self, message: Message, tensors: Sequence[Any] = ()) -> None:
        """Send it if there is a coordinator: the next one is told of all requests."""
        if self._greeted:
            self._send(message, tensors)

    def _take_messages(self) -> None:
        while True:
            try:
                envelope = self._coordinator.receive(0)
            except ProtocolError as error:
                log.warning("the coordinator sent what is not a message: %s", error)
                continue
            if envelope is None:
                return
            self._coordinator_beats = heard(self._coordinator_beats, self._clock.now(), self._rule)
            self._take(envelope.message, envelope.tensors)

    def _take(self, message: Message, tensors: Sequence[np.ndarray] = ()) -> None:
        match message:
            case Welcome(incarnation=incarnation):
                was_greeted, self._greeted = self._greeted, True
                self._beat_at_s = 0.0
                if not was_greeted:
                    log.info("in contact with the coordinator at %s", self._cluster.coordinator)
                    self._tell_experts(here=True)
                    self._tell_requests(incarnation)
            case Refused(reason="handshake"):  # another coordinator process answers: it wants a Hello first
                self._greeted = False
            case Refused() as refused:
                if refused.retry_after_s is None:
                    raise refused.as_error()
                log.warning("refused by the coordinator: %s", refused.detail)
                self._greet_at_s = self._clock.now() + refused.retry_after_s
            case HeartbeatReply():
                pass
            case Deploy():
                self._deploy(message)
            case Activate(epoch=epoch):
                before = self._active
                self._activate(epoch, then=lambda: self._send(Activated(epoch)))
                for other in set(self._shares) - {before, epoch}:  # of a change that was called off unheard
                    self._release(other)
            case Release(epoch=epoch):
                if epoch == self._active and (self._loader is not None or self._waiting):
                    return  # what is being loaded takes the answers over, and gives this back
                if epoch == self._active:  # we were lost meanwhile, and the others went on without us
                    self._answering.stop("has no part in the placement any more")
                    self._active = 0
                self._release(epoch)
            case PeersChanged():
                self._peers_changed(message)
            case Generate():
                self._answering.generate(message)
            case FetchAhead():
                self._answering.fetch_ahead(message, *tensors)
            case Abort(request_id=request_id):
                self._answering.abort(request_id)
            case Stop(reason=reason):
                log.info("told to stop: %s", reason)
                self._stopping = True
            case _:
                log.warning("the coordinator sent %s, which a node does not take", type(message).__name__)

    # The shares.

    def _deploy(self, deploy: Deploy) -> None:
        """Load a share beside what is held, or say that it is there.

        A coordinator that says what counts now, to a node that is new or back, names after that what it loads besides.
        Anything else is of a change that was called off while nothing reached us.
        """
        if deploy.counts_now:
            loading = {self._loader.epoch} if self._loader is not None else set()
            self._unsaid = {*self._shares, *loading, *(other.epoch for other in self._waiting)}
        self._unsaid.discard(deploy.epoch)
        self._take_or_load(deploy)

    def _take_or_load(self, deploy: Deploy) -> None:
        held = self._shares.get(deploy.epoch)
        if held is not None and not held.is_spent and held.digest == share_digest(deploy):
            self._take_share(held, deploy.counts_now)
        elif self._loader is not None:
            self._waiting = [other for other in self._waiting if other.epoch != deploy.epoch] + [deploy]
        else:
            self._load(deploy)

    def _load(self, deploy: Deploy) -> None:
        held = self._shares.get(self._active)

        def is_wanted() -> bool:
            return not self._stopping and (self._loader is None or self._loader.is_wanted)

        def load() -> LoadedShare:
            share = load_share(
                deploy,
                self._checkpoint,
                self._tokenizer,
                identity=self._identity,
                keys=self._keys,
                clock=self._clock,
                progress=lambda done, total, what: self._post(
                    lambda: self._progress(deploy.epoch, done, total, what)
                ),
                held=held,
                fetch=self._fetch_into(self._cache, is_wanted) if self._cache is not None else None,
                learned=self._learned,
                parts=self._parts,
            )
            return measured(share, deploy, self._checkpoint, held, self._clock)

        self._loader = ShareLoader(
            load, deploy.epoch, lambda loader: self._post(lambda: self._loaded(loader, deploy.counts_now))
        )
        self._loader.start()

    def _fetch_into(self, cache: CacheFolder, is_wanted: Callable[[], bool]) -> Fetch:
        """Bring parts that this machine lacks. In the loader's thread."""

        def fetch(parts: Sequence[Part], progress: Progress) -> None:
            chunks = chunks_of(chunk_ranges(self._checkpoint, cache, parts))
            fetcher = fetcher_for(self._cluster, self._identity, cache, self._keys, self._clock, is_wanted)
            try:
                fetcher.fetch(chunks, progress)
            finally:
                self._bytes_fetched += fetcher.bytes_fetched
                fetcher.close()

        return fetch

    def _progress(self, epoch: int, done: int, total: int, what: str) -> None:
        now = self._clock.now()
        if now >= self._progress_at_s:
            self._progress_at_s = now + WAIT_S
            self._send(DeployProgress(epoch, done, total, what))

    def _loaded(self, loader: ShareLoader, counts_now: bool) -> None:
        self._loader = None
        loader.join()
        if loader.crash is not None:
            raise loader.crash
        if loader.share is None and not loader.is_wanted:
            log.info("epoch %d was released before it was loaded", loader.epoch)
        elif loader.share is None:
            log.error("epoch %d not loaded: %s", loader.epoch, loader.fault)
            self._send(DeployFailed(loader.epoch, loader.fault, loader.whose))
        elif not loader.is_wanted:  # released before it was there
            loader.share.close()
        else:
            self._take_share(loader.share, counts_now)
        if self._waiting:
            self._take_or_load(self._waiting.pop(0))

    def _take_share(self, share: LoadedShare, counts_now: bool) -> None:
        """Answer for a share's experts beside those of other placements; serve by it at once if it counts already."""
        old = self._shares.get(share.epoch)
        self._shares[share.epoch] = share
        self._gauge.tried(share.speed)
        self._publish()
        give_back()
        resident = resident_bytes()
        if old is not share:
            log.info(
                "epoch %d: %d experts, %.1f MB of weights, %.0f MB resident, %.0f MB planned",
                share.epoch,
                len(share.store),
                share.weight_bytes / 1e6,
                resident / 1e6,
                share.planned_bytes / 1e6,
            )
        if counts_now:
            self._activate(share.epoch, then=self._release_unsaid)
        if old is not None and old is not share:
            self._close(old)
        self._send(Deployed(share.epoch, share.weight_bytes, resident))

    def _publish(self) -> None:
        spec = self._checkpoint.spec
        running = self._share.engine if self._share is not None else None
        self._service.blocks = running.blocks if running is not None else None
        self._service.residents = {
            epoch: Residents(epoch, share.store, spec.width, num_experts(spec))
            for epoch, share in sorted(self._shares.items())
        }
        self._stages.places = {
            epoch: share.place for epoch, share in self._shares.items() if share.place is not None
        }
        self._stages.call(lambda: None)  # it sleeps soundly while it has no place

    def _take_stage(self, sender: str, envelope: Envelope) -> Refused | None:
        """On the service's thread: a step for a later stage here, or what became of a step of the engine."""
        if isinstance(envelope.message, StageStep):
            return self._stages.offer(sender, envelope)
        share, thread = self._shares.get(envelope.epoch), self._answering.engine
        if share is None or share.later is None or sender not in share.later.nodes[1:] or thread is None:
            return Refused("stage", f"{self._node.name} awaits no result from {sender}")
        result, tensors = envelope.message, envelope.tensors
        assert isinstance(result, StageResult), "whoever calls has looked"
        thread.order(
            lambda engine: engine.take(result, *tensors) if isinstance(engine, PipelineEngine) else []
        )
        return None

    def _activate(self, epoch: int, then: Callable[[], None]) -> None:
        """Let the engine take its next step by this placement; `then` runs here when it has begun to."""
        share = self._shares.get(epoch)
        self._active = epoch
        self._publish()
        if share is None or share.engine is None:
            self._answering.stop("answers no more requests", is_planned=True)
            then()
        elif self._answering.engine is None:
            _begin_anew(share)
            self._answering.start(share.engine, self._wake_up)
            then()
        else:

            def switch(running: Engine) -> tuple[Engine, list[Output]]:
                if (
                    running is share.engine
                    and share.runner is not None
                    and share.runner.port is share.experts
                ):
                    return running, []  # it does so already
                engine, outputs = share.switch_to(running)
                return engine, outputs

            self._answering.engine.switch(switch)
            self._answering.engine.call(lambda engine: self._post(then))

    def _release(self, epoch: int) -> None:
        if self._loader is not None and self._loader.epoch == epoch:
            self._loader.is_wanted = False
        self._waiting = [deploy for deploy in self._waiting if deploy.epoch != epoch]
        share = self._shares.pop(epoch, None)
        self._publish()
        if share is not None:
            self._close(share)
            log.info("epoch %d released", epoch)

    def _close(self, share: LoadedShare) -> None:
        """On the thread that works with it, which may be at a step by it and has to change over first."""
        if share.place is not None:
            self._stages.call(lambda: self._closed(share))
        elif self._answering.engine is not None:
            self._answering.engine.call(lambda engine: self._closed(share))
        else:
            self._closed(share)

    def _closed(self, share: LoadedShare) -> None:
        share.close()
        self._post(self._trim_soon)

    def _trim_soon(self) -> None:
        self._trims = True

    def _release_unsaid(self) -> None:
        for epoch in sorted(self._unsaid):
            self._release(epoch)
        self._unsaid = set()

    def _peers_changed(self, message: PeersChanged) -> None:
        share = self._shares.get(message.epoch)
        if share is None or share.experts is None:
            return
        experts, serves_now = share.experts, message.epoch == self._active
        if share.place is not None:
            self._stages.call(lambda: experts.peers_changed(message.alive, message.replacing))
        if share.engine is None or self._answering.engine is None:
            return

        def tell(engine: Engine) -> None:
            if isinstance(engine, PipelineEngine) and serves_now:
                engine.peers_changed(message.alive)
            experts.peers_changed(message.alive, message.replacing)
            if serves_now:
                experts.greet_all(GREET_AGAIN_S)

        self._answering.engine.call(tell)

    def _shut_down(self, why: str) -> None:
        self._service.residents = {}
        self._service.blocks = None
        self._answering.stop(why)
        self._receivers.stop(STOP_S)
        if self._greeted:
            self._send(Stopping(why.rstrip(",")))
        self._service.stop()
        self._service.join(2.0)
        self._weights.stop()
        self._stages.stop()
        self._stages.join(2.0)
        if self._loader is not None:
            self._loader.is_wanted = False
            self._loader.join(LOADER_ENDS_S)
        if self._prober is not None:  # its own deadlines end it; nobody waits for what it finds
            self._prober.join(PROBER_END_S)
        for share in self._shares.values():
            share.close()
        self._clock.sleep(0.05)  # let the last messages leave: linger is 0
        self._coordinator.close()
        self._server.close()
        if (
            self._loader is None or not self._loader.is_alive()
        ):  # it would wake whatever has the number by then
            self._waker.close()


def _begin_anew(share: LoadedShare) -> None:
    """Of an engine whose thread was stopped: its requests went elsewhere then, and it worked by another placement."""
    engine = share.engine
    assert engine is not None, "who starts it has looked"
    for request in engine.scheduler.requests():
        engine.abort(request.request_id)
    if share.runner is not None and share.runner.port is not share.experts:
        share.switch_to(engine)
    engine.begin()
