"""Compile every kernel to machine code for chips that are not here: `python -m kernels.gpu.compiled [TARGET ...]`.

Prints registers, spilled bytes and shared memory of each kernel and specialisation. The tests fail on a spill and on
shared memory beyond the chip. Knows the shapes of a few models; runs nothing.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, CompiledKernel

from kernels.gpu.combine import combine_kernel
from kernels.gpu.dispatch import BLOCK_T, count_kernel, place_kernel
from kernels.gpu.gate_topk import VALUES, clear_counts_kernel, gate_topk_kernel
from kernels.gpu.grouped_ffn import ELEMENT, down_kernel, inner_kernel, section_offsets
from kernels.gpu.kv_blocks import COPY_BYTES, kv_copy_kernel, kv_write_kernel
from kernels.gpu.linear import EMBED_COLUMNS, embed_kernel, linear_kernel
from kernels.gpu.mxfp4 import ROWS, unpack_kernel
from kernels.gpu.paged_attention import attention_kernel, merge_kernel
from kernels.gpu.quantise import GROUP, SCALE_DTYPE, value_dtype
from kernels.gpu.rms_norm import norm_warps, rms_norm_kernel
from kernels.gpu.rope import head_norm_rope_kernel
from kernels.gpu.soft_cap import BLOCK, soft_cap_kernel
from kernels.gpu.tile_table import BLOCK_R, tile_table_kernel
from kernels.gpu.tiles import (
    INSTRUCTION,
    SHARED_BYTES,
    SPLIT_TOKENS,
    TARGETS,
    Tile,
    attention_tile,
    operand_dtype,
    product_tile,
)
from kernels.gpu.weights import ExpertLayout

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
GPU_TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPE = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
FLOATS = ("eps", "scale", "alpha", "limit", "soft_cap")
"""Scalar arguments that are float32; all others are int32."""
INTEGER_POINTERS = (
    "rows pairs tiles ranges missing slots ids table request position positions lines hosts words counted"
)
INTEGER_POINTERS += " offsets pair_rows source destination masks own"

FLOAT_POINTERS = "logits expert_scale bias weights cos sin sinks distance shares"


@dataclass(frozen=True)
class Case:
    """One specialisation of one kernel."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    pointers: dict[str, str] = field(default_factory=dict)
    """Types of pointers by name; those not named are int32 or bfloat16, as their names say."""
    num_warps: int = 4
    num_stages: int = 2
    multiplies: bool = False


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


def _pointer(name: str) -> str:
    stem = name.removesuffix("_ptr")
    if stem in INTEGER_POINTERS.split():
        return "*i32"
    if stem == "addresses":
        return "*i64"
    if stem in FLOAT_POINTERS.split() or stem.startswith("part"):
        return "*fp32"
    return "*bf16"


def source(case: Case) -> ASTSource:
    """The kernel with the types of its arguments, all of them aligned as the allocator and the models' widths align them."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    never = case.kernel.do_not_specialize or ()
    for i, name in enumerate(case.kernel.arg_names):
        if name in case.constants:
            signature[name] = "constexpr"
            constants[name] = case.constants[name]
        elif name.endswith("_ptr"):
            signature[name] = case.pointers.get(name, _pointer(name))
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
            if name not in FLOATS and name not in never:
                attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(case.kernel, signature, constants, attributes)


def use_cache(folder: str) -> None:
    """Keep what this process compiles in `folder`."""
    os.environ["TRITON_CACHE_DIR"] = folder


def machine_code(case: Case, target: str) -> CompiledKernel:
    """Compile for a target."""
    options: dict[str, Any] = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    if target.startswith("gfx") and case.multiplies:
        options |= INSTRUCTION
    return triton.compile(source(case), target=GPU_TARGETS[target], options=options)


def resources(compiled: CompiledKernel, target: str) -> Resources:
    """What a kernel takes, by its own notes (HIP) or by the tools of the triton wheel (CUDA)."""
    shared = compiled.metadata.shared
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        numbers = {
            name: int(found[1]) if (found := re.search(rf"\.{name}:\s+(\d+)", text)) else 0
            for name in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
        }
        spilled = 4 * numbers["vgpr_spill_count"] + numbers["private_segment_fixed_size"]
        return Resources(numbers["vgpr_count"], spilled, shared)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        usage = _run_tool(str(TOOLS / "cuobjdump"), "-res-usage", str(binary))
        found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
        if found is None:
            raise ValueError(
                f"cuobjdump -res-usage: found {usage!r}, expected a line with REG, STACK and LOCAL"
            )
        spilled = 0
        if int(found[2]) + int(found[3]) > 0:  # a stack may be there for other reasons: ask the assembler
            code = Path(folder) / "kernel.ptx"
            code.write_text(compiled.asm["ptx"])
            tool = get_ptxas(GPU_TARGETS[target].arch).path
            arch = re.search(r"\.target (\w+)", compiled.asm["ptx"])
            assert arch is not None
            said = _run_tool(tool, "-v", f"--gpu-name={arch[1]}", str(code), "-o", f"{binary}.again")
            spilled = max(int(n) for n in re.findall(r"(\d+) bytes spill stores", said))
    return Resources(int(found[1]), spilled, shared)


def _run_tool(name: str, *arguments: str) -> str:
    """What a tool of the triton wheel says."""
    ran = subprocess.run([name, *arguments], capture_output=True, text=True, check=True)
    return ran.stdout + ran.stderr


def product_constants(
    target: str, phase: str, N: int, K: int, format: str, *, experts: bool, pair: bool = False
) -> tuple[dict[str, Any], Tile]:
    """Constants that every product shares, and its tile."""
    M, prompt = PHASES[phase]
    tile = product_tile(target, M, N, K, format, experts=experts, pair=pair, prompt=prompt)
    operand = value_dtype(format) if format in ("bfloat16", "float16", "float32") else torch.bfloat16
    constants = {
        "FORMAT": format,
        "GROUP": GROUP,
        "OPERAND": operand_dtype(operand),
        "MASK_K": K % tile.BLOCK_K != 0,
        "BLOCK_M": tile.BLOCK_M,
        "BLOCK_N": tile.BLOCK_N,
        "BLOCK_K": tile.BLOCK_K,
    }
    return constants, tile


PHASES = {"few": (1, False), "more": (64, False), "prompt": (512, True)}


def linear_cases(target: str) -> Iterator[Case]:
    """K = 2048: a dense layer."""
    for format, phase, N, extra in (
        ("bfloat16", "few", 2048, True),
        ("bfloat16", "few", 5120, False),
        ("bfloat16", "few", 151936, False),
        ("bfloat16", "more", 2048, False),
        ("bfloat16", "prompt", 2048, False),
        ("float16", "few", 2048, False),
        ("float32", "few", 128, False),
        ("int8", "few", 2048, False),
        ("int8", "prompt", 2048, False),
        ("int4", "few", 2048, False),
        ("int4", "more", 2048, False),
        ("int4", "prompt", 2048, False),
        ("mxfp4", "few", 2048, False),
    ):
        constants, tile = product_constants(target, phase, N, 2048, format, experts=False)
        yield Case(
            f"linear {format} {phase} {N}{' bias add' if extra else ''}",
            linear_kernel,
            constants | {"HAS_BIAS": extra, "ADD": extra},
            {
                "w_ptr": TYPE[value_dtype(format)],
                "scale_ptr": TYPE[SCALE_DTYPE.get(format, torch.float32)],
                "x_ptr": "*fp32",  # as nodes hold rows
                "out_ptr": "*fp32",
            },
            tile.num_warps,
            tile.num_stages,
            True,
        )


def expert_cases(target: str) -> Iterator[Case]:
    """qwen3_moe 2048 x 768, gpt_oss 2880 x 2880 (masked steps, biases), and an inner width that divides nothing."""
    for activation, format, phase, D, F, bias in (
        ("swiglu", "bfloat16", "few", 2048, 768, False),
        ("swiglu", "bfloat16", "more", 2048, 768, False),
        ("swiglu", "bfloat16", "prompt", 2048, 768, False),
        ("swiglu", "int8", "few", 2048, 768, False),
        ("geglu_tanh", "int4", "few", 2816, 704, False),
        ("swiglu", "int4", "prompt", 2048, 768, False),
        ("clamped_swiglu", "mxfp4", "few", 2880, 2880, True),
        ("clamped_swiglu", "mxfp4", "prompt", 2880, 2880, True),
        ("relu", "float16", "few", 512, 2048, False),
        ("swiglu", "float32", "few", 256, 96, False),
    ):
        layout = ExpertLayout(D, F, format, activation, bias, torch.bfloat16)
        shared = {
            "HAS_BIAS": bias,
            "W_TYPE": ELEMENT[value_dtype(format)],
            "SCALE_TYPE": ELEMENT[SCALE_DTYPE.get(format, torch.float32)],
        }
        rows = {"x_ptr": "*fp32", "out_ptr": "*fp32"}
        rows["inner_ptr"] = TYPE[torch.float32 if format == "float32" else torch.bfloat16]
        constants, tile = product_constants(
            target, phase, F, D, format, experts=True, pair=activation != "relu"
        )
        offsets = section_offsets(layout, "in")
        name = f"{activation} {format} {phase}"
        masked = phase == "few" and format in ("bfloat16", "mxfp4")
        yield Case(
            f"inner {name}{' masks' if masked else ''}",
            inner_kernel,
            constants | shared | offsets | {"ACTIVATION": activation, "HAS_MASKS": masked},
            rows,
            tile.num_warps,
            tile.num_stages,
            True,
        )
        constants, tile = product_constants(target, phase, D, F, format, experts=True)
        offsets = section_offsets(layout, "out")
        sliced = phase == "few" and format == "bfloat16"
        yield Case(
            f"down {name}{' slices' if sliced else ''}",
            down_kernel,
            constants
            | shared
            | offsets
            | {"HAS_SLICES": sliced, "HAS_SHARES": masked and bias, "MASK_K": sliced or constants["MASK_K"]},
            rows,
            tile.num_warps,
            tile.num_stages,
            True,
        )


def attention_cases(target: str) -> Iterator[Case]:
    """qwen3_moe (32 heads, 4 kv heads, 128), gpt_oss (64, 8, 64, window and sinks), a soft cap at 256, latents 576 and 512,
    switch_transformers (12 heads of 64, distances)."""
    for name, H, G, P, Pv, window, sinks, cap, distances in (
        ("128", 32, 4, 128, 128, False, False, False, False),
        ("64 window sinks", 64, 8, 64, 64, True, True, False, False),
        ("256 cap", 16, 8, 256, 256, True, False, True, False),
        ("latent", 16, 1, 576, 512, False, False, False, False),
        ("64 distances", 12, 12, 64, 64, False, False, False, True),
    ):
        main = 1 << (P.bit_length() - 1)
        shared = {
            "H": H,
            "PV": Pv,
            "PV_PAD": triton.next_power_of_2(Pv),
            "HAS_WINDOW": window,
            "HAS_SINKS": sinks,
        }
        lines = {"HAS_LINES": False}
        for phase in ("decode",) if distances else ("decode", "prompt"):
            tile = attention_tile(target, H // G, P, Pv, 2, prompt=phase == "prompt")
            yield Case(
                f"attention {name} {phase}",
                attention_kernel,
                shared
                | {
                    "HEADS": H // G,
                    "TILE_HEADS": tile.TILE_HEADS,
                    "P_MAIN": main,
                    "P_REST": P - main,
                    "P_REST_PAD": max(16, triton.next_power_of_2(P - main)) if P > main else 0,
                    "SPLIT": 0 if phase == "prompt" else SPLIT_TOKENS,
                    "HAS_CAP": cap,
                    "HAS_DISTANCES": distances,
                    "HAS_LINES": phase == "prompt",
                    "OPERAND": operand_dtype(torch.bfloat16),
                    "BLOCK_M": tile.BLOCK_M,
                    "BLOCK_N": tile.BLOCK_N,
                },
                {"q_ptr": "*fp32", "out_ptr": "*fp32"} if phase == "decode" else {},
                tile.num_warps,
                tile.num_stages,
                True,
            )
        yield Case(
            f"merge {name}",
            merge_kernel,
            shared | lines | {"SPLIT": SPLIT_TOKENS},
            {"out_ptr": "*fp32"},
            1 if Pv <= 128 else 4,
        )


def gate_constants(E: int, K: int, **changed: object) -> dict[str, Any]:
    BLOCK_E = triton.next_power_of_2(E)
    plain = {
        "E": E,
        "K": K,
        "SCORES": "softmax",
        "RENORMALISE": True,
        "NUM_GROUPS": 1,
        "TOP_GROUPS": 1,
        "HAS_EXPERT_SCALE": False,
        "HAS_BIAS": False,
        "COUNT_BITS": 0,
        "ROWS": max(1, min(8, VALUES // BLOCK_E)),
        "BLOCK_E": BLOCK_E,
        "K_PAD": triton.next_power_of_2(K),
    }
    found = plain | changed
    return found | {"NUM_GROUPS_PAD": triton.next_power_of_2(int(found["NUM_GROUPS"]))}  # type: ignore[call-overload]


def row_cases(target: str) -> Iterator[Case]:
    """What reads rows once and multiplies no matrices."""
    hosts = {"K": 8, "K_PAD": 8, "BLOCK_T": BLOCK_T}
    yield Case("tile_table", tile_table_kernel, {"TILE_ROWS": 16, "BINS": 256, "BLOCK_R": BLOCK_R})
    yield Case("gate_topk 128 counts", gate_topk_kernel, gate_constants(128, 8, COUNT_BITS=8))
    yield Case("clear_counts 128", clear_counts_kernel, {"E": 128, "BLOCK_E": 128}, {"counts_ptr": "*i8"}, 1)
    yield Case(
        "gate_topk 256 sigmoid groups",
        gate_topk_kernel,
        gate_constants(256, 8, SCORES="sigmoid", HAS_BIAS=True, NUM_GROUPS=8, TOP_GROUPS=4),
    )
    yield Case("dispatch count", count_kernel, hosts)
    yield Case("dispatch place", place_kernel, hosts)
    yield Case("combine", combine_kernel, {"K": 8, "BLOCK_D": 1024}, {"hidden_ptr": "*fp32"})
    yield Case(
        "rms_norm 2880",
        rms_norm_kernel,
        {"HAS_WEIGHT": True, "BLOCK_D": 4096},
        {"x_ptr": "*fp32"},
        norm_warps(4096),
    )
    yield Case("soft_cap", soft_cap_kernel, {"BLOCK": BLOCK}, {"x_ptr": "*fp32"})
    for name, interleaved, turned in (("128", False, 64), ("interleaved part", True, 32)):
        yield Case(
            f"head_norm_rope {name}",
            head_norm_rope_kernel,
            {
                "HAS_WEIGHT": True,
                "INTERLEAVED": interleaved,
                "P": 128,
                "TURNED": turned,
                "TURNED_PAD": turned,
                "REST_PAD": 128 - 2 * turned,
                "BLOCK_H": 8,
            },
            {},
            2,
        )
    yield Case(
        "kv_write",
        kv_write_kernel,
        {"P": 128, "PV": 128, "P_PAD": 128, "PV_PAD": 128, "WRITES_V": True},
        {},
        1,
    )
    yield Case("kv_copy", kv_copy_kernel, {"BLOCK": COPY_BYTES}, {"pages_ptr": "*u8"})
    for format in ("bfloat16", "int4"):
        yield Case(
            f"embed {format}",
            embed_kernel,
            {"FORMAT": format, "GROUP": GROUP, "BLOCK_K": EMBED_COLUMNS},
            {
                "w_ptr": TYPE[value_dtype(format)],
                "scale_ptr": TYPE[SCALE_DTYPE.get(format, torch.float32)],
                "out_ptr": "*fp32",
            },
        )
    yield Case("mxfp4 unpack", unpack_kernel, {"ROWS": ROWS}, {"blocks_ptr": "*u8", "scales_ptr": "*u8"})


def cases(target: str) -> Iterator[Case]:
    """Every kernel in its main specialisations, with the tiles of this target."""
    for some in (linear_cases, expert_cases, attention_cases, row_cases):
        yield from some(target)


def main(targets: list[str]) -> int:
    bad = 0
    print("| kernel | target | registers | spilled bytes | shared bytes |\n|---|---|---|---|---|")
    for target in targets or TARGETS:
        for case in cases(target):
            try:
                r = resources(machine_code(case, target), target)
            except Exception as error:  # noqa: BLE001 - the table goes on; the exit code says that something failed
                print(
                    f"| {case.name} | {target} | {type(error).__name__}: {str(error)[:200]} | | |", flush=True
                )
                bad += 1
                continue
            beyond = r.spilled_bytes > 0 or r.shared_bytes > SHARED_BYTES[target]
            bad += beyond
            mark = " **too much**" if beyond else ""
            print(
                f"| {case.name} | {target} | {r.registers} | {r.spilled_bytes} | {r.shared_bytes}{mark} |",
                flush=True,
            )
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
