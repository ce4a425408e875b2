"""The change from one placement to the next, as a value: load beside the old, switch between steps, release the old.

    loading     every member loads its new share beside the one it serves
    switching   the new placement is the one that counts; homes change over between two of their steps
    (done)      no step of the old placement is under way any more: it is released

A change that cannot be finished while loading is rolled back: what was loaded for it is released and the old
placement has never stopped serving. Knows names and epochs; no placement, socket or clock.
"""

from typing import Literal, NamedTuple

import msgspec


class Change(msgspec.Struct, frozen=True):
    """One change under way.

    members   nodes of the new placement; each loads its share
    homes     members that answer requests under the old or the new placement; each says when it has switched
    leaving   nodes that are being drained: they stop once the new placement counts
    prolonged_s  how much of the time until `deadline_s` was added since
    """

    epoch: int
    old_epoch: int
    members: frozenset[str]
    homes: frozenset[str]
    began_s: float
    deadline_s: float
    why: str = ""
    leaving: frozenset[str] = frozenset()
    phase: Literal["loading", "switching"] = "loading"
    loaded: frozenset[str] = frozenset()
    switched: frozenset[str] = frozenset()
    prolonged_s: float = 0.0

    def waiting_for(self) -> str:
        """What it waits for, for people."""
        if self.phase == "loading":
            return f"epoch {self.epoch}: {', '.join(sorted(self.members - self.loaded))} to load"
        return f"epoch {self.epoch}: {', '.join(sorted(self.homes - self.switched))} to switch"


class Loaded(NamedTuple):
    name: str


class CannotLoad(NamedTuple):
    name: str
    why: str


class Switched(NamedTuple):
    name: str


class Gone(NamedTuple):
    """A node is not there any more."""

    name: str


class GivenUp(NamedTuple):
    """Whoever asked for the change does not want it any more."""

    why: str


class Tick(NamedTuple):
    """Time went by."""


Event = Loaded | CannotLoad | Switched | Gone | GivenUp | Tick


class Activate(NamedTuple):
    """From now on the new placement is the one that counts: tell all members to switch."""

    epoch: int


class Release(NamedTuple):
    """Nobody needs the old placement any more: tell every node that may hold it."""

    epoch: int


class RollBack(NamedTuple):
    """The change is off: tell the members to forget what they loaded for it."""

    epoch: int
    why: str


Command = Activate | Release | RollBack


def prolonged(change: Change, deadline_s: float) -> Change:
    """The change with more time: it is seen to get on."""
    more_s = max(0.0, deadline_s - change.deadline_s)
    return msgspec.structs.replace(
        change, deadline_s=change.deadline_s + more_s, prolonged_s=change.prolonged_s + more_s
    )


def advance(change: Change, event: Event, now: float) -> tuple[Change | None, list[Command]]:
    """One step of the change. None when it is over."""
    if change.phase == "loading":
        return _loading(change, event, now)
    return _switching(change, event, now)


def _loading(change: Change, event: Event, now: float) -> tuple[Change | None, list[Command]]:
    match event:
        case Loaded(name) if name in change.members:
            change = msgspec.structs.replace(change, loaded=change.loaded | {name})
            if change.loaded < change.members:
                return change, []
            # All homes have still to say that no step of the old placement is under way.
            change = msgspec.structs.replace(change, phase="switching", deadline_s=now + _length(change))
            return _finish_if_switched(change, [Activate(change.epoch)])
        case CannotLoad(name, why) if name in change.members:
            return None, [RollBack(change.epoch, f"{name} cannot load its share: {why}")]
        case Gone(name) if name in change.members:
            return None, [RollBack(change.epoch, f"{name} went away while it was loading")]
        case GivenUp(why):
            return None, [RollBack(change.epoch, why)]
        case Gone(name):
            change = msgspec.structs.replace(change, homes=change.homes - {name})
        case Tick() if now > change.deadline_s:
            late = ", ".join(sorted(change.members - change.loaded))
            how = "did not load within" if not change.prolonged_s else "did not get on with loading for"
            return None, [RollBack(change.epoch, f"{late} {how} {_length(change):.0f} s")]
    return change, []


def _switching(change: Change, event: Event, now: float) -> tuple[Change | None, list[Command]]:
    match event:
        case Switched(name) | Gone(name):
            change = msgspec.structs.replace(change, switched=change.switched | {name})
        case Tick() if (
            now > change.deadline_s
        ):  # a home that hangs is the membership's to judge; the others go on
            change = msgspec.structs.replace(change, switched=change.homes)
    return _finish_if_switched(change, [])


def _finish_if_switched(change: Change, commands: list[Command]) -> tuple[Change | None, list[Command]]:
    if change.switched >= change.homes:
        return None, [*commands, Release(change.old_epoch)]
    return change, commands


def _length(change: Change) -> float:
    return change.deadline_s - change.began_s - change.prolonged_s
