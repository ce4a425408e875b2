"""From a prompt's expert counts to its signature: a unit vector that says which experts its answer will use. Pure.

Counts are of the native gate's choices over prompt tokens. Which layers count, and how much each expert does, was
fitted by calibration. L MoE layers in order, E experts of a layer, N requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAST_NORM = 1e-9
MAX_PROMPT_TOKENS = 2**15 - 1
"""A token counts an expert once at most, and counts of a request travel as int16."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class SignatureRule:
    """How counts become a signature.

    layers   places among the MoE layers of those that count, ascending
    weights  [L, E] float32: how much a use of each expert says; 0 for one that everybody uses
    """

    layers: tuple[int, ...]
    weights: Floats

    def __post_init__(self) -> None:
        L = len(self.weights)
        ascend = list(self.layers) == sorted(set(self.layers))
        if not self.layers or not ascend or self.layers[0] < 0 or self.layers[-1] >= L:
            raise ValueError(f"layers {self.layers} are not ascending places among {L} MoE layers")
        object.__setattr__(self, "_chosen", self.weights[list(self.layers)])

    @property
    def dim(self) -> int:
        """Length of a signature."""
        return len(self.layers) * self.weights.shape[1]

    def signature(self, counts: np.ndarray) -> Floats:
        """counts [L, E] of any whole type -> [dim] float32 of unit length, or all 0 if no choice says anything."""
        return self.signatures(counts[None])[0]

    def signatures(self, counts: np.ndarray) -> Floats:
        """counts [N, L, E] -> [N, dim] float32; one norm over all layers together."""
        if counts.shape[1:] != self.weights.shape:
            found, expected = list(counts.shape[1:]), list(self.weights.shape)
            raise ValueError(f"counts of {found} layers and experts, expected {expected}")
        chosen: Floats = self._chosen  # type: ignore[attr-defined]
        x = counts[:, list(self.layers)].astype(np.float32) * chosen
        return unit_rows(x.reshape(len(x), self.dim))


def idf_weights(counts: np.ndarray) -> Floats:
    """How rare each expert is among requests: ln((N + 1) / (requests that used it + 1)). counts [N, L, E] -> [L, E].

    Never negative, and 0 exactly for an expert that every request used.
    """
    used = (counts > 0).sum(axis=0)
    return np.log((len(counts) + 1) / (used + 1)).astype(np.float32)


def unit_rows(rows: np.ndarray) -> Floats:
    """Rows [N, dim] at unit length; a row of zeros stays one."""
    x = np.asarray(rows, dtype=np.float32)
    norms = np.sqrt(np.einsum("nd,nd->n", x, x))
    return x / np.maximum(norms, LEAST_NORM)[:, None]


def check_conservation(counts: np.ndarray, num_tokens: int, top_k: Sequence[int]) -> None:
    """ValueError unless every layer's counts [L, E] add up to tokens x top-k: else some were lost, or counted twice."""
    expected = num_tokens * np.asarray(top_k)
    found = counts.sum(axis=1)
    if (found != expected).any():
        layer = int((found != expected).argmax())
        raise ValueError(
            f"MoE layer {layer} has {found[layer]} choices of {num_tokens} prompt tokens, expected {expected[layer]}"
        )
