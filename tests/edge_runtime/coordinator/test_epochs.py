"""Membership and placements together: whatever nodes do, a change ends, every expert has a host, and no two epochs mix."""

import collections
from dataclasses import dataclass, field, replace

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_runtime.coordinator import state as states
from edge_runtime.coordinator.deploy import experts_without_host
from edge_runtime.coordinator.epochs import (
    CHANGE_S,
    HERE,
    KEPT_OUTCOMES,
    RETURN_LOSSES,
    Announce,
    Command,
    Dismiss,
    Epochs,
    SendActivate,
    SendDeploy,
    SendRelease,
    WorkOut,
)
from edge_runtime.coordinator.snapshot import Snapshot, decode_snapshot, encode_snapshot, snapshot_of
from edge_runtime.errors import Refusal
from edge_runtime.protocol import NodeReport
from tests.support.coordinators import footprint
from topology.cluster import MIB, Cluster, Node, Pin
from topology.errors import TopologyError
from topology.ids import ExpertId
from topology.placement import plan_placement

NAMES = ("n1", "n2", "n3", "n4")
PARTS = footprint()


def node(name: str, memory_mib: int = 358, *roles: str) -> Node:
    return Node(
        name=name,
        address=f"127.0.0.1:{5600 + int(name[1:])}",
        memory_bytes=memory_mib * MIB,
        roles=frozenset(roles or ("prefill", "decode", "experts")),
    )


def cluster_of(*nodes: Node, **changes: object) -> Cluster:
    options = {
        "name": "test",
        "model": "model",
        "nodes": nodes,
        "coordinator": "127.0.0.1:0",
        "kv_tokens": 1024,
        "max_batch_rows": 16,
        "memory_ratio": 1.0,
    }
    return Cluster(**(options | changes))  # type: ignore[arg-type]


FOUR = cluster_of(node("n1"), node("n2"), node("n3", 355, "experts"), node("n4", 355, "experts"))
WANTED = [
    FOUR,
    replace(FOUR, nodes=FOUR.nodes[:3]),
    replace(FOUR, nodes=FOUR.nodes[1:]),
    replace(FOUR, nodes=(*FOUR.nodes, node("n5", 356, "experts"))),
    replace(FOUR, nodes=(node("n1", 400), *FOUR.nodes[1:])),
    replace(FOUR, nodes=(FOUR.nodes[0], node("n2", 358, "experts"), *FOUR.nodes[2:])),
    replace(FOUR, memory_ratio=2.0),
    replace(FOUR, nodes=(node("n1", 357), node("n2", 357))),
    replace(FOUR, nodes=(node("n1", 359), node("n2", 352, "experts"), node("n3", 352, "experts"))),
    replace(
        FOUR,
        nodes=(node("n1", 359), node("n2", 352, "experts"), node("n3", 352, "experts")),
        pins=tuple(Pin(ExpertId(layer, 0), name) for layer, name in ((0, "n3"), (1, "n2"))),
    ),
]


@dataclass
class Process:
    """A node's process as the coordinator meets it: takes messages in order, loads, switches, forgets."""

    name: str
    number: int
    is_frozen: bool = False
    is_over: bool = False
    is_cut: bool = False
    """Its connection ended, and it has not greeted since: what it was sent did not come."""
    inbox: collections.deque = field(default_factory=collections.deque)
    loads: list[tuple[int, bool]] = field(default_factory=list)
    shares: set[int] = field(default_factory=set)
    active: int = 0
    unsaid: set[int] = field(default_factory=set)
    """What it has of other placements, and was not told of since it was told what counts now."""
    greeted: int = 0
    """The coordinator that it knows, by number."""

    @property
    def peer(self) -> bytes:
        return f"{self.name}/{self.number}".encode()


class World:
    """A coordinator's decisions and the processes that they reach."""

    def __init__(self, cluster: Cluster = FOUR) -> None:
        self.now = 0.0
        self.epochs = Epochs(cluster, PARTS, plan_placement(cluster, PARTS), 0.0)
        self.first = snapshot_of(self.epochs, "m", "f"), 0.0
        self.processes: list[Process] = []
        self.started = 0
        self.coordinators = 1
        self.asks: collections.deque = collections.deque()  # what is to be worked out
        self.is_prompt = True  # and is so at once
        self.log: list[tuple[str, tuple, float]] = []
        self.said: list[Command] = []
        self.activated: list[int] = []

    # The coordinator.

    def call(self, what: str, *arguments: object) -> object:
        result = getattr(self.epochs, what)(*arguments, self.now)
        self.log.append((what, arguments, self.now))
        commands = result[1] if isinstance(result, tuple) else result
        for command in commands:
            self.deliver(command)
        while self.is_prompt and self.asks:
            self.work_out()
        return result

    def deliver(self, command: Command) -> None:
        self.said.append(command)
        match command:
            case SendDeploy(name, epoch):
                self.post(self.peer_of(name), ("deploy", epoch, epoch == self.epochs.active))
            case SendActivate(name, epoch):
                self.activated.append(epoch)
                self.post(self.peer_of(name), ("activate", epoch))
            case SendRelease(name, epoch):
                record = self.epochs.state.nodes.get(name)
                counts = self.epochs.plans[self.epochs.active]
                serves = record is not None and record.serves and counts.holds(name)
                self.post(self.peer_of(name), ("release", epoch, serves))
            case Dismiss(peer, _):
                self.post(peer, ("stop",))
            case WorkOut(ask):
                self.asks.append(ask)

    def work_out(self) -> None:
        ask = self.asks.popleft()
        try:
            found = self.epochs.work_out(ask)
        except TopologyError as error:
            found = error
        self.call("worked_out", ask, found)

    def change(self, wanted: Cluster) -> int:
        """A file is applied. The epoch of the change."""
        found = self.epochs.work_out(self.epochs.ask(wanted))
        return self.call("apply_plan", found, "a file was applied")[0]

    def drain(self, name: str) -> int:
        found = self.epochs.work_out(self.epochs.ask_without(name))
        self.log.append(("apply_plan", (found, "drained", self.now, frozenset((name,))), None))
        epoch, commands = self.epochs.apply_plan(found, "drained", self.now, frozenset((name,)))
        for command in commands:
            self.deliver(command)
        return epoch

    def peer_of(self, name: str) -> bytes:
        record = self.epochs.state.nodes.get(name)
        return record.peer if record is not None else b""

    def post(self, peer: bytes, message: tuple) -> None:
        for process in self.processes:
            if process.peer == peer and not process.is_over and not process.is_cut:
                process.inbox.append(message)

    # Processes.

    def start(self, name: str) -> Process:
        self.started += 1
        process = Process(name, self.started)
        self.processes.append(process)
        self.join(process)
        return process

    def join(self, process: Process) -> None:
        if process.greeted != self.coordinators:
            while process.inbox:  # of the one before: read before it is found to be gone
                self.take(process)
            process.loads = []  # of a change that ended with it
            process.greeted = self.coordinators
        process.is_cut = False
        if process.name in self.epochs.state.nodes:
            self.call("apply", states.Joined(process.name, process.peer, str(process.number), process.number))
        else:
            process.is_over = True  # refused: no node is called so

    def cut(self, process: Process) -> None:
        """What is on its way to it is lost."""
        process.is_cut = True
        process.inbox.clear()
        if self.is_known(process):
            self.call("apply", states.Unreachable(process.name))

    def is_known(self, process: Process) -> bool:
        record = self.epochs.state.nodes.get(process.name)
        return record is not None and record.peer == process.peer and record.phase not in ("absent", "left")

    def running(self) -> list[Process]:
        return [process for process in self.processes if not process.is_over]

    def able(self) -> list[Process]:
        return [process for process in self.running() if not process.is_frozen]

    def take(self, process: Process) -> None:
        """The next message, or the next load."""
        if process.inbox:
            match process.inbox.popleft():
                case ("deploy", epoch, counts_now):
                    if counts_now:
                        process.unsaid = process.shares | {load for load, _ in process.loads}
                    process.unsaid.discard(epoch)
                    if epoch in process.shares:
                        self.loaded(process, epoch, counts_now)
                    else:
                        process.loads.append((epoch, counts_now))
                case ("activate", epoch):
                    assert epoch in process.shares, (
                        f"{process.name} is to step by {epoch}, which it did not load"
                    )
                    process.shares &= {process.active, epoch}
                    process.active = epoch
                    if self.is_known(process):
                        self.call("switched", process.name, epoch)
                case ("release", epoch, serves):
                    if process.active == epoch:
                        assert not serves, f"{process.name} still steps by {epoch}"
                        process.active = 0  # it was lost meanwhile, and the others went on without it
                    process.shares.discard(epoch)
                    process.loads = [load for load in process.loads if load[0] != epoch]
                case ("stop",):
                    process.is_over = True
        elif process.loads:
            epoch, counts_now = process.loads.pop(0)
            self.loaded(process, epoch, counts_now)

    def loaded(self, process: Process, epoch: int, counts_now: bool) -> None:
        process.shares.add(epoch)
        if counts_now:
            process.shares -= process.unsaid
            process.loads = [load for load in process.loads if load[0] not in process.unsaid]
            process.active = epoch
        if self.is_known(process):
            self.call("loaded", process.name, epoch, 1000)

    def fail_to_load(self, process: Process) -> None:
        epoch, _ = process.loads.pop(0)
        if self.is_known(process):
            self.call("cannot_load", process.name, epoch, "its disk is broken")

    def beat(self) -> None:
        for process in self.able():
            if ("stop",) in process.inbox:  # it comes first, and then there is nothing more to say
                continue
            if self.is_known(process) and not process.is_cut:
                self.call("apply", states.Beat(process.name, NodeReport(epoch=process.active)))
            else:
                self.join(process)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.beat()
        self.call("apply", states.Tick())

    def settle(self, seconds: float = 200.0) -> None:
        """Nothing new happens, and everybody does what is asked."""
        for process in self.running():
            process.is_frozen = False
        until, calm = self.now + seconds, 0
        while self.now < until and calm < 20:
            before = len(self.said)
            while self.asks:
                self.work_out()
            for process in self.able():
                while (process.inbox or process.loads) and not process.is_over:
                    self.take(process)
            self.pass_time(0.5)
            calm = (
                0
                if self.epochs.change is not None or len(self.said) > before or not self.is_rested()
                else calm + 1
            )

    def is_rested(self) -> bool:
        """As `check_settled` wants it."""
        try:
            self.check_settled()
        except AssertionError:
            return False
        return True

    # What must hold.

    def check(self) -> None:
        epochs = self.epochs
        expected = {epochs.active}
        if epochs.change is not None:
            expected |= {epochs.change.epoch, epochs.change.old_epoch}
            assert epochs.active == epochs.change.old_epoch or epochs.change.phase == "switching"
        assert set(epochs.plans) == expected
        assert len(epochs.outcomes) <= KEPT_OUTCOMES
        assert self.activated == sorted(self.activated), "an older placement came to count again"
        assert epochs.state.epoch == epochs.active
        self.check_promise()

    def check_promise(self) -> None:
        """Nobody is told that experts are lost for good before it was found that those who are there have no room."""
        epochs = self.epochs
        told = [command for command in self.said if isinstance(command, Announce)][-1:]
        present = frozenset(record.name for record in epochs.state.nodes.values() if record.phase in HERE)
        if (
            told
            and told[0].epoch == epochs.active
            and not told[0].replacing
            and told[0].alive == epochs.state.alive
        ):
            lost = experts_without_host(epochs.placement, present)
            assert not lost or epochs._no_way == present, epochs.change_text()

    def check_settled(self) -> None:
        epochs = self.epochs
        assert epochs.change is None, epochs.change_text()
        present = [record.name for record in epochs.state.nodes.values() if record.phase in HERE]
        failed = {record.name for record in epochs.state.nodes.values() if record.phase == "failed"}
        assert set(present) == {process.name for process in self.running()} - failed
        try:
            epochs.work_out(epochs._ask(epochs.cluster, present, is_urgent=True))
        except TopologyError:
            return
        assert not experts_without_host(epochs.placement, set(epochs.state.alive))
        for process in self.running():
            if process.name not in failed:
                assert process.shares == {epochs.active} and process.active == epochs.active, process

    def restart_coordinator(self) -> None:
        """Another one goes on with what this one left on disk. Nodes hear nothing of it until they greet."""
        found = decode_snapshot(encode_snapshot(snapshot_of(self.epochs, "m", "f")))
        assert found is not None
        self.first = found, self.now
        self.epochs = self.begin(*self.first)
        self.log, self.said = [], []
        self.asks.clear()
        self.coordinators += 1

    @staticmethod
    def begin(found: Snapshot, now: float) -> Epochs:
        return Epochs(
            found.cluster, PARTS, found.placement, now, newest=found.newest, outcomes=found.outcomes
        )

    def check_replay(self) -> None:
        again = self.begin(*self.first)
        said: list[Command] = []
        for what, arguments, now in self.log:
            result = getattr(again, what)(*arguments, *(() if now is None else (now,)))
            said += result[1] if isinstance(result, tuple) else result
        assert said == self.said
        assert again.state == self.epochs.state and again.change == self.epochs.change


class AnyClusterLife(RuleBasedStateMachine):
    """Nodes and coordinators start and die; nodes freeze, come back, load or fail to; people apply files and drain nodes."""

    @initialize()
    def begin(self):
        self.world = World()
        self.world.is_prompt = False
        for name in NAMES:
            self.world.start(name)

    def a_process(self, data, processes):
        return data.draw(st.sampled_from(sorted(processes, key=lambda process: process.number)))

    @rule(name=st.sampled_from((*NAMES, "n5")))
    def start(self, name):
        if not any(process.name == name for process in self.world.running()):
            self.world.start(name)

    @precondition(lambda self: self.world.running())
    @rule(data=st.data(), is_noticed=st.booleans())
    def die(self, data, is_noticed):
        process = self.a_process(data, self.world.running())
        process.is_over = True
        if is_noticed and self.world.is_known(process):
            self.world.call("apply", states.Unreachable(process.name))

    @precondition(lambda self: self.world.running())
    @rule(data=st.data())
    def freeze_or_thaw(self, data):
        process = self.a_process(data, self.world.running())
        process.is_frozen = not process.is_frozen

    @precondition(lambda self: self.world.running())
    @rule(data=st.data())
    def cut(self, data):
        self.world.cut(self.a_process(data, self.world.running()))

    @precondition(lambda self: any(p.inbox or p.loads for p in self.world.able()))
    @rule(data=st.data())
    def take(self, data):
        self.world.take(self.a_process(data, [p for p in self.world.able() if p.inbox or p.loads]))

    @precondition(lambda self: any(p.inbox or p.loads for p in self.world.able()))
    @rule()
    def all_take(self):
        for process in self.world.able():
            while (process.inbox or process.loads) and not process.is_over:
                self.world.take(process)

    @precondition(lambda self: any(p.loads and not p.inbox for p in self.world.able()))
    @rule(data=st.data())
    def fail_to_load(self, data):
        self.world.fail_to_load(
            self.a_process(data, [p for p in self.world.able() if p.loads and not p.inbox])
        )

    @rule(seconds=st.sampled_from((0.2, 1.0, 4.0)))
    def pass_time(self, seconds):
        self.world.pass_time(seconds)

    @precondition(lambda self: self.world.asks)
    @rule()
    def work_out(self):
        self.world.work_out()

    @rule(number=st.sampled_from(range(len(WANTED))))
    def apply(self, number):
        try:
            self.world.change(WANTED[number])
        except (TopologyError, Refusal):
            pass  # refused: nothing changes

    @rule()
    def restart_the_coordinator(self):
        self.world.restart_coordinator()

    @rule(name=st.sampled_from(NAMES))
    def drain(self, name):
        try:
            self.world.drain(name)
        except (TopologyError, Refusal):
            pass

    @precondition(lambda self: self.world.epochs.change is not None)
    @rule()
    def give_up(self):
        self.world.call("give_up", self.world.epochs.change.epoch, "a person lost patience")

    @invariant()
    def holds(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.settle()
            self.world.check()
            self.world.check_settled()
            self.world.check_replay()


AnyClusterLife.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, phases=(Phase.explicit, Phase.generate)
)
TestAnyClusterLife = AnyClusterLife.TestCase


@pytest.fixture
def world() -> World:
    """Four nodes that serve."""
    world = World()
    for name in NAMES:
        world.start(name)
    world.settle(1.0)
    assert world.epochs.state.is_ready
    return world


def process(world: World, name: str) -> Process:
    return next(found for found in world.running() if found.name == name)


def unhosted(world: World) -> int:
    return experts_without_host(world.epochs.placement, set(world.epochs.state.alive))


def announcements(world: World) -> list[Announce]:
    return [command for command in world.said if isinstance(command, Announce)]


def last_announcement(world: World) -> Announce:
    return announcements(world)[-1]


def test_a_file_with_a_further_node_waits_for_it_and_then_counts(world):
    world.change(WANTED[3])
    world.settle(5.0)
    assert world.epochs.active == 1 and "n5 to come" in world.epochs.change_text()
    assert world.epochs.state.is_ready, "the cluster serves meanwhile as before"
    world.start("n5")
    world.settle(2.0)
    assert world.epochs.active == 2 and "n5" in world.epochs.state.alive
    assert world.epochs.outcomes[-1].is_done


def test_a_node_that_never_comes_ends_the_change_and_nothing_has_changed(world):
    before = world.epochs.placement
    world.change(WANTED[3])
    world.settle(CHANGE_S + 2.0)
    assert world.epochs.change is None and world.epochs.placement == before
    assert "n5 did not load within" in world.epochs.outcomes[-1].detail
    assert all(found.shares == {1} for found in world.running())
    assert "n5" not in world.epochs.state.nodes


def test_a_change_on_whose_way_weights_come_is_not_late_until_they_stop_coming(world):
    world.change(WANTED[3])
    epoch = world.epochs.change.epoch
    for megabytes in range(1, 4):
        world.settle(CHANGE_S - 10.0)
        world.call("progressed", "n5", epoch, megabytes << 20, 10 << 20)
        assert world.epochs.change is not None
    world.settle(CHANGE_S - 10.0)
    world.call("progressed", "n5", epoch, 3 << 20, 10 << 20)  # a sign of life, and no progress
    world.settle(12.0)
    assert world.epochs.change is None
    assert f"n5 did not get on with loading for {CHANGE_S:.0f} s" in world.epochs.outcomes[-1].detail


def test_a_node_that_is_refused_ends_the_change_at_once(world):
    world.change(WANTED[3])
    world.call("cannot_join", "n5", "it has another model")
    assert world.epochs.change is None and "n5 cannot load" in world.epochs.outcomes[-1].detail
    world.call("cannot_join", "n1", "an impostor")
    assert world.epochs.state.nodes["n1"].serves


def test_experts_of_a_lost_node_are_announced_as_coming_and_come_elsewhere(world):
    held = set(world.epochs.placement.plan_of("n3").experts)
    assert held
    process(world, "n3").is_over = True
    world.call("apply", states.Unreachable("n3"))
    assert last_announcement(world) == Announce(1, ["n1", "n2", "n4"], True)
    world.settle(2.0)
    assert world.epochs.active == 2 and not unhosted(world)
    world.start("n3")
    world.settle(3.0)
    assert world.epochs.active == 3 and world.epochs.placement.plan_of("n3").experts


def test_a_second_loss_while_the_first_is_mended_is_mended_too_and_never_announced_as_final(world):
    for name in ("n3", "n4"):
        process(world, name).is_over = True
        world.call("apply", states.Unreachable(name))
        assert last_announcement(world).replacing
    world.settle(3.0)
    assert not unhosted(world) and world.epochs.state.alive == ["n1", "n2"]


def test_what_nobody_has_room_for_is_announced_as_lost_and_taken_back_from_its_node():
    tight = World()
    nodes = (node("n1", 356), node("n2", 355, "experts"), node("n3", 355, "experts"))
    tight.epochs = Epochs(cluster_of(*nodes), PARTS, plan_placement(cluster_of(*nodes), PARTS), 0.0)
    for name in ("n1", "n2", "n3"):
        tight.start(name)
    tight.settle(1.0)
    process(tight, "n3").is_over = True
    tight.call("apply", states.Unreachable("n3"))
    assert last_announcement(tight).replacing, "it may be back in a moment"
    hoped_s = RETURN_LOSSES * tight.epochs.cluster.lost_after_s
    until, before = tight.now + hoped_s - 1.0, len(announcements(tight))
    while tight.now < until:
        tight.pass_time(0.5)
    assert len(announcements(tight)) == before
    for _ in range(60):
        tight.pass_time(0.5)
    assert not last_announcement(tight).replacing
    assert len(announcements(tight)) == before + 1
    notes = [c.text for c in tight.said if isinstance(c, states.Note) and "cannot be mended" in c.text]
    assert len(notes) == 1 and "MiB" in notes[0], "said once, with numbers"
    tight.start("n3")
    assert last_announcement(tight).replacing or not unhosted(tight)
    tight.settle(2.0)
    assert not unhosted(tight)


def test_a_drained_node_hands_over_stops_and_is_missed_by_nobody(world):
    world.drain("n1")
    assert world.epochs.leaving == {"n1"}
    world.settle(2.0)
    assert not [found for found in world.running() if found.name == "n1"]
    assert world.epochs.state.is_ready and not unhosted(world)
    moved = [c for c in world.said if isinstance(c, states.MoveRequests)]
    assert [c.name for c in moved] == ["n1"]
    assert world.said.index(SendActivate("n2", 2)) < world.said.index(moved[0]), (
        "they can go on elsewhere by then"
    )
    world.start("n1")
    world.settle(3.0)
    assert world.epochs.placement.plan_of("n1").experts, "it came back and has its part again"


def test_a_drain_that_the_others_have_no_room_for_is_refused_with_numbers(world):
    world.drain("n1")
    with pytest.raises(Refusal, match="a change is under way"):
        world.drain("n2")
    world.settle(2.0)
    with pytest.raises(TopologyError, match="n2 cannot be drained: without it .*"):
        world.drain("n2")  # nobody else may answer
    with pytest.raises(TopologyError, match="no node is called n9; the cluster has n1, n2, n3, n4"):
        world.drain("n9")
    with pytest.raises(TopologyError, match="n1 is not there to be drained: it is left"):
        world.drain("n1")


def test_no_epoch_is_used_twice_even_after_a_roll_back_or_a_coordinator_before(world):
    world.call("apply", states.Beat("n1", NodeReport(epoch=7)))
    first = world.change(WANTED[6])
    world.call("give_up", first, "never mind")
    second = world.change(WANTED[6])
    assert (first, second) == (8, 9)
    world.call("loaded", "n1", 8, 1000)  # at last, and too late
    assert not world.epochs.change.loaded


def test_a_node_that_cannot_load_is_tried_again_after_ever_longer_pauses(world):
    process(world, "n3").is_over = True
    world.call("apply", states.Unreachable("n3"))
    begun = []
    for _ in range(400):
        if world.epochs.change is not None:
            begun.append(world.now)
            world.call("cannot_load", "n1", world.epochs.change.epoch, "its disk is broken")
        world.pass_time(0.5)
    pauses = [after - before for before, after in zip(begun, begun[1:], strict=False)]
    assert pauses == sorted(pauses) and pauses[-1] >= 30 and len(begun) < 12


def test_a_change_is_known_to_count_from_the_moment_it_does_whoever_is_asked(world):
    epoch = world.change(WANTED[6])
    for found in world.able():
        while found.loads or (found.inbox and found.inbox[0][0] != "activate"):
            assert epoch not in [outcome.epoch for outcome in world.epochs.outcomes]
            world.take(found)
    kept = snapshot_of(world.epochs, "m", "f")
    assert world.epochs.change.phase == "switching" and kept.placement.epoch == epoch
    assert [(o.epoch, o.is_done) for o in kept.outcomes] == [(epoch, True)]
    world.settle(2.0)
    assert [(o.epoch, o.is_done) for o in world.epochs.outcomes] == [(epoch, True)], "told once"


def test_a_node_that_joins_while_the_others_switch_is_ready_too(world):
    world.change(WANTED[6])
    for found in world.able():
        while found.loads or (found.inbox and found.inbox[0][0] != "activate"):
            world.take(found)
    assert world.epochs.change.phase == "switching"
    process(world, "n3").is_over = True
    world.call("apply", states.Unreachable("n3"))
    world.start("n3")
    world.take(process(world, "n3"))
    world.take(process(world, "n3"))
    assert world.epochs.state.nodes["n3"].serves
    world.settle(2.0)
    assert world.epochs.change is None and world.epochs.state.is_ready


def test_two_hundred_restarts_leave_the_coordinator_with_as_much_to_remember_as_ten(world):
    def size_after(restarts: int) -> int:
        for _ in range(restarts):
            process(world, "n3").is_over = True
            world.call("apply", states.Unreachable("n3"))
            world.start("n3")
            world.settle(5.0)
        epochs = world.epochs
        assert len(epochs.plans) == 1 and len(epochs.outcomes) <= KEPT_OUTCOMES
        kept = (epochs.state, list(epochs.outcomes), epochs._loaded_bytes, epochs._progress)
        return len(msgspec.json.encode(kept, enc_hook=repr))

    few = size_after(10)
    assert size_after(190) < 1.1 * few and world.epochs.state.is_ready


def test_a_file_that_changes_nothing_begins_nothing(world):
    assert world.change(FOUR) == 0 and world.epochs.change is None


def test_nodes_that_never_came_are_done_without_after_a_while():
    world = World()
    for name in NAMES[:3]:
        world.start(name)
    world.settle(20.0)
    assert world.epochs.active == 1 and unhosted(world)
    world.settle(20.0)
    assert not unhosted(world)


def test_a_plan_made_from_what_has_changed_meanwhile_is_made_again(world):
    world.is_prompt = False
    process(world, "n3").is_over = True
    world.call("apply", states.Unreachable("n3"))
    assert last_announcement(world).replacing, "it is being worked out, so nobody gives its experts up"
    process(world, "n4").is_over = True
    world.call("apply", states.Unreachable("n4"))
    assert len(world.asks) == 1, "one at a time"
    world.work_out()
    assert world.epochs.change is None and len(world.asks) == 1, "n4 has no share in what is loaded"
    world.work_out()
    assert world.epochs.change.members == {"n1", "n2"}
    old = world.epochs.ask(FOUR)
    world.settle(3.0)
    assert not world.epochs.is_current(old) and world.epochs.is_current(world.epochs.ask(FOUR))


def test_a_node_that_was_cut_off_while_it_loaded_drops_what_was_rolled_back_unheard():
    """Where nobody lacks it meanwhile, no other change comes by and takes it away."""
    roomy = World(cluster_of(*(node(name, 400) for name in NAMES[:3]), memory_ratio=3.0))
    for name in NAMES[:3]:
        roomy.start(name)
    roomy.settle(1.0)
    roomy.change(replace(roomy.epochs.cluster, nodes=(*roomy.epochs.cluster.nodes, node("n4", 400))))
    slow = process(roomy, "n3")
    roomy.take(slow)
    assert slow.loads == [(2, False)]
    roomy.cut(slow)
    assert roomy.epochs.change is None, "it is off, and n3 has not heard"
    for _ in range(20):  # back, on probation, and told its share while it still loads the other one
        roomy.pass_time(0.5)
        while slow.inbox:
            roomy.take(slow)
    assert roomy.epochs.state.nodes["n3"].serves
    roomy.settle()
    roomy.check_settled()
