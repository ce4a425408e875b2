"""A gateway process before a cluster, for tests that ask as programs do. Knows OpenAI's client and plain HTTP."""

import http.client
import json
from typing import Any

import openai

from tests.support.clusters import LocalCluster, free_ports_to_listen
from tests.support.processes import CliProcess


class RunningGateway:
    """A gateway process before a cluster, and OpenAI's client for it."""

    def __init__(self, cluster: LocalCluster, *flags: str, api_key: str = "none") -> None:
        [self.port] = free_ports_to_listen(1)
        self.process: CliProcess = cluster.start_command(
            "gateway", "--listen", f"127.0.0.1:{self.port}", *flags
        )
        try:
            self.process.wait_for_line("serving edge-moe-demo at")
        except BaseException:
            self.process.stop()
            raise
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key=api_key, max_retries=0, timeout=60.0
        )

    def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("POST", path, body, headers or {})
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def get(self, path: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def close(self) -> None:
        self.client.close()
        self.process.stop()
