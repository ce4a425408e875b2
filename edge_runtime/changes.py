"""Follows a change of a running cluster from its beginning to its end, and a file from one edit to the next.

Knows a client, a file and a clock; which processes run where is the caller's to say.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

from edge_runtime.client import LOST_S, RECONNECT_S, Client
from edge_runtime.clock import Clock
from edge_runtime.errors import ClusterError, EdgeError, PeerError, Refusal
from edge_runtime.log import Reminder
from topology.errors import TopologyError

Say = Callable[[str], None]

POLL_S = 0.1
NODES_BACK_S = 10.0  # how long the nodes of a coordinator that is back are waited for
BUSY_S = 180.0  # how long a change that is under way already is waited for
EDIT_POLL_S = 0.5  # how often a watched file is looked at


def begin(ask: Callable[[], int], clock: Clock, say: Say, come_back: Callable[[], None]) -> int:
    """Ask for a change, again while another one is under way. Returns its epoch, 0 if there is nothing to change.

    come_back  waits for a coordinator that went away before it answered. Then it is asked again: what was begun already
               is a change under way, or nothing to change any more
    What the coordinator refuses for the file's sake is a TopologyError.
    """
    give_up_s, reminder = clock.now() + BUSY_S, Reminder(clock.now())
    while True:
        try:
            return ask()
        except Refusal as refusal:
            if refusal.reason == "topology":
                raise TopologyError(str(refusal)) from refusal
            if refusal.reason != "busy" or clock.now() > give_up_s:
                raise
            if reminder.is_due(clock.now(), str(refusal)):
                say(f"waiting: {refusal}")
            clock.sleep(refusal.retry_after_s or POLL_S)
        except PeerError as error:
            if clock.now() > give_up_s:
                raise
            say(f"{error}; asking again when it is back")
            come_back()


def follow(
    client: Client,
    epoch: int,
    clock: Clock,
    say: Say,
    ended: Callable[[], str | None],
    come_back: Callable[[], None],
) -> str:
    """Wait until the change to `epoch` is over, telling how far it is. Returns how it ended, in one line.

    ended      says which process of it ended by itself, None while all run: the change is then given up
    come_back  waits for a coordinator that went away; the next one knows whether the change counted by then
    Raises ClusterError when it was rolled back, or lost with the coordinator.
    """
    reminder, gave_up = Reminder(clock.now()), ""
    while True:
        try:
            body = client.status()
        except (PeerError, Refusal) as error:  # it plans, or the machine is busy; or it is another one by now
            say(f"{error}; waiting for the coordinator")
            come_back()
            continue
        is_under_way = (body["change"] or "").startswith(f"epoch {epoch}:")
        for outcome in body["changes"]:
            if outcome["epoch"] == epoch and outcome["is_done"] and not is_under_way:
                return str(outcome["detail"])
            if outcome["epoch"] == epoch and not outcome["is_done"]:
                raise ClusterError(f"{outcome['detail']}; the placement is what it was")
        if not gave_up and (gave_up := ended() or ""):
            client.give_up(epoch, gave_up)
        if body["change"] is None and not any(outcome["epoch"] == epoch for outcome in body["changes"]):
            raise ClusterError(
                f"epoch {epoch} never counted: the coordinator was started anew meanwhile and goes on with epoch "
                f"{body['epoch']}, as before; ask for the change again"
            )
        if reminder.is_due(clock.now(), body["change"]):
            say(f"waiting: {body['change']}")
        clock.sleep(POLL_S)


def come_back(client: Client, clock: Clock, say: Say) -> None:
    """Wait for a coordinator that went away, and for its nodes to be back with it. ClusterError after a minute."""
    until, reminder = clock.now() + LOST_S, Reminder(clock.now())
    while True:
        client.reconnect()
        try:
            client.connect(RECONNECT_S)
            break
        except PeerError as error:
            if clock.now() > until:
                raise ClusterError(
                    f"{error}: the coordinator did not come back within {LOST_S:g} s; once it is there, "
                    "`edge-runtime status` shows which epoch counts"
                ) from error
        if reminder.is_due(clock.now()):
            say(f"waiting for the coordinator at {client.address}, {clock.now() - reminder.began_s:.0f} s")
        clock.sleep(POLL_S)
    until = clock.now() + NODES_BACK_S
    with contextlib.suppress(PeerError, Refusal):  # whoever asks next is told
        while clock.now() < until and not client.status()["ready"]:
            clock.sleep(POLL_S)


def watch(file: Path, clock: Clock, apply: Callable[[], None], say: Say) -> None:
    """Call `apply` now and after every edit of the file, for ever. An edit that is refused is told; what runs stays.

    A file that is just being written is left until it is the same twice.
    """
    before = done = None
    while True:
        stamp = _stamp(file)
        if stamp is not None and stamp != done and stamp == before:
            done = stamp
            try:
                apply()
            except (EdgeError, TopologyError) as error:
                say(f"not applied: {error}")
        before = stamp
        clock.sleep(EDIT_POLL_S)


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except FileNotFoundError:  # between the two halves of a rename
        return None
    return found.st_mtime_ns, found.st_size
