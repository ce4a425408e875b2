"""Serves the gateway's application on a port until it is told to stop."""

import socket
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from edge_runtime.errors import ConfigError
from topology.cluster import is_loopback
from topology.errors import why_unread

STOP_S = 5  # running answers may go on for so long after a signal to stop


def listen(address: str) -> socket.socket:
    """A listening socket on `host:port`. ConfigError if it cannot be had."""
    host, port = _host_and_port(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror}; give another --listen") from error


def read_api_key(path: Path | None, address: str) -> str | None:
    """The key in the first line of a file. Addresses that other machines reach must have one."""
    _host_and_port(address)
    if path is None:
        if not is_loopback(address):
            raise ConfigError(
                f"--listen {address} can be reached by other machines; give --api-key-file FILE, or listen on 127.0.0.1"
            )
        return None
    try:
        lines = path.read_text().split("\n", 1)
    except OSError as error:
        raise ConfigError(f"API key file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"API key file {path} cannot be read: {why_unread(error)}") from error
    key = lines[0].strip()
    if len(key) < 16:
        raise ConfigError(
            f"API key file {path} holds a key of {len(key)} characters; expected 16 or more in its first line"
        )
    return key


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"--listen is {address!r}; expected host:port, as in 127.0.0.1:8000")
    return host, int(port)


def serve(app: Starlette, listening: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=STOP_S,
        h11_max_incomplete_event_size=64 << 10,
    )
    uvicorn.Server(config).run(sockets=[listening])
