"""A home's connection to one expert host: connected, greeted, usable. Never waits by itself.

`look` is called between steps and moves the link on by what has happened; a link that was lost starts over.
"""

import logging

from edge_runtime.clock import Clock
from edge_runtime.errors import ProtocolError
from edge_runtime.protocol import Hello, PeerAddress, Refused, Welcome, refuse_mismatch
from edge_runtime.transport.endpoint import Channel, next_call_id
from edge_runtime.transport.keys import Keys

log = logging.getLogger(__name__)

GREET_AGAIN_S = 0.25  # a peer that still loads is asked again this often


class PeerLink:
    """Owned by the engine's thread.

    usable  the peer greeted us on this connection and serves our epoch
    fault   why it is not usable, for people
    """

    def __init__(
        self, peer: PeerAddress, identity: Hello, epoch: int, keys: Keys | None, clock: Clock
    ) -> None:
        self.name = peer.name
        self.usable = False
        self.was_usable = False
        self.fault = f"{peer.name} at {peer.address} has not answered yet"
        self.channel = Channel(peer.address, name=peer.name, keys=keys, server_key=peer.public_key or None)
        self._identity = identity
        self._epoch = epoch
        self._clock = clock
        self._call_id = 0
        self._greet_at_s = 0.0

    def look(self) -> bool:
        """Move on without waiting. True if `usable` changed."""
        before = self.usable
        if self.channel.is_lost():
            self.lose(f"{self.name} is gone: its connection ended")
            self.channel.reconnect()
            self._call_id = 0
            self._greet_at_s = 0.0
        elif not self.usable and self.channel.is_up():
            self._greet()
        return self.usable != before

    def lose(self, why: str) -> None:
        """Do not call this peer until it has greeted us again."""
        if self.usable:
            log.warning("peer %s is not usable: %s", self.name, why)
        self.usable = False
        self.fault = why
        self._call_id = 0
        self._greet_at_s = self._clock.now() + GREET_AGAIN_S

    def close(self) -> None:
        self.channel.close()

    def _greet(self) -> None:
        now = self._clock.now()
        if self._call_id:
            self._take_answer(now)
        if not self.usable and self._call_id == 0 and now >= self._greet_at_s:
            call_id = next_call_id()
            if self.channel.send(self._identity, call_id=call_id, epoch=self._epoch):
                self._call_id = call_id
                self._greet_at_s = now + GREET_AGAIN_S

    def _take_answer(self, now: float) -> None:
        try:
            envelope = self.channel.receive(0)
        except ProtocolError as error:
            self.fault = f"{self.name} sent what is not a message: {error}"
            return
        if envelope is None or envelope.call_id != self._call_id:
            return
        self._call_id = 0
        match envelope.message:
            case Welcome() as welcome:
                mismatch = refuse_mismatch(welcome, self._identity)
                if mismatch is not None:
                    self.fault = mismatch.detail
                elif welcome.node != self.name:
                    self.fault = f"{self.channel.address} is {welcome.node}, expected {self.name}"
                elif envelope.epoch != self._epoch:
                    self.fault = f"{self.name} serves epoch {envelope.epoch}, epoch {self._epoch} is wanted"
                else:
                    self.usable = self.was_usable = True
                    self.fault = ""
            case Refused() as refused:
                self.fault = f"{self.name} refused: {refused.detail}"
            case other:
                self.fault = f"{self.name} answered Hello with {type(other).__name__}"
        self._greet_at_s = now + GREET_AGAIN_S
