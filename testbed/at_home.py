"""One home of a cluster on paper, decoding text as it stands: where its experts would be, what its selector would do with
that, and how long its steps would take. The selector, its ledgers and its prices are the runtime's own.

Knows the placement and the links of a topology file. Peers are never busy with others.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from calibration.evaluate import Alternative
from calibration.evaluate import Slots as TextSlots
from calibration.exact_model import Choice as TextChoice
from edge_runtime.selector.budget import Ledgers, Prices
from edge_runtime.selector.choose import STAND_IN, Slots
from edge_runtime.selector.home import HomeSelector
from edge_runtime.selector.learned import Losses
from topology.cluster import Cluster
from topology.costs import ModelFootprint
from topology.grouping import Groups
from topology.host_choice import choose_hosts
from topology.node_plan import Placement
from topology.speeds import Machines, machines_of
from topology.step_time import WIRE_ITEM_BYTES, operations, trunk_seconds

NO_LIMIT = 1e9  # a budget beyond all losses: nothing is waited for that can be served here


@dataclass
class Tally:
    """What a home's steps came to."""

    step_s: list[float] = field(default_factory=list)
    tokens: int = 0
    bytes: float = 0.0
    calls: int = 0
    weight: dict[str, float] = field(
        default_factory=lambda: {"local exact": 0.0, "local substitute": 0.0, "remote": 0.0}
    )
    spent: float = 0.0

    def share(self, way: str) -> float:
        return self.weight[way] / max(sum(self.weight.values()), 1e-12)


class AtHome(Alternative):
    """Requests in groups of `streams`, each of which decodes together at the home.

    policy  of the selector; "exact" never swaps
    budget  of each request; `NO_LIMIT` without a price: whatever can be served here is
    """

    token_by_token = True

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        placement: Placement,
        footprint: ModelFootprint,
        groups: Groups,
        losses: Losses,
        *,
        home: str,
        policy: str,
        budget: float,
        streams: int,
    ) -> None:
        self.name = name
        self.tally = Tally()
        self._streams, self._budget, self._footprint = streams, budget, footprint
        self._machines: Machines = machines_of(cluster)
        self._home = home
        hosts = placement.hosts()
        self._hosts = [home, *sorted({node for nodes in hosts.values() for node in nodes} - {home})]
        self._table = choose_hosts(
            hosts,
            home=home,
            alive=self._hosts,
            num_layers=footprint.num_layers,
            num_experts=footprint.experts_per_layer,
            peers=self._hosts,
        )
        links = [self._machines.link(home, peer) for peer in self._hosts[1:]]
        overhead_s = self._machines.speed(home).call_overhead_s
        row_bytes = footprint.width * WIRE_ITEM_BYTES
        self._call_s = np.array([0.0, *(link.rtt_s + 2 * overhead_s for link in links)])
        self._byte_s = np.array([0.0, *(8 / link.bandwidth_bps for link in links)])
        self._selector: HomeSelector | None = None
        if policy != "exact":
            self._selector = HomeSelector(
                policy,
                groups,
                losses,
                num_columns=footprint.top_k,
                waits_s=self._call_s.tolist(),
                slots_s=(self._byte_s * 2 * row_bytes).tolist(),
            )
            self._selector.placed(self._table)
        start = 0.0 if self._selector is None or budget >= NO_LIMIT else self._selector.start_price()
        self._prices, self._ledgers = Prices(start), Ledgers()
        self._layers = footprint.moe_layers
        by_layer, head = trunk_seconds(footprint, self._machines.speed(home), streams)
        self._trunk_s = float(by_layer.sum()) + head + self._machines.speed(home).step_overhead_s

    def begin_step(self, requests: Tensor) -> None:
        """See Alternative."""
        ids = requests.numpy()
        self._parts = [
            np.flatnonzero(ids // self._streams == group) for group in np.unique(ids // self._streams)
        ]
        self._users = [str(request) for request in ids.tolist()]
        self._budgets = [self._budget] * len(ids)
        self._left = self._ledgers.allowances(self._users, self._budgets)
        self._price = self._prices.values(self._budgets) * (
            2 * (1 - self._ledgers.fills(self._users, self._budgets))
        )
        self._spent = np.zeros(len(ids))
        self._seconds = [self._trunk_s] * len(self._parts)
        self.tally.tokens += len(ids)

    def choose(self, slots: TextSlots) -> TextChoice:
        """See Alternative."""
        layer = self._layers[slots.layer_index]
        ids, weights = slots.expert_ids.numpy().copy(), slots.gate_weights.numpy()
        chosen = ids.copy()
        stood_in = np.zeros(ids.shape, dtype=bool)
        for part, rows in enumerate(self._parts):
            if self._selector is not None:
                asked = Slots(
                    ids[rows],
                    weights[rows],
                    slots.logits.numpy()[rows],
                    self._left[rows],
                    self._price[rows],
                )
                choice = self._selector.choose(layer, asked)
                if choice is not None:
                    chosen[rows] = choice.expert_ids
                    stood_in[rows] = choice.kind == STAND_IN
                    self._left[rows] = np.maximum(self._left[rows] - choice.loss, 0.0)
                    self._spent[rows] += choice.loss
            self._seconds[part] += self._layer_seconds(layer, chosen[rows])
        here = self._table[layer][chosen] == 0
        tally = self.tally.weight
        tally["local substitute"] += float(weights[stood_in & here].sum())
        tally["local exact"] += float(weights[here & ~stood_in].sum())
        tally["remote"] += float(weights[~here].sum())
        return torch.from_numpy(chosen), slots.gate_weights

    def _layer_seconds(self, layer: int, chosen: np.ndarray) -> float:
        """Own experts beside the slowest of the calls; and sending each of them."""
        hosts = self._table[layer][chosen]
        row_bytes = self._footprint.width * WIRE_ITEM_BYTES
        slowest = self._compute_s(0, layer, chosen[hosts == 0])
        called = [host for host in np.unique(hosts).tolist() if host > 0]
        for host in called:
            at_host = hosts == host
            moved = float(at_host.any(axis=1).sum() + at_host.sum()) * row_bytes
            self.tally.bytes += moved
            self.tally.calls += 1
            seconds = self._call_s[host] + moved * self._byte_s[host]
            slowest = max(slowest, float(seconds) + self._compute_s(host, layer, chosen[at_host]))
        return slowest + len(called) * self._machines.speed(self._home).call_overhead_s

    def _compute_s(self, host: int, layer: int, experts: np.ndarray) -> float:
        if not len(experts):
            return 0.0
        speed = self._machines.speed(self._hosts[host])
        size = self._footprint.expert_bytes["as_stored"][layer]
        read = len(np.unique(experts)) * size / speed.memory_bytes_per_s
        return read + operations(self._footprint, size, len(experts)) / speed.flops

    def end_step(self) -> None:
        """See Alternative."""
        self.tally.step_s += self._seconds
        self.tally.spent += float(self._spent.sum())
        self._ledgers.book(self._users, self._budgets, self._spent)
        if self._budget < NO_LIMIT:
            self._prices.observe(self._budgets, self._spent)
