"""Every kernel in its main specialisations becomes machine code for five chips, without spills and within their memory."""

import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import triton

from kernels.gpu import compiled
from kernels.gpu.tiles import SHARED_BYTES, TARGETS

PROCESSES = 2
PARTS = 2  # of a target's cases, so that two processes end together
FEW = (
    "linear bfloat16 few",
    "linear bfloat16 more",
    "inner swiglu bfloat16 few",
    "down swiglu bfloat16 more",
)
ONE_INSTRUCTION = (
    *FEW,
    "inner swiglu int8 few",
    "linear int4 few",
    "linear int4 more",
    "attention 128 decode",
)


def faults(target, part):
    """What is wrong with one part of a target's cases, and which matrix instructions the batch-invariant ones use."""
    found, instructions = [], set()
    for case in list(compiled.cases(target))[part::PARTS]:
        binary = compiled.machine_code(case, target)
        resources = compiled.resources(binary, target)
        if resources.spilled_bytes or resources.shared_bytes > SHARED_BYTES[target]:
            found.append(f"{case.name} on {target}: {resources}, {SHARED_BYTES[target]} bytes allowed")
        if case.name.startswith(ONE_INSTRUCTION):
            instructions |= matrix_instructions(binary)
    return found, instructions


def matrix_instructions(binary):
    if "amdgcn" in binary.asm:
        return set(re.findall(r"v_mfma_f32_\d+x\d+x\d+", binary.asm["amdgcn"]))
    return set(re.findall(r"mma\.sync\.aligned\.\w+|wgmma\.mma_async|tcgen05\.mma", binary.asm["ptx"]))


@pytest.fixture(scope="module")
def findings(pytestconfig, tmp_path_factory):
    """Faults and instructions by target, compiled by two processes; what was compiled before is kept beside pytest's notes."""
    if triton.knobs.runtime.interpret:
        pytest.skip("an interpreted kernel cannot be compiled")
    jobs = [(target, part) for target in TARGETS for part in range(PARTS)]
    notes = getattr(pytestconfig, "cache", None)
    cache = str(notes.mkdir("triton") if notes else tmp_path_factory.mktemp("triton"))
    with ProcessPoolExecutor(
        PROCESSES, mp_context=get_context("spawn"), initializer=compiled.use_cache, initargs=(cache,)
    ) as pool:
        found = dict.fromkeys(TARGETS, ([], set()))
        for (target, _), (wrong, instructions) in zip(
            jobs, pool.map(faults, *zip(*jobs, strict=True)), strict=True
        ):
            found[target] = (found[target][0] + wrong, found[target][1] | instructions)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 90 s on two free cores
@pytest.mark.parametrize("target", TARGETS)
def test_no_kernel_spills_or_takes_more_memory_than_the_chip_has(findings, target):
    assert findings[target][0] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 90 s on two free cores
@pytest.mark.parametrize("target", TARGETS)
def test_what_must_not_depend_on_the_batch_has_one_matrix_instruction(findings, target):
    expected = {"v_mfma_f32_16x16x16"} if target == "gfx942" else {"mma.sync.aligned.m16n8k16"}
    assert findings[target][1] == expected
