"""Lanes: decode homes of low tiers and of high ones, so that cheap requests do not wait behind dear ones. Pure, time included.

Tiers below the border go to the low lane, those above to the high one, and those in a window around it to either. The
border follows the load: it moves one tier when one lane has been heavier for a while, and then stays for a while. Inside
what a lane allows, other rules (band, pressure) choose.
"""

from collections.abc import Mapping, Sequence

import msgspec

RATIO = 1.25  # pressure per home of one lane by the other's, from which they count as unequal
DWELL_S = 2.0  # for so long without a break
FREEZE_S = 5.0  # then the border stays where it is


class LaneSettings(msgspec.Struct, frozen=True):
    """What does not change."""

    full_tier: int
    """N * k0; a request without a tier counts as this."""
    ratio: float = RATIO
    dwell_s: float = DWELL_S
    freeze_s: float = FREEZE_S

    @property
    def half_window(self) -> int:
        """Tiers on each side of the border that may use either lane."""
        return max(1, self.full_tier // 8)


class Lanes(msgspec.Struct, frozen=True):
    """Where the border is, which homes are whose, and since when the lanes are unequal.

    border     tiers up to here are low
    low, high  names of the homes, none of both empty
    heavier    lane that is heavier since `since_s`, empty if none is; frozen_until_s: no move before
    """

    border: int
    low: tuple[str, ...]
    high: tuple[str, ...]
    heavier: str = ""
    since_s: float = 0.0
    frozen_until_s: float = 0.0


def split_homes(homes: Sequence[str], low_share: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The first homes for the low lane, as many as its share of the work, at least one for each lane."""
    num_low = min(max(1, round(len(homes) * low_share)), len(homes) - 1)
    return tuple(homes[:num_low]), tuple(homes[num_low:])


def new_lanes(homes: Sequence[str], settings: LaneSettings, low_share: float = 0.5) -> Lanes | None:
    """Lanes over these homes with the border in the middle; None where there are not two."""
    if len(homes) < 2:
        return None
    low, high = split_homes(homes, low_share)
    return Lanes(settings.full_tier // 2, low, high)


def eligible(
    lanes: Lanes, settings: LaneSettings, tier: int, free: Mapping[str, bool]
) -> tuple[tuple[str, ...], bool]:
    """The homes that a request of a tier may go to, and whether it crosses the border for want of a free slot.

    tier  0 for the full one
    free  by home, whether a slot is free there; only homes in it serve now
    """
    tier = tier or settings.full_tier
    here = tuple(name for name in (*lanes.low, *lanes.high) if name in free)
    if abs(tier - lanes.border) <= settings.half_window:
        return here, False
    own = lanes.low if tier <= lanes.border else lanes.high
    mine = tuple(name for name in own if name in free)
    others = tuple(name for name in here if name not in mine)
    if not mine:
        return others, bool(others)
    if not any(free[name] for name in mine) and any(free[name] for name in others):
        return tuple(name for name in others if free[name]), True
    return mine, False


def adapt(lanes: Lanes, settings: LaneSettings, pressure: Mapping[str, float], now: float) -> Lanes:
    """The lanes a moment later: the border moves towards what relieves the heavier lane, if it has been so for a while.

    pressure  4 waiting + running of each home that serves
    """
    low = _mean([pressure[name] for name in lanes.low if name in pressure])
    high = _mean([pressure[name] for name in lanes.high if name in pressure])
    heavier = ""
    if max(low, high) > settings.ratio * max(min(low, high), 1e-9):
        heavier = "low" if low > high else "high"
    if heavier != lanes.heavier:
        return msgspec.structs.replace(lanes, heavier=heavier, since_s=now)
    if not heavier or now - lanes.since_s < settings.dwell_s or now < lanes.frozen_until_s:
        return lanes
    # A heavier low lane gives tiers away; neither lane is left without any.
    border = min(max(lanes.border + (-1 if heavier == "low" else 1), 1), settings.full_tier - 1)
    return msgspec.structs.replace(
        lanes, border=border, heavier="", since_s=now, frozen_until_s=now + settings.freeze_s
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
