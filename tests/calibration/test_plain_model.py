"""The plain model agrees with the runtime's decoder in every family, and its experts are the sum of their slices."""

from functools import cache

import pytest
import torch

from calibration.plain_model import PlainModel, Routed
from edge_runtime.errors import UserError
from edge_runtime.model.checkpoint import Checkpoint
from tests.support.decoders import Sequences
from tests.support.families import CASES, VARIANTS, write_variant

TOLERANCE = 1e-4  # of logits with a spread of 1.5, float32 on both sides; sums run in another order
SHOWN = [case for case in CASES if case[1] in ("plain", "shared keys", "no query latent", "mxfp4", "window")]


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 509, (count,), generator=generator).tolist()


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory):
    @cache
    def write(family: str, variant: str) -> Checkpoint:
        return Checkpoint.open(write_variant(family, variant, tmp_path_factory.mktemp(family)))

    return write


@pytest.mark.parametrize(("family", "variant"), SHOWN)
def test_the_plain_model_agrees_with_the_decoder(family, variant, checkpoint_of):
    checkpoint = checkpoint_of(family, variant)
    model = PlainModel(checkpoint)
    prompts = torch.tensor([tokens(48), tokens(48, seed=1)])
    with torch.no_grad():
        found = model.logits(model.run(prompts))
    for row, prompt in zip(found, prompts.tolist(), strict=True):
        expected = Sequences(checkpoint).whole(prompt)
        assert float((row - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("family", sorted(VARIANTS))
def test_all_slices_of_the_permuted_experts_together_are_the_experts(family, checkpoint_of):
    model = PlainModel(checkpoint_of(family, "plain"))
    layer = model.spec.moe_layers[0]
    E, F, D = model.experts[layer].up.shape
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(5, D, generator=generator)
    ids = torch.stack([torch.randperm(E, generator=generator)[:2] for _ in range(5)])
    shares = torch.rand(5, 2, 1, generator=generator)
    expected = model.experts_sum(layer, x, Routed(ids, shares))
    order = torch.stack([torch.randperm(F, generator=generator) for _ in range(E)])
    model.experts[layer] = model.experts[layer].permuted(order)
    num_slices = next(n for n in (4, 3, 5, 2, 1) if F % n == 0)
    parts = [
        model.experts_sum(layer, x, Routed(ids, shares * torch.eye(num_slices)[s])) for s in range(num_slices)
    ]
    torch.testing.assert_close(sum(parts), expected, rtol=1e-5, atol=1e-5)


def test_an_encoder_decoder_is_refused_in_a_sentence(tmp_path):
    from tests.support.encoder_decoders import write_tiny_switch

    with pytest.raises(UserError, match=r"is an encoder-decoder \(switch_transformers\), expected a decoder"):
        PlainModel(Checkpoint.open(write_tiny_switch(tmp_path)))
