"""Which sub-experts of a token's experts run at tier K: the training-free proxy gate. Pure.

The native gate has chosen k0 experts. A few gate neurons per sub-expert tell how much it would give for this token; the
K sub-experts with the largest expected share of the layer's output run, with the weights that the gate gave their experts.
"""

from kernels.reference.choose_slices import best_first, dropped_mass, dropped_shares, slice_scores
from kernels.reference.choose_slices import best_slices as choose_slices

__all__ = ["best_first", "choose_slices", "dropped_mass", "dropped_shares", "slice_scores"]
