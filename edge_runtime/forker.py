"""The process that forks daemons: `python -m edge_runtime.forker`, started by `Spawner`.

What each daemon has to itself is as if it had been started alone: a session, an environment, a log, a command line.
Orders come in as lines of JSON on standard input; `pid`, and later `pid code`, go out as lines on standard output. It
ends when its input does; what it has forked goes on.
"""

import contextlib
import gc
import importlib
import os
import select
import signal
import sys
from collections.abc import Iterator

import msgspec
from setproctitle import setproctitle

from edge_runtime.spawner import Order

IMPORTED = ("edge_runtime.cli", "edge_runtime.coordinator.daemon", "edge_runtime.node.daemon")


def serve() -> None:
    """Fork for each order on standard input until that ends; returns in the forked processes only."""
    for module in IMPORTED:
        with contextlib.suppress(ImportError):  # who needs it says so in a log that is read
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # else the first collection in each daemon copies what all could share
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    for line in _lines(woken):
        order = msgspec.json.decode(line, type=Order)
        if os.fork() == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(woken)
            os.close(wake)
            _leave(order)
            return
    os._exit(0)


def _lines(woken: int) -> Iterator[bytes]:
    """Lines of standard input as they come; meanwhile the ends of forked processes are told on standard output.

    woken  becomes readable when one has ended
    """
    unread = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 1 << 10)
            _tell_ends()
        if 0 in ready:
            content = os.read(0, 1 << 16)
            if not content:
                return
            *lines, unread = (unread + content).split(b"\n")
            yield from lines


def _tell_ends() -> None:
    with contextlib.suppress(ChildProcessError, BrokenPipeError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            os.write(1, b"%d %d\n" % (found[0], os.waitstatus_to_exitcode(found[1])))


def _leave(order: Order) -> None:
    """Make this forked process one of its own, and tell its number when it looks like it."""
    os.setsid()
    os.environ.update(order.env)
    sys.argv = ["edge-runtime", *order.words]
    setproctitle(" ".join(sys.argv))
    os.write(1, b"%d\n" % os.getpid())
    for number, (path, flags) in enumerate(
        ((os.devnull, os.O_RDONLY), (order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)


if __name__ == "__main__":
    serve()
    from edge_runtime.cli import main

    main()
