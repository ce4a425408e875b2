"""The bytes a planner reckons with are the bytes a packed weight takes."""

import pytest
import torch

from kernels import ops
from kernels.packing import packed_expert_bytes, packed_linear_bytes


def test_whole_panels_and_even_widths_take_no_padding():
    assert packed_linear_bytes(512, 256, 2) == 512 * 256 * 2
    assert packed_expert_bytes(256, 96, 2) == 256 * 96 * 3 * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("N, K", [(1, 1), (17, 33), (64, 32)])
def test_a_packed_linear_takes_the_planned_bytes(native, N, K, dtype):
    w = ops.pack_linear(torch.zeros(N, K, dtype=dtype))
    assert w.nbytes == w.handle.nbytes == packed_linear_bytes(N, K, dtype.itemsize)


@pytest.mark.parametrize("D, F", [(256, 96), (33, 17)])
def test_a_packed_expert_takes_the_planned_bytes(native, D, F):
    expert = ops.pack_expert(
        *(torch.zeros(shape, dtype=torch.bfloat16) for shape in ((F, D), (F, D), (D, F)))
    )
    assert expert.nbytes == expert.handle.nbytes == packed_expert_bytes(D, F, 2)


@pytest.mark.parametrize("activation", ["swiglu", "relu"])
@pytest.mark.parametrize("D, F", [(256, 96), (33, 17)])
def test_a_packed_expert_with_biases_takes_the_planned_bytes(native, D, F, activation):
    gate = None if activation == "relu" else torch.zeros(F, D)
    expert = ops.pack_expert(
        gate, torch.zeros(F, D), torch.zeros(D, F), activation=activation, down_bias=torch.zeros(D)
    )
    planned = packed_expert_bytes(D, F, 4, gated=gate is not None, biases=True)
    assert expert.nbytes == expert.handle.nbytes == planned
