"""The decoder equals transformers, and equals itself however rows are cut into steps, batches and stages."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from edge_runtime.errors import ClusterError
from edge_runtime.model.build import load_experts
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.moe import LocalExperts
from tests.support.decoders import Sequences, all_experts
from tests.support.tiny_models import (
    TINY,
    Reference,
    edit_config,
    read_tensors,
    write_tensors,
    write_tiny,
    write_tiny_qwen3_moe,
)
from topology.ids import ExpertId

TOLERANCE = 1e-4  # of logits, float32 on both sides; sums run in another order than in transformers


def tokens(count: int, seed: int = 0, vocab: int = 509) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (count,), generator=generator).tolist()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_tiny_qwen3_moe(
        tmp_path_factory.mktemp("model") / "tiny", mlp_only_layers=[1], num_hidden_layers=4
    )


@pytest.fixture(scope="module")
def checkpoint(tiny) -> Checkpoint:
    return Checkpoint.open(tiny)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 1e6},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ],
)
def test_every_spelling_of_rope_means_what_it_means_to_transformers(tmp_path, spelling):
    folder = write_tiny_qwen3_moe(tmp_path)
    edit_config(folder, remove=("rope_parameters", "rope_theta"))
    ids = tokens(100)
    plain = Reference(folder).logits(ids)
    edit_config(folder, **spelling)
    expected = Reference(folder).logits(ids)
    assert (plain - expected).abs().max() > 0.1
    assert (Sequences(Checkpoint.open(folder)).whole(ids) - expected).abs().max() < TOLERANCE


def test_a_head_that_contradicts_the_tie_is_used(tmp_path, caplog):
    folder = write_tiny_qwen3_moe(tmp_path)
    tensors = read_tensors(folder)
    head = torch.randn(512, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    write_tensors(folder, tensors | {"lm_head.weight": head})
    logits = Sequences(Checkpoint.open(folder)).whole(tokens(9))
    edit_config(folder, tie_word_embeddings=False)
    assert (logits - Reference(folder).logits(tokens(9))).abs().max() < TOLERANCE


@pytest.fixture(scope="module")
def demo(demo_model) -> tuple[Checkpoint, Reference]:
    return Checkpoint.open(demo_model), Reference(demo_model)


def test_the_demo_model_equals_transformers_in_prefill_and_decode(demo, backend):
    checkpoint, reference = demo
    ids = tokens(90, vocab=8192)
    expected = reference.logits(ids)
    sequences = Sequences(checkpoint)
    rows = [sequences.whole(ids[:70]), *(sequences.step([(0, [token])])[0] for token in ids[70:])]
    assert (torch.cat(rows) - expected).abs().max() < TOLERANCE


def test_the_demo_model_equals_transformers_to_the_end_of_its_context(demo):
    checkpoint, reference = demo
    ids = tokens(512, vocab=8192)
    logits = Sequences(checkpoint, context_tokens=512, max_rows=512).whole(ids)
    assert (logits - reference.logits(ids)).abs().max() < TOLERANCE


def test_a_batch_of_unequal_prompts_equals_each_prompt_in_transformers(demo):
    checkpoint, reference = demo
    prompts = [tokens(n, seed=n, vocab=8192) for n in (1, 33, 7, 60)]
    logits = Sequences(checkpoint, num_sequences=4).step(list(enumerate(prompts)))
    for prompt, found in zip(prompts, logits, strict=True):
        assert (found - reference.logits(prompt)).abs().max() < TOLERANCE


@pytest.mark.parametrize("cuts", [[1], [2], [3], [1, 2, 3]])
def test_stages_give_the_bits_of_one_decoder(checkpoint, backend, cuts):
    prompts = [(0, tokens(20, seed=1)), (1, tokens(5, seed=2))]
    whole = Sequences(checkpoint, num_sequences=2).step(prompts)
    staged = Sequences(checkpoint, num_sequences=2, cuts=cuts).step(prompts)
    assert all(torch.equal(found, expected) for found, expected in zip(staged, whole, strict=True))


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_equal_formats_give_equal_bits_in_any_batch_and_stages(checkpoint, backend, format):
    store = load_experts(checkpoint, checkpoint.spec, all_experts(checkpoint.spec), weight_format=format)
    prompts = [(0, tokens(20, seed=1)), (1, tokens(5, seed=2))]

    def run(pieces, **given):
        return Sequences(checkpoint, num_sequences=2, store=store, trunk_format=format, **given).step(pieces)

    together = run(prompts)
    assert all(torch.equal(a, b) for a, b in zip(run(prompts, cuts=[1, 3]), together, strict=True))
    for piece, expected in zip(prompts, together, strict=True):
        assert torch.equal(run([piece])[0], expected)


def test_a_trunk_in_eight_bits_is_near_and_smaller_and_routes_by_the_gate_as_stored(checkpoint):
    ids = tokens(30)
    plain, kept = Sequences(checkpoint), Sequences(checkpoint, trunk_format="int8")
    exact, found = plain.whole(ids), kept.whole(ids)
    assert not torch.equal(found, exact) and (found - exact).norm() < 0.1 * exact.norm()
    trunks = [sequences.decoders[0]._trunk for sequences in (plain, kept)]
    assert trunks[1].nbytes < 0.7 * trunks[0].nbytes
    gates = [layer.gate.weight.format for layer in trunks[1].layers if layer.gate is not None]
    assert set(gates) == {"bfloat16"} and trunks[1].head is trunks[1].embed


def test_a_sequence_reads_no_block_of_another_and_nothing_stale(checkpoint):
    ids = tokens(30)
    expected = Sequences(checkpoint, num_sequences=2).whole(ids)
    sequences = Sequences(checkpoint, num_sequences=2)
    for decoder in sequences.decoders:
        for layer in decoder._layers.values():
            for pages in layer.pages:
                pages.fill_(torch.nan)
    assert torch.equal(sequences.whole(ids), expected)


def test_slots_that_did_not_come_are_reported_and_leave_other_rows_alone(checkpoint):
    class Watched(LocalExperts):
        def add_here(self, *arguments):
            return None  # never all in one call, which shows no ids

        def run(self, layer, x, expert_ids, out):
            chosen[layer] = expert_ids.clone()
            return super().run(layer, x, expert_ids, out)

    spec, chosen = checkpoint.spec, {}
    prompts = [(0, tokens(6, seed=3)), (1, tokens(6, seed=4))]
    port = Watched(load_experts(checkpoint, spec, all_experts(spec)))
    whole = Sequences(checkpoint, num_sequences=2, port=port)
    ids, batch = whole.batch(prompts)
    hidden = whole.decoders[0].run(ids, batch, port).clone()
    absent = ExpertId(3, int(chosen[3][0, 0]))

    store = load_experts(checkpoint, spec, [e for e in all_experts(spec) if e != absent])
    partial = Sequences(checkpoint, num_sequences=2, port=LocalExperts(store, node="box-3"))
    ids, batch = partial.batch(prompts)
    missing = []
    found = partial.decoders[0].run(ids, batch, partial.port, missing=missing).clone()

    ((layer, lacks),) = missing
    assert layer == 3 and lacks.why == f"box-3 does not hold layer 3 experts {absent.index}"
    assert torch.equal(lacks.slots, (chosen[3].view(-1) == absent.index).nonzero().view(-1))
    touched = {int(slot) // spec.layers[3].gate.top_k for slot in lacks.slots}
    assert 0 < len(touched) < 12
    for row in range(12):
        assert torch.equal(found[row], hidden[row]) == (row not in touched)
    assert found.isfinite().all()

    again = Sequences(checkpoint, num_sequences=2, port=partial.port)
    ids, batch = again.batch(prompts)
    with pytest.raises(ClusterError, match="box-3 does not hold layer 3 experts"):
        again.decoders[0].run(ids, batch, again.port)


def test_the_head_leaves_the_residual_as_it_was(checkpoint):
    sequences = Sequences(checkpoint)
    ids, batch = sequences.batch([(0, tokens(5))])
    hidden = sequences.decoders[0].run(ids, batch, sequences.port)
    before = hidden.clone()
    some = sequences.decoders[0].head(hidden[torch.tensor([4, 1])]).clone()
    assert torch.equal(hidden, before)
    assert torch.equal(some, sequences.decoders[0].head(hidden)[[4, 1]])


def test_what_a_decoder_does_not_have_is_not_asked_of_it_in_silence(checkpoint):
    first, last = Sequences(checkpoint, cuts=[2]).decoders
    with pytest.raises(ValueError, match=r"layers \[0, 2\) have no head"):
        first.head(torch.zeros(1, 64))
    with pytest.raises(ValueError, match=r"layers \[2, 4\) do not embed"):
        last.embed(torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="a step of 257 rows, but buffers for 256"):
        first.embed(torch.zeros(257, dtype=torch.int32))


class Recording(LocalExperts):
    """Computes as it should, and keeps what the gates chose: (layer, [T, K])."""

    def __init__(self, store):
        super().__init__(store)
        self.chosen = []

    def run(self, layer, x, expert_ids, out, beside=None):
        self.chosen.append((layer, expert_ids.clone()))
        return super().run(layer, x, expert_ids, out, beside)

    def add_here(self, layer, x, expert_ids, gate_weights, hidden, out):
        self.chosen.append((layer, expert_ids.clone()))
        return super().add_here(layer, x, expert_ids, gate_weights, hidden, out)


def test_a_block_counts_what_the_counted_rows_in_it_chose(checkpoint, backend):
    port = Recording(load_experts(checkpoint, checkpoint.spec, all_experts(checkpoint.spec)))
    L, E = len(checkpoint.spec.moe_layers), checkpoint.spec.layers[0].gate.num_experts
    counts = torch.full((6, L, E), 77, dtype=torch.int8)  # of whoever had the blocks before
    both = Sequences(checkpoint, num_sequences=2, context_tokens=48, port=port, counts=counts)
    expected = {}
    for pieces, is_prompt in (
        ([(0, tokens(20)), (1, tokens(31, seed=1))], True),
        ([(0, tokens(12, seed=2)), (1, [7])], True),
        ([(0, [5]), (1, [9])], False),
    ):
        begin, port.chosen = list(both.lengths), []
        both.step(pieces, torch.full((sum(len(p) for _, p in pieces),), int(is_prompt), dtype=torch.int32))
        places = [(s, begin[s] + i) for s, piece in pieces for i in range(len(piece))]
        for row, (sequence, position) in enumerate(places):
            cell = expected.setdefault(int(both.block_tables[sequence, position // 16]), torch.zeros(L, E))
            for layer, ids in port.chosen if is_prompt else []:
                cell[checkpoint.spec.moe_layers.index(layer), ids[row].long()] += 1
    assert len(expected) == 6
    for block, cell in expected.items():
        assert torch.equal(counts[block].float(), cell)


def test_a_step_leaves_no_memory_behind(checkpoint):
    sequences = Sequences(checkpoint)
    sequences.whole(tokens(20))
    decoder = sequences.decoders[0]
    buffers = {name: buffer.data_ptr() for name, buffer in decoder._buffers.items()}
    logits = decoder._logits.data_ptr()
    sequences.whole(tokens(20))
    assert {name: buffer.data_ptr() for name, buffer in decoder._buffers.items()} == buffers
    assert decoder._logits.data_ptr() == logits


def python_lines(work) -> int:
    """Lines of the packages `edge_runtime` and `kernels` that a call runs, each as often as it runs."""
    count = 0

    def look(frame, event, argument):
        nonlocal count
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("edge_runtime", "kernels"):
            return None
        count += event == "line"
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("backend", ["native"], indirect=True)
@pytest.mark.parametrize("family", sorted(TINY))
def test_the_python_of_a_step_is_the_same_for_one_row_and_many(family, tmp_path, backend):
    """No loop over rows or experts stands beside the compiled kernels: 16 rows of 16 experts run as many lines as one."""
    key = {"deepseek_v2": "n_routed_experts", "mixtral": "num_local_experts", "gpt_oss": "num_local_experts"}
    found = set()
    for num_experts in (8, 16):
        folder = write_tiny(
            family, tmp_path / f"{num_experts}", **{key.get(family, "num_experts"): num_experts}
        )
        sequences = Sequences(Checkpoint.open(folder), num_sequences=16)
        decoder = sequences.decoders[0]
        for rows in (1, 16):
            steps = [sequences.batch([(row, [5 + row]) for row in range(rows)]) for _ in range(4)]
            for each in steps[:3]:  # what a shape needs is made with its first steps
                decoder.head(decoder.run(*each, sequences.port))
            ran = python_lines(partial(decoder.run, *steps[3], sequences.port))
            found.add(ran + python_lines(partial(decoder.head, torch.zeros(rows, decoder.spec.width))))
    assert len(found) == 1 and found.pop() > 20
