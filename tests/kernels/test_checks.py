"""What is wrong with an argument is said in one sentence: its name, what was found, what was expected."""

import pytest
import torch

from kernels import backends, ops

F32, I32 = torch.float32, torch.int32


@pytest.fixture(params=["exchange", "attributes", "torch"], autouse=True)
def way_of_reading_tensors(request):
    """Both ways in which the compiled kernels read tensors, and the checks in Python alone."""
    if request.param == "torch":
        backends.use("torch")
        yield
        return
    request.getfixturevalue("native")
    from kernels.cpu import _native

    _native.find_torch(torch, request.param == "exchange")
    yield
    _native.find_torch(torch, True)


def test_right_arguments_are_taken_whatever_their_strides(random):
    wide, w = random(6, 40), ops.pack_linear(random(20, 8))
    out, narrow = torch.empty(6, 20), torch.empty(6, 40)[:, :20]
    assert torch.equal(ops.linear(wide[:, 3:11], w, out=out), ops.linear(wide[:, 3:11], w, out=narrow))
    assert ops.linear(wide[:0, :8], w).shape == (0, 20)
    one = ops.pack_linear(random(1, 1))
    assert ops.linear(wide[:1].T[:5], one, out=torch.empty(1, 5).T).shape == (5, 1)


def test_linear_names_the_argument_at_fault(random):
    w = ops.pack_linear(random(20, 8))
    for x in (random(3, 9), random(3), random(3, 8).double(), random(8, 3).T, random(3, 8).bfloat16()):
        with pytest.raises(ValueError, match=r"^x: found .* expected \[rows, 8\] float32 on cpu"):
            ops.linear(x, w)
    for out in (torch.empty(2, 20), torch.empty(3, 19), torch.empty(3, 20).double(), torch.empty(20, 3).T):
        with pytest.raises(ValueError, match=r"^out: found .* expected \[3, 20\] float32"):
            ops.linear(random(3, 8), w, out=out)
    with pytest.raises(ValueError, match="^out: found None"):
        ops.linear(random(3, 8), w, add=True)


def test_packing_names_the_weight_at_fault(random):
    with pytest.raises(ValueError, match="^weights: found none"):
        ops.pack_linear_rows([])
    with pytest.raises(ValueError, match=r"^weights\[1\]: found \[4, 9\]"):
        ops.pack_linear_rows([random(4, 8), random(4, 9)])
    with pytest.raises(ValueError, match=r"^weights\[1\]: found .*bfloat16"):
        ops.pack_linear_rows([random(4, 8), random(4, 8).bfloat16()])
    with pytest.raises(ValueError, match="found int8, expected one of bfloat16, float16, float32"):
        ops.pack_linear(torch.zeros(4, 8, dtype=torch.int8))
    with pytest.raises(ValueError, match="^format: found 'int3'"):
        ops.pack_linear(random(4, 8), format="int3")
    with pytest.raises(ValueError, match=r"^down: found \[4, 8\] .* expected \[8, 4\]"):
        ops.pack_expert(random(4, 8), random(4, 8), random(4, 8))


def test_indices_must_be_int32(random):
    w = ops.pack_linear(random(20, 8))
    with pytest.raises(ValueError, match=r"^token_ids: found \[3\] int64 .* expected \[3\] int32"):
        ops.embed(torch.zeros(3, dtype=torch.int64), w)
    with pytest.raises(ValueError, match="^host_of_expert"):
        ops.dispatch(torch.zeros(2, 2, dtype=I32), torch.zeros(4), 1)


def test_head_norm_rope_names_the_argument_at_fault(random):
    cos, sin = ops.rope_table(4, 8, 10000.0)
    at = torch.zeros(2, dtype=I32)
    cases = {
        "x": (random(2, 3, 8).double(), None, cos, sin, at),
        "weight": (random(2, 3, 8), random(7), cos, sin, at),
        "cos": (random(2, 3, 7), None, cos, sin, at),
        "sin": (random(2, 3, 8), None, cos, sin[:3], at),
        "positions": (random(2, 3, 8), None, cos, sin, at[:1]),
    }
    for name, (x, weight, c, s, positions) in cases.items():
        with pytest.raises(ValueError, match=f"^{name}: found"):
            ops.head_norm_rope(x, weight, 1e-6, c, s, positions)


def test_attention_names_the_argument_at_fault(random):
    def call(**changed):
        arguments = {
            "q": random(2, 4, 8),
            "k_pages": torch.zeros(3, 2, 8, 16),
            "v_pages": torch.zeros(3, 2, 16, 8),
            "block_tables": torch.zeros(1, 2, dtype=I32),
            "row_request": torch.zeros(2, dtype=I32),
            "row_position": torch.zeros(2, dtype=I32),
        }
        return ops.paged_attention(**{**arguments, **changed}, scale=1.0)

    call()
    for name, wrong in {
        "q": random(2, 3, 8),
        "k_pages": torch.zeros(3, 2, 8, 15),
        "v_pages": torch.zeros(3, 2, 8, 17),
        "sinks": torch.zeros(3),
        "block_tables": torch.zeros(2, dtype=I32),
        "row_request": torch.zeros(3, dtype=I32),
        "row_position": torch.zeros(2),
        "out": torch.zeros(2, 4, 7),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}: found"):
            call(**{name: wrong})


def test_the_others_name_the_argument_at_fault(random):
    with pytest.raises(ValueError, match="^weight: found"):
        ops.rms_norm(random(2, 8), random(8).double(), 1e-6)
    with pytest.raises(ValueError, match="^k: found 9, expected 1 to 8"):
        ops.gate_topk(random(2, 8), 9, renormalise=True)
    with pytest.raises(ValueError, match="^slots: found"):
        ops.kv_write(
            random(1, 2, 8),
            random(1, 2, 8),
            torch.zeros(1, 2, 8, 16),
            torch.zeros(1, 2, 16, 8),
            torch.zeros(1),
        )
    with pytest.raises(ValueError, match="^k: found"):
        ops.kv_write(
            random(1, 2, 9),
            random(1, 2, 8),
            torch.zeros(1, 2, 8, 16),
            torch.zeros(1, 2, 16, 8),
            torch.zeros(1, dtype=I32),
        )
    with pytest.raises(ValueError, match="^gate_weights: found"):
        ops.combine(random(1, 8), torch.zeros(2, 1, dtype=I32), random(2, 2), random(2, 8))
    with pytest.raises(ValueError, match="^source: found"):
        ops.kv_copy(torch.zeros(3, 4), torch.zeros(1), torch.zeros(1, dtype=I32))
    with pytest.raises(ValueError, match="^cap: found 0.0"):
        ops.soft_cap(random(2, 8), 0.0)
    with pytest.raises(ValueError, match="^x: found"):
        ops.soft_cap(random(2, 8).double(), 1.0)


def test_linear_names_a_bias_of_another_length(random):
    w = ops.pack_linear(random(20, 8))
    for bias in (random(19), random(20).double(), random(20, 1)):
        with pytest.raises(ValueError, match=r"^bias: found .* expected \[20\] float32"):
            ops.linear(random(3, 8), w, bias=bias)


def test_linear_heads_names_the_argument_at_fault(random):
    w = ops.pack_linear_heads(random(4, 20, 8))
    with pytest.raises(ValueError, match=r"^x: found .* expected \[3, 4, 8\]"):
        ops.linear_heads(random(3, 4, 9), w)
    with pytest.raises(ValueError, match=r"^out: found .* expected \[3, 4, 20\]"):
        ops.linear_heads(random(3, 4, 8), w, out=torch.empty(3, 4, 19))


def test_attention_names_a_wrong_window_or_cap(random):
    fixed = torch.zeros(3, 2, 8, 16), torch.zeros(3, 2, 16, 8), torch.zeros(1, 2, dtype=I32)
    rows = torch.zeros(2, dtype=I32), torch.zeros(2, dtype=I32)
    for name in ("window", "soft_cap"):
        with pytest.raises(ValueError, match=f"^{name}: found 0, expected"):
            ops.paged_attention(random(2, 4, 8), *fixed, *rows, 1.0, **{name: 0})


def test_the_gate_names_the_argument_at_fault(random):
    plain = ops.Counting(torch.zeros(2, 8, dtype=I32), torch.zeros(3, dtype=I32), torch.ones(3, dtype=I32))
    cases = {
        "scores: found 'tanh'": {"scores": "tanh"},
        "num_groups, top_groups: found 3, 1": {"num_groups": 3},
        "num_groups, top_groups: found 4, 5": {"num_groups": 4, "top_groups": 5},
        "k: found 3, expected 1 to 2": {"num_groups": 4, "top_groups": 1},
        "expert_scale: found": {"expert_scale": random(7)},
        "selection_bias: found": {"selection_bias": random(8).double()},
        "counting.counts: found": {"counting": plain._replace(counts=plain.counts.long())},
        "counting.slots: found": {"counting": plain._replace(slots=plain.slots[:2])},
        "counting.counted: found": {"counting": plain._replace(counted=plain.counted.bool())},
        "slots: entry 1 is 32": {"counting": plain._replace(slots=torch.tensor([0, 32, 0], dtype=I32))},
    }
    for said, arguments in cases.items():
        with pytest.raises(ValueError, match=f"^{said}"):
            ops.gate_topk(random(3, 8), 3, renormalise=True, **arguments)
    assert plain.counts.count_nonzero() == 0


def test_packing_an_expert_names_what_does_not_fit_its_activation(random):
    gate, up, down = random(4, 8), random(4, 8), random(8, 4)
    with pytest.raises(ValueError, match="^activation: found 'silu', expected one of swiglu, geglu_tanh"):
        ops.pack_expert(gate, up, down, activation="silu")
    with pytest.raises(ValueError, match="^gate: found None with activation 'swiglu'"):
        ops.pack_expert(None, up, down)
    with pytest.raises(ValueError, match="^gate: found .* with activation 'relu', expected None"):
        ops.pack_expert(gate, up, down, activation="relu")
    with pytest.raises(ValueError, match=r"^down_bias: found \[4\], expected \[8\]"):
        ops.pack_expert(gate, up, down, down_bias=random(4))
    with pytest.raises(ValueError, match="^gate_bias: found"):
        ops.pack_expert(None, up, down, activation="relu", gate_bias=random(4))
