"""Processes that answer ExpertCall over real sockets: output row i of a reply is the call's row of pair i, doubled."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy

from edge_runtime.protocol import Envelope, ExpertCall, ExpertReply, Hello, Message, Welcome
from edge_runtime.transport.endpoint import Server


def answer(envelope: Envelope) -> tuple[Message, tuple[numpy.ndarray, ...]]:
    match envelope.message:
        case Hello():
            return Welcome("echo"), ()
        case ExpertCall(layer=layer):
            rows, pair_rows, _ = envelope.tensors
            return ExpertReply(layer), (rows[pair_rows].astype(numpy.float32) * 2,)
    raise AssertionError(f"an echo is not asked {envelope.message}")


def serve() -> None:
    """Answer for ever; the address is the first line of output."""
    with Server("127.0.0.1:0") as server:
        print(server.address, flush=True)
        while True:
            if received := server.receive(60.0):
                peer, envelope = received
                message, tensors = answer(envelope)
                server.send(peer, message, call_id=envelope.call_id, tensors=tensors)


@contextmanager
def echo_process() -> Iterator[tuple[subprocess.Popen, str]]:
    """A process and the address where it answers. It is gone afterwards."""
    command = [sys.executable, "-c", "from tests.support.expert_echo import serve; serve()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()
