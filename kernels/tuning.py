"""Time every kernel on one thread beside what the machine could do at best: `python -m kernels.tuning [--cold] [--json]`.

A benchmark, not a test. Weights rotate through more memory than the second-level cache holds, as they do in a model.
`--cold` measures one thing instead: how fast one row reads weights in each format when over a GiB of them lies in no
cache, by the thread's own time, which neighbours disturb less. Knows shapes only, no model.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor

from kernels import backends, ops
from kernels.packing import FORMATS, packed_expert_bytes, packed_linear_bytes
from kernels.reference.formats import encode
from kernels.segments import AttentionParts, AttentionSegment, bind_attention_segment

ROTATED_BYTES = 64 << 20
COLD_BYTES = 1100 << 20
QUANTISED = FORMATS[FORMATS.index("int8") :]
EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """One model's sizes in the letters of the repository."""

    name: str
    D: int
    H: int
    G: int
    P: int
    F: int
    E: int
    K: int
    V: int
    L: int
    context: int


SHAPES = (
    Shape("demo", D=256, H=4, G=2, P=64, F=96, E=32, K=4, V=8192, L=6, context=256),
    Shape("medium", D=1024, H=16, G=8, P=64, F=512, E=64, K=8, V=8192, L=1, context=512),
)


@dataclass(frozen=True)
class Timing:
    """One row of the table."""

    shape: str
    T: int
    op: str
    us: float
    gflops: float
    """Arithmetic done per second."""
    gbps: float
    """Bytes read and written per second: weights touched, keys, values and rows, once each."""
    of_floor: float
    """The larger of arithmetic at peak and bytes at the stream's speed just then, over the time taken: 1 is the floor."""


def best_us(
    call: Callable[[], object], budget_s: float = 0.15, clock: Callable[[], float] = perf_counter
) -> float:
    """Least time of a call in microseconds: other work on the machine only ever adds."""
    call()
    taken: list[float] = []
    end = clock() + budget_s
    while clock() < end or len(taken) < 5:
        start = clock()
        call()
        taken.append(clock() - start)
    return min(taken) * 1e6


def peak_gflops() -> float:
    """Multiply-adds of one core, two operations each; nan without the native kernels."""
    if backends.active().NAME != "native":
        return float("nan")
    from kernels.cpu import _native  # type: ignore[attr-defined]

    turns = 20_000
    return turns * 512 * 2 / best_us(lambda: _native.fma_turns(turns)) / 1e3


def stream_gbps(buffer: Tensor, budget_s: float, clock: Callable[[], float] = perf_counter) -> float:
    """Bytes per second that one core reads from memory. buffer float32 [any]."""
    return buffer.nbytes / best_us(lambda: torch.dot(buffer, buffer), budget_s, clock) / 1e3


def weights(N: int, K: int, format: str = "bfloat16", num_bytes: int = 0) -> Iterator[ops.LinearWeight]:
    """Equal weights one after another, more than the cache holds, or num_bytes of them."""
    plain = encode(torch.randn(N, K).mul_(K**-0.5), format)
    one = packed_linear_bytes(N, K, format) or 1
    copies = -(-num_bytes // one) if num_bytes else max(1, min(64, ROTATED_BYTES // one))
    return cycle([ops.pack_linear(plain) for _ in range(copies)])


def expert_bank(shape: Shape, format: str = "bfloat16") -> ops.ExpertBank:
    bank = ops.ExpertBank(shape.E, shape.D, shape.F)
    gate, up = (encode(torch.randn(shape.F, shape.D).mul_(shape.D**-0.5), format) for _ in range(2))
    down = encode(torch.randn(shape.D, shape.F).mul_(shape.F**-0.5), format)
    for expert_id in range(shape.E):
        bank.set(expert_id, ops.pack_expert(gate, up, down))
    return bank


@dataclass
class Rows:
    """The indices of one step: T decode rows of T requests, or T rows of one prompt."""

    positions: Tensor
    tables: Tensor
    request: Tensor
    slots: Tensor


def step_rows(shape: Shape, T: int, prefill: bool) -> Rows:
    blocks = -(-max(shape.context, T) // 16)
    requests = 1 if prefill else T
    tables = torch.randperm(requests * blocks).int().view(requests, blocks)
    request = (torch.zeros(T) if prefill else torch.arange(T)).int()
    positions = torch.arange(T).int() if prefill else torch.full((T,), shape.context - 1).int()
    slots = tables[request.long(), positions.long() // 16] * 16 + positions % 16
    return Rows(positions, tables, request, slots.int())


class Layers:
    """The native work of a whole step, layer by layer, with random weights."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        heads = (shape.H + 2 * shape.G) * shape.P
        self.layers = [
            {
                "qkv": next(weights(heads, shape.D)),
                "o": next(weights(shape.D, shape.H * shape.P)),
                "gate": next(weights(shape.E, shape.D)),
                "bank": expert_bank(shape),
            }
            for _ in range(shape.L)
        ]
        self.head = next(weights(shape.V, shape.D))
        self.norm, self.head_norm = torch.ones(shape.D), torch.ones(shape.P)
        self.cos, self.sin = ops.rope_table(max(shape.context, 512), shape.P, 1e4)

    def step(self, T: int, *, prefill: bool) -> Callable[[], object]:
        s, rows = self.shape, step_rows(self.shape, T, prefill)
        num_blocks = rows.tables.numel()
        k_pages = torch.zeros(s.L, num_blocks, s.G, s.P, 16)
        v_pages = torch.zeros(s.L, num_blocks, s.G, 16, s.P)
        tokens = torch.randint(s.V, (T,)).int()
        pair_rows = torch.arange(T).repeat_interleave(s.K).int()
        pair_slots = torch.arange(T * s.K).int().view(T, s.K)
        hidden, normed = torch.empty(T, s.D), torch.empty(T, s.D)
        qkv = torch.empty(T, (s.H + 2 * s.G) * s.P)
        q = qkv[:, : s.H * s.P].view(T, s.H, s.P)
        k = qkv[:, s.H * s.P : (s.H + s.G) * s.P].view(T, s.G, s.P)
        v = qkv[:, (s.H + s.G) * s.P :].view(T, s.G, s.P)
        attended, logits = torch.empty(T, s.H, s.P), torch.empty(T, s.E)
        expert_out = torch.empty(T * s.K, s.D)
        last = hidden[-1:] if prefill else hidden
        scores = torch.empty(len(last), s.V)

        def run() -> None:
            ops.embed(tokens, self.head, out=hidden)
            for n, layer in enumerate(self.layers):
                ops.rms_norm(hidden, self.norm, EPS, out=normed)
                ops.linear(normed, layer["qkv"], out=qkv)
                ops.head_norm_rope(q, self.head_norm, EPS, self.cos, self.sin, rows.positions)
                ops.head_norm_rope(k, self.head_norm, EPS, self.cos, self.sin, rows.positions)
                ops.kv_write(k, v, k_pages[n], v_pages[n], rows.slots)
                ops.paged_attention(
                    q,
                    k_pages[n],
                    v_pages[n],
                    rows.tables,
                    rows.request,
                    rows.positions,
                    s.P**-0.5,
                    out=attended,
                )
                ops.linear(attended.view(T, -1), layer["o"], out=hidden, add=True)
                ops.rms_norm(hidden, self.norm, EPS, out=normed)
                ops.linear(normed, layer["gate"], out=logits)
                ids, gate_weights = ops.gate_topk(logits, s.K, renormalise=True)
                ops.grouped_ffn(normed, pair_rows, ids.view(-1), layer["bank"], out=expert_out)
                ops.combine(expert_out, pair_slots, gate_weights, hidden)
            ops.linear(ops.rms_norm(last, self.norm, EPS), self.head, out=scores)

        return run

    def fused_step(self, T: int) -> Callable[[], object] | None:
        """A decode step with one call for attention and gate and one for the experts; None without segments."""
        s, rows = self.shape, step_rows(self.shape, T, prefill=False)
        num_blocks = rows.tables.numel()
        segments = [self._segment(layer, num_blocks) for layer in self.layers]
        bound = [segment for segment in segments if segment is not None]
        if len(bound) < len(segments):
            return None
        tokens, scores = torch.randint(s.V, (T,)).int(), torch.empty(T, s.V)
        hidden, x, expert_out = torch.empty(T, s.D), torch.empty(T, s.D), torch.empty(T * s.K, s.D)
        buffer, logits = torch.empty(T * bound[0].buffer_floats), torch.empty(T, s.E)
        ids, gate_weights = torch.empty(T, s.K, dtype=torch.int32), torch.empty(T, s.K)
        at = rows.positions, rows.slots, rows.request, rows.tables

        def run() -> None:
            ops.embed(tokens, self.head, out=hidden)
            for layer, segment in zip(self.layers, bound, strict=True):
                segment.run(hidden, x, *at, buffer, logits, ids, gate_weights)
                ops.experts(x, ids, gate_weights, layer["bank"], hidden, expert_out=expert_out)
            ops.linear(ops.rms_norm(hidden, self.norm, EPS, out=x), self.head, out=scores)

        return run

    def _segment(self, layer: dict[str, Any], num_blocks: int) -> AttentionSegment | None:
        s = self.shape
        return bind_attention_segment(
            AttentionParts(
                num_heads=s.H,
                num_kv_heads=s.G,
                head_width=s.P,
                norm_eps=EPS,
                input_norm=self.norm,
                qkv=layer["qkv"],
                rope=(self.cos, self.sin),
                pages=(torch.zeros(num_blocks, s.G, s.P, 16), torch.zeros(num_blocks, s.G, 16, s.P)),
                scale=s.P**-0.5,
                out=layer["o"],
                post_norm=self.norm,
                q_norm=self.head_norm,
                k_norm=self.head_norm,
                gate=layer["gate"],
                top_k=s.K,
            )
        )


def cases(s: Shape, T: int) -> Iterator[tuple[str, Callable[[], object], float, float]]:
    """(op, call, flops, bytes) for T rows: decode rows up to 16, a prompt above."""
    x = torch.randn(T, s.D)
    for name, N, K in (
        ("qkv", (s.H + 2 * s.G) * s.P, s.D),
        ("out", s.D, s.H * s.P),
        ("gate", s.E, s.D),
        ("head", s.V, s.D),
    ):
        ring, rows_in, out = weights(N, K), torch.randn(T, K), torch.empty(T, N)
        yield (
            f"linear {name} {N}x{K}",
            lambda ring=ring, x=rows_in, out=out: ops.linear(x, next(ring), out=out),
            2.0 * T * N * K,
            2.0 * N * K + 4.0 * T * (N + K),
        )
    banks = cycle([expert_bank(s) for _ in range(max(1, ROTATED_BYTES // (6 * s.D * s.F * s.E)))])
    rows, expert_out = torch.arange(T).repeat_interleave(s.K).int(), torch.empty(T * s.K, s.D)
    ids = torch.stack([torch.randperm(s.E)[: s.K] for _ in range(T)]).int().view(-1)
    yield (
        f"grouped_ffn {s.E} top-{s.K} {s.D}x{s.F}",
        lambda: ops.grouped_ffn(x, rows, ids, next(banks), out=expert_out),
        6.0 * T * s.K * s.D * s.F,
        6.0 * s.D * s.F * len(ids.unique()) + 4.0 * T * s.D * (1 + s.K),
    )
    for format in QUANTISED:
        name, N, K = "qkv", (s.H + 2 * s.G) * s.P, s.D
        ring, result = weights(N, K, format), torch.empty(T, N)
        yield (
            f"linear {name} {N}x{K} {format}",
            lambda ring=ring, result=result: ops.linear(x, next(ring), out=result),
            2.0 * T * N * K,
            packed_linear_bytes(N, K, format) + 4.0 * T * (N + K),
        )
        bank = expert_bank(s, format)
        yield (
            f"grouped_ffn {s.E} top-{s.K} {s.D}x{s.F} {format}",
            lambda bank=bank: ops.grouped_ffn(x, rows, ids, bank, out=expert_out),
            6.0 * T * s.K * s.D * s.F,
            packed_expert_bytes(s.D, s.F, format) * len(ids.unique()) + 4.0 * T * s.D * (1 + s.K),
        )
    at = step_rows(s, T, prefill=T > 16)
    blocks, seen = at.tables.numel(), float((at.positions + 1).sum())
    k_pages, v_pages = torch.randn(blocks, s.G, s.P, 16), torch.randn(blocks, s.G, 16, s.P)
    q, k = torch.randn(T, s.H, s.P), torch.randn(T, s.G, s.P)
    attended = torch.empty_like(q)
    distinct = float(s.context * T) if T <= 16 else float(T)
    yield (
        f"paged_attention {'decode' if T <= 16 else 'prefill'} {int(at.positions.max()) + 1}",
        lambda: ops.paged_attention(
            q, k_pages, v_pages, at.tables, at.request, at.positions, 0.125, out=attended
        ),
        4.0 * seen * s.H * s.P,
        8.0 * distinct * s.G * s.P,
    )
    yield "kv_write", lambda: ops.kv_write(k, k, k_pages, v_pages, at.slots), 0.0, 16.0 * T * s.G * s.P
    norm, head_norm = torch.ones(s.D), torch.ones(s.P)
    cos, sin = ops.rope_table(512, s.P, 1e4)
    out, logits = torch.empty(T, s.D), torch.randn(T, s.E)
    yield "rms_norm", lambda: ops.rms_norm(x, norm, EPS, out=out), 4.0 * T * s.D, 8.0 * T * s.D
    yield (
        "head_norm_rope q",
        lambda: ops.head_norm_rope(q, head_norm, EPS, cos, sin, at.positions),
        9.0 * T * s.H * s.P,
        8.0 * T * s.H * s.P,
    )
    yield "gate_topk", lambda: ops.gate_topk(logits, s.K, renormalise=True), 20.0 * T * s.E, 4.0 * T * s.E
    slots, gate_weights = torch.arange(T * s.K).int().view(T, s.K), torch.rand(T, s.K)
    yield (
        "combine",
        lambda: ops.combine(expert_out, slots, gate_weights, out),
        2.0 * T * s.K * s.D,
        4.0 * T * s.D * (s.K + 2),
    )
    hosts = (torch.arange(s.E) % 8).int()
    yield "dispatch to 8 hosts", lambda: ops.dispatch(ids.view(T, s.K), hosts, 8), 0.0, 16.0 * T * s.K
    head = next(weights(s.V, s.D))
    tokens = torch.randint(s.V, (T,)).int()
    yield "embed", lambda: ops.embed(tokens, head, out=out), 0.0, 6.0 * T * s.D


def measure(peak: float) -> Iterator[Timing]:
    """Every operation at 1, 16 and 256 rows, then whole steps."""
    buffer = torch.ones(ROTATED_BYTES // 4)
    for shape in SHAPES:
        for T in (1, 16, 256):
            for op, call, flops, moved in cases(shape, T):
                # The stream at this very time: neighbours on the machine halve it for minutes.
                before = stream_gbps(buffer, 0.05)
                us = best_us(call)
                stream = max(before, stream_gbps(buffer, 0.05))
                floor_us = max(flops / peak, moved / stream) / 1e3
                yield Timing(shape.name, T, op, us, flops / us / 1e3, moved / us / 1e3, floor_us / us)
        layers = Layers(shape)
        for T, prefill in ((1, False), (16, False), (256, True)):
            us = best_us(layers.step(T, prefill=prefill), 0.5)
            name = f"STEP {'prefill' if prefill else 'decode'}, {shape.L} layers + head: {T / us * 1e6:.0f} tok/s"
            yield Timing(shape.name, T, name, us, float("nan"), float("nan"), float("nan"))
            fused = None if prefill else layers.fused_step(T)
            if fused is not None:
                us = best_us(fused, 0.5)
                name = f"STEP decode by segments: {T / us * 1e6:.0f} tok/s"
                yield Timing(shape.name, T, name, us, float("nan"), float("nan"), float("nan"))


def cold() -> Iterator[tuple[str, str, float, float]]:
    """(format, weight, GB/s of one row, GB/s of the stream beside it) for weights that no cache holds."""
    buffer = torch.ones(COLD_BYTES // 4)
    for format in FORMATS:
        for name, N, K in (
            ("medium qkv", 2048, 1024),
            ("medium head", 32768, 1024),
            ("Mixtral gate", 14336, 4096),
            ("Mixtral down", 4096, 14336),
        ):
            one, ring = packed_linear_bytes(N, K, format), weights(N, K, format, COLD_BYTES)
            copies, x, out = -(-COLD_BYTES // one), torch.randn(1, K), torch.empty(1, N)

            def sweep(ring=ring, copies=copies, x=x, out=out) -> None:  # noqa: ANN001
                for _ in range(copies):
                    ops.linear(x, next(ring), out=out)

            before = stream_gbps(buffer, 1.0, thread_time)
            reached = one * copies / best_us(sweep, 1.0, thread_time) / 1e3
            yield format, f"{name} {N}x{K}", reached, max(before, stream_gbps(buffer, 1.0, thread_time))


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if "--cold" in arguments:
        for format, name, reached, stream in cold():
            share = f"{reached / stream:.2f} of a stream of {stream:.1f}"
            print(f"{format:9} {name:24} {reached:6.1f} GB/s, {share}", flush=True)
        return
    peak, stream = peak_gflops(), stream_gbps(torch.ones(ROTATED_BYTES // 4), 1.0)
    said = backends.describe()
    machine = {"backend": said["backend"], "isa": said["isa"], "peak_gflops": peak, "stream_gbps": stream}
    if "--json" in arguments:
        print(json.dumps({**machine, "timings": [asdict(timing) for timing in measure(peak)]}))
        return
    print(
        f"{said['backend']} {said['isa'] or ''}, one thread; "
        f"peak {peak:.0f} GFLOP/s, stream {stream:.1f} GB/s; bfloat16 weights unless said"
    )
    print(f"{'shape':7} {'T':>4} {'us':>9} {'GFLOP/s':>8} {'GB/s':>6} {'floor':>6}  op")
    for t in measure(peak):
        print(
            f"{t.shape:7} {t.T:4} {t.us:9.1f} {t.gflops:8.1f} {t.gbps:6.1f} {t.of_floor:6.2f}  {t.op}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
