"""Whole engines on the triton kernels, run in a child whose triton interprets, and what is said where there is no GPU."""

from pathlib import Path

import pytest

from edge_runtime.errors import Refusal
from edge_runtime.node.share import ShareSettings, _refuse_formats
from kernels import backends
from tests.support.interpreter import interpreted

HERE = Path(__file__).resolve().parent
FILES = ("test_on_device.py", "test_on_triton.py")


@pytest.mark.slow
@pytest.mark.timeout(600)  # half a minute each on a free core
@pytest.mark.parametrize("name", FILES)
def test_engines_answer_on_the_triton_kernels(name, repository):
    interpreted(HERE / name, repository, EDGE_KERNELS="triton")


def test_every_file_that_needs_the_interpreter_is_run_in_it():
    assert {path.name for path in HERE.glob("test_on_*.py")} == set(FILES)


def test_the_processor_is_always_there():
    backends.use_device("cpu", {})
    assert backends.is_on_host() and backends.resident_bytes() is None and backends.free_bytes() is None


@pytest.mark.skipif(bool(backends.gpus()), reason="there is a GPU here")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_device_that_is_not_there_is_refused_in_one_sentence(name):
    with pytest.raises(
        ValueError, match=rf"device: found '{name}', but torch sees no GPU .*install a torch for its GPU"
    ):
        backends.use_device(name, {})


def test_other_kernels_than_triton_do_not_compute_on_a_gpu():
    with pytest.raises(ValueError, match="needs the triton kernels, but EDGE_KERNELS is 'native'"):
        backends.use_device("cuda", {"EDGE_KERNELS": "native"})


def test_a_format_that_the_kernels_lack_is_refused_before_anything_is_read():
    settings = ShareSettings(
        context_tokens=64, max_batch_rows=8, max_requests=2, call_deadline_s=1.0, trunk_format="bfloat16x2"
    )
    before = backends.active().NAME
    backends.use("triton")
    try:
        with pytest.raises(
            Refusal, match="attic, trunk_format: found 'bfloat16x2', which linear of the triton kernels lacks"
        ):
            _refuse_formats(settings, "attic")
    finally:
        backends.use(before)
    _refuse_formats(settings, "attic")  # processors have it
