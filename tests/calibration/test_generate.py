"""What the model writes: the tokens that its own distribution allows, for every family, and the same after a stop."""

from pathlib import Path

import pytest
import torch

from calibration.exact_model import ExactModel
from calibration.generate import Generation
from calibration.passes import Unfinished, run_pass
from edge_runtime.clock import ManualClock
from tests.support.calibrating import FAMILIES, exact_model, random_requests, write_family
from tests.support.tiny_models import read_tensors, write_tensors

REQUESTS = random_requests(14)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory) -> ExactModel:
    """A model whose head is so sure that drawing a token is taking the best one."""
    folder = write_family(request.param, tmp_path_factory.mktemp("model"))
    tensors = read_tensors(folder)
    for name in tensors:
        if name.endswith(("model.norm.weight", "decoder.final_layer_norm.weight")):
            tensors[name] = tensors[name] * 1000
    write_tensors(folder, {name: tensor.clone() for name, tensor in tensors.items()})
    return exact_model(folder)


def generate(model: ExactModel, tmp_path: Path) -> Generation:
    generation = Generation(model, REQUESTS, 9, seed=1)
    run_pass(generation, Unfinished(tmp_path, "x"), ManualClock(), lambda *_: None)
    return generation


def test_each_token_is_the_best_behind_those_before_it(model: ExactModel, tmp_path: Path):
    requests = generate(model, tmp_path).requests
    assert [r.prompt_ids for r in requests] == [r.prompt_ids for r in REQUESTS]
    sure = 0
    for request in requests:
        step = model.place([request])
        rows = (step.next_ids >= 0).nonzero().view(-1)[-9:]
        shares = model.logits(model.run(step, lambda routed: None), rows).softmax(1)
        assert len(request.decode_ids) == 9 and step.next_ids[rows].tolist() == list(request.decode_ids)
        is_sure = shares.amax(1) > 0.9999
        sure += int(is_sure.sum())
        assert torch.equal(shares.argmax(1)[is_sure], step.next_ids[rows][is_sure])
    assert sure > (60 if model.spec.logit_soft_cap is None else -1)


def test_a_stopped_generation_goes_on_to_the_same_tokens(model: ExactModel, tmp_path: Path):
    class Stopped(Exception):
        pass

    def stop(name: str, done: int, total: int) -> None:
        if done == 1:
            raise Stopped

    unfinished = Unfinished(tmp_path / "stopped", "x")
    with pytest.raises(Stopped):
        first = Generation(model, REQUESTS, 9, seed=1)
        assert first.num_units > 1
        run_pass(first, unfinished, ManualClock(), stop, save_every_s=0.0)
    unfinished.save("generate", first.state(), 1)
    resumed = Generation(model, REQUESTS, 9, seed=1)
    assert run_pass(resumed, unfinished, ManualClock(), lambda *_: None) == 1
    assert torch.equal(resumed.ids, generate(model, tmp_path).ids)
