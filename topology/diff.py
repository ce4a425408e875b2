"""What an edited topology file changes: machines, links and settings, and what each node has to load and drop for it.

Values for `edge-runtime plan` and `apply`; decides nothing. The way from old to new is `migration.py`'s.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields

from topology.cluster import Cluster, Link, Node
from topology.costs import ModelFootprint
from topology.ids import ExpertId
from topology.migration import MigrationPlan, plan_migration
from topology.node_plan import GroupPlan, NodePlan, Placement
from topology.speeds import BYTE_BITS, LinkSpeed, Machines, NodeSpeed, machines_of
from topology.step_time import PlacementClock
from topology.units import (
    counted,
    format_byte_rate,
    format_bytes,
    format_bytes_rounded,
    format_duration,
    format_flops,
    format_rate,
)
from topology.workload import Workload

ADDED, REMOVED, CHANGED, KEPT = "added", "removed", "changed", "kept"

DISK_BYTES_PER_S = 300e6
"""What a node reads and packs from its own disk where nothing is measured: between a hard disk and a SATA SSD."""


@dataclass(frozen=True)
class Change:
    """One thing that is said otherwise than before, as a reader would say it: `memory`, `8 GiB`, `4 GiB`."""

    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.what} {self.before} -> {self.after}"


@dataclass(frozen=True)
class NodeDiff:
    """What becomes of one node."""

    node: str
    kind: str
    """`added`, `removed`, `changed` (in the file or in what it holds), `kept`."""
    changes: tuple[Change, ...]
    """In the file, and in what the plan uses it for."""
    load: tuple[ExpertId, ...]
    """Experts that it is to hold and does not, sorted."""
    drop: tuple[ExpertId, ...]
    load_bytes: int
    """Of those experts, and of trunk that it does not hold yet."""
    drop_bytes: int
    source: str
    """Where it loads from: `disk`, or the node over whose link it comes."""
    seconds: float
    """How long its loading takes, alone."""


@dataclass(frozen=True)
class ClusterDiff:
    """What an edit changes altogether."""

    nodes: tuple[NodeDiff, ...]
    """In the order of the new file, then those removed."""
    links: tuple[Change, ...]
    settings: tuple[Change, ...]
    """Keys of [cluster], and pins."""
    groups_before: tuple[GroupPlan, ...]
    groups_after: tuple[GroupPlan, ...]
    migration: MigrationPlan
    seconds: float
    """How long the rounds of loading take, one after another."""
    step_before_s: float | None
    """Predicted seconds per token, as the workload counts; None if the model's shape is not known."""
    step_after_s: float | None

    @property
    def load_bytes(self) -> int:
        return sum(node.load_bytes for node in self.nodes)

    @property
    def drop_bytes(self) -> int:
        return sum(node.drop_bytes for node in self.nodes)

    @property
    def changes_anything(self) -> bool:
        return bool(
            self.links
            or self.settings
            or self.migration.rounds
            or any(node.kind != KEPT for node in self.nodes)
        )

    def __str__(self) -> str:
        """One line for each node that changes, then links, settings and the whole."""
        lines = [_node_line(node) for node in self.nodes if node.kind != KEPT]
        lines += [f"link {change}" for change in self.links]
        lines += [f"[cluster] {change}" for change in self.settings]
        lines.append(
            f"{format_bytes_rounded(self.load_bytes)} to load, {format_bytes_rounded(self.drop_bytes)} to drop, in "
            f"{counted(len(self.migration.rounds), 'round')}, about {self.seconds:.1f} s"
        )
        if self.step_before_s is not None and self.step_after_s is not None:
            lines.append(
                f"a token takes {self.step_before_s * 1e3:.3g} ms now and {self.step_after_s * 1e3:.3g} ms then, "
                "as predicted"
            )
        return "\n".join(lines)


def diff_clusters(
    old: Cluster,
    old_placement: Placement,
    new: Cluster,
    new_placement: Placement,
    footprint: ModelFootprint,
    *,
    speeds: Mapping[str, NodeSpeed] | None = None,
    links: Mapping[tuple[str, str], LinkSpeed] | None = None,
    cores: Mapping[str, float] | None = None,
    demand: Mapping[ExpertId, float] | None = None,
    workload: Workload | None = None,
    with_files: Collection[str] | None = None,
    disk_bytes_per_s: Mapping[str, float] | None = None,
) -> ClusterDiff:
    """The difference, with the way from one to the other; `MigrationError` if there is none.

    with_files        nodes that have the model's files on their own disk; None for all. The others load over their
                      fastest link to a node that has them, or that holds experts now
    disk_bytes_per_s  node -> measured; else `DISK_BYTES_PER_S`
    """
    machines = machines_of(new, speeds, links, cores)
    migration = plan_migration(old_placement, new_placement, footprint)
    trunk_bytes = dict.fromkeys(new.node_names, 0)
    for one in migration.rounds:
        if one.switches_trunks:
            for name, size in one.load_bytes.items():
                plan = new_placement.plan_of(name)
                trunk_bytes[name] = size - _bytes_of(footprint, plan, one.loads.get(name, ()))
    sources = {
        name: _source(new, old_placement, machines, name, with_files, disk_bytes_per_s)
        for name in new.node_names
    }

    def node_diff(name: str) -> NodeDiff:
        before, after = _plan_or_none(old_placement, name), _plan_or_none(new_placement, name)
        reformatted = before and after and before.weight_format != after.weight_format
        had = set(before.experts) if before else set()
        gets = set(after.experts) if after else set()
        load = gets if reformatted else gets - had
        drop = had if reformatted else had - gets
        changes = (*_node_changes(_find(old, name), _find(new, name)), *_plan_changes(before, after))
        load_bytes = (_bytes_of(footprint, after, load) if after else 0) + trunk_bytes.get(name, 0)
        source, rate = sources.get(name, ("", 1.0))
        kind = ADDED if _find(old, name) is None else REMOVED if _find(new, name) is None else CHANGED
        if kind == CHANGED and not (changes or load or drop or load_bytes):
            kind = KEPT
        return NodeDiff(
            node=name,
            kind=kind,
            changes=changes,
            load=tuple(sorted(load)),
            drop=tuple(sorted(drop)),
            load_bytes=load_bytes,
            drop_bytes=_bytes_of(footprint, before, drop) if before else 0,
            source=source if load_bytes else "",
            seconds=load_bytes / rate,
        )

    names = [*new.node_names, *(name for name in old.node_names if name not in new.node_names)]
    return ClusterDiff(
        nodes=tuple(map(node_diff, names)),
        links=_link_changes(old, new),
        settings=_setting_changes(old, new),
        groups_before=old_placement.groups,
        groups_after=new_placement.groups,
        migration=migration,
        seconds=migration.seconds(lambda name: sources.get(name, ("", DISK_BYTES_PER_S))[1]),
        step_before_s=_step_s(
            footprint, machines_of(old, speeds, links, cores), old_placement, demand, workload
        ),
        step_after_s=_step_s(footprint, machines, new_placement, demand, workload),
    )


def _step_s(
    footprint: ModelFootprint,
    machines: Machines,
    placement: Placement,
    demand: Mapping[ExpertId, float] | None,
    workload: Workload | None,
) -> float | None:
    if footprint.moe_layers and not (footprint.width and footprint.top_k):
        return None
    workload = workload or Workload()
    clock = PlacementClock(footprint, machines, placement, demand=demand)
    return workload.seconds(
        lambda group, batch: clock.predict(group, batch, workload.context_tokens),
        placement.groups,
        machines,
    )


def _source(
    cluster: Cluster,
    old: Placement,
    machines: Machines,
    name: str,
    with_files: Collection[str] | None,
    disk_bytes_per_s: Mapping[str, float] | None,
) -> tuple[str, float]:
    """Where a node gets weights from, and at how many bytes per second."""
    if with_files is None or name in with_files:
        return "disk", (disk_bytes_per_s or {}).get(name, DISK_BYTES_PER_S)
    able = {plan.node for plan in old.nodes if plan.experts} | set(with_files)
    peers = [peer for peer in cluster.node_names if peer in able and peer != name]
    if not peers:
        link = cluster.default_link
        return "coordinator", link.bandwidth_bps / BYTE_BITS
    best = max(peers, key=lambda peer: machines.link(name, peer).bandwidth_bps)
    return best, machines.link(name, best).bandwidth_bps / BYTE_BITS


def _bytes_of(footprint: ModelFootprint, plan: NodePlan, experts: Collection[ExpertId]) -> int:
    return sum(footprint.expert_bytes[plan.weight_format][expert.layer] for expert in experts)


def _plan_or_none(placement: Placement, name: str) -> NodePlan | None:
    return next((plan for plan in placement.nodes if plan.node == name), None)


def _find(cluster: Cluster, name: str) -> Node | None:
    return next((node for node in cluster.nodes if node.name == name), None)


def _node_changes(old: Node | None, new: Node | None) -> tuple[Change, ...]:
    if old is None or new is None:
        return ()

    def rate(value: float | None, how: object) -> str:
        return "not known" if value is None else how(value)  # type: ignore[operator]

    pairs = [
        ("address", old.address, new.address),
        ("memory", format_bytes(old.memory_bytes), format_bytes(new.memory_bytes)),
        ("roles", _words(old.roles), _words(new.roles)),
        ("device", old.device, new.device),
        ("weight_format", old.weight_format, new.weight_format),
        ("trunk_format", old.trunk_format, new.trunk_format),
        ("threads", str(old.threads), str(new.threads)),
        (
            "memory_bandwidth",
            rate(old.memory_bytes_per_s, format_byte_rate),
            rate(new.memory_bytes_per_s, format_byte_rate),
        ),
        ("compute", rate(old.flops, format_flops), rate(new.flops, format_flops)),
    ]
    return tuple(Change(*pair) for pair in pairs if pair[1] != pair[2])


def _plan_changes(before: NodePlan | None, after: NodePlan | None) -> tuple[Change, ...]:
    """What the plan uses a node for: layers and KV."""

    def layers(plan: NodePlan) -> str:
        return f"{plan.first_layer}-{plan.last_layer - 1}" if plan.layers else "none"

    if before is None or after is None:
        return ()
    pairs = [
        ("layers", layers(before), layers(after)),
        ("KV blocks", str(before.kv_blocks), str(after.kv_blocks)),
        ("used for", _words(before.roles), _words(after.roles)),
    ]
    return tuple(Change(*pair) for pair in pairs if pair[1] != pair[2])


def _words(roles: Collection[str]) -> str:
    return ", ".join(sorted(roles)) or "nothing"


def _link_changes(old: Cluster, new: Cluster) -> tuple[Change, ...]:
    """Links between nodes that are in both files, as they come out with the defaults."""

    def told(link: Link) -> str:
        return f"{format_duration(link.rtt_s)}, {format_rate(link.bandwidth_bps)}"

    changes = []
    if told(old.default_link) != told(new.default_link):
        changes.append(Change("by default", told(old.default_link), told(new.default_link)))
    named = {tuple(sorted((link.a, link.b))) for link in (*old.links, *new.links)}
    for a, b in sorted(named):
        if {a, b} <= set(old.node_names) & set(new.node_names):
            before, after = told(old.link(a, b)), told(new.link(a, b))
            if before != after:
                changes.append(Change(f"{a} to {b}:", before, after))
    return tuple(changes)


_APART = {"nodes", "links", "default_link", "pins", "source", "lines"}  # told in other ways


def _setting_changes(old: Cluster, new: Cluster) -> tuple[Change, ...]:
    changes = [
        Change(entry.name, str(getattr(old, entry.name)), str(getattr(new, entry.name)))
        for entry in fields(Cluster)
        if entry.name not in _APART and getattr(old, entry.name) != getattr(new, entry.name)
    ]
    before, after = ({str(pin.expert): pin.node for pin in cluster.pins} for cluster in (old, new))
    for expert in sorted(before.keys() | after.keys()):
        was, becomes = before.get(expert, "no pin"), after.get(expert, "no pin")
        if was != becomes:
            changes.append(Change(f"{expert}:", was, becomes))
    return tuple(changes)


def _node_line(node: NodeDiff) -> str:
    parts = [", ".join(map(str, node.changes))] if node.changes else []
    if node.load_bytes:
        experts = f"{len(node.load)} experts" if node.load else "layers"
        parts.append(
            f"loads {experts} ({format_bytes_rounded(node.load_bytes)} from {node.source}, about {node.seconds:.1f} s)"
        )
    if node.drop:
        parts.append(f"drops {len(node.drop)} experts ({format_bytes_rounded(node.drop_bytes)})")
    return f"{node.node} {node.kind}" + (": " + "; ".join(parts) if parts else "")
