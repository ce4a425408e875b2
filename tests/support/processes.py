"""Start and stop the real command line, for tests that need whole processes.

Waits for lines, exits and files' ends, each with a deadline, and never sleeps. Knows nothing of what a command does.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self

import psutil

from edge_runtime.clock import SystemClock

_CLOCK = SystemClock()


class Finished(NamedTuple):
    """How a command ended: its exit code and everything it said."""

    exit_code: int
    stdout: str
    stderr: str


def free_ports(count: int) -> list[int]:
    """Return `count` different loopback ports that nobody listens on now.

    They are held open together until all are known, so that one call never returns a port twice.
    """
    held = [socket.socket() for _ in range(count)]
    try:
        for holder in held:
            holder.bind(("127.0.0.1", 0))
        return [holder.getsockname()[1] for holder in held]
    finally:
        for holder in held:
            holder.close()


def free_port() -> int:
    """Return one loopback port that nobody listens on now."""
    return free_ports(1)[0]


def accepts_connections(port: int, host: str = "127.0.0.1") -> bool:
    """Say whether somebody listens on the port now."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


class CliProcess:
    """One running `edge-runtime ARGUMENTS`, in a process group of its own.

    As a context manager it is stopped at the end, with all that it started and did not detach. `program` replaces
    the command itself, and `stop_deadline_s` is how long a polite request to end may take before the group is killed.
    """

    def __init__(
        self,
        *arguments: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        program: Sequence[str] | None = None,
        stop_deadline_s: float = 15.0,
    ) -> None:
        self._argv = [*(program or _command()), *(str(argument) for argument in arguments)]
        self._stop_deadline_s = stop_deadline_s
        self._process = subprocess.Popen(
            self._argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            cwd=cwd
            if cwd is None or cwd.is_dir()
            else None,  # a folder that is gone must not keep `down` from working
            start_new_session=True,
        )
        self._changed = threading.Condition()
        self._lines: list[str] = []  # of both streams, in the order they came
        self._by_stream: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._open_streams = 2
        self._readers = [
            threading.Thread(target=self._read, args=(stream, name), daemon=True)
            for stream, name in ((self._process.stdout, "stdout"), (self._process.stderr, "stderr"))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stdout(self) -> str:
        with self._changed:
            return "".join(self._by_stream["stdout"])

    @property
    def stderr(self) -> str:
        with self._changed:
            return "".join(self._by_stream["stderr"])

    def wait_for_line(self, pattern: str, deadline_s: float = 60.0) -> re.Match[str]:
        """Return the first line of either stream in which `pattern` is found, those already seen included.

        Fails with all output when the command ends, or `deadline_s` seconds pass, without such a line.
        """
        looked_at = 0
        until = _CLOCK.now() + deadline_s
        with self._changed:
            while True:
                for line in self._lines[looked_at:]:
                    if found := re.search(pattern, line):
                        return found
                looked_at = len(self._lines)
                left_s = until - _CLOCK.now()
                if self._open_streams == 0 or left_s <= 0 or not self._changed.wait(left_s):
                    why = "it ended" if self._open_streams == 0 else f"{deadline_s} s passed"
                    raise AssertionError(f"no line with {pattern!r} before {why}; {self._story()}")

    def finish(self, deadline_s: float = 60.0) -> Finished:
        """Wait until the command ends by itself."""
        try:
            exit_code = self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.stop()
            raise AssertionError(f"still running after {deadline_s} s; {self._story()}") from None
        self._join_readers()
        return Finished(exit_code, self.stdout, self.stderr)

    def stop(self, with_signal: int = signal.SIGTERM) -> Finished:
        """Ask the command to end, kill its whole group if it does not, and return how it ended."""
        if self._process.poll() is None:
            self._process.send_signal(with_signal)
            try:
                self._process.wait(self._stop_deadline_s)
            except subprocess.TimeoutExpired:
                pass  # the group is killed below
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # what it started and left in its group
        except ProcessLookupError:
            pass
        exit_code = self._process.wait(self._stop_deadline_s)
        self._join_readers()
        return Finished(exit_code, self.stdout, self.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _read(self, stream: IO[str], name: str) -> None:
        with stream:
            for line in stream:
                with self._changed:
                    self._lines.append(line)
                    self._by_stream[name].append(line)
                    self._changed.notify_all()
        with self._changed:
            self._open_streams -= 1
            self._changed.notify_all()

    def _join_readers(self) -> None:
        """Wait for the ends of both streams, which a detached grandchild must not hold open."""
        for reader in self._readers:
            reader.join(self._stop_deadline_s)
            assert not reader.is_alive(), f"something it started still holds its output; {self._story()}"

    def _story(self) -> str:
        with self._changed:
            said = "".join(self._lines)
        return f"{' '.join(self._argv)} said:\n{said}"


def run_cli(
    *arguments: str | Path,
    deadline_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Finished:
    """Run one command to its end and return how it ended."""
    with CliProcess(*arguments, env=env, cwd=cwd) as process:
        return process.finish(deadline_s)


def wait_until_gone(pids: Iterable[int], deadline_s: float = 15.0) -> None:
    """Wait until none of these processes runs; a zombie, which only its parent can remove, counts as gone."""
    running = []
    for pid in pids:
        try:
            running.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    until = _CLOCK.now() + deadline_s
    left = running
    while left and _CLOCK.now() < until:
        _, left = psutil.wait_procs(left, timeout=0.05)
        left = [process for process in left if not _is_zombie(process)]
    assert not left, f"still running after {deadline_s} s: {left}"


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def processes_with(word: str) -> Sequence[psutil.Process]:
    """Return the running processes, this one apart, that have `word` somewhere in their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and any(word in argument for argument in process.cmdline()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _command() -> list[str]:
    """Return how the installed `edge-runtime` starts under this very interpreter."""
    script = Path(sys.executable).with_name("edge-runtime")
    if not script.exists():
        raise FileNotFoundError(f"{script} is missing: `make install` puts it there")
    return [sys.executable, str(script)]
