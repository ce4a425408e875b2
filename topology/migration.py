"""From one placement to another in rounds, so that no expert is ever without a host and no node exceeds its memory.

A round is an epoch: every node loads what it gains beside what it has, all switch, then each drops what it loses. One
round does where memory allows both; else experts go elsewhere first. Decides; knows no socket and no file.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from topology import costs
from topology.cluster import EXPERTS
from topology.costs import ModelFootprint
from topology.errors import MigrationError
from topology.ids import ExpertId
from topology.node_plan import NodePlan, Placement
from topology.units import format_bytes_rounded, in_one_unit

Held = dict[str, set[ExpertId]]


@dataclass(frozen=True)
class Round:
    """One epoch on the way."""

    placement: Placement
    """What holds once the round is over. Nodes that leave are in it until the last round."""
    loads: Mapping[str, tuple[ExpertId, ...]]
    """Node -> experts that it loads before the switch."""
    drops: Mapping[str, tuple[ExpertId, ...]]
    """Node -> experts that it drops after the switch."""
    switches_trunks: bool
    """Whether trunks, KV or groups change in this round: loaded beside the old ones, which go after the switch."""
    load_bytes: Mapping[str, int]
    """Node -> bytes that it loads, trunk included."""
    peak_bytes: Mapping[str, int]
    """Node -> most that its process has resident, before it drops anything."""


@dataclass(frozen=True)
class MigrationPlan:
    """The way from one placement to another; no rounds if nothing changes."""

    rounds: tuple[Round, ...]

    @property
    def load_bytes(self) -> int:
        """All that is loaded, anywhere."""
        return sum(sum(one.load_bytes.values()) for one in self.rounds)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The epochs to deploy, in order; the last one is the goal."""
        return tuple(one.placement for one in self.rounds)

    def seconds(self, rate_bytes_per_s: Callable[[str], float]) -> float:
        """How long the loading takes: nodes load side by side, rounds one after another. node -> its rate."""
        return sum(
            max((size / rate_bytes_per_s(node) for node, size in one.load_bytes.items()), default=0.0)
            for one in self.rounds
        )


def plan_migration(old: Placement, new: Placement, footprint: ModelFootprint) -> MigrationPlan:
    """Rounds from `old` to `new`, or `MigrationError` with the bytes that are missing.

    old  what nodes hold now; leave out those that are lost: they hold nothing. An expert that nobody holds any more is
         loaded like others, and has no host until then
    new  its epoch is ignored: rounds have the epochs that follow `old`'s

    While it lasts a node's limit is the larger of its old and its new memory, since the old one is in use already.
    Where layers or KV of a node change, the new trunk is beside the old, whose layers that stay are counted once. KV and
    buffers of a home are given back when it takes its first step by the new placement, whose own are touched then. They
    are there twice at a later stage of a group, which may have steps of both under way, and on a GPU, whose memory is
    taken when it is asked for.
    """
    move = _Move(old, new, footprint)
    if move.trunks_change:
        move.reach(move.room_for_switch())
        move.switch()
    move.reach(move.wanted)
    return MigrationPlan(move.finished())


class _Move:
    def __init__(self, old: Placement, new: Placement, footprint: ModelFootprint) -> None:
        self.epoch, self.new, self.footprint = old.epoch, new, footprint
        self.plans = {plan.node: plan for plan in old.nodes}  # what holds now; replaced at the switch
        self.new_plans = {plan.node: plan for plan in new.nodes}
        self.old_names = list(self.plans)
        self.nodes = [*self.new_plans, *(name for name in self.plans if name not in self.new_plans)]
        self.groups = old.groups
        self.held: Held = {name: set(self._planned(self.plans, name)) for name in self.nodes}
        self.wanted: Held = {name: set(self._planned(self.new_plans, name)) for name in self.nodes}
        self.reformatted = {name for name in self.nodes if self.held[name] and self._reformats(name)}
        changing = {name for name in self.nodes if self._trunk_changes(name)}
        self.trunks_change = old.groups != new.groups or bool(changing or self.reformatted)
        self.rounds: list[Round] = []

    # Bytes.

    @staticmethod
    def _planned(plans: Mapping[str, NodePlan], name: str) -> tuple[ExpertId, ...]:
        return plans[name].experts if name in plans else ()

    def _reformats(self, name: str) -> bool:
        old, new = self.plans.get(name), self.new_plans.get(name)
        return old is not None and new is not None and old.weight_format != new.weight_format

    def _trunk_changes(self, name: str) -> bool:
        return self._shape(self.plans, name) != self._shape(self.new_plans, name)

    @staticmethod
    def _shape(plans: Mapping[str, NodePlan], name: str) -> tuple[int, int, int, int, str]:
        """What the engine and the expert service are built for: a change of it needs others beside the old ones."""
        plan = plans.get(name)
        return (
            (plan.first_layer, plan.last_layer, plan.kv_blocks, plan.workspace_bytes, plan.trunk_format)
            if plan
            else (0, 0, 0, 0, costs.AS_STORED)
        )

    def limit(self, name: str) -> int:
        """Bytes the node may use while things move."""
        return max(plans[name].memory_bytes for plans in (self.plans, self.new_plans) if name in plans)

    def _reserved(self, plans: Mapping[str, NodePlan], name: str) -> int:
        """All but experts; a node that comes has no trunk before the switch."""
        if name in plans:
            return plans[name].reserved_bytes
        return self._emptied(self.new_plans[name]).reserved_bytes if name in self.new_plans else 0

    def _beside(self, name: str) -> int:
        """All but experts while old and new trunk, KV and buffers are both there."""
        old, new = self.plans.get(name), self.new_plans.get(name)
        if old is None or new is None or not self._trunk_changes(name):
            return max(plans[name].reserved_bytes for plans in (self.plans, self.new_plans) if name in plans)
        both_at_once = max if self._is_home(old) and self._is_home(new) else sum
        return (
            max(old.process_bytes, new.process_bytes)
            + sum((self._parts(old) | self._parts(new)).values())
            + both_at_once((old.kv_bytes, new.kv_bytes))
            + both_at_once((old.workspace_bytes, new.workspace_bytes))
        )

    @staticmethod
    def _is_home(plan: NodePlan) -> bool:
        return plan.first_layer == 0 and plan.device == "cpu"

    def _parts(self, plan: NodePlan) -> dict[tuple[str, str], int]:
        """By name and format: a part in another format is another part."""
        parts = costs.trunk_parts(self.footprint, plan.first_layer, plan.last_layer, plan.trunk_format)
        return {(name, plan.trunk_format): size for name, size in parts.items()}

    def new_trunk_bytes(self, name: str) -> int:
        """Bytes of trunk that the node has to load for the switch."""
        old, new = self.plans.get(name), self.new_plans.get(name)
        if new is None:
            return 0
        have = self._parts(old) if old else {}
        return sum(size for part, size in self._parts(new).items() if part not in have)

    def size(self, name: str, expert: ExpertId, plans: Mapping[str, NodePlan] | None = None) -> int:
        plan = (plans or self.plans).get(name) or self.new_plans.get(name) or self.plans[name]
        return costs.expert_bytes(self.footprint, plan.weight_format, expert.layer)

    def bytes_of(
        self, name: str, experts: Collection[ExpertId], plans: Mapping[str, NodePlan] | None = None
    ) -> int:
        return sum(self.size(name, expert, plans) for expert in experts)

    def free(self, name: str, reserved: int, held: Held) -> int:
        return self.limit(name) - reserved - self.bytes_of(name, held[name])

    # Rounds without a switch of trunks.

    def reach(self, goal: Held) -> None:
        """Rounds of experts only, until every node holds its part of `goal` and nothing else."""
        reserved = {name: self._reserved(self.plans, name) for name in self.nodes}
        parked: set[tuple[str, ExpertId]] = set()
        most_rounds = 8 * (len(self.nodes) + len(self.footprint.experts()))
        while any(self.held[name] != goal[name] for name in self.nodes):
            free = {name: self.free(name, reserved[name], self.held) for name in self.nodes}
            loads = self._loads(goal, free)
            drops = self._drops(goal, loads)
            if not loads and not drops:
                loads, drops = self._make_way(goal, free, parked)
            if len(self.rounds) > most_rounds:
                raise self._stuck(goal, free)
            self._round(loads, drops, reserved)

    def _waiting(self, goal: Held) -> set[ExpertId]:
        """Experts whose only copy is where it is not wanted."""
        copies = self._copies({})
        return {e for name in self.nodes for e in self.held[name] - goal[name] if copies[e] == 1}

    def _copies(self, loads: Mapping[str, Collection[ExpertId]]) -> Counter[ExpertId]:
        copies = Counter(expert for experts in self.held.values() for expert in experts)
        copies.update(expert for experts in loads.values() for expert in experts)
        return copies

    def _loads(self, goal: Held, free: Mapping[str, int]) -> dict[str, set[ExpertId]]:
        """What fits beside what is there, first what somebody waits to be rid of."""
        waiting = self._waiting(goal)
        loads = {}
        for name in self.nodes:
            room, chosen = free[name], set()
            for expert in sorted(goal[name] - self.held[name], key=lambda e: (e not in waiting, e)):
                if (size := self.size(name, expert)) <= room:
                    chosen.add(expert)
                    room -= size
            if chosen:
                loads[name] = chosen
        return loads

    def _drops(self, goal: Held, loads: Mapping[str, Collection[ExpertId]]) -> dict[str, set[ExpertId]]:
        """What is not wanted and somebody else has."""
        copies = self._copies(loads)
        drops: dict[str, set[ExpertId]] = {}
        for name in self.nodes:
            for expert in sorted(self.held[name] - goal[name]):
                if copies[expert] > 1:
                    copies[expert] -= 1
                    drops.setdefault(name, set()).add(expert)
        return drops

    def _make_way(
        self, goal: Held, free: Mapping[str, int], parked: set[tuple[str, ExpertId]]
    ) -> tuple[dict[str, set[ExpertId]], dict[str, set[ExpertId]]]:
        """Nothing fits, and what is not wanted is nowhere else: make room where an only copy waits to go.

        Either a further copy that is wanted there is dropped for a while, or an only copy is parked on a third node.
        """
        copies, waiting = self._copies({}), self._waiting(goal)
        blocked = [name for name in self.nodes if (goal[name] - self.held[name]) & waiting]
        for name in blocked:
            least = min(self.size(name, e) for e in (goal[name] - self.held[name]) & waiting)
            room, dropped = free[name], set()
            for expert in sorted(self.held[name] & goal[name]):
                if room < least and copies[expert] > 1:
                    dropped.add(expert)
                    room += self.size(name, expert)
            if room >= least:
                return {}, {name: dropped}  # loaded again once the others are through
        for name in blocked:
            for expert in sorted(self.held[name] - goal[name]):
                for other in sorted(self.nodes, key=lambda other: (-free[other], other)):
                    able = self._may_host(other) and other != name and expert not in self.held[other]
                    if able and self.size(other, expert) <= free[other] and (other, expert) not in parked:
                        parked.add((other, expert))
                        return {other: {expert}}, {name: {expert}}
        raise self._stuck(goal, free)

    def _may_host(self, name: str) -> bool:
        return EXPERTS in (self.new_plans.get(name) or self.plans[name]).roles

    def _stuck(self, goal: Held, free: Mapping[str, int]) -> MigrationError:
        waiting = [
            (self.size(name, expert), name, expert)
            for name in self.nodes
            for expert in sorted(goal[name] - self.held[name])
        ]
        size, name, expert = min(waiting) if waiting else (0, self.nodes[0], ExpertId(0, 0))
        roomiest = max(self.nodes, key=lambda other: (free[other], other))
        needed, has, most = in_one_unit(size, free[name], free[roomiest])
        return MigrationError(
            f"{sum(map(len, goal.values()))} copies of experts fit before and after, but cannot be exchanged: {expert} "
            f"needs {needed} on {name}, which has {has} free, and the most free on any node is {most}, on {roomiest}; "
            f"free {needed} on one node, or lower memory_ratio for the move",
            node=name,
            needed_bytes=size,
            available_bytes=free[roomiest],
        )

    # The switch of trunks.

    def room_for_switch(self) -> Held:
        """What each node is to hold before the switch, so that its new trunk and KV fit beside the old."""
        goal = {name: set(self.held[name]) for name in self.nodes}
        over = self._shed(goal)
        if over is None:
            return goal
        needed, have = self._beside(over) + self.bytes_of(over, goal[over]), self.limit(over)
        wanted, has = in_one_unit(needed, have)
        raise MigrationError(
            f"{over} needs {wanted} to hold its new layers and KV beside the old ones and the experts that nobody "
            f"else has room for, and has {has}; lower kv_tokens, or make the change in two steps",
            node=over,
            needed_bytes=needed,
            available_bytes=have,
        )

    def _shed(self, goal: Held) -> str | None:
        """Take from each node what has no room during the switch; the node where that does not suffice, if any.

        What is not wanted goes first, then further copies; an only copy goes to another node that has room.
        """
        copies = self._copies({})
        caps = {name: self.limit(name) - self._beside(name) for name in self.nodes}
        for name in self.reformatted:  # its experts come again in another format, beside the old ones
            only = [expert for expert in self.wanted[name] if copies[expert] <= (expert in self.held[name])]
            caps[name] -= self.bytes_of(name, only, self.new_plans)
        for name in self.nodes:
            by_worth = sorted(
                goal[name], key=lambda e: (e in self.wanted[name], copies[e] == 1, e.index, e.layer)
            )
            over = self.bytes_of(name, goal[name]) - caps[name]
            for only_copy in (False, True):
                for expert in by_worth:
                    if over <= 0:
                        break
                    if expert not in goal[name] or (copies[expert] == 1) != only_copy:
                        continue
                    if only_copy and not self._lodge(expert, name, goal, caps):
                        continue
                    goal[name].remove(expert)
                    copies[expert] -= not only_copy
                    over -= self.size(name, expert)
            if over > 0:
                return name
        return None

    def _lodge(self, expert: ExpertId, leaving: str, goal: Held, caps: Mapping[str, int]) -> bool:
        """Find another node for an only copy until the switch; the one that is to have it anyway first."""
        for other in sorted(self.nodes, key=lambda other: (expert not in self.wanted[other], other)):
            if other == leaving or expert in goal[other] or not self._may_host(other):
                continue
            now = self.limit(other) - self._reserved(self.plans, other)
            room = min(caps[other], now) - self.bytes_of(other, goal[other])
            if self.size(other, expert) <= room:
                goal[other].add(expert)
                return True
        return False

    def switch(self) -> None:
        """The round in which trunks, KV, formats and groups change; experts that fit beside come along."""
        reserved = {name: self._beside(name) for name in self.nodes}
        trunk = {name: self.new_trunk_bytes(name) for name in self.nodes}
        free = {name: self.free(name, reserved[name], self.held) for name in self.nodes}
        loads = {
            name: experts
            for name, experts in self._loads(self.wanted, free).items()
            if name not in self.reformatted
        }
        drops: dict[str, set[ExpertId]] = {}
        copies = self._copies(loads)
        for name in sorted(self.reformatted):
            chosen: set[ExpertId] = set()
            for expert in sorted(self.wanted[name], key=lambda e: (copies[e] > (e in self.held[name]), e)):
                if (size := self.size(name, expert, self.new_plans)) <= free[name]:
                    chosen.add(expert)
                    free[name] -= size
            loads[name], drops[name] = chosen, set(self.held[name])
            copies.update(chosen)
            copies.subtract(self.held[name])
        for name in self.nodes:
            for expert in sorted(self.held[name] - self.wanted[name] if name not in self.reformatted else ()):
                if copies[expert] > 1:
                    copies[expert] -= 1
                    drops.setdefault(name, set()).add(expert)
        lost = [expert for expert, count in copies.items() if count < 1]
        if lost:
            name = min(name for name in self.reformatted if lost[0] in self.held[name])
            needed = self.bytes_of(name, lost, self.new_plans)
            raise MigrationError(
                f"{name} cannot hold {len(lost)} of its experts in two formats at once: {format_bytes_rounded(needed)} more are "
                "needed there or on another node; make the change in two steps",
                node=name,
                needed_bytes=needed,
                available_bytes=0,
            )
        self._round(loads, drops, reserved, trunk)

    def _round(
        self,
        loads: Mapping[str, Collection[ExpertId]],
        drops: Mapping[str, Collection[ExpertId]],
        reserved: Mapping[str, int],
        trunk: Mapping[str, int] | None = None,
    ) -> None:
        after = self.new_plans if trunk is not None else self.plans
        load_bytes, peak_bytes = {}, {}
        for name in self.nodes:
            size = self.bytes_of(name, loads.get(name, ()), after if name in after else None)
            peak_bytes[name] = reserved[name] + self.bytes_of(name, self.held[name]) + size
            load_bytes[name] = size + (trunk or {}).get(name, 0)
        for name in self.nodes:
            if name in self.reformatted and trunk is not None:
                self.held[name] = set(loads.get(name, ()))
            else:
                self.held[name] = (self.held[name] | set(loads.get(name, ()))) - set(drops.get(name, ()))
        if trunk is not None:
            left = {
                name: self._emptied(plan) for name, plan in self.plans.items() if name not in self.new_plans
            }
            self.plans = {**self.new_plans, **left}
            self.groups = self.new.groups
        self.epoch += 1
        self.rounds.append(
            Round(
                placement=Placement(self.epoch, self._node_plans(), self.groups, self.new.rule),
                loads={name: tuple(sorted(experts)) for name, experts in loads.items() if experts},
                drops={name: tuple(sorted(experts)) for name, experts in drops.items() if experts},
                switches_trunks=trunk is not None,
                load_bytes={name: size for name, size in load_bytes.items() if size},
                peak_bytes=peak_bytes,
            )
        )

    @staticmethod
    def _emptied(plan: NodePlan) -> NodePlan:
        """A node that leaves, once its trunk is not needed any more."""
        return replace(
            plan,
            first_layer=0,
            last_layer=0,
            trunk_bytes=0,
            kv_blocks=0,
            kv_bytes=0,
            experts=(),
            expert_bytes=0,
        )

    def _node_plans(self) -> tuple[NodePlan, ...]:
        plans = []
        for name in self.nodes:
            plan = self.plans.get(name)
            if plan is None:  # it is new, and there are trunks to switch first
                if not self.held[name]:
                    continue
                plan = self._emptied(self.new_plans[name])
            experts = tuple(sorted(self.held[name]))
            size = sum(costs.expert_bytes(self.footprint, plan.weight_format, e.layer) for e in experts)
            plans.append(replace(plan, experts=experts, expert_bytes=size, memory_bytes=self.limit(name)))
        return tuple(plans)

    def finished(self) -> tuple[Round, ...]:
        """The rounds, the last one ending at the goal itself. One that loads nothing if only limits change."""
        if not self.rounds and set(self.plans.values()) == set(self.new.nodes):
            return ()
        if not self.rounds:
            self._round({}, {}, {name: self._reserved(self.plans, name) for name in self.nodes})
        goal = replace(self.new, epoch=self.rounds[-1].placement.epoch)
        return (*self.rounds[:-1], replace(self.rounds[-1], placement=goal))
