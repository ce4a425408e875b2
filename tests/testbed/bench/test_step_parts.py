"""A step taken apart: the parts add up, and the command shows those of a small model with every kind of part."""

import json
import shutil

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from edge_runtime.errors import CheckpointError
from kernels import backends
from testbed.bench.cli import bench
from testbed.bench.peers.own_worker import OwnRunner, StepSeconds
from testbed.bench.sitting import Sitting, free_ports, one_node
from testbed.bench.step_parts import parts_of, table
from tests.support.encoder_decoders import write_tiny_switch
from tests.support.tiny_models import write_tiny


def test_the_parts_of_a_step_add_up_to_it():
    parts = parts_of(StepSeconds(10e-3, (4e-3, 1e-3, 2e-3), head=1.5e-3, num_layers=5), 3, waiting_s=0.5e-3)
    assert parts.dense == pytest.approx(2500) and parts.python == pytest.approx(2500)
    together = parts.dense + parts.attention + parts.experts + parts.waiting + parts.python + parts.head
    assert together == pytest.approx(parts.step)
    assert table("tiny", "int8", 1, [parts]).splitlines()[-1] == (
        "| 3 | 500.0 | 200.0 | 400.0 | 100.0 | 500.0 | 1500 | 10000 |"
    )


@pytest.mark.parametrize(
    ("family", "layers"),
    [("the demo model", 6), ("deepseek_v2", 3), ("gpt_oss", 3), ("switch_transformers", 7)],
)
def test_the_command_takes_a_step_apart(family, layers, demo_model, tmp_path):
    try:
        backends.load("native")
    except ImportError:
        pytest.skip("native was not built")
    model = demo_model if family == "the demo model" else write_model(family, demo_model, tmp_path / "model")
    before = backends.active().num_threads()
    options = ["--format", "int4", "--streams", "1,3", "--max-tokens", "4"]
    done = CliRunner().invoke(bench, ["--step", "--model", str(model), *options, "--json"])
    backends.set_num_threads(before)
    assert done.exit_code == 0, done.output
    ((found),) = json.loads(done.output)["steps"]
    assert [parts["requests"] for parts in found["steps"]] == [1, 3]
    for parts in found["steps"]:
        kinds = ("dense", "attention", "experts", "python", "head", "waiting")
        assert min(parts["attention"], parts["experts"], parts["head"]) > 0
        assert sum(parts[kind] for kind in kinds) == pytest.approx(parts["step"], rel=0.2)
        if layers == 6:  # of three tiny layers the clock may not see the rest beside a head of 8192 tokens
            assert parts["dense"] > 0 and parts["python"] > 0
        assert parts["waiting"] == 0 and parts["layers"] == layers


def write_model(family, demo_model, folder):
    """A tiny model with the demo model's tokens, whose context of 128 is shorter than what steps are measured with."""
    if family == "switch_transformers":
        write_tiny_switch(folder, vocab_size=8192)
    else:
        write_tiny(family, folder, vocab_size=8192)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, folder / name)
    return folder


def test_a_model_whose_requests_fail_ends_the_measurement_with_their_error(demo_model, tmp_path):
    folder = tmp_path / "huge"
    shutil.copytree(demo_model, folder, ignore=shutil.ignore_patterns("calibration"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = load_file(folder / index["model.norm.weight"])
    tensors["model.norm.weight"][:] = 3e38  # finite, and the logits are not
    save_file(tensors, folder / index["model.norm.weight"])
    before = backends.active().num_threads()
    topology = tmp_path / "one.toml"
    topology.write_text(one_node(Sitting(folder, batches=(1,), steps=2), "bf16", 1, 128, free_ports(2)))
    runner = OwnRunner({"topology": str(topology)})
    backends.set_num_threads(before)
    for work in (lambda: runner.decode([[5, 6, 7]], 2), lambda: runner.prefill([5, 6, 7])):
        with pytest.raises(CheckpointError, match="huge cannot be measured: .*logits are not finite"):
            work()
