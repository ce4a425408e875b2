"""The store knows what is resident; the local port computes it in one call and says what is not."""

import pytest
import torch

from edge_runtime.model.moe import ExpertStore, LocalExperts
from kernels import ops
from topology.ids import ExpertId

E, D, F, K = 6, 32, 24, 2


pytestmark = pytest.mark.usefixtures("backend")


def matrices(layer: int, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * layer + index)
    return tuple(torch.randn(*shape, generator=generator) * 0.3 for shape in ((F, D), (F, D), (D, F)))


def store(*experts: tuple[int, int]) -> ExpertStore:
    built = ExpertStore(E, D, F)
    for layer, index in experts:
        built.add(ExpertId(layer, index), ops.pack_expert(*matrices(layer, index)))
    return built


def by_hand(x: torch.Tensor, layer: int, index: int) -> torch.Tensor:
    gate, up, down = matrices(layer, index)
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def test_a_store_knows_its_experts_and_their_bytes():
    held = store((1, 5), (0, 2), (1, 0))
    assert list(held) == [ExpertId(0, 2), ExpertId(1, 0), ExpertId(1, 5)]
    assert len(held) == 3
    assert ExpertId(1, 5) in held and ExpertId(1, 4) not in held and ExpertId(2, 0) not in held
    assert held.nbytes == 3 * ops.packed_expert_bytes(D, F, 4)
    assert held.absent(1).tolist() == [False, True, True, True, True, False]
    assert held.bank(2) is None and held.absent(2) is None


def test_adding_and_dropping_keeps_the_account():
    held = store((0, 1))
    for index in range(E):
        held.add(ExpertId(0, index), ops.pack_expert(*matrices(0, index)))
    assert held.holds_all(0) and len(held) == E and not held.absent(0).any()
    held.drop(ExpertId(0, 3))
    assert not held.holds_all(0) and held.absent(0).tolist() == [False] * 3 + [True] + [False] * 2
    for index in (0, 1, 2, 4, 5):
        held.drop(ExpertId(0, index))
    assert held.bank(0) is None and held.nbytes == 0 and list(held) == []


def run(port: LocalExperts, layer: int, x: torch.Tensor, ids: torch.Tensor):
    out = torch.full((ids.numel(), D), torch.nan)
    return out, port.run(layer, x, ids, out)


@pytest.mark.parametrize("T", [1, 3, 17])
def test_every_slot_is_computed_unweighted_in_its_place(T):
    port = LocalExperts(store(*((1, i) for i in range(E))))
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(T))
    ids = torch.stack(
        [torch.randperm(E, generator=torch.Generator().manual_seed(t))[:K] for t in range(T)]
    ).int()
    out, missing = run(port, 1, x, ids)
    assert missing is None
    for t in range(T):
        for j in range(K):
            torch.testing.assert_close(out[t * K + j], by_hand(x[t], 1, int(ids[t, j])), atol=1e-4, rtol=1e-4)


def test_what_is_not_resident_is_named_and_the_rest_still_computed():
    port = LocalExperts(store((1, 0), (1, 3)), node="attic")
    x = torch.randn(3, D)
    ids = torch.tensor([[0, 5], [3, 0], [2, 5]], dtype=torch.int32)
    out, missing = run(port, 1, x, ids)
    assert missing.slots.tolist() == [1, 4, 5] and missing.slots.dtype == torch.int64
    assert missing.why == "attic does not hold layer 1 experts 2, 5"
    whole, _ = run(LocalExperts(store(*((1, i) for i in range(E)))), 1, x, ids)
    assert torch.equal(out[[0, 2, 3]], whole[[0, 2, 3]])


def test_a_partly_held_layer_serves_rows_that_need_no_more():
    port = LocalExperts(store((1, 0), (1, 3)))
    out, missing = run(port, 1, torch.randn(2, D), torch.tensor([[0, 3], [3, 0]], dtype=torch.int32))
    assert missing is None and out.isfinite().all()


def test_a_layer_of_which_nothing_is_held_is_missing_whole():
    _, missing = run(LocalExperts(store((1, 0))), 2, torch.randn(2, D), torch.tensor([[0, 3], [3, 1]]).int())
    assert missing.slots.tolist() == [0, 1, 2, 3]
    assert missing.why == "this node does not hold layer 2 experts 0, 1, 3"


@pytest.mark.parametrize("held", [range(E), (0, 3), ()])
def test_what_runs_beside_the_experts_runs_once_whatever_is_held(held):
    calls = []
    port = LocalExperts(store(*((1, i) for i in held)))
    ids = torch.tensor([[0, 5], [3, 0]], dtype=torch.int32)
    port.run(1, torch.randn(2, D), ids, torch.empty(4, D), lambda: calls.append(1))
    assert calls == [1]
