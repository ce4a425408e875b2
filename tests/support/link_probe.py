"""One end of a link, as a process: sends or receives messages of ours and tells when. For comparing links.

    receive KEYS ADDRESS           prints where it listens, then for each message its call id, its time and its bytes
    send KEYS ADDRESS [RATE_BPS]   for each line COUNT of its input sends so many messages of 50 KB

KEYS is a folder with keys of `sender` and `receiver`, or `-`. With RATE_BPS on both ends the link is an emulated one.
Times are of the clock that all processes of a machine share.
"""

import sys
from pathlib import Path

import numpy

from edge_runtime.clock import SystemClock
from edge_runtime.protocol import ExpertReply
from edge_runtime.transport.endpoint import Channel, Server
from edge_runtime.transport.keys import Keys, load_keys
from edge_runtime.transport.shaper import Link, Shaper
from edge_runtime.transport.shaping import Shaping

ROWS = numpy.zeros((50, 250), numpy.float32)


def main() -> None:
    what, folder, address, *rate = sys.argv[1:]
    clock = SystemClock()
    own = {"send": "sender", "receive": "receiver"}[what]
    keys = None if folder == "-" else load_keys(Path(folder), own)
    link = Link(rate_bps=float(rate[0])) if rate else None
    shaping = Shaping(Shaper(own, lambda source, target: link or Link()), clock) if link else None
    (send if what == "send" else receive)(address, keys, shaping, clock)


def receive(address: str, keys: Keys | None, shaping: Shaping | None, clock: SystemClock) -> None:
    with Server(address, keys=keys, shaping=shaping) as server:
        print(server.address, flush=True)
        while True:
            if received := server.receive(60.0):
                envelope = received[1]
                print(envelope.call_id, clock.now(), envelope.tensors[0].nbytes, flush=True)


def send(address: str, keys: Keys | None, shaping: Shaping | None, clock: SystemClock) -> None:
    call_id = 0
    with Channel(address, name="receiver", keys=keys, shaping=shaping) as channel:
        assert channel.wait_until_up(20.0), channel.why_unreachable()
        print("up", flush=True)
        for line in sys.stdin:
            for _ in range(int(line)):
                call_id += 1
                assert channel.send(ExpertReply(0), call_id=call_id, tensors=(ROWS,))


if __name__ == "__main__":
    main()
