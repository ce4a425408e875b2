"""What stands between an expert's matrices. Names and numbers only."""

from typing import NamedTuple

ACTIVATIONS = ("swiglu", "geglu_tanh", "clamped_swiglu", "relu")


class Activation(NamedTuple):
    """One of ACTIVATIONS; alpha and limit are those of `clamped_swiglu`."""

    kind: str = "swiglu"
    alpha: float = 1.0
    limit: float = float("inf")
