"""Models by their id on the hub, against a stand-in over real HTTP: fetched once, resumed, and found without asking."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge_runtime.weights.hub import model_id
from tests.support.hub_stand_in import HubStandIn
from tests.support.processes import run_cli

FETCH = """
import sys
from edge_runtime.errors import ConfigError
from edge_runtime.weights.hub import fetch_model, find_model

for name in sys.argv[1:]:
    found = find_model(name)
    try:
        print(found is not None, fetch_model(name, lambda line: print("said:", line)))
    except ConfigError as error:
        print("refused:", error)
"""
TOPOLOGY = """\
[cluster]
name = "hub"
model = "acme/demo"

[[node]]
name = "desk"
address = "127.0.0.1:5551"
memory = "1 GiB"
"""


def environment(hub: HubStandIn, folder: Path, *, offline: bool = False) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1" if offline else "0",
        "NO_PROXY": "127.0.0.1",
    }


def fetch_in_a_process(hub: HubStandIn, folder: Path, *names: str, offline: bool = False) -> list[str]:
    """What each name came to. The library reads its settings once, so every setting needs a process."""
    ran = subprocess.run(
        [sys.executable, "-c", FETCH, *names],
        capture_output=True,
        text=True,
        env=os.environ | environment(hub, folder, offline=offline),
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_a_model_is_fetched_once_resumed_where_it_broke_off_and_found_offline(tmp_path, demo_model):
    """12 MB of the first weight file come, then the connection ends; the library writes 10 MB at a time."""
    (tmp_path / "topology.toml").write_text(TOPOLOGY)
    with HubStandIn("acme/demo", demo_model, break_after=12_000_000) as hub:
        first = run_cli("plan", "--topology", tmp_path / "topology.toml", env=environment(hub, tmp_path))
        assert first.exit_code == 0 and "192 of 192 experts" in first.stdout, first
        assert "fetching acme/demo from the hub" in first.stderr and "Traceback" not in first.stderr
        assert any(asked.endswith("from 10485760") for asked in hub.requests)
        size = sum(len(content) for content in hub.files.values())
        assert size < hub.bytes_sent < size + 5_000_000

        asked_so_far = len(hub.requests)
        whole, other = fetch_in_a_process(hub, tmp_path, "acme/demo", "acme/other", offline=True)
        assert whole.startswith("True ") and Path(whole[5:]).name.startswith("c0ffee")
        assert other == (
            "refused: model acme/other is not on this machine whole, and HF_HUB_OFFLINE forbids to fetch it"
        )
        assert len(hub.requests) == asked_so_far


def test_what_cannot_be_fetched_is_one_sentence_each(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with HubStandIn("acme/tiny", tmp_path / "model") as hub:
        said = fetch_in_a_process(hub, tmp_path, "acme/other", "acme/tiny@old", "not an id", "acme/tiny")
    refused = [line for line in said if line.startswith("refused: ")]
    assert "the hub has no model acme/other" in refused[0] and "HF_TOKEN" in refused[0]
    assert refused[1] == "refused: model acme/tiny of the hub has no revision old"
    assert "is no id of the hub; write org/name" in refused[2]
    assert said[-1].startswith("False ") and len(refused) == 3
    [gone] = fetch_in_a_process(hub, tmp_path, "acme/gone")[1:]
    assert gone.startswith("refused: model acme/gone cannot be fetched from the hub now: ")


@pytest.mark.parametrize(
    ("model", "expected"), [("hub:a/b", "a/b"), ("hub:a/b@v1", "a/b@v1"), ("/models/mine", None)]
)
def test_what_is_an_id_is_told_by_its_first_letters(model, expected):
    assert model_id(model) == expected
