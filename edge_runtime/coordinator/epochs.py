"""Which placement counts, which one is on its way, and when to make another: `state`, `redeploy` and `deploy` as one.

Pure: events, wishes and `now` in, commands out, in the order in which they are to be carried out. Knows no socket, clock
or file; the same events give the same commands.
"""

import collections
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from edge_runtime.coordinator import redeploy
from edge_runtime.coordinator import state as states
from edge_runtime.coordinator.deploy import Joint, Plan, experts_without_host
from edge_runtime.coordinator.journey import Journey
from edge_runtime.coordinator.planning import Ask, Found, refuse_nobody, work_out
from edge_runtime.coordinator.speed_book import Observed, look, measured_of, plan_of
from edge_runtime.errors import Refusal, Whose
from topology.cluster import Cluster
from topology.costs import ModelFootprint
from topology.errors import TopologyError
from topology.placement import GroupPlan, Placement
from topology.speeds import Measured
from topology.traits import ExpertTraits

CHANGE_S = 120.0  # how long loading another placement may take, and switching to it
RETRY_S = 2.0  # after a change that did not work out; doubled each time ...
MAX_RETRY_S = 60.0  # ... up to this
ABSENT_S = 30.0  # how long nodes that never came are waited for before the others take their part
CAME_BACK = "came back"
MAX_WHAT_CHARS = 200  # of a node's own words on how far it is
RETURN_LOSSES = 3  # times `lost_after` that a node is hoped for whose experts nobody has room for
KEPT_OUTCOMES = 8  # changes whose end is remembered

HERE = ("loading", "ready", "suspect")  # phases of a node whose process is there


class SendDeploy(NamedTuple):
    """Tell a node its share of that placement."""

    name: str
    epoch: int


class SendActivate(NamedTuple):
    name: str
    epoch: int


class SendRelease(NamedTuple):
    name: str
    epoch: int


class Dismiss(NamedTuple):
    """Tell a process to stop; what it still says is not heard."""

    peer: bytes
    why: str


class Announce(NamedTuple):
    """Tell every serving node who serves, and whether what has no living host will have one."""

    epoch: int
    alive: list[str]
    replacing: bool


class WorkOut(NamedTuple):
    """Work this out beside the loop, and tell `worked_out` what came of it."""

    ask: Ask


Command = (
    states.Note
    | states.Greet
    | states.SendShare
    | states.RefuseJoin
    | states.MoveRequests
    | SendDeploy
    | SendActivate
    | SendRelease
    | Dismiss
    | Announce
    | WorkOut
)


class Outcome(msgspec.Struct, frozen=True):
    """How a change ended. detail: for people, why it was rolled back or how long it took."""

    epoch: int
    is_done: bool
    detail: str


class Epochs:
    """Membership and placements of one cluster.

    plans   the placement that counts, and the one that is being loaded; no others
    change  the change under way, None most of the time
    """

    def __init__(
        self,
        cluster: Cluster,
        footprint: ModelFootprint,
        placement: Placement,
        now: float,
        traits: ExpertTraits | None = None,
        *,
        newest: int = 0,
        outcomes: Sequence[Outcome] = (),
        absent_s: float = ABSENT_S,
    ) -> None:
        """newest, outcomes: of the coordinator before, if there was one; absent_s: how long its nodes are waited for"""
        self.state = states.initial_state(
            list(cluster.node_names), placement.epoch, cluster.heartbeat_s, cluster.lost_after_s
        )
        self.plans = {placement.epoch: Plan(cluster, placement)}
        self.active = placement.epoch
        self.change: redeploy.Change | None = None
        self.outcomes: collections.deque[Outcome] = collections.deque(outcomes, maxlen=KEPT_OUTCOMES)
        self._footprint = footprint
        self.traits = traits
        self.joint: Joint | None = None  # what routing will send to each home
        # No epoch is ever used twice: a node may still be at work on an old one.
        self.newest = max(newest, placement.epoch)
        self.observed: dict[str, Observed] = {}  # node -> how its work goes
        self._journey: Journey | None = None
        self._began_s, self._absent_s = now, absent_s
        self._asked: tuple[Ask, str] | None = (
            None  # a placement that is being worked out, and why; not a client's
        )
        self._promise = False  # what was last announced of experts without a host
        self._no_way: frozenset[str] | None = (
            None  # the nodes present when it was found that they have no room
        )
        self._loaded_bytes: dict[str, int] = {}  # node -> weights it holds for the change
        self._progress: dict[str, tuple[int, int]] = {}  # node -> bytes loaded for the change, of how many
        self._try_at_s = now
        self._retry_s = RETRY_S
        self._told = ""  # why the placement cannot be mended, as last noted
        self._left_out: frozenset[str] = frozenset()  # nodes that the planner has no use for

    @property
    def cluster(self) -> Cluster:
        return self.plans[self.active].cluster

    @property
    def placement(self) -> Placement:
        return self.plans[self.active].placement

    @property
    def leaving(self) -> frozenset[str]:
        """Nodes that are being drained."""
        return self.change.leaving if self.change is not None else frozenset()

    def serving_groups(self) -> list[GroupPlan]:
        """Decode groups that may be answering now: of the placement that counts, and of the one before while homes switch."""
        plans = [plan for epoch, plan in self.plans.items() if epoch <= self.active]
        return [group for plan in plans for group in plan.placement.groups]

    def measured(self) -> Measured:
        """What nodes have measured, corrected by what their work takes."""
        reports = {name: r.report for name, r in self.state.nodes.items() if r.report is not None}
        return measured_of(reports, self.observed, reports)

    def _released_unheard(self, beat: states.Beat) -> list[Command]:
        """A node that was not there when the placement it steps by was released is told now.

        One with a part in the placement that counts loads that part, and gives the old one back when it changes over:
        told before, it would end the answers that go on meanwhile.
        """
        record, epoch = self.state.nodes.get(beat.name), beat.report.epoch
        is_here = record is not None and record.phase in HERE
        is_over = (
            0 < epoch < self.active and epoch not in self.plans and plan_of(self.placement, beat.name) is None
        )
        return [SendRelease(beat.name, epoch)] if is_here and is_over else []

    def _observe(self, beat: states.Beat) -> None:
        record = self.state.nodes.get(beat.name)
        if record is not None:
            before = self.observed.get(beat.name, Observed())
            share = plan_of(self.placement, beat.name)
            self.observed[beat.name] = look(before, record.pid, beat.report, self._footprint, share)

    def change_text(self) -> str:
        """What the change under way waits for, for people; empty without one."""
        if self.change is None:
            return ""
        if self.change.phase == "switching":
            return self.change.waiting_for()
        parts = []
        for name in sorted(self.change.members - self.change.loaded):
            record = self.state.nodes.get(name)
            if record is None or record.phase not in HERE:
                parts.append(f"{name} to come")
            elif name in self._progress:
                done, total = self._progress[name]
                parts.append(f"{name} loading {done / 1e6:.1f} of {total / 1e6:.1f} MB")
            else:
                parts.append(f"{name} to load")
        return f"epoch {self.change.epoch}: {', '.join(parts)}"

    # What nodes do and say.

    def apply(self, event: states.Event, now: float) -> list[Command]:
        """Take in what became of a node."""
        if isinstance(event, states.Beat):
            self.newest = max(self.newest, event.report.epoch)  # from before this coordinator
            self._observe(event)
        before = self.state
        self.state, said = states.apply(before, event, now)
        commands: list[Command] = self._released_unheard(event) if isinstance(event, states.Beat) else []
        announces = False
        for command in said:
            match command:
                case states.SendShare(name):
                    commands += [command, *(SendDeploy(name, epoch) for epoch in self._epochs_of(name))]
                    # What nobody holds now is on its way.
                    announces |= bool(experts_without_host(self.placement, set(self.state.alive)))
                case states.AnnounceAlive():
                    announces = True
                case _:
                    commands.append(command)
        for name in states.gone_between(before, self.state):
            commands += self._advance(redeploy.Gone(name), now)
        if isinstance(event, states.Tick):
            commands += self._advance(redeploy.Tick(), now)
        if announces or isinstance(event, states.Tick):
            commands += self._mend(now)
        is_over = isinstance(event, states.Tick) and self._promise and not self._will_be_hosted(now)
        if announces or is_over:
            commands.append(self._announcement(now))
        return commands

    def progressed(
        self, name: str, epoch: int, done: int, total: int, now: float, what: str = ""
    ) -> list[Command]:
        """A node has read, or fetched, so many bytes of its share. A change on whose way bytes come is not late."""
        if self.change is not None and epoch == self.change.epoch:
            if (done, total) != self._progress.get(name) and self.change.phase == "loading":
                self.change = redeploy.prolonged(self.change, now + CHANGE_S)
            self._progress[name] = (done, total)
        return self.apply(states.Progressed(name, done, total, what[:MAX_WHAT_CHARS]), now)

    def loaded(self, name: str, epoch: int, weight_bytes: int, now: float) -> list[Command]:
        """A node holds its share of that placement."""
        if self._is_loading(epoch):
            self._loaded_bytes[name] = weight_bytes
            return self._advance(redeploy.Loaded(name), now)
        return self.apply(states.ShareLoaded(name, epoch, weight_bytes), now)

    def cannot_load(
        self, name: str, epoch: int, reason: str, now: float, whose: Whose = "cluster"
    ) -> list[Command]:
        if self._is_loading(epoch):
            return self._advance(redeploy.CannotLoad(name, reason), now)
        return self.apply(states.LoadFailed(name, epoch, reason, whose), now)

    def cannot_join(self, name: str, reason: str, now: float) -> list[Command]:
        """A process of that name was refused: a change that waits for this node waits in vain."""
        record = self.state.nodes.get(name)
        if self.change is None or record is None or not record.is_coming or record.phase in HERE:
            return []
        return self._advance(redeploy.CannotLoad(name, reason), now)

    def switched(self, name: str, epoch: int, now: float) -> list[Command]:
        """A node steps by that placement."""
        if self.change is None or epoch != self.change.epoch:
            return []
        return self._advance(redeploy.Switched(name), now)

    # What people want.

    def ask(self, wanted: Cluster) -> Ask:
        """What the placement that another topology file leads to is worked out from: `work_out` is next.

        Nodes that are known to be away get nothing for now.
        """
        nodes = self.state.nodes
        names = [name for name in wanted.node_names if name not in nodes or nodes[name].phase in HERE]
        return self._ask(wanted, names)

    def ask_without(self, name: str) -> Ask:
        """The same for the placement without a node that is to be drained."""
        self.refuse_if_busy()
        record = self.state.nodes.get(name)
        if record is None:
            known = ", ".join(self.state.nodes)
            raise TopologyError(f"no node is called {name}; the cluster has {known}")
        if record.phase not in HERE:
            raise TopologyError(f"{name} is not there to be drained: it is {record.phase}")
        names = [other for other in self._present() if other != name]
        try:
            refuse_nobody(self.cluster, names)
        except TopologyError as error:
            raise TopologyError(f"{name} cannot be drained: without it {error}") from error
        return self._ask(self.cluster, names)

    def is_current(self, ask: Ask) -> bool:
        """Whether all that it was worked out from is still so; measurements apart, which change with every heartbeat."""
        nodes = self.state.nodes
        return (
            ask.origin == self.plans[self.active]
            and ask.epoch == self.newest + 1
            and ask.present == frozenset(self._present())
            and all(name not in nodes or nodes[name].phase in HERE for name in ask.names)
        )

    def apply_plan(
        self, found: Found, why: str, now: float, leaving: frozenset[str] = frozenset()
    ) -> tuple[int, list[Command]]:
        """Begin to change to a plan that is current. Returns its epoch, 0 if it changes nothing.

        leaving  nodes that are drained with it
        """
        self.refuse_if_busy()
        plan = found.plan
        if not leaving and plan.cluster == self.cluster and plan.placement.nodes == self.placement.nodes:
            return 0, []
        return self._set_out(found, why, now, leaving)

    def work_out(self, ask: Ask) -> Found:
        """What an Ask leads to; it changes nothing, and may be called on any thread. Raises TopologyError."""
        return work_out(ask, self._footprint, self.traits, self.joint)

    def give_up(self, epoch: int, why: str, now: float) -> list[Command]:
        """Whoever asked for the change says that it cannot work out."""
        asked = self.change.epoch if self.change is not None and epoch == self._goal else epoch
        return self._advance(redeploy.GivenUp(why), now) if self._is_loading(asked) else []

    def refuse_if_busy(self) -> None:
        """Raise Refusal while a change is under way."""
        if self.change is not None:
            raise Refusal("busy", f"a change is under way: {self.change_text()}", 1.0)

    # From one placement to the next.

    def _is_loading(self, epoch: int) -> bool:
        return self.change is not None and epoch == self.change.epoch and self.change.phase == "loading"

    def _epochs_of(self, name: str) -> list[int]:
        """Where a node has a share: in the placement that counts, and in the one that is being loaded."""
        change = self.change
        coming = [change.epoch] if change is not None and change.phase == "loading" else []
        return [epoch for epoch in (self.active, *coming) if self.plans[epoch].holds(name)]

    def _present(self) -> list[str]:
        return [record.name for record in self.state.nodes.values() if record.phase in HERE]

    def _ask(
        self,
        cluster: Cluster,
        names: Sequence[str],
        *,
        goal: Placement | None = None,
        is_urgent: bool = False,
        is_return: bool = False,
    ) -> Ask:
        return Ask(
            cluster,
            tuple(names),
            frozenset(self._present()),
            self.plans[self.active],
            self.newest + 1,
            self.measured(),
            goal,
            is_urgent,
            is_return,
        )

    @property
    def _goal(self) -> int:
        """The epoch under which people know the change under way; 0 without one."""
        return self._journey.goal if self._journey is not None else 0

    def _set_out(
        self,
        found: Found,
        why: str,
        now: float,
        leaving: frozenset[str] = frozenset(),
        *,
        is_way_back: bool = False,
    ) -> tuple[int, list[Command]]:
        """Begin the first of the rounds that lead to a plan. Returns the epoch of the last one."""
        first, *rest = found.rounds
        goal = found.rounds[-1].placement.epoch
        self.newest = goal
        self._journey = Journey(
            goal, tuple(rest), found.ask.origin, why, now, leaving, is_way_back=is_way_back
        )
        return goal, self._begin(first, now)

    def _begin(self, plan: Plan, now: float) -> list[Command]:
        """Begin to load the next placement of the journey."""
        assert self._journey is not None, "no change begins without saying where it leads"
        journey, epoch = self._journey, plan.placement.epoch
        why = journey.why
        if journey.num_done or journey.rest:
            num_rounds = journey.num_done + 1 + len(journey.rest)
            why = f"{why} (round {journey.num_done + 1} of {num_rounds})"
        members = frozenset(share.node for share in plan.placement.nodes)
        homes = {*plan.homes, *self.plans[self.active].homes} & members
        self.plans[epoch] = plan
        self._loaded_bytes, self._progress = {}, {}
        self.change = redeploy.Change(
            epoch=epoch,
            old_epoch=self.active,
            members=members,
            homes=frozenset(
                name for name in homes if name in self.state.nodes and self.state.nodes[name].serves
            ),
            leaving=journey.leaving if not journey.rest else frozenset(),
            began_s=now,
            deadline_s=now + CHANGE_S,
            why=why,
        )
        commands: list[Command] = [states.Note(f"epoch {epoch} begins to load: {why}")]
        commands += self.apply(states.Expected(plan.cluster.node_names), now)
        nodes = self.state.nodes
        commands += [SendDeploy(name, epoch) for name in sorted(members) if nodes[name].phase in HERE]
        for name in sorted(members):  # a node that went away in an earlier round is not to be waited for
            if nodes[name].phase not in HERE and not nodes[name].is_coming:
                return commands + self._advance(redeploy.Gone(name), now)
        return commands

    def _advance(self, event: redeploy.Event, now: float) -> list[Command]:
        if self.change is None:
            return []
        change = self.change
        self.change, said = redeploy.advance(change, event, now)
        commands: list[Command] = []
        for command in said:
            match command:
                case redeploy.Activate(epoch):
                    commands += self._activate(change, epoch, now)
                case redeploy.Release(epoch):
                    commands += [*self._release(epoch), states.Note(f"epoch {epoch} released")]
                    commands += self._round_done(change, now)
                case redeploy.RollBack(epoch, why):
                    commands += self._release(epoch)
                    commands += self._roll_back(epoch, isinstance(event, redeploy.Gone), why, now)
        return commands

    def _round_done(self, change: redeploy.Change, now: float) -> list[Command]:
        """Begin the next round, or tell that the change is over."""
        journey = self._journey
        assert journey is not None, "a change is over that led nowhere"
        if journey.rest:
            first, *rest = journey.rest
            self._journey = msgspec.structs.replace(journey, rest=tuple(rest), num_done=journey.num_done + 1)
            return self._begin(first, now)
        self._journey = None
        took_s = now - journey.began_s
        self.outcomes.pop()  # that it counts
        self._end(Outcome(change.epoch, True, f"epoch {change.epoch} in {took_s:.1f} s: {journey.why}"))
        self._retry_s, self._left_out = RETRY_S, frozenset()
        return [states.Note(self.outcomes[-1].detail)]

    def _end(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def _release(self, epoch: int) -> list[Command]:
        """Nodes that are lost are told too: one that is only frozen will hear it."""
        del self.plans[epoch]
        records = self.state.nodes.values()
        return [SendRelease(r.name, epoch) for r in records if r.phase in (*HERE, "lost", "failed")]

    def _activate(self, change: redeploy.Change, epoch: int, now: float) -> list[Command]:
        self.active, self._no_way = epoch, None
        journey = self._journey
        if journey is not None and not journey.rest:  # whoever asks the next coordinator is told as much
            self._end(Outcome(epoch, True, f"epoch {epoch} counts: {journey.why}"))
        names, nodes = self.cluster.node_names, self.state.nodes
        commands: list[Command] = [SendActivate(name, epoch) for name in sorted(change.members)]
        why = "it was taken out of the topology file"
        commands += [
            Dismiss(record.peer, why)
            for record in nodes.values()
            if record.name not in names and record.phase in HERE
        ]
        commands += self.apply(states.Changed(epoch, names, dict(self._loaded_bytes)), now)
        for name in sorted(change.leaving):
            commands.append(Dismiss(self.state.nodes[name].peer, "it was drained"))
            commands += self.apply(states.Left(name, "drained", is_drained=True), now)
        return [*commands, self._announcement(now)]

    def _roll_back(self, epoch: int, at_once: bool, why: str, now: float) -> list[Command]:
        """What only the placement that is off had is sent away; another is tried, at once if only a node is gone.

        A journey of which some rounds are over goes back to where it began, if the nodes for that are there.
        """
        journey, self._journey = self._journey, None
        assert journey is not None, "a change is off that led nowhere"
        self._end(Outcome(journey.goal, False, f"epoch {journey.goal} was rolled back: {why}"))
        commands: list[Command] = [states.Note(self.outcomes[-1].detail)]
        commands += [
            Dismiss(record.peer, why)
            for record in self.state.nodes.values()
            if record.is_coming and record.phase in HERE
        ]
        if not at_once:
            self._try_at_s = now + self._retry_s
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
        commands += self.apply(states.NotChanged(), now)
        if journey.num_done and not at_once and not journey.is_way_back and self.change is None:
            commands += self._go_back(journey, now)
        return [*commands, *self._mend(now), self._announcement(now)]

    def _go_back(self, journey: Journey, now: float) -> list[Command]:
        """Begin the way back to the placement that counted before; nothing if it cannot be any longer."""
        origin = journey.origin
        placement = replace(origin.placement, epoch=self.newest + 1)
        nodes = self.state.nodes
        if any(share.node not in nodes or nodes[share.node].phase not in HERE for share in placement.nodes):
            return []
        ask = self._ask(origin.cluster, [share.node for share in placement.nodes], goal=placement)
        self._asked = ask, f"back to what was before epoch {journey.goal}"
        return [WorkOut(ask)]

    # Mending.

    def _mend(self, now: float) -> list[Command]:
        """Give experts and layers without a living host another one, and a node that came back its part again."""
        if self.change is not None or self._journey is not None or self._asked is not None:
            return []
        if (
            now < self._try_at_s
            or frozenset(self._present()) == self._no_way
            or not (why := self._lacks(now))
        ):
            return []
        self._try_at_s = now + RETRY_S
        is_return = why.endswith(CAME_BACK)
        ask = self._ask(self.cluster, self._present(), is_urgent=not is_return, is_return=is_return)
        self._asked = ask, why
        return [WorkOut(ask)]

    def _idle(self) -> frozenset[str]:
        """Nodes that are there and have no part."""
        holds = self.plans[self.active].holds
        return frozenset(name for name in self._present() if not holds(name)) - self._left_out

    def _lacks(self, now: float) -> str:
        """Why another placement is wanted; empty if none is."""
        records, present = self.state.nodes.values(), self._present()
        is_late = now - self._began_s > self._absent_s
        away = [r.name for r in records if r.name not in present and (r.has_served or is_late)]
        if not present:
            return ""
        groups = [group for group in self.placement.groups if len(group.stages) > 1]
        if any(not set(group.nodes).isdisjoint(away) for group in groups):
            return f"layers lost their node with {', '.join(away)}"
        if unhosted := experts_without_host(self.placement, set(present)) if away else 0:
            return f"{unhosted} experts lost their host with {', '.join(away)}"
        idle = self._idle()
        return f"{', '.join(sorted(idle))} {CAME_BACK}" if idle else ""

    def worked_out(self, ask: Ask, found: Found | TopologyError, now: float) -> list[Command]:
        """What came of a WorkOut. What does not fit any longer is asked anew, if it is still wanted."""
        if self._asked is None or self._asked[0] != ask:
            return []
        why, self._asked = self._asked[1], None
        if self.change is not None or self._journey is not None:
            return []
        if not self.is_current(ask):
            self._try_at_s = now
            return self._mend(now)
        if isinstance(found, TopologyError):
            if ask.goal is not None:
                return [states.Note(f"there is no way {why}: {found}"), *self._mend(now)]
            self._no_way = ask.present
            note = (
                [states.Note(f"the placement cannot be mended: {found}")] if str(found) != self._told else []
            )
            self._told = str(found)
            return [*note, self._announcement(now)]
        self._told = ""
        if ask.goal is not None:
            return self._set_out(found, why, now, is_way_back=True)[1]
        idle = self._idle()
        if ask.is_return and not any(found.plan.holds(name) for name in idle):
            self._left_out |= idle
            return []
        return self._set_out(found, why, now)[1]

    def _announcement(self, now: float) -> Announce:
        self._promise = self._will_be_hosted(now)
        return Announce(self.active, self.state.alive, self._promise)

    def _will_be_hosted(self, now: float) -> bool:
        """Whether experts without a living host will have one: on a node that is loading, or in another placement.

        So it is said until it was found that there is no room, also while a change is under way that does not help: mending
        begins when it is over. And while a node is only just gone, which may be back in a moment: who waits would else
        give up what may still come.
        """
        present = set(self._present())
        if not experts_without_host(self.placement, set(self.state.alive)):
            return False
        if not experts_without_host(self.placement, present):
            return True
        if self.change is not None and not experts_without_host(
            self.plans[self.change.epoch].placement, present
        ):
            return True
        hoped_s = RETURN_LOSSES * self.cluster.lost_after_s
        hoped_for = any(
            record.phase in ("lost", "left") and record.is_awaited and now - record.last_heard_s < hoped_s
            for record in self.state.nodes.values()
        )
        return hoped_for or self._no_way != present
