"""`batch`: every prompt once, in order, whatever stops it and wherever."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.client import Answer, Prompt
from edge_runtime.clock import ManualClock
from edge_runtime.errors import RequestError
from edge_runtime.offline import Journal, run_offline
from edge_runtime.protocol import Finished


class Stopped(BaseException):
    """The process is killed."""


class Doubling:
    """A client whose answer to a prompt is its ids twice; it is killed before a certain batch."""

    def __init__(self, clock: ManualClock, killed_at: int = 10**6) -> None:
        self.clock, self.killed_at, self.asked = clock, killed_at, []

    def run(self, prompts, *, wait_ready_s):
        if len(self.asked) == self.killed_at:
            raise Stopped
        self.asked.append([prompt.prompt_ids for prompt in prompts])
        self.clock.advance(0.5)
        return [
            Answer("r", prompt, 0.0, token_ids=prompt.prompt_ids * 2, finished=Finished("r", "length"))
            for prompt in prompts
        ]


def attempt(folder, tiers, killed_at=10**6, capacity=3):
    clock = ManualClock()
    client = Doubling(clock, killed_at)
    prompts = [Prompt(prompt_ids=[index]) for index in range(len(tiers))]
    try:
        run_offline(client, prompts, tiers, folder / "out.jsonl", clock, capacity=capacity)
    except Stopped:
        pass
    return [ids[0] for batch in client.asked for ids in batch]


def written(folder):
    return [json.loads(line)["token_ids"] for line in (folder / "out.jsonl").read_text().splitlines()]


@given(
    st.lists(st.sampled_from([4, 8, 16]), min_size=1, max_size=14),
    st.lists(st.integers(0, 3), max_size=4),
    st.integers(0, 9),
)
@settings(max_examples=25, deadline=None)
def test_however_often_it_is_killed_every_prompt_is_answered_once_and_in_order(
    tmp_path_factory, tiers, kills, cut
):
    folder = tmp_path_factory.mktemp("batch")
    asked = []
    for killed_at in kills:
        asked += attempt(folder, tiers, killed_at)
        if (folder / "out.jsonl").exists():
            break
        journal = folder / "out.jsonl.part"
        if cut and journal.exists():  # killed in the middle of a line
            with journal.open("ab") as file:
                file.write(b'{"index": 0, "token'[:cut])
    if not (folder / "out.jsonl").exists():
        asked += attempt(folder, tiers)
    assert written(folder) == [[index, index] for index in range(len(tiers))]
    assert sorted(asked) == list(range(len(tiers)))
    assert not (folder / "out.jsonl.part").exists()


def test_low_tiers_go_first(tmp_path):
    assert attempt(tmp_path, [16, 4, 16, 4, 4], capacity=3) == [1, 3, 4, 0, 2]


def test_answers_to_other_prompts_are_not_taken_up(tmp_path):
    attempt(tmp_path, [4, 4, 4, 4], killed_at=1)
    with pytest.raises(RequestError, match="holds answers to other prompts; remove it"):
        Journal(tmp_path / "out.jsonl", [Prompt(prompt="else")]).read()


def test_answers_that_are_whole_are_not_written_over(tmp_path):
    (tmp_path / "out.jsonl").write_text("{}\n")
    with pytest.raises(RequestError, match="exists already; remove it"):
        Journal(tmp_path / "out.jsonl", [Prompt(prompt="again")]).read()
