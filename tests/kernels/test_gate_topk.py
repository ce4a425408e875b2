"""gate_topk: who is chosen, and the weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import ops


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("T, E, k", [(1, 1, 1), (7, 17, 5), (16, 32, 4), (5, 128, 8), (3, 5, 5), (0, 8, 2)])
def test_gate_topk_agrees_with_the_reference(backend, by_reference, random, T, E, k, renormalise):
    logits = random(T, E, scale=3.0)
    ids, weights = ops.gate_topk(logits, k, renormalise=renormalise)
    expected_ids, expected_weights = by_reference(lambda: ops.gate_topk(logits, k, renormalise=renormalise))
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32


def test_weights_are_the_softmax_over_all_experts(backend, random):
    logits = random(6, 40)
    ids, weights = ops.gate_topk(logits, 3, renormalise=False)
    torch.testing.assert_close(weights, logits.softmax(dim=-1).gather(-1, ids.long()))
    _, renormalised = ops.gate_topk(logits, 3, renormalise=True)
    torch.testing.assert_close(renormalised.sum(dim=-1), torch.ones(6))


def test_ties_go_to_the_lowest_id(backend):
    logits = torch.zeros(2, 40)
    logits[0, [33, 20, 5]] = 1.0
    ids, _ = ops.gate_topk(logits, 4, renormalise=True)
    assert ids.tolist() == [[5, 20, 33, 0], [0, 1, 2, 3]]


def test_masked_experts_come_last_and_weigh_nothing(backend):
    logits = torch.full((1, 20), -torch.inf)
    logits[0, 7] = 1.0
    ids, weights = ops.gate_topk(logits, 3, renormalise=True)
    assert ids.tolist() == [[7, 0, 1]] and weights.tolist() == [[1, 0, 0]]


def test_a_poisoned_row_gives_valid_ids_and_stays_in_its_row(backend, random):
    logits = random(3, 20)
    clean_ids, clean_weights = ops.gate_topk(logits, 4, renormalise=True)
    logits[1] = torch.nan
    ids, weights = ops.gate_topk(logits, 4, renormalise=True)
    assert len(set(ids[1].tolist())) == 4 and ids[1].min() >= 0 and ids[1].max() < 20
    assert torch.equal(ids[::2], clean_ids[::2]) and torch.equal(weights[::2], clean_weights[::2])


def test_large_logits_do_not_overflow(backend):
    _, weights = ops.gate_topk(torch.tensor([[1e30, -1e30, 0.0]]), 2, renormalise=True)
    assert weights.tolist() == [[1, 0]]


def test_strided_logits_equal_dense_ones(backend, random):
    wide = random(4, 50)
    for a, b in zip(
        ops.gate_topk(wide[:, 3:23], 3, renormalise=True),
        ops.gate_topk(wide[:, 3:23].contiguous(), 3, renormalise=True),
        strict=True,
    ):
        assert torch.equal(a, b)


RULES = {
    "softmax": {},
    "softmax of top k": {"scores": "softmax_of_top_k", "renormalise": False},
    "sigmoid": {"scores": "sigmoid", "renormalise": True, "scale": 2.5},
    "sigmoid as it is": {"scores": "sigmoid"},
    "groups": {"num_groups": 4, "top_groups": 2, "scale": 16.0},
    "groups with a bias": {"num_groups": 4, "top_groups": 2, "scores": "sigmoid", "selection_bias": True},
    "bias": {"scores": "sigmoid", "renormalise": True, "selection_bias": True},
    "expert scale": {"renormalise": True, "expert_scale": True},
}


def rule_of(name, random, E):
    rule = {"renormalise": False, **RULES[name]}
    return {
        key: random(E) if key in ("selection_bias", "expert_scale") else value for key, value in rule.items()
    }


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("T, E, k", [(1, 4, 1), (7, 20, 5), (5, 128, 8), (0, 8, 2), (3, 12, 6)])
def test_every_rule_agrees_with_the_reference(backend, by_reference, random, T, E, k, name):
    logits, rule = random(T, E, scale=3.0), rule_of(name, random, E)
    ids, weights = ops.gate_topk(logits, k, **rule)
    expected_ids, expected_weights = by_reference(lambda: ops.gate_topk(logits, k, **rule))
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights)


def test_the_softmax_of_the_chosen_sums_to_one(backend, random):
    logits = random(6, 40)
    ids, weights = ops.gate_topk(logits, 4, scores="softmax_of_top_k", renormalise=False)
    torch.testing.assert_close(weights, logits.gather(-1, ids.long()).softmax(dim=-1))


def test_deepseek_v2_chooses_the_same_experts(backend, random):
    modeling = pytest.importorskip("transformers.models.deepseek_v2.modeling_deepseek_v2")
    config = modeling.DeepseekV2Config(
        hidden_size=24, num_attention_heads=4, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2,
        topk_method="group_limited_greedy", routed_scaling_factor=16.0,
    )  # fmt: skip
    router = modeling.DeepseekV2TopkRouter(config)
    router.weight.data = random(16, 24)
    x = random(9, 24)
    logits, theirs, their_ids = router(x)
    ids, weights = ops.gate_topk(
        logits.detach(), 4, renormalise=False, num_groups=4, top_groups=2, scale=16.0
    )
    best_first = theirs.detach().sort(dim=-1, descending=True)
    assert torch.equal(ids.long(), their_ids.gather(-1, best_first.indices))
    torch.testing.assert_close(weights, best_first.values)


def test_a_bias_chooses_but_does_not_weigh(backend, random):
    logits, bias = torch.zeros(1, 8), torch.zeros(8)
    bias[5] = 1.0
    ids, weights = ops.gate_topk(logits, 2, scores="sigmoid", renormalise=False, selection_bias=bias)
    assert ids.tolist() == [[5, 0]] and weights.tolist() == [[0.5, 0.5]]


def test_sums_of_nothing_are_not_divided_by(backend):
    logits = torch.full((1, 4), -200.0)
    _, weights = ops.gate_topk(logits, 2, scores="sigmoid", renormalise=True)
    assert weights.isfinite().all() and weights.max() < 1e-15


def test_groups_that_tie_go_to_the_lowest_and_stay_closed_to_others(backend):
    logits = torch.full((1, 8), -torch.inf)
    logits[0, 6] = 1.0
    ids, weights = ops.gate_topk(logits, 3, renormalise=True, num_groups=4, top_groups=2)
    assert ids.tolist() == [[6, 0, 1]] and weights.tolist() == [[1, 0, 0]]


def test_one_expert_is_a_sigmoid_gate(backend, random):
    logits = random(9, 1, scale=4.0)
    ids, weights = ops.gate_topk(logits, 1, scores="sigmoid", renormalise=False)
    assert (ids == 0).all()
    torch.testing.assert_close(weights, logits.sigmoid())


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_choices_are_counted_in_the_block_of_their_slot(backend, random, dtype):
    table = torch.zeros(4, 3, 20, dtype=dtype)
    expected = torch.zeros(4, 20, dtype=dtype)
    # (block, offset, counted): a prompt that begins block 2, a row of nobody, one that is not counted, one in block 0
    rows = [(2, 0, 1), (2, 1, 1), (-1, 0, 1), (2, 2, 0), (0, 7, 1)]
    slots = torch.tensor([block * 16 + offset if block >= 0 else -1 for block, offset, _ in rows])
    counting = ops.Counting(table[:, 1], slots.int(), torch.tensor([row[2] for row in rows]).int())
    ids, _ = ops.gate_topk(random(5, 20), 3, renormalise=True, counting=counting)
    for (block, _, counted), chosen in zip(rows, ids.tolist(), strict=True):
        for expert in chosen if block >= 0 and counted else ():
            expected[block, expert] += 1
    assert torch.equal(table[:, 1], expected) and table[:, [0, 2]].count_nonzero() == 0


def test_a_block_that_begins_forgets_what_it_counted(backend, random):
    counts = torch.full((3, 20), 5, dtype=torch.int8)
    slots, counted = torch.tensor([32, 3, 17], dtype=torch.int32), torch.tensor([0, 1, 0], dtype=torch.int32)
    ids, _ = ops.gate_topk(random(3, 20), 2, renormalise=True, counting=ops.Counting(counts, slots, counted))
    assert counts[2].count_nonzero() == 0 and (counts[1] == 5).all()
    assert counts[0].sum() == 102 and (counts[0, ids[1].long()] == 6).all()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 2**31 - 1))
def test_chunks_of_prompts_count_what_whole_prompts_do(lengths, seed):
    """Whatever the blocks held before: two requests' rows in any chunks, in blocks of their own."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-length // 16) for length in lengths]
    order = torch.randperm(sum(blocks), generator=generator).int().split(blocks)
    slots = [
        b.repeat_interleave(16)[:n] * 16 + torch.arange(n) % 16 for b, n in zip(order, lengths, strict=True)
    ]
    logits = [torch.randn(n, 7, generator=generator) for n in lengths]
    tables = []
    for chunk in (1, 5, 40):
        counts = torch.randint(-128, 127, (sum(blocks), 7), dtype=torch.int8, generator=generator)
        for begin in range(0, 40, chunk):
            rows = [part[begin : begin + chunk] for part in slots]
            where = torch.cat(rows).int()
            counting = ops.Counting(counts, where, torch.ones_like(where))
            some = torch.cat([part[begin : begin + chunk] for part in logits])
            ops.gate_topk(some, 3, renormalise=True, counting=counting)
        tables.append(counts)
    assert torch.equal(tables[0], tables[1]) and torch.equal(tables[0], tables[2])
    assert tables[0].sum() == 3 * sum(lengths) and tables[0].min() >= 0
