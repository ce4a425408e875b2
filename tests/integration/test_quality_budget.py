"""A cluster whose requests may spend quality: exact ones are what they always were, others wait less and say what it cost."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clusters import MODEL, LocalCluster, write_topology

PROMPT = "def main():"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("quality")
    with LocalCluster(write_topology(folder, "two_nodes", placement='"similarity"')) as local:
        yield local


def test_exact_answers_are_the_same_beside_one_that_spends(cluster: LocalCluster) -> None:
    alone = cluster.answer(PROMPT, "--max-tokens", "24")
    entries = [{"prompt": PROMPT}, {"prompt": PROMPT, "quality": 0.2}, {"prompt": PROMPT, "quality": 0}]
    exact, quick, zero = cluster.answers(entries, "--max-tokens", "24")
    assert exact["token_ids"] == zero["token_ids"] == alone["token_ids"]
    for answer in (alone, exact, zero):
        assert answer["bill"]["substituted"] == answer["bill"]["budget_spent"] == 0
    assert 0 <= quick["bill"]["budget_spent"] <= 24 * 0.2


def test_a_budget_spares_calls_and_the_bill_tells_what_it_cost(cluster: LocalCluster) -> None:
    exact = cluster.answer(PROMPT, "--max-tokens", "40", "--trace")
    quick = cluster.answer(PROMPT, "--max-tokens", "40", "--quality", "0.2", "--user", "ann", "--trace")
    bill = quick["bill"]
    assert bill["substituted"] > 0 and 0 < bill["budget_spent"] <= 40 * 0.2
    assert bill["exact_elsewhere"] < exact["bill"]["exact_elsewhere"]
    shares = [bill[key] for key in ("exact_here", "exact_elsewhere", "substituted", "deferred", "dropped")]
    assert sum(shares) == pytest.approx(1.0, abs=1e-6)
    assert [entry["layer"] for entry in quick["trace"]] == list(range(6))
    assert quick["usage"]["cached_tokens"] == 0, (
        "no block of an exact answer is taken for it, nor the other way round"
    )


def test_what_is_no_budget_is_refused_in_one_sentence(cluster: LocalCluster) -> None:
    refused = cluster.submit(PROMPT, "--quality", "-1")
    assert refused.exit_code == 2 and 'quality is -1.0; allowed is "exact", "balanced"' in refused.stderr


def test_the_artifact_of_another_model_is_refused_with_both_hashes(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    index = (MODEL / "calibration" / "artifact.json").read_text()
    (foreign / "artifact.json").write_text(index.replace('"model_hash": "', '"model_hash": "0'))
    local = LocalCluster(write_topology(tmp_path, "two_nodes", calibration=f'"{foreign}"'))
    refused = local.cli("plan")
    assert refused.exit_code == 2 and "was measured on the model with hash 0" in refused.stderr
