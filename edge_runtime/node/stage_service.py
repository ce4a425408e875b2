"""Runs later stages' steps as they come: from the stage before, to the next one or back to the first. A thread of its own.

Knows who may send what, and links; the arithmetic is `LaterStage`'s. Steps of two placements may come while the cluster
changes from one to the other.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_runtime.clock import Clock
from edge_runtime.engine.later_stage import LaterStage, no_result
from edge_runtime.node.remote import PlacedExperts
from edge_runtime.node.stage_links import StageLink
from edge_runtime.protocol import Envelope, Refused, StageResult, StageStep

log = logging.getLogger(__name__)

LOOK_S = 0.05  # how often links are looked at while no step comes
GREET_S = 1.0  # how long a step waits for a link that was never used
MAX_WAITING = 64  # steps; a first stage has as many under way as there are stages
REMEMBERED = 16  # steps sent on that are told as lost with the link


@dataclass
class StagePlace:
    """A later stage under one placement.

    nodes      of the whole group, in the order of the layers
    following  to the next stage; None at the end of the model
    sent_on    the last steps that went to the next stage: lost if its link is
    """

    epoch: int
    node: str
    nodes: Sequence[str]
    stage: LaterStage
    experts: PlacedExperts
    first: StageLink
    following: StageLink | None
    sent_on: deque[StageStep] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    was_up: bool = False

    @property
    def before(self) -> str:
        """The node whose steps it takes."""
        return self.nodes[self.nodes.index(self.node) - 1]

    def close(self) -> None:
        self.first.close()
        if self.following is not None:
            self.following.close()


class StageService(threading.Thread):
    """places  by epoch; replaced as a whole from another thread, and each step uses what it finds."""

    def __init__(self, node: str, clock: Clock, died: Callable[[], None]) -> None:
        super().__init__(name="stage-service", daemon=True)
        self.places: Mapping[int, StagePlace] = {}
        self.fault: BaseException | None = None
        self._node = node
        self._clock = clock
        self._died = died
        self._inbox: queue.SimpleQueue[tuple[int, StageStep, Any] | Callable[[], None] | None] = (
            queue.SimpleQueue()
        )

    def offer(self, sender: str, envelope: Envelope) -> Refused | None:
        """Take a step in from any thread, or say why not."""
        place = self.places.get(envelope.epoch)
        if place is None:
            return Refused("epoch", f"{self._node} runs no later stage of epoch {envelope.epoch}", 0.5)
        if sender != place.before:
            return Refused("stage", f"{self._node} takes steps from {place.before}, not from {sender}")
        if self._inbox.qsize() >= MAX_WAITING:
            return Refused("busy", f"{self._node} has {MAX_WAITING} steps waiting", 0.5)
        assert isinstance(envelope.message, StageStep), "whoever calls has looked"
        self._inbox.put((envelope.epoch, envelope.message, envelope.tensors))
        return None

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` between two steps."""
        self._inbox.put(action)

    def stop(self) -> None:
        """End after the step in hand; join to wait for it."""
        self._inbox.put(None)

    def run(self) -> None:
        try:
            while True:
                try:
                    order = self._inbox.get(timeout=LOOK_S if self.places else None)
                except queue.Empty:
                    self._look()
                    continue
                if order is None:
                    return
                if isinstance(order, tuple):
                    self._serve(*order)
                else:
                    order()
                del order  # or it would keep what it knew, a closed share, until the next one comes
        except BaseException as fault:
            log.exception("the stage service ended on a fault of its own")
            self.fault = fault
            self._died()

    def _serve(self, epoch: int, step: StageStep, tensors: Any) -> None:
        place = self.places.get(epoch)
        if place is None:  # released meanwhile
            return
        self._look_at(place)
        done = place.stage.run(step, tensors, place.experts)
        if done is None:
            return
        message, arrays = done
        if isinstance(message, StageResult):
            self._answer(place, message, arrays)
            return
        assert place.following is not None, "the last stage samples"
        why = place.following.await_greeting(0.0 if place.was_up else GREET_S)
        why = why or place.following.send(message, arrays)
        if why:
            self._answer(place, *no_result(step, "lost", f"from {place.node}: {why}"))  # type: ignore[arg-type]
        else:
            place.was_up = True
            place.sent_on.append(step)

    def _answer(self, place: StagePlace, result: StageResult, arrays: Any) -> None:
        why = place.first.await_greeting(GREET_S)
        why = why or place.first.send(result, arrays)
        if why:
            log.warning("a result for %s is lost: %s", place.nodes[0], why)

    def _look(self) -> None:
        for place in list(self.places.values()):
            self._look_at(place)

    def _look_at(self, place: StagePlace) -> None:
        """Notice links that came or went; what went on over one that is lost is told to the first stage as lost."""
        place.experts.begin_step()
        place.first.look()
        if place.following is None:
            return
        why = place.following.look()
        if why and place.was_up:
            place.was_up = False
            for step in place.sent_on:
                self._answer(place, *no_result(step, "lost", f"from {place.node}: {why}"))  # type: ignore[arg-type]
            place.sent_on.clear()
