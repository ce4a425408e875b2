"""A step on its way through stages: from plan and rows to plain arrays, and back to rows on the node of a later stage.

Everything a stage needs to run and to sample travels with the step, so a later stage knows no request: blocks are the
first stage's to give and to take back. Pure. What came over the wire is not trusted: a number out of range is a Refusal.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from edge_runtime.cache.block_pool import BLOCK_MASK, BLOCK_SHIFT, BLOCK_TOKENS, blocks_for
from edge_runtime.engine.plan import StepPlan
from edge_runtime.engine.request import Request, SamplingParams, check_params
from edge_runtime.engine.request_table import StepRows
from edge_runtime.errors import Refusal, RequestError
from edge_runtime.model.sampling import Sampled, TokenLogprobs
from edge_runtime.protocol import Choice
from edge_runtime.protocol import TokenLogprobs as WireLogprobs

START, COUNT, SAMPLES, ENCODER_TOKENS = range(4)
NUM_COLUMNS = 4
NO_TOKENS = np.zeros(0, dtype=np.int32)
NO_COUNTS = np.zeros((0, 0, 0), dtype=np.int16)


class SentStep(NamedTuple):
    """A step as plain values; see StageStep. S slices."""

    slices: np.ndarray  # [S, 4] int32
    blocks: np.ndarray  # [B] int32
    tokens: np.ndarray  # [n] int32
    choices: list[Choice]


class SampledRow(NamedTuple):
    """A request as the sampler of a later stage sees it: `tokens` has the right length, and the tokens if they count."""

    params: SamplingParams
    tokens: Sequence[int]
    encoder_end: int


class StageLimits(NamedTuple):
    """What rows may be at a stage."""

    max_rows: int
    num_blocks: int
    context_tokens: int
    vocab_size: int
    has_encoder: bool


def sent_step(plan: StepPlan, rows: StepRows) -> SentStep:
    """The plan and its rows as they travel."""
    slices = np.array(
        [(piece.start, piece.count, piece.samples, piece.request.encoder_tokens) for piece in plan.slices],
        dtype=np.int32,
    )
    tables = rows.block_tables.numpy()
    blocks = tables[_is_used(slices, tables.shape[1])]
    choices: list[Choice] = []
    tokens: list[int] = []
    sampling = [piece.request for piece in plan.slices if piece.samples]
    for index, request in enumerate(sampling):
        choice = _choice(index, request)
        if choice is not None:
            choices.append(choice)
            tokens += request.tokens[: choice.num_tokens]
    return SentStep(slices, blocks, np.array(tokens, dtype=np.int32) if tokens else NO_TOKENS, choices)


def _choice(index: int, request: Request) -> Choice | None:
    """None for a row that takes the best token and reports nothing."""
    params = request.params
    is_penalised = params.repetition_penalty != 1
    if params.temperature == 0 and not is_penalised and params.logprobs is None:
        return None
    return Choice(
        index,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.seed,
        params.logprobs,
        len(request.tokens) if is_penalised else 0,
    )


def _is_used(slices: np.ndarray, num_columns: int) -> np.ndarray:
    """[S, M] bool: the blocks of a table that a request's rows need."""
    ends = slices[:, START] + slices[:, COUNT]
    used: np.ndarray = np.arange(num_columns) < ((ends + BLOCK_MASK) >> BLOCK_SHIFT)[:, None]
    return used


def rows_of(slices: np.ndarray, blocks: np.ndarray, num_rows: int, limits: StageLimits) -> StepRows:
    """The rows of a step that came from another stage; Refusal if they are no rows of ours."""
    if slices.shape[1:] != (NUM_COLUMNS,) or not len(slices):
        raise Refusal("shape", f"slices are [S, {NUM_COLUMNS}] with S at least 1, found {slices.shape}")
    wide = slices.astype(np.int64)
    starts, counts, samples, encoder_tokens = wide.T
    ends = starts + counts
    fault = ""
    if not (starts.min() >= 0 and counts.min() >= 1 and ends.max() <= limits.context_tokens):
        fault = f"a slice lies outside positions 0 to {limits.context_tokens - 1}"
    elif not (counts.sum() == num_rows <= limits.max_rows):
        fault = f"slices of {counts.sum()} rows, {num_rows} came, at most {limits.max_rows} are taken"
    elif not ((samples == 0) | (samples == 1)).all():
        fault = "a slice neither samples nor does not"
    elif not (encoder_tokens.min() >= (1 if limits.has_encoder else 0)) or (
        encoder_tokens.max() > (limits.context_tokens if limits.has_encoder else 0)
    ):
        fault = f"a slice has {encoder_tokens.max()} tokens of an encoder"
    elif len(blocks) != int(((ends + BLOCK_MASK) >> BLOCK_SHIFT).sum()):
        fault = f"{len(blocks)} blocks came for slices that need another number"
    elif not (blocks.min() >= 0 and blocks.max() < limits.num_blocks):
        fault = f"a block is none of 0 to {limits.num_blocks - 1}"
    if fault:
        raise Refusal("shape", fault)
    tables = np.zeros((len(slices), blocks_for(int(ends.max()))), dtype=np.int32)
    tables[_is_used(wide, tables.shape[1])] = blocks
    row_request = np.repeat(np.arange(len(slices), dtype=np.int32), counts)
    row_ends = np.cumsum(counts)
    positions = (np.arange(num_rows) + (starts - (row_ends - counts))[row_request]).astype(np.int32)
    slots = tables[row_request, positions >> BLOCK_SHIFT] * BLOCK_TOKENS + (positions & BLOCK_MASK)
    return StepRows(
        token_ids=torch.empty(0, dtype=torch.int32),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots.astype(np.int32, copy=False)),
        row_request=torch.from_numpy(row_request),
        block_tables=torch.from_numpy(tables),
        sampled_rows=(row_ends - 1)[samples == 1],
        encoder_tokens=torch.from_numpy(encoder_tokens.astype(np.int32)) if limits.has_encoder else None,
    )


def counts_with(
    counts: np.ndarray,
    counted: Sequence[int],
    slices: np.ndarray,
    tables: np.ndarray,
    counts_in: Callable[[list[int]], np.ndarray | None],
) -> np.ndarray:
    """[c, L, E] int16 what prompts chose in the layers so far, with those of this stage. Nothing where nothing is counted here.

    counted    slices that end a prompt; slices [S, 4] and their block tables [S, M]
    counts_in  blocks of a prompt -> [L, E] of this stage's layers
    """
    if not counted or len(counts) != len(counted) or max(counted) >= len(slices):
        return NO_COUNTS
    found = []
    for index in counted:
        end = int(slices[index, START]) + int(slices[index, COUNT])
        own = counts_in(tables[index, : blocks_for(end)].tolist())
        if own is None or own.shape[1] != counts.shape[2]:
            return NO_COUNTS
        found.append(own)
    return np.concatenate([counts, np.stack(found)], axis=1)


def sampled_rows(
    slices: np.ndarray, choices: Sequence[Choice], tokens: np.ndarray, limits: StageLimits
) -> list[SampledRow]:
    """Who samples, in slice order, for the sampler of the last stage."""
    sampling = slices[slices[:, SAMPLES] == 1].astype(np.int64)
    ends = (sampling[:, START] + sampling[:, COUNT]).tolist()
    encoder_ends = [blocks_for(count) * BLOCK_TOKENS for count in sampling[:, ENCODER_TOKENS].tolist()]
    found = [SampledRow(_GREEDY, range(end), first) for end, first in zip(ends, encoder_ends, strict=True)]
    at = 0
    for choice in choices:
        if choice.sample >= len(found):
            raise Refusal("shape", f"{len(found)} requests sample, there is none of number {choice.sample}")
        known: Sequence[int] = range(ends[choice.sample])
        if choice.num_tokens:
            known = tokens[at : at + choice.num_tokens].tolist()
            at += choice.num_tokens
        if len(known) != ends[choice.sample]:
            raise Refusal("shape", f"{len(known)} tokens came of a request that has {ends[choice.sample]}")
        found[choice.sample] = SampledRow(
            _params(choice, limits.vocab_size), known, encoder_ends[choice.sample]
        )
    if at != len(tokens) or (len(tokens) and not 0 <= tokens.min() <= tokens.max() < limits.vocab_size):
        raise Refusal(
            "shape", f"{len(tokens)} tokens came, which are not those of the requests with a penalty"
        )
    return found


_GREEDY = SamplingParams()


def _params(choice: Choice, vocab_size: int) -> SamplingParams:
    params = SamplingParams(
        max_tokens=1,
        temperature=choice.temperature,
        top_k=choice.top_k,
        top_p=choice.top_p,
        min_p=choice.min_p,
        repetition_penalty=choice.repetition_penalty,
        seed=choice.seed,
        logprobs=choice.logprobs,
    )
    try:
        check_params(params, vocab_size)
    except RequestError as error:
        raise Refusal("shape", str(error)) from error
    if choice.temperature > 0 and choice.seed is None:
        raise Refusal("shape", "a request whose tokens are drawn comes without a seed")
    if choice.repetition_penalty != 1 and not choice.num_tokens:
        raise Refusal("shape", "a request with a penalty comes without its tokens")
    return params


def wire_logprobs(sampled: Sampled) -> list[WireLogprobs | None]:
    """Log probabilities as they travel; empty if nobody asked."""
    return (
        [
            None
            if detail is None
            else WireLogprobs(
                token_id, detail.logprob, list(zip(detail.top_ids, detail.top_logprobs, strict=True))
            )
            for token_id, detail in zip(sampled.token_ids.tolist(), sampled.logprobs, strict=True)
        ]
        if sampled.logprobs
        else []
    )


def own_logprobs(found: Sequence[WireLogprobs | None]) -> list[TokenLogprobs | None]:
    """And back."""
    return [
        None
        if detail is None
        else TokenLogprobs(
            detail.logprob, [token_id for token_id, _ in detail.top], [value for _, value in detail.top]
        )
        for detail in found
    ]
