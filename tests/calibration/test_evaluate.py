"""Losses under substitution: nothing is lost without any, a token at a time equals all at once, and prompts stay exact."""

import math

import pytest
import torch

from calibration.evaluate import Alternative, Slots, evaluate
from calibration.exact_model import Choice, ExactModel
from tests.support.calibrating import FAMILIES, exact_model, random_requests, write_family

REQUESTS = random_requests(7)
DOMAINS = ["a", "b", "c"]


class Shifted(Alternative):
    """The lowest-ranked expert is replaced by the one of the next number; remembers what it was shown."""

    name = "shifted"

    def __init__(self, *, token_by_token: bool = False, changes_prompts: bool = False) -> None:
        self.token_by_token, self.changes_prompts = token_by_token, changes_prompts
        self.steps: list[list[int]] = []
        self.rows = 0
        self.is_open = False

    def begin_step(self, requests: torch.Tensor) -> None:
        assert not self.is_open
        self.is_open = True
        self.steps.append(requests.tolist())

    def end_step(self) -> None:
        self.is_open = False

    def choose(self, slots: Slots) -> Choice:
        assert self.is_open
        self.rows += len(slots.requests)
        ids = slots.expert_ids.clone()
        ids[:, -1] = (ids[:, -1] + 1) % slots.logits.shape[1]
        return ids, slots.gate_weights


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory) -> ExactModel:
    return exact_model(write_family(request.param, tmp_path_factory.mktemp("model")))


def test_without_a_change_nothing_is_lost(model: ExactModel):
    (outcome,) = evaluate(model, REQUESTS, DOMAINS, [Alternative()])
    assert outcome.total.nats == outcome.total.exact_nats and outcome.total.agreement == 1.0
    assert outcome.total.divergence == 0.0 and outcome.mean_rise == outcome.changed == outcome.dropped == 0.0
    assert outcome.total.tokens == sum(len(request.decode_ids) - 1 for request in REQUESTS)
    assert sum(losses.tokens for losses in outcome.by_domain.values()) == outcome.total.tokens


def test_exact_losses_are_those_of_each_text_by_itself(model: ExactModel):
    (outcome,) = evaluate(model, REQUESTS, DOMAINS, [Alternative()])
    nats = 0.0
    for request in REQUESTS:
        step = model.place([request])
        rows = (step.is_decode & (step.next_ids >= 0)).nonzero().view(-1)
        logits = model.logits(model.run(step, lambda routed: None), rows)
        nats += float(torch.nn.functional.cross_entropy(logits, step.next_ids[rows], reduction="sum"))
    assert outcome.total.exact_nats == pytest.approx(nats, rel=1e-6)


def test_a_token_at_a_time_loses_what_whole_texts_lose(model: ExactModel):
    whole, single = Shifted(), Shifted(token_by_token=True)
    first, second = evaluate(model, REQUESTS, DOMAINS, [whole, single])
    assert first.total.nats == pytest.approx(second.total.nats, rel=1e-6)
    assert first.total.agreed == second.total.agreed and first.changed == pytest.approx(second.changed)
    assert first.total.nats != first.total.exact_nats and first.changed > 0
    assert whole.rows == single.rows
    assert all(len(set(requests)) == len(requests) for requests in single.steps)


def test_prompts_stay_exact_unless_they_are_asked_for(model: ExactModel):
    decode, everything = Shifted(), Shifted(changes_prompts=True)
    evaluate(model, REQUESTS, DOMAINS, [decode, everything])
    tokens = sum(len(request.decode_ids) for request in REQUESTS)
    if model.spec.encoder is None:
        assert decode.rows == tokens * len(model.moe_layers)
    assert everything.rows > decode.rows
    assert {number for requests in decode.steps for number in requests} == set(range(len(REQUESTS)))


class Nothing(Alternative):
    """Nobody serves the lowest-ranked slot."""

    name = "nothing"

    def choose(self, slots: Slots) -> Choice:
        weights = slots.gate_weights.clone()
        weights[:, -1] = 0.0
        return slots.expert_ids, weights


def test_weight_that_nobody_serves_is_counted_as_dropped(model: ExactModel):
    (outcome,) = evaluate(model, REQUESTS, DOMAINS, [Nothing()])
    assert outcome.changed == 0.0 and 0.0 < outcome.dropped <= 1.0
    assert outcome.mean_rise != 0.0 and math.isfinite(outcome.error)


def test_one_text_of_each_domain_has_the_error_that_domains_differ_by(model: ExactModel):
    alone = [REQUESTS[0], REQUESTS[1]]
    (outcome,) = evaluate(model, alone, ["a", "b"], [Nothing()])
    first, second = ((each.nats - each.exact_nats) / each.tokens for each in outcome.by_domain.values())
    assert outcome.error == pytest.approx(abs(first - second) / 2) and outcome.error > 0
    (single,) = evaluate(model, alone[:1], ["a"], [Nothing()])
    assert math.isnan(single.error)
