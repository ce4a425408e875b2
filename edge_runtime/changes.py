"""Follows a change of a running cluster from its beginning to its end, and a file from one edit to the next.

Knows a client, a file and a clock; which processes run where is the caller's to say.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge_runtime.client import Client
from edge_runtime.clock import Clock
from edge_runtime.errors import ClusterError, DeadlinePassed, EdgeError, Refusal
from topology.errors import TopologyError

Say = Callable[[str], None]

REPORT_S = 2.0
POLL_S = 0.1
BUSY_S = 180.0  # how long a change that is under way already is waited for
EDIT_POLL_S = 0.5  # how often a watched file is looked at


def begin(ask: Callable[[], int], clock: Clock, say: Say) -> int:
    """Ask for a change, again while another one is under way. Returns its epoch, 0 if there is nothing to change.

    What the coordinator refuses for the file's sake is a TopologyError.
    """
    give_up_s, report_s = clock.now() + BUSY_S, clock.now()
    while True:
        try:
            return ask()
        except Refusal as refusal:
            if refusal.reason == "topology":
                raise TopologyError(str(refusal)) from refusal
            if refusal.reason != "busy" or clock.now() > give_up_s:
                raise
            if clock.now() >= report_s:
                report_s = clock.now() + REPORT_S
                say(f"waiting: {refusal}")
            clock.sleep(refusal.retry_after_s or POLL_S)


def follow(client: Client, epoch: int, clock: Clock, say: Say, ended: Callable[[], str | None]) -> str:
    """Wait until the change to `epoch` is over, telling every 2 s how far it is. Returns how it ended, in one line.

    ended  says which process of it ended by itself, None while all run: the change is then given up
    Raises ClusterError when it was rolled back.
    """
    report_s, gave_up = clock.now() + REPORT_S, ""
    while True:
        body = _status(client)
        for outcome in body["changes"]:
            if outcome["epoch"] == epoch and outcome["is_done"]:
                return str(outcome["detail"])
            if outcome["epoch"] == epoch:
                raise ClusterError(f"{outcome['detail']}; the placement is what it was")
        if not gave_up and (gave_up := ended() or ""):
            client.give_up(epoch, gave_up)
        if body["change"] is None and body["epoch"] < epoch:
            raise ClusterError(
                f"the coordinator knows nothing of epoch {epoch}: it was started anew meanwhile"
            )
        if clock.now() >= report_s:
            report_s = clock.now() + REPORT_S
            say(f"waiting: {body['change']}")
        clock.sleep(POLL_S)


def _status(client: Client) -> dict[str, Any]:
    """A coordinator that plans, or a machine that is busy, may be slow to answer."""
    try:
        return client.status()
    except DeadlinePassed:
        return client.status()


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
