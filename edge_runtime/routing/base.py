"""What every router is told and answers: homes with their loads in, the place of one of them out. Pure.

Load is what the coordinator itself counts: requests routed to a home that have not ended.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

WAITING_WEIGHT = 4  # pressure = 4 * waiting + running (MoE-Prism's and the field's data-parallel score)


class HomeLoad(NamedTuple):
    """One decode home. `in_flight` requests were routed there and have not ended; `slots` of them can run at once.

    speed       relative decode speed; pressure is divided by it
    transfer_s  how long moving the request's KV there would take, seconds; 0 where it lies already
    """

    node: str
    in_flight: int
    slots: int
    speed: float = 1.0
    transfer_s: float = 0.0


class Question(NamedTuple):
    """What is known of a request when its decode home is chosen.

    signature  [dim] float32, unit length or all 0; None if the router in use needs none
    domain     its label, for the oracle of experiments; empty otherwise
    """

    signature: np.ndarray | None = None
    domain: str = ""


class Router(Protocol):
    """Chooses a decode home. May remember what it chose, never a load: that is given."""

    needs_signature: bool
    """Whether it can only choose once the prompt has been computed."""

    def choose(self, question: Question, loads: Sequence[HomeLoad]) -> int:
        """The place in `loads`, which is not empty, of the home that the request goes to."""

    def took(self, node: str, signature: np.ndarray | None) -> None:
        """A request with this signature, if that is known, has gone to that home."""


def pressure(load: HomeLoad) -> float:
    """4 x waiting + running, per unit of speed."""
    running = min(load.in_flight, load.slots)
    waiting = load.in_flight - running
    return (WAITING_WEIGHT * waiting + running) / load.speed
