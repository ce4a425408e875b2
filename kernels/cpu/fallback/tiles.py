"""Fixed shapes and fixed sums: why a row's result does not depend on its neighbours."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.reference.bfloat16x2 import terms
from kernels.reference.chain import rest
from kernels.reference.formats import Codes, decode
from kernels.reference.integers import whole_rows

ROWS = 16  # rows per matrix product, whatever the step holds
OUTPUTS = 16  # and at least so many outputs: with 8 or fewer MKL rounds a row by its place on processors without AVX-512


def row_tiles(num_rows: int) -> Iterator[slice]:
    """Slices of at most ROWS rows that cover num_rows."""
    return (slice(start, min(start + ROWS, num_rows)) for start in range(0, num_rows, ROWS))


def whole_tile(x: Tensor) -> Tensor:
    """x with zero rows (or zeros, for indices) appended up to ROWS."""
    if len(x) == ROWS:
        return x
    tile = x.new_zeros(ROWS, *x.shape[1:])
    tile[: len(x)] = x
    return tile


def product(x: Tensor, weight: Tensor | Codes) -> Tensor:
    """x [T, K] times an encoded weight [N, K] transposed, tile by tile.

    The weight is widened for the call: a lasting float32 copy would double the memory. Codes meet rows as whole numbers,
    those of mxfp4, which may be a checkpoint's own, also what these leave (kernels/reference/chain.py).
    """
    if not isinstance(weight, Codes):
        return float_product(x, weight.float())
    wide = decode(weight)
    if weight.format == "bfloat16x2":
        first, second = terms(x)
        return float_product(first, wide).add_(float_product(second, wide))
    finished = whole_product(x, wide)
    return finished.add_(whole_product(rest(x), wide)) if weight.format == "mxfp4" else finished


def whole_product(x: Tensor, weight: Tensor) -> Tensor:
    """Rows as whole numbers times weight [N, K] float32 transposed."""
    whole, scales = whole_rows(x)
    return float_product(whole, weight).mul_(scales[:, None])


def float_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] times weight [N, K] transposed, both float32, tile by tile."""
    num_outputs = len(weight)
    if num_outputs < OUTPUTS:
        weight = torch.nn.functional.pad(weight, (0, 0, 0, OUTPUTS - num_outputs))
    out = x.new_empty(len(x), num_outputs)
    for rows in row_tiles(len(x)):
        tile = torch.mm(whole_tile(x[rows]), weight.t())
        out[rows] = tile[: rows.stop - rows.start, :num_outputs]
    return out


def tanh(x: Tensor) -> Tensor:
    """tanh by operations whose result does not hang on a value's place: torch's own may differ between vector and tail."""
    a = x.abs()
    square = a * a
    small = 2.0 / 15.0 - square * (17.0 / 315.0 - square * (62.0 / 2835.0 - square * 1382.0 / 155925.0))
    small = a - a * square * (1.0 / 3.0 - square * small)
    large = 1.0 - 2.0 / (torch.exp(2.0 * a) + 1.0)
    return torch.where(a < 0.3, small, large).copysign(x)


def tree_sum(values: Tensor) -> Tensor:
    """Sum of the last dimension by halving, elementwise: the same order for every row, whatever the other dimensions."""
    width = values.shape[-1]
    whole = 1 << max(width - 1, 0).bit_length()
    values = torch.nn.functional.pad(values, (0, whole - width))
    while whole > 1:
        whole //= 2
        values = values[..., :whole] + values[..., whole:]
    return values[..., 0]
