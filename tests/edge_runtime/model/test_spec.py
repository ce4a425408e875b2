"""The spec can say more than the code can run, and `unsupported` knows the difference."""

import msgspec
import pytest

from edge_runtime.model.spec import (
    AttentionSpec,
    EncoderSpec,
    ExpertSpec,
    GateSpec,
    KVShape,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    RelativeBias,
    RopeSpec,
    unsupported,
)

ATTENTION = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_width=32, scale=32**-0.5, qk_norm="head", rope=RopeSpec(theta=1e4)
)
LATENT = AttentionSpec(
    num_heads=4,
    num_kv_heads=4,
    head_width=24,
    scale=24**-0.5,
    rope=RopeSpec(theta=1e4, interleaved=True),
    latent=LatentSpec(width=48, plain_width=16, value_width=20),
)
GATE = GateSpec(num_experts=8, top_k=2)
MOE = LayerSpec(attention=ATTENTION, kind="moe", ffn=ExpertSpec(width=48), gate=GATE)
DENSE = LayerSpec(attention=ATTENTION, kind="dense", ffn=ExpertSpec(width=96))
MODEL = ModelSpec(
    family="any",
    width=64,
    vocab_size=512,
    context_tokens=128,
    norm_eps=1e-6,
    layers=(DENSE, MOE, MOE),
    tied_head=True,
)


def change(spec, **fields):
    return msgspec.structs.replace(spec, **fields)


def with_last_layer(**fields):
    return change(MODEL, layers=(DENSE, MOE, change(MOE, **fields)))


def test_a_model_of_dense_and_routed_layers_runs():
    assert unsupported(MODEL) == []
    assert MODEL.moe_layers == (1, 2) and MODEL.num_layers == 3


def test_layers_may_differ_in_attention():
    for attention in (change(ATTENTION, num_heads=8, head_width=16), LATENT, ATTENTION.windowed(16)):
        assert unsupported(with_last_layer(attention=attention)) == []


def test_what_a_token_keeps_follows_from_the_kind_of_attention():
    assert ATTENTION.kv_shape == KVShape(2, 32, 32)
    assert LATENT.kv_shape == KVShape(1, 48 + 8, 48)
    assert (LATENT.rotary_width, LATENT.mixed_width) == (8, 80)
    assert change(ATTENTION, kv_shared_with=1).kv_shape == KVShape(2, 32, 32, 1)
    assert MODEL.kv_shapes(1, 3) == {1: KVShape(2, 32, 32), 2: KVShape(2, 32, 32)}


@pytest.mark.parametrize(
    ("attention", "fault"),
    [
        (change(LATENT, qk_norm="head"), "latent attention with q/k norm 'head'"),
        (change(LATENT, clip=8.0), "latent attention with clip 8.0"),
        (change(ATTENTION, kv_shared_with=0, head_width=16), "keys and values of another shape shared"),
    ],
)
def test_attention_that_cannot_run_is_named(attention, fault):
    faults = unsupported(with_last_layer(attention=attention))
    assert any(fault in each for each in faults), faults
    assert all(each.startswith("layer 2: ") for each in faults)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"gate": change(GATE, capacity=4)}, "expert capacity 4"),
        ({"gate": change(GATE, top_k=3)}, "2 different gates or experts"),
        ({"ffn": ExpertSpec(width=40)}, "2 different gates or experts"),
        (
            {"shared": ExpertSpec(width=48), "parallel_dense": ExpertSpec(width=48)},
            "a shared expert beside a parallel dense MLP",
        ),
    ],
)
def test_experts_that_cannot_run_are_named(fields, fault):
    faults = unsupported(with_last_layer(**fields))
    assert any(fault in each for each in faults), faults


def test_beside_an_encoder_attention_is_plain_with_a_relative_bias():
    bias = RelativeBias(num_buckets=32, max_distance=128, both_ways=True)
    plain = change(ATTENTION, num_kv_heads=ATTENTION.num_heads, qk_norm="none", rope=None, relative_bias=bias)
    layer = change(DENSE, attention=plain)
    model = change(MODEL, layers=(layer, change(layer, cross_attention=True)), encoder=EncoderSpec(1, 0))
    assert unsupported(model) == []
    assert unsupported(change(model, encoder=None)) == [
        f"layer {index}: relative bias 'present'" for index in (0, 1)
    ]
    for changes in ({"window": 16}, {"rope": ATTENTION.rope}, {"relative_bias": None}, {"qk_norm": "head"}):
        wrong = change(layer, attention=change(plain, **changes))
        faults = unsupported(change(model, layers=(wrong, layer)))
        assert faults == ["layer 0: more than a relative bias beside an encoder"]


@pytest.mark.parametrize(
    ("fields", "sums"),
    [
        ({"renormalise": True}, True),
        ({"scores": "softmax_of_top_k"}, True),
        ({}, False),
        ({"renormalise": True, "scale": 2.5}, False),
        ({"renormalise": True, "has_expert_scale": True}, False),
    ],
)
def test_a_gate_knows_whether_its_weights_sum_to_one(fields, sums):
    assert change(GATE, **fields).weights_sum_to_one == sums
