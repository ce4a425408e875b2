"""Connections overheard and played again, as somebody on the wire would who has no key."""

import contextlib
import socket
import threading

SOON_S = 5.0


class Recorder:
    """Passes one connection through to a server and keeps what the client sent."""

    def __init__(self, address: str) -> None:
        self.sent = b""
        self._accepted = threading.Event()
        host, _, port = address.rpartition(":")
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._onward = socket.create_connection((host, int(port)))
        self._threads = [threading.Thread(target=self._pass_on), threading.Thread(target=self._pass_back)]
        for thread in self._threads:
            thread.start()

    def _pass_on(self) -> None:
        self._client, _ = self._listening.accept()
        self._accepted.set()
        while data := self._client.recv(65536):
            self.sent += data
            self._onward.sendall(data)
        self._onward.shutdown(socket.SHUT_RDWR)

    def _pass_back(self) -> None:
        self._accepted.wait(SOON_S)
        while data := self._onward.recv(65536):
            self._client.sendall(data)

    def close(self) -> None:
        for thread in self._threads:
            thread.join(SOON_S)
            assert not thread.is_alive()
        for sock in (self._listening, self._onward, self._client):
            sock.close()


def replayed(address: str, sent: bytes) -> bytes:
    """What a server answers to the bytes of a connection that was overheard, until it hangs up."""
    host, _, port = address.rpartition(":")
    answered = b""
    with socket.create_connection((host, int(port)), timeout=SOON_S) as replay:
        replay.sendall(sent)
        with contextlib.suppress(ConnectionError):
            while data := replay.recv(65536):
                answered += data
    return answered


def is_no_answer(answered: bytes) -> bool:
    """A greeting and at most a welcome, which anybody gets, or an error."""
    return b"ERROR" in answered or len(answered) <= 64 + 170
