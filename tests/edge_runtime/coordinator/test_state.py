"""Membership under every sequence of events a machine can think of, and the single steps that people rely on."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_runtime.coordinator.state import (
    AnnounceAlive,
    Beat,
    ClusterState,
    Command,
    Event,
    Greet,
    Joined,
    Left,
    LoadFailed,
    MoveRequests,
    Note,
    Progressed,
    RefuseJoin,
    SendShare,
    ShareLoaded,
    Tick,
    Unreachable,
    apply,
    initial_state,
)
from edge_runtime.protocol import NodeReport
from edge_runtime.transport.heartbeat import RETURN_AFTER_BEATS, SUSPECT_AFTER_BEATS

NAMES = ["n1", "n2", "n3"]
BEAT_S, LOST_S = 1.0, 5.0
REPORT = NodeReport(state="ready")

names = st.sampled_from(NAMES)


def shared(commands: list[Command], name: str) -> bool:
    """Whether the node is sent its share."""
    return any(isinstance(command, SendShare) and command.name == name for command in commands)


class Membership(RuleBasedStateMachine):
    """Any events in any order; what must hold is checked on each step from what the step was given."""

    @initialize()
    def start(self) -> None:
        self.state = initial_state(NAMES, 1, BEAT_S, LOST_S)
        self.now = 100.0
        self.heard = dict.fromkeys(NAMES, float("-inf"))
        self.since: dict[str, float] = {}  # of a lost node that is heard again: since when without a gap
        self.connections = 0

    def give(self, event: Event) -> list[Command]:
        before = self.state
        self.state, commands = apply(before, event, self.now)
        self.check_step(before, commands)
        return commands

    def check_step(self, before: ClusterState, commands: list[Command]) -> None:
        after = self.state
        assert after.alive == [n for n in NAMES if after.nodes[n].phase in ("ready", "suspect")]
        assert after.is_ready == (after.alive == NAMES) == (after.waiting_for() == "")
        announced = [command for command in commands if isinstance(command, AnnounceAlive)]
        assert len(announced) == (before.alive != after.alive)
        assert not announced or commands[-1] is announced[0], "told before it is so"
        failed = [command.name for command in commands if isinstance(command, MoveRequests)]
        assert failed == [n for n in before.alive if n not in after.alive]
        for command in commands:
            if isinstance(command, SendShare):
                assert after.nodes[command.name].peer, "a share for nobody"
        for name in set(NAMES) - set(after.waiting_for().replace(",", "").split()):
            assert name in after.alive

    def is_returning(self, name: str) -> bool:
        """Count a sign of life of a lost node; whether it was the one that ends its probation."""
        if self.now - self.heard[name] >= SUSPECT_AFTER_BEATS * BEAT_S:
            self.since.pop(name, None)
        self.heard[name] = self.now
        if self.now - self.since.setdefault(name, self.now) < RETURN_AFTER_BEATS * BEAT_S:
            return False
        del self.since[name]
        return True

    def join(self, name: str, incarnation: str) -> list[Command]:
        self.connections += 1
        return self.give(Joined(name, b"c%d" % self.connections, incarnation, 1000 + self.connections))

    @rule(name=names, incarnation=st.sampled_from(["one", "two"]))
    def joins(self, name: str, incarnation: str) -> None:
        known = self.state.nodes[name]
        is_heard = self.now - known.last_heard_s < SUSPECT_AFTER_BEATS * BEAT_S
        is_there = known.phase in ("loading", "ready", "suspect", "failed")
        commands = self.join(name, incarnation)
        if known.incarnation not in ("", incarnation) and is_there and is_heard:
            [refused] = commands
            assert isinstance(refused, RefuseJoin) and refused.retry_after_s > 0
            assert str(known.pid) in refused.reason and self.state.nodes[name] == known
            return
        if known.phase == "lost" and known.incarnation == incarnation:
            assert isinstance(commands[0], Greet) and self.state.nodes[name].peer != known.peer
            assert shared(commands, name) == self.is_returning(name)
            assert self.state.nodes[name].phase == ("loading" if shared(commands, name) else "lost")
            return
        self.since.pop(name, None)
        assert shared(commands, name)
        record = self.state.nodes[name]
        assert (record.phase, record.incarnation, record.fault) == ("loading", incarnation, "")
        self.heard[name] = self.now

    @rule(name=names)
    def greets_twice_on_one_connection(self, name: str) -> None:
        known = self.state.nodes[name]
        if known.phase in ("ready", "suspect"):
            commands = self.give(Joined(name, known.peer, known.incarnation, known.pid))
            assert commands == [SendShare(name)] and self.state.nodes[name].serves
            self.heard[name] = self.now

    @rule(name=names)
    def beats(self, name: str) -> None:
        before = self.state.nodes[name].phase
        commands = self.give(Beat(name, REPORT))
        after = self.state.nodes[name].phase
        if before == "lost":
            assert shared(commands, name) == self.is_returning(name)
            assert after == ("loading" if shared(commands, name) else "lost")
        elif before == "suspect":
            assert after == "ready"
        else:
            assert after == before and commands == []
        if before not in ("absent", "left"):
            self.heard[name] = self.now
            assert self.state.nodes[name].last_heard_s == self.now

    @rule(name=names, done=st.integers(0, 10**9))
    def progresses(self, name: str, done: int) -> None:
        before = self.state.nodes[name].phase
        self.give(Progressed(name, done, 10**9))
        if before == "lost":
            assert self.state.nodes[name].phase == ("loading" if self.is_returning(name) else "lost")
        if before not in ("absent", "left"):
            assert self.state.nodes[name].bytes_done == done
            self.heard[name] = self.now

    @rule(name=names, epoch=st.sampled_from([1, 1, 1, 2]))
    def loads(self, name: str, epoch: int) -> None:
        before = self.state.nodes[name]
        self.give(ShareLoaded(name, epoch, 7_000_000))
        if before.phase in ("absent", "left") or epoch != 1:
            assert self.state.nodes[name] == before
        elif before.phase == "lost":
            assert self.state.nodes[name].phase == ("loading" if self.is_returning(name) else "lost")
        else:
            assert self.state.nodes[name].phase == "ready" and self.state.nodes[name].has_served
            self.heard[name] = self.now

    @rule(name=names, epoch=st.sampled_from([1, 2]))
    def fails_to_load(self, name: str, epoch: int) -> None:
        before = self.state.nodes[name]
        self.give(LoadFailed(name, epoch, "out of memory"))
        if before.phase in ("absent", "left") or epoch != 1:
            assert self.state.nodes[name] == before
        else:
            assert (self.state.nodes[name].phase, self.state.nodes[name].fault) == ("failed", "out of memory")
            self.heard[name] = self.now
            self.since.pop(name, None)

    @rule(name=names)
    def leaves(self, name: str) -> None:
        was = self.state.nodes[name].phase
        self.give(Left(name, "was told to stop"))
        assert self.state.nodes[name].phase == ("absent" if was == "absent" else "left")
        self.since.pop(name, None)

    @rule(seconds=st.floats(0.05, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.give(Tick())
        for name in NAMES:
            phase, silence = self.state.nodes[name].phase, self.now - self.heard[name]
            if phase in ("loading", "ready", "suspect"):
                assert silence < LOST_S
            if phase == "ready":
                assert silence < SUSPECT_AFTER_BEATS * BEAT_S
            if phase == "lost":
                assert silence >= LOST_S or name in self.since

    @precondition(lambda self: self.state.alive)
    @rule()
    def one_beat_is_missed(self) -> None:
        """A node that beat within the last beat may miss one: nothing changes."""
        fresh = [n for n in self.state.alive if self.now - self.heard[n] < BEAT_S / 10]
        phases = {n: self.state.nodes[n].phase for n in fresh}
        self.now += 2 * BEAT_S
        self.give(Tick())
        assert {n: self.state.nodes[n].phase for n in fresh} == phases

    @rule(event=st.sampled_from([Beat, Progressed, ShareLoaded, LoadFailed, Left, Joined]))
    def a_stranger_speaks(self, event: type) -> None:
        before = self.state
        arguments = {
            Beat: ("n9", REPORT),
            Progressed: ("n9", 1, 2),
            ShareLoaded: ("n9", 1, 5),
            LoadFailed: ("n9", 1, "no"),
            Left: ("n9", ""),
            Joined: ("n9", b"p", "i", 3),
        }[event]
        [note] = self.give(event(*arguments))
        assert isinstance(note, Note) and "n9" in note.text and self.state == before

    @invariant()
    def one_record_for_each_name_in_the_order_of_the_file(self) -> None:
        assert [record.name for record in self.state.nodes.values()] == NAMES == list(self.state.nodes)


TestMembership = Membership.TestCase


class Cluster:
    """A state with its time, for the single stories below."""

    def __init__(self) -> None:
        self.state, self.now = initial_state(NAMES, 1, BEAT_S, LOST_S), 50.0

    def give(self, event: Event) -> list[Command]:
        self.state, commands = apply(self.state, event, self.now)
        return commands

    def phase(self, name: str = "n1") -> str:
        return self.state.nodes[name].phase

    def serve(self, *nodes: str) -> None:
        for name in nodes:
            self.give(Joined(name, b"c-" + name.encode(), f"i-{name}", 7))
            self.give(ShareLoaded(name, 1, 10))


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster()
    cluster.serve(*NAMES)
    return cluster


def lose(cluster: Cluster, name: str) -> None:
    cluster.now += LOST_S
    for other in NAMES:
        if other != name:
            cluster.give(Beat(other, REPORT))
    cluster.give(Tick())
    assert cluster.phase(name) == "lost"


def beat_all(cluster: Cluster, seconds: float = BEAT_S) -> list[Command]:
    """Time passes, then every node beats; what the first one's beat leads to."""
    cluster.now += seconds
    first, *_ = [cluster.give(Beat(name, REPORT)) for name in NAMES]
    cluster.give(Tick())
    return first


def test_a_frozen_node_that_beats_again_returns_with_its_third_beat(cluster):
    lose(cluster, "n1")
    assert [beat_all(cluster) for _ in range(2)] == [[], []]
    assert cluster.state.waiting_for() == "n1 lost (heard again, not yet for 1.5 s without a gap)"
    assert shared(beat_all(cluster), "n1") and cluster.phase() == "loading"
    assert cluster.give(ShareLoaded("n1", 1, 10))[-1] == AnnounceAlive()


def test_a_node_that_was_cut_off_is_greeted_at_once_and_served_with_the_third_sign_of_life(cluster):
    lose(cluster, "n1")
    [greet] = cluster.give(Joined("n1", b"new", "i-n1", 7))
    assert isinstance(greet, Greet)
    assert cluster.state.nodes["n1"].peer == b"new" and cluster.phase() == "lost"
    assert beat_all(cluster) == []
    assert shared(beat_all(cluster), "n1")


def test_a_node_whose_connection_ended_is_on_probation_before_its_silence_shows(cluster):
    cluster.give(Unreachable("n1"))
    assert cluster.phase() == "lost"
    [greet] = cluster.give(Joined("n1", b"new", "i-n1", 7))
    assert isinstance(greet, Greet)
    assert beat_all(cluster) == []
    assert shared(beat_all(cluster), "n1")


def test_a_node_whose_link_flickers_stays_lost(cluster):
    lose(cluster, "n1")
    for _ in range(20):
        assert beat_all(cluster, LOST_S - 0.1) == [] and cluster.phase() == "lost"


def test_a_restarted_node_is_on_no_probation(cluster):
    lose(cluster, "n1")
    assert shared(cluster.give(Joined("n1", b"new", "another", 8)), "n1")


@pytest.mark.parametrize("offset", range(5))
def test_a_node_whose_every_fifth_heartbeat_is_lost_stays_ready(cluster, offset):
    for beat in range(100):
        for _ in range(10):  # ten ticks per beat
            cluster.now += BEAT_S / 10
            cluster.give(Tick())
            for name in NAMES[1:]:
                cluster.give(Beat(name, REPORT))
            assert cluster.phase() == "ready"
        if beat % 5 != offset:
            cluster.give(Beat("n1", REPORT))


def test_silence_leads_by_suspicion_to_loss_within_lost_after(cluster):
    phases, told = [], []
    for _ in range(52):
        cluster.now += 0.1
        for name in NAMES[1:]:
            cluster.give(Beat(name, REPORT))
        told += cluster.give(Tick())
        if not phases or phases[-1] != cluster.phase():
            phases.append(cluster.phase())
    assert phases == ["ready", "suspect", "lost"]
    [fail] = [command for command in told if isinstance(command, MoveRequests)]
    assert fail.name == "n1" and "not heard from for 5." in fail.why
    assert told.count(AnnounceAlive()) == 1 and cluster.state.alive == ["n2", "n3"]


def test_a_second_process_of_a_name_is_refused_while_the_first_is_heard_and_taken_after(cluster):
    [refused] = cluster.give(Joined("n1", b"other", "second", 99))
    assert refused == RefuseJoin(b"other", "a node n1 (pid 7) is already in the cluster; stop it first", 2.5)
    assert cluster.state.nodes["n1"].peer == b"c-n1"
    cluster.now += 2.6
    commands = cluster.give(Joined("n1", b"other", "second", 99))
    assert shared(commands, "n1") and AnnounceAlive() in commands
    assert [c.why for c in commands if isinstance(c, MoveRequests)] == [
        "node n1 was restarted while it was answering"
    ]
    assert cluster.state.nodes["n1"].weight_bytes == 0


def test_a_node_back_on_a_new_connection_has_lost_its_requests_and_is_told_its_share(cluster):
    commands = cluster.give(Joined("n1", b"new", "i-n1", 7))
    assert [type(c) for c in commands] == [MoveRequests, Note, SendShare, AnnounceAlive]
    assert "connection to node n1 broke" in commands[0].why
    assert cluster.give(ShareLoaded("n1", 1, 10))[-1] == AnnounceAlive()


def test_a_node_that_never_served_fails_no_requests_when_it_goes():
    for goes in (Left("n1", ""), LoadFailed("n1", 1, "no memory")):
        cluster = Cluster()
        cluster.give(Joined("n1", b"c", "i", 7))
        assert [type(command) for command in cluster.give(goes)] == [Note]
        cluster.now += 60
        cluster.give(Tick())


def test_a_node_that_fails_while_it_serves_takes_its_requests_with_it(cluster):
    commands = cluster.give(LoadFailed("n2", 1, "out of memory"))
    assert [type(c) for c in commands] == [Note, MoveRequests, AnnounceAlive]
    assert cluster.state.waiting_for() == "n2 failed (out of memory)"


def test_what_a_node_says_at_length_is_kept_short(cluster):
    for event in (LoadFailed("n1", 1, "x" * 60_000), Left("n2", "y" * 60_000)):
        commands = cluster.give(event)
        assert all(len(c.why) < 2000 for c in commands if isinstance(c, MoveRequests))
    assert len(cluster.state.waiting_for()) < 4000


def test_what_is_waited_for_says_how_far_loading_is():
    cluster = Cluster()
    cluster.serve("n3")
    cluster.give(Joined("n1", b"c", "i", 7))
    cluster.give(Progressed("n1", 3_100_000, 6_800_000))
    assert cluster.state.waiting_for() == "n1 loading 3.1 of 6.8 MB, n2 absent"


def test_a_state_is_never_changed_in_place(cluster):
    before, copy = cluster.state, {name: cluster.state.nodes[name] for name in NAMES}
    cluster.give(Left("n1", ""))
    assert before.nodes == copy and cluster.state is not before
