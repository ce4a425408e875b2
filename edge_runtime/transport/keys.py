"""CURVE keys: making and reading the files, and letting in only peers whose key is known.

`NAME.key` holds a public key and may be copied anywhere; `NAME.key_secret` never leaves its machine. A folder's public
keys are the peers that may talk to its owner: those there are when a peer connects, so that keys come and go while
everybody runs. `NAME+ANYTHING.key` is one more key of NAME, for the time in which the old one and the new one are good.
Knows nothing of messages.
"""

import contextlib
import ipaddress
import logging
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from edge_runtime.errors import ConfigError

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_Z85 = re.compile(rb"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


class KeyFolder:
    """The public keys in a folder, read again when a file was added, removed or changed. May be used by any thread."""

    def __init__(self, path: Path) -> None:
        """ConfigError if a key in it is damaged; one that is damaged later counts as removed."""
        self.path = path
        self._known = (self._signature(), {name: _read_key(file) for name, file in self._files()})

    def read(self) -> dict[str, bytes]:
        """The keys there are now, by the names of their files."""
        signature, keys = self._known
        found = self._signature()
        if found != signature:
            keys = self._read_what_is_good()
            self._known = (found, keys)
        return keys

    def _files(self) -> list[tuple[str, Path]]:
        return [(path.name.removesuffix(".key"), path) for path in sorted(self.path.glob("*.key"))]

    def _signature(self) -> tuple[object, ...]:
        """Differs whenever a key may be another."""
        try:
            with os.scandir(self.path) as entries:
                files = [(entry.name, entry.stat()) for entry in entries if entry.name.endswith(".key")]
        except OSError:  # a file went away while we looked, or the whole folder did
            return ()
        return tuple(sorted((name, stat.st_ino, stat.st_mtime_ns, stat.st_size) for name, stat in files))

    def _read_what_is_good(self) -> dict[str, bytes]:
        keys = {}
        for name, path in self._files():
            try:
                keys[name] = _read_key(path)
            except (ConfigError, OSError) as error:
                log.warning("a key counts as removed: %s", error)
        return keys


@dataclass(frozen=True)
class Keys:
    """One process's key pair and the public keys it trusts. All keys are 40 characters of Z85."""

    name: str
    public: bytes
    secret: bytes = field(repr=False)
    folder: KeyFolder

    @property
    def peers(self) -> Mapping[str, bytes]:
        """The keys that are trusted now, by the names of their files."""
        return {self.name: self.public} | self.folder.read()

    def of_peer(self, name: str) -> bytes:
        """The key that peer is expected to have."""
        peers = self.peers
        if name not in peers:
            raise ConfigError(
                f"there is no key of {name!r}; known are {', '.join(sorted(peers)) or 'none'}; make it with: edge-runtime keys "
                f"new {name}, and copy {name}.key to every machine"
            )
        return peers[name]

    def owner_of(self, public: bytes) -> str | None:
        """Whose key that is, None if it is not trusted."""
        return next((owner_of_file(name) for name, key in self.peers.items() if key == public), None)


def owner_of_file(name: str) -> str:
    return name.partition("+")[0]


def new_keys(folder: Path, names: Iterable[str]) -> list[Path]:
    """Write a new key pair for each name; ConfigError, and nothing written, if a file of that name exists."""
    names = list(dict.fromkeys(names))
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} cannot name a key; use letters, digits, dots and dashes")
        for path in (folder / f"{name}.key", folder / f"{name}.key_secret"):
            if path.exists():
                raise ConfigError(f"{path} exists and is not overwritten; delete it first to replace the key")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in names:
        public, secret = zmq.curve_keypair()
        for suffix, key, mode in ((".key_secret", secret, 0o600), (".key", public, 0o644)):
            path = folder / (name + suffix)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(key + b"\n")
            written.append(path)
    return written


def refuse_missing(folder: Path, names: Sequence[str]) -> None:
    """ConfigError that names every one of `names` whose secret key is not in `folder`."""
    if missing := [name for name in names if not (folder / f"{name}.key_secret").is_file()]:
        raise ConfigError(
            f"{folder} has no secret keys of {', '.join(missing)}; make them with: edge-runtime keys new {' '.join(missing)}"
        )


def load_keys(folder: Path, own_name: str) -> Keys:
    """The key pair of `own_name` and every public key in `folder`."""
    secret_path = folder / f"{own_name}.key_secret"
    if not secret_path.is_file():
        raise ConfigError(f"{secret_path} is missing; make it with: edge-runtime keys new {own_name}")
    if secret_path.stat().st_mode & 0o077:
        raise ConfigError(f"{secret_path} can be read by others; run: chmod 600 {secret_path}")
    secret = _read_key(secret_path)
    known = KeyFolder(folder)
    public = zmq.curve_public(secret)
    own = [key for name, key in known.read().items() if owner_of_file(name) == own_name]
    if own and public not in own:
        raise ConfigError(
            f"{folder / own_name}.key is not the public half of {secret_path}; copy the right one"
        )
    return Keys(own_name, public, secret, known)


def _read_key(path: Path) -> bytes:
    with path.open("rb") as file:
        key = file.read(100).strip()
    if not _Z85.fullmatch(key):
        raise ConfigError(f"{path} does not hold a key of 40 characters; make it with: edge-runtime keys new")
    return key


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine can reach `address` ("host:port", with or without tcp://)."""
    scheme, _, rest = address.rpartition("://")
    if scheme in ("ipc", "inproc"):
        return True
    host = rest.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_keys_for(address: str, keys: Keys | None) -> None:
    """ConfigError if `address` can be reached from other machines and there are no keys."""
    if keys is None and not is_loopback(address):
        raise ConfigError(
            f"{address} is not a loopback address and there are no keys; make them with: edge-runtime keys new"
        )


class Doorkeeper:
    """Answers ZeroMQ's question, for each connection to a context, whether its key is known (ZAP, RFC 27)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self._keys = keys
        self._socket = context.socket(zmq.REP)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind("inproc://zeromq.zap.01")
        self._stop = context.socket(zmq.PAIR)
        self._stop.bind("inproc://doorkeeper-stop")
        self._thread = threading.Thread(target=self._run, args=(context,), name="doorkeeper", daemon=True)
        self._thread.start()

    def _run(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        with context.socket(zmq.PAIR) as stopped, self._socket:
            stopped.connect("inproc://doorkeeper-stop")
            poller = zmq.Poller()
            poller.register(stopped, zmq.POLLIN)
            poller.register(self._socket, zmq.POLLIN)
            while stopped not in dict(poller.poll()):
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))

    def _answer(self, question: list[bytes]) -> list[bytes]:
        version, request_id, *_, mechanism, key = (
            question[:7] if len(question) >= 7 else [b"1.0", b"", b"", b""]
        )
        owner = None
        if mechanism == b"CURVE":
            with contextlib.suppress(ValueError):
                owner = self._keys.owner_of(z85.encode(key))
        if owner is None:
            return [version, request_id, b"400", b"key not known", b"", b""]
        return [version, request_id, b"200", b"OK", owner.encode(), b""]

    def close(self) -> None:
        self._stop.send(b"")
        self._thread.join()
        self._stop.close(linger=0)
