"""What the rows of one step may spend of quality and have spent, layer by layer: at a home, or from stage to stage.

A layer takes of what a row has left, and the next layer, wherever it runs, has the rest. Knows no ledger, no request and
no socket; which slots are swapped is the port's to say.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_runtime.selector.account import RowAccount
from edge_runtime.selector.choose import DEFERRED, DROPPED, EXACT, STAND_IN, Choice, Slots
from kernels.transfers import on_device, on_host

Choose = Callable[[int, Slots, bool], Choice | None]
TakeLate = Callable[[], Choice | None]
WAYS = ("exact_here", "exact_elsewhere", "substituted", "deferred", "dropped")
NOT_EXACT = (STAND_IN, DEFERRED, DROPPED)


def nothing_late() -> None:
    """Where no reply is ever late."""


class StepBooks:
    """Rows of one step. T rows.

    account       what each may spend and has spent
    spenders      rows whose requests have a budget for this step
    slice_of      [T] which request of the step a row belongs to
    traced        requests whose layers somebody wants to see
    choose        which slots of a layer use a stand-in, within what their rows may spend; None: all are exact. The bool says
                  whether replies of the layer may be added one layer late
    take_late     what was swapped after all in the layer just run, since replies were late
    reserved      [T] what leaving out slices is expected to cost in this step: no stand-in may have that
    dropped_loss  [T] what slices that a tier left out have cost; a part of what was spent
    weights       [3, T] gate weight that was not served exactly, by NOT_EXACT
    layers        layer, [T, W] gate weight by WAYS, of the layers here
    """

    def __init__(
        self,
        account: RowAccount,
        spenders: NDArray[np.int64],
        slice_of: NDArray[np.int64],
        traced: Sequence[int],
        choose: Choose,
        take_late: TakeLate = nothing_late,
    ) -> None:
        num_rows = len(slice_of)
        self.account, self.spenders, self.slice_of, self.traced = account, spenders, slice_of, traced
        self.is_open, self.is_traced = bool(len(spenders)), bool(traced)
        self.reserved, self.dropped_loss = np.zeros(num_rows), np.zeros(num_rows)
        self.weights = np.zeros((len(NOT_EXACT), num_rows))
        self.layers: list[tuple[int, NDArray[np.float64]]] = []
        self._choose, self._take_late = choose, take_late
        self._left_out: NDArray[np.float32] | None = None
        self._shares: NDArray[np.float32] | None = None
        self._kind: NDArray[np.int8] | None = None
        self._layers_left = self._all_layers = 0

    def begin_layer(self, layers_left: int, all_layers: int) -> None:
        """A routed layer begins; of all those of the model so many are left, this one included."""
        self._layers_left, self._all_layers = layers_left, all_layers
        self._left_out = self._shares = self._kind = None

    def stand_in(
        self,
        layer: int,
        expert_ids: Tensor,
        gate_weights: Tensor,
        gate_logits: Tensor,
        may_defer: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ask for the choice of one layer: what is to be computed in place of what the gate chose, and its weights.

        The tensors that are given are left as they are; where nothing changes they are what is returned. The third is
        [T, K] bool, the slots whose outputs are added one layer late; None if none is.
        """
        ids, weights, logits = (on_host(each).numpy() for each in (expert_ids, gate_weights, gate_logits))
        slots = self.account.slots(ids, weights, logits)
        if self.reserved.any():  # what leaving out slices is going to cost goes first
            kept = self.reserved * self._layers_left / self._all_layers
            slots = slots._replace(allowance=np.maximum(0.0, slots.allowance - kept))
        choice = self._choose(layer, slots, may_defer)
        self._kind, self._shares = (None if choice is None else choice.kind), weights
        if choice is None:
            return expert_ids, gate_weights, None
        self._take(choice, weights)
        if (choice.kind == DROPPED).any():
            is_dropped = on_device(torch.from_numpy(choice.kind == DROPPED))
            gate_weights = gate_weights.masked_fill(is_dropped, 0.0)
        is_late = choice.kind == DEFERRED
        late = on_device(torch.from_numpy(is_late)) if is_late.any() else None
        return on_device(torch.from_numpy(choice.expert_ids)), gate_weights, late

    def caps(self) -> NDArray[np.float64] | None:
        """[T], the most that each row may lose in this layer by slices left out: an even share of what it has left.

        Infinite for rows without a budget, whose loss nobody counts. None where that is all of them.
        """
        if not self.is_open:
            return None
        found = np.full(len(self.slice_of), np.inf)
        found[self.spenders] = self.account.left[self.spenders] / self._layers_left
        return found

    def leave_out(self, share: NDArray[np.float32], loss: NDArray[np.float64]) -> None:
        """Rows leave out [T] of their gate weight in this layer, and pay for it if they have a budget."""
        self._left_out = share
        if self.is_open:
            paid = np.zeros(len(self.slice_of))
            paid[self.spenders] = loss[self.spenders]
            self.account.pay(paid)
            self.dropped_loss += paid

    def end_layer(self) -> None:
        """A layer for which `stand_in` was asked is done."""
        late = self._take_late()
        if late is not None and self._shares is not None:
            self._take(late, self._shares)
            self._kind = late.kind if self._kind is None else np.maximum(self._kind, late.kind)

    def _take(self, choice: Choice, weights: NDArray[np.float32]) -> None:
        self.account.take(choice)
        for at, kind in enumerate(NOT_EXACT):
            self.weights[at] += np.where(choice.kind == kind, weights, 0.0).sum(axis=1)

    def trace(self, layer: int, hosts: NDArray[np.int32] | None, gate_weights: Tensor) -> None:
        """Note where a layer's slots were served. hosts [T, K]: 0 is the home; None if it served all."""
        weights = (on_host(gate_weights).numpy() if self._shares is None else self._shares).astype(np.float64)
        kind = self._kind if self._kind is not None else np.zeros(weights.shape, np.int8)
        served = np.zeros(weights.shape, np.int32) if hosts is None else hosts
        ways = (
            (kind == EXACT) & (served == 0),
            (kind == EXACT) & (served > 0),
            *(kind == other for other in NOT_EXACT),
        )
        table = np.stack([(weights * way).sum(axis=1) for way in ways], axis=1)
        if self._left_out is not None:  # of what ran in whatever way, as much less as was left out
            gone, total = np.minimum(self._left_out.astype(np.float64), 1.0), table.sum(axis=1)
            table *= 1 - gone[:, None]
            table[:, WAYS.index("dropped")] += gone * total
        self.layers.append((layer, table))

    def traced_layers(self) -> list[tuple[int, int, NDArray[np.float64]]]:
        """(request of the step, layer, [W] its gate weight by WAYS) of the layers here, for those who are traced."""
        return [
            (index, layer, weights[self.slice_of == index].sum(axis=0))
            for index in self.traced
            for layer, weights in self.layers
        ]
