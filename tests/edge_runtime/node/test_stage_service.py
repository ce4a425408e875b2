"""Who may send a later stage a step, and what becomes of one whose way on is gone. Links here answer by themselves."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edge_runtime.clock import SystemClock
from edge_runtime.node.stage_links import links_to
from edge_runtime.node.stage_service import MAX_WAITING, StagePlace, StageService
from edge_runtime.protocol import Envelope, StageResult, StageStep

STEP = StageStep("run", 7)
SOON_S = 10.0


class Way:
    """A link to another stage, up or not, that keeps what it was given."""

    def __init__(self, why: str = "") -> None:
        self.why = why
        self.sent: list[Any] = []

    def look(self) -> str:
        return self.why

    def await_greeting(self, patience_s: float) -> str:
        return self.why

    def send(self, message: Any, tensors: Sequence[Any]) -> str:
        self.sent.append(message)
        return ""

    def close(self) -> None:
        self.why = "closed"


class Middle:
    """A stage that passes a step on as it came."""

    def run(self, step: StageStep, tensors: Any, port: Any) -> Any:
        return step, tensors


class Quiet:
    """Experts that are all here."""

    def begin_step(self) -> None:
        pass


@pytest.fixture
def place() -> StagePlace:
    """The second of three stages."""
    return StagePlace(3, "n2", ["n1", "n2", "n3"], Middle(), Quiet(), Way(), Way())  # type: ignore[arg-type]


@pytest.fixture
def service(place: StagePlace) -> StageService:
    service = StageService("n2", SystemClock(), lambda: None)
    service.places = {3: place}
    return service


def envelope(step: StageStep = STEP, epoch: int = 3) -> Envelope:
    return Envelope(step, epoch=epoch, tensors=(np.zeros(1),))


def run_to_the_end(service: StageService) -> None:
    service.start()
    service.stop()
    service.join(SOON_S)
    assert not service.is_alive() and service.fault is None


def test_a_step_of_the_stage_before_goes_on_to_the_next(service: StageService, place: StagePlace) -> None:
    assert service.offer("n1", envelope()) is None
    run_to_the_end(service)
    assert place.following.sent == [STEP] and place.first.sent == []


@pytest.mark.parametrize(
    ("sender", "epoch", "reason"), [("n3", 3, "stage"), ("n4", 3, "stage"), ("n1", 2, "epoch")]
)
def test_steps_of_others_or_of_another_placement_are_refused(
    service: StageService, sender: str, epoch: int, reason: str
) -> None:
    refused = service.offer(sender, envelope(epoch=epoch))
    assert refused is not None and refused.reason == reason


def test_more_steps_than_a_group_has_under_way_are_refused(service: StageService) -> None:
    assert [service.offer("n1", envelope()) for _ in range(MAX_WAITING)] == [None] * MAX_WAITING
    assert service.offer("n1", envelope()).reason == "busy"


def test_a_step_that_cannot_go_on_is_told_to_the_first_stage_as_lost(
    service: StageService, place: StagePlace
) -> None:
    place.following.why = "n3 is gone: its connection ended"
    service.offer("n1", envelope())
    run_to_the_end(service)
    [result] = place.first.sent
    assert isinstance(result, StageResult) and (result.run, result.step) == ("run", 7)
    assert result.outcome == "lost" and result.why == "from n2: n3 is gone: its connection ended"


def test_steps_that_went_over_a_link_that_is_lost_afterwards_are_told_as_lost_too(
    service: StageService, place: StagePlace
) -> None:
    for number in (7, 8):
        service.offer("n1", envelope(StageStep("run", number)))

    def cut() -> None:
        place.following.why = "n3 is gone"

    service.call(cut)
    service.offer("n1", envelope(StageStep("run", 9)))
    run_to_the_end(service)
    assert [message.step for message in place.following.sent] == [7, 8]
    assert sorted(result.step for result in place.first.sent) == [7, 8, 9]


def test_a_step_of_a_placement_that_was_released_meanwhile_is_nothing(
    service: StageService, place: StagePlace
) -> None:
    service.offer("n1", envelope())
    service.places = {}
    run_to_the_end(service)
    assert place.following.sent == place.first.sent == []


def test_a_stage_knows_the_next_and_the_first(place: StagePlace) -> None:
    assert place.before == "n1"
    assert links_to(["n1", "n2", "n3"], "n2", lambda name: name) == ("n3", "n1")  # type: ignore[arg-type]
    assert links_to(["n1", "n2"], "n2", lambda name: name) == (None, "n1")  # type: ignore[arg-type]
