"""What can be wrong with a cluster on paper. All of it is the user's to mend, and is told in full."""

import sys
from collections.abc import Iterable
from typing import NamedTuple


class TopologyError(Exception):
    """Root of this package's errors; the command line prints it without a traceback and exits with 2."""


class Fault(NamedTuple):
    """One thing to mend in a topology file.

    line     counted from 1; the table's line where a key is missing
    key      where it stands, as a reader would say it: `[[node]] desk: memory`
    message  what was found, what is allowed
    """

    line: int
    key: str
    message: str

    def __str__(self) -> str:
        return (
            f"line {self.line}, {self.key}: {self.message}"
            if self.key
            else f"line {self.line}: {self.message}"
        )


class ClusterFileError(TopologyError):
    """A topology file with every one of its faults, in the order of their lines."""

    def __init__(self, source: str, faults: Iterable[Fault]) -> None:
        self.source = source
        self.faults = tuple(sorted(faults))
        if len(self.faults) == 1:
            super().__init__(f"{source}, {self.faults[0]}")
        else:
            lines = "".join(f"\n  {fault}" for fault in self.faults)
            super().__init__(f"{source} has {len(self.faults)} faults:{lines}")


class UnknownNode(TopologyError):
    """A name that no node of the cluster has; lists those there are."""


class PlacementError(TopologyError):
    """The model does not fit.

    node             whose memory is too small, None if it is the cluster's as a whole
    needed_bytes     the least that would do
    available_bytes  what there is
    """

    def __init__(
        self, message: str, *, needed_bytes: int, available_bytes: int, node: str | None = None
    ) -> None:
        super().__init__(message)
        self.node = node
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class MigrationError(PlacementError):
    """Old and new placement both fit, but nothing can be moved from one to the other without an expert losing its host."""


def why_unread(error: ValueError | RecursionError) -> str:
    """What is wrong with text that was to be TOML or JSON, for who wrote it: what Python says of a number of thousands of
    digits is advice for programmers.
    """
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text, by byte {error.start + 1}"
    if "string conversion" in str(error):
        return f"a number has more than {sys.get_int_max_str_digits()} digits"
    return str(error)
