"""Split an expert's neurons into equal sub-experts so that a token can do without some of them.

The objective J is the mass that rows lose when each drops its `dropped` weakest sub-experts; J falls when neurons that
fire together lie together. Pure: activations in, an order of neurons out. Knows no model and no file.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from edge_runtime.errors import UserError
from kernels.swap_search import swap_search

PAPER_T0, PAPER_COOLING, PAPER_SWAPS = 100.0, 0.995, 100_000
PROBES = 200  # random swaps that tell how large a change of the objective is
LAST_TEMPERATURE = 1e-3  # of the first one
SWAPS_PER_PAIR = (
    1.0  # pairs of neurons in different sub-experts; at half as many J was within 1 % (demo model)
)
LEAST_SWAPS = 20_000


class PartitionSettings(NamedTuple):
    """How experts are split."""

    num_parts: int = 4
    """N, sub-experts of an expert."""
    dropped: int = 0
    """Sub-experts that the objective drops; 0 for half of them."""
    solver: str = "hill"
    """One of SOLVERS."""
    swaps: int = 0
    """Swaps that are tried; 0 for as many as there are pairs, or what the solver's preset says."""
    seed: int = 1

    @property
    def num_dropped(self) -> int:
        """K_d."""
        return self.dropped or max(1, self.num_parts // 2)


def check_settings(settings: PartitionSettings, width: int) -> None:
    """Refuse what cannot be split so."""
    N = settings.num_parts
    if not 2 <= N <= 8 or width % N:
        raise UserError(
            f"{N} sub-experts per expert: found experts of width {width}, expected 2 to 8 that divide the width"
        )
    if not 1 <= settings.num_dropped < N:
        raise UserError(
            f"{settings.num_dropped} dropped sub-experts in the objective: expected 1 to {N - 1} of {N}"
        )
    if settings.solver not in SOLVERS:
        raise UserError(f"solver {settings.solver!r}: expected one of {', '.join(SOLVERS)}")


def objective(mass: Tensor, group: Tensor, num_parts: int, dropped: int) -> float:
    """J: mass [B, F] that is lost when each row drops its `dropped` lightest parts; group [F] int."""
    return float(part_mass(mass, group, num_parts).sort(dim=1).values[:, :dropped].sum())


def part_mass(mass: Tensor, group: Tensor, num_parts: int) -> Tensor:
    """[B, N]: what each part carries in each row of mass [B, F]."""
    return torch.zeros(len(mass), num_parts).index_add_(1, group.long(), mass)


def contiguous(mass: Tensor, settings: PartitionSettings) -> Tensor:
    """Neurons as they lie."""
    F = mass.shape[1]
    return torch.arange(F, dtype=torch.int32) // (F // settings.num_parts)


def importance(mass: Tensor, settings: PartitionSettings) -> Tensor:
    """Neurons by mean mass, cut into slices: the first sub-expert has the busiest."""
    order = mass.sum(0).argsort(descending=True, stable=True)
    group = torch.empty(len(order), dtype=torch.int32)
    group[order] = contiguous(mass, settings)
    return group


def greedy(mass: Tensor, settings: PartitionSettings) -> Tensor:
    """The paper's start: neurons by mass, each to the sub-expert with the least so far and room left."""
    total = mass.sum(0)
    room = [mass.shape[1] // settings.num_parts] * settings.num_parts
    load = [0.0] * settings.num_parts
    group = torch.empty(len(total), dtype=torch.int32)
    for neuron in total.argsort(descending=True, stable=True).tolist():
        part = min((n for n in range(settings.num_parts) if room[n]), key=load.__getitem__)
        group[neuron] = part
        room[part] -= 1
        load[part] += float(total[neuron])
    return group


def paper(mass: Tensor, settings: PartitionSettings) -> Tensor:
    """The paper's annealing from the greedy start, temperatures in units of mass."""
    swaps = settings.swaps or PAPER_SWAPS
    temperatures = PAPER_T0 * PAPER_COOLING ** torch.arange(swaps, dtype=torch.float64)
    return _anneal(mass, greedy(mass, settings), temperatures, settings)


def hill(mass: Tensor, settings: PartitionSettings) -> Tensor:
    """Annealing from the best of the plain splits, from the size of a random swap's change down to a thousandth of it."""
    N, F = settings.num_parts, mass.shape[1]
    starts = [start(mass, settings) for start in (contiguous, importance, greedy)]
    group = min(starts, key=lambda start: objective(mass, start, N, settings.num_dropped))
    pairs = F * (F - F // N) // 2
    swaps = settings.swaps or max(LEAST_SWAPS, int(SWAPS_PER_PAIR * pairs))
    generator = torch.Generator().manual_seed(settings.seed)
    probes = _pairs(group, PROBES, generator)
    never = torch.full((probes.shape[1],), -torch.inf)
    probed = swap_search(mass.T.contiguous(), group, N, settings.num_dropped, probes, never)
    first = float(probed.changes.std())
    steps = torch.arange(swaps, dtype=torch.float64) / max(swaps - 1, 1)
    return _anneal(mass, group, first * LAST_TEMPERATURE**steps, settings)


SOLVERS: Mapping[str, Callable[[Tensor, PartitionSettings], Tensor]] = {
    "contiguous": contiguous,
    "importance": importance,
    "paper": paper,
    "hill": hill,
}


def split(mass: Tensor, settings: PartitionSettings) -> Tensor:
    """The part of each neuron [F] int32, by the solver asked for; never worse than neurons as they lie.

    mass  [B, F] float32, not negative: what each neuron contributes in each calibration row
    """
    check_settings(settings, mass.shape[1])
    found = SOLVERS[settings.solver](mass, settings)
    plain = contiguous(mass, settings)
    lost = [objective(mass, group, settings.num_parts, settings.num_dropped) for group in (found, plain)]
    return found if lost[0] <= lost[1] else plain


def order_of(group: Tensor, mass: Tensor, num_parts: int, first: Tensor | None = None) -> Tensor:
    """Which old neuron comes to each place [F] int64, so that parts are slices: the heaviest part first.

    group  [F] int, the part of each neuron
    mass   [B, F]
    first  [F] float: within a part, neurons with the most come first; by mass if None
    """
    total = mass.sum(0)
    load = torch.zeros(num_parts).index_add_(0, group.long(), total)
    place = torch.empty(num_parts, dtype=torch.int64)
    place[load.argsort(descending=True, stable=True)] = torch.arange(num_parts)
    inside = (total if first is None else first).argsort(descending=True, stable=True)
    return inside[place[group.long()[inside]].argsort(stable=True)]


def _anneal(mass: Tensor, group: Tensor, temperatures: Tensor, settings: PartitionSettings) -> Tensor:
    generator = torch.Generator().manual_seed(settings.seed + 1)
    swaps = _pairs(group, len(temperatures), generator)
    drawn = torch.rand(len(temperatures), generator=generator, dtype=torch.float64).clamp(min=1e-300)
    tolerances = (-temperatures * drawn.log()).float()  # exp(-change / T) > drawn
    columns = mass.T.contiguous()
    return swap_search(columns, group, settings.num_parts, settings.num_dropped, swaps, tolerances).group


def _pairs(group: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """[2, count] int32 pairs of different neurons; one in N of them is within one part, and then nothing happens."""
    F = len(group)
    first = torch.randint(F, (count,), generator=generator)
    second = (first + torch.randint(1, F, (count,), generator=generator)) % F
    return torch.stack([first, second]).int()
