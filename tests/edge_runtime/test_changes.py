"""Following a change and a file: what is told, what is asked again, and what becomes of a bad edit."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_runtime import changes
from edge_runtime.clock import ManualClock
from edge_runtime.errors import ClusterError, PeerLost, Refusal
from topology.errors import TopologyError


class Coordinator:
    """Answers `status` with one picture after another, the last one for ever. None: it is away, and comes back."""

    def __init__(self, *bodies: dict | None) -> None:
        self.bodies = list(bodies)
        self.given_up: list[tuple[int, str]] = []
        self.came_back = 0

    def status(self) -> dict:
        body = self.bodies.pop(0) if len(self.bodies) > 1 else self.bodies[0]
        if body is None:
            raise PeerLost("the coordinator is gone")
        return body

    def come_back(self) -> None:
        self.came_back += 1

    def give_up(self, epoch: int, why: str) -> None:
        self.given_up.append((epoch, why))


def body(epoch: int, change: str | None, *outcomes: tuple[int, bool, str]) -> dict:
    names = ("epoch", "is_done", "detail")
    ended = [dict(zip(names, outcome, strict=True)) for outcome in outcomes]
    return {"epoch": epoch, "change": change, "changes": ended}


def follow(coordinator: Coordinator, said: list[str], ended: str | None = None) -> str:
    return changes.follow(
        coordinator,  # type: ignore[arg-type]
        2,
        ManualClock(),
        said.append,
        lambda: ended,
        coordinator.come_back,
    )


def test_a_change_is_followed_to_its_end_and_told_more_and_more_seldom():
    loading = body(1, "epoch 2: n1 loading 1.0 of 3.0 MB")
    said: list[str] = []
    coordinator = Coordinator(*[loading] * 70, body(2, None, (1, True, "old"), (2, True, "epoch 2 in 5.0 s")))
    assert follow(coordinator, said) == "epoch 2 in 5.0 s"
    assert said == ["waiting: epoch 2: n1 loading 1.0 of 3.0 MB"] * 2


def test_a_change_that_was_rolled_back_says_why():
    with pytest.raises(ClusterError, match="n1 cannot load.*; the placement is what it was"):
        follow(Coordinator(body(1, None, (2, False, "epoch 2 was rolled back: n1 cannot load"))), [])


def test_a_process_that_ended_gives_the_change_up_once():
    coordinator = Coordinator(*[body(1, "epoch 2: n9 to come")] * 3, body(1, None, (2, False, "n9 ended")))
    with pytest.raises(ClusterError, match="n9 ended"):
        follow(coordinator, [], ended="n9 ended with exit code 2")
    assert coordinator.given_up == [(2, "n9 ended with exit code 2")]


@pytest.mark.parametrize("epoch", [1, 3])  # it may have mended something since
def test_a_change_that_was_lost_with_its_coordinator_is_told_as_never_counted(epoch):
    coordinator = Coordinator(body(1, "epoch 2: n1 to load"), None, body(epoch, None, (1, True, "old")))
    with pytest.raises(ClusterError, match=f"epoch 2 never counted: .*goes on with epoch {epoch}"):
        follow(coordinator, [])
    assert coordinator.came_back == 1


def test_a_change_that_counted_when_its_coordinator_was_lost_is_told_so():
    done = (2, True, "epoch 2 counts: edited.toml was applied")
    switching = body(2, "epoch 2: n1 to switch", done)
    coordinator = Coordinator(body(1, "epoch 2: n1 to load"), switching, switching, None, body(2, None, done))
    assert follow(coordinator, []) == done[2]
    assert coordinator.came_back == 1


def test_a_coordinator_that_goes_before_it_answers_is_asked_again_when_it_is_back():
    answers = iter([PeerLost("gone"), Refusal("busy", "epoch 2 is under way", 1.0), 0])

    def ask() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    coordinator = Coordinator()
    assert changes.begin(ask, ManualClock(), lambda line: None, coordinator.come_back) == 0
    assert coordinator.came_back == 1


def test_a_busy_coordinator_is_asked_again_and_a_bad_file_is_the_users_fault():
    answers: Iterator[int | Refusal] = iter([Refusal("busy", "a change is under way", 1.0)] * 7 + [7])

    def ask() -> int:
        answer = next(answers)
        if isinstance(answer, Refusal):
            raise answer
        return answer

    said: list[str] = []
    assert changes.begin(ask, ManualClock(), said.append, lambda: None) == 7
    assert said == ["waiting: a change is under way"] * 2

    def refuse() -> int:
        raise Refusal("topology", "line 3: no")

    with pytest.raises(TopologyError, match="line 3"):
        changes.begin(refuse, ManualClock(), said.append, lambda: None)


class Enough(Exception):
    """Ends a watch."""


class EditingClock(ManualClock):
    """Does the next thing to a file with every second sleep."""

    def __init__(self, *edits) -> None:
        super().__init__()
        self._edits = [lambda: None, *(step for edit in edits for step in (edit, lambda: None))]

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if not self._edits:
            raise Enough
        self._edits.pop(0)()


def test_a_watched_file_is_applied_at_once_and_after_each_edit_and_a_bad_one_is_told(tmp_path: Path):
    file = tmp_path / "topology.toml"
    file.write_text("1")
    applied, said = [], []

    def apply() -> None:
        if "bad" in file.read_text():
            raise TopologyError("line 1 is bad")
        applied.append(file.read_text())

    edits = [lambda text=text: file.write_text(text) for text in ("two", "bad", "three!")]
    with pytest.raises(Enough):
        changes.watch(file, EditingClock(*edits, file.unlink), apply, said.append)
    assert applied == ["1", "two", "three!"]
    assert said == ["not applied: line 1 is bad"]
