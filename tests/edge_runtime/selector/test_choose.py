"""The choice of one layer: what each policy swaps, and what must hold of every choice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.selector.candidates import LayerView, layer_view
from edge_runtime.selector.choose import (
    DEFERRED,
    DROPPED,
    EXACT,
    FOREVER_S,
    POLICIES,
    STAND_IN,
    Options,
    Peers,
    Slots,
    after_choice,
    choose_exact,
    choose_live,
    choose_paper,
)
from tests.support.plain_choice import choose_live_plainly

ALL_TOGETHER = np.ones((6, 6), dtype=bool)


def losses(num_experts: int = 6, default: float = 0.1) -> np.ndarray:
    table = np.full((num_experts, num_experts), default, dtype=np.float32)
    np.fill_diagonal(table, 0.0)
    return table


def view(
    hosts: list[int],
    together: np.ndarray = ALL_TOGETHER,
    loss: np.ndarray | None = None,
    left_out: float | None = None,
    power: float = 1.0,
) -> LayerView:
    return layer_view(
        np.array(hosts, dtype=np.int32),
        together,
        losses() if loss is None else loss,
        left_out=None if left_out is None else np.full(len(hosts), left_out),
        power=power,
    )


def slots(ids, weights=None, logits=None, allowance=1.0, price=1.0) -> Slots:
    ids = np.array(ids, dtype=np.int32)
    num_rows = len(ids)
    return Slots(
        ids,
        np.full(ids.shape, 0.5, dtype=np.float32) if weights is None else np.array(weights, dtype=np.float32),
        np.zeros((num_rows, 6), dtype=np.float32) if logits is None else np.array(logits, dtype=np.float32),
        np.broadcast_to(np.asarray(allowance, dtype=float), num_rows).copy(),
        np.broadcast_to(np.asarray(price, dtype=float), num_rows).copy(),
    )


def peers(*waits: float, slot_s: float = 0.0) -> Peers:
    """This node, peers that take so long, and nobody."""
    return Peers(np.array([0.0, *waits, FOREVER_S]), np.array([0.0, *[slot_s] * len(waits), 0.0]))


HOSTS = [0, 0, 1, 1, 2, 2]  # 0 and 1 are here, 2 and 3 at the first peer, 4 and 5 at the second


class TestWhoMayStandIn:
    def test_members_of_the_group_that_are_here_for_those_that_are_not(self):
        together = np.zeros((6, 6), dtype=bool)
        together[np.ix_([0, 2, 4], [0, 2, 4])] = together[np.ix_([1, 3, 5], [1, 3, 5])] = True
        found = view(HOSTS, together)
        assert [np.flatnonzero(line).tolist() for line in found.may_stand] == [[], [], [0], [1], [0], [1]]
        assert found.closest.tolist() == [-1, -1, 0, 1, 0, 1]

    def test_a_loss_may_grow_with_a_power_of_the_weight(self):
        squared = layer_view(np.array(HOSTS, dtype=np.int32), ALL_TOGETHER, losses(), power=2.0)
        choice = choose_live(squared, peers(0.2, 0.4), slots([[0, 2]], weights=[[0.7, 0.3]]))
        assert choice.loss == pytest.approx([0.1 * 0.3**2])

    def test_the_closest_is_the_one_that_costs_least_and_a_pair_without_a_measurement_is_none(self):
        loss = losses()
        loss[2] = [0.3, 0.2, 0.0, 0.1, 0.1, 0.1]
        loss[3, :2] = np.inf
        found = view(HOSTS, loss=loss)
        assert found.closest[2] == 1 and found.closest[3] == -1 and not found.may_stand[3].any()

    def test_only_the_dominant_one_where_that_is_asked_for(self):
        found = layer_view(
            np.array(HOSTS, dtype=np.int32), ALL_TOGETHER, losses(), dominant=np.full(6, 1, dtype=np.int32)
        )
        assert found.closest.tolist() == [-1, -1, 1, 1, 1, 1]


class TestLive:
    def test_nobody_is_called_where_all_can_be_served_here_for_less(self):
        choice = choose_live(view(HOSTS), peers(0.2, 0.4), slots([[0, 2], [4, 1]], price=1.0))
        assert choice.kind.tolist() == [[EXACT, STAND_IN], [STAND_IN, EXACT]]
        assert choice.expert_ids.tolist() == [[0, 1], [0, 1]], "no two slots of a row at one expert"
        assert choice.loss == pytest.approx([0.05, 0.05])

    def test_the_slowest_peer_alone_is_left_out_where_the_rest_costs_too_much(self):
        choice = choose_live(view(HOSTS), peers(0.01, 0.4), slots([[2, 4]], price=1.0))
        assert choice.kind.tolist() == [[EXACT, STAND_IN]]

    def test_a_peer_that_is_faster_than_one_that_must_be_called_is_left_exact(self):
        exact_row = slots([[4, 0], [2, 0]], allowance=[0.0, 1.0])
        assert choose_live(view(HOSTS), peers(0.2, 0.4), exact_row) is None

    def test_a_slower_one_is_left_out_although_a_faster_one_must_be_called(self):
        exact_row = slots([[2, 0], [4, 2]], allowance=[0.0, 1.0])
        choice = choose_live(view(HOSTS), peers(0.2, 0.4), exact_row)
        assert choice.kind.tolist() == [[EXACT, EXACT], [STAND_IN, EXACT]]

    def test_all_rows_wait_so_a_wait_counts_for_each_of_them(self):
        one = slots([[2, 0]], price=1.0)
        many = slots([[2, 0]] + [[0, 1]] * 9, price=1.0)
        assert choose_live(view(HOSTS), peers(0.04, 0.4), one) is None
        assert choose_live(view(HOSTS), peers(0.04, 0.4), many).kind[0].tolist() == [STAND_IN, EXACT]

    def test_one_row_that_cannot_pay_makes_the_step_call_and_then_nobody_pays(self):
        poor = slots([[2, 0], [3, 0]], allowance=[1.0, 0.01])
        assert choose_live(view(HOSTS), peers(0.4, 0.4), poor) is None

    def test_a_slot_at_a_called_peer_is_swapped_only_for_its_bytes(self):
        both = slots([[2, 0], [3, 0]], allowance=[1.0, 0.0], price=1.0)
        assert choose_live(view(HOSTS), peers(0.4, 0.4, slot_s=0.02), both) is None
        choice = choose_live(view(HOSTS), peers(0.4, 0.4, slot_s=0.03), both)
        assert choice.kind.tolist() == [[STAND_IN, EXACT], [EXACT, EXACT]]

    def test_the_tokens_own_scores_say_who_stands_in(self):
        hosts = [0, 0, 0, 1, 1, 1]
        logits = [[1.0, 3.0, 2.0, 9.0, 8.0, 0.0]]
        choice = choose_live(view(hosts), peers(0.4), slots([[3, 4]], logits=logits))
        assert choice.expert_ids.tolist() == [[1, 2]], "the better slot has the better stand-in"
        chosen_itself = choose_live(view(hosts), peers(0.4), slots([[3, 1]], logits=logits))
        assert chosen_itself.expert_ids.tolist() == [[2, 1]]

    def test_a_slot_that_nobody_can_stand_in_for_takes_nobody_from_another(self):
        apart = np.ones((6, 6), dtype=bool)
        apart[2, :2] = False
        loss = losses()
        loss[4, 1] = 0.4
        asked = slots([[2, 4]], logits=[[3.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
        choice = choose_live(view(HOSTS, apart, loss), peers(0.01, 0.4), asked)
        assert choice.expert_ids.tolist() == [[2, 0]]

    def test_too_few_stand_ins_leave_a_slot_exact_and_so_the_step_calls(self):
        assert choose_live(view([0, 1, 1, 1, 1, 1]), peers(0.4), slots([[1, 2]])) is None

    def test_an_expert_that_nobody_has_is_served_by_a_stand_in(self):
        choice = choose_live(view([0, 0, -1, 1, 1, 1]), peers(0.001), slots([[2, 3]]))
        assert choice.kind.tolist() == [[STAND_IN, EXACT]]


class TestDeviationsAddUp:
    def test_slots_of_a_row_deviate_the_same_way(self):
        both = slots([[2, 4]], weights=[[0.3, 0.7]])
        choice = choose_live(view(HOSTS, power=2.0), peers(1.0, 1.0), both)
        assert choice.loss == pytest.approx([0.1]) and choice.deviation == pytest.approx([0.1**0.5])

    def test_what_a_row_deviates_already_makes_more_of_it_dearer(self):
        one = slots([[2, 0]])
        for drag, loss in ((0.0, 0.1 * 0.25), (2.0, 0.1 * 0.25 + 2.0 * 0.1**0.5 * 0.5)):
            choice = choose_live(view(HOSTS, power=2.0), peers(1.0, 1.0), one._replace(drag=np.array([drag])))
            assert choice.loss == pytest.approx([loss])

    def test_a_second_choice_in_a_layer_adds_to_the_first(self):
        squares = view(HOSTS, power=2.0)
        first = choose_live(squares, peers(1.0, 0.0), slots([[2, 4]]))
        after = after_choice(squares, slots([[2, 4]]), first)
        second = choose_live(squares, peers(0.0, 1.0), after)
        assert second.kind.tolist() == [[EXACT, STAND_IN]]
        both = choose_live(squares, peers(1.0, 1.0), slots([[2, 4]]))
        assert first.loss + second.loss == pytest.approx(both.loss)
        assert after.allowance == pytest.approx(1.0 - first.loss)


class TestLate:
    MAY = Options(late=np.full(6, 0.01))

    def test_replies_come_late_where_that_loses_less_than_stand_ins(self):
        choice = choose_live(view(HOSTS), peers(0.4, 0.4), slots([[2, 0], [4, 1]]), self.MAY)
        assert choice.kind.tolist() == [[DEFERRED, EXACT]] * 2 and choice.expert_ids.tolist() == [
            [2, 0],
            [4, 1],
        ]
        assert choice.loss == pytest.approx([0.005] * 2) and not choice.deviation.any()

    def test_a_row_whose_stand_in_loses_less_uses_it(self):
        loss = losses()
        loss[4, :2] = 0.001
        choice = choose_live(view(HOSTS, loss=loss), peers(0.4, 0.4), slots([[2, 0], [4, 1]]), self.MAY)
        assert choice.kind.tolist() == [[DEFERRED, EXACT], [STAND_IN, EXACT]]

    def test_who_is_exact_is_waited_for_and_what_that_peer_gives_is_not_late(self):
        some = slots([[2, 0], [3, 4]], allowance=[0.0, 1.0])
        choice = choose_live(view(HOSTS), peers(0.1, 0.4), some, self.MAY)
        assert choice.kind.tolist() == [[EXACT, EXACT], [EXACT, DEFERRED]]
        assert choose_live(view(HOSTS), peers(0.4, 0.1), some, self.MAY) is None, "it saves no waiting"

    def test_nothing_is_late_nor_stands_in_where_the_step_waits_anyway(self):
        waits = self.MAY._replace(waits_anyway=True)
        assert choose_live(view(HOSTS), peers(0.4, 0.4), slots([[2, 0]]), waits) is None

    def test_what_owing_costs_the_next_layer_counts(self):
        dear = self.MAY._replace(late_s=0.5)
        choice = choose_live(view(HOSTS), peers(0.4, 0.4), slots([[2, 0]]), dear)
        assert choice.kind.tolist() == [[STAND_IN, EXACT]]


class TestPaper:
    def test_each_slot_takes_the_closest_where_its_loss_is_worth_less_than_its_wait(self):
        loss = losses()
        loss[2] = [0.3, 0.2, 0.0, 0.1, 0.1, 0.1]
        choice = choose_paper(view(HOSTS, loss=loss), peers(0.08, 0.02), slots([[2, 4]]))
        assert choice is None, "0.1 for the wait of 0.08, and 0.05 for that of 0.02"
        choice = choose_paper(view(HOSTS, loss=loss), peers(0.12, 0.02), slots([[2, 4]]))
        assert choice.expert_ids.tolist() == [[1, 4]] and choice.loss == pytest.approx([0.1])

    def test_the_cheapest_losses_come_first_where_not_all_can_be_paid(self):
        both = slots([[2, 4]], weights=[[0.8, 0.2]], allowance=0.05)
        choice = choose_paper(view(HOSTS), peers(1.0, 1.0), both)
        assert choice.kind.tolist() == [[EXACT, STAND_IN]] and choice.loss == pytest.approx([0.02])

    def test_what_comes_after_weighs_in(self):
        ahead = np.zeros((4, 6))
        ahead[1] = 0.5  # from the first peer it is a long way on
        behind = np.zeros((4, 6))
        behind[0] = 0.5  # from here it is
        near = slots([[2, 0]])
        assert choose_paper(view(HOSTS), peers(0.01, 0.01), near) is None
        assert choose_paper(view(HOSTS), peers(0.01, 0.01), near, Options(future_s=ahead)) is not None
        assert choose_paper(view(HOSTS), peers(0.2, 0.2), near) is not None
        assert choose_paper(view(HOSTS), peers(0.2, 0.2), near, Options(future_s=behind)) is None


class TestOptions:
    def test_leaving_out_is_one_more_candidate_where_it_is_allowed(self):
        choice = choose_live(view(HOSTS, left_out=0.01), peers(0.4, 0.4), slots([[2, 0]]))
        assert choice.kind.tolist() == [[DROPPED, EXACT]] and choice.expert_ids.tolist() == [[2, 0]]
        choice = choose_live(view(HOSTS, left_out=0.2), peers(0.4, 0.4), slots([[2, 0]]))
        assert choice.kind[0, 0] == STAND_IN

    def test_the_heaviest_slots_can_be_kept_exact(self):
        both = slots([[2, 3]], weights=[[0.3, 0.7]])
        choice = choose_paper(view(HOSTS), peers(1.0, 1.0), both, Options(keep_top=1))
        assert choice.kind.tolist() == [[STAND_IN, EXACT]]


@st.composite
def situations(draw: st.DrawFn):
    seed = draw(st.integers(0, 2**31))
    generator = np.random.default_rng(seed)
    num_rows, num_columns, num_experts = (
        draw(st.integers(1, 9)),
        draw(st.integers(1, 4)),
        draw(st.integers(4, 12)),
    )
    num_peers = draw(st.integers(1, 4))
    hosts = generator.integers(-1, num_peers + 1, num_experts).astype(np.int32)
    group = generator.integers(0, 3, num_experts)
    loss = generator.uniform(0, 0.2, (num_experts, num_experts)).astype(np.float32)
    loss[generator.random(loss.shape) < 0.1] = np.inf
    power = draw(st.sampled_from([1.0, 2.0]))
    found = layer_view(
        hosts,
        group[:, None] == group[None, :],
        loss,
        power=power,
        left_out=generator.uniform(0, 0.3, num_experts) if draw(st.booleans()) else None,
    )
    ids = np.stack([generator.permutation(num_experts)[:num_columns] for _ in range(num_rows)]).astype(
        np.int32
    )
    weights = generator.dirichlet(np.ones(num_columns), num_rows).astype(np.float32)
    allowance = generator.uniform(0, draw(st.sampled_from([0.0, 0.02, 0.3])), num_rows)
    allowance[generator.random(num_rows) < 0.3] = 0.0
    price = generator.uniform(0, 0.5, num_rows)
    logits = generator.normal(size=(num_rows, num_experts)).astype(np.float32)
    waits = np.array([0.0, *generator.uniform(0, 0.05, num_peers), FOREVER_S])
    slot_s = np.array([0.0, *generator.uniform(0, 0.001, num_peers), 0.0])
    drag = generator.uniform(0, 0.5, num_rows) if power == 2.0 else None
    options = Options(
        late=generator.uniform(0, 0.1, num_experts) if draw(st.booleans()) else None,
        late_s=draw(st.sampled_from([0.0, 0.01])),
        waits_anyway=draw(st.booleans()),
    )
    return found, Peers(waits, slot_s), Slots(ids, weights, logits, allowance, price, drag), options


@given(situations(), st.sampled_from(sorted(POLICIES)))
def test_no_choice_spends_more_than_a_row_may_or_touches_what_is_here(situation, policy):
    found, costs, asked, options = situation
    before = asked.expert_ids.copy()
    choice = POLICIES[policy](found, costs, asked, options)
    assert (asked.expert_ids == before).all()
    if choice is None:
        return
    assert (choice.loss <= asked.allowance * (1 + 1e-9)).all() and (choice.loss >= 0).all()
    kinds = (STAND_IN, DROPPED, DEFERRED)
    swapped, dropped, late = (choice.kind == kind for kind in kinds)
    assert (choice.expert_ids[~swapped] == before[~swapped]).all()
    assert (found.host_of[before[choice.kind != EXACT]] != 0).all(), "what is here is never swapped"
    assert found.may_stand[before[swapped], choice.expert_ids[swapped]].all()
    root = found.loss.astype(float) ** (1 / found.power)
    unit = np.where(dropped, 0.0 if found.left_out is None else found.left_out[before], 0.0)
    unit = np.where(swapped, root[before, choice.expert_ids], unit)
    off = (unit * asked.gate_weights).sum(axis=1)
    behind = np.where(late, 0.0 if options.late is None else options.late[before], 0.0) * asked.gate_weights
    drag = 0.0 if asked.drag is None else asked.drag
    loss = off**found.power + drag * off + behind.sum(axis=1) ** found.power
    assert choice.deviation == pytest.approx(off, rel=1e-5, abs=1e-9)
    assert choice.loss == pytest.approx(loss, rel=1e-5, abs=1e-9)
    if late.any():
        hosts = found.host_of[before]
        assert not options.waits_anyway and not np.isin(hosts[late], hosts[choice.kind == EXACT]).any()
    if policy == "live":
        rows = [set(row) for row in choice.expert_ids.tolist()]
        assert all(len(row) == before.shape[1] for row in rows), "no two slots of a row at one expert"


@given(situations(), st.integers(0, 2))
def test_live_decides_bit_for_bit_as_its_definition_does(situation, keep_top):
    found, costs, asked, options = situation
    options = options._replace(keep_top=keep_top)
    choice, expected = (decide(found, costs, asked, options) for decide in (choose_live, choose_live_plainly))
    assert (choice is None) == (expected is None)
    if choice is not None and expected is not None:
        for mine, its in zip(choice, expected, strict=True):
            assert mine.dtype == its.dtype and np.array_equal(mine, its)


@given(situations())
def test_live_is_never_worse_than_calling_everybody_nor_than_any_cut_by_speed(situation):
    """Against the same sum worked out plainly for every cut of the peers, from calling all to calling none."""
    found, costs, asked, _ = situation
    choice = choose_live(found, costs, asked)
    costs_no_bytes = Peers(costs.wait_s, np.zeros_like(costs.slot_s))
    choice = choose_live(found, costs_no_bytes, asked)

    def cost(kind, loss) -> float:
        called = found.host_of[asked.expert_ids][kind == EXACT]
        wait = max([float(costs.wait_s[host]) for host in called if host != 0], default=0.0)
        return len(asked.expert_ids) * wait + float(asked.price @ loss)

    nothing = np.zeros(asked.expert_ids.shape, dtype=np.int8)
    all_exact = cost(nothing, np.zeros(len(nothing)))
    mine = all_exact if choice is None else cost(choice.kind, choice.loss)
    assert mine <= all_exact + 1e-9
    # Whatever it could have done by leaving out the slowest peers up to any of them, it did at least as well.
    free = asked._replace(price=np.zeros_like(asked.price))
    least_wait = choose_live(found, costs_no_bytes, free)
    if least_wait is not None:
        assert mine <= cost(least_wait.kind, least_wait.loss) + 1e-9


def test_exact_never_swaps():
    assert choose_exact(view(HOSTS), peers(9.0, 9.0), slots([[2, 4]])) is None
