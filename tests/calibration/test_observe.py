"""Counts against a plain loop over single requests, for every family, and stops against none."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from calibration.exact_model import ExactModel, Routed
from calibration.observe import Observation, cosines
from calibration.passes import Unfinished, run_pass
from calibration.sections import observed_sections
from edge_runtime.clock import ManualClock
from tests.support.calibrating import FAMILIES, exact_model, random_requests, write_family

REQUESTS = random_requests(9)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory) -> ExactModel:
    return exact_model(write_family(request.param, tmp_path_factory.mktemp("model")))


def observe(model: ExactModel, **options: int) -> Observation:
    observation = Observation(model, REQUESTS, seed=1, **options)
    for unit in range(observation.num_units):
        observation.run(unit)
    return observation


def plain_counts(model: ExactModel) -> tuple[Counter, Counter, dict[tuple[int, int], torch.Tensor]]:
    """(phase, request, layer, expert) -> rows; (layer, expert, expert one layer on) -> rows; logits by layer and row."""
    counts: Counter = Counter()
    followed: Counter = Counter()
    logits: dict[tuple[int, int], torch.Tensor] = {}
    for number in range(len(REQUESTS)):
        count_one(model, number, counts, followed, logits)
    return counts, followed, logits


def count_one(model: ExactModel, number: int, counts: Counter, followed: Counter, logits: dict) -> None:
    step = model.place([REQUESTS[number]])
    chosen: dict[tuple[int, int], list[int]] = {}

    def look(routed: Routed) -> None:
        rows = range(len(step.token_ids)) if routed.rows is None else routed.rows.tolist()
        layer = model.moe_layers.index(routed.layer)
        for row, ids, scores in zip(rows, routed.expert_ids.tolist(), routed.logits, strict=True):
            chosen[layer, row] = ids
            logits[layer, number * 1000 + row] = scores.double().clone()
            for expert in ids:
                counts[int(step.is_decode[row]), number, layer, expert] += 1

    model.run(step, look)
    for (layer, row), ids in chosen.items():
        for after in chosen.get((layer + 1, row), ()):
            for expert in ids:
                followed[layer, expert, after] += 1


def test_counts_transitions_and_cosines_are_those_of_a_plain_loop(model: ExactModel):
    observation = observe(model)
    assert observation.num_units > 1
    counts, followed, logits = plain_counts(model)
    E = model.num_experts
    expected = torch.zeros_like(observation.counts)
    for place, count in counts.items():
        expected[place] = count
    assert torch.equal(observation.counts, expected)
    pairs = torch.zeros_like(observation.followed)
    for place, count in followed.items():
        pairs[place] = count
    assert torch.equal(observation.followed, pairs) and pairs.sum() > 0
    raw, centred = cosines(observation.raw), cosines(observation.centred)
    for layer in range(len(model.moe_layers)):
        z = torch.stack([scores for (at, _), scores in logits.items() if at == layer])
        for found, rows in ((raw, z), (centred, z - z.mean(1, keepdim=True))):
            unit = torch.nn.functional.normalize(rows.T, dim=1)
            torch.testing.assert_close(found[layer], unit @ unit.T, atol=1e-5, rtol=1e-5)
    assert E == raw.shape[1] == raw.shape[2]


def test_every_token_is_counted_top_k_times_in_every_layer(model: ExactModel):
    observation = observe(model)
    if model.spec.encoder is None:
        for counts, parts in ((observation.prefill_counts, 0), (observation.decode_counts, 1)):
            tokens = torch.tensor([len(request[1 + parts]) for request in REQUESTS])
            assert torch.equal(counts.sum(-1), (tokens * model.top_k)[:, None].expand(-1, counts.shape[1]))
    else:
        of_encoder = [layer < model.spec.encoder.num_layers for layer in model.moe_layers]
        assert not observation.decode_counts[:, of_encoder].any()
        last = observation.decode_counts[:, -1].sum(-1).tolist()
        assert last == [len(request.decode_ids) for request in REQUESTS]


def test_samples_hold_few_rows_of_every_expert_that_was_chosen(model: ExactModel):
    observation = observe(model, rows_per_expert=3, logit_rows=20)
    L, S, E = observation.logits.shape
    assert (S, E) == (20, model.num_experts) and not observation.logits[-1].isnan().any()
    for layer in range(L):
        sample = observation.sample(layer)
        rows = torch.bincount(sample.expert_ids.view(-1).long(), minlength=E)
        chosen = observation.counts.sum((0, 1))[layer]
        assert (rows >= chosen.clamp(max=3)).all() and len(sample.x) <= 3 * E


def test_a_stopped_observation_goes_on_to_the_very_same_numbers(model: ExactModel, tmp_path: Path):
    class Stopped(Exception):
        pass

    def stop(name: str, done: int, total: int) -> None:
        if done == 2:
            raise Stopped

    unfinished, clock = Unfinished(tmp_path, "x"), ManualClock()
    with pytest.raises(Stopped):
        run_pass(Observation(model, REQUESTS, seed=1), unfinished, clock, stop, save_every_s=0.0)
    resumed = Observation(model, REQUESTS, seed=1)
    assert run_pass(resumed, unfinished, clock, lambda *_: None) == 1
    again = Observation(model, REQUESTS, seed=1)
    assert run_pass(again, Unfinished(tmp_path, "other"), clock, lambda *_: None) == 0
    whole = observe(model)
    for found in (resumed, again):
        for name, tensor in whole.state().items():
            assert torch.equal(found.state()[name].nan_to_num(9.0), tensor.nan_to_num(9.0)), name


def test_sections_have_the_shapes_and_sums_that_are_promised(model: ExactModel):
    observation = observe(model)
    sections = observed_sections(observation, REQUESTS, ["a", "b", "c"], 1)
    L, E, K = len(model.moe_layers), model.num_experts, model.top_k
    frequency = sections["frequency"][0]
    for name, lead in (("overall", ()), ("decode", ()), ("prefill", ()), ("by_domain", (3,))):
        assert frequency[name].shape == (*lead, L, E) and frequency[name].dtype == torch.float32
        torch.testing.assert_close(frequency[name].sum(-1), torch.full((*lead, L), float(K)))
    C = len(frequency["by_cluster"])
    requests = sections["requests"][0]
    assert requests["prefill_counts"].shape == (9, L, E) and requests["prefill_counts"].dtype == torch.int16
    assert sorted(set(requests["cluster"].tolist())) == list(range(C))
    assert sections["transitions"][0]["transitions"].shape == (L - 1, E, E)
    assert sections["similarity"][0]["raw"].dtype == torch.float16
