"""Choose how requests live on a cluster: who runs which layers, who hosts experts, and who is left out.

Plans are enumerated (every decode node a home; one home; a node that holds everything; 2 to n stages, each with
remote experts where its own room ends; several such groups), estimated as a fluid, and the few best laid out expert by
expert and predicted exactly. What is predicted to be fastest wins, so it is never slower than the best machine that
holds the model alone, with KV for the workload beside it. Deterministic; knows nothing of who is alive: pass a cluster
of the nodes that are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from topology.cluster import DECODE, EXPERTS, MOST_STAGES, PREFILL, Cluster
from topology.costs import ModelFootprint
from topology.errors import PlacementError
from topology.estimate import Estimate
from topology.ids import ExpertId
from topology.layer_cuts import Floats, cut_layers
from topology.layout import every_home, lay_out
from topology.node_plan import GroupPlan, Placement, Stage
from topology.speeds import LinkSpeed, Machines, NodeSpeed, machines_of
from topology.step_time import GroupPrediction, PlacementClock
from topology.traits import ExpertTraits, Traffic
from topology.workload import THROUGHPUT, Workload, growing_counts

SOLO, HOME, HOMES, STAGES = "solo", "home", "every home", "stages"
KINDS = (SOLO, HOME, HOMES, STAGES)
_ALLOWED = {"home": (HOMES, HOME), "solo": (SOLO,), "stages": (STAGES,), "auto": KINDS}
"""`plan` of the topology file -> kinds of plans."""

ALL_ORDERS = 4  # up to this many nodes every order is tried
WORTH_A_CHANGE = 0.1  # an earlier plan is kept unless another is faster by this share: moving costs too
WORTH_LEAVING_OUT = 0.01  # a node is left out only if that is faster by this share; it is a spare otherwise
LAYOUT_WORK = (
    60_000  # copies of experts times nodes that may be laid out to compare plans, beyond the first two
)
MOST_LAYOUTS = 6
WORTH_REFINING = 10  # plans whose hosts are chosen with care
ESTIMATE_ERROR = 0.15  # by how much an estimate with remote experts may be too high


@dataclass(frozen=True)
class Candidate:
    """A plan that may be laid out. `seconds`: estimated, per token, as the workload counts."""

    kind: str
    """Of `KINDS`."""
    groups: tuple[GroupPlan, ...]
    hosts: frozenset[str]
    """Nodes that may hold experts."""
    seconds: float = float("inf")

    def __str__(self) -> str:
        groups = "; ".join(map(str, self.groups[:4])) + ("; ..." if len(self.groups) > 4 else "")
        return f"{self.kind}: {groups}"


@dataclass(frozen=True)
class ClusterPlan:
    """The plan that was chosen, and what it was chosen over."""

    kind: str
    """Of `KINDS`."""
    placement: Placement
    """Its `groups` are where requests may live."""
    workload: Workload
    seconds: float
    """Predicted, per token, as the workload counts."""
    predictions: tuple[GroupPrediction, ...]
    """A step of each of the placement's groups, in their order, at the workload's first batch."""
    left_out: Mapping[str, str]
    """Node -> why it does less than its roles allow, with figures."""
    others: tuple[Candidate, ...]
    """The best plan of each kind, estimated; infinite seconds if it does not fit."""
    refused: tuple[str, ...] = ()
    """Plans that looked better and could not be laid out, and why."""


def choose_plan(
    cluster: Cluster,
    footprint: ModelFootprint,
    *,
    workload: Workload | None = None,
    speeds: Mapping[str, NodeSpeed] | None = None,
    links: Mapping[tuple[str, str], LinkSpeed] | None = None,
    cores: Mapping[str, float] | None = None,
    demand: Mapping[ExpertId, float] | None = None,
    pins: Mapping[ExpertId, str] | None = None,
    previous: Placement | None = None,
    epoch: int = 1,
    traits: ExpertTraits | None = None,
    traffic: Traffic | None = None,
) -> ClusterPlan:
    """The fastest feasible plan of the kinds that `cluster.plan` allows, laid out; `PlacementError` if there is none.

    workload        what to be good at; by default the middle between one request and `max_requests` at once
    speeds, links   measured; they win over the file's
    cores           node -> processors of its machine, which it shares with the other nodes there; None: it has enough
    others          as in `lay_out`
    """
    workload = workload or default_workload(cluster)
    machines = machines_of(cluster, speeds, links, cores)
    search = _Search(cluster, footprint, machines, workload)
    pinned = {pin.node for pin in cluster.pins} | set((pins or {}).values())
    candidates = [
        replace(candidate, hosts=candidate.hosts | pinned)
        for candidate in search.candidates(_ALLOWED[cluster.plan])
    ]
    candidates.sort(key=_rank)
    least = candidates[0].seconds if candidates else float("inf")
    earlier = _earlier(candidates, search, previous) if previous is not None else None
    if earlier is not None and earlier.seconds <= (1 + WORTH_A_CHANGE) * least:
        candidates = [earlier, *(candidate for candidate in candidates if candidate is not earlier)]

    def _lay_out(candidate: Candidate) -> ClusterPlan:
        placement = lay_out(
            cluster,
            footprint,
            groups=None if cluster.plan == "home" else candidate.groups,
            hosts=candidate.hosts,
            epoch=epoch,
            demand=demand,
            speeds=speeds,
            pins=pins,
            previous=previous,
            kv_floor_tokens=workload.kv_tokens,
            traits=traits,
            traffic=traffic,
        )
        clock = PlacementClock(footprint, machines, placement, demand=demand)

        def predict(group: GroupPlan, batch: int) -> GroupPrediction:
            return clock.predict(group, batch, workload.context_tokens)

        return ClusterPlan(
            kind=candidate.kind,
            placement=placement,
            workload=workload,
            seconds=workload.seconds(predict, placement.groups, machines),
            predictions=tuple(predict(group, workload.batches[0][0]) for group in placement.groups),
            left_out={},
            others=(),
        )

    spare_layouts = LAYOUT_WORK // max(1, len(footprint.experts()) * len(cluster.nodes))
    num_layouts = min(MOST_LAYOUTS, 2 + spare_layouts)  # of plans whose estimate is not exact
    best: ClusterPlan | None = None
    chosen = candidates[0] if candidates else None
    refused: list[str] = []
    error: PlacementError | None = None
    for candidate in candidates:
        is_exact = search.is_exact(candidate) and not pinned
        if best is not None:
            is_rough = not is_exact and spare_layouts > 0
            if candidate.seconds >= best.seconds * (1 + ESTIMATE_ERROR if is_rough else 1.0):
                continue
            if not is_exact and num_layouts <= 0:
                continue
        try:
            laid_out = _lay_out(candidate)
        except PlacementError as found:
            error = error or found
            refused.append(f"{candidate}: {found}")
            continue
        num_layouts -= not is_exact
        if best is None or laid_out.seconds < best.seconds * (1 - 1e-9):
            best, chosen = laid_out, candidate
        if candidate is earlier and best.seconds <= (1 + WORTH_A_CHANGE) * least:
            break
    if (
        best is not None
        and chosen is not None
        and cluster.plan != "home"
        and spare_layouts >= len(cluster.nodes)
    ):
        for name in sorted(
            chosen.hosts - pinned
        ):  # where it costs little, look whether one host less does better
            fewer = replace(chosen, hosts=chosen.hosts - {name})
            try:
                laid_out = _lay_out(fewer)
            except PlacementError:
                continue
            if laid_out.seconds < best.seconds * (1 - WORTH_LEAVING_OUT):
                best, chosen = laid_out, fewer
    if best is None or chosen is None:
        if error is not None:
            raise error
        lay_out(cluster, footprint, epoch=epoch, pins=pins, traits=traits)  # says what is short
        raise _nothing_of_this_kind(cluster, footprint)
    return replace(
        best,
        left_out=search.why_left_out(chosen),
        others=_best_of_each_kind(candidates),
        refused=tuple(refused),
    )


def _nothing_of_this_kind(cluster: Cluster, footprint: ModelFootprint) -> PlacementError:
    """Why a file's plan has no layout where a home with experts elsewhere has one."""
    homes = [node for node in cluster.nodes if DECODE in node.roles]
    said = f'no plan of the kind "{cluster.plan}" fits these nodes'
    if cluster.plan == "solo":
        roomiest = max(homes, key=lambda node: node.memory_bytes)
        alone = replace(cluster, nodes=(roomiest,), links=(), pins=(), plan="home")
        try:
            lay_out(alone, footprint, epoch=0)
        except PlacementError as short:
            return PlacementError(
                f"{said}: none holds the whole model; {short}",
                node=roomiest.name,
                needed_bytes=short.needed_bytes,
                available_bytes=short.available_bytes,
            )
    wanted = cluster.stages or 2
    if cluster.plan == "stages" and len(homes) < wanted:
        said = f"{said}: {wanted} stages need as many nodes with the role decode, found {len(homes)}"
    return PlacementError(said, needed_bytes=0, available_bytes=0)


def why_left_out(
    cluster: Cluster,
    footprint: ModelFootprint,
    placement: Placement,
    *,
    speeds: Mapping[str, NodeSpeed] | None = None,
    links: Mapping[tuple[str, str], LinkSpeed] | None = None,
    cores: Mapping[str, float] | None = None,
) -> dict[str, str]:
    """Node -> why a placement uses it for less than its roles allow, with figures; nobody where nothing was predicted."""
    if cluster.plan == "home" or not placement.groups or not (footprint.width and footprint.top_k):
        return {}
    search = _Search(
        cluster, footprint, machines_of(cluster, speeds, links, cores), default_workload(cluster)
    )
    hosts = frozenset(plan.node for plan in placement.nodes if EXPERTS in plan.roles)
    return search.why_left_out(Candidate(search.kind_of(placement.groups), placement.groups, hosts))


def default_workload(cluster: Cluster) -> Workload:
    """Half one request at a time, half as many as a node may run."""
    return Workload(batches=((1, 0.5), (max(1, cluster.max_requests), 0.5)))


def _rank(candidate: Candidate) -> tuple[float, int, int]:
    """Fastest first; among equals the fewest trunks, then the plainest kind."""
    num_trunks = sum(len(group.stages) for group in candidate.groups)
    return float(f"{candidate.seconds:.6g}"), num_trunks, KINDS.index(candidate.kind)


def _earlier(candidates: Sequence[Candidate], search: "_Search", previous: Placement) -> Candidate | None:
    """The plan of an earlier placement among the candidates, or as one more of them; None if it cannot be any longer."""
    groups = set(previous.groups)
    for candidate in candidates:
        if set(candidate.groups) == groups:
            return candidate
    if not groups or not search.still_possible(previous.groups):
        return None
    kind = search.kind_of(previous.groups)
    if kind not in _ALLOWED[search.cluster.plan]:
        return None
    seconds = search.estimate.score(previous.groups, search.all_hosts, search.workload)
    return search.with_best_hosts(Candidate(kind, previous.groups, search.all_hosts, seconds))


def _best_of_each_kind(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    best: dict[str, Candidate] = {}
    for candidate in candidates:
        if candidate.kind not in best or candidate.seconds < best[candidate.kind].seconds:
            best[candidate.kind] = candidate
    return tuple(best[kind] for kind in KINDS if kind in best)


class _Search:
    """Enumerates and estimates plans."""

    def __init__(
        self, cluster: Cluster, footprint: ModelFootprint, machines: Machines, workload: Workload
    ) -> None:
        self.cluster, self.footprint, self.machines, self.workload = cluster, footprint, machines, workload
        self.estimate = Estimate(cluster, footprint, machines, workload.kv_tokens)
        self.all_hosts = frozenset(node.name for node in cluster.nodes if EXPERTS in node.roles)
        self.decode = [node.name for node in cluster.nodes if DECODE in node.roles]

    def candidates(self, kinds: Sequence[str]) -> list[Candidate]:
        """All plans of these kinds, estimated, the best of them each with the hosts that suit it best."""
        found: dict[tuple[GroupPlan, ...], Candidate] = {}
        for kind, groups in self._plans(kinds):
            if groups and groups not in found:
                seconds = self.estimate.score(groups, self.all_hosts, self.workload)
                found[groups] = Candidate(kind, groups, self.all_hosts, seconds)
        elsewhere = [self._with_experts_elsewhere(one) for one in found.values() if len(one.groups) == 1]
        ranked = sorted([*found.values(), *(one for one in elsewhere if one.kind in kinds)], key=_rank)
        return [
            *(self.with_best_hosts(one) for one in ranked[:WORTH_REFINING]),
            *ranked[WORTH_REFINING:],
        ]

    def _plans(self, kinds: Sequence[str]) -> Iterator[tuple[str, tuple[GroupPlan, ...]]]:
        whole = {name: GroupPlan((Stage(name, 0, self.footprint.num_layers),)) for name in self.decode}
        full = self.footprint.num_layers
        if self.cluster.plan == "home":
            yield HOMES, every_home(self.cluster, self.footprint)
            return
        alone = [name for name in self.decode if self.estimate.coverage(name, 0, full) >= 1]
        if SOLO in kinds:
            yield from ((SOLO, (whole[name],)) for name in alone)
            yield from ((SOLO, groups) for groups in self._growing([whole[name] for name in alone]))
        if HOME in kinds:
            yield from ((HOME, (whole[name],)) for name in self.decode)
            yield HOMES, every_home(self.cluster, self.footprint)
            yield from ((HOME, groups) for groups in self._growing(list(whole.values())))
        if STAGES in kinds and len(self.decode) > 1:
            yield from ((STAGES, groups) for groups in self._staged())

    def _growing(self, groups: Sequence[GroupPlan]) -> Iterator[tuple[GroupPlan, ...]]:
        """The two fastest, the three fastest, ...: more lanes for many requests."""
        alone = {group: self.estimate.score((group,), self.all_hosts, self.workload) for group in groups}
        order = sorted(groups, key=lambda group: alone[group])
        for count in growing_counts(len(order))[1:]:
            yield self._in_file_order(order[:count])

    def _staged(self) -> Iterator[tuple[GroupPlan, ...]]:
        """For each number of stages the best group, and further groups of as many stages from the nodes left."""
        names, costs, hops = self.estimate.stage_costs(self.workload, self.all_hosts)
        bottleneck = self.workload.objective == THROUGHPUT
        for only in (False, True) if not bottleneck else (True,):
            taken: dict[int, list[GroupPlan]] = {}
            open_: dict[int, list[int]] = {}
            for group in self._cuts(list(range(len(names))), names, costs, hops, bottleneck=only):
                taken.setdefault(len(group.stages), []).append(group)
            for num_stages, firsts in sorted(taken.items()):
                scored = sorted(
                    firsts, key=lambda group: self.estimate.score((group,), self.all_hosts, self.workload)
                )
                yield from ((group,) for group in scored[:4])
                groups = [scored[0]]
                while len(groups) < max(request for request, _ in self.workload.batches):
                    used = {node for group in groups for node in group.nodes}
                    open_[num_stages] = [i for i, name in enumerate(names) if name not in used]
                    if len(open_[num_stages]) < num_stages:
                        break
                    more = [
                        group
                        for group in self._cuts(open_[num_stages], names, costs, hops, bottleneck=only)
                        if len(group.stages) == num_stages
                    ]
                    if not more:
                        break
                    groups.append(
                        min(
                            more,
                            key=lambda group: self.estimate.score((group,), self.all_hosts, self.workload),
                        )
                    )
                    yield self._in_file_order(groups)

    def _cuts(
        self,
        nodes: Sequence[int],
        names: Sequence[str],
        costs: Floats,
        hops: Floats,
        *,
        bottleneck: bool,
    ) -> list[GroupPlan]:
        """The best cut for each order of these nodes and each number of stages above 1."""
        found: dict[GroupPlan, None] = {}
        for order in self._orders(nodes, names):
            for cut in cut_layers(costs, hops, order, MOST_STAGES, bottleneck=bottleneck):
                if len(cut) == (self.cluster.stages or len(cut)) and len(cut) > 1:
                    found[GroupPlan(tuple(Stage(names[n], first, last) for n, first, last in cut))] = None
        return list(found)

    def _orders(self, nodes: Sequence[int], names: Sequence[str]) -> list[tuple[int, ...]]:
        """All orders of few nodes; of many the likely ones: by speed, by memory, by nearness."""
        if len(nodes) <= ALL_ORDERS:
            return list(permutations(nodes))
        speed = {n: self.machines.speed(names[n]).memory_bytes_per_s for n in nodes}
        memory = {n: self.estimate.nodes[names[n]].memory_bytes for n in nodes}
        by_speed = sorted(nodes, key=lambda n: (-speed[n], -memory[n], names[n]))
        by_memory = sorted(nodes, key=lambda n: (-memory[n], -speed[n], names[n]))
        near = [by_speed[0]]
        while len(near) < len(nodes):
            here = names[near[-1]]
            left = [n for n in by_speed if n not in near]
            near.append(min(left, key=lambda n: (self.machines.link(here, names[n]).rtt_s, left.index(n))))
        orders = [by_speed, by_speed[::-1], by_memory, by_memory[::-1], near, near[::-1]]
        return list(dict.fromkeys(map(tuple, orders)))

    def _with_experts_elsewhere(self, one: Candidate) -> Candidate:
        """The same layers with all experts on other nodes: faster where those who run layers are slow."""
        hosts = self.all_hosts - {node for group in one.groups for node in group.nodes}
        kind = HOME if one.kind == SOLO else one.kind
        return Candidate(kind, one.groups, hosts, self.estimate.score(one.groups, hosts, self.workload))

    def with_best_hosts(self, best: Candidate) -> Candidate:
        """The plan with as many hosts as do not hurt: others are dropped from the slowest on while that helps."""
        kind, groups, hosts = best.kind, best.groups, best.hosts
        if self.cluster.plan == "home" or self.is_exact(best):
            return best
        members = frozenset(node for group in groups for node in group.nodes)
        droppable = self._worst_first(hosts - members, groups)
        for num_dropped in growing_counts(len(droppable)):
            fewer = hosts - set(droppable[:num_dropped])
            seconds = self.estimate.score(groups, fewer, self.workload)
            if seconds == float("inf"):
                break
            if seconds < best.seconds * (1 - WORTH_LEAVING_OUT):
                best = Candidate(kind, groups, fewer, seconds)
        return best

    def _worst_first(self, hosts: frozenset[str], groups: Sequence[GroupPlan]) -> list[str]:
        """Hosts by what one small call costs from the first home: round trip, overhead, and reading an expert."""
        home = groups[0].nodes[0]
        size = max(self.footprint.expert_bytes["as_stored"], default=0)

        def cost(name: str) -> float:
            speed, link = self.machines.speed(name), self.machines.link(home, name)
            return link.rtt_s + speed.call_overhead_s + size / speed.memory_bytes_per_s

        return sorted(hosts, key=lambda name: (-cost(name), name))

    def still_possible(self, groups: Sequence[GroupPlan]) -> bool:
        """Whether an earlier plan's groups still suit the nodes and the layers there are."""
        nodes = [node for group in groups for node in group.nodes]
        return (
            set(nodes) <= set(self.decode)
            and all(len(group.stages) == (self.cluster.stages or len(group.stages)) for group in groups)
            and all(group.stages[-1].last_layer == self.footprint.num_layers for group in groups)
            and self.estimate.fits(groups, self.all_hosts)
        )

    def kind_of(self, groups: Sequence[GroupPlan]) -> str:
        if any(len(group.stages) > 1 for group in groups):
            return STAGES
        full = self.footprint.num_layers
        alone = all(self.estimate.coverage(node, 0, full) >= 1 for group in groups for node in group.nodes)
        return SOLO if alone else HOME

    def is_exact(self, candidate: Candidate) -> bool:
        """Whether the estimate leaves nothing to a layout: every stage holds all experts of its layers."""
        return len(candidate.groups) <= max(1, int(self.cluster.memory_ratio)) and all(
            stage.node in candidate.hosts
            and self.estimate.coverage(stage.node, stage.first_layer, stage.last_layer) >= 1
            for group in candidate.groups
            for stage in group.stages
        )

    def why_left_out(self, chosen: Candidate) -> dict[str, str]:
        """For each node that is used for less than its roles allow: what the rest would take with it."""
        reasons = {}
        members = {node for group in chosen.groups for node in group.nodes}
        now = self.estimate.score(chosen.groups, chosen.hosts, self.workload)
        for node in self.cluster.nodes:
            name, reason = node.name, []
            if node.holds_trunk and DECODE in node.roles and name not in members:
                whole = GroupPlan((Stage(name, 0, self.footprint.num_layers),))
                own = self.estimate.score((whole,), self.all_hosts, self.workload)
                told = f"a token would take {_ms(own)} at it" if own < float("inf") else "it cannot hold one"
                reason.append(f"runs no layers: {told}, {_ms(now)} in this plan")
            if EXPERTS in node.roles and name not in chosen.hosts:
                used = self.estimate.score(chosen.groups, chosen.hosts | {name}, self.workload)
                reason.append(
                    f"hosts no experts: a token would take {_ms(used)} with it and takes {_ms(now)} without"
                )
            elif PREFILL in node.roles and DECODE in node.roles and name not in members:
                reason.append("hosts experts instead")
            if reason:
                reasons[name] = "; ".join(reason)
        return reasons

    def _in_file_order(self, groups: Sequence[GroupPlan]) -> tuple[GroupPlan, ...]:
        position = {name: index for index, name in enumerate(self.cluster.node_names)}
        return tuple(sorted(groups, key=lambda group: position[group.nodes[0]]))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
