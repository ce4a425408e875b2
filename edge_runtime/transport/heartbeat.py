"""Tell from the times of a peer's heartbeats whether it is alive, suspect or lost. Values and functions; `now` is given.

One missed beat changes nothing. Only a look makes a peer lost, never a beat that comes late: a watcher that was held up
itself hears first and looks then. A lost peer returns when it was heard without a gap for a while, so that a link that
flickers does not make the cluster flicker; many beats at once, as after a cut, are no while.
"""

from typing import Literal

import msgspec

SUSPECT_AFTER_BEATS = 2.5
RETURN_AFTER_BEATS = 1.5  # with the third beat

Liveness = Literal["alive", "suspect", "lost"]


class BeatRule(msgspec.Struct, frozen=True):
    """What is made of silence.

    interval_s       how often the peer beats
    suspect_after_s  silence after which it gets no new work; more than two intervals
    lost_after_s     silence after which others take over what it held
    return_after_s   how long a lost peer must be heard, with no gap of `suspect_after_s`, to be alive again
    """

    interval_s: float
    suspect_after_s: float
    lost_after_s: float
    return_after_s: float

    def __post_init__(self) -> None:
        assert 2 * self.interval_s < self.suspect_after_s < self.lost_after_s, self


def beat_rule(interval_s: float, lost_after_s: float) -> BeatRule:
    """The rule for a topology file's `heartbeat` and `lost_after`, which is more than two heartbeats."""
    halfway_s = (
        interval_s + lost_after_s / 2
    )  # between two beats and the loss, where these are close together
    suspect_after_s = min(SUSPECT_AFTER_BEATS * interval_s, halfway_s)
    return BeatRule(interval_s, suspect_after_s, lost_after_s, RETURN_AFTER_BEATS * interval_s)


class Beats(msgspec.Struct, frozen=True):
    """What is known of one peer.

    heard_s  when it gave its last sign of life, or since when it is watched
    is_lost  it was found lost, and has not returned
    since_s  of a lost one that is heard again: since when without a gap; None before
    """

    heard_s: float
    is_lost: bool = False
    since_s: float | None = None


def heard(beats: Beats, now: float, rule: BeatRule) -> Beats:
    """A beat came; any other message of the peer counts as well."""
    if not beats.is_lost:
        return Beats(now)
    has_gap = now - beats.heard_s >= rule.suspect_after_s
    since_s = now if has_gap or beats.since_s is None else beats.since_s
    return Beats(now) if now - since_s >= rule.return_after_s else Beats(now, True, since_s)


def looked(beats: Beats, now: float, rule: BeatRule) -> Beats:
    """Somebody looked: whoever is lost now stays so until it returns."""
    return Beats(beats.heard_s, True, beats.since_s) if liveness(beats, now, rule) == "lost" else beats


def given_up(beats: Beats) -> Beats:
    """It is lost for another reason than its silence: its connection ended."""
    return Beats(beats.heard_s, is_lost=True)


def liveness(beats: Beats, now: float, rule: BeatRule) -> Liveness:
    """What a look at this moment finds."""
    silent_s = now - beats.heard_s
    if beats.is_lost or silent_s >= rule.lost_after_s:
        return "lost"
    return "suspect" if silent_s >= rule.suspect_after_s else "alive"


def next_change_s(beats: Beats, now: float, rule: BeatRule) -> float | None:
    """When a look finds something else if nothing more is heard; None if never."""
    match liveness(beats, now, rule):
        case "alive":
            return beats.heard_s + rule.suspect_after_s
        case "suspect":
            return beats.heard_s + rule.lost_after_s
        case _:
            return None
