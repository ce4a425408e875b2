"""Runs this node's experts for its peers: calls in, one kernel call each, outputs back. A thread of its own.

Knows rows and expert ids; nothing of requests. What a peer sends wrongly costs only that peer its answer.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from edge_runtime.cache.block_store import BlockStore
from edge_runtime.clock import Clock
from edge_runtime.errors import Refusal
from edge_runtime.model.moe import ExpertStore, Slices, run_pairs
from edge_runtime.node.handoff import answer_fetch
from edge_runtime.protocol import (
    MAX_FRAME_BYTES,
    ChunkQuery,
    Envelope,
    ExpertCall,
    ExpertReply,
    Hello,
    KvFetch,
    ManifestQuery,
    Message,
    Probe,
    Probed,
    RangesQuery,
    Refused,
    SlicedCall,
    StageResult,
    StageStep,
    Welcome,
    refuse_mismatch,
)
from edge_runtime.transport.endpoint import Server
from edge_runtime.weights.service import BUSY_S, WeightsService
from kernels.transfers import on_device, on_host

log = logging.getLogger(__name__)

RECEIVE_S = 0.2  # how often the thread looks whether it is to stop
WEIGHTS = (ManifestQuery, RangesQuery, ChunkQuery)
MAX_GREETED = 1024  # connections remembered as greeted; the oldest must greet again


@dataclass(frozen=True)
class Residents:
    """The experts this node answers for under one placement."""

    epoch: int
    store: ExpertStore
    width: int
    num_experts: int


@dataclass
class ServiceCounters:
    """Counts since the start of the process; written by the service's thread alone."""

    calls: int = 0
    rows: int = 0
    pairs: int = 0
    refused: int = 0
    blocks: int = 0
    busy_s: float = 0.0


class ExpertService(threading.Thread):
    """Answers Hello, ExpertCall and KvFetch at the node's own address.

    residents  by epoch, newest last; replaced as a whole from another thread, and each call uses what it finds. While
               the cluster changes from one placement to the next, both are answered for
    blocks     this node's KV, None while it has none; replaced likewise
    take_stage  gets what stages of a decode group send one another, with the sender's name; says why it is not taken
    A fault of ours ends the thread, is kept in `.fault`, and died() lets the daemon end loudly.
    """

    def __init__(
        self,
        server: Server,
        identity: Hello,
        clock: Clock,
        died: Callable[[], None],
        weights: WeightsService | None = None,
    ) -> None:
        """weights: what is given away of the model's files, None for nothing."""
        super().__init__(name="expert-service", daemon=True)
        self.residents: Mapping[int, Residents] = {}
        self.blocks: BlockStore | None = None
        self.take_stage: Callable[[str, Envelope], Refused | None] = self._no_stage
        self.counters = ServiceCounters()
        self.fault: BaseException | None = None
        self._server = server
        self._identity = identity
        self._clock = clock
        self._died = died
        self._weights = weights or WeightsService(None, clock)
        self._greeted: dict[bytes, str] = {}  # connection -> name of the peer
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End after the call in hand; join to wait for it."""
        self._stopping.set()

    @property
    def epoch(self) -> int:
        """The newest placement that is answered for, 0 before the first."""
        return max(self.residents, default=0)

    @property
    def bad_messages(self) -> int:
        return self._server.bad_messages

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                received = self._server.receive(BUSY_S if self._weights.is_busy else RECEIVE_S)
                if self._weights.is_busy:
                    self._send_weights()
                if received is not None:
                    peer, envelope = received
                    if isinstance(envelope.message, WEIGHTS) and peer in self._greeted:
                        self._ask_for_weights(peer, envelope.call_id, envelope.message)
                    else:
                        self._serve(peer, envelope)
                    del received, envelope  # not kept until the next call comes: they may be large
        except BaseException as fault:
            log.exception("the expert service ended on a fault of its own")
            self.fault = fault
            self._died()

    def _ask_for_weights(self, peer: bytes, call_id: int, message: Message) -> None:
        refused = self._weights.offer(peer, call_id, message)
        if refused is not None:
            self._server.send(peer, refused, call_id=call_id)

    def _send_weights(self) -> None:
        for reply in self._weights.replies():
            self._server.send(
                reply.peer, reply.message, call_id=reply.call_id, tensors=reply.tensors, zero_copy=True
            )

    def _serve(self, peer: bytes, envelope: Envelope) -> None:
        if isinstance(envelope.message, StageStep | StageResult):
            refused = self._pass_on(peer, envelope)
            if refused is not None:
                self.counters.refused += 1
                self._server.send(peer, refused, call_id=envelope.call_id, epoch=self.epoch)
            return
        reply, tensors = self._answer(peer, envelope.message, envelope.epoch, envelope.tensors)
        self._server.send(
            peer,
            reply,
            call_id=envelope.call_id,
            epoch=envelope.epoch if envelope.epoch in self.residents else self.epoch,
            tensors=tensors,
            zero_copy=True,
        )

    def _no_stage(self, sender: str, envelope: Envelope) -> Refused | None:
        return Refused("stage", f"{self._identity.node} has no part in a decode group of several stages")

    def _pass_on(self, peer: bytes, envelope: Envelope) -> Refused | None:
        """A message between stages goes to the thread that works on it."""
        node, sender = self._identity.node, self._greeted.get(peer)
        if sender is None:
            return Refused("handshake", f"{node} takes steps only after a Hello on the same connection", 0.0)
        return self.take_stage(sender, envelope)

    def _answer(
        self, peer: bytes, message: Message, epoch: int, tensors: Any
    ) -> tuple[Message, tuple[Any, ...]]:
        match message:
            case ExpertCall() | SlicedCall():
                try:
                    return self._run(peer, message, epoch, *tensors)
                except Refusal as refusal:
                    self.counters.refused += 1
                    return Refused.of(refusal), ()
            case KvFetch():
                try:
                    self._refuse_stranger(peer)
                    answer, blocks = answer_fetch(self.blocks, tensors[0], self._identity.node)
                    self.counters.blocks += len(blocks.rows)
                    return answer, blocks
                except Refusal as refusal:
                    self.counters.refused += 1
                    return Refused.of(refusal), ()
            case Hello():
                refused = refuse_mismatch(message, self._identity)
                if refused is not None:
                    log.warning("refused %s: %s", message.node, refused.detail)
                    return refused, ()
                self._greet(peer, message.node)
                return self._welcome(), ()
            case ManifestQuery() | RangesQuery() | ChunkQuery():  # `run` takes those of who has greeted
                detail = f"{self._identity.node} gives weights only after a Hello on the same connection"
                return Refused("handshake", detail, 0.0), ()
            case Probe() if peer in self._greeted:
                return Probed(), tensors
            case _:
                name = type(message).__name__
                return Refused(
                    "unexpected", f"{self._identity.node} runs experts here; it takes no {name}"
                ), ()

    def _greet(self, peer: bytes, name: str) -> None:
        while len(self._greeted) >= MAX_GREETED:
            del self._greeted[next(iter(self._greeted))]
        self._greeted[peer] = name

    def _welcome(self) -> Welcome:
        own = self._identity
        return Welcome(
            node=own.node,
            cluster=own.cluster,
            role=own.role,
            model_hash=own.model_hash,
            calibration_hash=own.calibration_hash,
            dtype=own.dtype,
            numerics=own.numerics,
            pid=own.pid,
            incarnation=own.incarnation,
        )

    def _refuse_stranger(self, peer: bytes) -> None:
        if peer not in self._greeted:
            who = self._identity.node
            raise Refusal("handshake", f"{who} takes calls only after a Hello on the same connection", 0.0)

    def _run(
        self,
        peer: bytes,
        call: ExpertCall | SlicedCall,
        epoch: int,
        rows: Any,
        pair_rows: Any,
        pair_experts: Any,
        masks: Any = None,
    ) -> tuple[Message, tuple[Any, ...]]:
        node, residents = self._identity.node, self.residents.get(epoch)
        self._refuse_stranger(peer)
        if residents is None:
            raise Refusal("epoch", f"{node} serves epoch {self.epoch}, the call is for epoch {epoch}", 0.5)
        if rows.shape[1] != residents.width:
            raise Refusal("shape", f"{node} expects rows of width {residents.width}, found {rows.shape[1]}")
        num_pairs = len(pair_rows)
        most = min(len(rows) * residents.num_experts, MAX_FRAME_BYTES // (4 * residents.width))
        if num_pairs > most:
            raise Refusal(
                "shape", f"{node} runs at most {most} experts for {len(rows)} rows, found {num_pairs}"
            )
        if num_pairs and not (pair_rows.min() >= 0 and pair_rows.max() < len(rows)):
            raise Refusal("shape", f"a pair names a row outside 0 to {len(rows) - 1}")
        bank = residents.store.bank(call.layer)
        absent = residents.store.absent(call.layer)
        if num_pairs and not (pair_experts.min() >= 0 and pair_experts.max() < residents.num_experts):
            raise Refusal("not_resident", f"a pair names an expert outside 0 to {residents.num_experts - 1}")
        experts = torch.from_numpy(pair_experts)
        if bank is None or absent is None or bool(absent[experts].any()):
            named = experts if absent is None else experts[absent[experts]]
            names = ", ".join(map(str, named.unique().tolist()))
            raise Refusal("not_resident", f"{node} does not hold layer {call.layer} experts {names}", 0.5)
        slices = _slices_of(call, masks, num_pairs, bank.F, node)
        began = self._clock.now()
        x = (
            torch.from_numpy(rows)
            if rows.dtype.kind == "f"
            else torch.from_numpy(rows).view(torch.bfloat16).float()
        )
        outputs = on_host(run_pairs(on_device(x), torch.from_numpy(pair_rows), experts, bank, slices))
        compute_s = self._clock.now() - began
        counters = self.counters
        counters.calls += 1
        counters.rows += len(rows)
        counters.pairs += num_pairs
        counters.busy_s += compute_s
        return ExpertReply(layer=call.layer, compute_s=compute_s), (outputs.numpy(),)


def _slices_of(
    call: ExpertCall | SlicedCall, masks: Any, num_pairs: int, width: int, node: str
) -> Slices | None:
    """What the pairs of a sliced call want, checked; None for whole experts."""
    if not isinstance(call, SlicedCall):
        return None
    full = (1 << call.num_parts) - 1
    if len(masks) != num_pairs or width % call.num_parts:
        raise Refusal(
            "shape",
            f"{node} runs experts of width {width} for {num_pairs} pairs, found {len(masks)} masks of {call.num_parts} parts",
        )
    if num_pairs and not (masks.min() >= 0 and masks.max() <= full):
        raise Refusal("shape", f"a pair names slices outside 0 to {full}")
    return Slices(torch.from_numpy(masks), call.num_parts)
