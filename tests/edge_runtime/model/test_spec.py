"""The spec can say more than the code can run, and `unsupported` knows the difference."""

import msgspec
import pytest

from edge_runtime.model.spec import (
    AttentionSpec,
    EncoderSpec,
    ExpertSpec,
    GateSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
    unsupported,
)

ATTENTION = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_width=32, qk_norm="head", rope=RopeSpec(theta=1e4)
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


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"kind": "mla"}, "attention kind 'mla'"),
        ({"qk_norm": "projection"}, "q/k norm 'projection'"),
        ({"window": 16}, "sliding window 16"),
        ({"has_sinks": True}, "attention sinks True"),
        ({"soft_cap": 50.0}, "attention soft cap 50.0"),
        ({"clip": 8.0}, "q/k/v clip 8.0"),
        ({"kv_shared_with": 0}, "keys and values shared with layer 0"),
        ({"rope": None}, "rope None"),
        ({"rope": RopeSpec(theta=1e4, kind="yarn", factor=4.0)}, "rope kind 'yarn'"),
        ({"rope": RopeSpec(theta=1e4, rotary_share=0.5)}, "rotary share 0.5"),
        ({"rope": RopeSpec(theta=5e5)}, "2 different rope settings"),
        ({"num_heads": 8}, "2 different head counts"),
    ],
)
def test_attention_that_cannot_run_is_named(fields, fault):
    faults = unsupported(with_last_layer(attention=change(ATTENTION, **fields)))
    assert any(fault in each for each in faults), faults
    assert all(each.startswith(("layer 2: ", "layers with")) for each in faults)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"scores": "softmax_of_top_k"}, "gate scores 'softmax_of_top_k'"),
        ({"input_norm": "unscaled"}, "gate input norm 'unscaled'"),
        ({"has_bias": True}, "gate bias True"),
        ({"num_groups": 4}, "gate groups 4"),
        ({"scale": 16.0}, "gate scale 16.0"),
        ({"has_expert_scale": True}, "gate scale per expert True"),
        ({"capacity": 4}, "expert capacity 4"),
        ({"top_k": 3}, "2 different gates or experts"),
    ],
)
def test_gates_that_cannot_run_are_named(fields, fault):
    faults = unsupported(with_last_layer(gate=change(GATE, **fields)))
    assert any(fault in each for each in faults), faults


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        (
            {"ffn": ExpertSpec(width=48, activation="clamped_swiglu", clamp=7.0)},
            "activation 'clamped_swiglu'",
        ),
        ({"ffn": ExpertSpec(width=48, has_bias=True)}, "expert bias True"),
        ({"ffn": ExpertSpec(width=48, layout="interleaved")}, "gate/up layout 'interleaved'"),
        ({"shared": ExpertSpec(width=48)}, "shared expert 'present'"),
        ({"parallel_dense": ExpertSpec(width=48)}, "parallel dense MLP 'present'"),
    ],
)
def test_experts_that_cannot_run_are_named(fields, fault):
    faults = unsupported(with_last_layer(**fields))
    assert any(fault in each for each in faults), faults


@pytest.mark.parametrize(
    "fields",
    [
        {"embed_scale": 8.0},
        {"logit_soft_cap": 30.0},
        {"encoder": EncoderSpec(layers=(DENSE,), num_relative_buckets=32)},
    ],
)
def test_models_that_cannot_run_are_named(fields):
    assert len(unsupported(change(MODEL, **fields))) == 1
