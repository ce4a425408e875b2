"""What reads rows once: norms, rotation, gate, dispatch, combine, blocks of keys and values, MXFP4."""

import pytest
import torch

from kernels import gpu, ops
from kernels.gpu import plain
from kernels.reference.gate_topk import Counting, count


@pytest.mark.parametrize("T, D", [(1, 1), (3, 97), (2, 2048)])
def test_rms_norm_with_and_without_a_scale(random, close, T, D):
    x, weight = random(T, D), random(D)
    close(gpu.rms_norm(x, weight, 1e-6), plain.rms_norm(x, weight, 1e-6))
    close(gpu.rms_norm(x, None, 1e-6), plain.rms_norm(x, None, 1e-6))


def test_rms_norm_is_the_references(random, close, reference):
    x, weight = random(3, 70), random(70)
    close(gpu.rms_norm(x, weight, 1e-5).cpu(), ops.rms_norm(x.cpu(), weight.cpu(), 1e-5))


@pytest.mark.parametrize(
    "P, turned, interleaved, has_weight",
    [
        (32, 16, False, True),
        (32, 8, False, True),
        (32, 16, True, False),
        (24, 12, True, True),
        (40, 16, False, False),
    ],
)
def test_heads_are_normed_and_turned_in_place(random, close, P, turned, interleaved, has_weight):
    wide, weight = random(5, 4, P), random(P) if has_weight else None
    x = wide[:, :3]  # the last head belongs to somebody else
    cos, sin, positions = random(9, turned), random(9, turned), random.integers(9, (5,))
    expected, untouched = (
        plain.head_norm_rope(x, weight, 1e-6, cos, sin, positions, interleaved),
        wide[:, 3].clone(),
    )
    gpu.head_norm_rope(x, weight, 1e-6, cos, sin, positions, interleaved=interleaved)
    close(x, expected)
    assert torch.equal(wide[:, 3], untouched)


@pytest.mark.parametrize("interleaved, turned", [(False, 16), (True, 16), (False, 12), (True, 8)])
def test_turned_heads_are_the_references(random, close, reference, interleaved, turned):
    x, weight, positions = random(4, 2, 32), random(32), random.integers(20, (4,))
    cos, sin = random(20, turned), random(20, turned)
    expected = x.cpu().clone()
    ops.head_norm_rope(
        expected, weight.cpu(), 1e-6, cos.cpu(), sin.cpu(), positions.cpu(), interleaved=interleaved
    )
    gpu.head_norm_rope(x, weight, 1e-6, cos, sin, positions, interleaved=interleaved)
    close(x.cpu(), expected)


def test_capped_logits_are_the_references(random, close, reference):
    x = random(3, 70) * 40
    expected = x.cpu().clone()
    ops.soft_cap(expected, 30.0)
    gpu.soft_cap(x, 30.0)
    close(x.cpu(), expected)


GATES = [
    {"renormalise": True},
    {"renormalise": False, "scale": 16.0},
    {"renormalise": False, "scale": 16.0, "num_groups": 4, "top_groups": 2},
    {"renormalise": False, "scores": "softmax_of_top_k"},
    {"renormalise": True, "scores": "sigmoid", "selection_bias": True, "num_groups": 4, "top_groups": 2},
    {"renormalise": True, "expert_scale": True},
]


@pytest.mark.parametrize("options", GATES)
@pytest.mark.parametrize("E, k", [(32, 4), (24, 6)])
def test_the_gate_chooses_and_weighs(random, close, options, E, k):
    logits = random(11, E)
    logits[3, 5] = logits[3, 9] = 7.0  # a tie: the lowest id first
    logits[4] = 0.0
    drawn = {
        name: random(E) if value is True and name != "renormalise" else value
        for name, value in options.items()
    }
    ids, weights = gpu.gate_topk(logits, k, **drawn)
    expected_ids, expected_weights = plain.gate_topk(logits, k, **drawn)
    assert torch.equal(ids.long(), expected_ids)
    close(weights, expected_weights)


@pytest.mark.parametrize("options", GATES)
def test_the_gate_is_the_references(random, close, reference, options):
    logits = random(6, 16)
    drawn = {
        name: random(16) if value is True and name != "renormalise" else value
        for name, value in options.items()
    }
    there = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in drawn.items()}
    ids, weights = gpu.gate_topk(logits, 3, **drawn)
    expected_ids, expected_weights = ops.gate_topk(logits.cpu(), 3, **there)
    assert torch.equal(ids.cpu(), expected_ids)
    close(weights.cpu(), expected_weights)


def test_a_bias_picks_and_does_not_weigh(random, device):
    logits, bias = random(4, 16), torch.zeros(16, device=device)
    bias[7] = 10.0
    ids, weights = gpu.gate_topk(logits, 2, renormalise=True, scores="sigmoid", selection_bias=bias)
    assert (ids[:, 0] == 7).all()
    assert (weights <= 1).all() and torch.allclose(weights.sum(dim=1), torch.ones(4, device=device))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, under the interpreter
def test_scores_of_nothing_give_no_nan(device):
    logits = torch.full((2, 8), -200.0, device=device)
    _, weights = gpu.gate_topk(logits, 2, renormalise=True, scores="sigmoid")
    assert weights.isfinite().all()


@pytest.mark.parametrize("dtype, E", [(torch.int8, 16), (torch.int8, 13), (torch.int32, 13)])
def test_choices_are_counted_by_block_as_the_reference_counts(random, device, dtype, E):
    logits = random(11, E)
    slots = torch.tensor([16, 17, 18, -1, 45, 46, 47, 0, 5, 64, 65], dtype=torch.int32, device=device)
    counted = torch.tensor([1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1], dtype=torch.int32, device=device)
    table = torch.full((5, 4, E), 3, dtype=dtype, device=device)
    expected = table.clone()
    ids, _ = gpu.gate_topk(logits, 4, renormalise=True, counting=Counting(table[:, 1], slots, counted))
    count(ids.long(), expected[:, 1], slots, counted)
    assert torch.equal(table, expected)


@pytest.mark.parametrize("T, K, hosts", [(1, 1, 1), (5, 3, 4), (150, 2, 3)])
def test_dispatch_is_the_references(random, reference, T, K, hosts):
    ids, host_of_expert = random.integers(12, (T, K)), random.integers(hosts + 1, (12,)) - 1
    found = gpu.dispatch(ids, host_of_expert, hosts)
    expected = ops.dispatch(ids.cpu(), host_of_expert.cpu(), hosts)
    for name in found._fields:
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name


def test_combine_skips_what_did_not_come(random, close, reference):
    expert_out, hidden, weights = random(9, 97), random(7, 97), random(7, 2)
    expert_out[0] = torch.inf  # a row nobody asked for must not leak
    slots = random.integers(8, (7, 2)) + 1
    slots[2, 1] = slots[3] = -1
    expected = hidden.cpu().clone()
    ops.combine(expert_out.cpu(), slots.cpu(), weights.cpu(), expected)
    close(plain.combine(expert_out, slots, weights, hidden).cpu(), expected)
    gpu.combine(expert_out, slots, weights, hidden)
    close(hidden.cpu(), expected)


def test_keys_and_values_go_to_their_slots_and_padding_nowhere(random, device):
    k_pages, v_pages = gpu.new_pages(3, 2, 24, 20, torch.float32, device)
    k, v = random(4, 2, 24), random(4, 2, 20)
    slots = torch.tensor([17, -1, 47, 0], dtype=torch.int32, device=device)
    gpu.kv_write(k, v, k_pages, v_pages, slots)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(k_pages[slot // 16, :, slot % 16], k[t])
            assert torch.equal(v_pages[slot // 16, :, slot % 16], v[t])
    assert int(k_pages.any(dim=-1).sum()) == int(v_pages.any(dim=-1).sum()) == 3 * 2


def test_copied_blocks_are_equal_and_others_stay(random, device):
    pages = random(6, 2, 16, 8)
    before = pages.clone()
    gpu.kv_copy(
        pages, *(torch.tensor(blocks, dtype=torch.int32, device=device) for blocks in ([0, 3], [5, 1]))
    )
    assert torch.equal(pages[[5, 1]], before[[0, 3]])
    assert torch.equal(pages[[0, 2, 3, 4]], before[[0, 2, 3, 4]])


def test_mxfp4_is_unpacked_exactly(random):
    blocks, scales = gpu.mxfp4.pack(random(5, 96) * 100)
    packed = gpu.pack_linear(gpu.mxfp4.unpack(blocks, scales), format="mxfp4")
    assert torch.equal(gpu.mxfp4.unpack(blocks, scales), gpu.dequantised_linear(packed))
