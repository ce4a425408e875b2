"""The selector of one home: its tables for the placement that counts, its estimates of what calls take, and its policy.

Learns from measurements that it is given; asks no clock and knows no socket. One thread, the engine's.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge_runtime.selector.candidates import HERE, LayerView, layer_view
from edge_runtime.selector.choose import (
    DEFERRED,
    DROPPED,
    EXACT,
    FOREVER_S,
    NO_OPTIONS,
    POLICIES,
    Choice,
    Options,
    Peers,
    Slots,
    after_choice,
)
from edge_runtime.selector.learned import Losses
from topology.grouping import Groups

HALF_LIFE_S = 1.0  # of an estimate: what was measured a second ago counts half
WORTH_WEIGHT = 0.02  # of the latest step in what a layer's choices save: about the last fifty
LEAST_LOSS = 1e-6  # of a typical layer: stand-ins that cost nothing need no price


class HomeSelector:
    """Which slots of a layer wait and which use a stand-in, for one home.

    num_columns  K, experts of a token in a layer
    waits_s      expected wait for a call of each host, this node (0) first
    slots_s      what one more slot adds to each host's call
    drops        whether a slot may be left out, where that loses less than a stand-in does
    defers       whether replies may come a layer late
    looks_ahead  whether it counts that the layer after must wait then
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
        drops: bool = False,
        defers: bool = False,
        looks_ahead: bool = True,
    ) -> None:
        self.policy = policy
        self.drag_per_deviation = losses.drag_per_deviation
        self._left_out = losses.left_out if drops else None
        self._late = losses.late if defers else None
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
        self._owed_by: int | None = None
        self._worth, self._looks_ahead = LayerWorth(), looks_ahead

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
                left_out=None if self._left_out is None else self._left_out[row],
            )
        return self._views.get(layer)

    def begin_step(self) -> None:
        """The first layer of a step comes next."""
        self._owed_by = None

    def choose(self, layer: int, slots: Slots, *, may_defer: bool = False) -> Choice | None:
        """See `choose.py`. Layers of a step come in order, after `begin_step`. A slot that is dropped gets the id of an
        expert that is here, so that nobody is called for it.

        may_defer  whether replies of this layer may be added a layer later
        """
        view = self.view(layer)
        if view is None:
            return None
        options = self._options
        if self._late is not None:
            owes = self._owed_by == layer - 1
            late = self._late[self._row_of[layer]] if may_defer and layer + 1 in self._row_of else None
            options = options._replace(
                late=late, waits_anyway=owes, late_s=self._worth.of(layer) if self._looks_ahead else 0.0
            )
        choice = self._decide(view, self._peers, slots, options)
        if self._late is not None and not options.waits_anyway and slots.allowance.any():
            self._worth.note(layer, self._gain(view, slots, choice) - options.late_s * _is_late(choice))
        if _is_late(choice):
            self._owed_by = layer
        return self._called_here(view, choice)

    def choose_late(
        self, layer: int, slots: Slots, before: Choice | None, late: Sequence[int]
    ) -> Choice | None:
        """The choice for a layer in which some hosts' replies do not come, after a first choice was carried out."""
        view = self.view(layer)
        if view is None:
            return None
        wait_s = np.zeros_like(self._peers.wait_s)
        wait_s[list(late)] = wait_s[-1] = FOREVER_S
        slots = after_choice(view, slots, before)._replace(price=np.zeros(len(slots.price)))
        return self._decide(view, Peers(wait_s, np.zeros_like(wait_s)), slots, self._options)

    def _called_here(self, view: LayerView, choice: Choice | None) -> Choice | None:
        if choice is not None and view.left_out is not None:
            here = np.flatnonzero(view.host_of == HERE)
            if len(here):
                choice.expert_ids[choice.kind == DROPPED] = here[0]
        return choice

    def _gain(self, view: LayerView, slots: Slots, choice: Choice | None) -> float:
        """Seconds of waiting for each row that a choice saves, beyond what its losses are worth."""
        if choice is None:
            return 0.0
        hosts = view.host_of[slots.expert_ids]
        wait_s = np.where(hosts == HERE, 0.0, self._peers.wait_s[hosts])
        saved = float(wait_s.max()) - float(np.where(choice.kind == EXACT, wait_s, 0.0).max())
        return max(0.0, saved - float(slots.price @ choice.loss) / len(hosts))

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
        share = max(1.0, float(np.mean(num_away))) / self._num_columns  # of the gate weight
        return float(np.median(waits)) / max(float(np.median(found)) * share**self._losses.power, LEAST_LOSS)


class LayerWorth:
    """What it is worth to a step not to owe anything in a layer: what the choices there have saved, of late.

    Seconds for each row of a step. A step that lets replies come late owes them in the layer after, which must wait then.
    """

    def __init__(self) -> None:
        self._saved: dict[int, float] = {}

    def note(self, layer: int, saved_s: float) -> None:
        """A choice that was free saved so much."""
        before = self._saved.get(layer, 0.0)
        self._saved[layer] = before + WORTH_WEIGHT * (max(0.0, saved_s) - before)

    def of(self, layer: int) -> float:
        """What the next layer saves on average, and so what owing there costs."""
        return self._saved.get(layer + 1, 0.0)


def _is_late(choice: Choice | None) -> bool:
    return choice is not None and bool((choice.kind == DEFERRED).any())
