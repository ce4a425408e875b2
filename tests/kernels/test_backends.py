"""Which backend serves, and what is said about it."""

import os
import subprocess
import sys

import pytest

from kernels import backends


def serving(**env):
    script = "from kernels import backends; d = backends.describe(); print(d['backend'], d['isa'])"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EDGE_")}
    return subprocess.run(
        [sys.executable, "-c", script], env={**clean, **env}, capture_output=True, text=True, timeout=60
    )


def test_an_environment_variable_chooses_the_backend():
    assert serving(EDGE_KERNELS="reference").stdout.split() == ["reference", "None"]


def test_an_environment_variable_chooses_the_instruction_set(native):
    assert serving(EDGE_CPU_ISA="portable").stdout.split() == ["native", "portable"]


def test_an_unknown_choice_is_refused_with_what_is_allowed(native):
    assert "expected one of native, torch, reference" in serving(EDGE_KERNELS="cuda").stderr
    assert "EDGE_CPU_ISA: found 'sse9', expected one of" in serving(EDGE_CPU_ISA="sse9").stderr


def test_a_number_of_threads_below_one_is_refused():
    assert "threads (EDGE_THREADS): found 0, expected 1 or more" in serving(EDGE_THREADS="many").stderr
    with pytest.raises(ValueError, match="threads"):
        backends.set_num_threads(0)


def test_describe_says_what_serves_and_why(backend):
    said = backends.describe()
    assert said["backend"] == backend.NAME
    assert (said["isa"] is not None) == (backend.NAME == "native")
    assert said["native_error"] is None or "_native" in said["native_error"]


def test_a_backend_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="backend: found 'cuda'"):
        backends.load("cuda")
