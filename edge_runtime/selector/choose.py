"""Decide, for one MoE layer of one step, which routed slots wait for their expert and which use a stand-in.

Two policies beside `exact`, one interface. `paper`: each slot by itself, its expert's wait against the least different
expert that is here. `live`: the step as a whole, since all its rows wait for the slowest peer that any of them calls: a
peer that is called anyway costs a slot only its bytes, and a stand-in is whom the token's own gate scores best.

Clock, network and placement reach this module as numbers. It decides; it never measures. No row ever spends more than
its allowance.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_runtime.selector.candidates import HERE, NONE, LayerView
from topology.traits import Floats

EXACT, STAND_IN, DROPPED = 0, 1, 2
FOREVER_S = 1e6  # the wait for an expert that nobody has
NEVER = 1e30  # the loss of what must not be; finite, so that a price of 0 leaves it what it is


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
    """

    expert_ids: NDArray[np.int32]
    gate_weights: NDArray[np.float32]
    gate_logits: NDArray[np.float32]
    allowance: Floats
    price: Floats


class Choice(NamedTuple):
    """What becomes of the slots.

    expert_ids  [T, K] int32, after the swaps; of a dropped slot as the gate chose
    kind        [T, K] int8: EXACT, STAND_IN or DROPPED
    loss        [T] what each row spends
    """

    expert_ids: NDArray[np.int32]
    kind: NDArray[np.int8]
    loss: Floats


class Options(NamedTuple):
    """What else may be done. Off unless said.

    drop_loss  [E] loss of leaving a slot out at gate weight 1: then that is one more candidate. None: never
    keep_top   so many slots of the highest gate weight of each row stay exact
    future_s   [N, E] seconds that the layers after this one cost, by who serves the slot, from `lookahead.py`. Matters
               only where the server that served a slot is where the token goes on
    """

    drop_loss: Floats | None = None
    keep_top: int = 0
    future_s: Floats | None = None


Policy = Callable[[LayerView, Peers, Slots, Options], Choice | None]
NO_OPTIONS = Options()


def choose_exact(view: LayerView, peers: Peers, slots: Slots, options: Options = NO_OPTIONS) -> Choice | None:
    """Every slot waits for its expert."""
    return None


def choose_paper(view: LayerView, peers: Peers, slots: Slots, options: Options = NO_OPTIONS) -> Choice | None:
    """Each slot takes what is cheapest for it alone; where a row cannot afford all of that, its cheapest losses first.

    None if every slot stays exact.
    """
    open_rows, columns, experts, hosts = _open_slots(view, slots, options)
    if not len(open_rows):
        return None
    stand_in = view.closest[experts]
    loss = _losses(view, slots, open_rows, columns, experts, stand_in)
    kind = np.full(len(open_rows), STAND_IN, dtype=np.int8)
    _consider_dropping(loss, kind, slots, open_rows, columns, experts, options)
    wins = peers.wait_s[hosts] + peers.slot_s[hosts] > loss * slots.price[open_rows] + _more_after(
        options, hosts, experts
    )
    done = _affordable(slots, open_rows, loss, wins & (loss < NEVER))
    return _carried_out(slots, open_rows, columns, stand_in, kind, loss, done)


def choose_live(view: LayerView, peers: Peers, slots: Slots, options: Options = NO_OPTIONS) -> Choice | None:
    """Leave out the slowest peers as far as that is worth what it costs all rows together. None if nobody gains.

    Peers are looked at from the slowest: with the j slowest not called the step waits for the next one. A row that
    cannot afford to do without one of them, or is exact and needs it, makes the step call it: then its other slots are
    exact as well, but where the loss is worth less than their bytes.
    """
    rows, columns, experts, hosts = _open_slots(view, slots, options)
    if not len(rows):
        return None
    stand_in = _live_stand_ins(view, slots, rows, experts)
    loss = _losses(view, slots, rows, columns, experts, stand_in)
    kind = np.full(len(rows), STAND_IN, dtype=np.int8)
    _consider_dropping(loss, kind, slots, rows, columns, experts, options)

    num_rows, num_hosts = len(slots.expert_ids), len(peers.wait_s)
    order = np.argsort(-peers.wait_s, kind="stable")  # the slowest first
    rank = np.empty(num_hosts, dtype=np.int64)
    rank[order] = np.arange(num_hosts)
    at = rank[hosts]
    # [T, N] what each row loses at each rank: NEVER and more where a slot has no stand-in.
    by_rank = np.bincount(rows * num_hosts + at, weights=loss, minlength=num_rows * num_hosts)
    lost = by_rank.reshape(num_rows, num_hosts).cumsum(axis=1)
    used = np.bincount(rank[view.host_of[slots.expert_ids].ravel()], minlength=num_hosts)
    used[rank[HERE]] = 0
    free_to_skip = np.bincount(at, minlength=num_hosts)
    is_needed = used > free_to_skip  # by somebody exact
    can_pay = (lost <= slots.allowance[:, None]).all(axis=0)
    most = int(np.argmin(np.append(can_pay & ~is_needed, False)))  # so many of the slowest can be left out

    # [N+1] seconds of the step with the j slowest not called: the wait for the slowest of those that are.
    waits = np.append(np.maximum.accumulate(np.where(used > 0, peers.wait_s[order], 0.0)[::-1])[::-1], 0.0)
    paid = np.append(0.0, slots.price @ np.where(lost < NEVER, lost, 0.0))
    skipped = int(np.argmin((num_rows * waits + paid)[: most + 1]))

    done = at < skipped
    is_cheap = ~done & (loss * slots.price[rows] < num_rows * peers.slot_s[hosts])
    if is_cheap.any():
        left = slots.allowance - (lost[:, skipped - 1] if skipped else 0.0)
        done |= is_cheap & _fits(rows, loss, is_cheap, left)
    return _carried_out(slots, rows, columns, stand_in, kind, loss, done)


POLICIES: dict[str, Policy] = {"exact": choose_exact, "paper": choose_paper, "live": choose_live}


def _open_slots(
    view: LayerView, slots: Slots, options: Options
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """Row, column, expert and host of each slot that is elsewhere and may be served otherwise."""
    hosts = view.host_of[slots.expert_ids]
    may_change = (hosts != HERE) & (slots.allowance > 0)[:, None]
    if options.keep_top and may_change.any():
        by_weight = np.argsort(-slots.gate_weights, axis=1, kind="stable")
        np.put_along_axis(may_change, by_weight[:, : options.keep_top], False, axis=1)
    rows, columns = np.nonzero(may_change)
    return rows, columns, slots.expert_ids[rows, columns], hosts[rows, columns]


def _live_stand_ins(
    view: LayerView, slots: Slots, rows: NDArray[np.int64], experts: NDArray[np.int32]
) -> NDArray[np.int64]:
    """[n] for each slot whom its row's gate scores best of those that may stand in; no two of a row the same.

    Nobody that the gate chose itself stands in for another; -1 where there is nobody. Earlier slots, which weigh more,
    choose first.
    """
    num_rows, num_experts = slots.gate_logits.shape
    scores = slots.gate_logits.copy()
    scores[np.arange(num_rows)[:, None], slots.expert_ids] = -np.inf
    table = np.where(view.may_stand[experts], scores[rows], -np.inf)  # [n, E]
    found = table.argmax(axis=1)
    everyone = np.arange(len(rows))
    owner = np.empty(num_rows * num_experts, dtype=np.int64)
    while True:
        has = table[everyone, found] > -np.inf
        place = rows * num_experts + found
        owner[place[::-1]] = everyone[::-1]  # of several at one place the first stays
        is_later = has & (owner[place] != everyone)
        if not is_later.any():
            return np.where(has, found, NONE)
        later = np.flatnonzero(is_later)
        table[later, found[later]] = -np.inf
        found[later] = table[later].argmax(axis=1)


def _losses(
    view: LayerView,
    slots: Slots,
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    experts: NDArray[np.int32],
    stand_in: NDArray[np.integer],
) -> Floats:
    """[n] what each slot would lose by its stand-in; NEVER without one."""
    weights = slots.gate_weights[rows, columns].astype(np.float64)
    lost = view.loss[experts, stand_in] * (weights if view.power == 1.0 else weights**view.power)
    return np.where(stand_in >= 0, np.maximum(lost, 0.0), NEVER)


def _consider_dropping(
    loss: Floats,
    kind: NDArray[np.int8],
    slots: Slots,
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    experts: NDArray[np.int32],
    options: Options,
) -> None:
    """Leave a slot out where that loses less than its stand-in does. Changes `loss` and `kind`."""
    if options.drop_loss is None:
        return
    dropped = options.drop_loss[experts] * slots.gate_weights[rows, columns]
    better = dropped < loss
    loss[better] = dropped[better]
    kind[better] = DROPPED


def _more_after(options: Options, hosts: NDArray[np.int32], experts: NDArray[np.int32]) -> Floats | float:
    """[n] by how much what comes after costs more when a slot is served here instead of by its host."""
    if options.future_s is None:
        return 0.0
    return options.future_s[HERE, experts] - options.future_s[hosts, experts]


def _fits(
    rows: NDArray[np.int64], loss: Floats, wanted: NDArray[np.bool_], left: Floats
) -> NDArray[np.bool_]:
    """[n] whether a row can pay for all of its wanted slots."""
    total = np.bincount(rows, weights=np.where(wanted, loss, 0.0), minlength=len(left))
    return (total <= left)[rows]


def _affordable(
    slots: Slots, rows: NDArray[np.int64], loss: Floats, wanted: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """[n] which of the wanted slots each row can pay for, cheapest losses first."""
    order = np.lexsort((loss, ~wanted, rows))
    by_row = rows[order]
    first = np.append(True, by_row[1:] != by_row[:-1])
    paid = np.where(wanted, loss, 0.0)[order]  # running sums go on over rows, so nothing huge may enter
    total = paid.cumsum()
    before = np.maximum.accumulate(np.where(first, total - paid, 0.0))
    pays = np.empty(len(order), dtype=bool)
    pays[order] = total - before <= slots.allowance[by_row] * (1 + 1e-12)
    return pays & wanted


def _carried_out(
    slots: Slots,
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    stand_in: NDArray[np.integer],
    kind: NDArray[np.int8],
    loss: Floats,
    done: NDArray[np.bool_],
) -> Choice | None:
    """The choice in which the slots of `done` are not exact; None if there are none."""
    if not done.any():
        return None
    rows, columns, kind = rows[done], columns[done], kind[done]
    expert_ids = slots.expert_ids.copy()
    kinds = np.zeros(expert_ids.shape, dtype=np.int8)
    kinds[rows, columns] = kind
    expert_ids[rows, columns] = np.where(kind == STAND_IN, stand_in[done], expert_ids[rows, columns])
    spent: Floats = np.bincount(rows, weights=loss[done], minlength=len(slots.allowance)).astype(np.float64)
    return Choice(expert_ids, kinds, spent)
