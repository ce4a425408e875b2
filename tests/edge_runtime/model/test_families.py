"""Every family equals transformers, and equals itself however rows are cut into steps, batches and stages."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from edge_runtime.model.architectures import FAMILIES
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.footprint import footprint
from tests.support.decoders import Sequences
from tests.support.families import (
    CASES,
    TABLE_BEGIN,
    TABLE_END,
    VARIANTS,
    family_table,
    plain_copy,
    write_variant,
)
from tests.support.tiny_models import Reference

TOLERANCE = (
    1e-4  # of logits with a spread of 1.5, float32 on both sides; sums run in another order in transformers
)
# Weights stored as bf16 or fp16 are widened exactly on both sides, so the bound is the same for them.


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 509, (count,), generator=generator).tolist()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Writes each family's plain variant once."""

    @cache
    def write(family: str) -> Path:
        return write_variant(family, "plain", tmp_path_factory.mktemp(family))

    return write


@pytest.fixture(scope="module")
def checkpoint_of(folder_of):
    return cache(lambda family: Checkpoint.open(folder_of(family)))


@pytest.fixture(scope="module")
def reference_of(folder_of):
    return cache(lambda family: Reference(folder_of(family)))


every_family = pytest.mark.parametrize("family", sorted(VARIANTS))


def largest_difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max())


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_a_tiny_model_equals_transformers(family, variant, tmp_path):
    folder = write_variant(family, variant, tmp_path / "model")
    ids = tokens(64)  # four windows of 16, twice the context before yarn stretched it
    expected = Reference(plain_copy(folder, tmp_path / "plain")).logits(ids)
    assert expected.std() > 0.2, "logits must be spread for the comparison to mean anything"
    assert largest_difference(Sequences(Checkpoint.open(folder)).whole(ids), expected) < TOLERANCE


@every_family
def test_prefill_then_decode_equals_transformers(family, checkpoint_of, reference_of, backend):
    ids = tokens(80, seed=1)
    sequences = Sequences(checkpoint_of(family))
    rows = [sequences.whole(ids[:50]), *(sequences.step([(0, [token])])[0] for token in ids[50:])]
    assert largest_difference(torch.cat(rows), reference_of(family).logits(ids)) < TOLERANCE


@every_family
def test_a_batch_of_unequal_prompts_equals_each_prompt_in_transformers(family, checkpoint_of, reference_of):
    prompts = [tokens(n, seed=n) for n in (1, 33, 7, 60)]
    logits = Sequences(checkpoint_of(family), num_sequences=4).step(list(enumerate(prompts)))
    for prompt, found in zip(prompts, logits, strict=True):
        assert largest_difference(found, reference_of(family).logits(prompt)) < TOLERANCE


@every_family
def test_greedy_tokens_are_those_of_transformers(family, checkpoint_of, reference_of):
    prompt = tokens(20, seed=2)
    found, expected = list(prompt), list(prompt)
    sequences = Sequences(checkpoint_of(family))
    logits = sequences.whole(prompt)
    for _ in range(24):
        expected.append(int(reference_of(family).logits(expected)[-1].argmax()))
        found.append(int(logits[-1].argmax()))
        logits = sequences.step([(0, found[-1:])])[0]
    assert found == expected


@every_family
def test_chunks_of_a_prompt_give_the_bits_of_the_whole(family, checkpoint_of, backend):
    ids = tokens(61)
    whole = Sequences(checkpoint_of(family)).whole(ids)
    for sizes in ([1] * 61, [17, 16, 28], [60, 1], [5, 56]):
        sequences = Sequences(checkpoint_of(family))
        parts = [part.tolist() for part in torch.tensor(ids).split(sizes)]
        rows = torch.cat([sequences.whole(part) for part in parts])
        assert torch.equal(rows, whole), f"chunks {sizes}"


@every_family
def test_a_batch_gives_the_bits_of_each_sequence_alone(family, checkpoint_of, backend):
    prompts = [tokens(n, seed=n) for n in (3, 40, 17, 1, 29)]
    alone = [Sequences(checkpoint_of(family)).whole(prompt) for prompt in prompts]
    sequences = Sequences(checkpoint_of(family), num_sequences=5)
    # Prefill of some beside decode of others, in two uneven steps.
    first = sequences.step([(0, prompts[0][:2]), (1, prompts[1][:33]), (2, prompts[2])])
    second = sequences.step([(4, prompts[4]), (1, prompts[1][33:]), (0, prompts[0][2:]), (3, prompts[3])])
    together = [
        torch.cat([first[0], second[2]]),
        torch.cat([first[1], second[1]]),
        first[2],
        second[3],
        second[0],
    ]
    for found, expected in zip(together, alone, strict=True):
        assert torch.equal(found, expected)


@every_family
def test_stages_give_the_bits_of_one_decoder(family, checkpoint_of, backend):
    prompts = [(0, tokens(20, seed=1)), (1, tokens(5, seed=2))]
    whole = Sequences(checkpoint_of(family), num_sequences=2).step(prompts)
    last = checkpoint_of(family).spec.num_layers - 1
    for cuts in ([1], [last], list(range(1, last + 1))):
        staged = Sequences(checkpoint_of(family), num_sequences=2, cuts=cuts).step(prompts)
        assert all(torch.equal(found, expected) for found, expected in zip(staged, whole, strict=True))


@every_family
def test_nothing_stale_is_read_from_pages(family, checkpoint_of):
    ids = tokens(30)
    expected = Sequences(checkpoint_of(family), num_sequences=2).whole(ids)
    sequences = Sequences(checkpoint_of(family), num_sequences=2)
    for decoder in sequences.decoders:
        for layer in decoder._layers.values():
            for pages in layer.pages:
                pages.fill_(torch.nan)
    assert torch.equal(sequences.whole(ids), expected)


def test_a_stage_that_lacks_the_keys_it_shares_is_refused(tmp_path):
    checkpoint = Checkpoint.open(write_variant("gemma4", "shared keys", tmp_path))
    assert footprint(checkpoint).uncut == {1, 2, 3}, "the planner cuts at none of these"
    with pytest.raises(ValueError, match="layer 2 uses keys and values of layer 0"):
        Sequences(checkpoint, cuts=[2])


def test_every_family_is_tested_and_in_the_table_of_the_readme(repository):
    readme = (Path(repository) / "README.md").read_text()
    # The encoder-decoder has a harness of its own: test_encoder_decoder.py.
    assert set(VARIANTS) == set(FAMILIES) - {"gemma4_text", "switch_transformers"}
    table = readme.split(TABLE_BEGIN)[1].split(TABLE_END)[0].strip()
    assert table == family_table(), "run `python -m tests.support.families` and put its table into README.md"
