"""A home whose peers are only said to be: every expert is computed here, and the tables say who holds it."""

import numpy as np
import torch
from torch import Tensor

from edge_runtime.engine.engine import Engine
from edge_runtime.engine.quality import QualityBooks
from edge_runtime.model.moe import Beside, LocalExperts, Missing, Owed, Slices
from edge_runtime.selector.choose import DEFERRED, Choice, Slots
from edge_runtime.selector.home import HomeSelector
from edge_runtime.selector.learned import Losses
from tests.support.engines import Whole, engine_of
from tests.support.traits import frequency_of, similarity_of
from topology.grouping import group_experts

WAIT_S = 0.005


class Elsewhere:
    """An ExpertPort that notes which peers each step would have called.

    host_of  [L, E] int32, 0 for this node
    """

    def __init__(self, whole: Whole, host_of: np.ndarray, selector: HomeSelector | None) -> None:
        self.host_names = ["home", *(f"peer{index}" for index in range(1, int(host_of.max()) + 1))]
        self.host_of = host_of
        self.selector = selector
        self.calls = 0
        self._local = LocalExperts(whole.store, "home")
        self._served: np.ndarray | None = None
        self._late_kind: np.ndarray | None = None
        self._owed: Owed | None = None
        self._next: Owed | None = None
        self.lates = 0
        if selector is not None:
            selector.placed(host_of)

    def begin_step(self) -> None:
        self._owed = self._next = self._late_kind = None
        if self.selector is not None:
            self.selector.begin_step()

    def may_be_replaced(self) -> bool:
        return False

    def served_by(self) -> np.ndarray | None:
        return self._served

    def choose(self, layer: int, slots: Slots, may_defer: bool = False) -> Choice | None:
        if self.selector is None:
            return None
        choice = self.selector.choose(layer, slots, may_defer=may_defer)
        self._late_kind = None if choice is None or not (choice.kind == DEFERRED).any() else choice.kind
        return choice

    def take_owed(self) -> Owed | None:
        found, self._owed, self._next = self._owed, self._next, None
        return found

    def take_late(self) -> Choice | None:
        return None

    @property
    def drag_per_deviation(self) -> float:
        return 0.0 if self.selector is None else self.selector.drag_per_deviation

    def start_price(self) -> float:
        return 0.0 if self.selector is None else self.selector.start_price()

    def add_here(self, *arguments: object) -> None:
        """Never all in one: `run` is to see it."""

    def run(
        self,
        layer: int,
        x: Tensor,
        expert_ids: Tensor,
        out: Tensor,
        beside: Beside = None,
        slices: Slices | None = None,
    ) -> Missing | None:
        self._served = self.host_of[layer][expert_ids.numpy()]
        self.calls += len(np.unique(self._served[self._served > 0]))
        missing = self._local.run(layer, x, expert_ids, out, beside, slices)
        kind, self._late_kind = self._late_kind, None
        if kind is not None:
            slots = torch.from_numpy(np.flatnonzero(kind == DEFERRED))
            self._next = Owed(slots, out[slots].clone(), None)
            out[slots] = 0.0
            self.lates += 1
        return missing


def selector_of(
    num_layers: int,
    num_experts: int,
    num_peers: int,
    *,
    policy: str = "live",
    loss: float = 0.02,
    left_out: float | None = None,
    late: float | None = None,
    power: float = 1.0,
    coherence: float = 0.0,
) -> HomeSelector:
    """A selector for whom every expert is like every other, at about the same loss.

    left_out, late  how far a slot deviates that is left out or late; None: that is not done
    """
    similarity = np.ones((num_layers, num_experts, num_experts))
    groups = group_experts(similarity, frequency_of(num_layers, num_experts), caps=[num_experts] * num_layers)
    losses = loss * (1.5 - 0.5 * similarity_of(num_layers, num_experts)).astype(np.float32)
    follows = np.full((num_layers - 1, num_experts, num_experts), 1 / num_experts)
    return HomeSelector(
        policy,
        groups,
        Losses.of(
            tuple(range(num_layers)),
            losses,
            follows,
            power,
            coherence,
            None if left_out is None else np.full((num_layers, num_experts), left_out),
            None if late is None else np.full((num_layers, num_experts), late),
        ),
        num_columns=4,
        waits_s=[0.0] + [WAIT_S] * num_peers,
        slots_s=[0.0] + [1e-5] * num_peers,
        drops=left_out is not None,
        defers=late is not None,
    )


def some_elsewhere(num_layers: int, num_experts: int, num_peers: int = 2, share: float = 0.6) -> np.ndarray:
    """[L, E] int32: a share of each layer's experts here, the rest at peers in turn."""
    here = round(num_experts * share)
    line = [0] * here + [1 + index % num_peers for index in range(num_experts - here)]
    return np.stack([np.roll(np.array(line, dtype=np.int32), 5 * layer) for layer in range(num_layers)])


def budget_engine(whole: Whole, port: Elsewhere, **options: object) -> Engine:
    """An engine on that port, with books."""
    engine = engine_of(whole, port=port, **options)
    engine.books = engine.runner.books = books_on(port)
    return engine


def books_on(port: Elsewhere) -> QualityBooks:
    """Of an engine, or of a first stage, on that port."""
    return QualityBooks(port.choose, port.start_price, drag=lambda: port.drag_per_deviation)
