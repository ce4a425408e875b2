"""Starts daemons on this machine through one process that has imported what they need, `edge_runtime.forker`.

Importing takes 4 s of processor time (AMD EPYC, AVX2), which each daemon took for itself; a fork takes 0.03 s.
Knows words, logs and processes; nothing of clusters.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec
import psutil

from edge_runtime.clock import SystemClock
from edge_runtime.config import ProcessRecord, is_running, record_process
from edge_runtime.errors import ClusterError
from edge_runtime.log import Reminder

START_S = 120.0  # 4 s when nothing else runs
POLL_S = 0.02
CODE_UNKNOWN = 256  # of a process whose spawner went away before it; no process ends with that
UNCLAIMED_S = 5.0  # until what was ordered has been forked or never will be; a fork takes 0.03 s
CLOCK = SystemClock()


class Order(msgspec.Struct, frozen=True):
    """A daemon to start: the words after `edge-runtime`, the file it writes to, what its environment has besides."""

    words: list[str]
    log: str
    env: dict[str, str]


class Spawned:
    """A process that a spawner forked, with what is used here of `subprocess.Popen`."""

    def __init__(self, spawner: "Spawner", pid: int) -> None:
        self.pid = pid
        self._spawner = spawner
        self._record: ProcessRecord | None = None
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
            self._record = record_process(str(pid), pid)

    def poll(self) -> int | None:
        """Its exit code, negative for the signal that killed it; None while it runs."""
        code = self._spawner.code_of(self.pid)
        if code is None and self._spawner.has_ended():
            return None if self._record is not None and is_running(self._record) else CODE_UNKNOWN
        return code

    def wait(self, timeout_s: float = START_S) -> int:
        """Its exit code, once it has ended. Raises ClusterError when time is over."""
        until = CLOCK.now() + timeout_s
        while (code := self.poll()) is None:
            if CLOCK.now() > until:
                raise ClusterError(f"process {self.pid} still runs after {timeout_s:.0f} s")
            CLOCK.sleep(POLL_S)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once, unless it has ended."""
        self.send_signal(signal.SIGKILL)


class Spawner:
    """The forking process, seen from the one that wants daemons. What was forked outlives both."""

    def __init__(self, report: Callable[[str], None] = lambda line: None) -> None:
        """Start it; it imports while the caller goes on.

        report  is told how long a first daemon has waited for the imports
        """
        self._report = report
        self._codes: dict[int, int] = {}
        self._pids: list[int] = []
        """All that it forked, in that order."""
        self._num_orders = 0
        self._stillborn = False
        self._unread = b""
        self._has_ended = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as this object
        self._process = subprocess.Popen(
            # -P: a folder called `topology` where `up` is run is not our package
            [sys.executable, "-P", "-m", "edge_runtime.forker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1"),
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        weakref.finalize(self, _end, self._process, self._errors)

    def start(self, words: Sequence[str], log: Path, env: Mapping[str, str]) -> Spawned:
        """Fork a daemon that runs `edge-runtime WORDS` and writes to `log`. Raises ClusterError where it cannot."""
        order = Order(list(words), str(log), dict(env))
        assert self._process.stdin is not None
        self._num_orders += 1
        with contextlib.suppress(BrokenPipeError):  # it has ended: said below
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
        reminder = Reminder(CLOCK.now())
        while len(self._pids) < self._num_orders:
            self._read(POLL_S)
            waited_s = CLOCK.now() - reminder.began_s
            if self._has_ended or self._stillborn or waited_s > START_S:
                raise ClusterError(
                    f"`edge-runtime {' '.join(words)}` could not be started here: {self._why()}"
                )
            if reminder.is_due(CLOCK.now()):
                self._report(f"waiting for Python to load what daemons need, {waited_s:.0f} s")
        return Spawned(self, self._pids[-1])

    def num_started(self) -> int:
        """How many processes it was asked for."""
        return self._num_orders

    def undo(self, before: int) -> list[int]:
        """Kill what it forked after the first `before`, also what a stopped `start` did not come to know. Their numbers.

        Where an order is still open, the spawner ends too: else it would be carried out when nobody waits.
        """
        if len(self._pids) < self._num_orders:
            self._process.kill()
            until = CLOCK.now() + UNCLAIMED_S
            while (
                not self._has_ended and CLOCK.now() < until
            ):  # a fork that was just made tells its number first
                self._read(POLL_S)
        killed = [Spawned(self, pid) for pid in self._pids[before:]]
        for process in killed:
            process.kill()
            process.wait()
        return [process.pid for process in killed]

    def code_of(self, pid: int) -> int | None:
        """The exit code of a process it forked, None while that is not known."""
        self._read(0.0)
        return self._codes.get(pid)

    def has_ended(self) -> bool:
        """Whether it has gone, so that no more exit codes come."""
        return self._has_ended

    def _why(self) -> str:
        if self._stillborn:
            return "it ended before it began"
        if not self._has_ended:
            return f"Python took more than {START_S:.0f} s to load it"
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").split("\n")
        line = next((line for line in reversed(said) if line.strip()), "it said nothing")
        return f"the process that forks daemons ended: {line}"

    def _read(self, timeout_s: float) -> None:
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        if self._has_ended or not select.select([output], [], [], timeout_s)[0]:
            return
        content = os.read(output, 1 << 16)
        if not content:
            self._has_ended = True
            self._process.wait()
            return
        *lines, self._unread = (self._unread + content).split(b"\n")
        for line in lines:
            pid, *code = map(int, line.split())
            if code:
                self._codes[pid] = code[0]
                self._stillborn |= pid not in self._pids
            else:
                self._pids.append(pid)


def _end(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    """End a spawner; what it forked goes on."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, errors):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
