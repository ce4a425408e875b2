"""Who may serve a routed slot as one home sees it: exact copies, and members of the expert's group that are at hand.

Tables for one placement, made anew when hosts come or go. Knows no time and no budget.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topology.traits import Floats

Bools = NDArray[np.bool_]
Ints = NDArray[np.int32]

HERE, NOBODY = 0, -1
NONE = -1


@dataclass(frozen=True)
class LayerView:
    """One MoE layer. E experts; hosts are indices, 0 this node, -1 nobody.

    host_of    [E] int32, whom this node calls for each expert
    may_stand  [E, E] bool, whether column j may stand in for row i without a call: it is here, i is not, and both are
               of one group
    bars       [E, E + 1] float32, the same as something to add to scores: 0 where it may, -inf elsewhere. The last column
               stands for nobody, below every finite score
    loss       [E, E] float32, loss of a token when j stands in for i at gate weight 1; inf where nothing was measured
    root       [E, E] float64, the deviation that this is: the root of `loss` by `power`
    closest    [E] int32, the one of those that may stand in which costs the least; -1 where there is none
    power      with what power of a deviation a loss grows. Slots of a row and layer deviate the same way (measured:
               together they cost 1.0 to 1.5 times the square of their sum), so their deviations are added up first
    left_out   [E] float64, the deviation of leaving a slot out at gate weight 1; None: that is not to be
    """

    host_of: Ints
    may_stand: Bools
    bars: NDArray[np.float32]
    loss: NDArray[np.float32]
    root: Floats
    closest: Ints
    power: float = 1.0
    left_out: Floats | None = None


def layer_view(
    host_of: Ints,
    together: Bools,
    loss: NDArray[np.float32],
    *,
    dominant: Ints | None = None,
    power: float = 1.0,
    left_out: Floats | None = None,
) -> LayerView:
    """What there is to choose from in one layer.

    together  [E, E] bool, whether two experts are of one group
    dominant  [E] int32, the centre of each expert's group: then nobody but that one stands in; None for any member
    """
    may_stand = together & (host_of == HERE)[None, :] & (host_of != HERE)[:, None] & np.isfinite(loss)
    if dominant is not None:
        may_stand &= np.arange(len(host_of))[None, :] == dominant[:, None]
    costs = np.where(may_stand, loss, np.inf)
    closest = np.where(may_stand.any(axis=1), costs.argmin(axis=1), NONE).astype(np.int32)
    root = np.maximum(loss, 0.0).astype(np.float64) ** (1 / power)
    bars = np.full((len(loss), len(loss) + 1), -np.inf, dtype=np.float32)
    bars[:, :-1][may_stand] = 0.0
    bars[:, -1] = np.finfo(np.float32).min
    return LayerView(host_of, may_stand, bars, loss, root, closest, power, left_out)
