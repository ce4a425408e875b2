"""Emulated links against real ones: network namespaces, veth and tbf. A second opinion that needs root."""

import queue
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager

import pytest

from edge_runtime.transport.keys import new_keys
from tests.support.namespaces import RECEIVER_HOST, NotAllowed, two_machines

RATE_BPS = 100e6
SOON_S = 20.0


@pytest.fixture
def machines():
    with ExitStack() as stack:
        try:
            made = stack.enter_context(two_machines("100mbit"))
        except NotAllowed as error:
            pytest.skip(str(error))
        yield made


class Probe:
    """Both ends of one link."""

    def __init__(self, receiver, sender, address):
        self.receiver, self.sender, self.address = receiver, sender, address
        self.lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.receiver.stdout:
            call_id, time_s, num_bytes = line.split()
            self.lines.put((int(call_id), float(time_s), int(num_bytes)))

    def send(self, count):
        self.sender.stdin.write(f"{count}\n")
        self.sender.stdin.flush()

    def next(self, timeout_s=SOON_S):
        """The next message that came, as (call id, time, bytes); None if none did."""
        try:
            return self.lines.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def rate_bps(self, count=100):
        """Of the messages after the first 20, which fill the link."""
        self.send(count)
        came = [self.next() for _ in range(count)]
        assert [call_id for call_id, *_ in came] == list(range(1, count + 1))
        counted = came[20:]
        return sum(num_bytes for *_, num_bytes in counted) * 8 / (counted[-1][1] - came[19][1])


@contextmanager
def probe(keys, address, *more, receiver=(), sender=()):
    """receiver, sender: how the commands of the two ends begin."""
    program = [sys.executable, "-m", "tests.support.link_probe"]
    with ExitStack() as stack:

        def start(prefix, *words):
            process = subprocess.Popen(
                [*prefix, *program, *words, *more],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        receiving = start(receiver, "receive", keys, address)
        where = receiving.stdout.readline().strip()
        sending = start(sender, "send", keys, where)
        assert sending.stdout.readline() == "up\n"
        yield Probe(receiving, sending, where)


def real(machines, tmp_path):
    new_keys(tmp_path, ["sender", "receiver"])
    return probe(
        str(tmp_path),
        f"{RECEIVER_HOST}:5999",
        receiver=machines.prefix("b"),
        sender=machines.prefix("a"),
    )


def test_an_emulated_link_carries_what_a_real_one_of_its_rate_does(machines, tmp_path):
    """The real one spends 5 percent on headers of TCP, IP and Ethernet, which the emulated one does not know."""
    with real(machines, tmp_path) as link:
        real_bps = link.rate_bps()
    with probe("-", "127.0.0.1:0", str(RATE_BPS)) as link:
        emulated_bps = link.rate_bps()
    print(f"real {real_bps / 1e6:.1f} Mbit/s, emulated {emulated_bps / 1e6:.1f} Mbit/s")
    assert emulated_bps == pytest.approx(RATE_BPS, rel=0.03)
    assert 0.88 < real_bps / emulated_bps < 1.02


def test_a_real_cut_that_is_short_delays_messages_and_loses_none_as_the_emulated_one(machines, tmp_path):
    with real(machines, tmp_path) as link:
        link.send(1)
        assert link.next()[0] == 1
        machines.cut(True)
        link.send(3)
        assert link.next(0.5) is None
        machines.cut(False)
        assert [link.next()[0] for _ in range(3)] == [2, 3, 4]
