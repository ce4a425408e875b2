"""Token ids and block tables of running requests as dense arrays, so that a step is built without loops over tokens.

One line per request. Knows requests and their block tables; knows no weights and no scheduler.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from edge_runtime.cache.block_pool import BLOCK_MASK, BLOCK_SHIFT, BLOCK_TOKENS, blocks_for
from edge_runtime.engine.plan import StepPlan
from edge_runtime.engine.request import Request


class StepRows(NamedTuple):
    """The rows of one step. T rows, S slices (one per request), M blocks of the longest request."""

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32, place of the row in its request
    slots: Tensor  # [T] int32, where the row's keys and values go: block * 16 + offset
    row_request: Tensor  # [T] int32, index of the row's slice
    block_tables: Tensor  # [S, M] int32
    sampled_rows: np.ndarray  # [samples] int64, last row of every slice that samples, in slice order
    encoder_tokens: Tensor | None = None  # [S] int32, what each request's encoder reads; None without encoder


class RequestTable:
    """Keeps one line per seat of the scheduler: `max_running` lines of `context_tokens` tokens."""

    def __init__(self, max_running: int, context_tokens: int) -> None:
        self._token_ids = np.zeros((max_running, context_tokens), dtype=np.int32)
        self._blocks = np.zeros((max_running, blocks_for(context_tokens)), dtype=np.int32)
        self._owner: list[Request | None] = [None] * max_running
        self._known_tokens = [0] * max_running
        self._version = [-1] * max_running

    @property
    def most_blocks(self) -> int:
        """Blocks of the longest request that has a line."""
        return self._blocks.shape[1]

    def rows(self, plan: StepPlan) -> StepRows:
        """Lay out the rows of a plan, slice after slice."""
        slices = plan.slices
        lines = np.fromiter(
            (self._sync(piece.request) for piece in slices), dtype=np.int64, count=len(slices)
        )
        starts = np.fromiter((piece.start for piece in slices), dtype=np.int32, count=len(slices))
        counts = np.fromiter((piece.count for piece in slices), dtype=np.int32, count=len(slices))
        ends = np.cumsum(counts)
        if plan.num_rows == len(slices):  # decode: one row per request
            row_request = np.arange(len(slices), dtype=np.int32)
            positions = starts
        else:
            row_request = np.repeat(np.arange(len(slices), dtype=np.int32), counts)
            positions = np.arange(plan.num_rows, dtype=np.int32) + (starts - (ends - counts))[
                row_request
            ].astype(np.int32)
        used_blocks = blocks_for(int((starts + counts).max()))
        block_tables = self._blocks[lines, :used_blocks]
        slots = block_tables[row_request, positions >> BLOCK_SHIFT] * BLOCK_TOKENS + (positions & BLOCK_MASK)
        samples = np.fromiter((piece.samples for piece in slices), dtype=bool, count=len(slices))
        return StepRows(
            token_ids=torch.from_numpy(self._token_ids[lines[row_request], positions]),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots.astype(np.int32, copy=False)),
            row_request=torch.from_numpy(row_request),
            block_tables=torch.from_numpy(np.ascontiguousarray(block_tables)),
            sampled_rows=(ends - 1)[samples].astype(np.int64),
            encoder_tokens=_encoder_tokens(plan),
        )

    def _sync(self, request: Request) -> int:
        """Copy what changed since the last step, usually one token and every 16 steps one block; the request's line."""
        line = request.seat
        if self._owner[line] is not request:
            self._owner[line] = request
            self._known_tokens[line] = 0
            self._version[line] = -1
        known, tokens = self._known_tokens[line], request.tokens
        if known != len(tokens):
            self._token_ids[line, known : len(tokens)] = tokens[known:]
            self._known_tokens[line] = len(tokens)
        if self._version[line] != request.version:
            table = request.block_table
            self._blocks[line, : len(table)] = table
            self._version[line] = request.version
        return line


def _encoder_tokens(plan: StepPlan) -> Tensor | None:
    if not plan.slices[0].request.encoder_tokens:
        return None
    return torch.tensor([piece.request.encoder_tokens for piece in plan.slices], dtype=torch.int32)
