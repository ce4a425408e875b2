"""Decide, for one MoE layer of one step, which routed slots wait for their expert and which use a stand-in.

Two policies beside `exact`, one interface. `paper`: each slot by itself, its expert's wait against the least different
expert that is here. `live`: the step as a whole, since all its rows wait for the slowest peer that any of them calls: a
peer that is called anyway costs a slot only its bytes, and a stand-in is whom the token's own gate scores best. Where it
may, `live` also lets replies come one layer late, when the step waits anyway.

A row's deviations in a layer are added up before they are squared, and come on top of what it deviates already: that is
what a loss is. Clock, network and placement reach this module as numbers. It decides; it never measures. No row ever
spends more than its allowance.

A decision for 16 rows may take 0.2 ms, some 80 of numpy's calls whatever their size, so calls are counted here: `a > b` of
two truths is "a and not b" in one, numbers times truths are those that count.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_runtime.selector.candidates import HERE, NONE, LayerView
from topology.traits import Floats

EXACT, STAND_IN, DROPPED, DEFERRED = 0, 1, 2, 3
FOREVER_S = 1e6  # the wait for an expert that nobody has
NEVER = 1e30  # the deviation of what must not be; finite, so that a price of 0 leaves it what it is


class Peers(NamedTuple):
    """What calls cost. Index 0 is this node, the last entry stands for experts that nobody has. N entries.

    wait_s  [N] seconds until a call's reply is there, queue and computing included
    slot_s  [N] seconds that one more slot in a call adds
    """

    wait_s: Floats
    slot_s: Floats


class Slots(NamedTuple):
    """The routed slots of a step's rows. T rows, K slots in each, E experts.

    expert_ids    [T, K] int32, as the gate chose
    gate_weights  [T, K] float32
    gate_logits   [T, E] float32
    allowance     [T] loss that each row may still spend here; 0 for rows that are exact
    price         [T] seconds of one row's waiting that a unit of its loss is worth
    drag          [T] loss for each unit of deviation beyond its own square, for what a row deviates already; None: 0
    """

    expert_ids: NDArray[np.int32]
    gate_weights: NDArray[np.float32]
    gate_logits: NDArray[np.float32]
    allowance: Floats
    price: Floats
    drag: Floats | None = None


class Choice(NamedTuple):
    """What becomes of the slots.

    expert_ids  [T, K] int32, after the swaps; of a dropped or deferred slot as the gate chose
    kind        [T, K] int8: EXACT, STAND_IN, DROPPED or DEFERRED
    loss        [T] what each row spends
    deviation   [T] what each row deviates by stand-ins and what is left out; what is late is not in it
    """

    expert_ids: NDArray[np.int32]
    kind: NDArray[np.int8]
    loss: Floats
    deviation: Floats


class Options(NamedTuple):
    """What else may be done, and what else is so. Off unless said.

    keep_top     so many slots of the highest gate weight of each row stay exact
    future_s     [N, E] seconds that the layers after this one cost, by who serves the slot, from `lookahead.py`. Matters
                 only where the server that served a slot is where the token goes on
    late         [E] deviation, at gate weight 1, of a slot whose reply is added one layer late; None: none may be
    late_s       seconds that it costs a step that the next layer cannot do without waiting
    waits_anyway the step waits here whatever is chosen, for what the layer before let come late
    """

    keep_top: int = 0
    future_s: Floats | None = None
    late: Floats | None = None
    late_s: float = 0.0
    waits_anyway: bool = False


Policy = Callable[[LayerView, Peers, Slots, Options], Choice | None]
NO_OPTIONS = Options()


def after_choice(view: LayerView, slots: Slots, choice: Choice | None) -> Slots:
    """The same layer's slots for a second choice, once the first was taken: less to spend, and more to deviate from."""
    if choice is None:
        return slots
    drag = _drag_after(view, _drag(slots), choice.deviation)
    return slots._replace(allowance=np.maximum(slots.allowance - choice.loss, 0.0), drag=drag)


def choose_exact(view: LayerView, peers: Peers, slots: Slots, options: Options = NO_OPTIONS) -> Choice | None:
    """Every slot waits for its expert."""
    return None


def choose_paper(view: LayerView, peers: Peers, slots: Slots, options: Options = NO_OPTIONS) -> Choice | None:
    """Each slot takes what is cheapest for it alone; where a row cannot afford all of that, its cheapest losses first.

    None if every slot stays exact.
    """
    open_slots = _open_slots(view, slots, options)
    if not len(open_slots.at):
        return None
    _, rows, experts, hosts, _, _ = open_slots
    stand_in = view.closest[experts]
    deviation, kind = _deviations(view, open_slots, stand_in)
    drag = _drag(slots)
    loss = _loss_of(view, deviation, drag[rows])
    wins = peers.wait_s[hosts] + peers.slot_s[hosts] > loss * slots.price[rows] + _more_after(
        options, hosts, experts
    )
    done = _affordable(view, slots, rows, deviation, wins & (deviation < NEVER))
    return _carried_out(view, slots, drag, open_slots, stand_in, kind, deviation, done)


def choose_live(view: LayerView, peers: Peers, slots: Slots, options: Options = NO_OPTIONS) -> Choice | None:
    """Leave out the slowest peers as far as that is worth what it costs all rows together. None if nobody gains.

    Peers are looked at from the slowest: with the j slowest not called the step waits for the next one. A row that
    cannot afford to do without one of them, or is exact and needs it, makes the step call it: then its other slots are
    exact as well, but where the loss is worth less than their bytes. Nothing else that leaves out whole peers waits
    less for the same loss, since the slowest of those called is what counts.
    """
    open_slots = _open_slots(view, slots, options)
    if not len(open_slots.at):
        return None
    _, rows, experts, hosts, _, all_hosts = open_slots
    stand_in = live_stand_ins(view, slots.expert_ids, slots.gate_logits, rows, experts)
    deviation, kind = _deviations(view, open_slots, stand_in)

    num_rows, num_hosts = len(slots.expert_ids), len(peers.wait_s)
    order = (-peers.wait_s).argsort(kind="stable")  # the slowest first
    rank = np.empty(num_hosts, dtype=np.int64)
    rank[order] = np.arange(num_hosts)
    ranks = rank[hosts]
    # [T, N] how far each row deviates without all up to each rank: NEVER and more where a slot has no stand-in.
    by_rank = np.bincount(rows * num_hosts + ranks, weights=deviation, minlength=num_rows * num_hosts)
    deviates = np.add.accumulate(by_rank.reshape(num_rows, num_hosts), axis=1)
    drag = _drag(slots)
    lost = _loss_of(view, deviates, drag[:, None])
    used = np.bincount(rank[all_hosts.ravel()], minlength=num_hosts)
    used[rank[HERE]] = 0
    is_needed = used > np.bincount(ranks, minlength=num_hosts)  # by somebody exact
    can_pay = np.logical_and.reduce(lost <= slots.allowance[:, None])
    most = [*(can_pay > is_needed).tolist(), False].index(False)  # so many of the slowest can be left out

    # [N+1] seconds of the step with the j slowest not called: the wait for the slowest of those that are, and what all
    # rows lose by it. What a row cannot pay at all, NEVER, is beyond `most`.
    costs = np.zeros(num_hosts + 1)
    waits_s = peers.wait_s[order]
    np.maximum.accumulate((waits_s * (used > 0))[::-1], out=costs[-2::-1])
    if options.waits_anyway:
        costs[:] = costs[0]
    costs *= num_rows
    costs[1:] += slots.price @ lost
    skipped = int(costs[: most + 1].argmin())
    if options.late is not None and not options.waits_anyway:
        needed = np.flatnonzero(is_needed)
        waited_s = (
            float(waits_s[needed[0]]) if len(needed) else 0.0
        )  # for the slowest that somebody exact needs
        late = None
        if num_rows * waited_s < costs[skipped]:
            late = _late(view, slots, options, open_slots, is_needed[ranks], lost[:, -1], waited_s)
        if late is not None and late.cost < costs[skipped]:
            is_late = late.done > late.stands[rows]
            kind[is_late], deviation[is_late] = DEFERRED, late.deviation[is_late]
            return _carried_out(view, slots, drag, open_slots, stand_in, kind, deviation, late.done)

    done = ranks < skipped
    more = _drag_after(view, drag, deviates[:, skipped - 1]) if skipped else drag
    adds = _loss_of(view, deviation, more[rows])
    is_cheap = (adds * slots.price[rows] < (num_rows * peers.slot_s)[hosts]) > done
    if np.count_nonzero(is_cheap):
        sums = _by_row(rows, deviation * is_cheap, num_rows)
        if skipped:
            sums += deviates[:, skipped - 1]
        done |= is_cheap & (_loss_of(view, sums, drag) <= slots.allowance)[rows]
    return _carried_out(view, slots, drag, open_slots, stand_in, kind, deviation, done)


class _Open(NamedTuple):
    """The n slots of a step that are elsewhere and may be served otherwise, by rows and then by columns.

    at         [n] int64, place in [T, K], row by row
    rows       [n] int64; experts, hosts [n] int32
    weights    [n] float64, of the gate
    all_hosts  [T, K] int32, of every slot
    """

    at: NDArray[np.int64]
    rows: NDArray[np.int64]
    experts: NDArray[np.int32]
    hosts: NDArray[np.int32]
    weights: Floats
    all_hosts: NDArray[np.int32]


class _Late(NamedTuple):
    """What it comes to if the step does not wait in this layer. n open slots.

    cost       seconds, losses priced
    done       [n] bool, slots that do not wait
    deviation  [n] of each that is late
    stands     [T] bool, rows that lose less by stand-ins, and use those
    """

    cost: float
    done: NDArray[np.bool_]
    deviation: Floats
    stands: NDArray[np.bool_]


def _late(
    view: LayerView,
    slots: Slots,
    options: Options,
    open_slots: _Open,
    is_needed: NDArray[np.bool_],
    lost: Floats,
    waited_s: float,
) -> _Late | None:
    """Let all replies that nobody exact needs come a layer late. None if a row cannot afford that.

    is_needed   [n] whether a slot's host is waited for by somebody exact: then the slot is exact too
    lost        [T] what each row loses if stand-ins serve all of it
    waited_s    what those take that somebody exact needs
    """
    assert options.late is not None, "nobody asked for late replies"
    rows, num_rows = open_slots.rows, len(slots.expert_ids)
    done = ~is_needed
    deviation = options.late[open_slots.experts] * open_slots.weights
    late = _by_row(rows, deviation * done, num_rows) ** view.power
    stands = (lost < late) > (np.bincount(rows, weights=is_needed, minlength=num_rows) > 0)
    spends = np.where(stands, lost, late)
    if not np.count_nonzero(done) or np.count_nonzero(spends > slots.allowance):
        return None
    owes_s = options.late_s if np.count_nonzero(done > stands[rows]) else 0.0
    return _Late(num_rows * (waited_s + owes_s) + float(slots.price @ spends), done, deviation, stands)


POLICIES: dict[str, Policy] = {"exact": choose_exact, "paper": choose_paper, "live": choose_live}


def _open_slots(view: LayerView, slots: Slots, options: Options) -> _Open:
    all_hosts = view.host_of[slots.expert_ids]
    may_change = (all_hosts != HERE) & (slots.allowance > 0)[:, None]
    if options.keep_top and may_change.any():
        by_weight = np.argsort(-slots.gate_weights, axis=1, kind="stable")
        np.put_along_axis(may_change, by_weight[:, : options.keep_top], False, axis=1)
    at = np.flatnonzero(may_change)
    experts, hosts = slots.expert_ids.ravel()[at], all_hosts.ravel()[at]
    weights = slots.gate_weights.ravel()[at].astype(np.float64)
    return _Open(at, at // slots.expert_ids.shape[1], experts, hosts, weights, all_hosts)


def live_stand_ins(
    view: LayerView,
    expert_ids: NDArray[np.int32],
    gate_logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    experts: NDArray[np.int32],
) -> NDArray[np.int64]:
    """[n] for each slot whom its row's gate scores best of those that may stand in; no two of a row the same.

    Nobody that the gate chose itself stands in for another; -1 where there is nobody. Earlier slots, which weigh more,
    choose first.
    """
    num_rows, num_experts = gate_logits.shape
    width = view.bars.shape[1]
    scores = np.zeros((num_rows, width), dtype=np.float32)
    scores[:, :num_experts] = gate_logits
    scores.ravel()[np.arange(0, scores.size, width)[:, None] + expert_ids] = -np.inf
    table = scores[rows]
    table += view.bars[experts]  # [n, E + 1]
    flat, everyone = table.ravel(), np.arange(len(rows))
    begins, lines = rows * width, everyone * width
    found = table.argmax(axis=1)
    owner = np.empty(num_rows * width, dtype=np.int64)
    while True:
        place = begins + found
        owner[place[::-1]] = everyone[::-1]  # of several at one place the first stays
        later = np.flatnonzero(owner[place] != everyone)
        later = later[found[later] < num_experts]  # all that have nobody may share that place
        if not len(later):
            found[found == num_experts] = NONE
            return found
        flat[lines[later] + found[later]] = -np.inf
        found[later] = table[later].argmax(axis=1)


def _by_row(rows: NDArray[np.int64], values: Floats, num_rows: int) -> Floats:
    """[T] sums of values [n] by row."""
    return np.bincount(rows, weights=values, minlength=num_rows).astype(np.float64, copy=False)


def _drag(slots: Slots) -> Floats:
    return np.zeros(len(slots.allowance)) if slots.drag is None else slots.drag


def _drag_after(view: LayerView, drag: Floats, deviation: Floats) -> Floats:
    """Drag of rows that deviate so far in this layer already: what the next bit of it adds to their loss."""
    if view.power == 1.0:
        return drag
    slope = deviation if view.power == 2.0 else deviation ** (view.power - 1)
    return drag + view.power * slope


def _loss_of(view: LayerView, deviation: Floats, drag: Floats) -> Floats:
    """What deviations cost."""
    if view.power == 2.0:
        return deviation * (deviation + drag)
    return deviation**view.power + drag * deviation


def _deviations(
    view: LayerView, open_slots: _Open, stand_in: NDArray[np.integer]
) -> tuple[Floats, NDArray[np.int8]]:
    """[n] how far each slot deviates by its stand-in, or left out where that is to be and less; NEVER if there is no way.

    Also what it would then be, STAND_IN or DROPPED.
    """
    weights, experts = open_slots.weights, open_slots.experts
    found = view.root[experts, stand_in] * weights
    found[stand_in < 0] = NEVER
    kind = np.empty(len(experts), dtype=np.int8)
    kind.fill(STAND_IN)
    if view.left_out is not None:
        dropped = view.left_out[experts] * weights
        better = dropped < found
        found[better], kind[better] = dropped[better], DROPPED
    return found, kind


def _more_after(options: Options, hosts: NDArray[np.int32], experts: NDArray[np.int32]) -> Floats | float:
    """[n] by how much what comes after costs more when a slot is served here instead of by its host."""
    if options.future_s is None:
        return 0.0
    return options.future_s[HERE, experts] - options.future_s[hosts, experts]


def _affordable(
    view: LayerView, slots: Slots, rows: NDArray[np.int64], deviation: Floats, wanted: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """[n] which of the wanted slots each row can pay for together, the least deviations first."""
    order = np.lexsort((deviation, ~wanted, rows))
    by_row = rows[order]
    first = np.append(True, by_row[1:] != by_row[:-1])
    added = np.where(wanted, deviation, 0.0)[order]  # running sums go on over rows, so nothing huge may enter
    total = added.cumsum()
    before = np.maximum.accumulate(np.where(first, total - added, 0.0))
    pays = np.empty(len(order), dtype=bool)
    pays[order] = _loss_of(view, total - before, _drag(slots)[by_row]) <= slots.allowance[by_row] * (
        1 + 1e-12
    )
    return pays & wanted


def _carried_out(
    view: LayerView,
    slots: Slots,
    drag: Floats,
    open_slots: _Open,
    stand_in: NDArray[np.integer],
    kind: NDArray[np.int8],
    deviation: Floats,
    done: NDArray[np.bool_],
) -> Choice | None:
    """The choice in which the slots of `done` are not exact; None if there are none."""
    chosen = np.flatnonzero(done)
    if not len(chosen):
        return None
    at, rows = open_slots.at[chosen], open_slots.rows[chosen]
    kind, deviation = kind[chosen], deviation[chosen]
    expert_ids = slots.expert_ids.copy()
    kinds = np.zeros(expert_ids.shape, dtype=np.int8)
    kinds.ravel()[at] = kind
    stands = np.flatnonzero(kind == STAND_IN)
    if len(stands):
        expert_ids.ravel()[at[stands]] = stand_in[chosen[stands]]
    num_rows, is_late = len(slots.allowance), kind == DEFERRED
    num_late = np.count_nonzero(is_late)
    if not num_late:
        off = _by_row(rows, deviation, num_rows)
        return Choice(expert_ids, kinds, _loss_of(view, off, drag), off)
    behind = _by_row(rows, deviation * is_late, num_rows) ** view.power
    if num_late == len(kind):
        return Choice(expert_ids, kinds, behind, np.zeros(num_rows))
    off = _by_row(rows, deviation * ~is_late, num_rows)
    return Choice(expert_ids, kinds, _loss_of(view, off, drag) + behind, off)
