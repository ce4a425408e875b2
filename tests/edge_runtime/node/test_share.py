"""Shares of two placements in one node: what both have is in memory once, and equal shares are known by their digest."""

import gc
import weakref

import pytest

from edge_runtime.clock import SystemClock
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.node.share import LoadedShare, load_share, share_digest
from edge_runtime.protocol import Deploy, Hello, Share
from topology.ids import ExpertId

SETTINGS = {
    "context_tokens": 128,
    "max_batch_rows": 32,
    "max_requests": 4,
    "call_deadline_s": 1.0,
    "planned_bytes": 0,
}


@pytest.fixture(scope="module")
def checkpoint(demo_model) -> Checkpoint:
    return Checkpoint.open(demo_model)


def deploy(
    epoch: int, experts: list[int], *, layers: int = 6, kv_blocks: int = 16, **settings: object
) -> Deploy:
    """The first `layers` layers of trunk, and these experts of every layer."""
    return Deploy(
        epoch=epoch,
        share=Share(0, layers, [experts] * 6, kv_blocks if layers else 0),
        settings=SETTINGS | settings,  # type: ignore[arg-type]
    )


def load(checkpoint: Checkpoint, order: Deploy, held: LoadedShare | None = None) -> tuple[LoadedShare, int]:
    """The share, and the bytes that were read for it."""
    read = [0]

    def progress(done: int, total: int, what: str) -> None:
        read[0] = max(read[0], total)

    share = load_share(
        order,
        checkpoint,
        None,
        identity=Hello(node="n1"),
        keys=None,
        clock=SystemClock(),
        progress=progress,
        held=held,
    )
    return share, read[0]


def weight(share: LoadedShare, layer: int, index: int) -> object:
    bank = share.store.bank(layer)
    return bank.get(index) if bank is not None else None


def test_what_two_placements_have_in_common_is_the_same_object(checkpoint):
    first, _ = load(checkpoint, deploy(1, [0, 1, 2]))
    second, read = load(checkpoint, deploy(2, [1, 2, 3]), first)
    for layer in range(6):
        assert weight(second, layer, 1) is weight(first, layer, 1) is not None
        assert weight(second, layer, 0) is None and weight(first, layer, 3) is None
    assert second.trunk is first.trunk and second.engine is first.engine
    assert second.experts is not first.experts
    assert read == sum(checkpoint.stored_bytes(name) for name in checkpoint.expert_names(map_experts([3])))


def map_experts(indices: list[int]) -> list[ExpertId]:
    return [ExpertId(layer, index) for layer in range(6) for index in indices]


def test_nothing_is_read_for_a_share_that_only_loses(checkpoint):
    first, _ = load(checkpoint, deploy(1, [0, 1, 2]))
    second, read = load(checkpoint, deploy(2, [1]), first)
    assert read == 0 and len(second.store) == 6 and len(first.store) == 18


@pytest.mark.parametrize(
    "change",
    [{"kv_blocks": 24}, {"max_batch_rows": 16}, {"max_requests": 2}],
    ids=lambda change: next(iter(change)),
)
def test_other_sizes_make_another_engine_over_the_same_trunk(checkpoint, change):
    first, _ = load(checkpoint, deploy(1, [0]))
    second, read = load(checkpoint, deploy(2, [0], **change), first)
    assert second.engine is not first.engine and second.trunk is first.trunk and read == 0


def test_another_context_or_format_shares_nothing_that_depends_on_it(checkpoint):
    first, _ = load(checkpoint, deploy(1, [0]))
    longer, _ = load(checkpoint, deploy(2, [0], context_tokens=256), first)
    assert longer.trunk is not first.trunk and weight(longer, 0, 0) is weight(first, 0, 0)
    wider, _ = load(checkpoint, deploy(3, [0], weight_format="float32"), first)
    assert weight(wider, 0, 0) is not weight(first, 0, 0) and wider.trunk is first.trunk


def test_a_node_that_answers_no_more_keeps_its_experts_and_has_no_engine(checkpoint):
    first, _ = load(checkpoint, deploy(1, [0, 1]))
    second, read = load(checkpoint, deploy(2, [0, 1, 2], layers=0), first)
    assert second.engine is None and second.trunk is None and read > 0
    assert weight(second, 4, 1) is weight(first, 4, 1)


def test_a_share_is_the_same_whether_or_not_it_counts_yet():
    order = deploy(2, [0])
    later = Deploy(**{name: getattr(order, name) for name in order.__struct_fields__} | {"counts_now": False})
    assert share_digest(order) == share_digest(later)
    assert share_digest(order) != share_digest(deploy(3, [0]))
    assert share_digest(order) != share_digest(deploy(2, [1]))


def test_a_share_that_was_closed_is_gone_at_once_with_its_kv(checkpoint):
    share, _ = load(checkpoint, deploy(1, [0]))
    share.close()
    parts = [weakref.ref(part) for part in (share.engine, share.runner, share.experts, share.runner.pages)]
    gc.disable()  # which comes by after minutes: an epoch's memory has to be there for the next one
    try:
        del share
        assert [part() for part in parts] == [None] * 4
    finally:
        gc.enable()
