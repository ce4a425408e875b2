"""Choose the next token of each request from its logits.

Order of the steps, as is usual in the field: repetition penalty, temperature, top-k, top-p, min-p, draw. It knows
a request only as its options and its tokens.

**A row's token depends on that row alone**: on its logits, options, seed and position; not on the other rows, on
threads, on the instruction set, or on the machine. So every number that decides is made of operations that are
exact or rounded once in a given order: comparisons, sorts of values, elementwise float32 arithmetic, running sums
from left to right, and an `exp` of our own. The random number of a row is a hash of (seed, position).

Ties go to the lowest id everywhere: in the best token, and in what top-k and top-p let in.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GREEDY_BELOW = 1e-5
"""Temperatures below this choose the best token, as 0 does; dividing by less could overflow."""

_PART_VALUES = 2**17
_LOG2_E = math.log2(math.e)
_EXP2_SERIES = tuple(
    math.log(2) ** n / math.factorial(n) for n in range(6, -1, -1)
)  # next term: 1.2e-7 at 1/2


class SamplingOptions(Protocol):
    """The options that sampling reads; `SamplingParams` of the engine has them, checked."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def logprobs(self) -> int | None: ...


class SampledRequest(Protocol):
    """A request as sampling sees it. The position of the token to be chosen is `len(tokens)`."""

    @property
    def params(self) -> SamplingOptions: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def encoder_end(self) -> int:
        """Leading tokens that an encoder reads: the answer repeats none of them."""


class TokenLogprobs(NamedTuple):
    """Log probabilities under the model's own logits, before penalties and temperature."""

    logprob: float  # of the chosen token
    top_ids: list[int]  # the best tokens, best first, ties to the lowest id
    top_logprobs: list[float]


class Sampled(NamedTuple):
    """What was chosen, row by row."""

    token_ids: Tensor  # [B] int64, -1 for a bad row
    logprobs: tuple[TokenLogprobs | None, ...]  # one per row; empty if no row asks
    bad_rows: tuple[int, ...]  # rows with nan or inf among their logits: nothing was chosen


class _Group(NamedTuple):
    """Rows that are drawn in the same way, with their options. S rows."""

    rows: NDArray[np.int64]  # [S]
    rate: Tensor  # [S, 1] float32, log2(e) / temperature
    top_k: NDArray[np.int64]  # [S], vocabulary size if all
    top_p: NDArray[np.float32]  # [S]
    min_p: NDArray[np.float32]  # [S]
    seeds: NDArray[np.uint64]  # [S]

    def part(self, begin: int, end: int) -> "_Group":
        """Rows `[begin, end)` of the group."""
        rows, rate, top_k, top_p, min_p, seeds = self
        part = slice(begin, end)
        return _Group(rows[part], rate[part], top_k[part], top_p[part], min_p[part], seeds[part])


class _Prepared(NamedTuple):
    """What is worked out once for a sequence of options, since it stays the same from step to step."""

    params: list[SamplingOptions]
    penalised: list[int]  # rows with a repetition penalty
    penalised_greedy: list[int]
    plain: _Group | None  # drawn from all tokens that min-p leaves
    in_top_k: _Group | None  # drawn from the best k at most
    in_top_p: _Group | None  # top-p without top-k
    logprob_rows: list[int]
    is_greedy: bool  # nothing but the best token is wanted of any row


class Sampler:
    """Chooses tokens for batches. It keeps what it worked out for the last batch's options, and scratch memory.

    Drawn rows are taken in parts of at most `_PART_VALUES` values (or one row), which stay in a core's cache; the
    scratch memory is 8 bytes per value of a part.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._part_rows = max(1, _PART_VALUES // vocab_size)
        self._scratch = torch.empty((2, self._part_rows * vocab_size), dtype=torch.float32)
        self._prepared = self._prepare([])

    def sample(self, logits: Tensor, requests: Sequence[SampledRequest]) -> Sampled:
        """Choose one token per row.

        logits    [B, V] float32, contiguous, on the CPU; not changed
        requests  B of them, in row order; a drawn row's `seed` is not None
        """
        params = [request.params for request in requests]
        prepared = self._prepared
        if params != prepared.params:
            prepared = self._prepared = self._prepare(params)
        assert logits.shape == (len(params), self.vocab_size), (
            f"logits {tuple(logits.shape)} for {len(params)} rows"
        )
        # numpy's argmax takes 10 us for 16 x 8192 where torch's takes 210; both give the first of equals.
        values = logits.numpy()
        token_ids = values.argmax(axis=-1)
        bad_rows = _rows_not_finite(values, token_ids)
        if prepared.is_greedy and not bad_rows:
            return Sampled(torch.from_numpy(token_ids), (), ())

        scores = self._penalised_scores(logits, requests, prepared, bad_rows)
        for row in prepared.penalised_greedy:
            token_ids[row] = scores[row].numpy().argmax()
        for whole, draw in (
            (prepared.plain, _draw_from_all),
            (prepared.in_top_k, _draw_from_best),
            (prepared.in_top_p, _draw_from_best),
        ):
            for begin in range(0, 0 if whole is None else len(whole.rows), self._part_rows):
                assert whole is not None
                group = whole.part(begin, begin + self._part_rows)
                positions = np.array([len(requests[row].tokens) for row in group.rows], dtype=np.uint64)
                token_ids[group.rows] = draw(scores, group, uniform(group.seeds, positions), self._scratch)
        if bad_rows:
            token_ids[list(bad_rows)] = -1

        logprobs: list[TokenLogprobs | None] = [None] * len(params) if prepared.logprob_rows else []
        for row in prepared.logprob_rows:
            if row not in bad_rows:
                logprobs[row] = _token_logprobs(logits[row], int(token_ids[row]), params[row].logprobs or 0)
        return Sampled(torch.from_numpy(token_ids), tuple(logprobs), bad_rows)

    def _prepare(self, params: list[SamplingOptions]) -> _Prepared:
        greedy, plain, in_top_k, in_top_p = set(), [], [], []
        for row, p in enumerate(params):
            if p.temperature < GREEDY_BELOW or p.top_k == 1:
                greedy.add(row)
            elif 0 < p.top_k < self.vocab_size:
                in_top_k.append(row)
            elif p.top_p < 1:
                in_top_p.append(row)
            else:
                plain.append(row)
        penalised = [row for row, p in enumerate(params) if p.repetition_penalty != 1]
        logprob_rows = [row for row, p in enumerate(params) if p.logprobs is not None]
        return _Prepared(
            params=params,
            penalised=penalised,
            penalised_greedy=[row for row in penalised if row in greedy],
            plain=self._group(params, plain),
            in_top_k=self._group(params, in_top_k),
            in_top_p=self._group(params, in_top_p),
            logprob_rows=logprob_rows,
            is_greedy=not (plain or in_top_k or in_top_p or penalised or logprob_rows),
        )

    def _group(self, params: list[SamplingOptions], rows: list[int]) -> _Group | None:
        if not rows:
            return None
        chosen = [params[row] for row in rows]
        seeds = []
        for p in chosen:
            assert p.seed is not None, "a drawn request has no seed; whoever creates a request draws one"
            seeds.append(p.seed % 2**64)
        return _Group(
            rows=np.array(rows, dtype=np.int64),
            rate=torch.tensor([[_LOG2_E / p.temperature] for p in chosen], dtype=torch.float32),
            top_k=np.array(
                [min(p.top_k or self.vocab_size, self.vocab_size) for p in chosen], dtype=np.int64
            ),
            top_p=np.array([p.top_p for p in chosen], dtype=np.float32),
            min_p=np.array([p.min_p for p in chosen], dtype=np.float32),
            seeds=np.array(seeds, dtype=np.uint64),
        )

    def _penalised_scores(
        self,
        logits: Tensor,
        requests: Sequence[SampledRequest],
        prepared: _Prepared,
        bad_rows: tuple[int, ...],
    ) -> Tensor:
        """The logits, copied where a row has to change: tokens seen before lose, and bad rows become 0.

        A seen token's logit is divided by the penalty if positive and multiplied if not, once however often it
        was seen.
        """
        if not prepared.penalised and not bad_rows:
            return logits
        scores = logits.clone()
        for row in bad_rows:
            scores[row] = 0
        for row in prepared.penalised:
            seen = torch.tensor(requests[row].tokens[requests[row].encoder_end :], dtype=torch.int64)
            penalty = min(
                max(prepared.params[row].repetition_penalty, 1e-30), 1e30
            )  # stays finite in float32
            values = scores[row][seen]
            scores[row][seen] = torch.where(values > 0, values / penalty, values * penalty)
        return scores


def _rows_not_finite(values: NDArray[np.float32], best: NDArray[np.int64]) -> tuple[int, ...]:
    """Rows that hold nan, inf or -inf: nan and -inf show in the minimum, inf in the best."""
    lowest = values.min(axis=-1)
    highest = values[np.arange(len(values)), best]
    finite = np.isfinite(lowest) & np.isfinite(highest)
    return () if finite.all() else tuple(np.flatnonzero(~finite).tolist())


def _draw_from_all(
    scores: Tensor, group: _Group, randoms: NDArray[np.float64], scratch: Tensor
) -> NDArray[np.int64]:
    """Draw from all tokens, in id order, less those that min-p leaves out. scores [B, V], scratch [2, >= S*V]."""
    wanted, spare = (part[: len(group.rows) * scores.shape[1]].view(len(group.rows), -1) for part in scratch)
    for index, row in enumerate(group.rows.tolist()):
        torch.sub(scores[row], scores[row].amax(), out=wanted[index])
    weights = exp2_weights(wanted.mul_(group.rate), spare)  # the best weighs exactly 1
    if group.min_p.any():
        weights.mul_(weights >= torch.from_numpy(group.min_p)[:, None])
    sums = torch.cumsum(weights, dim=-1, out=spare)
    totals = sums[:, -1].numpy()
    aim = _aim(totals, randoms)
    picked: NDArray[np.int64] = torch.searchsorted(sums, torch.from_numpy(aim)[:, None], right=True)[
        :, 0
    ].numpy()
    return picked


def _draw_from_best(
    scores: Tensor, group: _Group, randoms: NDArray[np.float64], scratch: Tensor
) -> NDArray[np.int64]:
    """Draw from the tokens that top-k, top-p and min-p leave, best first. scores [B, V], scratch [2, >= S*V]."""
    values = scores.numpy()[group.rows]
    index = np.arange(len(values))
    num_ranked = int(group.top_k.max())
    # Values only, no ids: numpy sorts 16 x 8192 floats in 0.3 ms, torch with ids in 7.6 ms.
    ranked = -values  # sorted upwards this has the best first
    if num_ranked * 2 < values.shape[1]:
        ranked.partition(num_ranked - 1, axis=-1)
        ranked = ranked[:, :num_ranked]
    ranked.sort(axis=-1)
    wanted, spare = (part[: ranked.size].view(ranked.shape) for part in scratch)
    torch.sub(torch.from_numpy(ranked[:, :1]), torch.from_numpy(ranked), out=wanted)
    weights = exp2_weights(wanted.mul_(group.rate), spare)
    num_in_min_p = (weights.numpy() >= group.min_p[:, None]).sum(axis=-1) if group.min_p.any() else num_ranked
    sums = torch.cumsum(weights, dim=-1, out=spare).numpy()

    # A token is in top-p if the better ones together have less than p of what top-k left.
    least = np.where(group.top_p < 1, group.top_p * sums[index, group.top_k - 1], np.float32(np.inf))
    num_in_top_p = _count_below(sums, least) + 1
    num_kept = np.minimum(np.minimum(group.top_k, num_in_top_p), num_in_min_p)
    rank = _count_below(sums, np.nextafter(_aim(sums[index, num_kept - 1], randoms), np.float32(np.inf)))

    drawn = ranked[index, rank]
    matches = values == -drawn[:, None]
    token_ids: NDArray[np.int64] = matches.argmax(axis=-1)
    for row in np.flatnonzero((rank > 0) & (ranked[index, rank - 1] == drawn)):  # not the first of its equals
        first = int((ranked[row] < drawn[row]).sum())
        token_ids[row] = np.flatnonzero(matches[row])[rank[row] - first]
    return token_ids


def _count_below(rising: NDArray[np.float32], limits: NDArray[np.float32]) -> NDArray[np.int64]:
    """Per row, how many of its rising values are below its limit."""
    found = torch.searchsorted(torch.from_numpy(rising), torch.from_numpy(limits)[:, None])
    counts: NDArray[np.int64] = found[:, 0].numpy()
    return counts


def _aim(totals: NDArray[np.float32], randoms: NDArray[np.float64]) -> NDArray[np.float32]:
    """Where in [0, total) the random number of each row points; never total itself, also after rounding."""
    return np.minimum((totals * randoms).astype(np.float32), np.nextafter(totals, np.float32(0)))


def exp2_weights(x: Tensor, spare: Tensor) -> Tensor:
    """2**x in place, for float32 values <= 0: relative error below 3e-7, the same bits on every machine.

    spare  like x, overwritten

    torch.exp and numpy.exp differ in the last bit between instruction sets. Here every step is one addition or
    multiplication in a call of its own, rounded once. Below -124 the answer stays at 2**-124.
    """
    x.clamp_(min=-124.0)
    whole = torch.round(x, out=spare).to(torch.int32)
    x.sub_(spare)  # exact, and within half of 0
    result = torch.mul(x, _EXP2_SERIES[0], out=spare)
    for coefficient in _EXP2_SERIES[1:-1]:
        result.add_(coefficient).mul_(x)
    result.add_(_EXP2_SERIES[-1])
    two_to_whole = whole.add_(127).bitwise_left_shift_(23).view(torch.float32)
    return torch.mul(result, two_to_whole, out=x)


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One random number in [0, 1) per row, a function of its seed and position alone: splitmix64, twice.

    The first round turns neighbouring seeds into unrelated streams, the second takes the position's place in it.
    """
    mixed = splitmix64(splitmix64(seeds) + positions * _GOLDEN)
    result: NDArray[np.float64] = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output of the splitmix64 generator at these states; wraps at 64 bits."""
    z = state + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _token_logprobs(logits: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Log probabilities of one row. logits [V] float32."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = float(logprobs[token_id])
    if num_top == 0:
        return TokenLogprobs(chosen, [], [])
    num_top = min(num_top, len(logits))
    last = logits.topk(num_top).values[-1]
    ids = (logits >= last).nonzero()[:, 0]  # more than num_top if there are equals of the last
    ids = ids[logits[ids].argsort(descending=True, stable=True)][:num_top]
    return TokenLogprobs(chosen, ids.tolist(), logprobs[ids].tolist())
