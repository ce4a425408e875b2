"""A cluster whose experts are split: requests at a tier beside whole ones, on one node and on two, and what is refused."""

from collections.abc import Iterator

import pytest

from tests.support.clusters import LocalCluster, write_topology

PROMPT = "def main():"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("tiers")
    with LocalCluster(write_topology(folder, "two_nodes", sub_experts="true")) as local:
        yield local


def test_whole_answers_are_the_same_beside_cheaper_ones_and_bills_say_the_tier(cluster: LocalCluster) -> None:
    alone = cluster.answer(PROMPT, "--max-tokens", "24")
    entries = [{"prompt": PROMPT}, {"prompt": PROMPT, "k": 2.25}, {"prompt": PROMPT, "service": "economy"}]
    whole, cheaper, cheapest = cluster.answers(entries, "--max-tokens", "24")
    assert whole["token_ids"] == alone["token_ids"] and "K" not in whole["bill"]
    assert cheaper["bill"]["K"] == 9 and cheapest["bill"]["K"] == 4
    assert 0 < cheaper["bill"]["dropped"] < cheapest["bill"]["dropped"] < 1
    assert cheapest["bill"]["dropped_loss"] > cheaper["bill"]["dropped_loss"] > 0
    assert cheapest["usage"]["cached_tokens"] == 0, "no block of another tier is taken"
    assert cheapest["bill"]["exact_elsewhere"] > 0, "slices run at the other node too"
    again = cluster.answer(PROMPT, "--max-tokens", "24", "--sub-experts", "9")
    assert again["token_ids"] == cheaper["token_ids"]


def test_what_is_no_tier_is_refused_in_one_sentence(cluster: LocalCluster) -> None:
    for option, value, words in (
        ("--k", "5", "k is 5.0; allowed is 0.25 to 4 experts per token"),
        ("--sub-experts", "17", "sub_experts is 17; allowed is 1 to 16"),
        ("--service", "gold", "service is 'gold'; allowed is one of full, balanced, economy"),
    ):
        refused = cluster.submit(PROMPT, option, value)
        assert refused.exit_code == 2 and words in refused.stderr
