"""The path of a node on a GPU, on a stand-in that keeps its memory apart from the host's: what goes over, and that all does."""

import numpy as np
import pytest
import torch

from edge_runtime.cache.pages import KVPages
from edge_runtime.cache.signatures import SignatureCache
from edge_runtime.engine.step_books import StepBooks
from edge_runtime.model.moe import LocalExperts, Slices, run_pairs
from edge_runtime.selector.account import RowAccount
from edge_runtime.selector.choose import DROPPED, EXACT, Choice
from kernels import backends, ops, slices
from kernels.transfers import on_device, on_device_as_one, on_host
from tests.support.encoder_decoders import write_tiny_switch
from tests.support.engines import engine_of
from tests.support.gpu_engines import BOUND, answer, computing_peer, distance, served_elsewhere, whole_by
from tests.support.stand_in_device import DEVICE, stand_in_device
from tests.support.tiny_models import write_tiny

PROMPTS = {"a": [3, 17, 5], "b": [7, 2]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "qwen3_moe"
    return write_tiny("qwen3_moe", path, vocab_size=64, num_hidden_layers=1)


@pytest.fixture
def device():
    with stand_in_device():
        yield DEVICE


def test_the_stand_in_refuses_what_a_gpu_refuses(device):
    there = on_device(torch.arange(3))
    assert there.device == DEVICE and not there.is_cpu and on_host(there).tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="numpy cannot read"):
        there.numpy()
    with pytest.raises(RuntimeError, match="on one device"):
        there + torch.ones(3)
    with pytest.raises(RuntimeError, match="on one device"):
        there[torch.tensor([1, 2])] = torch.zeros(2, dtype=torch.int64)
    on_host(there)[0] = 9
    assert int(there[0]) == 0  # a copy


def test_an_engine_answers_as_in_the_hosts_memory(folder, device):
    here = answer(whole_by("triton", folder), PROMPTS, max_tokens=2)
    backends.use("triton", device)
    there = answer(whole_by("stays", folder), PROMPTS, max_tokens=2)
    assert there.tokens == here.tokens and torch.equal(there.logits, here.logits)


def test_a_peers_rows_come_and_go_by_the_hosts_memory(folder, device):
    whole = whole_by("native", folder)
    expected = answer(whole, PROMPTS, max_tokens=2)
    with computing_peer(whole) as peer:
        backends.use("triton", device)
        own = whole_by("stays", folder)
        with served_elsewhere(own, peer, own=(0, 3)) as port:
            found = answer(own, PROMPTS, max_tokens=2, port=port)
        assert port.traffic["attic"].calls > 0
    assert found.tokens == expected.tokens and distance(found.logits, expected.logits) < BOUND


def test_an_encoder_decoder_answers_as_on_the_processor(tmp_path, device):
    sizes = {
        "num_layers": 1,
        "num_decoder_layers": 1,
        "num_sparse_encoder_layers": 1,
        "encoder_sparse_step": 1,
    }
    path = write_tiny_switch(tmp_path / "switch", vocab_size=64, num_sparse_decoder_layers=1, **sizes)
    prompt = {"a": PROMPTS["a"]}
    expected = answer(whole_by("native", path), prompt, max_tokens=2)
    backends.use("triton", device)
    own = whole_by("stays", path)
    found = answer(own, prompt, max_tokens=2, engine=engine_of(own, num_blocks=24))
    assert found.tokens == expected.tokens and distance(found.logits, expected.logits) < BOUND


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_blocks_leave_and_come_as_the_processor_lays_them_out(folder, device, dtype):
    shapes = whole_by("stays", folder).checkpoint.spec.kv_shapes(0, 1)
    pages = KVPages(4, shapes, dtype)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, pages.floats_per_block, generator=generator).to(dtype).float()
    pages.write([2, 1], rows)
    assert torch.equal(pages.read([2, 1]), rows)
    G, P, _ = (shape := shapes[0]).num_heads, shape.key_width, pages.k(0)
    keys = rows[0, : G * P * 16].view(G, P, 16)
    assert torch.equal(on_host(pages.k(0)[2]).float(), keys.transpose(1, 2))  # tokens first on the device


def test_counts_are_added_up_on_the_device(device):
    signatures = SignatureCache(3, 1, 5, max_rows=4)
    counted = signatures.begin_step(2, [])
    logits = on_device(torch.tensor([[0.0, 3, 1, 2, 0], [5.0, 0, 0, 0, 4]]))
    counting = ops.Counting(
        signatures.counts[:, 0], on_device(torch.tensor([16, 17], dtype=torch.int32)), counted
    )
    ops.gate_topk(logits, 2, renormalise=True, counting=counting)
    assert signatures.total([1]).tolist() == [[1, 1, 0, 1, 1]]
    signatures.write([0], signatures.read([1]))
    assert signatures.total([0, 1]).tolist() == [[2, 2, 0, 2, 2]]


def test_stand_ins_are_chosen_on_the_host_and_computed_on_the_device(device):
    kind = np.array([[EXACT, DROPPED]], dtype=np.int8)
    choice = Choice(np.array([[4, 2]], dtype=np.int32), kind, np.zeros(1), np.zeros(1))
    account = RowAccount(np.zeros(1), np.zeros(1), np.zeros(1), np.zeros(1))
    books = StepBooks(account, np.zeros(1, int), np.zeros(1, int), (), lambda layer, slots, may_defer: choice)
    ids, weights = on_device((torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([[0.75, 0.25]])))
    ids, weights, late = books.stand_in(0, ids, weights, on_device(torch.zeros(1, 5)))
    assert late is None
    assert ids.device == weights.device == DEVICE
    assert ids.tolist() == [[4, 2]] and weights.tolist() == [[0.75, 0.0]]


def test_slices_of_experts_run_on_the_device(folder, device):
    """Both ways in: slots of a layer, whose masks are there, and a peer's pairs, whose are the host's."""
    store = whole_by("stays", folder).store
    bank = store.bank(0)
    x = on_device(torch.randn(2, bank.D, generator=torch.Generator().manual_seed(1)))
    ids = torch.tensor([[1, 0], [2, 1]], dtype=torch.int32)
    masks = torch.tensor([[0b1111, 0b0101], [0, 0b1111]], dtype=torch.int32)
    found = torch.empty(4, bank.D, device=DEVICE)
    port = LocalExperts(store)
    assert port.run(0, x, on_device(ids), found, slices=Slices(on_device(masks), 4)) is None
    rows = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    again = run_pairs(x, rows, ids.view(-1), bank, Slices(masks.view(-1), 4))
    assert torch.equal(found, again) and not on_host(found[2]).any()
    whole = run_pairs(x, rows, ids.view(-1), bank, None)
    assert torch.equal(found[[0, 3]], whole[[0, 3]])  # all slices: the bits of whole experts
    inner = slices.expert_inner(x, on_device(rows), on_device(ids.view(-1)), bank)
    assert inner.device == DEVICE and inner.shape == (4, bank.F)


def test_rows_of_several_peers_go_over_as_one(device):
    parts = [np.full((n, 3), n, dtype=np.float32) for n in (2, 1)]
    found = on_device_as_one(parts)
    assert found.device == DEVICE and on_host(found).tolist() == [[2.0] * 3, [2.0] * 3, [1.0] * 3]
