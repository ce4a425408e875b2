"""Who may serve a routed slot as one home sees it: exact copies, and members of the expert's group that are at hand.

Tables for one placement, made anew when hosts come or go. Knows no time and no budget.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    loss       [E, E] float32, loss of a token when j stands in for i at gate weight 1; inf where nothing was measured
    power      with what power of the gate weight a loss grows
    closest    [E] int32, the one of those that may stand in which costs the least; -1 where there is none
    """

    host_of: Ints
    may_stand: Bools
    loss: NDArray[np.float32]
    closest: Ints
    power: float = 1.0


def layer_view(
    host_of: Ints,
    together: Bools,
    loss: NDArray[np.float32],
    *,
    dominant: Ints | None = None,
    power: float = 1.0,
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
    return LayerView(host_of, may_stand, loss, closest, power)
