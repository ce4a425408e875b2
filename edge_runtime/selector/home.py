"""The selector of one home: its tables for the placement that counts, its estimates of what calls take, and its policy.

Learns from measurements that it is given; asks no clock and knows no socket. One thread, the engine's.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge_runtime.selector.candidates import HERE, LayerView, layer_view
from edge_runtime.selector.choose import (
    DROPPED,
    FOREVER_S,
    NO_OPTIONS,
    POLICIES,
    Choice,
    Options,
    Peers,
    Slots,
)
from edge_runtime.selector.learned import Losses
from topology.grouping import Groups

HALF_LIFE_S = 1.0  # of an estimate: what was measured a second ago counts half
LEAST_LOSS = 1e-6  # of a typical layer: stand-ins that cost nothing need no price


class HomeSelector:
    """Which slots of a layer wait and which use a stand-in, for one home.

    num_columns  K, experts of a token in a layer
    waits_s      expected wait for a call of each host, this node (0) first
    slots_s      what one more slot adds to each host's call
    """

    def __init__(
        self,
        policy: str,
        groups: Groups,
        losses: Losses,
        *,
        num_columns: int,
        waits_s: Sequence[float],
        slots_s: Sequence[float],
        options: Options = NO_OPTIONS,
        to_dominant_only: bool = False,
    ) -> None:
        self.policy = policy
        self._decide = POLICIES[policy]
        self._options = options
        self._losses, self._groups = losses, groups
        # The paper's rule keeps to the groups; otherwise who was measured to do nearly the same may stand in as well.
        self._together = groups.together if policy == "paper" else groups.together | losses.near
        self._to_dominant_only = to_dominant_only
        self._row_of = {layer: row for row, layer in enumerate(losses.layers)}
        self._num_columns = num_columns
        self._peers = Peers(np.array([*waits_s, FOREVER_S]), np.array([*slots_s, 0.0]))
        self._measured_s = [-np.inf] * len(waits_s)
        self._views: dict[int, LayerView] = {}
        self._host_of: NDArray[np.int32] | None = None

    def placed(self, host_of: NDArray[np.int32]) -> None:
        """Hosts came or went. host_of [L, E] int32: whom this node calls for each expert of each layer of the model."""
        self._host_of = host_of
        self._views.clear()

    def view(self, layer: int) -> LayerView | None:
        """What there is to choose from in a layer; None where nothing was calibrated."""
        if layer not in self._views and layer in self._row_of and self._host_of is not None:
            row = self._row_of[layer]
            dominant = self._groups.dominant[row] if self._to_dominant_only else None
            self._views[layer] = layer_view(
                self._host_of[layer],
                self._together[row],
                self._losses.loss[row],
                dominant=dominant,
                power=self._losses.power,
            )
        return self._views.get(layer)

    def choose(self, layer: int, slots: Slots, peers: Peers | None = None) -> Choice | None:
        """See `choose.py`. A slot that is dropped gets the id of an expert that is here, so that nobody is called for it.

        peers  instead of what is known of them
        """
        view = self.view(layer)
        if view is None:
            return None
        choice = self._decide(view, peers or self._peers, slots, self._options)
        if choice is not None and self._options.drop_loss is not None:
            here = np.flatnonzero(view.host_of == HERE)
            if len(here):
                choice.expert_ids[choice.kind == DROPPED] = here[0]
        return choice

    @property
    def peers(self) -> Peers:
        """What calls are expected to take."""
        return self._peers

    def measured(self, host: int, waited_s: float, now: float, *, is_bound: bool = False) -> None:
        """A host's reply was there after so long. is_bound: it was there before it was looked for, so sooner than that."""
        wait_s = self._peers.wait_s
        if is_bound and waited_s >= wait_s[host]:
            return
        weight = 1 - 0.5 ** max(0.05, (now - self._measured_s[host]) / HALF_LIFE_S)
        self._measured_s[host] = now
        wait_s[host] += weight * (waited_s - wait_s[host])

    def start_price(self) -> float:
        """Seconds for a unit of loss at which sparing a typical row all that a layer has elsewhere is worth a call."""
        waits = self._peers.wait_s[1:-1]
        typical: list[NDArray[np.float32]] = []
        num_away = []  # slots of a row
        for view in filter(None, map(self.view, self._row_of)):
            away = np.flatnonzero(view.closest >= 0)
            typical.append(view.loss[away, view.closest[away]])
            num_away.append(self._num_columns * float((view.host_of != HERE).mean()))
        found = np.concatenate(typical) if typical else np.empty(0)
        if not len(found) or not len(waits):
            return 0.0
        slot_loss = float(np.median(found)) / self._num_columns**self._losses.power
        return float(np.median(waits)) / max(slot_loss * max(1.0, float(np.mean(num_away))), LEAST_LOSS)
