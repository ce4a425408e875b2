"""What an answer loses when something other than the gate's choice computes it: against the exact model, on the same text.

Prompts are read exactly; then the text is decoded token by token as it stands, each row with what an `Alternative` makes
of it. Knows no placement and no budget: an alternative brings its own.
"""

import math
from collections.abc import Callable, Sequence
from statistics import stdev
from typing import NamedTuple

import torch
from torch import Tensor

from calibration.exact_model import Choice, ExactModel, Routed, Step
from calibration.requests import CalibrationRequest
from edge_runtime.model.moe import ExpertPort

LOGIT_BYTES = 128 << 20


class Slots(NamedTuple):
    """One layer's routed slots, of rows that an alternative may change; n rows."""

    layer_index: int  # which routed layer, counted from 0
    requests: Tensor  # [n] int64, which request of the evaluation each row belongs to
    x: Tensor  # [n, D] float32, what the experts read
    expert_ids: Tensor  # [n, K] int32, best first
    gate_weights: Tensor  # [n, K] float32
    logits: Tensor  # [n, E] float32
    may_be_late: bool = False  # whether what the layer gives can be added behind the next one


class Alternative:
    """What stands in for the gate's choice; this one, and whatever a subclass leaves as it is, changes nothing.

    changes_prompts   whether rows of prompts are changed too
    token_by_token    whether each step must hold one row of each request, as on a node: for what keeps a ledger. Else whole
                      texts are computed at once, which comes to the same
    """

    name = "exact"
    changes_prompts = False
    token_by_token = False

    def port(self, model: ExactModel) -> ExpertPort:
        """Who computes the routed experts."""
        return model.port

    def begin_step(self, requests: Tensor) -> None:
        """A step begins. requests [n] int64: those that its rows, as far as they may be changed, belong to."""

    def choose(self, slots: Slots) -> Choice:
        """Expert ids [n, K] int32 and gate weights [n, K] float32 to use instead, and perhaps what is late; see Choice."""
        return None

    def end_step(self) -> None:
        """All layers of the step were asked for."""

    def notes(self) -> dict[str, float]:
        """What else is to be told once all is done, by name."""
        return {}


class Losses(NamedTuple):
    """What was lost over some tokens; sums in nats."""

    tokens: int
    exact_nats: float
    nats: float
    agreed: int  # tokens for which both think the same one best
    divergence: float  # from the exact distribution

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / self.tokens) if self.tokens else math.nan

    @property
    def exact_perplexity(self) -> float:
        return math.exp(self.exact_nats / self.tokens) if self.tokens else math.nan

    @property
    def rise(self) -> float:
        """Of perplexity, relative."""
        return math.expm1((self.nats - self.exact_nats) / self.tokens) if self.tokens else math.nan

    @property
    def agreement(self) -> float:
        return self.agreed / self.tokens if self.tokens else math.nan


class Outcome(NamedTuple):
    """One alternative over a whole evaluation.

    by_domain            losses by domain; `total` over all tokens
    mean_rise            relative rise of the geometric mean over domains of perplexity: each counts the same
    error                standard error of `mean_rise`, from the requests' own rises; where a domain has only one, from
                         how far domains differ, which is more; NaN where there is only one request
    changed, dropped     share of decoding rows' gate weight that another expert served, or nobody
    notes                what the alternative had to tell
    """

    name: str
    by_domain: dict[str, Losses]
    total: Losses
    mean_rise: float
    error: float
    changed: float
    dropped: float
    notes: dict[str, float]


Progress = Callable[[int, int], None]


def rows_that_fit(vocab_size: int) -> int:
    """Rows of a step whose logits are compared at once."""
    return max(64, LOGIT_BYTES // (4 * vocab_size))


def evaluate(
    model: ExactModel,
    requests: Sequence[CalibrationRequest],
    domains: Sequence[str],
    alternatives: Sequence[Alternative],
    progress: Progress = lambda done, total: None,
) -> list[Outcome]:
    """Run every alternative over the requests; exact answers are computed once for all of them."""
    tallies = [_Tally(alternative, requests, domains) for alternative in alternatives]
    batches, first = model.batches(requests), 0
    for number, batch in enumerate(batches):
        step = model.place(batch)
        rows = (step.is_decode & (step.next_ids >= 0)).nonzero().view(-1)
        exact = model.logits(model.run(step, lambda routed: None), rows).log_softmax(1)
        for tally in tallies:
            tally.add(model, step, rows, exact, first)
        first += len(batch)
        progress(number + 1, len(batches))
    return [tally.outcome() for tally in tallies]


class _Tally:
    """Sums of one alternative, by request."""

    def __init__(
        self, alternative: Alternative, requests: Sequence[CalibrationRequest], domains: Sequence[str]
    ) -> None:
        self._alternative, self._domains = alternative, domains
        self._domain_of = torch.tensor([request.domain for request in requests])
        self._sums = torch.zeros(len(requests), 5, dtype=torch.float64)
        self._weights = torch.zeros(3, dtype=torch.float64)  # of all slots, changed ones, dropped ones

    def add(self, model: ExactModel, step: Step, rows: Tensor, exact: Tensor, first: int) -> None:
        """One step of whole requests, the first of which is number `first`."""
        found = self._logits(model, step, rows, first).log_softmax(1)
        follows = step.next_ids[rows, None]
        said = torch.stack(
            [
                torch.ones(len(rows), dtype=torch.float64),
                -exact.gather(1, follows)[:, 0].double(),
                -found.gather(1, follows)[:, 0].double(),
                (exact.argmax(1) == found.argmax(1)).double(),
                (exact.exp() * (exact - found)).sum(1).double(),
            ],
            dim=1,
        )
        self._sums.index_add_(0, first + step.request[rows], said)

    def _logits(self, model: ExactModel, step: Step, rows: Tensor, first: int) -> Tensor:
        alternative = self._alternative
        if not alternative.token_by_token:
            return model.logits(self._run(model, step, first), rows).clone()
        logits = torch.empty(len(rows), model.spec.vocab_size)
        of_row = torch.full((len(step.token_ids),), -1)
        of_row[rows] = torch.arange(len(rows))
        for part in step.turns():
            hidden = self._run(model, step.rows(part), first)
            wanted = (of_row[part] >= 0).nonzero().view(-1)
            if len(wanted):
                logits[of_row[part[wanted]]] = model.logits(hidden, wanted)
        return logits

    def _run(self, model: ExactModel, step: Step, first: int) -> Tensor:
        alternative = self._alternative
        may_change = torch.ones_like(step.is_decode) if alternative.changes_prompts else step.is_decode
        changes_all = bool(may_change.all())
        index = {layer: i for i, layer in enumerate(model.moe_layers)}
        requests = first + step.request

        def look(routed: Routed) -> Choice:
            mine = may_change if routed.rows is None else may_change[routed.rows]
            part = slice(None) if changes_all else mine.nonzero().view(-1)
            of_request = requests if routed.rows is None else requests[routed.rows]
            slots = Slots(
                index[routed.layer],
                of_request[part],
                routed.x[part],
                routed.expert_ids[part],
                routed.gate_weights[part],
                routed.logits[part],
                model.may_be_late(routed.layer),
            )
            if not len(slots.requests):
                return None
            chosen = alternative.choose(slots)
            self._count(slots, chosen)
            if chosen is None or changes_all:
                return chosen
            ids, weights = routed.expert_ids.clone(), routed.gate_weights.clone()
            ids[part], weights[part], *late = chosen
            if not late:
                return ids, weights
            is_late = torch.zeros(ids.shape, dtype=torch.bool)
            is_late[part] = late[0]
            return ids, weights, is_late

        if may_change.any():
            alternative.begin_step(requests[may_change])
        hidden = model.run(step, look, port=alternative.port(model))
        if may_change.any():
            alternative.end_step()
        return hidden

    def _count(self, slots: Slots, chosen: Choice) -> None:
        total = float(slots.gate_weights.sum())
        self._weights[0] += total
        if chosen is not None:
            ids, weights, *_ = chosen
            is_dropped = weights == 0
            is_other = (ids != slots.expert_ids) & ~is_dropped
            self._weights[1] += float(slots.gate_weights[is_other].sum())
            self._weights[2] += float(slots.gate_weights[is_dropped].sum())

    def outcome(self) -> Outcome:
        """What came of it."""
        has_tokens = self._sums[:, 0] > 0
        by_domain, rises, variances = {}, [], []
        for number, name in enumerate(self._domains):
            mine = self._sums[(self._domain_of == number) & has_tokens]
            if not len(mine):
                continue
            by_domain[name] = losses = _losses(mine.sum(0))
            rises.append((losses.nats - losses.exact_nats) / losses.tokens)
            # Each request's rise beyond its share of the domain's: the variance of a ratio of sums.
            beyond = mine[:, 2] - mine[:, 1] - rises[-1] * mine[:, 0]
            count = len(mine)
            spread = count / (count - 1) if count > 1 else math.nan  # one alone says nothing of its error
            variances.append(float(beyond.square().sum()) / losses.tokens**2 * spread)
        error = math.sqrt(sum(variances)) / len(rises) if rises else math.nan
        if math.isnan(error) and len(rises) > 1:
            error = stdev(rises) / math.sqrt(len(rises))
        mean = sum(rises) / len(rises) if rises else math.nan
        total = max(float(self._weights[0]), 1e-30)
        return Outcome(
            self._alternative.name,
            by_domain,
            _losses(self._sums.sum(0)),
            math.expm1(mean),
            error,
            float(self._weights[1]) / total,
            float(self._weights[2]) / total,
            self._alternative.notes(),
        )


def _losses(sums: Tensor) -> Losses:
    tokens, exact_nats, nats, agreed, divergence = sums.tolist()
    return Losses(round(tokens), exact_nats, nats, round(agreed), divergence)
