"""What the passes found as the sections of an artifact: names, dtypes and the words that go with them.

    requests     prefill_counts, decode_counts [N, L, E] int16, tokens of a request that chose the expert;
                 prompt_tokens, decode_tokens [N] int32; domain [N] int16, index into meta.domains;
                 cluster [N] int16, requests alike in what they decode with
    frequency    decode, prefill [L, E] float32, share of tokens that choose the expert (a layer's sum is K);
                 overall the same over both; by_domain, by_cluster [C, L, E] float32, of decoding tokens;
                 weight [L, E] float32, mean gate weight where chosen
    similarity   raw, centred [L, E, E] float16, cosine of two experts' gate logits over all tokens
    transitions  transitions [L - 1, E, E] int32, tokens that chose the column one routed layer behind the row
    logits       logits [L, S, E] float16, a sample; NaN where a layer does not see the row
    mismatch     mismatch [L, E, E] float16, mean length of E_i(x) - E_j(x) over rows routed to i, relative to the layer's
                 scale: column j stands in for row i; norm [L, E] float16, the same with nothing standing in;
                 rows [L, E] int32, rows behind them
    sensitivity  sensitivity [L] float32, nats of loss per token for each relative deviation of the layer's output;
                 scale [L] float32, mean length of what a row gets from the layer's experts;
                 quadratic, worst [L] float32, nats for each squared relative deviation: of the lowest-ranked slot, and the
                 largest over the ranks that were tried;
                 response [L, R, 4] float32, for slots of meta.ranks replaced by a random expert, means of: relative
                 deviation, its square, loss in nats, rise of the text's own loss in nats
    together     factors [2] float64, `alone` and `together` of `together.py`: what several stand-ins of a token cost, by what
                 each layer's would cost alone; late [L] float32, nats for each squared relative deviation of a layer's
                 output without what is added one layer late, 0 where that cannot be;
                 response [P, 3] float64, means for each of meta.shares: squares, beyond them, loss in nats

The loss that is predicted for one slot is sensitivity[l] * d with d = gate weight * mismatch[l, i, j], in nats, which is the
relative rise in perplexity; with norm[l, i] in place of the mismatch where nothing stands in. Losses grow with the square
of a deviation, so that is right for slots like the lowest-ranked one and too little for larger ones; quadratic[l] * d * d is
nearer for all but the highest-ranked slot, and worst[l] * d * d for that one.

A layer that no decoding token passes (an encoder's) has the prefill's shares in `decode` too. Every section's meta has
`layers`, the model's numbers of the L routed layers, and `requests`, the fingerprint of what was read.
"""

from typing import Any

import torch
from torch import Tensor

from calibration.clusters import cluster_requests
from calibration.mismatch import HALF_MAX, Mismatch
from calibration.observe import Observation, cosines
from calibration.requests import CalibrationRequest
from calibration.sensitivity import Sensitivity
from calibration.together import SHARES, Together

NUM_CLUSTERS = 8

Section = tuple[dict[str, Tensor], dict[str, Any]]


def observed_sections(
    observation: Observation, requests: list[CalibrationRequest], domains: list[str], seed: int
) -> dict[str, Section]:
    """Every section that the observation gives, by name."""
    prefill, decode = observation.prefill_counts, observation.decode_counts
    domain = torch.tensor([request.domain for request in requests])
    cluster = cluster_requests(decode, NUM_CLUSTERS, seed)
    top_k, chosen = observation.top_k, prefill.sum(0) + decode.sum(0)
    overall = share(chosen, top_k)
    of_prefill = _or(share(prefill.sum(0), top_k), overall)
    of_decode = _or(share(decode.sum(0), top_k), overall)
    return {
        "requests": (
            {
                "prefill_counts": prefill.short(),
                "decode_counts": decode.short(),
                "prompt_tokens": torch.tensor([len(r.prompt_ids) for r in requests], dtype=torch.int32),
                "decode_tokens": torch.tensor([len(r.decode_ids) for r in requests], dtype=torch.int32),
                "domain": domain.short(),
                "cluster": cluster.short(),
            },
            {"domains": domains},
        ),
        "frequency": (
            {
                "overall": overall,
                "prefill": of_prefill,
                "decode": of_decode,
                "by_domain": by_label(decode, domain, len(domains), top_k, of_decode),
                "by_cluster": by_label(decode, cluster, int(cluster.max()) + 1, top_k, of_decode),
                "weight": (observation.weight_sum / chosen.clamp_min(1)).float(),
            },
            {"domains": domains},
        ),
        "similarity": (
            {"raw": cosines(observation.raw).half(), "centred": cosines(observation.centred).half()},
            {"tokens": int(sum(request.num_tokens for request in requests))},
        ),
        "transitions": ({"transitions": observation.followed.int()}, {}),
        "logits": ({"logits": observation.logits.contiguous()}, {}),
    }


def loss_sections(mismatch: Mismatch, sensitivity: Sensitivity) -> dict[str, Section]:
    """The sections that say what a substitute costs."""
    return {
        "mismatch": (
            {
                "mismatch": mismatch.deviation.clamp_max(HALF_MAX).half(),
                "norm": mismatch.norm.clamp_max(HALF_MAX).half(),
                "rows": mismatch.rows,
            },
            {"relative_to": "scale of section sensitivity"},
        ),
        "sensitivity": (
            {
                "sensitivity": sensitivity.loss_per_deviation,
                "scale": mismatch.scale,
                "quadratic": sensitivity.loss_per_square[:, 0].contiguous(),
                "worst": sensitivity.loss_per_square.amax(1),
                "response": sensitivity.mean_response,
            },
            {"ranks": list(sensitivity.ranks), "rows": [int(rows) for rows in sensitivity.response[:, 0, 0]]},
        ),
    }


def together_section(together: Together) -> dict[str, Section]:
    """The section that says what several substitutes cost at once, and late replies."""
    means = together.response[:, 1:] / together.response[:, :1].clamp_min(1)
    return {
        "together": (
            {
                "factors": torch.tensor(together.factors, dtype=torch.float64),
                "late": together.loss_per_late_square,
                "response": means,
            },
            {"shares": list(SHARES), "rows": int(together.response[0, 0])},
        )
    }


def share(counts: Tensor, top_k: int) -> Tensor:
    """Counts [.., E] as the share of tokens that choose each expert, float32; NaN where no token passed."""
    total = counts.sum(-1, keepdim=True).double()  # each token counts K times
    return (counts * top_k / total).float()


def by_label(counts: Tensor, label: Tensor, num_labels: int, top_k: int, otherwise: Tensor) -> Tensor:
    """Shares [C, L, E] of the requests of each label; `otherwise` [L, E] where a label has no token."""
    summed = torch.zeros(num_labels, *counts.shape[1:], dtype=torch.int64).index_add_(0, label, counts.long())
    return _or(share(summed, top_k), otherwise.expand(num_labels, -1, -1))


def _or(shares: Tensor, otherwise: Tensor) -> Tensor:
    return torch.where(shares.isnan(), otherwise, shares)
