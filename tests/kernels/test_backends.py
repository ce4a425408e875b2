"""Which backend serves, and what is said about it."""

import os
import subprocess
import sys

import pytest

from kernels import backends, settings
from kernels.settings import SettingError


def test_the_variables_choose_backend_and_instruction_set_of_a_process(native):
    script = "from kernels import backends; said = backends.describe(); print(said['backend'], said['isa'])"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EDGE_")}
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**clean, "EDGE_KERNELS": "native", "EDGE_CPU_ISA": "portable"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.stdout.split() == ["native", "portable"]


@pytest.mark.parametrize("name", ["torch", "reference"])
def test_a_backend_can_be_asked_for_by_name(name):
    assert backends.choose({"EDGE_KERNELS": name}).NAME == name


def test_the_compiled_kernels_serve_when_nothing_is_asked_for(native):
    assert backends.choose({}).NAME == "native"


@pytest.mark.parametrize(
    "variable, value, said",
    [
        (
            "EDGE_KERNELS",
            "cuda",
            "EDGE_KERNELS: found 'cuda', expected one of native, torch, reference, triton, or not set",
        ),
        ("EDGE_KERNELS", "triton", "EDGE_KERNELS: found triton, whose kernels run on a GPU"),
        ("EDGE_CPU_ISA", "sse9", "EDGE_CPU_ISA: found 'sse9', expected one of"),
        ("EDGE_THREADS", "many", "EDGE_THREADS: found 'many', expected a whole number from 1 to"),
        ("EDGE_THREADS", "0", "EDGE_THREADS: found '0', expected a whole number from 1 to"),
        ("EDGE_THREADS", "1000", "EDGE_THREADS: found '1000', .* on this machine, which has"),
    ],
)
def test_an_unknown_choice_is_refused_with_what_is_allowed(native, variable, value, said):
    with pytest.raises(SettingError, match=said):
        backends.choose({variable: value})


def test_kernels_that_are_asked_for_and_cannot_be_had_are_refused(monkeypatch):
    def load(name):
        raise ImportError("No module named 'kernels.cpu._native'")

    monkeypatch.setattr(backends, "load", load)
    with pytest.raises(
        SettingError, match="EDGE_KERNELS: found 'native', which cannot be had here: No module"
    ):
        backends.choose({"EDGE_KERNELS": "native"})


@pytest.mark.parametrize(
    ("value", "is_on"), [("", False), ("0", False), ("off", False), ("1", True), ("on", True)]
)
def test_a_switch_is_on_or_off_or_refused(value, is_on):
    assert settings.is_on({"EDGE_COMPILE": value}, "EDGE_COMPILE") is is_on
    with pytest.raises(SettingError, match="EDGE_COMPILE: found 'perhaps', expected on or off"):
        settings.is_on({"EDGE_COMPILE": "perhaps"}, "EDGE_COMPILE")


def test_the_number_of_threads_is_kept(backend):
    before = backend.num_threads()
    backends.set_num_threads(2)
    assert backends.describe()["threads"] == 2
    backends.set_num_threads(before)


def test_describe_says_what_serves_and_why(backend):
    said = backends.describe()
    assert said["backend"] == backend.NAME
    assert (said["isa"] is not None) == (backend.NAME == "native")
    assert said["native_error"] is None or "_native" in said["native_error"]


STALE = """
import logging, sys, types
import kernels.cpu
stale = types.ModuleType("kernels.cpu._native")
{attributes}
sys.modules["kernels.cpu._native"] = kernels.cpu._native = stale
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
from kernels import backends
from edge_runtime.doctor import _kernels
print("serves", backends.active().NAME, backends.active().NAME)
print("doctor", _kernels().detail)
"""


@pytest.mark.parametrize(("attributes", "found"), [("", 1), ("stale.INTERFACE = 10**6", 10**6)])
def test_a_compiled_module_of_other_files_is_told_once_and_left(attributes, found):
    """As after new Python files came without a new build: any attribute may be missing, or mean something else."""
    run = subprocess.run(
        [sys.executable, "-c", STALE.format(attributes=attributes)],
        env={name: value for name, value in os.environ.items() if not name.startswith("EDGE_")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    warned, serves, doctor = run.stdout.splitlines()
    assert warned.startswith("WARNING kernels.cpu._native was built for other Python files")
    assert f"found interface {found}, expected" in warned and "`make install`" in warned
    assert serves == "serves torch torch"
    assert "torch path" in doctor and "`make install`" in doctor


def test_the_compiled_module_has_the_interface_of_these_files(native):
    from kernels.cpu import _native
    from kernels.interface import INTERFACE

    assert _native.INTERFACE == INTERFACE
