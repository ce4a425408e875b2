"""The runtime's own selector as one home of a cluster has it, for measuring what its choices lose: ledgers, prices, policy.

Knows the placement that a topology file would get and what its links are said to take; nothing is sent.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from calibration.evaluate import Alternative, Slots
from calibration.exact_model import Choice
from edge_runtime.artifacts import Artifact
from edge_runtime.errors import ArtifactError, ConfigError
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.footprint import footprint
from edge_runtime.node.share import Learned, num_experts, selector_for
from edge_runtime.selector import choose
from edge_runtime.selector.account import StepAccount
from edge_runtime.selector.budget import Ledgers, Prices, budget_of
from edge_runtime.selector.home import HomeSelector
from edge_runtime.selector.learned import read_losses, read_traits
from topology.cluster import Cluster
from topology.host_choice import choose_hosts
from topology.placement import plan_placement
from topology.speeds import LinkSpeed

HERE = 0
OTHERWISE = (choose.STAND_IN, choose.DROPPED, choose.DEFERRED)


class Home(NamedTuple):
    """One home of a planned cluster.

    host_of   [L, E] int32, whom it calls for each expert of each layer of the model; 0 is itself
    peers     names of those it may call, from 1 on
    """

    name: str
    host_of: np.ndarray
    peers: list[str]
    learned: Learned


def plan_home(
    cluster: Cluster, checkpoint: Checkpoint, artifact: Artifact | None, name: str | None, rtt_s: float | None
) -> Home:
    """What a home of the cluster would hold and whom it would call.

    name    the home; None for the first node that has one's role
    rtt_s   round trip of every link; None for what the file says
    """
    traits = read_traits(artifact) if artifact is not None else None
    losses = read_losses(artifact) if artifact is not None else None
    if traits is None or losses is None:
        raise ArtifactError(
            "a selector needs a calibration artifact with the sections frequency, similarity, mismatch and sensitivity; "
            "run `edge-runtime calibrate`, or give --artifact"
        )
    placement = plan_placement(
        cluster, footprint(checkpoint, context_tokens=cluster.context_tokens), traits=traits
    )
    homes = [
        node.node
        for node in placement.nodes
        if node.last_layer == checkpoint.spec.num_layers and not node.first_layer
    ]
    if not homes or (name is not None and name not in homes):
        raise ConfigError(
            f"cluster {cluster.name} has no home {name or ''} that runs all layers, found {', '.join(homes) or 'none'}"
        )
    home = name or homes[0]
    hosts = placement.hosts()
    peers = sorted({node for nodes in hosts.values() for node in nodes} - {home})
    host_of = choose_hosts(
        hosts,
        home=home,
        alive=peers,
        num_layers=checkpoint.spec.num_layers,
        num_experts=num_experts(checkpoint.spec),
        peers=[home, *peers],
    )
    links = {}
    for peer in peers:
        link = cluster.link(home, peer)
        links[peer] = LinkSpeed(
            rtt_s=link.rtt_s if rtt_s is None else rtt_s, bandwidth_bps=link.bandwidth_bps
        )
    return Home(home, host_of, peers, Learned(traits.groups, losses, links))


class Selected(Alternative):
    """A policy of the selector with a budget, each request a user of its own.

    policy    exact, paper or live; with +drop and +defer, what else it may do
    quality   a word or a number, as requests give it
    """

    token_by_token = True

    def __init__(self, policy: str, quality: str | float, home: Home, checkpoint: Checkpoint) -> None:
        self.name = f"{policy}:{quality}"
        rule, *may = policy.split("+")
        try:
            self._budget = budget_of(quality)
        except ValueError as error:
            raise ConfigError(f"policy {self.name}: the quality must be {error}") from None
        selector = selector_for(
            rule, checkpoint.spec, home.learned, home.peers, drops="drop" in may, defers="defer" in may
        )
        if selector is None:
            raise ConfigError(
                f"home {home.name} holds every expert, so nothing is to be selected; give a smaller one"
            )
        selector.placed(home.host_of)
        self._selector: HomeSelector = selector
        self._host_of, self._layers = home.host_of, checkpoint.spec.moe_layers
        self._ledgers, self._prices = Ledgers(), Prices(selector.start_price())
        self._served = np.zeros(5)  # gate weight: exact here, exact elsewhere, stood in for, dropped, late
        self._spent_in_all, self._rows, self._calls, self._waits, self._steps = 0.0, 0, 0, 0, 0

    def begin_step(self, requests: Tensor) -> None:
        """See Alternative."""
        self._users = [str(request) for request in requests.tolist()]
        self._budgets = [self._budget] * len(self._users)
        self._selector.begin_step()
        self._account = StepAccount(
            self._ledgers, self._prices, self._users, self._budgets, self._selector.drag_per_deviation
        )

    def choose(self, slots: Slots) -> Choice:
        """See Alternative."""
        layer = self._layers[slots.layer_index]
        ids, weights = slots.expert_ids.numpy(), slots.gate_weights.numpy()
        found = self._selector.choose(
            layer, self._account.slots(ids, weights, slots.logits.numpy()), may_defer=slots.may_be_late
        )
        kind = np.zeros(ids.shape, dtype=np.int8) if found is None else found.kind
        is_away = self._host_of[layer][ids] != HERE
        is_exact = kind == choose.EXACT
        ways = (is_exact & ~is_away, is_exact & is_away)
        for index, mine in enumerate((*ways, *(kind == other for other in OTHERWISE))):
            self._served[index] += float(weights[mine].sum())
        self._calls += len(np.unique(self._host_of[layer][ids][is_exact & is_away]))
        self._waits += bool((is_exact & is_away).any())
        if found is None:
            return None
        self._account.take(found)
        dropped = torch.from_numpy(kind == choose.DROPPED)
        late = torch.from_numpy(kind == choose.DEFERRED)
        weights_left = slots.gate_weights.masked_fill(dropped, 0.0)
        if not late.any():
            return torch.from_numpy(found.expert_ids), weights_left
        return torch.from_numpy(found.expert_ids), weights_left, late

    def end_step(self) -> None:
        """See Alternative."""
        self._spent_in_all += float(self._account.book().sum())
        self._rows += len(self._users)
        self._steps += 1

    def notes(self) -> dict[str, float]:
        """See Alternative: gate weight by where it was served, mean spending of a token, peers called in a step's layer."""
        total = max(float(self._served.sum()), 1e-30)
        here, elsewhere, stood_in, dropped, late = (float(weight) / total for weight in self._served)
        return {
            "budget": self._budget,
            "spent": self._spent_in_all / max(self._rows, 1),
            "exact_here": here,
            "exact_elsewhere": elsewhere,
            "substituted": stood_in,
            "dropped_weight": dropped,
            "deferred": late,
            "waits_per_layer": self._waits / max(self._steps * len(self._layers), 1),
            "calls_per_layer": self._calls / max(self._steps * len(self._layers), 1),
        }


def read_home(
    topology: Path, checkpoint: Checkpoint, artifact: Artifact | None, name: str | None, rtt_s: float | None
) -> Home:
    """The same of a topology file, whose model must be this one."""
    from topology.files import read_cluster

    cluster = read_cluster(topology)
    theirs = Checkpoint.open(cluster.model)
    if theirs.model_hash != checkpoint.model_hash:
        raise ConfigError(
            f"{topology} serves the model with hash {theirs.model_hash}, {checkpoint.folder} has {checkpoint.model_hash}; "
            f"give --model {cluster.model}"
        )
    return plan_home(cluster, checkpoint, artifact, name, rtt_s)
