"""A quick estimate of plans that nobody has laid out: experts as a fluid that runs into the room there is.

Exact where every stage holds all experts of its layers; elsewhere good enough to say which few plans are worth laying
out. Knows no identity of any expert, nor demand.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from topology import costs
from topology.cluster import DECODE, EXPERTS, Cluster, Node
from topology.costs import ModelFootprint
from topology.layout import kv_floor_blocks
from topology.node_plan import GroupPlan, Stage
from topology.speeds import Machines
from topology.spread import fill_up
from topology.step_time import (
    WIRE_ITEM_BYTES,
    ExpertShares,
    GroupPrediction,
    StepPrediction,
    expert_seconds,
    hop_seconds,
    hops_seconds,
    predict_home_step,
    trunk_seconds,
)
from topology.workload import Workload

Floats = NDArray[np.float64]
FEW_COPIES = 1.5  # copies of an expert up to which most of them lie in one place only
FRACTIONS = 16  # into how many steps the local share of a stage's experts is cut for `stage_costs`


class Estimate:
    """Rooms and times of one cluster and model, worked out once for all plans."""

    def __init__(
        self, cluster: Cluster, footprint: ModelFootprint, machines: Machines, kv_floor_tokens: int = 0
    ) -> None:
        self.cluster, self.footprint, self.machines = cluster, footprint, machines
        self.nodes: Mapping[str, Node] = {node.name: node for node in cluster.nodes}
        self.moe = list(footprint.moe_layers)
        self._least = costs.kv_blocks(footprint, costs.context_limit(cluster, footprint))
        self._wanted = max(costs.kv_blocks(footprint, cluster.kv_tokens), self._least)
        self._floor = kv_floor_blocks(cluster, footprint, kv_floor_tokens)
        # Prefix sums over layers: the search asks for the room of every range of layers of every node.
        self._trunks = {
            name: costs.trunk_sizes(footprint, node.trunk_format) for name, node in self.nodes.items()
        }
        self._layer_sums = {name: _sums(sizes.layer_bytes) for name, sizes in self._trunks.items()}
        self._block_sums = _sums(
            [costs.kv_block_bytes(footprint, layer, layer + 1) for layer in range(footprint.num_layers)]
        )
        self._expert_sums = {
            name: _sums(footprint.expert_bytes[node.weight_format]) for name, node in self.nodes.items()
        }
        self._fixed = {
            (name, has_trunk): cluster.process_bytes(node)
            + costs.workspace_bytes(cluster, _used_for(node, has_trunk), footprint)
            for name, node in self.nodes.items()
            for has_trunk in (False, True)
        }
        # The same stage, with the same helpers for its experts, comes back in many plans and batches.
        self._predictions: dict[tuple[object, ...], GroupPrediction] = {}
        self._steps: dict[tuple[object, ...], StepPrediction] = {}
        self._trunk_seconds: dict[tuple[str, int, float], tuple[Floats, float]] = {}
        self._helped: dict[tuple[object, ...], list[tuple[str, float]]] = {}
        self._splits: dict[tuple[object, ...], ExpertShares] = {}
        self._covered: dict[Stage, float] = {}

    # Memory.

    def room(self, node: str, first: int, last: int, *, blocks: int) -> float:
        """Bytes for experts on a node with the trunk of those layers; negative if even that does not fit."""
        model, has_trunk = self.footprint, first < last
        used = self._fixed[node, has_trunk]
        if has_trunk:
            ends, sizes, sums = last == model.num_layers, self._trunks[node], self._layer_sums[node]
            used += sums[last] - sums[first] + model.table_bytes
            used += sizes.embed_bytes if first == 0 or (ends and model.head_is_tied) else 0
            used += sizes.head_bytes if ends else 0
            used += blocks * (self._block_sums[last] - self._block_sums[first])
        return float(self.nodes[node].memory_bytes - used)

    def wanted_bytes(self, node: str, first: int, last: int) -> float:
        """Bytes of all experts of layers [first, last) in a node's format."""
        sums = self._expert_sums[node]
        return float(sums[last] - sums[first]) * self.footprint.experts_per_layer

    def coverage(self, node: str, first: int, last: int) -> float:
        """Share of the experts of its layers that a stage can hold, 0 to 1; negative if the trunk does not fit.

        All of them may cost KV down to the floor, as a layout would have it; a part is what the wanted KV leaves.
        """
        if self.room(node, first, last, blocks=self._least) < 0:
            return -1.0
        wanted = self.wanted_bytes(node, first, last)
        if EXPERTS not in self.nodes[node].roles:
            return 0.0 if wanted else 1.0
        if self.room(node, first, last, blocks=self._floor) >= wanted:
            return 1.0
        return max(0.0, self.room(node, first, last, blocks=self._wanted) / wanted)

    def fits(self, groups: Sequence[GroupPlan], hosts: Collection[str]) -> bool:
        """Whether every trunk fits, and all experts once."""
        stages = {stage.node: stage for group in groups for stage in group.stages}
        total = 0.0
        for name in self.nodes:
            stage = stages.get(name)
            first, last = (stage.first_layer, stage.last_layer) if stage else (0, 0)
            room = self.room(name, first, last, blocks=self._least)
            if stage and room < 0:
                return False
            if name in hosts and EXPERTS in self.nodes[name].roles and room > 0:
                total += room / max(self.wanted_bytes(name, 0, self.footprint.num_layers), 1.0)
        return total >= 1 or not self.moe

    # Time.

    def predict(
        self,
        group: GroupPlan,
        batch: int,
        groups: Sequence[GroupPlan],
        hosts: frozenset[str],
        workload: Workload,
    ) -> GroupPrediction:
        """One step of a group of the plan (groups, hosts)."""
        key = (group, batch, tuple(groups), hosts, workload.context_tokens)
        if key not in self._predictions:
            steps = tuple(self._step(stage, batch, groups, hosts, workload) for stage in group.stages)
            hops_s = hops_seconds(self.footprint, self.machines, group.stages, batch)
            self._predictions[key] = GroupPrediction(batch, steps, hops_s)
        return self._predictions[key]

    def _step(
        self, stage: Stage, batch: int, groups: Sequence[GroupPlan], hosts: frozenset[str], workload: Workload
    ) -> StepPrediction:
        shares = self._shares(stage, groups, hosts)
        key = (stage, batch, id(shares), workload.context_tokens)
        if key not in self._steps:
            self._steps[key] = predict_home_step(
                self.footprint,
                self.machines,
                home=stage.node,
                shares=shares,
                batch=batch,
                first_layer=stage.first_layer,
                last_layer=stage.last_layer,
                context_tokens=workload.context_tokens,
                trunk=self._trunk(stage.node, batch, workload.context_tokens),
            )
        return self._steps[key]

    def _trunk(self, node: str, batch: int, context_tokens: float) -> tuple[Floats, float]:
        """Seconds of all layers' trunks, and of the head, on a node; see `trunk_seconds`."""
        key = (node, batch, context_tokens)
        if key not in self._trunk_seconds:
            self._trunk_seconds[key] = trunk_seconds(
                self.footprint,
                self.machines.speed(node),
                batch,
                context_tokens,
                self.machines.trunk_format(node),
            )
        return self._trunk_seconds[key]

    def score(self, groups: Sequence[GroupPlan], hosts: frozenset[str], workload: Workload) -> float:
        """Seconds per token of a plan, as its workload counts them; infinite if it cannot be."""
        if not self.fits(groups, hosts):
            return float("inf")
        return workload.seconds(
            lambda group, batch: self.predict(group, batch, groups, hosts, workload), groups, self.machines
        )

    def _shares(self, stage: Stage, groups: Sequence[GroupPlan], hosts: frozenset[str]) -> ExpertShares:
        """What a stage holds itself, and who holds the rest: those with most room first, as `host_choice` would ask.

        One object for the same stage, share and helpers, whatever plan they are part of.
        """
        layers = tuple(layer for layer in self.moe if layer in stage.layers)
        share = max(0.0, self._coverage_of(stage)) if stage.node in hosts else 0.0
        same_layers = [
            self._coverage_of(other)
            for group in groups
            for other in group.stages
            if other.node in hosts
            and other.first_layer < stage.last_layer
            and stage.first_layer < other.last_layer
        ]
        at_homes = sum(max(0.0, other) for other in same_layers)
        if at_homes > self.cluster.memory_ratio:  # fewer copies are allowed than the homes could hold
            share *= self.cluster.memory_ratio / at_homes
        helpers = [] if share >= 1 else self._helpers(stage.node, groups, hosts)
        key = (layers, share, tuple(helpers))
        if key not in self._splits:
            self._splits[key] = self._split(layers, share, helpers)
        return self._splits[key]

    def _coverage_of(self, stage: Stage) -> float:
        if stage not in self._covered:
            self._covered[stage] = self.coverage(stage.node, stage.first_layer, stage.last_layer)
        return self._covered[stage]

    def _helpers(
        self, home: str, groups: Sequence[GroupPlan], hosts: Collection[str]
    ) -> list[tuple[str, float]]:
        """(node, share of all experts that it has room for), most first."""
        key = (home, tuple(groups), hosts)
        if key not in self._helped:
            self._helped[key] = self._find_helpers(home, groups, hosts)
        return self._helped[key]

    def _find_helpers(
        self, home: str, groups: Sequence[GroupPlan], hosts: Collection[str]
    ) -> list[tuple[str, float]]:
        stages = {stage.node: stage for group in groups for stage in group.stages}
        found = []
        for name in self.nodes:
            if name == home or name not in hosts or EXPERTS not in self.nodes[name].roles:
                continue
            stage = stages.get(name)
            first, last = (stage.first_layer, stage.last_layer) if stage else (0, 0)
            room = self.room(name, first, last, blocks=self._wanted)
            wanted = max(self.wanted_bytes(name, 0, self.footprint.num_layers), 1.0)
            if room > 0:
                found.append((name, min(1.0, room / wanted)))
        return sorted(found, key=lambda pair: (-pair[1], pair[0]))

    def _split(
        self, layers: Sequence[int], share: float, helpers: Sequence[tuple[str, float]]
    ) -> ExpertShares:
        """Own share, and the rest at the helpers: where it lies once, as a layout would spread it; where there are copies
        to choose from, at as few of them as can be."""
        K, E = self.footprint.top_k, self.footprint.experts_per_layer
        rest, names = 1.0 - share, [name for name, _ in helpers]
        if rest <= 1e-9 or not helpers:
            columns, names = [1.0], []
        elif self.cluster.memory_ratio < FEW_COPIES:
            speeds = [self.machines.speed(name).memory_bytes_per_s for name in names]
            fastest = max(speeds)
            parts = fill_up([room for _, room in helpers], [speed / fastest for speed in speeds], rest)
            columns = [share, *parts]
        else:
            columns, left = [share], rest
            for _, room in helpers:
                columns.append(min(left, room))
                left -= columns[-1]
        held = sum(columns[1:])
        if 0 < held < rest:  # somebody has to hold it: KV will shrink for it
            columns[1:] = [column * rest / held for column in columns[1:]]
        used = [index for index, column in enumerate(columns[1:]) if column > 1e-9]
        table = np.tile(np.array([columns[0], *(columns[1 + index] for index in used)]), (len(layers), 1))
        return ExpertShares(tuple(names[index] for index in used), K * table, E * table, is_level=True)

    def stage_costs(self, workload: Workload, hosts: frozenset[str]) -> tuple[list[str], Floats, Floats]:
        """Nodes that may run layers, [N, L+1, L+1] their seconds for layers [a, b), [N, N] seconds of a hop.

        Seconds are weighed over the workload's batches. Infinite where the trunk does not fit.
        """
        names = [name for name, node in self.nodes.items() if DECODE in node.roles]
        L = self.footprint.num_layers
        table = np.full((len(names), L + 1, L + 1), np.inf)
        steps = np.arange(FRACTIONS + 1) / FRACTIONS
        total = sum(weight for _, weight in workload.batches)
        for row, name in enumerate(names):
            helpers = self._helpers(name, (), hosts)
            seconds, head, fixed = np.zeros((FRACTIONS + 1, L)), 0.0, 0.0
            for batch, weight in workload.batches:
                trunk, of_head = self._trunk(name, batch, workload.context_tokens)
                seconds += weight / total * trunk
                head += weight / total * of_head
                speed = self.machines.speed(name)
                fixed += weight / total * (speed.step_overhead_s + batch * speed.row_overhead_s)
                for index, step in enumerate(steps if self.moe else ()):
                    found = expert_seconds(
                        self.footprint,
                        self.machines,
                        home=name,
                        layers=self.moe,
                        shares=self._split(self.moe, float(step), helpers),
                        batch=batch,
                    )
                    seconds[index, self.moe] += weight / total * (found.local + found.wait)
            sums = np.concatenate([np.zeros((FRACTIONS + 1, 1)), np.cumsum(seconds, axis=1)], axis=1)
            for first in range(L):
                for last in range(first + 1, L + 1):
                    if not self.footprint.uncut.isdisjoint((first, last)):
                        continue
                    share = self.coverage(name, first, last)
                    if share < 0 or (share < 1 and not helpers):
                        continue
                    level = int(share * FRACTIONS)
                    table[row, first, last] = fixed + sums[level, last] - sums[level, first]
                    if last == L:
                        table[row, first, last] += head
        rows = sum(weight / total * batch for batch, weight in workload.batches)
        hops = np.zeros((len(names), len(names)))
        for i, sender in enumerate(names):
            for j, receiver in enumerate(names):
                if i != j:
                    link, speed = self.machines.link(sender, receiver), self.machines.speed(receiver)
                    hops[i, j] = hop_seconds(link, speed, rows * self.footprint.width * WIRE_ITEM_BYTES)
        return names, table, hops


def _sums(sizes: Sequence[int]) -> list[int]:
    """[L+1] running sums from 0."""
    return [0, *accumulate(sizes)]


def _used_for(node: Node, has_trunk: bool) -> Node:
    return replace(node, roles=(node.roles & {EXPERTS}) | ({DECODE} if has_trunk else set()))
