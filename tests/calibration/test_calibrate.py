"""The command, from a folder of text to an artifact: what it writes, that it can be stopped, and what it refuses."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from calibration.calibrate import Options, calibrate, fitted
from calibration.requests import Lengths
from edge_runtime import cli
from edge_runtime.artifacts import Artifact, write_section
from edge_runtime.clock import ManualClock
from edge_runtime.model.checkpoint import Checkpoint
from tests.support.calibrating import WORDS, sentences, small_corpus, write_corpus
from tests.support.tiny_models import write_tiny_qwen3_moe

OPTIONS = Options(num_requests=24, lengths=Lengths(48, 24), seed=1, step_rows=256)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["edge-runtime", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capfd.readouterr()

    return run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    """A tiny random model of two layers with the demo model's tokenizer."""
    folder = write_tiny_qwen3_moe(tmp_path_factory.mktemp("model"), vocab_size=8192, num_hidden_layers=2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_command_writes_an_artifact_of_this_model(run: Run, model: Path, corpus: Path, tmp_path: Path):
    out = tmp_path / "artifact"
    options = "--out", out, "--requests", 24, "--prompt", 48, "--decode", 24, "--threads", 1
    code, printed, said = run("calibrate", model, "--corpus", corpus, *options)
    assert code == 0 and printed.strip() == str(out), said
    artifact = Artifact.open(out, model_hash=Checkpoint.open(model).model_hash)
    assert {"requests", "frequency", "similarity", "transitions", "logits"} <= set(artifact.sections)
    assert artifact.meta("requests")["domains"] == sorted(WORDS) and artifact.meta("frequency")["layers"] == [
        0,
        1,
    ]
    assert artifact.tensor("requests", "decode_counts").shape == (24, 2, 8)
    assert artifact.index.corpus["requests"] == 24
    assert sorted(path.suffix for path in out.iterdir()) == [
        ".json",
        *[".safetensors"] * len(artifact.sections),
    ]


def test_a_calibration_that_is_stopped_at_any_unit_ends_with_the_same_bytes(
    model: Path, corpus: Path, tmp_path: Path
):
    class Stopped(Exception):
        pass

    class Hurried(ManualClock):
        """Time that runs so fast that every unit is saved."""

        def now(self) -> float:
            self.advance(1000.0)
            return super().now()

    reached: set[tuple[str, int]] = set()

    def stop_at_every_third(name: str, done: int, total: int) -> None:
        is_new = name not in ("read", "load") and (name, done) not in reached
        reached.add((name, done))
        if is_new and len(reached) % 3 == 0:
            raise Stopped

    whole = calibrate(model, corpus, tmp_path / "whole", OPTIONS, ManualClock())
    for _ in range(100):
        try:
            stopped = calibrate(
                model, corpus, tmp_path / "stopped", OPTIONS, Hurried(), progress=stop_at_every_third
            )
            break
        except Stopped:
            continue
    assert len({name for name, _ in reached}) > 3
    assert contents(stopped.folder) == contents(whole.folder)


def test_generated_tokens_take_the_place_of_the_text(model: Path, corpus: Path, tmp_path: Path):
    of_text, generated = (
        calibrate(model, corpus, tmp_path / name, OPTIONS._replace(generates=generates), ManualClock())
        for name, generates in (("text", False), ("generated", True))
    )
    assert of_text.index.corpus["fingerprint"] != generated.index.corpus["fingerprint"]
    assert generated.index.corpus["decoded"] == "generated"
    assert set(generated.tensor("requests", "decode_tokens").tolist()) == {24}
    prompts = [found.tensor("requests", "prefill_counts") for found in (of_text, generated)]
    decoded = [found.tensor("requests", "decode_counts") for found in (of_text, generated)]
    assert torch.equal(*prompts) and not torch.equal(*decoded)


def test_another_models_artifact_is_not_written_into(run: Run, model: Path, corpus: Path, tmp_path: Path):
    write_section(tmp_path / "out", "frequency", {"overall": torch.ones(1)}, model_hash="f" * 32)
    code, _, said = run("calibrate", model, "--corpus", corpus, "--out", tmp_path / "out")
    assert code == 2 and "f" * 32 in said and Checkpoint.open(model).model_hash in said


def test_what_cannot_be_calibrated_is_refused_in_one_sentence(
    run: Run, model: Path, corpus: Path, tmp_path: Path
):
    few = write_corpus(tmp_path / "few", {"sea": sentences("sea", 3, 30)})
    (tmp_path / "none").mkdir()
    bad = write_corpus(tmp_path / "bad", {"sea": sentences("sea", 3, 30)})
    (bad / "sea" / "calib-2.txt").write_bytes("caf\u00e9".encode("latin-1"))
    dense = write_tiny_qwen3_moe(tmp_path / "dense", mlp_only_layers=[0, 1, 2])
    cases = [
        (model, few, "needed are at least 16 requests"),
        (model, tmp_path / "none", "DOMAIN/*.jsonl"),
        (model, tmp_path / "gone", "does not exist"),
        (model, bad, "not UTF-8"),
        (dense, corpus, "nothing to calibrate"),
        (tmp_path / "gone", corpus, "model folder"),
    ]
    for folder, text, why in cases:
        code, out, said = run(
            "calibrate", folder, "--corpus", text, "--out", tmp_path / "out", "--threads", 1
        )
        last = said.strip().splitlines()[-1]
        assert code == 2 and out == "" and last.startswith("error: ") and why in last, said
        assert "Traceback" not in said


def test_lengths_fit_the_models_context():
    assert fitted(Lengths(256, 128), 512) == (256, 128)
    assert fitted(Lengths(256, 128), 128) == (85, 42)
    for context in (8, 64, 128, 333, 4096):
        prompt, decode = fitted(Lengths(256, 128), context)
        assert 0 < prompt and 0 < decode and prompt + decode < context
