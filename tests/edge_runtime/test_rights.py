"""What a process may not read is one sentence that names it. Another user's eyes are needed: root may read everything."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

TOPOLOGY = """\
[cluster]
name = "rights"
model = "models/mine"

[[node]]
name = "desk"
address = "127.0.0.1:5551"
memory = "1 GiB"
"""
CASES = [
    ("models", 0o700, "line 3, [cluster] model: "),
    ("models/mine", 0o700, "line 3, [cluster] model: "),
    ("models/mine", 0o311, "cannot be listed: Permission denied"),
    ("models/mine/generation_config.json", 0o600, "generation_config.json cannot be read: Permission denied"),
    (
        "models/mine/calibration",
        0o700,
        "models/mine/calibration/artifact.json cannot be used: Permission denied",
    ),
    ("topology.toml", 0o600, "Permission denied"),
]
PLAN_AS_NOBODY = """
import contextlib, io, json, os, sys
from edge_runtime import cli

folder, cases = sys.argv[1], json.loads(sys.argv[2])
sys.argv = ["edge-runtime", "plan", "--topology", folder + "/topology.toml"]

def plan():
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            cli.main()
        except SystemExit as ended:
            return ended.code or 0, said.getvalue()

assert plan()[0] == 0  # as root, who may; by now all is imported
for path, mode in cases:
    before = os.stat(folder + "/" + path).st_mode
    os.chmod(folder + "/" + path, mode)
    os.setegid(65534), os.seteuid(65534)
    print(json.dumps(plan()))
    os.seteuid(0), os.setegid(0)
    os.chmod(folder + "/" + path, before)
"""


@pytest.fixture
def place(demo_model: Path) -> Iterator[Path]:
    """A folder that everybody may enter, with a topology file and a model (of links: only names and rights matter)."""
    folder = Path(tempfile.mkdtemp(prefix="rights-"))
    folder.chmod(0o755)
    model = folder / "models" / "mine"
    model.mkdir(parents=True)
    for path in demo_model.iterdir():
        if path.is_dir():
            shutil.copytree(path, model / path.name)
        else:
            (shutil.copy if path.suffix == ".json" else os.symlink)(path, model / path.name)
    (folder / "topology.toml").write_text(TOPOLOGY)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_may_not_be_read_is_named_in_one_sentence(place: Path) -> None:
    cases = json.dumps([case[:2] for case in CASES])
    ran = subprocess.run(
        [sys.executable, "-c", PLAN_AS_NOBODY, str(place), cases], capture_output=True, text=True, timeout=100
    )
    assert ran.returncode == 0, ran
    ended = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(ended) == len(CASES)
    for (path, _, expected), (code, said) in zip(CASES, ended, strict=True):
        assert code == 2 and expected in said, (path, code, said)
        assert said.startswith("error: ") and len(said.splitlines()) == 1
