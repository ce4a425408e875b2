"""rms_norm, rope and the norm per head against their definitions."""

import pytest
import torch

from kernels import ops


@pytest.mark.parametrize("T, D", [(1, 1), (7, 97), (4, 64), (33, 256), (0, 16)])
def test_rms_norm_agrees_with_the_reference(backend, by_reference, random, T, D):
    x, weight = random(T, D), random(D)
    expected = by_reference(lambda: ops.rms_norm(x, weight, 1e-6))
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6), expected)


def test_rms_norm_may_write_over_its_input(backend, random):
    x, weight = random(5, 40), random(40)
    expected = ops.rms_norm(x, weight, 1e-6)
    ops.rms_norm(x, weight, 1e-6, out=x)
    assert torch.equal(x, expected)


def test_a_row_of_zeros_stays_zero(backend):
    assert torch.equal(ops.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize("T, D", [(1, 1), (7, 97), (4, 64), (0, 16)])
def test_a_norm_without_weight_is_one_with_ones(backend, random, T, D):
    wide = random(T, D + 9)
    x = wide[:, 4 : 4 + D]
    expected = ops.rms_norm(x, torch.ones(D), 1e-6)
    assert torch.equal(ops.rms_norm(x, None, 1e-6), expected)
    ops.rms_norm(x, None, 1e-6, out=x)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("T, N", [(1, 1), (3, 40), (2, 1000), (0, 5)])
def test_a_soft_cap_agrees_with_its_formula_and_touches_only_its_rows(backend, random, T, N):
    wide = random(T, N + 7, scale=40.0)
    before = wide.clone()
    x = wide[:, 3 : 3 + N]
    ops.soft_cap(x, 30.0)
    torch.testing.assert_close(x, (30.0 * torch.tanh(before[:, 3 : 3 + N].double() / 30.0)).float())
    assert torch.equal(wide[:, :3], before[:, :3]) and torch.equal(wide[:, 3 + N :], before[:, 3 + N :])


def test_a_soft_cap_bends_the_extremes_to_the_cap(backend):
    x = torch.tensor([[1e30, -1e30, torch.inf, -torch.inf, 0.0, -0.0, 1e-20]])
    ops.soft_cap(x, 50.0)
    assert x[0, :5].tolist() == [50, -50, 50, -50, 0] and x[0, 6] == pytest.approx(1e-20)
    nan = torch.full((1, 3), torch.nan)
    ops.soft_cap(nan, 50.0)
    assert nan.isnan().all()


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("T, H, P", [(1, 1, 2), (5, 3, 10), (9, 4, 64), (3, 2, 128), (0, 2, 16)])
def test_head_norm_rope_agrees_with_the_reference(backend, by_reference, random, T, H, P, normed):
    cos, sin = ops.rope_table(50, P, 10000.0)
    weight = random(P) if normed else None
    positions, x = random.integers(50, (T,)), random(T, H, P)
    expected = x.clone()
    by_reference(lambda: ops.head_norm_rope(expected, weight, 1e-6, cos, sin, positions))
    ops.head_norm_rope(x, weight, 1e-6, cos, sin, positions)
    torch.testing.assert_close(x, expected)


def test_head_norm_rope_touches_only_its_view(backend, random):
    cos, sin = ops.rope_table(50, 16, 10000.0)
    fused = random(5, 100)
    before, positions = fused.clone(), random.integers(50, (5,))
    heads = fused[:, 10:58].view(5, 3, 16)
    alone = heads.contiguous()
    ops.head_norm_rope(heads, torch.ones(16), 1e-6, cos, sin, positions)
    ops.head_norm_rope(alone, torch.ones(16), 1e-6, cos, sin, positions)
    assert torch.equal(heads, alone)
    assert torch.equal(fused[:, :10], before[:, :10]) and torch.equal(fused[:, 58:], before[:, 58:])


def test_position_zero_is_not_rotated(backend, random):
    cos, sin = ops.rope_table(4, 16, 10000.0)
    x = random(1, 2, 16)
    before = x.clone()
    ops.head_norm_rope(x, None, 1e-6, cos, sin, torch.zeros(1, dtype=torch.int32))
    assert torch.equal(x, before)


def test_a_position_beyond_the_table_is_refused(backend, random):
    cos, sin = ops.rope_table(4, 16, 10000.0)
    with pytest.raises(ValueError, match="positions"):
        ops.head_norm_rope(random(1, 2, 16), None, 1e-6, cos, sin, torch.tensor([4], dtype=torch.int32))


def test_the_rope_table_equals_that_of_transformers():
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = modeling.Qwen3MoeConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    rotary = modeling.Qwen3MoeRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1, 512, 4), torch.arange(512)[None])
    ours_cos, ours_sin = ops.rope_table(512, 64, 10000.0)
    assert torch.equal(cos[0, :, :32], ours_cos) and torch.equal(cos[0, :, 32:], ours_cos)
    assert torch.equal(sin[0, :, :32], ours_sin)


def test_rope_equals_that_of_transformers(backend, random):
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    cos, sin = ops.rope_table(30, 64, 10000.0)
    x, positions = random(6, 4, 64), random.integers(30, (6,))
    wide = [torch.cat([table, table], dim=-1)[positions.long()][None] for table in (cos, sin)]
    expected, _ = modeling.apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], *wide)
    ops.head_norm_rope(x, None, 1e-6, cos, sin, positions)
    assert torch.equal(x, expected[0].transpose(0, 1))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    "T, H, P, C", [(1, 1, 2, 1), (5, 3, 10, 5), (5, 3, 11, 4), (9, 4, 64, 32), (3, 2, 64, 16), (2, 2, 70, 33), (4, 2, 24, 0)]
)  # fmt: skip
def test_partial_and_interleaved_turns_agree_with_the_reference(
    backend, by_reference, random, T, H, P, C, interleaved, normed
):
    cos, sin = (table[:, :C].contiguous() for table in ops.rope_table(50, 2 * C + 2, 10000.0))
    weight, positions = random(P) if normed else None, random.integers(50, (T,))
    x = random(T, H, P + 5)[..., 2 : 2 + P]
    expected = x.clone()
    by_reference(
        lambda: ops.head_norm_rope(expected, weight, 1e-6, cos, sin, positions, interleaved=interleaved)
    )
    ops.head_norm_rope(x, weight, 1e-6, cos, sin, positions, interleaved=interleaved)
    torch.testing.assert_close(x, expected)


def test_interleaved_pairs_are_the_complex_numbers_of_deepseek(backend, random):
    modeling = pytest.importorskip("transformers.models.deepseek_v2.modeling_deepseek_v2")
    cos, sin = ops.rope_table(30, 64, 10000.0)
    x, positions = random(6, 4, 64), random.integers(30, (6,))
    turns = torch.complex(cos, sin)[positions.long()][None]
    expected, _ = modeling.apply_rotary_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], turns)
    ops.head_norm_rope(x, None, 1e-6, cos, sin, positions, interleaved=True)
    torch.testing.assert_close(x, expected[0].transpose(0, 1))
