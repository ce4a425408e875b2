"""What `live` of edge_runtime/selector/choose.py is, slot by slot: no more is vectorised than its one product."""

import numpy as np

from edge_runtime.selector.candidates import HERE, LayerView
from edge_runtime.selector.choose import (
    DEFERRED,
    DROPPED,
    EXACT,
    NEVER,
    STAND_IN,
    Choice,
    Options,
    Peers,
    Slots,
)


def choose_live_plainly(view: LayerView, peers: Peers, slots: Slots, options: Options) -> Choice | None:
    """See `choose_live`. Sums go by slots and by ranks of peers, as there, so that even roundings are alike."""
    (num_rows, num_columns), num_hosts = slots.expert_ids.shape, len(peers.wait_s)
    drag = np.zeros(num_rows) if slots.drag is None else slots.drag

    def loss_of(deviation: float, per_unit: float) -> float:
        if view.power == 2.0:
            return deviation * (deviation + per_unit)
        return deviation**view.power + per_unit * deviation

    places = [(row, column) for row in range(num_rows) for column in range(num_columns)]
    host = {(row, column): int(view.host_of[slots.expert_ids[row, column]]) for row, column in places}
    open_slots = []
    for row in range(num_rows):
        heaviest = np.argsort(-slots.gate_weights[row], kind="stable")[: options.keep_top]
        for column in range(num_columns):
            if host[row, column] != HERE and slots.allowance[row] > 0 and column not in heaviest:
                open_slots.append((row, column))
    if not open_slots:
        return None

    stand_in, kind, deviation = {}, {}, {}
    for row, column in open_slots:
        expert, weight = slots.expert_ids[row, column], float(slots.gate_weights[row, column])
        taken = {*slots.expert_ids[row].tolist(), *(other for at, other in stand_in.items() if at[0] == row)}
        allowed = [other for other in np.flatnonzero(view.may_stand[expert]).tolist() if other not in taken]
        best = max(allowed, key=lambda other: (slots.gate_logits[row, other], -other), default=-1)
        kind[row, column], deviation[row, column] = STAND_IN, NEVER
        if best >= 0:
            stand_in[row, column] = best
            deviation[row, column] = float(view.root[expert, best]) * weight
        if view.left_out is not None and float(view.left_out[expert]) * weight < deviation[row, column]:
            kind[row, column], deviation[row, column] = DROPPED, float(view.left_out[expert]) * weight

    slowest_first = sorted(range(num_hosts), key=lambda at: -peers.wait_s[at])  # stable
    needed = {host[place] for place in places if place not in kind} - {HERE}
    if -1 in needed:
        needed = needed - {-1} | {num_hosts - 1}
    called = {at % num_hosts for at in host.values()} - {HERE}
    deviates = np.zeros((num_rows, num_hosts))
    for rank, at in enumerate(slowest_first):
        for place in open_slots:
            if host[place] % num_hosts == at:
                deviates[place[0], rank] += deviation[place]
        if rank:
            deviates[:, rank] = deviates[:, rank - 1] + deviates[:, rank]
    lost = np.array(
        [[loss_of(off, drag[row]) for off in line.tolist()] for row, line in enumerate(deviates)], dtype=float
    )
    paid = slots.price @ lost

    def wait_for(hosts: set[int]) -> float:
        return max((float(peers.wait_s[at]) for at in hosts), default=0.0)

    best_cost, skipped = num_rows * wait_for(called), 0
    for cut in range(1, num_hosts + 1):
        left_out = slowest_first[cut - 1]
        if left_out in needed or (lost[:, cut - 1] > slots.allowance).any():
            break
        after = called if options.waits_anyway else called - set(slowest_first[:cut])
        cost = num_rows * wait_for(after) + paid[cut - 1]
        if cost < best_cost:
            best_cost, skipped = cost, cut

    def carried_out(done: list[tuple[int, int]]) -> Choice | None:
        if not done:
            return None
        ids, kinds = slots.expert_ids.copy(), np.full(slots.expert_ids.shape, EXACT, dtype=np.int8)
        off, late = np.zeros(num_rows), np.zeros(num_rows)
        for place in done:
            kinds[place] = kind[place]
            if kind[place] == STAND_IN:
                ids[place] = stand_in[place]
            (late if kind[place] == DEFERRED else off)[place[0]] += deviation[place]
        loss = np.array([loss_of(off[row], drag[row]) for row in range(num_rows)])
        if any(kind[place] == DEFERRED for place in done):
            loss = loss + late**view.power
        return Choice(ids, kinds, loss, off)

    if options.late is not None and not options.waits_anyway:
        done = [place for place in open_slots if host[place] % num_hosts not in needed]
        unit = {
            place: float(options.late[slots.expert_ids[place]]) * float(slots.gate_weights[place])
            for place in open_slots
        }
        behind = np.zeros(num_rows)
        for place in done:
            behind[place[0]] += unit[place]
        behind = behind**view.power
        waits = {place[0] for place in open_slots if place not in done}
        stands = {row for row in range(num_rows) if lost[row, -1] < behind[row] and row not in waits}
        spends = np.array([lost[row, -1] if row in stands else behind[row] for row in range(num_rows)])
        owes_s = options.late_s if any(row not in stands for row, _ in done) else 0.0
        cost = num_rows * (wait_for(needed) + owes_s) + float(slots.price @ spends)
        if done and (spends <= slots.allowance).all() and cost < best_cost:
            for place in done:
                if place[0] not in stands:
                    kind[place], deviation[place] = DEFERRED, unit[place]
            return carried_out(done)

    gone = set(slowest_first[:skipped])
    done = [place for place in open_slots if host[place] % num_hosts in gone]
    before = deviates[:, skipped - 1] if skipped else np.zeros(num_rows)
    more = drag if view.power == 1.0 else drag + view.power * before ** (view.power - 1)
    cheap = [
        place
        for place in open_slots
        if place not in done
        and loss_of(deviation[place], more[place[0]]) * slots.price[place[0]]
        < num_rows * peers.slot_s[host[place]]
    ]
    sums = np.zeros(num_rows)
    for place in cheap:
        sums[place[0]] += deviation[place]
    sums += before
    can_pay = [loss_of(sums[row], drag[row]) <= slots.allowance[row] for row in range(num_rows)]
    chosen = {*done, *(place for place in cheap if can_pay[place[0]])}
    return carried_out([place for place in open_slots if place in chosen])
