"""One home of a cluster on paper, decoding text as it stands: where its experts would be, what its selector would do with
that, and how long its steps would take. The selector, its ledgers and its prices are the runtime's own.

Knows the placement and the links of a topology file. Peers are never busy with others.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from calibration.evaluate import Alternative
from calibration.evaluate import Slots as TextSlots
from calibration.exact_model import Choice as TextChoice
from edge_runtime.selector.account import StepAccount
from edge_runtime.selector.budget import Ledgers, Prices
from edge_runtime.selector.choose import DEFERRED, DROPPED, EXACT, STAND_IN
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
        default_factory=lambda: dict.fromkeys(
            ("local exact", "local substitute", "remote", "remote late", "dropped"), 0.0
        )
    )
    waits: int = 0
    layers: int = 0
    spent: float = 0.0

    def share(self, way: str) -> float:
        return self.weight[way] / max(sum(self.weight.values()), 1e-12)


class AtHome(Alternative):
    """Requests in groups of `streams`, each of which decodes together at the home.

    policy  of the selector; "exact" never swaps
    budget  of each request; `NO_LIMIT` without a price: whatever can be served here is
    may     what else the selector may do: of drop, defer and ahead (count what a layer's choice costs the next one)
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
        may: Collection[str] = ("ahead",),
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

        def selector() -> HomeSelector:
            made = HomeSelector(
                policy,
                groups,
                losses,
                num_columns=footprint.top_k,
                waits_s=self._call_s.tolist(),
                slots_s=(self._byte_s * 2 * row_bytes).tolist(),
                drops="drop" in may,
                defers="defer" in may,
                looks_ahead="ahead" in may,
            )
            made.placed(self._table)
            return made

        self._selectors: list[HomeSelector] = []  # one for each group of streams, as if each had a home
        self._new_selector = None if policy == "exact" else selector
        start = 0.0 if policy == "exact" or budget >= NO_LIMIT else selector().start_price()
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
        users, budgets = [str(request) for request in ids.tolist()], [self._budget] * len(ids)
        while self._new_selector is not None and len(self._selectors) < len(self._parts):
            self._selectors.append(self._new_selector())
        drag = self._selectors[0].drag_per_deviation if self._selectors else 0.0
        self._account = StepAccount(self._ledgers, self._prices, users, budgets, drag)
        for each in self._selectors:
            each.begin_step()
        self._seconds = [self._trunk_s] * len(self._parts)
        self._owed_at_s = [0.0] * len(self._parts)  # when what the layer before let come late is there
        self.tally.tokens += len(ids)

    def choose(self, slots: TextSlots) -> TextChoice:
        """See Alternative."""
        layer = self._layers[slots.layer_index]
        ids, weights = slots.expert_ids.numpy().copy(), slots.gate_weights.numpy()
        chosen, kind = ids.copy(), np.zeros(ids.shape, dtype=np.int8)
        logits = slots.logits.numpy()
        for part, rows in enumerate(self._parts):
            if self._selectors:
                asked = self._account.slots(ids[rows], weights[rows], logits[rows], rows)
                choice = self._selectors[part].choose(layer, asked, may_defer=slots.may_be_late)
                if choice is not None:
                    chosen[rows], kind[rows] = choice.expert_ids, choice.kind
                    self._account.take(choice, rows)
            self._pass_layer(part, layer, chosen[rows], kind[rows])
        here = self._table[layer][chosen] == 0
        for way, mine in (
            ("local exact", here & (kind == EXACT)),
            ("local substitute", kind == STAND_IN),
            ("remote", ~here & (kind == EXACT)),
            ("remote late", kind == DEFERRED),
            ("dropped", kind == DROPPED),
        ):
            self.tally.weight[way] += float(weights[mine].sum())
        is_dropped = torch.from_numpy(kind == DROPPED)
        return (
            torch.from_numpy(chosen),
            slots.gate_weights.masked_fill(is_dropped, 0.0),
            torch.from_numpy(kind == DEFERRED),
        )

    def _pass_layer(self, part: int, layer: int, chosen: np.ndarray, kind: np.ndarray) -> None:
        """Own experts beside the slowest of the calls that are waited for, and sending each; then what is owed."""
        hosts = self._table[layer][chosen]
        row_bytes = self._footprint.width * WIRE_ITEM_BYTES
        runs = kind != DROPPED
        slowest = self._compute_s(0, layer, chosen[(hosts == 0) & runs])
        owed_s, sent_s = 0.0, 0.0
        for host in np.unique(hosts[runs & (hosts > 0)]).tolist():
            at_host = (hosts == host) & runs
            moved = float(at_host.any(axis=1).sum() + at_host.sum()) * row_bytes
            self.tally.bytes += moved
            self.tally.calls += 1
            sent_s += self._machines.speed(self._home).call_overhead_s
            takes = float(self._call_s[host] + moved * self._byte_s[host])
            takes += self._compute_s(host, layer, chosen[at_host])
            if (kind[at_host] == DEFERRED).all():
                owed_s = max(owed_s, takes)
            else:
                slowest = max(slowest, takes)
        self.tally.layers += 1
        self.tally.waits += bool((kind[hosts > 0] == EXACT).any())
        began = self._seconds[part]
        done = max(began + slowest + sent_s, self._owed_at_s[part])
        self._owed_at_s[part] = began + owed_s + sent_s if owed_s else 0.0
        self._seconds[part] = done

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
        self.tally.spent += float(self._account.spent.sum())
        self._account.book(moves_prices=self._budget < NO_LIMIT)
