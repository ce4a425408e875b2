"""The tree of errors: whose fault it is decides who handles it.

`UserError` is told to the user in one sentence, `PeerError` costs only the peer, `ClusterError` is told to
the client as the cluster's failure. Anything that is none of these is a fault of ours and ends the process.
"""

from collections.abc import Sequence
from typing import Literal

EXIT_DONE = 0
EXIT_OURS = 1
EXIT_USER = 2
EXIT_CLUSTER = 3

Whose = Literal["user", "cluster"]
"""Whose fault something is, where an error crosses a wire."""

SHOWN_CHARS = 160  # of a value that a message quotes
MESSAGE_CHARS = 2000


def cut(text: str) -> str:
    """What a message shows of a text that may be of any length."""
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


def one_line(text: str) -> str:
    """A message as one line and no page, whatever it quotes."""
    if len(text) > MESSAGE_CHARS:
        text = f"{text[: MESSAGE_CHARS // 2]} ... {text[-MESSAGE_CHARS // 2 :]}"
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class EdgeError(Exception):
    """Root of every error that this runtime foresees."""

    exit_code = EXIT_OURS


class UserError(EdgeError):
    """The user's input is at fault. Printed as one sentence, no traceback, exit code 2.

    What it quotes may be anything, names of tensors and keys of a config too: the message is one line all the same,
    and no page. Only a list of faults has several, one for each.
    """

    exit_code = EXIT_USER

    def __init__(self, detail: str, *more: str) -> None:
        """more: faults that were found beside the first."""
        super().__init__("\n".join(one_line(each) for each in (detail, *more)))


class ConfigError(UserError):
    """A settings file, key or value is wrong; says what is allowed."""


class CheckpointError(UserError):
    """A model folder is wrong; names file and tensor, expected and found."""


class ArtifactError(UserError):
    """A calibration artifact is not what is needed; says which, what was found and expected, and what to do."""


class CorpusError(UserError):
    """Text that was given cannot be read or is too little; names file and line, or found and needed."""


class RequestError(UserError):
    """A prompt or a request's options cannot be served; says the limit and the value.

    field  which option is wrong, for clients whose API names it; None where it is not one
    """

    def __init__(self, detail: str, field: str | None = None, *, more: Sequence[str] = ()) -> None:
        super().__init__(detail, *more)
        self.field = field


class ClusterError(EdgeError):
    """The cluster cannot do what was asked: no answer, no host, no memory. Exit code 3."""

    exit_code = EXIT_CLUSTER


class PeerError(ClusterError):
    """A peer misbehaved or went away. The peer is refused or dropped; the others are served."""


class ProtocolError(PeerError):
    """Bytes that are not a message of ours: names peer, message and what was expected."""


class PeerLost(PeerError):
    """The other end is gone; says who and when it was last heard from."""


class DeadlinePassed(PeerError):
    """No answer in time; says what was awaited and for how long."""


class Refusal(ClusterError):
    """An ordinary 'no' of a peer: busy, not resident, wrong epoch, version mismatch.

    reason         one word that programs can match: `busy`, `not_resident`, `version`, `model`, `handshake` ...
    retry_after_s  seconds after which trying again makes sense, None if it never does
    """

    def __init__(self, reason: str, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.reason = reason
        self.retry_after_s = retry_after_s
