"""sliced_ffn and expert_inner: some slices of an expert's neurons, and the neurons themselves."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.packing import GROUP
from kernels.reference.chain import product
from kernels.reference.formats import Codes
from kernels.reference.grouped_ffn import PlainBank, Product, grouped_ffn, inner_rows

GroupedFfn = Callable[[Tensor, Tensor, Tensor, PlainBank, Tensor], None]

COLUMNS_TOGETHER = {"bfloat16x2": 2, "int8": 4, "int4": GROUP, "mxfp4": GROUP}
"""Inputs of a weight that are stored together, by format of codes."""


def check_masks(masks: Tensor, num_parts: int) -> None:
    """ValueError for a mask that names a slice that does not exist."""
    full = (1 << num_parts) - 1
    for i, mask in enumerate(masks.flatten().tolist()):
        if not 0 <= mask <= full:
            raise ValueError(f"masks: entry {i} is {mask}, expected 0 to {full}")


def sliced_ffn(
    x: Tensor,
    rows: Tensor,
    expert_ids: Tensor,
    masks: Tensor,
    num_parts: int,
    bank: PlainBank,
    out: Tensor,
) -> None:
    """Put each routed row through some slices of its expert: `grouped_ffn` with neurons left out.

    masks      [R]  int32, bit s for slice s of `num_parts` equal ones: neurons [s F / N, (s + 1) F / N)
    x, rows, expert_ids, out  as in grouped_ffn

    A row with all slices is that of grouped_ffn, bit for bit. Others: each slice's product with `down` is that of a weight
    of its columns alone (of whole groups, with zeros beside the slice), and these are added to 0 in order; the bias of
    `down` counts by the share of slices. No slice: zeros.
    """
    for i in run_whole(x, rows, expert_ids, masks, num_parts, bank, out, grouped_ffn).tolist():
        expert = bank[int(expert_ids[i])]
        inner = inner_rows(x[int(rows[i])][None], expert)
        width = inner.shape[1] // num_parts
        total = torch.zeros(1, out.shape[1])
        slices = [s for s in range(num_parts) if int(masks[i]) >> s & 1]
        for s in slices:
            total = total + slice_product(inner, expert.down, s * width, (s + 1) * width)
        bias = expert.biases[2]
        out[i] = (total if bias is None else total + bias * (len(slices) / num_parts))[0]


def run_whole(
    x: Tensor,
    rows: Tensor,
    expert_ids: Tensor,
    masks: Tensor,
    num_parts: int,
    bank: PlainBank,
    out: Tensor,
    run: GroupedFfn,
) -> Tensor:
    """Check all routed rows and `run` those with all slices. Returns which are left, [R'] int64."""
    check_masks(masks, num_parts)
    bank.check(expert_ids, rows, len(x))
    full = (1 << num_parts) - 1
    whole = (masks == full).nonzero().view(-1)
    if len(whole):
        outputs = torch.empty(len(whole), out.shape[1])
        run(x, rows[whole], expert_ids[whole], bank, outputs)
        out[whole] = outputs
    return (masks != full).nonzero().view(-1)


def slice_product(
    inner: Tensor, weight: Tensor | Codes, first: int, end: int, multiply: Product = product
) -> Tensor:
    """Columns [first, end) of inner [R, F] times those of a weight [D, F]: [R, D]."""
    step = COLUMNS_TOGETHER.get(weight.format, 1) if isinstance(weight, Codes) else 1
    begin = first // step * step
    stop = min(-(-end // step) * step, inner.shape[1])
    kept = torch.zeros(len(inner), stop - begin)
    kept[:, first - begin : end - begin] = inner[:, first:end]
    return multiply(kept, columns(weight, begin, stop))


def columns(weight: Tensor | Codes, begin: int, stop: int) -> Tensor | Codes:
    """Columns [begin, stop) of a weight; of codes, multiples of COLUMNS_TOGETHER or the last."""
    if isinstance(weight, Tensor):
        return weight[:, begin:stop]
    if weight.format in ("int8", "bfloat16x2"):
        return weight._replace(values=weight.values[:, begin:stop], num_inputs=stop - begin)
    groups = slice(begin // GROUP, -(-stop // GROUP))
    return weight._replace(
        values=weight.values[:, groups], scales=weight.scales[:, groups], num_inputs=stop - begin
    )


def expert_inner(x: Tensor, rows: Tensor, expert_ids: Tensor, bank: PlainBank, out: Tensor) -> None:
    """What the neurons of each routed row's expert give, before `down`: out [R, F]. Else as grouped_ffn."""
    bank.check(expert_ids, rows, len(x))
    for i, (row, expert_id) in enumerate(zip(rows.tolist(), expert_ids.tolist(), strict=True)):
        out[i] = inner_rows(x[row][None], bank[expert_id])[0]
