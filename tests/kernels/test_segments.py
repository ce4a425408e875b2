"""A segment gives the bits of the operations it is made of."""

import pytest
import torch

from kernels import backends, ops
from kernels.reference.gate_topk import GateRule
from kernels.segments import AttentionParts, bind_attention_segment

I32 = torch.int32


def vector(random, length, there=True):
    return random(length) if there else None


@pytest.fixture
def make_parts(random):
    """make_parts(**changes) -> the parts of a layer with everything a layer may have, less what is changed to None."""

    def make(D=40, H=4, G=2, P=16, E=12, C=8, lengths=(50, 9), whole=False, full=True, **changes):
        num_blocks = sum(-(-n // 16) for n in lengths) + 2
        parts = AttentionParts(
            num_heads=H,
            num_kv_heads=G,
            head_width=P,
            norm_eps=1e-6,
            input_norm=random(D),
            qkv=ops.pack_linear(random((H + 2 * G) * P, D, scale=D**-0.5).bfloat16()),
            rope=tuple(t[:, :C].contiguous() for t in ops.rope_table(64, P, 1e4)),
            pages=(random(num_blocks, G, P, 16), random(num_blocks, G, 16, P)),
            scale=P**-0.5,
            out=ops.pack_linear(random(D, H * P, scale=P**-0.5).bfloat16()),
            post_norm=random(D),
            qkv_bias=vector(random, (H + 2 * G) * P, full),
            q_norm=vector(random, H * P if whole else P, full),
            k_norm=vector(random, G * P if whole else P, full),
            interleaved=full,
            window=21 if full else None,
            sinks=vector(random, H, full),
            soft_cap=4.0 if full else None,
            out_bias=vector(random, D, full),
            gate=ops.pack_linear(random(E, D).bfloat16()),
            gate_bias=vector(random, E, full),
            top_k=3,
            rule=GateRule(scores="sigmoid", selection_bias=random(E)) if full else GateRule(),
        )
        return parts._replace(**changes)

    return make


def composed(parts, hidden, positions, slots, row_request, tables, counting):
    """The same by single operations; pages are written."""
    H, G, P = parts.num_heads, parts.num_kv_heads, parts.head_width
    T, eps = len(hidden), parts.norm_eps
    x = ops.rms_norm(hidden, parts.input_norm, eps)
    qkv = ops.linear(x, parts.qkv, bias=parts.qkv_bias)
    q, k, v = qkv.split([H * P, G * P, G * P], dim=1)
    q_norm, k_norm = parts.q_norm, parts.k_norm
    if q_norm is not None and len(q_norm) != P:
        ops.rms_norm(q, q_norm, eps, out=q)
        ops.rms_norm(k, k_norm, eps, out=k)
        q_norm = k_norm = None
    q, k, v = (part.unflatten(1, (-1, P)) for part in (q, k, v))
    ops.head_norm_rope(q, q_norm, eps, *parts.rope, positions, interleaved=parts.interleaved)
    ops.head_norm_rope(k, k_norm, eps, *parts.rope, positions, interleaved=parts.interleaved)
    ops.kv_write(k, v, *parts.pages, slots)
    mixed = ops.paged_attention(
        q, *parts.pages, tables, row_request, positions, parts.scale,
        window=parts.window, sinks=parts.sinks, soft_cap=parts.soft_cap,
    )  # fmt: skip
    ops.linear(mixed.view(T, H * P), parts.out, bias=parts.out_bias, out=hidden, add=True)
    x = ops.rms_norm(hidden, parts.post_norm, eps)
    if parts.gate is None:
        return hidden, x, None, None
    logits = ops.linear(x, parts.gate, bias=parts.gate_bias)
    ids, weights = ops.gate_topk(logits, parts.top_k, **parts.rule._asdict(), counting=counting)
    return hidden, x, ids, weights


def step_of(pairs, lengths):
    """Positions, slots, requests and tables of (request, position) rows, requests one behind the other."""
    tables, first = torch.full((len(lengths), 5), -1, dtype=I32), 0
    for request, length in enumerate(lengths):
        n = -(-length // 16)
        tables[request, :n] = torch.arange(first, first + n, dtype=I32)
        first += n
    request, position = torch.tensor(pairs, dtype=I32).view(-1, 2).T.contiguous()
    slots = tables[request.long(), position.long() // 16] * 16 + position % 16
    return position, slots.int(), request, tables


STEPS = {
    "one row": [(0, 49)],
    "decode": [(0, 49), (1, 8)],
    "prefill and decode": [*((0, t) for t in range(20, 50)), (1, 8)],
    "nothing": [],
}


@pytest.mark.parametrize("rows", STEPS)
@pytest.mark.parametrize("full, whole, C", [(True, False, 8), (True, True, 5), (False, False, 8)])
def test_an_attention_segment_has_the_bits_of_its_operations(
    native, random, make_parts, rows, full, whole, C
):
    parts, step = make_parts(full=full, whole=whole, C=C), step_of(STEPS[rows], (50, 9))
    T, D, E, k = len(step[0]), 40, 12, 3
    hidden = random(T, D)
    counted, counts = (
        torch.arange(T, dtype=I32) % 3,
        torch.full((len(parts.pages[0]), 2, E), 9, dtype=torch.int8),
    )
    before = tuple(page.clone() for page in parts.pages)
    expected_counts, expected_pages = counts.clone(), tuple(page.clone() for page in parts.pages)
    expected = composed(
        parts._replace(pages=expected_pages),
        hidden.clone(),
        *step,
        ops.Counting(expected_counts[:, 1], step[1], counted),
    )

    segment = bind_attention_segment(parts)
    buffer = torch.full((T * segment.buffer_floats + 7,), torch.nan)
    x, logits = torch.empty(T, D + 3)[:, :D], torch.empty(T, E)
    ids, weights = torch.empty(T, k, dtype=I32), torch.empty(T, k)
    segment.run(hidden, x, *step, buffer, logits, ids, weights, counts[:, 1], counted)
    for found, wanted in zip((hidden, x, ids, weights), expected, strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(counts, expected_counts)
    for page, wanted, old in zip(parts.pages, expected_pages, before, strict=True):
        assert torch.equal(page, wanted) and (T == 0 or not torch.equal(page, old))


def test_a_dense_layer_has_a_segment_without_a_gate(native, random, make_parts):
    parts, step = make_parts(gate=None, gate_bias=None), step_of(STEPS["decode"], (50, 9))
    hidden, x = random(2, 40), torch.empty(2, 40)
    expected = composed(parts, hidden.clone(), *step, None)
    segment = bind_attention_segment(parts)
    segment.run(hidden, x, *step, torch.empty(2 * segment.buffer_floats))
    assert torch.equal(hidden, expected[0]) and torch.equal(x, expected[1])


def test_backends_without_segments_and_weights_of_another_give_none(native, make_parts):
    parts = make_parts()
    backends.use("torch")
    assert bind_attention_segment(parts) is None
    assert bind_attention_segment(make_parts()) is None


@pytest.mark.parametrize(
    "name, changes",
    [
        ("post_norm", {"post_norm": torch.ones(39)}),
        ("k_pages", {"pages": (torch.zeros(3, 2, 16, 15), torch.zeros(3, 2, 16, 16))}),
        ("cos", {"rope": (torch.zeros(64, 9), torch.zeros(64, 9))}),
        ("k_norm", {"k_norm": torch.ones(15)}),
        ("sinks", {"sinks": torch.ones(3)}),
        ("rule", {"rule": GateRule(num_groups=5)}),
    ],
)
def test_a_part_of_another_shape_is_refused_when_it_is_bound(native, make_parts, name, changes):
    with pytest.raises(ValueError, match=f"^{name}: "):
        bind_attention_segment(make_parts(**changes))


def test_rows_that_point_nowhere_are_refused_and_nothing_is_written(native, random, make_parts):
    parts = make_parts()
    segment = bind_attention_segment(parts)
    for at, name, value in (
        (0, "positions", 64),
        (1, "slots", -1),
        (2, "row_request", 2),
        (3, "block_tables", 99),
    ):
        step = [part.clone() for part in step_of(STEPS["decode"], (50, 9))]
        step[at].view(-1)[3 if at == 3 else 0] = value
        hidden, pages = random(2, 40), parts.pages[0].clone()
        before = hidden.clone()
        outputs = torch.empty(2, 12), torch.empty(2, 3, dtype=I32), torch.empty(2, 3)
        with pytest.raises(ValueError, match=f"^{name}: "):
            segment.run(hidden, torch.empty(2, 40), *step, torch.empty(2 * segment.buffer_floats), *outputs)
        assert torch.equal(hidden, before) and torch.equal(parts.pages[0], pages)
    with pytest.raises(ValueError, match="^attention segment: found hidden"):
        segment.run(hidden, torch.empty(2, 39), *step, torch.empty(2 * segment.buffer_floats), *outputs)


@pytest.mark.parametrize(
    "T, K, E, D, F", [(1, 1, 1, 1, 1), (5, 3, 6, 33, 17), (16, 2, 4, 64, 32), (0, 2, 3, 16, 16)]
)
def test_experts_have_the_bits_of_grouped_ffn_and_combine(backend, random, make_bank, T, K, E, D, F):
    bank, _ = make_bank(E, D, F)
    x, hidden, weights = random(T, D), random(T, D), random(T, K)
    ids = random.integers(E, (T, K))
    rows, slots = torch.arange(T).repeat_interleave(K).int(), torch.arange(T * K).int().view(T, K)
    expected_out, expected = ops.grouped_ffn(x, rows, ids.view(-1), bank), hidden.clone()
    ops.combine(expected_out, slots, weights, expected)
    out = torch.empty(T * K, D)
    assert ops.experts(x, ids, weights, bank, hidden, expert_out=out) is True
    assert torch.equal(hidden, expected) and torch.equal(out, expected_out)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_experts_say_when_the_residual_is_not_finite_any_more(backend, random, make_bank, poison):
    bank, _ = make_bank(2, 33, 17)
    x, hidden, ids = random(3, 33), random(3, 33), torch.tensor([[0], [1], [0]], dtype=I32)
    hidden[2, 32] = poison
    assert ops.experts(x, ids, torch.ones(3, 1), bank, hidden, expert_out=torch.empty(3, 33)) is False


def test_experts_that_are_not_resident_are_named(backend, random, make_bank):
    bank, _ = make_bank(3, 24, 16)
    bank.drop(1)
    ids, out = torch.tensor([[0, 1]], dtype=I32), torch.empty(2, 24)
    with pytest.raises(IndexError, match="expert 1"):
        ops.experts(random(1, 24), ids, torch.ones(1, 2), bank, random(1, 24), expert_out=out)
    with pytest.raises(IndexError, match="expert 0"):
        ops.experts(
            random(1, 24), ids, torch.ones(1, 2), ops.ExpertBank(3, 24, 16), random(1, 24), expert_out=out
        )
    with pytest.raises(ValueError, match="^expert_out: found"):
        ops.experts(random(1, 24), ids[:, :1], torch.ones(1, 1), bank, random(1, 24), expert_out=out)
