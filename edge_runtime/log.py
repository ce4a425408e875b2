"""Set up logging once per process: an event with its values on one line, on stderr.

A log line is for people and grep. Nothing in the runtime reads one back, and no decision depends on the level.
"""

import logging
import os
import sys
from typing import TextIO

from edge_runtime.errors import ConfigError

LEVEL_VARIABLE = "EDGE_LOG"
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def setup_logging(process: str = "", *, default: str = "info", stream: TextIO | None = None) -> None:
    """Send this process's events to `stream` (stderr), each on one line that opens with time, level and `process`.

    The level is $EDGE_LOG, else `default`: `debug`, `info`, `warning` or `error`, optionally followed by
    levels of single packages: `info,edge_runtime.transport=debug`. Calling it again replaces the first set-up.
    """
    base, parts = _parse_levels(os.environ.get(LEVEL_VARIABLE) or default)
    output = logging.StreamHandler(stream or sys.stderr)
    output.setFormatter(_OneLine(process))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(output)
    root.setLevel(base)
    for name, level in parts.items():
        logging.getLogger(name).setLevel(level)


class _OneLine(logging.Formatter):
    """`14:02:11.305 info  node-3 edge_runtime.node.daemon: ready: 96 experts, 13.2 MB`.

    A line break inside an event is shown as `\\n`, so that what a peer sent cannot look like a line of ours. The
    traceback of an error of our own follows its event as Python prints it.
    """

    def __init__(self, process: str) -> None:
        middle = f"{process} " if process else ""
        super().__init__(
            f"%(asctime)s.%(msecs)03d %(levelword)-7s {middle.replace('%', '%%')}%(name)s: %(event)s"
        )
        self.default_time_format = "%H:%M:%S"
        self.datefmt = "%H:%M:%S"

    def usesTime(self) -> bool:
        return True

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.levelword = record.levelname.lower()
        record.event = "".join(_escaped(letter) for letter in record.getMessage())
        return super().formatMessage(record)


class Reminder:
    """When a wait is told of: 2 s after it began, then 4, 8 and 16 s after the last time and every 30 s from then on, so that a
    long one does not fill a screen or a log. Something else to say is told after 2 s again.
    """

    FIRST_S, MOST_S = 2.0, 30.0

    def __init__(self, now: float) -> None:
        self.restart(now)

    def restart(self, now: float) -> None:
        """Another wait begins."""
        self.began_s = self._said_s = now
        self._said, self._pause_s = "", self.FIRST_S

    def is_due(self, now: float, what: str = "") -> bool:
        """Whether to tell of it now, which counts as told. `what` is what is awaited, without times."""
        if now - self._said_s < (self._pause_s if what == self._said else self.FIRST_S):
            return False
        self._pause_s = min(2 * self._pause_s if what == self._said else 2 * self.FIRST_S, self.MOST_S)
        self._said, self._said_s = what, now
        return True


def _escaped(letter: str) -> str:
    return letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")


def check_levels() -> None:
    """ConfigError where $EDGE_LOG is set to what names no levels."""
    _parse_levels(os.environ.get(LEVEL_VARIABLE) or "info")


def _parse_levels(text: str) -> tuple[int, dict[str, int]]:
    base = logging.INFO
    parts: dict[str, int] = {}
    for item in text.split(","):
        name, _, word = item.strip().rpartition("=")
        level = _LEVELS.get(word.lower())
        if level is None:
            allowed = ", ".join(_LEVELS)
            raise ConfigError(f"{LEVEL_VARIABLE}={text!r} names the level {word!r}; allowed are {allowed}")
        if name:
            parts[name] = level
        else:
            base = level
    return base, parts
