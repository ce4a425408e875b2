"""A home and its expert hosts over real sockets: replicas, liars, two placements at once, and who is waited for."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy
import pytest
import torch

from edge_runtime.clock import Clock, ManualClock, SystemClock
from edge_runtime.model.build import add_experts, empty_store
from edge_runtime.model.moe import ExpertStore, LocalExperts, Slices
from edge_runtime.node import remote
from edge_runtime.node.expert_service import ExpertService, Residents
from edge_runtime.node.peer_link import PeerLink
from edge_runtime.node.remote import PlacedExperts
from edge_runtime.protocol import ExpertCall, ExpertReply, Hello, PeerAddress, Welcome
from edge_runtime.selector.choose import DEFERRED, Slots
from edge_runtime.selector.home import HomeSelector
from edge_runtime.transport.endpoint import Server
from tests.support.clusters import wait_for
from tests.support.decoders import all_experts
from tests.support.elsewhere import WAIT_S, selector_of
from tests.support.engines import Whole, whole_model
from topology.ids import ExpertId

CLOCK = SystemClock()
DEADLINE_S = 2.0
SOON_S = 10.0


@pytest.fixture(scope="module")
def whole(demo_model) -> Whole:
    return whole_model(demo_model)


def identity(name: str) -> Hello:
    return Hello(node=name, model_hash="m" * 32, dtype="float32", incarnation=name)


@contextmanager
def host(
    whole: Whole, name: str, epochs: tuple[int, ...] = (1,)
) -> Iterator[tuple[ExpertService, PeerAddress]]:
    """A real expert service that holds everything, for every one of these placements."""
    spec = whole.checkpoint.spec
    with Server("127.0.0.1:0") as server:
        service = ExpertService(server, identity(name), CLOCK, lambda: None)
        service.residents = {e: Residents(e, whole.store, spec.width, 32) for e in epochs}
        service.start()
        try:
            yield service, PeerAddress(name, server.address)
        finally:
            service.stop()
            service.join(SOON_S)
            assert service.fault is None


@contextmanager
def liar(name: str, outputs_of) -> Iterator[tuple[list[int], PeerAddress]]:
    """A host that greets well and answers calls with `outputs_of(rows, pair_rows)`; None: not at all."""
    calls: list[int] = []
    over = threading.Event()
    with Server("127.0.0.1:0") as server:

        def serve() -> None:
            while not over.is_set():
                received = server.receive(0.05)
                if received is None:
                    continue
                peer, envelope = received
                if isinstance(envelope.message, ExpertCall):
                    calls.append(envelope.message.layer)
                    outputs = outputs_of(*envelope.tensors[:2])
                    if outputs is not None:
                        reply = ExpertReply(envelope.message.layer)
                        server.send(peer, reply, call_id=envelope.call_id, epoch=1, tensors=(outputs,))
                elif isinstance(envelope.message, Hello):
                    welcome = Welcome(node=name, model_hash="m" * 32, dtype="float32")
                    server.send(peer, welcome, call_id=envelope.call_id, epoch=1)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield calls, PeerAddress(name, server.address)
        finally:
            over.set()
            thread.join(SOON_S)


@contextmanager
def home(
    whole: Whole,
    *peers: PeerAddress,
    epoch: int = 1,
    clock: Clock = CLOCK,
    deadline_s: float = DEADLINE_S,
    selector: HomeSelector | None = None,
    own: Sequence[int] = (),
) -> Iterator[PlacedExperts]:
    """A home without experts of its own but `own` of each layer, whose peers hold all of them."""
    spec = whole.checkpoint.spec
    elsewhere = tuple(peer.name for peer in peers)
    mine = [expert for expert in all_experts(spec) if expert.index in own]
    store = empty_store(spec)
    add_experts(store, whole.checkpoint, mine, weight_format="as_stored")
    placed = PlacedExperts(
        node="home",
        store=store,
        hosts=dict.fromkeys(all_experts(spec), elsewhere) | dict.fromkeys(mine, ("home", *elsewhere)),
        selector=selector,
        links=[PeerLink(peer, identity("home"), epoch, None, clock) for peer in peers],
        num_layers=spec.num_layers,
        num_experts=32,
        epoch=epoch,
        deadline_s=deadline_s,
        clock=clock,
    )
    try:
        if clock is CLOCK:
            placed.greet_all(SOON_S)
        yield placed
    finally:
        placed.close()


def rows(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 256, generator=generator)
    ids = torch.stack([torch.randperm(32, generator=generator)[:4] for _ in range(5)]).int()
    return x, ids


def run(placed: PlacedExperts, layer: int = 2, seed: int = 0):
    x, ids = rows(seed)
    out = torch.full((20, 256), torch.nan)
    placed.begin_step()
    return placed.run(layer, x, ids, out), out


@pytest.fixture(scope="module")
def truth(whole) -> torch.Tensor:
    x, ids = rows()
    out = torch.empty(20, 256)
    assert LocalExperts(whole.store, "here").run(2, x, ids, out) is None
    return out


def test_experts_elsewhere_give_the_bits_of_experts_here(whole, truth):
    with host(whole, "n1") as (_, one), host(whole, "n2") as (_, two), home(whole, one, two) as placed:
        missing, out = run(placed)
        assert missing is None and torch.equal(out, truth)


def test_a_host_that_goes_away_leaves_its_calls_to_a_replica(whole, truth):
    with (
        host(whole, "n2") as (second, two),
        host(whole, "n1") as (first, one),
        home(whole, one, two) as placed,
    ):
        run(placed)
        first.stop()
        first.join(SOON_S)
        began = CLOCK.now()
        missing, out = run(placed)
        assert missing is None and torch.equal(out, truth)
        assert CLOCK.now() - began < DEADLINE_S, "within the call's deadline"
        assert second.counters.calls


@pytest.mark.parametrize(
    ("outputs_of", "words"),
    [
        (lambda x, pairs: numpy.full((len(pairs), 256), numpy.nan, numpy.float32), "not finite for layer 2"),
        (lambda x, pairs: numpy.full((len(pairs), 256), numpy.inf, numpy.float32), "not finite for layer 2"),
        (lambda x, pairs: numpy.zeros((len(pairs), 255), numpy.float32), "expected float32"),
        (lambda x, pairs: numpy.zeros((len(pairs) + 1, 256), numpy.float32), "expected float32"),
        (lambda x, pairs: None, "n1"),
    ],
    ids=["nan", "inf", "narrow", "a row too many", "silent"],
)
def test_a_host_that_answers_wrongly_or_not_at_all_is_named_and_its_calls_go_to_a_replica(
    whole, truth, outputs_of, words
):
    with (
        liar("n1", outputs_of) as (calls, one),
        host(whole, "n2") as (_, two),
        home(whole, one, two) as placed,
    ):
        missing, out = run(placed)
        assert missing is None and torch.equal(out, truth)
        assert len(calls) == 1
        assert placed.traffic["n1"].failures == 1
        assert words in next(link.fault for link in placed._links if link.name == "n1")


def test_what_nobody_answers_is_missing_by_node_and_expert_before_the_deadline(whole):
    with liar("n1", lambda x, pairs: None) as (_, one), home(whole, one, deadline_s=0.6) as placed:
        began = CLOCK.now()
        missing, _ = run(placed)
        assert len(missing.slots) == 20 and "layer 2 experts" in missing.why and "n1" in missing.why
        assert 0.25 < CLOCK.now() - began < 1.5, "half of the deadline is a replica's"


def test_a_service_answers_for_two_placements_at_once_and_for_no_third(whole, truth):
    with (
        host(whole, "n1", epochs=(1, 2)) as (service, one),
        home(whole, one, epoch=1) as old,
        home(whole, one, epoch=2) as new,
    ):
        for placed in (old, new, old):
            missing, out = run(placed)
            assert missing is None and torch.equal(out, truth)
        service.residents = {2: service.residents[2]}
        missing, _ = run(old)
        assert missing is not None and "epoch" in missing.why
        missing, out = run(new)
        assert missing is None and torch.equal(out, truth)


def test_experts_are_missing_where_the_service_does_not_hold_them(whole):
    spec = whole.checkpoint.spec
    some: ExpertStore = empty_store(spec)
    add_experts(some, whole.checkpoint, [ExpertId(2, 0)], weight_format="as_stored")
    with host(whole, "n1") as (service, one), home(whole, one, deadline_s=1.0) as placed:
        service.residents = {1: Residents(1, some, spec.width, 32)}
        missing, _ = run(placed)
        assert missing is not None and "does not hold layer 2 experts" in missing.why
        assert service.counters.refused


def slots_of(ids: torch.Tensor, allowance: float) -> Slots:
    logits = torch.zeros(len(ids), 32)
    weights = torch.full(ids.shape, 0.25)
    every = numpy.ones(len(ids))
    return Slots(ids.numpy(), weights.numpy(), logits.numpy(), allowance * every, 0.0 * every)


def test_stand_ins_spare_the_calls_and_what_a_call_takes_is_learned(whole):
    selector = selector_of(6, 32, 1)
    with host(whole, "n1") as (_, one), home(whole, one, selector=selector, own=range(16)) as placed:
        assert run(placed)[0] is None and placed.traffic["n1"].calls == 1
        assert 0 < selector.peers.wait_s[1] != WAIT_S, "the estimate follows what was measured"

        x, ids = rows()
        assert placed.choose(2, slots_of(ids, allowance=0.0)) is None
        choice = placed.choose(2, slots_of(ids, allowance=1.0))
        assert choice.expert_ids.max() < 16
        out = torch.full((20, 256), torch.nan)
        assert placed.run(2, x, torch.from_numpy(choice.expert_ids), out) is None
        assert placed.traffic["n1"].calls == 1 and out.isfinite().all()


def test_what_a_lost_peer_alone_held_is_served_by_stand_ins_where_the_budget_allows(whole):
    selector = selector_of(6, 32, 1)
    with (
        host(whole, "n1") as (service, one),
        home(whole, one, selector=selector, own=range(16), deadline_s=0.5) as placed,
    ):
        service.stop()
        service.join(SOON_S)
        missing, _ = run(placed)
        assert missing is not None
        _, ids = rows()
        assert placed.choose(2, slots_of(ids, allowance=1.0)).expert_ids.max() < 16
        assert placed.choose(2, slots_of(ids, allowance=0.0)) is None


class TestWhoIsLate:
    """A peer that has not answered when it should have: others are asked, stand-ins serve, or it is waited for."""

    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch):
        monkeypatch.setattr(remote, "LATE_S", 0.05)

    @pytest.fixture
    def slow(self, whole, truth):
        """Answers of n1 come when the test lets them, or half a second later, and are right."""
        gate = threading.Event()

        def outputs_of(x: numpy.ndarray, pairs: numpy.ndarray) -> numpy.ndarray:
            gate.wait(0.5)
            return truth.numpy()[-len(pairs) :]

        with liar("n1", outputs_of) as (calls, address):
            yield gate, calls, address
            gate.set()

    def test_a_replica_is_asked_long_before_the_deadline_and_the_bits_are_the_same(self, whole, truth, slow):
        _, calls, one = slow
        with host(whole, "n2") as (second, two), home(whole, one, two, deadline_s=20.0) as placed:
            began = CLOCK.now()
            missing, out = run(placed)
            assert missing is None and torch.equal(out, truth)
            if calls:  # it was n1's turn
                assert second.counters.calls and CLOCK.now() - began < 5.0
                assert placed.traffic["n1"].failures == 1
                assert placed.may_be_replaced(), "should n2 be lost as well, that is waited for"
                assert set(placed.served_by().ravel().tolist()) == {placed.host_names.index("n2")}

    def test_without_a_replica_an_exact_row_waits_and_gets_its_expert(self, whole, truth, slow):
        _, calls, one = slow
        with home(whole, one, deadline_s=20.0) as placed:
            missing, out = run(placed)
            assert missing is None and torch.equal(out, truth) and len(calls) == 1

    def test_without_a_replica_stand_ins_serve_what_the_rows_can_pay_for(self, whole, slow):
        _, calls, one = slow
        selector = selector_of(6, 32, 1)
        with home(whole, one, selector=selector, own=range(16), deadline_s=20.0) as placed:
            x, ids = rows()
            placed.begin_step()
            dear = slots_of(ids, allowance=1.0)
            dear = dear._replace(price=dear.price + 1e9)  # at first a call is the cheaper one
            assert placed.choose(2, dear) is None
            before = selector.peers.wait_s[1]
            out = torch.full((20, 256), torch.nan)
            assert placed.run(2, x, ids, out) is None and out.isfinite().all() and calls
            choice = placed.take_late()
            assert (choice.kind == 1).sum() == (ids >= 16).sum() and (choice.loss <= 1.0).all()
            assert (placed.served_by() == 0).all() and selector.peers.wait_s[1] > before
            assert placed.take_late() is None

    def test_rows_without_a_budget_are_never_swapped_for_being_late(self, whole, slow):
        _, calls, one = slow
        selector = selector_of(6, 32, 1)
        with home(whole, one, selector=selector, own=range(16), deadline_s=20.0) as placed:
            x, ids = rows()
            placed.begin_step()
            assert placed.choose(2, slots_of(ids, allowance=0.0)) is None
            out = torch.full((20, 256), torch.nan)
            assert placed.run(2, x, ids, out) is None
            assert placed.take_late() is None and len(calls) == 1


class TestWhoIsWaitedFor:
    """`may_be_replaced`, by a clock that the test moves."""

    @pytest.fixture
    def lost(self, whole) -> Iterator[tuple[PlacedExperts, ManualClock]]:
        """A home that has just lost n1, of which the coordinator has said nothing."""
        clock = ManualClock(100.0)
        address = PeerAddress("n1", "127.0.0.1:9")
        with home(whole, address, clock=clock) as placed:
            [link] = placed._links
            link.usable = link.was_usable = True
            link.lose("its connection ended")
            placed._lost_s = clock.now()
            yield placed, clock

    def test_nothing_was_lost(self, whole):
        with home(whole, PeerAddress("n1", "127.0.0.1:9"), clock=ManualClock()) as placed:
            assert not placed.may_be_replaced()

    def test_until_the_coordinator_has_noticed_it_may_be_replaced_for_a_while(self, lost):
        placed, clock = lost
        assert placed.may_be_replaced()
        placed.peers_changed(["home", "n1"], False)  # said before it noticed
        assert placed.may_be_replaced()
        clock.advance(remote.UNKNOWN_S)
        assert not placed.may_be_replaced()

    def test_once_the_coordinator_says_that_nobody_takes_its_part_it_is_final(self, lost):
        placed, _ = lost
        placed.peers_changed(["home"], False)
        assert not placed.may_be_replaced()

    def test_a_step_whose_first_layers_lacked_what_is_back_by_now_is_tried_again(self, whole):
        with host(whole, "n1") as (_, address), home(whole, address) as placed:
            [link] = placed._links
            link.lose("n1 did not answer")
            placed._lost_s = CLOCK.now()
            placed.begin_step()
            placed.peers_changed(["home"], False)
            assert not link.usable and not placed.may_be_replaced()
            wait_for(lambda: (placed._look(), link.usable)[1], "n1 has greeted again")
            assert placed.may_be_replaced()
            placed.begin_step()
            assert not placed.may_be_replaced(), "by now it would have been asked"

    def test_a_replacement_on_its_way_is_waited_for_longer_but_not_for_ever(self, lost):
        placed, clock = lost
        placed.peers_changed(["home"], True)
        clock.advance(remote.UNKNOWN_S + 1)
        assert placed.may_be_replaced()
        clock.advance(remote.REPLACING_S)
        assert not placed.may_be_replaced()

    def test_while_the_coordinator_is_away_nobody_can_say_so_and_the_wait_goes_on(self, lost):
        placed, clock = lost
        placed.coordinator_is(here=False)
        clock.advance(remote.UNKNOWN_S + 1)
        assert placed.may_be_replaced()
        placed.coordinator_is(here=True)
        clock.advance(remote.UNKNOWN_S - 1)
        assert placed.may_be_replaced(), "it has only just come back"
        placed.peers_changed(["home"], True)
        clock.advance(remote.REPLACING_S - remote.UNKNOWN_S)
        assert placed.may_be_replaced()
        clock.advance(remote.UNKNOWN_S)
        assert not placed.may_be_replaced()

    def test_what_the_coordinator_before_said_does_not_count_for_the_next(self, lost):
        placed, clock = lost
        placed.peers_changed(["home"], False)
        placed.coordinator_is(here=False)
        assert placed.may_be_replaced()
        clock.advance(1.0)
        placed.coordinator_is(here=True)
        assert placed.may_be_replaced()

    def test_a_coordinator_that_stays_away_is_not_waited_for_without_end(self, lost):
        placed, clock = lost
        placed.coordinator_is(here=False)
        clock.advance(remote.REPLACING_S)
        assert not placed.may_be_replaced()


@pytest.mark.parametrize("hosts", [1, 2])
def test_slices_elsewhere_give_the_bits_of_slices_here_and_whole_experts_left_out_call_nobody(whole, hosts):
    x, ids = rows()
    masks = torch.randint(0, 16, (5, 4), generator=torch.Generator().manual_seed(3)).int()
    masks[0] = 0  # a row that runs nothing here
    slices = Slices(masks, 4)
    expected, out = torch.empty(20, 256), torch.full((20, 256), torch.nan)
    assert LocalExperts(whole.store, "here").run(2, x, ids, expected, None, slices) is None
    with (
        host(whole, "n1") as (_, one),
        host(whole, "n2") as (_, two),
        home(whole, *(one, two)[:hosts]) as placed,
    ):
        placed.begin_step()
        assert placed.run(2, x, ids, out, None, slices) is None
        served = placed.served_by()
        assert sum(traffic.pairs for traffic in placed.traffic.values()) == int((masks != 0).sum())
        assert sum(traffic.rows for traffic in placed.traffic.values()) <= 4 * hosts
    assert torch.equal(out, expected)
    assert ((served == -1) == (masks == 0).numpy()).all()


def test_a_host_refuses_slices_that_do_not_exist(whole):
    x, ids = rows()
    with host(whole, "n1") as (service, one), home(whole, one) as placed:
        placed.begin_step()
        wrong = Slices(torch.full((5, 4), 99, dtype=torch.int32), 4)
        out = torch.empty(20, 256)
        missing = placed.run(2, x, ids, out, None, wrong)
        assert missing is not None and "slices outside 0 to 15" in missing.why
        assert service.counters.refused == 1


class TestWhatComesALayerLate:
    @staticmethod
    def begin(placed: PlacedExperts) -> tuple[numpy.ndarray, torch.Tensor]:
        """A step in which all that is elsewhere of layer 2 is late: which slots that is, and what came at once."""
        placed.begin_step()
        x, ids = rows()
        choice = placed.choose(2, slots_of(ids, allowance=1.0), may_defer=True)
        late = (choice.kind == DEFERRED).reshape(-1)
        assert (late == (ids.numpy().reshape(-1) >= 16)).all()
        out = torch.full((20, 256), torch.nan)
        assert placed.run(2, x, ids, out) is None and placed.take_owed() is None
        return late, out

    @staticmethod
    def end(placed: PlacedExperts):
        """The layer after, all of it exact, and what is owed then."""
        x, ids = rows(seed=1)
        assert placed.choose(3, slots_of(ids, allowance=1.0), may_defer=True) is None, "it waits anyway"
        out = torch.full((20, 256), torch.nan)
        missing = placed.run(3, x, ids, out)
        return missing, out, placed.take_owed()

    def test_has_the_bits_of_what_comes_at_once(self, whole, truth):
        selector = selector_of(6, 32, 1, late=1e-6, loss=10.0)
        with host(whole, "n1") as (_, one), home(whole, one, selector=selector, own=range(16)) as placed:
            for _ in range(3):
                late, out = self.begin(placed)
                assert (out[late] == 0).all() and torch.equal(out[~late], truth[~late])
                missing, after, owed = self.end(placed)
                assert missing is None and owed.missing is None and after.isfinite().all()
                assert owed.slots.tolist() == numpy.flatnonzero(late).tolist() or set(
                    owed.slots.tolist()
                ) == set(numpy.flatnonzero(late).tolist())
                assert torch.equal(owed.outputs, truth[owed.slots])
                assert placed.take_owed() is None
            assert placed.traffic["n1"].calls == 6 and not placed._calls.counters["stale"]

    def test_comes_from_a_replica_where_its_host_goes_away(self, whole, truth):
        selector = selector_of(6, 32, 2, late=1e-6, loss=10.0)
        with (
            liar("n1", lambda x, pairs: numpy.full((len(pairs), 256), numpy.nan, numpy.float32)) as (_, one),
            host(whole, "n2") as (_, two),
            home(whole, one, two, selector=selector, own=range(16)) as placed,
        ):
            late, _ = self.begin(placed)
            _, _, owed = self.end(placed)
            assert owed.missing is None and len(owed.slots) == late.sum()
            assert torch.equal(owed.outputs, truth[owed.slots])

    def test_is_missing_by_node_where_nobody_has_it(self, whole):
        selector = selector_of(6, 32, 1, late=1e-6, loss=10.0)
        with (
            liar("n1", lambda x, pairs: None) as (_, one),
            home(whole, one, selector=selector, own=range(16), deadline_s=0.6) as placed,
        ):
            late, _ = self.begin(placed)
            _, _, owed = self.end(placed)
            assert len(owed.missing.slots) == late.sum() and "n1" in owed.missing.why

    def test_is_forgotten_with_a_step_that_ends_early(self, whole, truth):
        selector = selector_of(6, 32, 1, late=1e-6, loss=10.0)
        with host(whole, "n1") as (_, one), home(whole, one, selector=selector, own=range(16)) as placed:
            self.begin(placed)
            placed.begin_step()
            assert placed.take_owed() is None
            missing, out = run(placed)
            assert missing is None and torch.equal(out, truth)
