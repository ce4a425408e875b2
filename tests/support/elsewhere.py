"""A home whose peers are only said to be: every expert is computed here, and the tables say who holds it."""

import numpy as np
from torch import Tensor

from edge_runtime.engine.engine import Engine
from edge_runtime.engine.quality import QualityBooks
from edge_runtime.model.moe import Beside, LocalExperts, Missing, Slices
from edge_runtime.selector.choose import NO_OPTIONS, Choice, Options, Slots
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
        if selector is not None:
            selector.placed(host_of)

    def begin_step(self) -> None:
        pass

    def may_be_replaced(self) -> bool:
        return False

    def served_by(self) -> np.ndarray | None:
        return self._served

    def choose(self, layer: int, slots: Slots) -> Choice | None:
        return None if self.selector is None else self.selector.choose(layer, slots)

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
        return self._local.run(layer, x, expert_ids, out, beside, slices)


def selector_of(
    num_layers: int,
    num_experts: int,
    num_peers: int,
    *,
    policy: str = "live",
    loss: float = 0.02,
    options: Options = NO_OPTIONS,
) -> HomeSelector:
    """A selector for whom every expert is like every other, at about the same loss."""
    similarity = np.ones((num_layers, num_experts, num_experts))
    groups = group_experts(similarity, frequency_of(num_layers, num_experts), caps=[num_experts] * num_layers)
    losses = loss * (1.5 - 0.5 * similarity_of(num_layers, num_experts)).astype(np.float32)
    follows = np.full((num_layers - 1, num_experts, num_experts), 1 / num_experts)
    return HomeSelector(
        policy,
        groups,
        Losses.of(tuple(range(num_layers)), losses, follows),
        num_columns=4,
        waits_s=[0.0] + [WAIT_S] * num_peers,
        slots_s=[0.0] + [1e-5] * num_peers,
        options=options,
    )


def some_elsewhere(num_layers: int, num_experts: int, num_peers: int = 2, share: float = 0.6) -> np.ndarray:
    """[L, E] int32: a share of each layer's experts here, the rest at peers in turn."""
    here = round(num_experts * share)
    line = [0] * here + [1 + index % num_peers for index in range(num_experts - here)]
    return np.stack([np.roll(np.array(line, dtype=np.int32), 5 * layer) for layer in range(num_layers)])


def budget_engine(whole: Whole, port: Elsewhere, **options: object) -> Engine:
    """An engine on that port, with books."""
    engine = engine_of(whole, port=port, **options)
    engine.books = engine.runner.books = QualityBooks(port.choose, port.start_price)
    return engine
