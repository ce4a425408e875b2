"""Experts and pages for the tests of kernels/gpu, and how far from the truth they may be."""

import torch

from kernels import gpu as kernels_gpu

# Distance of the whole result over its length. bfloat16 operands: 2^-9 each, products of random values: half of 1e-2 is
# far more than seen. float32 operands: sums of a few hundred terms.
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def error(found, expected):
    """|found - expected| / |expected|; inf where found is not finite."""
    found, expected = found.double(), expected.double()
    distance = (found - expected).norm() / expected.norm().clamp(min=1e-30)
    return float(distance) if found.isfinite().all() else float("inf")


def make_bank(random, device, experts, E, D, F, *, activation="swiglu", format="bfloat16", bias=False):
    """A bank of E ids of which `experts` are resident, random."""
    bank = kernels_gpu.ExpertBank(E, D, F, device=device)
    for expert_id in experts:
        up, down = random(F, D) * D**-0.5, random(D, F) * F**-0.5
        gate = None if activation == "relu" else random(F, D) * D**-0.5
        biases = {"alpha": 1.702, "limit": 1.5} if activation == "clamped_swiglu" else {}
        if bias:
            biases |= {"up_bias": random(F), "down_bias": random(D)}
            if gate is not None:
                biases["gate_bias"] = random(F)
        expert = kernels_gpu.pack_expert(gate, up, down, format=format, activation=activation, **biases)
        bank.set(expert_id, expert)
    return bank


def make_pages(random, device, lengths, G, P, Pv, *, shared=False):
    """Pages that hold requests of these lengths, their block tables; what no token was written to is nan."""
    per_request = [-(-length // 16) for length in lengths]
    k_pages, v_pages = kernels_gpu.new_pages(
        sum(per_request) + 2, G, P, Pv, torch.float32, device, shared=shared
    )
    k_pages.fill_(torch.nan)
    v_pages.fill_(torch.nan)
    places = random(sum(per_request) + 2).argsort().int()
    tables = torch.zeros(len(lengths), max(per_request) + 1, dtype=torch.int32, device=device)
    slots, begin = [], 0
    for request, (length, blocks) in enumerate(zip(lengths, per_request, strict=True)):
        tables[request, :blocks] = places[begin : begin + blocks]
        begin += blocks
        slots += [int(tables[request, t // 16]) * 16 + t % 16 for t in range(length)]
    v = None if shared else random(len(slots), G, Pv)
    where = torch.tensor(slots, dtype=torch.int32, device=device)
    kernels_gpu.kv_write(random(len(slots), G, P), v, k_pages, v_pages, where)
    return k_pages, v_pages, tables
