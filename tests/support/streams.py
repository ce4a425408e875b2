"""Answers that run while something else happens to their cluster: what came, when, and how it ended."""

import threading
from collections.abc import Sequence

from edge_runtime.client import Answer, Client, Prompt
from edge_runtime.protocol import Tokens
from tests.support.clusters import CLOCK, LocalCluster
from topology.files import read_cluster


def greedy_prompts(prompts: Sequence[str], num_tokens: int) -> list[Prompt]:
    """Each to be answered with so many tokens, the best one every time."""
    sampling = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0}
    return [Prompt(prompt=prompt, sampling=sampling) for prompt in prompts]


class Streams:
    """Answers that run in a thread, and the moments at which their tokens came."""

    def __init__(self, cluster: LocalCluster, prompts: Sequence[Prompt]) -> None:
        self.moments: dict[str, list[float]] = {}
        self.answers: list[Answer] = []
        self._address = read_cluster(cluster.topology).coordinator
        self._prompts = list(prompts)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with Client(self._address, None, CLOCK) as client:
            client.connect(10.0)
            self.answers = client.run(self._prompts, wait_ready_s=30.0, on_tokens=self._took)

    def _took(self, answer: Answer, tokens: Tokens) -> None:
        self.moments.setdefault(answer.request_id, []).append(CLOCK.now())

    @property
    def all_run(self) -> bool:
        return len(self.moments) == len(self._prompts)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, list(self.moments.values())))

    def finish(self, deadline_s: float = 120.0) -> list[Answer]:
        """Wait for the end of all; none may have failed."""
        self._thread.join(deadline_s)
        assert not self._thread.is_alive(), f"{self.num_tokens} tokens came, and then no more"
        assert [str(answer.error()) for answer in self.answers if answer.failed] == []
        return self.answers

    def texts(self, deadline_s: float = 120.0) -> list[str]:
        return [answer.text for answer in self.finish(deadline_s)]

    def longest_pause_s(self) -> float:
        return max(
            after - before
            for moments in self.moments.values()
            for before, after in zip(moments, moments[1:], strict=False)
        )
