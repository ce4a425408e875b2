"""The one script for a machine with a GPU: `python -m testbed.gpu_check`. It takes less than five minutes.

Holds every Triton kernel to its plain definition, decode rows to the same bits in any batch, a decode segment to itself
under torch.compile and in a captured graph, steps of the demo model on captured segments to steps layer by layer, and
nodes of it on the GPU to one on the processor, by real daemons. All that runs in several processes, since most of it is
compiling; what fails is said at once and stops nothing else. Then each kernel is timed alone, beside what memory and
matrix units do at best and beside torch. Prints a table for kernels/README.md. Exit code 0: all well, 1: something differs
or fails, 2: no GPU here. With TRITON_INTERPRET=1 the comparisons run on the CPU at tiny sizes, to check this script itself.
"""

import datetime
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import cycle
from time import perf_counter
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from kernels import gpu
from kernels.gpu import plain
from kernels.gpu.tiles import INTERPRETED, target
from testbed.carried import DEMO_MODEL
from testbed.gpu_node import node_checks

FORMATS = ("bfloat16", "float16", "float32", "int8", "int4", "mxfp4")
BUDGET_S = 270.0
"""No timing begins later than this after the start, so that all ends within 5 minutes."""
PROCESSES = 6  # each with a context of its own on the device, some 600 MB
ROTATED_BYTES = 512 << 20  # weights rotate through more than any L2 holds
EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    """One layer in the repository's letters, and B streams of C positions each."""

    D: int = 2048
    H: int = 32
    G: int = 4
    P: int = 128
    F: int = 768
    E: int = 128
    K: int = 8
    B: int = 16
    C: int = 2048


TINY = Sizes(D=64, H=4, G=2, P=16, F=64, E=4, K=2, B=3, C=40)


class Inputs:
    """Random tensors on one device, from one generator."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.generator = torch.Generator(device=device).manual_seed(5)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, device=self.device) * scale
        return drawn.to(dtype or self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator, device=self.device, dtype=torch.int32)

    def counting(self, n: int) -> Tensor:
        return torch.arange(n, device=self.device, dtype=torch.int32)

    def bank(self, s: Sizes, format: str = "bfloat16", activation: str = "swiglu") -> gpu.ExpertBank:
        bank = gpu.ExpertBank(s.E, s.D, s.F, device=self.device)
        for expert_id in range(s.E):
            up, down = self.normal(s.F, s.D, scale=s.D**-0.5), self.normal(s.D, s.F, scale=s.F**-0.5)
            gate = None if activation == "relu" else self.normal(s.F, s.D, scale=s.D**-0.5)
            biases: dict[str, Any] = {}
            if activation == "clamped_swiglu":
                biases = {
                    "alpha": 1.702,
                    "limit": 7.0,
                    "gate_bias": self.normal(s.F),
                    "up_bias": self.normal(s.F),
                    "down_bias": self.normal(s.D),
                }
            bank.set(
                expert_id, gpu.pack_expert(gate, up, down, format=format, activation=activation, **biases)
            )
        return bank

    def pages(
        self, s: Sizes, *, shared: bool = False, Pv: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Full pages of B requests, and their tables."""
        blocks = -(-s.C // 16)
        k, v = gpu.new_pages(s.B * blocks, s.G, s.P, Pv or s.P, self.dtype, self.device, shared=shared)
        k.copy_(self.normal(*k.shape))
        if not shared:
            v.copy_(self.normal(*v.shape))
        order = torch.randperm(s.B * blocks, generator=self.generator, device=self.device).int()
        return k, v, order.view(s.B, blocks)


Result = tuple[str, float, float]
"""What was looked at, how far off it is, and how far it may be."""


def error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|; inf where found is not finite."""
    if not bool(found.isfinite().all()):
        return float("inf")
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm().clamp(min=1e-30))


HALF = 1e-2  # bfloat16 operands and outputs


def products(s: Sizes, make: Inputs, format: str) -> Iterator[Result]:
    """linear and embed against their plain definitions; rows of float32, as nodes hold them, and of the operand's dtype."""
    for dtype in (make.dtype, torch.float32) if make.dtype is not torch.float32 else (make.dtype,):
        x = make.normal(40, s.D, dtype=dtype)
        w = gpu.pack_linear(make.normal(3 * s.F + 5, s.D, scale=s.D**-0.5), format=format)
        kind = f"{format} rows {str(dtype).removeprefix('torch.')}"
        for T, prompt in ((1, False), (16, False), (40, False), (40, True)):
            name = f"linear {kind} T={T}{' prompt' if prompt else ''}"
            yield name, error(gpu.linear(x[:T], w, prompt=prompt), plain.linear(x[:T], w)), HALF
    ids = make.integers(3 * s.F, 7)
    yield f"embed {format}", error(gpu.embed(ids, w), gpu.dequantised_linear(w)[ids.long()]), 1e-6


def expert_products(s: Sizes, make: Inputs, activation: str) -> Iterator[Result]:
    """grouped_ffn against its plain definition, and rows that run all slices against grouped_ffn."""
    x = make.normal(40, s.D, dtype=torch.float32)
    for format in FORMATS:
        few = replace(s, E=min(s.E, 6))
        bank = make.bank(few, format, activation)
        for R, prompt in ((3, False), (150, False), (150, True)) if s.D > 64 else ((7, False),):
            rows, expert_ids = make.integers(40, R), make.integers(few.E, R)
            found = gpu.grouped_ffn(x, rows, expert_ids, bank, prompt=prompt)
            name = f"grouped_ffn {activation} {format} R={R}{' prompt' if prompt else ''}"
            yield name, error(found, plain.grouped_ffn(x, rows, expert_ids, bank)), HALF
        rows, expert_ids, masks = make.counting(5), make.integers(few.E, 5), make.integers(16, 5)
        masks[0], masks[1] = 15, 0
        found = gpu.sliced_ffn(x, rows, expert_ids, masks, 4, bank)
        whole = gpu.grouped_ffn(x, rows, expert_ids, bank)
        yield f"sliced_ffn {activation} {format}, whole", float((found[0] != whole[0]).sum()), 0.5
        yield f"sliced_ffn {activation} {format}, nothing", float((found[1] != 0).sum()), 0.5


def attentions(s: Sizes, make: Inputs) -> Iterator[Result]:
    """paged_attention and biased_attention against their plain definitions."""
    options: list[tuple[str, Sizes, dict[str, object], int | None]] = [
        ("", s, {}, None),
        ("window sinks", s, {"window": 33, "sinks": make.normal(s.H, dtype=torch.float32)}, None),
        ("soft cap", s, {"soft_cap": 20.0}, None),
        (
            "latent",
            replace(s, G=1, P=576 if s.D > 64 else 48),
            {},
            512 if s.D > 64 else 32,
        ),
    ]
    for name, shape, kinds, Pv in options:
        k, v, tables = make.pages(shape, shared=Pv is not None, Pv=Pv)
        position = [(37 * t + 11) % shape.C for t in range(shape.B)] + list(range(4, 37))
        request = [*range(shape.B)] + [1] * 33
        at = [torch.tensor(part, dtype=torch.int32, device=make.device) for part in (request, position)]
        q = make.normal(len(position), shape.H, shape.P)
        expected = plain.paged_attention(q, k, v, tables, *at, shape.P**-0.5, **kinds)  # type: ignore[arg-type]
        if not kinds and Pv is None:
            own, bias = at[1] + 3, make.normal(shape.H, 2 * 20 + 1, dtype=torch.float32)
            found = gpu.biased_attention(q, k, v, tables, *at, shape.P**-0.5, bias, own)
            right = plain.paged_attention(q, k, v, tables, *at, shape.P**-0.5, bias=bias, own_position=own)
            yield "biased_attention", error(found, right), HALF
        heads = gpu.attention_plan(request, position, make.device)
        for plan in (None, heads):
            found = gpu.paged_attention(q, k, v, tables, *at, shape.P**-0.5, plan=plan, **kinds)  # type: ignore[arg-type]
            yield (
                f"paged_attention {name} {'decode' if plan is None else 'mixed'}",
                error(found, expected),
                HALF,
            )


def row_kernels(s: Sizes, make: Inputs) -> Iterator[Result]:
    """What reads rows once, against its plain definition."""
    x, weight = make.normal(40, s.D), make.normal(s.D, dtype=torch.float32)
    yield "rms_norm", error(gpu.rms_norm(x, weight, EPS), plain.rms_norm(x, weight, EPS)), HALF
    q = make.normal(40, s.H, s.P)
    cos, sin = (make.normal(64, s.P // 2, dtype=torch.float32) for _ in range(2))
    positions, head_weight = make.integers(64, 40), make.normal(s.P, dtype=torch.float32)
    for interleaved in (False, True):
        turned = q.clone()
        gpu.head_norm_rope(turned, head_weight, EPS, cos, sin, positions, interleaved=interleaved)
        expected = plain.head_norm_rope(q, head_weight, EPS, cos, sin, positions, interleaved)
        yield f"head_norm_rope{' interleaved' if interleaved else ''}", error(turned, expected), HALF
    logits = make.normal(40, s.E, dtype=torch.float32)
    bias = make.normal(s.E, dtype=torch.float32)
    for scores, changed in (("softmax", {}), ("softmax_of_top_k", {}), ("sigmoid", {"selection_bias": bias})):
        ids, weights = gpu.gate_topk(logits, s.K, renormalise=True, scores=scores, **changed)
        right_ids, right_weights = plain.gate_topk(logits, s.K, True, scores, **changed)
        yield f"gate_topk {scores} ids", float((ids != right_ids).sum()), 0.5
        yield f"gate_topk {scores} weights", error(weights, right_weights), 1e-5
    slots, expert_out = make.integers(41, 40, s.K) - 1, make.normal(40, s.D)
    hidden, gates = make.normal(40, s.D, dtype=torch.float32), make.normal(40, s.K, dtype=torch.float32)
    expected = plain.combine(expert_out, slots, gates, hidden)
    gpu.combine(expert_out, slots, gates, hidden)
    yield "combine", error(hidden, expected), 1e-5
    blocks, scales = gpu.mxfp4.pack(make.normal(64, 96, dtype=torch.float32))
    packed = gpu.pack_linear(gpu.mxfp4.unpack(blocks, scales), format="mxfp4")
    yield "mxfp4", error(gpu.mxfp4.unpack(blocks, scales), gpu.dequantised_linear(packed)), 1e-6
    capped = make.normal(5, 1500, scale=9.0, dtype=torch.float32)
    expected = 7.0 * torch.tanh(capped.double() / 7.0)
    gpu.soft_cap(capped, 7.0)
    yield "soft_cap", error(capped, expected), 1e-5


def dispatched(s: Sizes, make: Inputs) -> Iterator[Result]:
    """dispatch against its reference, which needs the CPU."""
    from kernels.reference import dispatch

    ids, hosts = make.integers(s.E, 150, s.K), make.integers(6, s.E) - 1
    found, expected = gpu.dispatch(ids, hosts, 5), dispatch(ids.cpu(), hosts.cpu(), 5)
    wrong = sum(getattr(found, name).tolist() != getattr(expected, name).tolist() for name in found._fields)
    yield "dispatch", float(wrong), 0.5


def changed_bits(s: Sizes, make: Inputs) -> Iterator[Result]:
    """(what, rows whose bits differ between alone and among others, 0.5) of every path that decodes."""
    total = 64 if s.D > 64 else 4
    x = make.normal(total, s.D)
    batches = [make.integers(total, n).long() for n in ((2, 16, 17, total) if s.D > 64 else (17,))]
    for format in FORMATS:
        for N in (s.F, 9000) if s.D > 64 else (s.F,):
            w = gpu.pack_linear(make.normal(N, s.D, scale=s.D**-0.5), format=format)
            alone = torch.cat([gpu.linear(x[i : i + 1], w) for i in range(total)])
            wrong = sum(int((gpu.linear(x[b], w) != alone[b]).any(dim=1).sum()) for b in batches)
            yield f"invariance linear {format} N={N}", float(wrong), 0.5
        few = replace(s, E=3)
        bank, ids = make.bank(few, format), make.integers(3, total)
        one = make.counting(total)
        alone = torch.cat([gpu.grouped_ffn(x, one[i : i + 1], ids[i : i + 1], bank) for i in range(total)])
        wrong = sum(
            int((gpu.grouped_ffn(x, b.int(), ids[b].contiguous(), bank) != alone[b]).any(dim=1).sum())
            for b in batches
        )
        yield f"invariance grouped_ffn {format}", float(wrong), 0.5
    k, v, tables = make.pages(s)
    q, request, position = make.normal(total, s.H, s.P), make.integers(s.B, total), make.integers(s.C, total)

    def attend(b: Tensor) -> Tensor:
        at = (request[b].contiguous(), position[b].contiguous())
        return gpu.paged_attention(q[b], k, v, tables, *at, s.P**-0.5)

    alone = torch.cat([attend(torch.tensor([i], device=make.device)) for i in range(total)])
    wrong = sum(int((attend(b) != alone[b]).flatten(1).any(dim=1).sum()) for b in batches)
    yield "invariance paged_attention", float(wrong), 0.5
    request, position = torch.zeros_like(request), make.counting(total) % s.C  # a prompt: rows share tiles
    alone = torch.cat([attend(torch.tensor([i], device=make.device)) for i in range(total)])
    together = attend(torch.arange(total, device=make.device))
    yield "invariance paged_attention, prompt", float((together != alone).flatten(1).any(dim=1).sum()), 0.5


def decode_segment(s: Sizes, make: Inputs) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """One layer of decode as a function of the residual [B, D], and a residual."""
    qkv = gpu.pack_linear(make.normal((s.H + 2 * s.G) * s.P, s.D, scale=s.D**-0.5))
    out = gpu.pack_linear(make.normal(s.D, s.H * s.P, scale=(s.H * s.P) ** -0.5))
    router = gpu.pack_linear(make.normal(s.E, s.D, scale=s.D**-0.5), format="float32")
    bank = make.bank(s)
    k_pages, v_pages, tables = make.pages(s)
    norm, head_norm = make.normal(s.D, dtype=torch.float32), make.normal(s.P, dtype=torch.float32)
    cos, sin = (make.normal(s.C, s.P // 2, dtype=torch.float32) for _ in range(2))
    request, position = make.counting(s.B), torch.full_like(make.counting(s.B), s.C - 1)
    slots = (tables[:, -1] * 16 + (s.C - 1) % 16).int()
    rows = make.counting(s.B).repeat_interleave(s.K).contiguous()
    pairs = make.counting(s.B * s.K).view(s.B, s.K)

    def run(residual: Tensor) -> Tensor:
        hidden = residual.clone()
        heads = gpu.linear(gpu.rms_norm(hidden, norm, EPS).to(make.dtype), qkv).view(s.B, s.H + 2 * s.G, s.P)
        q, k, v = heads[:, : s.H], heads[:, s.H : s.H + s.G], heads[:, s.H + s.G :]
        gpu.head_norm_rope(q, head_norm, EPS, cos, sin, position)
        gpu.head_norm_rope(k, head_norm, EPS, cos, sin, position)
        gpu.kv_write(k, v, k_pages, v_pages, slots)
        attended = gpu.paged_attention(
            q, k_pages, v_pages, tables, request, position, s.P**-0.5,
            out=torch.empty(s.B, s.H, s.P, dtype=make.dtype, device=make.device),
        )  # fmt: skip
        gpu.linear(attended.view(s.B, -1), out, out=hidden, add=True)
        normed = gpu.rms_norm(hidden, norm, EPS)
        ids, weights = gpu.gate_topk(gpu.linear(normed, router), s.K, renormalise=True)
        expert_out = gpu.grouped_ffn(normed.to(make.dtype), rows, ids.view(-1), bank, check=False)
        gpu.combine(expert_out, pairs, weights, hidden)
        return hidden

    return run, make.normal(s.B, s.D, dtype=torch.float32)


def recorded_steps(device: torch.device) -> Iterator[Result]:
    """Decode steps of the demo model on captured segments and layer by layer: tokens that differ, and what is kept."""
    from kernels import backends, replay
    from testbed.elastic import measure

    backends.use("triton", device)
    model = DEMO_MODEL
    checkpoint, _, parts = measure.open_parts(model, model / "calibration")
    bench = measure.Bench(checkpoint, parts, 4, measure.Load(answer_tokens=12))
    tiers = (bench.full, 6, bench.full // 2, 6)
    record = replay.REPEATING if INTERPRETED else replay.CUDA_GRAPH
    expected = bench.tokens(tiers, bench.engine(joins=False))
    engine = bench.engine(joins=False, record=record)
    for turn in ("captured", "replayed"):
        found = bench.tokens(tiers, engine)
        wrong = sum(a != b for a, b in zip(found, expected, strict=True))
        yield f"steps on {record.name}, {turn}: answers that differ", float(wrong), 0.5
    counts = engine.runner.segment_counts()
    name = f"{counts.attention} + {counts.experts} segments, {counts.num_bytes / 1e6:.1f} MB"
    yield f"{name}, of whole steps", 1 - counts.spared, 1.0


def replays(s: Sizes, make: Inputs) -> Iterator[Result]:
    """The decode segment eager, captured, and under torch.compile: bits that differ."""
    run, residual = decode_segment(s, make)
    eager = run(residual)
    yield "decode segment is finite", float(not bool(eager.isfinite().all())), 0.5
    graph = torch.cuda.CUDAGraph()
    place = residual.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(place)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        captured = run(place)
    place.copy_(residual * 2)  # the graph must read what stands there when it is replayed
    graph.replay()
    yield "captured graph, other input", float((captured != run(residual * 2)).sum()), 0.5
    yield "torch.compile", error(torch.compile(run)(residual), eager), 1e-3


@dataclass(frozen=True)
class Timing:
    """One row of the table; torch_ms nan where torch has no such thing, error nan where it is looked at elsewhere."""

    name: str
    ms: float
    flops: float
    moved_bytes: float
    torch_ms: float = float("nan")
    error: float = float("nan")


def milliseconds(call: Callable[[], object], *, graph: bool = True) -> float:
    """Median time of one call. Many calls in one captured graph, so that launching from Python is not what is timed."""
    if graph:
        return float(triton.testing.do_bench_cudagraph(call, rep=40, return_mode="median"))
    return float(triton.testing.do_bench(call, warmup=20, rep=80, return_mode="median"))


def rotated(make_one: Callable[[], Any], nbytes: int) -> Iterator[Any]:
    """Equal things one after another, more bytes of them than the cache holds."""
    return cycle([make_one() for _ in range(max(2, min(64, ROTATED_BYTES // max(1, nbytes))))])


def linear_timing(make: Inputs, weight: Tensor, format: str, T: int) -> Timing:
    N, K = weight.shape
    packed = gpu.pack_linear(weight, format=format)
    ring = rotated(lambda: gpu.pack_linear(weight, format=format), packed.nbytes)
    plain_ring = rotated(weight.clone, weight.nbytes)
    x, out = make.normal(T, K), torch.empty(T, N, dtype=make.dtype, device=make.device)
    ms = milliseconds(lambda: gpu.linear(x, next(ring), out=out, prompt=T > 64))
    by_torch = milliseconds(lambda: torch.mm(x, next(plain_ring).T, out=out))
    moved = packed.nbytes + 2.0 * T * (N + K)
    off = error(gpu.linear(x, packed, prompt=T > 64), plain.linear(x, packed)) if N < 10**5 else float("nan")
    return Timing(f"linear {format} {N}x{K} T={T}", ms, 2.0 * T * N * K, moved, by_torch, off)


def experts_timing(s: Sizes, make: Inputs, bank: gpu.ExpertBank, format: str, T: int) -> Timing:
    x, rows = make.normal(T, s.D), make.counting(T).repeat_interleave(s.K).contiguous()
    ids = torch.stack([torch.randperm(s.E, device=make.device)[: s.K] for _ in range(T)]).int().view(-1)
    out = torch.empty(T * s.K, s.D, dtype=make.dtype, device=make.device)
    ms = milliseconds(lambda: gpu.grouped_ffn(x, rows, ids, bank, out=out, prompt=T > 64, check=False))
    by_torch = float("nan")
    if format == "bfloat16":
        by_torch = milliseconds(
            torch_experts(s, bank, x, ids), graph=False
        )  # its loop asks the device for sizes
    moved = bank.nbytes / s.E * len(ids.unique()) + 2.0 * T * s.D * (1 + s.K)
    name = f"grouped_ffn {format} {s.E} top-{s.K} {s.D}x{s.F} T={T}"
    off = error(out, plain.grouped_ffn(x, rows, ids, bank)) if T <= 16 else float("nan")
    return Timing(name, ms, 6.0 * T * s.K * s.D * s.F, moved, by_torch, off)


def decode_timing(s: Sizes, make: Inputs) -> Timing:
    k, v, tables = make.pages(s)
    q, request = make.normal(s.B, s.H, s.P), make.counting(s.B)
    position = torch.full_like(request, s.C - 1)
    ms = milliseconds(lambda: gpu.paged_attention(q, k, v, tables, request, position, s.P**-0.5))
    found = gpu.paged_attention(q, k, v, tables, request, position, s.P**-0.5)
    off = error(found, plain.paged_attention(q, k, v, tables, request, position, s.P**-0.5))
    keys, values = make.normal(2, s.B, s.G, s.C, s.P)
    by_torch = milliseconds(
        lambda: scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)
    )
    flops, moved = 4.0 * s.B * s.C * s.H * s.P, 4.0 * s.B * s.C * s.G * s.P
    return Timing(f"paged_attention decode B={s.B} C={s.C}", ms, flops, moved, by_torch, off)


def prompt_timing(s: Sizes, make: Inputs, *, planned: bool) -> Timing:
    k, v, tables = make.pages(s)
    q, position = make.normal(s.C, s.H, s.P), make.counting(s.C)
    request = torch.zeros_like(position)
    rows_each = gpu.prompt_rows(s.H // s.G, target(make.device), s.P, s.P)
    plan = gpu.attention_plan([0] * s.C, list(range(s.C)), make.device, rows_each) if planned else None
    ms = milliseconds(lambda: gpu.paged_attention(q, k, v, tables, request, position, s.P**-0.5, plan=plan))
    keys, values = make.normal(2, 1, s.G, s.C, s.P)
    heads_first = q.transpose(0, 1)[None].contiguous()
    by_torch = milliseconds(
        lambda: scaled_dot_product_attention(heads_first, keys, values, is_causal=True, enable_gqa=True)
    )
    flops, moved = 2.0 * s.C * s.C * s.H * s.P, 4.0 * s.C * s.P * (s.G + s.H)
    name = f"paged_attention prompt C={s.C}{'' if planned else ', as nodes run it'}"
    return Timing(name, ms, flops, moved, by_torch)


def timings(s: Sizes, make: Inputs) -> Iterator[tuple[str, Callable[[], Iterator[Timing]]]]:
    """Each kernel at decode and prompt sizes of the layer, what matters most first; one that fails stops no other."""

    def one(call: Callable[[], Timing]) -> Callable[[], Iterator[Timing]]:
        return lambda: iter((call(),))

    quantised = ("bfloat16", "int8", "int4", "mxfp4")

    def experts(format: str) -> Iterator[Timing]:
        bank = make.bank(s, format)
        for T in (1, 16, 2048):
            yield experts_timing(s, make, bank, format, T)

    for format in quantised:
        yield f"grouped_ffn {format}", lambda format=format: experts(format)
    for B, C in ((1, 2048), (16, 2048), (1, 32768)):
        sizes = replace(s, B=B, C=C)
        yield f"attention B={B} C={C}", one(lambda sizes=sizes: decode_timing(sizes, make))
    for planned in (False, True):
        sizes = replace(s, B=1, C=2048)
        yield "attention of a prompt", one(lambda p=planned, z=sizes: prompt_timing(z, make, planned=p))

    def linears(N: int, K: int, format: str) -> Iterator[Timing]:
        weight = make.normal(N, K, scale=K**-0.5)
        for T in (1, 16, 2048) if N < 10**5 else (1, 16):
            yield linear_timing(make, weight, format, T)

    for N, K in (((s.H + 2 * s.G) * s.P, s.D), (s.D, s.H * s.P), (151936, s.D)):
        for format in quantised:
            yield f"linear {format} {N}", lambda N=N, K=K, format=format: linears(N, K, format)
    for T in (16, 2048):
        yield f"rows T={T}", lambda T=T: row_timings(s, make, T)


def torch_experts(s: Sizes, bank: gpu.ExpertBank, x: Tensor, ids: Tensor) -> Callable[[], object]:
    """What transformers does: a loop over the experts that were asked for."""
    layout = bank.layout
    assert layout is not None
    views = {
        e: (layout.view(bank.expert(e).buffer, "in"), layout.view(bank.expert(e).buffer, "out"))
        for e in ids.unique().tolist()
    }
    token_of = torch.arange(len(ids), device=x.device) // s.K

    def run() -> None:
        out = torch.empty(len(ids), s.D, dtype=x.dtype, device=x.device)
        for expert_id, (inner, down) in views.items():
            mine = (ids == expert_id).nonzero().flatten()
            gate, up = (x[token_of[mine]] @ inner.T).chunk(2, dim=1)
            out[mine] = (silu(gate) * up) @ down.T

    return run


def row_timings(s: Sizes, make: Inputs, T: int) -> Iterator[Timing]:
    """What reads rows once."""
    x, weight = make.normal(T, s.D), make.normal(s.D)
    out = torch.empty_like(x)
    ms = milliseconds(lambda: gpu.rms_norm(x, weight, EPS, out=out))
    by_torch = milliseconds(lambda: torch.nn.functional.rms_norm(x, (s.D,), weight, EPS))
    yield Timing(f"rms_norm {T}x{s.D}", ms, 4.0 * T * s.D, 4.0 * T * s.D, by_torch)
    q, positions = make.normal(T, s.H, s.P), make.integers(s.C, T)
    cos, sin = (make.normal(s.C, s.P // 2, dtype=torch.float32) for _ in range(2))
    head_weight = make.normal(s.P)
    ms = milliseconds(lambda: gpu.head_norm_rope(q, head_weight, EPS, cos, sin, positions))
    yield Timing(f"head_norm_rope {T}x{s.H}x{s.P}", ms, 9.0 * q.numel(), 4.0 * q.numel() + 4.0 * T * s.P)
    logits = make.normal(T, s.E, dtype=torch.float32)
    ms = milliseconds(lambda: gpu.gate_topk(logits, s.K, renormalise=True))
    by_torch = milliseconds(lambda: logits.softmax(dim=-1).topk(s.K))
    yield Timing(f"gate_topk {T}x{s.E} top-{s.K}", ms, 20.0 * T * s.E, 4.0 * T * s.E, by_torch)
    expert_out, hidden = make.normal(T * s.K, s.D), make.normal(T, s.D, dtype=torch.float32)
    slots, gates = make.counting(T * s.K).view(T, s.K), make.normal(T, s.K, dtype=torch.float32)
    ms = milliseconds(lambda: gpu.combine(expert_out, slots, gates, hidden))
    yield Timing(f"combine {T}x{s.K}x{s.D}", ms, 2.0 * T * s.K * s.D, 2.0 * T * s.K * s.D + 8.0 * T * s.D)
    hosts = make.integers(8, s.E)
    ids = make.integers(s.E, T, s.K)
    ms = milliseconds(lambda: gpu.dispatch_on_device(ids, hosts, 8))
    yield Timing(f"dispatch {T}x{s.K} to 8 hosts", ms, 0.0, 16.0 * T * s.K)


def ceilings(make: Inputs) -> tuple[float, float]:
    """Bytes per second of a large copy (read and written), and bfloat16 operations per second of a large product."""
    large = torch.empty(1 << 30, dtype=torch.uint8, device=make.device)
    other = torch.empty_like(large)
    bandwidth = 2 * large.nbytes / milliseconds(lambda: other.copy_(large), graph=False) * 1e3
    a, b = make.normal(8192, 8192), make.normal(8192, 8192)
    return bandwidth, 2 * 8192**3 / milliseconds(lambda: a @ b, graph=False) * 1e3


SECTIONS: dict[str, Callable[[Sizes, Inputs], Iterator[Result]]] = {
    **{f"linear {each}": lambda s, make, each=each: products(s, make, each) for each in FORMATS},
    **{
        f"grouped_ffn {each}": lambda s, make, each=each: expert_products(s, make, each)
        for each in ("swiglu", "geglu_tanh", "clamped_swiglu", "relu")
    },
    "attention": attentions,
    "rows": row_kernels,
    "dispatch": dispatched,
    "invariance": changed_bits,
}
ON_DEVICE: dict[str, Callable[[Sizes, Inputs], Iterator[Result]]] = {
    "replays": replays,
    "recorded steps": lambda s, make: recorded_steps(make.device),
    "nodes": lambda s, make: node_checks("cuda"),
}


def run_section(name: str) -> tuple[list[Result], str]:
    """What a section finds, and the traceback of what ended it before its end; empty if nothing did."""
    torch.manual_seed(5)
    device = torch.device("cpu" if INTERPRETED else "cuda")
    make = Inputs(device, torch.float32 if INTERPRETED else torch.bfloat16)
    found: list[Result] = []
    try:
        for result in (SECTIONS | ON_DEVICE)[name](TINY if INTERPRETED else Sizes(), make):
            found.append(result)
    except Exception:  # noqa: BLE001 - whatever it is, the others go on and the exit code tells
        return found, traceback.format_exc()
    return found, ""


def all_sections() -> Iterator[tuple[str, list[Result], str]]:
    """Every section as it ends; several at once on a GPU."""
    if INTERPRETED:
        for name in SECTIONS:
            yield name, *run_section(name)
        return
    processes = max(1, min(PROCESSES, (os.cpu_count() or 2) // 2))
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        names = ("nodes", "recorded steps", *SECTIONS, "replays")  # the longest first
        jobs = {pool.submit(run_section, name): name for name in names}
        for job in as_completed(jobs):
            try:
                yield jobs[job], *job.result()
            except Exception:  # noqa: BLE001 - a process that died takes its section along, no other
                yield jobs[job], [], traceback.format_exc()


def report(name: str, found: list[Result], fault: str) -> int:
    """Print what is wrong in a section. Returns how much is."""
    wrong = [result for result in found if not result[1] <= result[2]]
    for what, value, bound in wrong:
        print(f"WRONG {what}: {value:.3g}, allowed {bound:.3g}", flush=True)
    if fault:
        print(f"FAILED {name}, after {len(found)} checks:\n{fault}", flush=True)
    elif not wrong:
        worst = max(found, key=lambda result: result[1] / result[2], default=("nothing", 0.0, 1.0))
        print(
            f"ok {name}: {len(found)} checks, worst {worst[0]} {worst[1]:.1e} of {worst[2]:.0e}", flush=True
        )
    return len(wrong) + bool(fault)


def table(make: Inputs, started: float) -> int:
    """Time everything and print it as markdown. Returns how much failed."""
    bandwidth, peak = ceilings(make)
    name = torch.cuda.get_device_name(make.device)
    print(
        f"\n{datetime.date.today()}, {name} ({target(make.device)}), torch {torch.__version__}, triton {triton.__version__}; "
        f"measured copy {bandwidth / 1e9:.0f} GB/s, bfloat16 product {peak / 1e12:.0f} TFLOP/s. "
        "Floor: the larger of bytes over the copy's speed and operations over the product's.\n"
    )
    print("| kernel | off | us | GB/s | TFLOP/s | of floor | torch us |\n|---|---|---|---|---|---|---|")
    failed = 0
    for what, rows in timings(Sizes(), make):
        if perf_counter() - started > BUDGET_S:
            print("\n(the time allowed is over: rows that would follow are missing)")
            break
        try:
            for t in rows():
                print(_line(t, bandwidth, peak), flush=True)
        except Exception as fault:  # noqa: BLE001 - the other rows are worth having
            failed += 1
            first_line = str(fault).partition("\n")[0][:200]
            print(f"| FAILED {what}: {type(fault).__name__}: {first_line} | | | | | | |", flush=True)
    return failed


def _line(t: Timing, bandwidth: float, peak: float) -> str:
    floor_ms = max(t.moved_bytes / bandwidth, t.flops / peak) * 1e3
    off, by_torch = (
        "-" if value != value else text
        for value, text in ((t.error, f"{t.error:.1e}"), (t.torch_ms, f"{t.torch_ms * 1e3:.1f}"))
    )
    return (
        f"| {t.name} | {off} | {t.ms * 1e3:.1f} | {t.moved_bytes / t.ms / 1e6:.0f} | {t.flops / t.ms / 1e9:.1f} "
        f"| {floor_ms / t.ms:.0%} | {by_torch} |"
    )


def main() -> int:
    started = perf_counter()
    if not INTERPRETED and not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU here, so nothing was checked.")
        return 2
    checked = wrong = 0
    for name, found, fault in all_sections():
        checked += len(found)
        wrong += report(name, found, fault)
    print(f"{checked} checks, {wrong} wrong or failed, {perf_counter() - started:.0f} s", flush=True)
    if not INTERPRETED:
        torch.manual_seed(5)
        wrong += table(Inputs(torch.device("cuda"), torch.bfloat16), started)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
