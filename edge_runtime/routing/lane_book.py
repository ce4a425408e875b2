"""The lanes of one cluster while it runs: follows who serves and how busy they are, and counts who went where. Pure."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from edge_runtime.routing.base import HomeLoad, pressure
from edge_runtime.routing.lanes import Lane, Lanes, LaneSettings, adapt, eligible, lane_of, settled


class LaneBook:
    """Lanes, and what was sent along them.

    lanes        None while fewer than two homes serve: then everybody goes anywhere
    num_sent     requests by the lane of their tier
    num_crossed  of these, those that went to a home of the other lane, by lane
    """

    def __init__(self, settings: LaneSettings) -> None:
        self.settings = settings
        self.lanes: Lanes | None = None
        self.num_sent: Counter[Lane] = Counter()
        self.num_crossed: Counter[Lane] = Counter()

    def follow(self, loads: Sequence[HomeLoad], now: float) -> None:
        """These homes serve now, so busy: lanes that lost a home are filled, and the border moves where it should."""
        lanes = settled(self.lanes, [load.node for load in loads], self.settings)
        if lanes is not None:
            lanes = adapt(lanes, self.settings, {load.node: pressure(load) for load in loads}, now)
        self.lanes = lanes

    def allowed(self, tier: int, loads: Sequence[HomeLoad]) -> list[HomeLoad]:
        """The homes among which other rules may choose for a request of a tier, 0 for the full one."""
        if self.lanes is None:
            return list(loads)
        free = {load.node: load.in_flight < load.slots for load in loads}
        homes = eligible(self.lanes, self.settings, tier, free).homes
        # Who began to serve a moment ago has no lane yet; where it is all there is, it has to do.
        return [load for load in loads if load.node in homes] or list(loads)

    def sent(self, tier: int, home: str) -> None:
        """A request of a tier went to a home."""
        if self.lanes is None:
            return
        lane = lane_of(self.lanes, self.settings, tier)
        self.num_sent[lane] += 1
        if lane != "either":
            own = self.lanes.low if lane == "low" else self.lanes.high
            self.num_crossed[lane] += home not in own

    def body(self) -> dict[str, Any]:
        """What `status` shows."""
        lanes, settings = self.lanes, self.settings
        found: dict[str, Any] = {
            "full_tier": settings.full_tier,
            "window": settings.half_window,
            "requests": {lane: self.num_sent[lane] for lane in ("low", "either", "high")},
            "crossings": {lane: self.num_crossed[lane] for lane in ("low", "high")},
        }
        if lanes is None:
            return found | {"border": None, "moves": 0, "low": [], "high": []}
        return found | {
            "border": lanes.border,
            "moves": lanes.moves,
            "low": list(lanes.low),
            "high": list(lanes.high),
        }
