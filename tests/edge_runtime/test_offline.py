"""`batch`: every prompt once, in order, whatever stops it and wherever."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.client import Answer, Prompt
from edge_runtime.clock import ManualClock
from edge_runtime.errors import RequestError
from edge_runtime.offline import PROBE_TOKENS, Journal, measure, run_offline, some_of
from edge_runtime.protocol import Failed, Finished

FULL = 16
PROMPTS = [Prompt(prompt_ids=[index]) for index in range(3)]


class Stopped(BaseException):
    """The process is killed."""


class Doubling:
    """A client whose answer to a prompt is its ids twice; answers end so many together, and it is killed before some do."""

    def __init__(self, clock: ManualClock, killed_at: int = 10**6, together: int = 10**6) -> None:
        self.clock, self.killed_at, self.together = clock, killed_at, together
        self.asked, self.num_ended = [], 0

    def run(self, prompts, *, wait_ready_s, on_ended=lambda ended: ()):
        if prompts and prompts[0].prompt is not None:
            return self.probed(prompts)
        answers, running = [], list(prompts)
        self.asked += [[prompt.prompt_ids for prompt in prompts]] * bool(prompts)
        while running:
            if self.num_ended >= self.killed_at:
                raise Stopped
            ended = [self.answered(prompt) for prompt in running[: self.together]]
            self.num_ended += 1
            self.clock.advance(0.5)
            running, answers = running[self.together :], answers + ended
            more = on_ended(ended)
            running += more
            self.asked += [[prompt.prompt_ids for prompt in more]] * bool(more)
        return answers

    def answered(self, prompt):
        return Answer("r", prompt, 0.0, token_ids=prompt.prompt_ids * 2, finished=Finished("r", "length"))

    def probed(self, prompts):
        """What is only measured: a step takes longer with more prompts and at a higher K."""
        assert all(prompt.sampling["max_tokens"] == PROBE_TOKENS for prompt in prompts)
        tier = prompts[0].sampling.get("sub_experts", FULL)
        self.clock.advance(PROBE_TOKENS * (0.1 + 0.01 * tier * len(prompts)))
        return [
            Answer("r", prompt, 0.0, token_ids=[1] * PROBE_TOKENS, finished=Finished("r", "length"))
            for prompt in prompts
        ]


def attempt(folder, tiers, killed_at=10**6, capacity=3, together=10**6):
    """Which prompts were answered, in the order in which they were asked."""
    clock = ManualClock()
    client = Doubling(clock, killed_at, together)
    prompts = [Prompt(prompt_ids=[index]) for index in range(len(tiers))]
    try:
        run_offline(client, prompts, tiers, folder / "out.jsonl", clock, capacity=capacity, full_tier=FULL)
    except Stopped:
        pass
    asked = [ids[0] for batch in client.asked for ids in batch]
    return [place for place in asked if place in kept(folder)]


def kept(folder):
    """Answers that are on disk, by place."""
    out, journal = folder / "out.jsonl", folder / "out.jsonl.part"
    lines = (
        out.read_text().splitlines()
        if out.exists()
        else journal.read_text().splitlines()[1:]
        if journal.exists()
        else []
    )
    return {json.loads(line)["index"] for line in lines}


def written(folder):
    return [json.loads(line)["token_ids"] for line in (folder / "out.jsonl").read_text().splitlines()]


@given(
    st.lists(st.sampled_from([4, 8, 16]), min_size=1, max_size=14),
    st.lists(st.integers(0, 3), max_size=4),
    st.integers(0, 9),
    st.integers(1, 4),
)
@settings(max_examples=25, deadline=None)
def test_however_often_it_is_killed_every_prompt_is_answered_once_and_in_order(
    tmp_path_factory, tiers, kills, cut, together
):
    folder = tmp_path_factory.mktemp("batch")
    before = set()
    for killed_at in kills:
        attempt(folder, tiers, killed_at, together=together)
        assert before <= kept(folder), "what was answered is not asked again"
        before = kept(folder)
        if (folder / "out.jsonl").exists():
            break
        journal = folder / "out.jsonl.part"
        if cut and journal.exists():  # killed in the middle of a line
            with journal.open("ab") as file:
                file.write(b'{"index": 0, "token'[:cut])
    if not (folder / "out.jsonl").exists():
        attempt(folder, tiers, together=together)
    assert written(folder) == [[index, index] for index in range(len(tiers))]
    assert not (folder / "out.jsonl.part").exists()


def test_low_tiers_go_first(tmp_path):
    assert attempt(tmp_path, [16, 4, 16, 4, 4], capacity=3) == [1, 3, 4, 0, 2]


def test_answers_to_other_prompts_are_not_taken_up(tmp_path):
    attempt(tmp_path, [4, 4, 4, 4], killed_at=1)
    with pytest.raises(
        RequestError, match="holds answers to other prompts, or with other options; remove it"
    ):
        Journal(tmp_path / "out.jsonl", [Prompt(prompt="else")], {}).read()


def test_answers_of_another_model_are_not_taken_up_and_what_differs_is_said(tmp_path):
    out, served_by = tmp_path / "out", {"model": "aa", "gate": "proxy"}
    Journal(out, PROMPTS, served_by).add({0: {"token_ids": [1]}})
    assert sorted(Journal(out, PROMPTS, served_by).read()) == [0]
    for other, words in (
        ({"model": "bb", "gate": "proxy"}, "model was aa, is bb; remove it"),
        ({"model": "aa"}, "gate was proxy, is not there"),
        ({**served_by, "split_tiers": "true"}, "split_tiers was not there, is true"),
    ):
        with pytest.raises(RequestError, match=f"a cluster that was another one: {words}"):
            Journal(out, PROMPTS, other).read()


def test_prompts_that_failed_are_no_answers_and_are_asked_again(tmp_path):
    class Failing(Doubling):
        kind = "cluster"

        def answered(self, prompt):
            answer = super().answered(prompt)
            if prompt.prompt_ids == [1]:
                answer.failed = Failed("r", self.kind, "node_lost", "gone")
            return answer

    clock, out = ManualClock(), tmp_path / "out"
    failed = run_offline(Failing(clock), PROMPTS, [FULL] * 3, out, clock, capacity=3)
    assert failed == (1, 1) and "error" in out.read_text() and (tmp_path / "out.part").exists()
    said, client = [], Doubling(clock)
    assert run_offline(client, PROMPTS, [FULL] * 3, out, clock, capacity=3, say=said.append) == (0, 0)
    assert said[0] == "2 of 3 prompts answered before, and 1 failed and is asked again"
    assert client.asked == [[[1]]] and "error" not in out.read_text()
    assert not (tmp_path / "out.part").exists()
    client = Failing(clock)
    client.kind = "user"
    assert run_offline(client, PROMPTS, [FULL] * 3, tmp_path / "mine", clock, capacity=3) == (1, 0)
    assert not (tmp_path / "mine.part").exists(), "it would fail again"
    assert Journal(tmp_path / "mine", PROMPTS, {}).finished() == (1, 0), "and is told again"


def test_answers_that_are_whole_are_not_written_over(tmp_path):
    (tmp_path / "out.jsonl").write_text("{}\n")
    with pytest.raises(RequestError, match="exists already, .*; remove it"):
        Journal(tmp_path / "out.jsonl", [Prompt(prompt="again")], {}).read()


def test_an_output_is_finished_for_its_own_prompts_and_cluster_as_long_as_nobody_touched_it(tmp_path):
    out, clock, served_by = tmp_path / "out", ManualClock(), {"model": "aa"}
    run_offline(Doubling(clock), PROMPTS, [FULL] * 3, out, clock, capacity=3, served_by=served_by)
    assert Journal(out, PROMPTS, served_by).finished() == (0, 0)
    for prompts, others in ((PROMPTS[:2], served_by), (PROMPTS, {"model": "bb"}), (PROMPTS, {})):
        journal = Journal(out, prompts, others)
        assert journal.finished() is None
        with pytest.raises(RequestError, match="not known to hold this cluster's answers to these prompts"):
            journal.read()
    written, seal = out.read_bytes(), tmp_path / "out.done"
    for damaged in (b"", b"[]\n", b"\xff", seal.read_bytes()[:-9]):
        seal.write_bytes(damaged)
        assert Journal(out, PROMPTS, served_by).finished() is None
    out.unlink()
    again = Doubling(clock)
    assert Journal(out, PROMPTS, served_by).finished() is None
    run_offline(again, PROMPTS, [FULL] * 3, out, clock, capacity=3, served_by=served_by)
    assert len(again.asked) == 1 and out.read_bytes() == written
    assert Journal(out, PROMPTS, served_by).finished() == (0, 0)
    out.write_bytes(written[:-1])
    assert Journal(out, PROMPTS, served_by).finished() is None


def test_times_are_measured_before_tiers_are_merged_by_them():
    clock = ManualClock()
    found = measure(Doubling(clock), [4, 16, 4, 9], 8, FULL, clock, 1.0)
    assert set(found) == {(n, tier) for n in (1, 4, 8) for tier in (4, 9, 16)}
    for (n, tier), seconds in found.items():
        assert seconds == pytest.approx(0.1 + 0.01 * tier * n)
    assert some_of(list(range(1, 17)), 4) == [1, 6, 11, 16] and some_of([3, 5], 4) == [3, 5]


def test_what_is_said_names_k_only_where_experts_are_split(tmp_path):
    """Whenever another tier runs, and at the end."""

    def said(full_tier, tiers):
        lines, clock, out = [], ManualClock(), tmp_path / str(full_tier)
        client = Doubling(clock)
        run_offline(client, PROMPTS, tiers, out, clock, capacity=1, full_tier=full_tier, say=lines.append)
        return lines

    assert said(0, [1, 1, 1]) == ["3 of 3 prompts; 4 tokens/s so far"], "one tier: nothing is measured"
    assert said(FULL, [FULL, 8, 8])[1:] == [
        "2 of 3 prompts; 1 runs at up to K 16; 4 tokens/s so far",
        "3 of 3 prompts; 4 tokens/s so far",
    ]


def test_a_cluster_that_answers_no_probe_still_answers_each_tier_by_itself(tmp_path):
    class Mute(Doubling):
        def probed(self, prompts):
            return [Answer("r", prompt, 0.0) for prompt in prompts]

    client = Mute(ManualClock())
    run_offline(client, PROMPTS, [4, 16, 16], tmp_path / "out", client.clock, capacity=3, full_tier=FULL)
    assert client.asked == [[[0]], [[1], [2]]]


@pytest.mark.parametrize(
    "damage",
    [
        b"oops\n",
        bytes(range(256)) + b"\n",
        b"5\n",
        b"[]\n",
        b'{"index": 1}\n',
        b'{"index": 99, "token_ids": []}\n',
    ],
)
def test_damaged_lines_of_a_journal_are_no_answers_and_are_said(tmp_path, damage):
    journal = Journal(tmp_path / "out", PROMPTS, {})
    journal.add({0: {"token_ids": [1]}})
    with journal.path.open("ab") as file:
        file.write(damage)
    journal.add({2: {"token_ids": [3]}})
    before = journal.path.read_bytes()
    again = Journal(tmp_path / "out", PROMPTS, {})
    assert sorted(again.read(mends=False)) == [0, 2] and journal.path.read_bytes() == before
    assert sorted(again.read()) == [0, 2] and again.num_damaged == damage.count(b"\n")
    again = Journal(tmp_path / "out", PROMPTS, {})
    assert sorted(again.read()) == [0, 2] and again.num_damaged == 0, "told once, and taken out"


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (1, "1 line of {} was damaged and was taken out; prompts whose answers it held are answered again"),
        (
            2,
            "2 lines of {} were damaged and were taken out; prompts whose answers they held are answered again",
        ),
    ],
)
def test_how_many_lines_are_damaged_is_said_in_words(tmp_path, count, told):
    journal, clock, said = Journal(tmp_path / "out", PROMPTS, {}), ManualClock(), []
    journal.add({0: {"token_ids": [1]}})
    with journal.path.open("ab") as file:
        file.write(b"oops\n" * count)
    run_offline(Doubling(clock), PROMPTS, [FULL] * 3, tmp_path / "out", clock, capacity=3, say=said.append)
    assert said[:2] == ["1 of 3 prompts answered before", told.format(journal.path)]


def test_an_answer_that_is_no_text_is_written_all_the_same(tmp_path):
    """Half of a pair of surrogates, which JSON can spell and UTF-8 cannot."""
    journal, clock = Journal(tmp_path / "out", PROMPTS, {}), ManualClock()
    journal.add({0: {"token_ids": [1]}})
    with journal.path.open("ab") as file:
        file.write(b'{"index": 1, "token_ids": [], "text": "\\ud800"}\n')
    run_offline(Doubling(clock), PROMPTS, [FULL] * 3, tmp_path / "out", clock, capacity=3)
    assert json.loads((tmp_path / "out").read_text().splitlines()[1])["text"] == "?"


def test_a_journal_in_which_nothing_was_written_is_none(tmp_path):
    (tmp_path / "out.part").write_bytes(b'{"prompts"')
    journal = Journal(tmp_path / "out", PROMPTS, {})
    assert journal.read() == {}
    journal.add({0: {"token_ids": [1]}})
    assert sorted(Journal(tmp_path / "out", PROMPTS, {}).read()) == [0]


def test_where_no_answers_can_be_written_is_said_first(tmp_path):
    for out, why in ((tmp_path, "is a folder"), (tmp_path / "no" / "x", "does not exist")):
        with pytest.raises(RequestError, match=why):
            Journal(out, PROMPTS, {})
    (tmp_path / "x.part").mkdir()
    with pytest.raises(RequestError, match="cannot be read"):
        Journal(tmp_path / "x", PROMPTS, {}).read()


def test_an_output_that_cannot_be_written_costs_no_answer(tmp_path):
    """The disk may be full by then; here a folder lies in the way."""
    out, clock = tmp_path / "out", ManualClock()

    class InTheWay(Doubling):
        def answered(self, prompt):
            out.mkdir(exist_ok=True)
            return super().answered(prompt)

    with pytest.raises(RequestError, match="cannot be written .* all answers are kept in .*out.part"):
        run_offline(InTheWay(clock), PROMPTS, [FULL] * 3, out, clock, capacity=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.part"]
    out.rmdir()
    client = Doubling(clock)
    run_offline(client, PROMPTS, [FULL] * 3, out, clock, capacity=3)
    assert client.asked == [] and len(out.read_text().splitlines()) == 3


@pytest.mark.parametrize("name", ["out", "out.part", "out.done"])
def test_prompts_are_not_written_over(tmp_path: Path, name: str) -> None:
    source = tmp_path / name
    source.write_text("prompts")
    with pytest.raises(RequestError, match=f"{name} holds the prompts"):
        Journal(tmp_path / "out", PROMPTS, {}, source)
    assert source.read_text() == "prompts"


@pytest.mark.parametrize(
    "line",
    [
        '{"index": true, "token_ids": [1]}',
        '{"index": 1, "token_ids": 7}',
        '{"index": 1, "token_ids": [1.5]}',
        "[" * 100_000,
    ],
)
def test_a_damaged_line_is_no_answer(tmp_path: Path, line: str) -> None:
    journal = Journal(tmp_path / "out", PROMPTS, {})
    journal.add({0: {"token_ids": [1]}})
    with journal.path.open("a") as file:
        file.write(line + "\n")
    assert sorted(journal.read()) == [0] and journal.num_damaged == 1
