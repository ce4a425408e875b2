"""Greedy answers equal those of transformers, and are the same on any number of nodes, alone and in company."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import greedy
from tests.support.clusters import LocalCluster, write_topology

SCENARIOS = ("one_node", "two_nodes", "three_nodes", "five_nodes", "eight_nodes")
ALONE = (0, 13, 30)  # prompts that are also sent on their own: C, Japanese, Chinese
LENGTHS = (64, 7, 64, 20, 1, 33, 64, 2)  # of the answers in a mixed batch

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def seen() -> dict[str, list[tuple[Any, ...]]]:
    """Scenario -> token ids and log probabilities of all its answers."""
    return {}


@pytest.fixture(scope="module", params=SCENARIOS)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    if request.param in ("one_node", "eight_nodes"):
        yield request.getfixturevalue(request.param)
        return
    with LocalCluster(write_topology(tmp_path_factory.mktemp(request.param), request.param)) as local:
        yield local


@pytest.fixture(scope="module")
def together(cluster: LocalCluster, seen: dict[str, list[tuple[Any, ...]]]) -> list[dict[str, Any]]:
    """All 32 prompts at once."""
    answers = cluster.answers(greedy.prompts(), "--max-tokens", "64", "--logprobs", "1")
    seen[cluster.status()["cluster"]] = [
        (answer["token_ids"], [entry["logprob"] for entry in answer["logprobs"]]) for answer in answers
    ]
    return answers


def test_a_file_of_32_prompts_is_answered_as_transformers_answers_it(together: list[dict[str, Any]]) -> None:
    pairs = zip(together, greedy.answers(), strict=True)
    found = {
        index: difference
        for index, (ours, theirs) in enumerate(pairs)
        if (difference := greedy.differences(ours["token_ids"], theirs))
    }
    assert not found


def test_a_prompt_alone_gets_the_same_tokens_as_in_a_batch(
    cluster: LocalCluster, together: list[dict[str, Any]]
) -> None:
    for index in ALONE:
        alone = cluster.answer(greedy.prompts()[index], "--max-tokens", "64")
        assert (alone["token_ids"], alone["text"]) == (together[index]["token_ids"], together[index]["text"])


def test_answers_that_end_at_different_times_do_not_disturb_one_another(
    cluster: LocalCluster, together: list[dict[str, Any]]
) -> None:
    entries = [
        {"prompt": prompt, "max_tokens": LENGTHS[index % len(LENGTHS)]}
        for index, prompt in enumerate(greedy.prompts()[:16])
    ]
    for entry, mixed, whole in zip(entries, cluster.answers(entries), together, strict=False):
        assert mixed["token_ids"] == whole["token_ids"][: entry["max_tokens"]]


def test_every_cluster_gives_the_same_tokens_and_the_same_bits(
    seen: dict[str, list[tuple[Any, ...]]],
) -> None:
    if len(seen) < 2:
        pytest.skip("fewer than two clusters answered")
    first = next(iter(seen.values()))
    assert {name: answers == first for name, answers in seen.items()} == dict.fromkeys(seen, True)


def test_the_file_of_expected_answers_is_what_transformers_says() -> None:
    parts = greedy.load()
    for index in (9, 27):
        assert greedy.compute(greedy.prompts()[index], *parts).token_ids == greedy.answers()[index].token_ids
