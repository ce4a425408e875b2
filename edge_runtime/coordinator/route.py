"""Choose the decode home of a request. Pure; load is what the coordinator itself counts."""

from collections.abc import Sequence
from typing import NamedTuple

WAITING_WEIGHT = 4  # pressure = 4 * waiting + running (MoE-Prism's and the field's data-parallel score)


class HomeLoad(NamedTuple):
    """One decode home. `in_flight` requests were routed there and have not ended; `slots` of them can run at once."""

    node: str
    in_flight: int
    slots: int
    speed: float = 1.0  # relative decode speed; pressure is divided by it


def pressure(load: HomeLoad) -> float:
    """4 x waiting + running, per unit of speed."""
    running = min(load.in_flight, load.slots)
    waiting = load.in_flight - running
    return (WAITING_WEIGHT * waiting + running) / load.speed


def choose_home(loads: Sequence[HomeLoad]) -> str | None:
    """The home with the least pressure; the first of equals. None when there is no home."""
    if not loads:
        return None
    return min(loads, key=pressure).node
