"""dispatch: pairs grouped by host, and the rows each host needs."""

import pytest
import torch

from kernels import ops


@pytest.mark.parametrize(
    "T, K, E, hosts", [(1, 1, 1, 1), (7, 3, 9, 4), (64, 4, 32, 8), (0, 4, 8, 3), (5, 2, 6, 0)]
)
def test_dispatch_agrees_with_the_reference(backend, by_reference, random, T, K, E, hosts):
    expert_ids = random.integers(E, (T, K))
    host_of_expert = random.integers(hosts + 1, (E,)) - 1
    found = ops.dispatch(expert_ids, host_of_expert, hosts)
    expected = by_reference(lambda: ops.dispatch(expert_ids, host_of_expert, hosts))
    for name in expected._fields:
        assert getattr(found, name).dtype == getattr(expected, name).dtype
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name


def test_every_pair_with_a_host_appears_once_in_its_group(backend, random):
    expert_ids, host_of_expert = random.integers(16, (20, 4)), random.integers(4, (16,)) - 1
    found = ops.dispatch(expert_ids, host_of_expert, 3)
    flat = host_of_expert[expert_ids.flatten().long()]
    assert sorted(found.pairs.tolist()) == (flat >= 0).nonzero().flatten().tolist()
    for host in range(3):
        begin, end = found.offsets[host : host + 2].tolist()
        pairs = found.pairs[begin:end].long()
        rows = found.rows[found.row_offsets[host] : found.row_offsets[host + 1]]
        assert (flat[pairs] == host).all() and pairs.tolist() == sorted(pairs.tolist())
        assert rows.tolist() == sorted(set((pairs // 4).tolist()))
        assert torch.equal(rows[found.pair_rows[begin:end].long()].long(), pairs // 4)


def test_the_worked_example_of_the_docstring(backend):
    ids = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32)
    found = ops.dispatch(ids, torch.tensor([0, 1, 0], dtype=torch.int32), 2)
    assert [x.tolist() for x in found] == [[0, 3, 1, 2], [0, 2, 4], [0, 1, 0, 1], [0, 2, 4], [0, 1, 0, 1]]


@pytest.mark.parametrize(
    "ids, hosts, name",
    [
        ([[0, 3]], [0, 0, 0], "expert_ids"),
        ([[-1, 0]], [0, 0, 0], "expert_ids"),
        ([[0, 1]], [0, 2, 0], "host_of_expert"),
    ],
)
def test_ids_outside_their_range_are_refused(backend, ids, hosts, name):
    with pytest.raises(ValueError, match=name):
        ops.dispatch(torch.tensor(ids, dtype=torch.int32), torch.tensor(hosts, dtype=torch.int32), 2)
