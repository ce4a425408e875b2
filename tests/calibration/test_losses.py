"""What a stand-in costs: outputs against a plain loop, and answers that change only where experts differ."""

import pytest
import torch

from calibration.exact_model import ExactModel
from calibration.mismatch import Mismatch
from calibration.observe import Observation
from calibration.sections import loss_sections, together_section
from calibration.sensitivity import Sensitivity
from calibration.together import SHARES, Together, fit
from kernels import ops
from tests.support.calibrating import FAMILIES, exact_model, random_requests, write_family
from tests.support.tiny_models import read_tensors, write_tensors, write_tiny

REQUESTS = random_requests(6)


def measure(model: ExactModel) -> tuple[Observation, Mismatch, Sensitivity]:
    observation = Observation(model, REQUESTS, seed=1, rows_per_expert=4)
    mismatch = Mismatch(model, observation)
    sensitivity = Sensitivity(model, REQUESTS, mismatch, seed=1, decode_rows=60)
    for work in observation, mismatch, sensitivity:
        for unit in range(work.num_units):
            work.run(unit)
    return observation, mismatch, sensitivity


@pytest.fixture(scope="module", params=FAMILIES)
def measured(request, tmp_path_factory) -> tuple[ExactModel, Observation, Mismatch, Sensitivity]:
    model = exact_model(write_family(request.param, tmp_path_factory.mktemp("model")))
    return model, *measure(model)


def plain_mismatch(model: ExactModel, observation: Observation, index: int) -> tuple[torch.Tensor, float]:
    """Mean distances [E, E] of what two experts give for rows of the first, and the layer's scale, one row at a time."""
    E = model.num_experts
    bank = model.store.bank(model.moe_layers[index])
    sums, counts, lengths = torch.zeros(E, E), torch.zeros(E, 1), []
    for x, ids, weights in zip(*observation.sample(index), strict=True):
        outputs = [
            ops.grouped_ffn(x.float()[None], torch.tensor([0]).int(), torch.tensor([e]).int(), bank)[0]
            for e in range(E)
        ]
        lengths.append(sum(w * outputs[e] for e, w in zip(ids.tolist(), weights, strict=True)).norm())
        for e in ids.tolist():
            sums[e] += torch.stack([(outputs[e] - each).norm() for each in outputs])
            counts[e] += 1
    return sums / counts.clamp_min(1), float(torch.stack(lengths).mean())


def test_deviations_are_those_of_a_plain_loop(measured):
    model, observation, mismatch, _ = measured
    last = len(model.moe_layers) - 1
    expected, scale = plain_mismatch(model, observation, last)
    known = mismatch.rows[last] > 0
    torch.testing.assert_close(mismatch.deviation[last][known] * scale, expected[known], atol=2e-4, rtol=1e-4)
    assert float(mismatch.scale[last]) == pytest.approx(scale, rel=1e-4)
    assert (mismatch.deviation.diagonal(dim1=1, dim2=2) == 0).all() and (mismatch.norm > 0).all()


def test_every_layer_answers_to_a_wrong_expert_and_more_to_a_higher_ranked_one(measured):
    model, _, mismatch, sensitivity = measured
    tensors, meta = loss_sections(mismatch, sensitivity)["sensitivity"]
    L = len(model.moe_layers)
    assert meta["ranks"][-1] == 0 and len(meta["rows"]) == L and all(meta["rows"])
    assert tensors["response"].shape == (L, len(meta["ranks"]), 4)
    _, _, loss, _ = tensors["response"].unbind(-1)
    assert (loss > 0).all() and (tensors["sensitivity"] > 0).all()
    assert loss.sum(0).tolist() == sorted(loss.sum(0).tolist())
    assert (tensors["worst"] >= tensors["quadratic"]).all()


def together_of(model: ExactModel, mismatch: Mismatch, sensitivity: Sensitivity) -> Together:
    found = Together(model, REQUESTS, mismatch, sensitivity, seed=1, decode_rows=60)
    for unit in range(found.num_units):
        found.run(unit)
    return found


def test_several_stand_ins_are_measured_for_each_share_and_late_replies_for_each_layer(measured):
    model, _, mismatch, sensitivity = measured
    found = together_of(model, mismatch, sensitivity)
    tensors, meta = together_section(found)["together"]
    assert meta["shares"] == list(SHARES) and tensors["response"].shape == (len(SHARES), 3)
    alone, together = tensors["factors"].tolist()
    assert alone > 0 and together >= 0
    squares, beyond, loss = tensors["response"].unbind(1)
    assert squares[-1] == squares.max() > 0 and (loss >= 0).all() and (beyond > -1e-9).all()
    may = [model.may_be_late(layer) for layer in model.moe_layers]
    assert may[-1] is False and (tensors["late"][torch.tensor(may)] > 0).all()
    assert (tensors["late"][~torch.tensor(may)] == 0).all()
    again = together_of(model, mismatch, sensitivity)
    assert torch.equal(again.response, found.response) and torch.equal(again.late, found.late)


def test_the_two_factors_are_found_again_and_never_too_small_where_they_cannot_be():
    squares, beyond = torch.tensor([0.01, 0.03, 0.1, 0.3]), torch.tensor([0.001, 0.01, 0.1, 1.0])
    means = torch.stack([squares, beyond, 1.3 * squares + 0.2 * beyond], dim=1).double()
    assert fit(means) == pytest.approx((1.3, 0.2))
    falling = torch.stack([squares, beyond, 2.0 * squares - 0.3 * squares * beyond], dim=1).double()
    alone, together = fit(falling)
    assert together == 0.0 and (alone * squares >= falling[:, 2] * (1 - 1e-6)).all()
    assert fit(torch.zeros(4, 3)) == (1.0, 1.0)


def test_outputs_that_come_late_change_nothing_but_layers_behind(measured):
    model = measured[0]
    if not model.may_be_late(model.moe_layers[0]):
        pytest.skip("this family does not add its experts to the residual as they are")
    step, first = model.place(REQUESTS[:2]), model.moe_layers[0]

    def late(share: bool):
        def look(routed):
            if routed.layer != first:
                return None
            return routed.expert_ids, routed.gate_weights, torch.full(routed.expert_ids.shape, share)

        return look

    exact = model.run(step, lambda routed: None).clone()
    torch.testing.assert_close(model.run(step, late(False)), exact)
    assert not torch.allclose(model.run(step, late(True)), exact)


def test_experts_that_are_the_same_may_stand_in_for_nothing(tmp_path):
    folder = write_tiny("mixtral", tmp_path / "model", num_hidden_layers=1)
    tensors = read_tensors(folder)
    for name in tensors:
        for other in range(1, 8):
            if ".experts.0." in name:
                tensors[name.replace(".experts.0.", f".experts.{other}.")] = tensors[name]
    write_tensors(folder, {name: tensor.clone() for name, tensor in tensors.items()})
    _, mismatch, sensitivity = measure(exact_model(folder))
    assert not mismatch.deviation.any()
    assert sensitivity.mean_response[..., 2].abs().max() < 1e-6


def test_where_every_expert_is_chosen_there_is_nobody_else_and_nothing_to_say(tmp_path):
    folder = write_tiny("qwen3_moe", tmp_path / "model", num_experts_per_tok=8, num_hidden_layers=2)
    _, mismatch, sensitivity = measure(exact_model(folder))
    assert not sensitivity.response.any() and not sensitivity.loss_per_deviation.any()
    assert (mismatch.rows > 0).all()
