"""Codes and layouts: what packing loses, and that unpacking undoes it."""

import pytest
import torch

from kernels import gpu
from kernels.gpu import quantise
from kernels.gpu.weights import pack_mxfp4_expert
from kernels.reference import mxfp4
from kernels.reference.formats import decode, encode

generator = torch.Generator().manual_seed(3)


def random(*shape):
    return torch.randn(shape, generator=generator)


# Of normal weights: int8 half a step of largest / 127, int4 a step of about largest / 7.5 in groups of 32, mxfp4 an
# E2M1 grid whose steps double. The bounds are what is seen plus a tenth.
ERROR = {"bfloat16": 2e-3, "float16": 3e-4, "float32": 0.0, "int8": 8e-3, "int4": 0.092, "mxfp4": 0.13}


@pytest.mark.parametrize("format", ERROR)
@pytest.mark.parametrize("N, K", [(1, 1), (33, 97), (64, 256)])
def test_packing_loses_no_more_than_its_bound(format, N, K):
    weight = random(N, K)
    found = gpu.dequantised_linear(gpu.pack_linear(weight, format=format))
    assert found.shape == weight.shape
    assert (found - weight).norm() <= max(
        ERROR[format], 0.2 if N == 1 and format == "mxfp4" else 0
    ) * weight.norm()


@pytest.mark.parametrize("format", ERROR)
def test_zeros_and_packed_values_pack_without_loss(format):
    assert not gpu.dequantised_linear(gpu.pack_linear(torch.zeros(3, 70), format=format)).any()
    once = gpu.dequantised_linear(gpu.pack_linear(random(5, 64), format=format))
    if format != "int4":  # its float16 scale is found again only nearly
        assert torch.equal(gpu.dequantised_linear(gpu.pack_linear(once, format=format)), once)


@pytest.mark.parametrize("format", ["int8", "int4", "mxfp4"])
@pytest.mark.parametrize("N, K", [(3, 32), (17, 97), (40, 256)])
def test_codes_are_those_of_the_processors_kernels(format, N, K):
    """A replica on a GPU stands for the very numbers that one on a processor does."""
    weight = random(N, K).bfloat16()
    found = gpu.dequantised_linear(gpu.pack_linear(weight, format=format))
    assert torch.equal(found, decode(encode(weight, format)))


def test_nibbles_part_as_they_were_paired():
    codes = torch.randint(16, (5, 192), generator=generator, dtype=torch.uint8)
    blocks = quantise.pair_nibbles(codes)
    assert blocks.shape == (3, 5, 32)
    assert int(blocks[1, 2, 3]) == int(codes[2, 64 + 3]) + 16 * int(codes[2, 64 + 35])
    assert torch.equal(quantise.part_nibbles(blocks), codes)


def test_e2m1_rounds_to_the_nearest_and_ties_to_even():
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.3, 7.0, -6.0]).tolist()
    group = torch.tensor(values + [0.0] * 22)
    codes, exponent = mxfp4.e2m1_codes(group)
    assert int(exponent) == 127
    assert codes[:10].tolist() == [0, 2, 2, 4, 4, 6, 6, 9, 7, 15]


def test_a_checkpoints_mxfp4_is_taken_bit_for_bit():
    F, D = 40, 96
    gate, up, down = (gpu.mxfp4.pack(weight) for weight in (random(F, D), random(F, D), random(D, F + 24)))
    expert = pack_mxfp4_expert([gate, up], (down[0][:, :2], down[1][:, :2]), inner_biases=(random(F), None))

    def meant(blocks, scales):
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
        table = torch.tensor([*quantise.E2M1, *(-step for step in quantise.E2M1)])
        return table[codes.long()] * torch.exp2(scales.float() - 127).repeat_interleave(32, dim=1)

    found = gpu.dequantised_expert(expert)
    assert torch.equal(found["gate"], meant(*gate)) and torch.equal(found["up"], meant(*up))
    assert torch.equal(found["down"], meant(*down)[:, :F])
    assert not found["up_bias"].any() and found["gate_bias"].any()


def test_every_part_of_an_expert_begins_on_a_line_and_none_overlap():
    for format in quantise.FORMATS:
        layout = gpu.pack_expert(
            random(40, 72), random(40, 72), random(72, 40), format=format, up_bias=random(40)
        ).layout
        ends = 0
        for name, (offset, shape, dtype) in layout.sections.items():
            assert offset % 256 == 0 and offset >= ends, name
            ends = offset + torch.Size(shape).numel() * dtype.itemsize


def test_a_bank_counts_an_expert_once_and_knows_its_slices():
    expert = gpu.pack_expert(random(64, 32), random(64, 32), random(32, 64))
    bank = gpu.ExpertBank(4, 32, 64, device="cpu")
    bank.set_slice(1, expert, 0, 32)
    bank.set_slice(3, expert, 32, 32)
    assert bank.resident == (1, 3) and bank.nbytes == expert.nbytes
    assert bank.ranges[3].tolist() == [32, 32] and bank.addresses.count_nonzero() == 2
    bank.drop(1)
    assert bank.resident == (3,) and int(bank.addresses[1]) == 0
    with pytest.raises(IndexError, match="expert 1 is not resident"):
        bank.drop(1)


def test_what_does_not_fit_is_refused_with_what_was_found():
    bank = gpu.ExpertBank(2, 32, 64, device="cpu")
    bank.set(0, gpu.pack_expert(random(64, 32), random(64, 32), random(32, 64)))
    with pytest.raises(ValueError, match="found D=32, F=48"):
        bank.set(1, gpu.pack_expert(random(48, 32), random(48, 32), random(32, 48)))
    with pytest.raises(ValueError, match="as the others in this bank"):
        bank.set(1, gpu.pack_expert(random(64, 32), random(64, 32), random(32, 64), format="int8"))
    with pytest.raises(ValueError, match="found 'int3'"):
        gpu.pack_linear(random(4, 4), format="int3")
    with pytest.raises(ValueError, match="activation 'relu'"):
        gpu.pack_expert(random(64, 32), random(64, 32), random(32, 64), activation="relu")
