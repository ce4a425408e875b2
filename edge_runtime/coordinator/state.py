"""The coordinator's picture of its nodes, as a value: `apply(state, event, now)` gives the next state and what to do.

Knows no socket, clock or file; peers are opaque bytes. The daemon carries the commands out, tests and simulator
call the same function.
"""

from typing import Literal, NamedTuple

import msgspec

from edge_runtime.errors import Whose
from edge_runtime.protocol import NodeReport
from edge_runtime.transport.heartbeat import BeatRule, Beats, beat_rule, given_up, heard, liveness

MAX_FAULT_CHARS = 1000  # of a node's own words: they travel on in messages of limited size

Phase = Literal["absent", "loading", "ready", "suspect", "lost", "failed", "left"]


class NodeRecord(msgspec.Struct, frozen=True):
    """One node of the topology file.

    progress    what it loads now, in its own words
    has_served  some process of that name was ready once
    is_coming   only a placement that is still being loaded has it
    is_drained  it left since somebody wanted that; nobody waits for it
    """

    name: str
    phase: Phase = "absent"
    peer: bytes = b""
    incarnation: str = ""
    pid: int = 0
    beats: Beats = Beats(0.0)
    bytes_done: int = 0
    bytes_total: int = 0
    progress: str = ""
    weight_bytes: int = 0
    report: NodeReport | None = None
    fault: str = ""
    whose: Whose = "cluster"
    has_served: bool = False
    numerics: str = ""
    is_coming: bool = False
    is_drained: bool = False

    @property
    def is_awaited(self) -> bool:
        """The cluster is not whole without it, and it does not serve."""
        return not (self.serves or self.is_coming or self.is_drained)

    @property
    def last_heard_s(self) -> float:
        return self.beats.heard_s

    @property
    def serves(self) -> bool:
        """Its share is loaded and it is not known to be gone."""
        return self.phase in ("ready", "suspect")


class ClusterState(msgspec.Struct, frozen=True):
    """All nodes, by name in the order of the file. `epoch` is that of the placement being served."""

    nodes: dict[str, NodeRecord]
    epoch: int
    rule: BeatRule

    @property
    def alive(self) -> list[str]:
        """Nodes that serve, in the order of the file."""
        return [record.name for record in self.nodes.values() if record.serves]

    @property
    def numerics(self) -> list[str]:
        """The kinds of kernels at work; with one kind an answer's bits do not depend on the placement."""
        return sorted({record.numerics for record in self.nodes.values() if record.numerics})

    @property
    def is_ready(self) -> bool:
        """Every node of the file serves, but for those that were drained."""
        return not any(record.is_awaited for record in self.nodes.values())

    def waiting_for(self) -> str:
        """What stands between now and ready, for people: `n3 loading 3.1 of 6.8 MB, n5 absent`."""
        parts = []
        for record in self.nodes.values():
            if not record.is_awaited:
                continue
            if record.phase == "loading":
                done, total = record.bytes_done / 1e6, record.bytes_total / 1e6
                how = f" ({record.progress})" if record.progress.startswith("fetching") else ""
                parts.append(f"{record.name} loading {done:.1f} of {total:.1f} MB{how}")
            else:
                parts.append(f"{record.name} {record.phase}" + (f" ({record.fault})" if record.fault else ""))
        return ", ".join(parts)

    def to_start(self) -> str:
        """What a person may have to do about nodes that were here and are gone; empty if none is."""
        gone = [
            record.name
            for record in self.nodes.values()
            if record.phase in ("lost", "left") and record.is_awaited
        ]
        if not gone:
            return ""
        told = gone[0] if len(gone) == 1 else "NAME"
        who = "it does" if len(gone) == 1 else f"{', '.join(gone)} do"
        return f"if {who} not come back by itself, run `edge-runtime node {told}` on its machine"


class Joined(NamedTuple):
    name: str
    peer: bytes
    incarnation: str
    pid: int
    numerics: str = ""


class Beat(NamedTuple):
    name: str
    report: NodeReport


class Progressed(NamedTuple):
    name: str
    bytes_done: int
    bytes_total: int
    what: str = ""


class ShareLoaded(NamedTuple):
    name: str
    epoch: int
    weight_bytes: int


class LoadFailed(NamedTuple):
    name: str
    epoch: int
    reason: str
    whose: Whose = "cluster"


class Left(NamedTuple):
    name: str
    reason: str
    is_drained: bool = False


class Unreachable(NamedTuple):
    """Its connection has ended: nothing can be sent to it."""

    name: str


class Expected(NamedTuple):
    """A placement that is about to be loaded has these nodes; the new ones may join."""

    names: tuple[str, ...]


class Changed(NamedTuple):
    """Another placement counts from now on. names: the nodes of the file now; weight_bytes: of those that loaded it."""

    epoch: int
    names: tuple[str, ...]
    weight_bytes: dict[str, int]


class NotChanged(NamedTuple):
    """The placement that was being loaded is off: nodes that only it had are not expected any more."""


class Tick(NamedTuple):
    """Time went by."""


NodeEvent = Joined | Beat | Progressed | ShareLoaded | LoadFailed | Left | Unreachable
Event = NodeEvent | Expected | Changed | NotChanged | Tick


class SendShare(NamedTuple):
    """Send the node its share of the placement; it answers at once if it holds it already."""

    name: str


class Greet(NamedTuple):
    """Welcome the node back so that it beats again; its share follows when it has done so for a while."""

    name: str


class RefuseJoin(NamedTuple):
    """Another process of that name is alive."""

    peer: bytes
    reason: str
    retry_after_s: float


class AnnounceAlive(NamedTuple):
    """Tell every serving node who serves. Said exactly when the set of serving nodes has changed."""


class MoveRequests(NamedTuple):
    """The requests whose home this node was need another. Said exactly when a node that served does so no more.

    has_ended  its process is gone, for all that is known; else it is only not heard, or not reached
    """

    name: str
    why: str
    has_ended: bool = True


class Note(NamedTuple):
    """A line for the log."""

    text: str


Command = SendShare | Greet | RefuseJoin | AnnounceAlive | MoveRequests | Note


def initial_state(node_names: list[str], epoch: int, heartbeat_s: float, lost_after_s: float) -> ClusterState:
    """Nobody is there yet."""
    nodes = {name: NodeRecord(name) for name in node_names}
    return ClusterState(nodes, epoch, beat_rule(heartbeat_s, lost_after_s))


def apply(state: ClusterState, event: Event, now: float) -> tuple[ClusterState, list[Command]]:
    """One step of the state machine. `now` is in monotonic seconds; nothing is changed in place."""
    if isinstance(event, NodeEvent) and event.name not in state.nodes:
        return state, [Note(f"{event.name} is no node of this cluster; what it says is ignored")]
    after, commands = _apply(state, event, now)
    if after.alive != state.alive:
        commands.append(AnnounceAlive())
    return after, commands


def gone_between(before: ClusterState, after: ClusterState) -> list[str]:
    """Nodes whose process, or the connection to it, was there before and is not after."""
    here = ("loading", "ready", "suspect")
    return [
        name
        for name, record in before.nodes.items()
        if record.phase in here
        and ((now := after.nodes.get(name)) is None or now.phase not in here or now.peer != record.peer)
    ]


def _apply(state: ClusterState, event: Event, now: float) -> tuple[ClusterState, list[Command]]:
    match event:
        case Joined():
            return _join(state, event, now)
        case Tick():
            return _tick(state, now)
        case Expected(names):
            coming = {name: NodeRecord(name, is_coming=True) for name in names if name not in state.nodes}
            return msgspec.structs.replace(state, nodes=state.nodes | coming), []
        case Changed():
            return _change(state, event)
        case NotChanged():
            kept = {name: record for name, record in state.nodes.items() if not record.is_coming}
            return msgspec.structs.replace(state, nodes=kept), []
        case Unreachable(name) if state.nodes[name].phase in ("loading", "ready", "suspect"):
            return _gone(state, name, "lost", "its connection ended")
        case Unreachable():
            return state, []
        case Left(name, reason, is_drained):
            state, said = _gone(state, name, "left", reason[:MAX_FAULT_CHARS] or "stopped")
            return _replace(state, name, is_drained=is_drained or state.nodes[name].is_drained), said
    if state.nodes[event.name].phase in ("absent", "left"):
        return state, []  # said before it left: whoever comes, greets
    match event:
        case Beat(name, report):
            return _heard(state, name, now, report=report)
        case Progressed(name, done, total, what):
            return _heard(state, name, now, bytes_done=done, bytes_total=total, progress=what)
        case ShareLoaded(name, epoch, weight_bytes):
            if epoch != state.epoch:
                return state, [Note(f"{name} loaded epoch {epoch}, epoch {state.epoch} is wanted")]
            if state.nodes[name].phase == "lost":  # it is asked again when it has returned
                return _heard(state, name, now)
            loaded: dict[str, object] = {"phase": "ready", "weight_bytes": weight_bytes, "has_served": True}
            state = _replace(state, name, beats=Beats(now), fault="", **loaded)
            return state, [Note(f"{name} ready: {weight_bytes / 1e6:.1f} MB of weights")]
        case LoadFailed(name, epoch, reason, whose):
            reason = reason[:MAX_FAULT_CHARS]
            if epoch != state.epoch:
                return state, [Note(f"{name} failed to load epoch {epoch}, which is not wanted: {reason}")]
            commands: list[Command] = [Note(f"{name} failed: {reason}")]
            if state.nodes[name].serves:
                commands.append(MoveRequests(name, f"node {name} failed while it was answering ({reason})"))
            return _replace(
                state, name, phase="failed", beats=Beats(now), fault=reason, whose=whose
            ), commands


def _join(state: ClusterState, event: Joined, now: float) -> tuple[ClusterState, list[Command]]:
    known = state.nodes[event.name]
    commands: list[Command] = []
    returned = known.incarnation == event.incarnation
    if returned and known.serves and known.peer == event.peer:  # it greeted twice; nothing broke
        return _replace(state, event.name, beats=Beats(now)), [SendShare(event.name)]
    is_another = known.incarnation and not returned and known.phase not in ("lost", "left", "absent")
    if is_another and liveness(known.beats, now, state.rule) == "alive":
        reason = f"a node {event.name} (pid {known.pid}) is already in the cluster; stop it first"
        return state, [RefuseJoin(event.peer, reason, state.rule.suspect_after_s)]
    if returned and known.phase == "lost":  # the same process, no longer cut off: on probation
        state = _replace(state, event.name, peer=event.peer)
        state, more = _heard(state, event.name, now)
        return state, [Greet(event.name), *more]
    if known.serves:
        what = (
            f"the connection to node {event.name} broke" if returned else f"node {event.name} was restarted"
        )
        commands.append(MoveRequests(event.name, f"{what} while it was answering"))
    state = _replace(
        state,
        event.name,
        phase="loading",
        peer=event.peer,
        incarnation=event.incarnation,
        pid=event.pid,
        numerics=event.numerics,
        beats=Beats(now),
        bytes_done=0,
        bytes_total=0,
        progress="",
        weight_bytes=known.weight_bytes if returned else 0,
        fault="",
        is_drained=False,
    )
    word = "is back" if returned else "joined"
    commands.append(Note(f"{event.name} {word} (pid {event.pid})"))
    if len(kinds := state.numerics) > 1:
        commands.append(
            Note(f"nodes compute differently ({', '.join(kinds)}): last bits depend on the placement")
        )
    return state, [*commands, SendShare(event.name)]


def _change(state: ClusterState, event: Changed) -> tuple[ClusterState, list[Command]]:
    nodes: dict[str, NodeRecord] = {}
    for name in event.names:
        record = state.nodes.get(name, NodeRecord(name))
        if name in event.weight_bytes and record.phase in ("loading", "ready", "suspect"):
            changes = {
                "phase": "ready",
                "weight_bytes": event.weight_bytes[name],
                "has_served": True,
                "fault": "",
            }
            record = msgspec.structs.replace(record, **changes)
        nodes[name] = msgspec.structs.replace(record, is_coming=False)
    commands: list[Command] = [Note(f"epoch {event.epoch} counts from now on")]
    for name, record in state.nodes.items():
        if name not in nodes:
            commands.append(Note(f"{name} is not in the topology file any more"))
            if record.serves:
                commands.append(MoveRequests(name, f"node {name} was taken out of the cluster"))
    return msgspec.structs.replace(state, nodes=nodes, epoch=event.epoch), commands


def _heard(
    state: ClusterState, name: str, now: float, **changes: object
) -> tuple[ClusterState, list[Command]]:
    """A node gave a sign of life, with news of itself."""
    commands: list[Command] = []
    record = state.nodes[name]
    phase, beats = record.phase, heard(record.beats, now, state.rule)
    if phase == "suspect":
        phase = "ready"
    elif phase == "lost" and beats.is_lost:
        changes["fault"] = f"heard again, not yet for {state.rule.return_after_s:g} s without a gap"
    elif phase == "lost":  # it was frozen or cut off, not dead: see whether it still holds its share
        phase = "loading"
        changes["fault"] = ""
        commands = [
            Note(f"{name} is back: heard for {state.rule.return_after_s:g} s without a gap"),
            SendShare(name),
        ]
    return _replace(state, name, phase=phase, beats=beats, **changes), commands


def _tick(state: ClusterState, now: float) -> tuple[ClusterState, list[Command]]:
    commands: list[Command] = []
    for record in list(state.nodes.values()):
        if record.phase not in ("loading", "ready", "suspect"):
            continue
        silence = now - record.last_heard_s
        found = liveness(record.beats, now, state.rule)
        if found == "lost":
            state, more = _gone(
                state, record.name, "lost", f"not heard from for {silence:.1f} s", has_ended=False
            )
            commands += more
        elif found == "suspect" and record.phase == "ready":
            state = _replace(state, record.name, phase="suspect")
            commands.append(Note(f"{record.name} is suspect: silent for {silence:.1f} s"))
    return state, commands


def _gone(
    state: ClusterState, name: str, phase: Phase, reason: str, *, has_ended: bool = True
) -> tuple[ClusterState, list[Command]]:
    known = state.nodes[name]
    if known.phase in ("left", "absent"):
        return state, []
    commands: list[Command] = [Note(f"{name} {phase}: {reason}")]
    if known.serves:
        word = "left" if phase == "left" else "was lost"
        why = f"node {name} {word} ({reason}) while it was answering"
        commands.append(MoveRequests(name, why, has_ended=has_ended))
    beats = given_up(known.beats) if phase == "lost" else known.beats
    return _replace(state, name, phase=phase, beats=beats, fault=reason), commands


def _replace(state: ClusterState, name: str, **changes: object) -> ClusterState:
    record = msgspec.structs.replace(state.nodes[name], **changes)
    return msgspec.structs.replace(state, nodes={**state.nodes, name: record})
