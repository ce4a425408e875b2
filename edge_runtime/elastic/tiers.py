"""Tiers: how many sub-experts a request's tokens may use, from what the request says. Pure.

A tier K counts sub-experts per token and layer; N * k0 is the model as trained. Tier 0 stands for that too, and for models
that are not split: rows of tier 0 take the plain path.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from edge_runtime.errors import RequestError

FULL = 0

SERVICE_LEVELS = {"full": 1.0, "half": 0.5, "economy": 0.25}
"""Share of the full tier that a level buys, rounded up."""


class Elasticity(msgspec.Struct, frozen=True):
    """How far a model can be cut down: N sub-experts of each of k0 experts."""

    num_parts: int
    top_k: int

    @property
    def full_tier(self) -> int:
        """N * k0."""
        return self.num_parts * self.top_k


def tier_of(
    elasticity: Elasticity | None,
    *,
    k: float | None = None,
    sub_experts: int | None = None,
    service: str | None = None,
) -> int:
    """The tier that a request asks for; FULL if it asks for nothing, or for everything.

    elasticity   of the model that serves; None if its experts are not split
    k            experts per token, fractions of an expert included: rounded up to whole sub-experts
    sub_experts  the tier itself
    service      one of SERVICE_LEVELS
    """
    given = {
        name: value
        for name, value in (("k", k), ("sub_experts", sub_experts), ("service", service))
        if value is not None
    }
    if not given:
        return FULL
    if len(given) > 1:
        raise RequestError(
            f"a request says one of k, sub_experts and service, found {', '.join(given)}", list(given)[1]
        )
    if service is not None and service not in SERVICE_LEVELS:
        raise RequestError(
            f"service is {service!r:.80}; allowed is one of {', '.join(SERVICE_LEVELS)}", "service"
        )
    if service == "full":
        return FULL
    if elasticity is None:
        raise RequestError(
            f"{next(iter(given))} needs experts that are split, and those served are whole; run `edge-runtime "
            "calibrate prism` and set `sub_experts = true` in the topology file",
            next(iter(given)),
        )
    N, full = elasticity.num_parts, elasticity.full_tier
    if k is not None:
        if not math.isfinite(k) or not 1 / N <= k <= elasticity.top_k:
            raise RequestError(
                f"k is {k:g}; allowed is {1 / N:g} to {elasticity.top_k} experts per token, rounded up to whole sub-experts "
                f"of {1 / N:g}",
                "k",
            )
        tier = math.ceil(N * k - 1e-9)
    elif sub_experts is not None:
        if not 1 <= sub_experts <= full:
            raise RequestError(
                f"sub_experts is {sub_experts}; allowed is 1 to {full}, which is {N} of each of {elasticity.top_k} experts",
                "sub_experts",
            )
        tier = sub_experts
    else:
        tier = math.ceil(SERVICE_LEVELS[str(service)] * full)
    return FULL if tier == full else tier


class _Asked(msgspec.Struct):
    k: float | None = None
    sub_experts: int | None = None
    service: str | None = None


def tier_asked(elasticity: Elasticity | None, sampling: Mapping[str, object]) -> int:
    """The tier of a request that nobody has checked yet. What is no tier counts as the full one: its home will refuse it."""
    try:
        asked = msgspec.convert({name: sampling.get(name) for name in _Asked.__struct_fields__}, _Asked)
        return tier_of(elasticity, k=asked.k, sub_experts=asked.sub_experts, service=asked.service)
    except (msgspec.ValidationError, RequestError):
        return FULL


def over_serving(asked: list[int], ran: list[int]) -> float:
    """Sub-experts that ran beyond what was asked, by those asked."""
    return sum(b - a for a, b in zip(asked, ran, strict=True)) / max(sum(asked), 1)


def split_tier(tier: int, losses_of: Sequence[Sequence[float]]) -> list[int]:
    """Spread L * tier sub-experts over the layers so that the expected loss is least: K of each layer.

    All of them are given out: the mean of the layers is `tier`, and a request gets what it asked for.

    losses_of  [L][N * k0]  expected loss of a layer that runs 1, 2, .. N * k0 sub-experts
    """
    return split_tiers([tier], losses_of)[0]


def split_tiers(tiers: Sequence[int], losses_of: Sequence[Sequence[float]]) -> list[list[int]]:
    """`split_tier` of several tiers, by one table of a dynamic program over layers and sub-experts given out so far."""
    losses = np.array(losses_of, dtype=np.float64)
    num_layers, full = losses.shape
    total = num_layers * max(tiers, default=0)
    best = np.full(total + 1, np.inf)
    best[0] = 0.0
    choices = np.zeros((num_layers, total + 1), dtype=np.int64)
    for layer in range(num_layers):
        following = np.full(total + 1, np.inf)
        for own in range(1, min(full, total) + 1):
            tried = best[: total + 1 - own] + losses[layer, own - 1]
            better = tried < following[own:]
            following[own:][better] = tried[better]
            choices[layer, own:][better] = own
        best = following
    found = []
    for tier in tiers:
        spent, spread = num_layers * tier, []
        for layer in reversed(range(num_layers)):
            spread.append(int(choices[layer, spent]))
            spent -= spread[-1]
        found.append(spread[::-1])
    return found
