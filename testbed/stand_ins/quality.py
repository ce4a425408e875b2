"""What stand-ins cost in quality: perplexity and agreement of a model under each of several policies, by domain.

Reads the validation split of a corpus, prompts exactly and the rest under the policy. Knows how policies are named; what
they do is elsewhere.
"""

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from calibration import corpus
from calibration.evaluate import Alternative, Outcome, Progress, evaluate, rows_that_fit
from calibration.exact_model import STEP_ROWS, ExactModel
from calibration.requests import MIN_TOKENS, CalibrationRequest
from edge_runtime.artifacts import Artifact
from edge_runtime.errors import ConfigError, CorpusError
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.tokenizer import Tokenizer
from edge_runtime.selector.choose import POLICIES
from edge_runtime.tables import table_text
from testbed.stand_ins.rules import RULES, LowestReplaced

COLUMNS = (
    "tokens",
    "perplexity",
    "rise %",
    "+-",
    "top-1 agreement %",
    "divergence",
    "changed %",
    "dropped %",
)
NOTED = ("budget", "spent", "exact_here", "exact_elsewhere", "substituted", "deferred", "waits_per_layer")

Select = Callable[[str, str | float], Alternative]
"""A policy of the selector and a quality, as requests give it, to an alternative."""


def validation_requests(
    folder: Path, tokenizer: Tokenizer, *, documents: int, prompt_tokens: int, decode_tokens: int, seed: int
) -> tuple[list[CalibrationRequest], list[str]]:
    """So many documents of each domain's validation split, and the domains' names.

    Documents too short for that give half of theirs as the prompt.
    """
    domains = corpus.find_domains(folder, "validation")
    length = prompt_tokens + decode_tokens
    texts = corpus.sample_documents(domains, documents, seed, max_chars=16 * length)
    names, requests = sorted(texts), []
    for number, name in enumerate(names):
        for text in texts[name]:
            ids = tokenizer.encode(text)[:length]
            prompt = max(1, min(prompt_tokens, len(ids) // 2))
            if len(ids) >= MIN_TOKENS:
                requests.append(CalibrationRequest(number, tuple(ids[:prompt]), tuple(ids[prompt:])))
    if not requests:
        raise CorpusError(
            f"{folder} holds no validation text of at least {MIN_TOKENS} tokens; quality is measured on files called "
            f"valid*, or every tenth document of a domain without such files"
        )
    return requests, names


def alternative(name: str, artifact: Artifact | None, select: Select) -> Alternative:
    """The policy of that name: `exact`, RULE[:SLOTS], or a policy of the selector with a quality.

    select   makes the last kind
    """
    rule, _, count = name.partition(":")
    if name == "exact":
        return Alternative()
    base, *may = rule.split("+")
    if base in POLICIES and base != "exact" and set(may) <= {"drop", "defer"}:
        return select(rule, _number(count) if count else "balanced")
    if rule not in RULES or (count and not (count.isdigit() and int(count) > 0)):
        raise ConfigError(
            f"policy {name!r} is not known; known are exact, {', '.join(RULES)} with the number of slots they replace, as "
            f"in next:1, and paper and live, perhaps with +drop and +defer, with a quality, as in live:balanced or "
            f"live+defer:0.01"
        )
    section = {"similar": "similarity", "least": "mismatch"}.get(rule)
    if section is None:
        return LowestReplaced(rule, int(count or 1))
    if artifact is None:
        raise ConfigError(
            f"policy {name!r} needs a calibration artifact; give --artifact or run `edge-runtime calibrate`"
        )
    table = artifact.tensor(section, "centred" if rule == "similar" else "mismatch").float()
    return LowestReplaced(rule, int(count or 1), table)


def _number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def measure(
    model_folder: Path,
    requests: Sequence[CalibrationRequest],
    domains: Sequence[str],
    make: Callable[[ExactModel], Sequence[Alternative]],
    progress: Progress,
) -> list[Outcome]:
    """Every alternative over the requests."""
    checkpoint = Checkpoint.open(model_folder)
    context = max(request.num_tokens for request in requests) + 1
    if context > checkpoint.spec.context_tokens + 1:
        raise ConfigError(
            f"texts of {context - 1} tokens do not fit the model's context of {checkpoint.spec.context_tokens}; "
            f"give fewer --prompt or --decode tokens"
        )
    rows = min(STEP_ROWS, rows_that_fit(checkpoint.spec.vocab_size))
    model = ExactModel(checkpoint, context_tokens=context, step_rows=rows)
    return evaluate(model, requests, domains, make(model), progress)


def outcome_rows(outcome: Outcome) -> list[dict[str, Any]]:
    """One row for each domain, and one for all."""
    rows = [
        {
            "policy": outcome.name,
            "domain": name,
            "tokens": losses.tokens,
            "exact_perplexity": losses.exact_perplexity,
            "perplexity": losses.perplexity,
            "rise": losses.rise,
            "agreement": losses.agreement,
            "divergence": losses.divergence / max(losses.tokens, 1),
        }
        for name, losses in [*outcome.by_domain.items(), ("all", outcome.total)]
    ]
    rows[-1] |= {
        "rise": outcome.mean_rise,
        "rise_error": outcome.error,
        "changed": outcome.changed,
        "dropped": outcome.dropped,
        "retention": 1 / (1 + outcome.mean_rise),
    } | outcome.notes
    return rows


def quality_table(outcomes: Sequence[Outcome], *, by_domain: bool) -> str:
    """The outcomes for people."""
    table = Table(box=None, pad_edge=False)
    table.add_column("policy")
    if by_domain:
        table.add_column("domain")
    noted = NOTED if any(outcome.notes for outcome in outcomes) else ()
    for name in (*COLUMNS, *noted):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        for row in outcome_rows(outcome)[0 if by_domain else -1 :]:
            is_sum = row["domain"] == "all"
            table.add_row(
                row["policy"],
                *([row["domain"]] if by_domain else []),
                str(row["tokens"]),
                f"{row['perplexity']:.3f}",
                f"{100 * row['rise']:+.3f}",
                f"{100 * row['rise_error']:.3f}" if is_sum else "",
                f"{100 * row['agreement']:.2f}",
                f"{row['divergence']:.5f}",
                f"{100 * row['changed']:.2f}" if is_sum else "",
                f"{100 * row['dropped']:.2f}" if is_sum else "",
                *(f"{row[name]:.4f}" if name in row else "" for name in noted),
            )
    foot = "rise: of the geometric mean over domains of perplexity, with its standard error; changed, dropped: of gate weight"
    return f"{table_text(table)}\n{foot}"


def quality_csv(outcomes: Sequence[Outcome]) -> str:
    """The same for scripts, one row for each policy and domain."""
    rows = [row for outcome in outcomes for row in outcome_rows(outcome)]
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
