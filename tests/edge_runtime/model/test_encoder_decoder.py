"""switch_transformers equals transformers, and equals itself however rows are cut into steps, batches and stages."""

import json

import pytest
import torch

from edge_runtime.cache.pages import KVPages
from edge_runtime.errors import ConfigError
from edge_runtime.model.architectures import read_model
from edge_runtime.model.build import load_experts, load_trunk
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.encoder_decoder import decoder_of
from edge_runtime.model.footprint import footprint
from edge_runtime.model.relative_bias import buckets
from edge_runtime.model.spec import RelativeBias
from kernels.packing import FORMATS
from tests.support.decoders import all_experts
from tests.support.encoder_decoders import START, TINY_SWITCH, Pairs, Seq2SeqReference, write_tiny_switch
from tests.support.families import SWITCH_VARIANTS
from tests.support.tiny_models import edit_config, read_tensors, write_tensors
from topology.costs import kv_block_bytes, trunk_bytes

TOLERANCE = 1e-4  # as in test_families


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 509, (count,), generator=generator).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Untied, with a router bias: every tensor of the family is there."""
    return write_tiny_switch(
        tmp_path_factory.mktemp("switch"), tie_word_embeddings=False, router_bias=True, expert_capacity=6
    )


@pytest.fixture(scope="module")
def checkpoint(folder):
    return Checkpoint.open(folder)


@pytest.fixture(scope="module")
def reference(folder):
    return Seq2SeqReference(folder)


def largest_difference(found, expected):
    assert found.shape == expected.shape
    return float((found - expected).abs().max())


@pytest.mark.parametrize("variant", SWITCH_VARIANTS)
def test_a_tiny_model_equals_transformers(variant, tmp_path):
    folder = write_tiny_switch(tmp_path, **SWITCH_VARIANTS[variant])
    reference, ids, answer = Seq2SeqReference(folder), tokens(53), tokens(40, seed=1)
    encoded, logits = Pairs(Checkpoint.open(folder)).whole(ids, answer)
    expected = reference.step_logits(ids, answer)
    assert reference.encoded(ids).std() > 0.2 and expected.std() > 0.1
    assert largest_difference(encoded, reference.encoded(ids)) < TOLERANCE
    assert largest_difference(logits, expected) < TOLERANCE


def test_prefill_then_decode_equals_transformers(checkpoint, reference, backend):
    ids, answer = tokens(37, seed=2), tokens(30, seed=3)
    pairs = Pairs(checkpoint)
    _, logits = pairs.whole(ids, answer[:12])
    logits = torch.cat([logits, *(pairs.decode(0, token)[None] for token in answer[12:])])
    assert largest_difference(logits, reference.step_logits(ids, answer)) < TOLERANCE


def test_a_decoder_prompt_in_one_call_equals_transformers_where_no_expert_is_full(tmp_path):
    folder = write_tiny_switch(tmp_path, expert_capacity=64)
    ids, answer = tokens(20), tokens(40, seed=1)
    _, logits = Pairs(Checkpoint.open(folder)).whole(ids, answer)
    assert largest_difference(logits, Seq2SeqReference(folder).logits(ids, answer)) < TOLERANCE


def test_tokens_beyond_an_experts_capacity_pass_on_as_they_are(folder, checkpoint, tmp_path):
    roomy = write_tiny_switch(tmp_path, tie_word_embeddings=False, router_bias=True, expert_capacity=100)
    ids = tokens(60)
    tight, _ = Pairs(checkpoint).whole(ids)
    wide, _ = Pairs(Checkpoint.open(roomy)).whole(ids)
    assert largest_difference(tight, wide) > 0.1, "6 of 8 experts' tokens were all that fit"
    assert largest_difference(tight, Seq2SeqReference(folder).encoded(ids)) < TOLERANCE


def test_a_batch_of_unequal_inputs_equals_each_in_transformers(checkpoint, reference):
    inputs = [tokens(n, seed=n) for n in (1, 33, 16, 60)]
    answers = [tokens(n, seed=n + 50) for n in (3, 0, 20, 7)]
    pairs = Pairs(checkpoint, num_sequences=4)
    pieces = [(i, pairs.begin(i, *pair)) for i, pair in enumerate(zip(inputs, answers, strict=True))]
    for i, hidden in enumerate(pairs.step(pieces)):
        encoded, logits = pairs.split(hidden, i)
        assert largest_difference(encoded, reference.encoded(inputs[i])) < TOLERANCE
        assert largest_difference(logits, reference.step_logits(inputs[i], answers[i])) < TOLERANCE


def test_a_batch_gives_the_bits_of_each_sequence_alone(checkpoint, backend):
    inputs = [tokens(n, seed=n) for n in (5, 40, 16)]
    answers = [tokens(9, seed=n + 50) for n in range(3)]
    alone = [Pairs(checkpoint).whole(*pair) for pair in zip(inputs, answers, strict=True)]
    pairs = Pairs(checkpoint, num_sequences=3)
    counts = [pairs.begin(i, *pair) for i, pair in enumerate(zip(inputs, answers, strict=True))]
    # The first is encoded alone; then it decodes, in uneven pieces, beside the encoders of the others.
    first = pairs.step([(0, 16)])
    second = pairs.step([(1, counts[1]), (0, 4)])
    third = pairs.step([(0, counts[0] - 20), (2, counts[2])])
    together = [torch.cat([first[0], second[1], third[0]]), second[0], third[1]]
    for i, hidden in enumerate(together):
        encoded, logits = pairs.split(hidden, i)
        assert torch.equal(encoded, alone[i][0]) and torch.equal(logits, alone[i][1])


@pytest.mark.parametrize("cuts", [[3], [1], [6], [1, 2, 3, 4, 5, 6]])
def test_stages_give_the_bits_of_one_node(checkpoint, cuts):
    pair = tokens(20), tokens(10, seed=1)
    whole, staged = Pairs(checkpoint).whole(*pair), Pairs(checkpoint, cuts=cuts).whole(*pair)
    assert all(torch.equal(found, expected) for found, expected in zip(staged, whole, strict=True))


def test_nothing_stale_is_read_from_pages(checkpoint):
    pair = tokens(21), tokens(10, seed=1)
    expected, pairs = Pairs(checkpoint).whole(*pair), Pairs(checkpoint)
    for layer in pairs.decoders[0]._layers.values():
        for pages in layer.pages:
            pages.fill_(torch.nan)
    assert all(torch.equal(a, b) for a, b in zip(pairs.whole(*pair), expected, strict=True))


def test_greedy_tokens_are_those_of_generate(tmp_path):
    # As many layers in both halves: with more in the decoder, generate of transformers 5.24 falls over its own cache.
    folder = write_tiny_switch(tmp_path, num_decoder_layers=3, tie_word_embeddings=False, expert_capacity=6)
    checkpoint, reference = Checkpoint.open(folder), Seq2SeqReference(folder)
    for seed in range(3):
        ids = tokens(11 + 20 * seed, seed=seed)
        pairs, found = Pairs(checkpoint), []
        logits = pairs.whole(ids)[1][0]
        for _ in range(20):
            found.append(int(logits.argmax()))
            logits = pairs.decode(0, found[-1])
        assert found == reference.greedy(ids, 20)


@pytest.mark.parametrize("variant", SWITCH_VARIANTS)
def test_what_is_loaded_takes_the_bytes_that_were_planned(tmp_path, variant):
    checkpoint = Checkpoint.open(write_tiny_switch(tmp_path, **SWITCH_VARIANTS[variant]))
    spec, planned = checkpoint.spec, footprint(checkpoint, context_tokens=64)
    for first, last in ((0, spec.num_layers), (0, 1), (1, 4), (3, spec.num_layers), (6, spec.num_layers)):
        trunk = load_trunk(checkpoint, spec, first, last, context_tokens=64)
        assert trunk.nbytes == trunk_bytes(planned, first, last), (first, last)
        pages = KVPages(3, spec.kv_shapes(first, last))
        assert pages.nbytes == 3 * kv_block_bytes(planned, first, last)
        decoder = decoder_of(spec, trunk, pages, max_rows=40)
        assert sum(b.nbytes for b in decoder._buffers.values()) == 40 * planned.row_workspace_bytes
    for weight_format in ("as_stored", *FORMATS):
        store = load_experts(checkpoint, spec, all_experts(spec), weight_format=weight_format)
        assert store.nbytes == sum(planned.expert_bytes[weight_format]) * planned.experts_per_layer


def test_distances_fall_into_the_buckets_of_transformers():
    from transformers.models.switch_transformers.modeling_switch_transformers import (
        SwitchTransformersAttention,
    )

    for both_ways in (True, False):
        for num_buckets, most in ((32, 128), (32, 24), (8, 17), (10, 300), (31, 50)):
            found = buckets(RelativeBias(num_buckets, most, both_ways))
            distances = torch.arange(-most - 500, most + 501)
            expected = SwitchTransformersAttention._relative_position_bucket(
                distances, bidirectional=both_ways, num_buckets=num_buckets, max_distance=most
            )
            assert torch.equal(found[distances.clamp(-most, most) + most], expected)


def test_sparse_layers_are_those_of_transformers():
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    for num_layers, wanted, every in (
        (3, 1, None),
        (4, 2, None),
        (3, 3, None),
        (3, 0, None),
        (4, 3, 2),
        (1, 0, None),
        (3, 1, 0),
    ):
        step = {} if every is None else {"encoder_sparse_step": every}
        changes = {"num_layers": num_layers, "num_sparse_encoder_layers": wanted, **step}
        config = SwitchTransformersConfig(**TINY_SWITCH | changes)
        blocks = SwitchTransformersForConditionalGeneration(config).encoder.block
        spec = read_model({"model_type": "switch_transformers", **TINY_SWITCH, **changes})[0]
        found = [i for i in spec.moe_layers if i < num_layers]
        assert found == [i for i, block in enumerate(blocks) if block.is_sparse], changes


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dense_act_fn", "gelu_new"),
        ("dense_act_fn", "gated-gelu"),
        ("feed_forward_proj", "gated-gelu"),
        ("is_gated_act", True),
        ("router_dtype", "bfloat16"),
        ("expert_capacity", 0),
        ("relative_attention_max_distance", 16),
    ],
)
def test_what_is_not_run_is_refused_by_key_and_value(key, value):
    config = {"model_type": "switch_transformers", **TINY_SWITCH, key: value}
    with pytest.raises(ConfigError, match=key) as error:
        read_model(config)
    assert repr(value) in str(error.value)


def test_copies_of_a_tied_embedding_are_left_alone(tmp_path):
    folder = write_tiny_switch(tmp_path)
    tensors = read_tensors(folder)
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"].clone()
    write_tensors(folder, tensors)
    edit_config(folder, remove=("decoder_start_token_id",))
    spec = Checkpoint.open(folder).spec
    assert spec.tied_head and spec.encoder is not None and spec.encoder.start_token_id == START


def test_the_settings_for_generation_say_what_an_answer_begins_with(tmp_path):
    folder = write_tiny_switch(tmp_path)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder_start_token_id": 9}))
    assert Checkpoint.open(folder).spec.encoder.start_token_id == 9
    path.unlink()
    edit_config(folder, decoder_start_token_id=5)
    assert Checkpoint.open(folder).spec.encoder.start_token_id == 5
    edit_config(folder, remove=("decoder_start_token_id",), pad_token_id=3)
    assert Checkpoint.open(folder).spec.encoder.start_token_id == 3
