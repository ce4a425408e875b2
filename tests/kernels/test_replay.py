"""How segments are recorded here, and what is said where compiling is asked for in vain."""

import pytest
import torch

from kernels import backends, replay


@pytest.fixture
def serving():
    before = backends.active().NAME, backends.device()
    yield backends.use
    backends.use(*before)


def test_nothing_is_recorded_unless_asked_for(serving):
    serving("torch")
    assert replay.recorder({}) is None and replay.why_not_compiled({}) is None


def test_plain_torch_is_compiled_when_asked_for(serving, tmp_path, monkeypatch):
    (tmp_path / "c++").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    serving("torch")
    found = replay.recorder({"EDGE_COMPILE": "1"})
    assert found is replay.COMPILED and replay.why_not_compiled({"EDGE_COMPILE": "1"}) is None


def test_without_a_compiler_one_sentence_says_so(serving, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    serving("torch")
    with pytest.raises(ValueError, match=r"--compile .* found no C\+\+ compiler .*; install one") as error:
        replay.recorder({"EDGE_COMPILE": "1"})
    assert len(str(error.value).splitlines()) == 1


def test_a_compiler_that_does_not_run_is_named(serving):
    serving("torch")
    with pytest.raises(
        ValueError, match=r"--compile .*/false --version` ends with code 1.*; install one"
    ) as error:
        replay.recorder({"EDGE_COMPILE": "1", "CXX": "/bin/false -O2"})
    assert len(str(error.value).splitlines()) == 1


def test_kernels_that_are_compiled_already_say_so(serving):
    serving("reference")
    assert replay.recorder({"EDGE_COMPILE": "1"}) is None
    said = replay.why_not_compiled({"EDGE_COMPILE": "1"})
    assert said is not None and "--compile changes nothing here: the reference kernels" in said


def test_a_gpu_has_graphs_unless_they_are_off(serving):
    serving("torch", torch.device("cuda", 0))  # only asked, nothing runs there
    assert replay.recorder({}) is replay.CUDA_GRAPH
    assert replay.recorder({"EDGE_GRAPHS": "off"}) is None


def test_repeated_work_reads_what_stands_there_now():
    place, out = torch.zeros(2), torch.zeros(2)
    again = replay.REPEATING(lambda: out.copy_(place * 2))
    place.fill_(3.0)
    again()
    assert out.tolist() == [6.0, 6.0] and again.nbytes == 0
