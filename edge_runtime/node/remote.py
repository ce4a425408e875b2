"""The experts of a placement behind one call: this node's own and those of its peers.

Per layer one message per peer for the whole batch; own experts are computed while the replies are on their way.
Every slot's output comes back as one float32 row and is added at the home in slot order, so where an expert runs
never changes a token. Knows no request and no token.
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from edge_runtime.clock import Clock
from edge_runtime.errors import PeerError, Refusal
from edge_runtime.model.moe import Beside, ExpertStore, LocalExperts, Missing, Owed, Slices, run_pairs
from edge_runtime.node.peer_link import PeerLink
from edge_runtime.protocol import Envelope, ExpertCall, ExpertReply, SlicedCall
from edge_runtime.selector.choose import DEFERRED, DROPPED, STAND_IN, Choice, Slots
from edge_runtime.selector.home import HomeSelector
from edge_runtime.transport.calls import Outcome, PeerCalls, Pending
from kernels import ops
from kernels.ops import ExpertBank
from kernels.reference.dispatch import Dispatched
from kernels.transfers import on_device, on_device_as_one, on_host
from topology.host_choice import NOBODY, choose_hosts
from topology.ids import ExpertId

log = logging.getLogger(__name__)

UNKNOWN_S = (
    8.0  # how long the coordinator is given to say whether a lost peer's experts will have another host
)
REPLACING_S = 60.0  # and how long those are waited for
LOOK_S = 0.05  # how often links are looked at between steps: a killed peer is noticed in a call anyway
LATE_S = 0.5  # a reply that takes longer is late: others are asked, or stand-ins serve ...
TIMES_EXPECTED = 8  # ... but not before so many times what it usually takes
HERE = 0
GREET_PATIENCE_S = 5.0  # how long a step waits for a peer that is said to be alive but was never reached


@dataclass
class PeerTraffic:
    """What went to one peer and came back, since the start; bytes of tensors.

    least_s  quickest call since somebody last looked, without the peer's arithmetic
    """

    calls: int = 0
    rows: int = 0
    pairs: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    failures: int = 0
    least_s: float = math.inf


@dataclass
class ExpertTimes:
    """Seconds since the start: laying out and sending, own experts, waiting for and taking in replies."""

    send: float = 0.0
    local: float = 0.0
    wait: float = 0.0
    peers_compute: float = 0.0


@dataclass
class _OnTheWay:
    """Calls of a layer whose replies are added one layer later.

    hosts, pairs  whom, and for each of them which flat slots [n]
    x             [T, D] float32, expert_ids [T, K]: the layer's rows, should a call fail
    outputs       [T*K, D] float32, once they are in
    """

    layer: int
    pending: Pending
    hosts: list[int]
    pairs: list[np.ndarray]
    x: Tensor
    expert_ids: Tensor
    deadline: float
    outputs: Tensor | None = None
    missing: Missing | None = None


class PlacedExperts:
    """An ExpertPort over a whole placement. Used by one thread, but for `alive`.

    host_names  index 0 is this node, then its peers
    selector    for requests that may spend quality; its hosts are those of `host_names`
    alive       names of the peers that the coordinator says serve
    """

    def __init__(
        self,
        *,
        node: str,
        store: ExpertStore,
        hosts: Mapping[ExpertId, Sequence[str]],
        links: Sequence[PeerLink],
        num_layers: int,
        num_experts: int,
        epoch: int,
        deadline_s: float,
        clock: Clock,
        selector: HomeSelector | None = None,
    ) -> None:
        self.host_names = [node, *(link.name for link in links)]
        self.alive: frozenset[str] = frozenset(self.host_names)
        self._lost_s: float | None = None  # when a peer was last lost
        self._came = False  # whether one came, or came back, since the step began
        self._told_s: float | None = None  # when the coordinator last said who is alive, and ...
        self._replacing = False  # ... that another placement is on its way
        self._coordinator_back_s: float | None = clock.now()  # since when it can be heard; None: it is away
        self.traffic = {link.name: PeerTraffic() for link in links}
        self.times = ExpertTimes()
        self._store = store
        self._local = LocalExperts(store, node)
        self._hosts = hosts
        self._links = list(links)
        self._shape = (num_layers, num_experts)
        self._epoch = epoch
        self._deadline_s = deadline_s
        self._clock = clock
        self._calls = PeerCalls(clock)
        self.selector = selector
        self._asked: Slots | None = None  # of the layer at hand, with what may still be spent in it
        self._taken: Choice | None = None  # what was chosen for it, and ...
        self._choice: Choice | None = None  # ... that while nobody was called for it
        self._late_choice: Choice | None = None
        self._on_the_way: _OnTheWay | None = None  # of the layer before the one at hand
        self._begun: _OnTheWay | None = None  # of the one at hand
        self._look_at_s = 0.0
        self._served_by: np.ndarray | None = None
        self._here: Mapping[int, ExpertBank] = {}
        self._whole: Mapping[int, ExpertBank] | None = None  # what `_here` was made of; None: to be made
        self._choose()

    def begin_step(self) -> None:
        """Notice peers that came or went, at most every 50 ms."""
        now = self._clock.now()
        self._asked = self._choice = self._taken = None
        for begun in filter(None, (self._on_the_way, self._begun)):
            self._calls.forget(begun.pending)  # of a step that ended early
        self._on_the_way = self._begun = None
        if self.selector is not None:
            self.selector.begin_step()
        if now >= self._look_at_s:
            self._look_at_s = now + LOOK_S
            self._look()
        self._came = False

    def served_by(self) -> np.ndarray | None:
        """[T, K] int32 host of every slot of the layer just run, -1 nobody; None if this node served them all."""
        return self._served_by

    def choose(self, layer: int, slots: Slots, may_defer: bool = False) -> Choice | None:
        """Which slots of a layer use a stand-in, within what their rows may spend; None: all are exact."""
        self._asked = self._choice = self._taken = self._late_choice = None
        if self.selector is None or self._is_local[layer]:
            return None
        self._asked = slots
        self._choice = self.selector.choose(layer, slots, may_defer=may_defer)
        self._taken = self._choice
        return self._choice

    @property
    def drag_per_deviation(self) -> float:
        """See `Losses`."""
        return self.selector.drag_per_deviation if self.selector is not None else 0.0

    def start_price(self) -> float:
        """Seconds that a unit of loss is worth before anything was spent; see `Prices`."""
        return self.selector.start_price() if self.selector is not None else 0.0

    def peers_changed(self, alive: Collection[str], replacing: bool) -> None:
        """The coordinator's word on who serves, and whether what is missing will have another host."""
        came = frozenset(alive) - self.alive
        for link in self._links:
            if link.name in came and not link.usable:
                link.was_usable = False  # another process than the one that was lost: worth waiting for
        self.alive = frozenset(alive)
        self._replacing = replacing
        self._told_s = self._clock.now()

    def coordinator_is(self, *, here: bool) -> None:
        """The coordinator is gone, or back. Any thread."""
        self._coordinator_back_s = self._clock.now() if here else None

    def may_be_replaced(self) -> bool:
        """See HostedExperts. True until the coordinator has said otherwise of a peer that was just lost.

        Time without a coordinator does not count, as far as anybody waits at all: nobody could say anything. A peer that came
        back while the step went on may hold what its first layers lacked.
        """
        if self._came:
            return True
        if self._lost_s is None:
            return False
        now, back_s = self._clock.now(), self._coordinator_back_s
        if back_s is None:
            return now - self._lost_s < REPLACING_S
        since_s = max(self._lost_s, back_s)
        gone = [link.name for link in self._links if not link.usable and link.was_usable]
        has_told = self._told_s is not None and self._told_s >= back_s
        if not has_told or any(name in self.alive for name in gone):  # it has not noticed yet
            return now - since_s < UNKNOWN_S
        return self._replacing and now - since_s < REPLACING_S

    def greet_all(self, patience_s: float) -> None:
        """Wait until every living peer is usable, `patience_s` at most. For a start-up without a failed first step."""
        deadline = self._clock.now() + patience_s
        while self._ungreeted() and self._clock.now() < deadline:
            self._look()
            self._clock.sleep(0.005)
        self._look()

    def close(self) -> None:
        for link in self._links:
            link.close()

    def run(
        self,
        layer: int,
        x: Tensor,
        expert_ids: Tensor,
        out: Tensor,
        beside: Beside = None,
        slices: Slices | None = None,
    ) -> Missing | None:
        """See ExpertPort. x [T, D] float32, expert_ids [T, K] int32, out [T*K, D] float32.

        A slot whose peer fails goes to another host of the expert within the same deadline. What no living host
        holds is Missing. On a GPU ids and rows for peers come to the host once, and all replies go over in one piece.
        """
        if self._is_local[layer]:
            self._served_by = None
            began = self._clock.now()
            absent = self._local.run(layer, x, expert_ids, out, beside, slices)
            self.times.local += self._clock.now() - began
            return absent
        deadline = self._clock.now() + self._deadline_s
        expert_ids = on_host(expert_ids)
        if slices is not None:
            slices = slices._replace(masks=on_host(slices.masks))
        self._served_by = self._table_numpy[layer][expert_ids.numpy()]
        served_by = self._served_by.reshape(-1)
        if slices is not None:
            self._served_by[slices.masks.numpy() == 0] = NOBODY  # not a slice of theirs runs: nobody is asked
        failed = self._run_once(layer, x, expert_ids, out, deadline, beside, slices)
        return self._without_failed(layer, x, expert_ids, out, deadline, failed, served_by, slices)

    def _without_failed(
        self,
        layer: int,
        x: Tensor,
        expert_ids: Tensor,
        out: Tensor,
        deadline: float,
        failed: Tensor | None,
        served_by: np.ndarray,
        slices: Slices | None = None,
    ) -> Missing | None:
        """Ask other hosts for slots [n] that failed, until all are there or nobody has the rest; `served_by` is noted."""
        flat = expert_ids.reshape(-1)
        num_columns = expert_ids.shape[1]
        missing: list[Tensor] = []
        while failed is not None:
            unhosted = self._table[layer][flat[failed].long()] == NOBODY
            if bool(unhosted.any()) and self._await_peers(deadline):
                continue
            missing.append(failed[unhosted])
            served_by[failed.numpy()] = self._table_numpy[layer][flat[failed].numpy()]
            failed = failed[~unhosted]
            if not len(failed):
                break
            # One slot per line: the retried slots as a step of their own, on the rows they belong to.
            retried = torch.empty(len(failed), out.shape[1], device=out.device)
            rows = x[failed // num_columns].contiguous()
            part = _slices_of(slices, failed.numpy(), as_lines=True)
            ids = flat[failed].view(-1, 1).contiguous()
            again = self._run_once(layer, rows, ids, retried, deadline, slices=part)
            came = torch.ones(len(failed), dtype=torch.bool)
            if again is not None:
                came[again] = False
            out[failed[came]] = retried[came]
            failed = failed[again] if again is not None else None
        slots = torch.cat(missing) if missing else torch.empty(0, dtype=torch.int64)
        return Missing(slots, self._explain(layer, flat[slots])) if len(slots) else None

    def take_owed(self) -> Owed | None:
        """See HostedExperts."""
        self._collect()
        before, self._on_the_way, self._begun = self._on_the_way, self._begun, None
        if before is None:
            return None
        assert before.outputs is not None, "what was on the way was waited for"
        slots = torch.from_numpy(np.concatenate(before.pairs).astype(np.int64))
        return Owed(slots, before.outputs[slots], before.missing)

    def _collect(self) -> None:
        """Wait for what the layer before let come late. Hosts that fail are replaced as ever."""
        before = self._on_the_way
        if before is None or before.outputs is not None:
            return
        began = self._clock.now()
        before.outputs = torch.zeros(before.expert_ids.numel(), before.x.shape[1], device=before.x.device)
        outcomes = self._calls.receive(before.pending)
        self._calls.forget(before.pending)
        if self.selector is not None:
            self._measure(before.hosts, outcomes, self._calls.waits)
        landing = _Landing(before.outputs)
        lost = [
            slots
            for host, outcome, slots in zip(before.hosts, outcomes, before.pairs, strict=True)
            if not self._take(host, outcome, slots, landing)
        ]
        landing.close()
        self.times.wait += self._clock.now() - began
        if lost:
            self._look_at_s = 0.0
            self._look()
            self._choose()
            failed = torch.from_numpy(np.concatenate(lost).astype(np.int64))
            served_by = np.zeros(
                before.expert_ids.numel(), dtype=np.int32
            )  # whoever it was: they are on the bill as late
            before.missing = self._without_failed(
                before.layer, before.x, before.expert_ids, before.outputs, before.deadline, failed, served_by
            )

    def add_here(
        self,
        layer: int,
        x: Tensor,
        expert_ids: Tensor,
        gate_weights: Tensor,
        hidden: Tensor,
        out: Tensor,
        slices: Slices | None = None,
    ) -> bool | None:
        """See ExpertPort."""
        if not self._is_local[layer]:
            return None
        self._served_by = None
        began = self._clock.now()
        is_finite = self._local.add_here(layer, x, expert_ids, gate_weights, hidden, out, slices)
        self.times.local += self._clock.now() - began
        return is_finite

    def banks_here(self) -> Mapping[int, ExpertBank]:
        """See LocalExperts: layers of which this node serves every expert."""
        whole = self._store.whole
        if self._whole is not whole:
            self._whole = whole
            self._here = {layer: bank for layer, bank in whole.items() if self._is_local[layer]}
        return self._here

    def ran_here(self, expert_ids: Tensor, seconds: float) -> None:
        """See LocalExperts."""
        self._served_by = None
        self.times.local += seconds

    def _run_once(
        self,
        layer: int,
        x: Tensor,
        expert_ids: Tensor,
        out: Tensor,
        deadline: float,
        beside: Beside = None,
        slices: Slices | None = None,
    ) -> Tensor | None:
        """Call every host once. Returns the flat slots [n] int64 that stay unfilled, None if none does.

        expert_ids and slices are in the host's memory, x and out where the node computes. Indices are numpy's here: a slice
        costs 0.2 us where torch's costs 1, and there are some twenty per layer.
        """
        times, now = self.times, self._clock.now
        began = now()
        num_hosts = len(self.host_names)
        table, wanted = self._table[layer], expert_ids
        if slices is not None:  # pairs that run no slice go to an expert beyond the last, which nobody hosts
            skipped = slices.masks == 0
            wanted = torch.where(skipped, len(table), expert_ids)
            out[skipped.view(-1)] = 0.0
            table = torch.cat([table, torch.tensor([NOBODY], dtype=table.dtype)])
        split = ops.dispatch(wanted, table, num_hosts)
        offsets, row_offsets = split.offsets.tolist(), split.row_offsets.tolist()
        pairs, rows, pair_rows = split.pairs.numpy(), split.rows.numpy(), split.pair_rows.numpy()
        experts = expert_ids.numpy().reshape(-1)[pairs]
        masks = None if slices is None else slices.masks.numpy().reshape(-1)[pairs]
        called = [host for host in range(1, num_hosts) if offsets[host + 1] > offsets[host]]
        tensors: list[tuple[np.ndarray, ...]] = [
            (
                rows[row_offsets[host] : row_offsets[host + 1]],
                pair_rows[offsets[host] : offsets[host + 1]],
                experts[offsets[host] : offsets[host + 1]],
            )
            for host in called
        ]
        if masks is not None:
            tensors = [
                (*each, masks[offsets[host] : offsets[host + 1]])
                for host, each in zip(called, tensors, strict=True)
            ]
        num_parts = 0 if slices is None else slices.num_parts
        pending = None
        if called:
            pending = self._send(layer, on_host(x).numpy(), called, tensors, deadline, num_parts)
        if pending is not None and self._choice is not None and self._choice.kind.shape == expert_ids.shape:
            late = self._let_come_late(layer, x, expert_ids, out, called, pending, split, deadline)
            awaited = [at for at, host in enumerate(called) if host not in late]
            called = [called[at] for at in awaited]
            pending = pending._replace(
                channels=[pending.channels[at] for at in awaited], sent=[pending.sent[at] for at in awaited]
            )
        sent_at = now()
        if beside is not None:
            beside()
        landing = _Landing(out)
        num_local = offsets[1]
        if num_local:
            bank = self._store.bank(layer)
            assert bank is not None, f"layer {layer} has own experts in the table but none in the store"
            local_rows = torch.from_numpy(pairs[:num_local] // np.int32(expert_ids.shape[1]))
            own = None if masks is None else Slices(torch.from_numpy(masks[:num_local]), num_parts)
            local = run_pairs(x, local_rows, torch.from_numpy(experts[:num_local]), bank, own)
            landing.put(pairs[:num_local], local)
        local_at = now()

        unfilled: list[np.ndarray] = []
        if pending is not None and self._on_the_way is not None and self._on_the_way.outputs is None:
            self._calls.keep(pending)
            self._collect()
        if pending is not None and called:
            outcomes = self._calls.receive_until(pending, began + self._patience_s(called))
            waits = self._calls.waits  # of these calls: getting along without the late makes others
            if None in outcomes:
                outcomes = self._without_late(
                    layer, x, expert_ids, out, deadline, called, pending, outcomes, split, slices
                )
            if len(called) == 1:
                self._time(called[0], outcomes[0], sent_at)
            if self.selector is not None:
                self._measure(called, outcomes, waits)
            for host, outcome in zip(called, outcomes, strict=True):
                slots = pairs[offsets[host] : offsets[host + 1]]
                if outcome is not None and not self._take(host, outcome, slots, landing):
                    unfilled.append(slots)
            landing.close()
        if offsets[-1] < expert_ids.numel():
            asked = np.arange(expert_ids.numel())
            if slices is not None:
                asked = asked[slices.masks.numpy().reshape(-1) != 0]
            unfilled.append(np.setdiff1d(asked, pairs))
        times.send += sent_at - began
        times.local += local_at - sent_at
        times.wait += now() - local_at
        if not any(map(len, unfilled)):
            return None
        self._look_at_s = 0.0
        self._look()
        self._choose()
        return torch.from_numpy(np.concatenate(unfilled).astype(np.int64))

    def _let_come_late(
        self,
        layer: int,
        x: Tensor,
        expert_ids: Tensor,
        out: Tensor,
        called: Sequence[int],
        pending: Pending,
        split: Dispatched,
        deadline: float,
    ) -> list[int]:
        """Set the calls aside whose slots were chosen to come a layer late; `out` [T*K, D] is 0 there. Returns the hosts."""
        choice, self._choice = self._choice, None  # a retried call is not another choice
        assert choice is not None, "somebody chose what may come late"
        is_late = (choice.kind == DEFERRED).reshape(-1)
        pairs, offsets = split.pairs.numpy(), split.offsets
        of_host = {host: pairs[offsets[host] : offsets[host + 1]] for host in called}
        at = [index for index, host in enumerate(called) if is_late[of_host[host]].all()]
        if not at:
            return []
        aside = pending._replace(
            channels=[pending.channels[index] for index in at], sent=[pending.sent[index] for index in at]
        )
        hosts = [called[index] for index in at]
        slots = [of_host[host] for host in hosts]
        _Landing(out).clear(np.concatenate(slots))
        self._begun = _OnTheWay(layer, aside, hosts, slots, x.clone(), expert_ids.clone(), deadline)
        self._calls.keep(aside)
        return hosts

    def _patience_s(self, called: Sequence[int]) -> float:
        """How long replies may take before they count as late."""
        expected_s = 0.0
        if self.selector is not None:
            expected_s = max(float(self.selector.peers.wait_s[host]) for host in called)
        return max(LATE_S, TIMES_EXPECTED * min(expected_s, self._deadline_s))

    def _without_late(
        self,
        layer: int,
        x: Tensor,
        expert_ids: Tensor,
        out: Tensor,
        deadline: float,
        called: Sequence[int],
        pending: Pending,
        outcomes: list[Outcome | None],
        split: Dispatched,
        slices: Slices | None,
    ) -> list[Outcome | None]:
        """Get along without the peers whose outcome is None, or wait for them. None where nothing is left to be taken.

        What their rows may spend goes to stand-ins that are here; what others hold as well is asked of them. A peer that
        was replaced so is not called again until it has greeted. One that nobody can replace is waited for.
        """
        late = [at for at, outcome in enumerate(outcomes) if outcome is None]
        pairs, offsets, num_columns = split.pairs.numpy(), split.offsets, expert_ids.shape[1]
        ids = expert_ids.numpy().reshape(-1)
        spared = self._late_stand_ins(layer, x, expert_ids, out, [called[at] for at in late], slices)
        others = self._hosts_without({self.host_names[called[at]] for at in late})[layer]
        found = list(outcomes)
        for at in late:
            host, link = called[at], self._links[called[at] - 1]
            slots = pairs[offsets[host] : offsets[host + 1]]
            slots = slots[~spared[slots]]
            if not len(slots):
                continue
            if (others[ids[slots]] > HERE).all():
                self._table[layer] = torch.from_numpy(others)
                hedged = torch.empty(len(slots), out.shape[1], device=out.device)
                rows = x[torch.from_numpy(slots // num_columns).long()].contiguous()
                wanted = torch.from_numpy(ids[slots]).view(-1, 1).contiguous()
                log.info("%s is late: what it was asked is asked of others", link.name)
                self.traffic[link.name].failures += 1
                part = _slices_of(slices, slots, as_lines=True)
                unfilled = self._run_once(layer, rows, wanted, hedged, deadline, slices=part)
                link.lose(f"{link.name} did not answer within {self._patience_s([host]):.2f} s")
                self._lost_s = self._clock.now()  # should the others be lost too, it is worth waiting for
                self._look_at_s = 0.0
                self._choose()
                if unfilled is None:
                    out[torch.from_numpy(slots).long()] = hedged
                    self._note_served(slots, others[ids[slots]], len(ids))
                    continue
            alone = pending._replace(channels=[pending.channels[at]], sent=[pending.sent[at]])
            (found[at],) = self._calls.receive(alone)
        return found

    def _hosts_without(self, names: Collection[str]) -> np.ndarray:
        """[L, E] whom to call for each expert if those peers are not called."""
        return self._hosts_of({link.name for link in self._links if link.usable} - set(names))

    def _late_stand_ins(
        self,
        layer: int,
        x: Tensor,
        expert_ids: Tensor,
        out: Tensor,
        late: Sequence[int],
        slices: Slices | None,
    ) -> np.ndarray:
        """[T*K] bool, slots of late peers that stand-ins here have served. Noted for `take_late`."""
        done = np.zeros(expert_ids.numel(), dtype=bool)
        asked, bank = self._asked, self._store.bank(layer)
        if (
            self.selector is None
            or asked is None
            or bank is None
            or asked.expert_ids.shape != expert_ids.shape
        ):
            return done
        now = self._clock.now()
        for host in late:
            self.selector.measured(host, self._patience_s([host]), now)
        slots = asked._replace(expert_ids=expert_ids.numpy().copy())
        choice = self.selector.choose_late(layer, slots, self._taken, late)
        if choice is None or (choice.kind == DROPPED).any():
            return done
        done = (choice.kind == STAND_IN).reshape(-1)
        at = np.flatnonzero(done)
        rows = torch.from_numpy((at // expert_ids.shape[1]).astype(np.int32))
        experts = torch.from_numpy(choice.expert_ids.reshape(-1)[at])
        _Landing(out).put(at, run_pairs(x, rows, experts, bank, _slices_of(slices, at)))
        self._note_served(at, HERE, len(done))
        self._late_choice = choice
        return done

    def _note_served(self, slots: np.ndarray, hosts: np.ndarray | int, num_slots: int) -> None:
        """Others than was meant served slots of the layer; retried slots are a step of their own, and not noted here."""
        if self._served_by is not None and self._served_by.size == num_slots:
            self._served_by.reshape(-1)[slots] = hosts

    def take_late(self) -> Choice | None:
        """What was swapped in the layer just run because replies were late; None if nothing was."""
        choice, self._late_choice = self._late_choice, None
        return choice

    def _measure(
        self,
        called: Sequence[int],
        outcomes: Sequence[Outcome | None],
        waits: Sequence[tuple[float, bool]],
    ) -> None:
        """Let the selector know how long the replies took, as far as each was waited for."""
        assert self.selector is not None
        now = self._clock.now()
        for host, outcome, (waited_s, is_bound) in zip(called, outcomes, waits, strict=True):
            if isinstance(outcome, Envelope):
                self.selector.measured(host, waited_s, now, is_bound=is_bound)

    def _send(
        self,
        layer: int,
        x: np.ndarray,
        called: Sequence[int],
        parts: Sequence[tuple[np.ndarray, ...]],
        deadline: float,
        num_parts: int,
    ) -> Pending:
        """One message per host: its rows of x, each once, and which expert, or which slices of it, a pair wants of a row.

        num_parts  0 for whole experts
        """
        tensors = [(x[rows], *pairs) for rows, *pairs in parts]
        call = SlicedCall(layer=layer, num_parts=num_parts) if num_parts else ExpertCall(layer=layer)
        for host, (rows, _, experts, *_masks) in zip(called, tensors, strict=True):
            traffic = self.traffic[self.host_names[host]]
            traffic.calls += 1
            traffic.rows += len(rows)
            traffic.pairs += len(experts)
            traffic.bytes_out += rows.nbytes + 2 * experts.nbytes
        # Half of what is left: a peer that hangs leaves the other half to a replica.
        ttl_s = max(0.0, deadline - self._clock.now()) / 2
        return self._calls.send(
            [self._links[host - 1].channel for host in called],
            [call] * len(called),
            tensors,
            epoch=self._epoch,
            ttl_s=ttl_s,
        )

    def _time(self, host: int, outcome: Outcome | None, sent_at: float) -> None:
        """Note the quickest call of a peer. Of several peers a reply may have come long before it is taken."""
        if isinstance(outcome, Envelope) and type(outcome.message) is ExpertReply:
            traffic = self.traffic[self.host_names[host]]
            traffic.least_s = min(traffic.least_s, self._clock.now() - sent_at - outcome.message.compute_s)

    def _take(
        self, host: int, outcome: Envelope | PeerError | Refusal, slots: np.ndarray, landing: "_Landing"
    ) -> bool:
        """Put a reply's rows where they belong; False if there is none to be used."""
        link, traffic = self._links[host - 1], self.traffic[self.host_names[host]]
        if isinstance(outcome, Envelope):
            fault = self._fault_of(outcome, link.name, len(slots), landing.width)
            if fault is None:
                outputs = outcome.tensors[0]
                landing.take(slots, outputs)
                traffic.bytes_in += outputs.nbytes
                self.times.peers_compute += outcome.message.compute_s  # type: ignore[attr-defined]
                return True
        else:
            fault = str(outcome)
        traffic.failures += 1
        link.lose(fault)
        self._lost_s = self._clock.now()
        return False

    def _fault_of(self, envelope: Envelope, peer: str, num_slots: int, width: int) -> str | None:
        if type(envelope.message) is not ExpertReply:
            return f"{peer} answered ExpertCall with {type(envelope.message).__name__}"
        outputs = envelope.tensors[0]
        if outputs.shape != (num_slots, width) or outputs.dtype != np.float32:
            return f"{peer} sent {outputs.dtype} {list(outputs.shape)}, expected float32 {[num_slots, width]}"
        # One sum instead of a look at each number: NaN and Inf survive it, and finite rows do not reach 1e38.
        if not math.isfinite(float(outputs.sum())) and not np.isfinite(outputs).all():
            return f"{peer} sent numbers that are not finite for layer {envelope.message.layer}"
        return None

    def _look(self) -> None:
        changed = [link for link in self._links if link.look()]
        if any(not link.usable for link in changed):
            self._lost_s = self._clock.now()
        if any(link.usable for link in changed):
            self._came = True
        if changed:
            self._choose()

    def _hosts_of(self, usable: Collection[str]) -> np.ndarray:
        num_layers, num_experts = self._shape
        return choose_hosts(
            self._hosts,
            home=self.host_names[0],
            alive=usable,
            num_layers=num_layers,
            num_experts=num_experts,
            peers=self.host_names,
        )

    def _choose(self) -> None:
        """Whom to call for each expert, from who is usable now."""
        table = self._hosts_of({link.name for link in self._links if link.usable})
        self._table_numpy = table
        self._table = [torch.from_numpy(line) for line in table]
        self._is_local = [bool((line == 0).all()) for line in table]
        self._whole = None
        if self.selector is not None:
            self.selector.placed(table)

    def _ungreeted(self) -> list[PeerLink]:
        """Peers that are said to serve, are not usable, and were never lost: they may come any moment."""
        alive = self.alive
        return [
            link for link in self._links if link.name in alive and not link.usable and not link.was_usable
        ]

    def _await_peers(self, deadline: float) -> bool:
        """Wait for a peer that was never reached yet. False when there is none or it did not come."""
        usable = sum(link.usable for link in self._links)
        until = min(deadline, self._clock.now() + GREET_PATIENCE_S)
        while self._ungreeted() and self._clock.now() < until:
            self._look()
            if sum(link.usable for link in self._links) > usable:
                return True
            self._clock.sleep(0.005)
        return False

    def _explain(self, layer: int, experts: Tensor) -> str:
        """Which node, which experts: what a person needs to know."""
        by_node: dict[str, list[int]] = {}
        for index in experts.unique().tolist():
            hosts = [
                name for name in self._hosts.get(ExpertId(layer, index), ()) if name != self.host_names[0]
            ]
            by_node.setdefault(" and ".join(hosts) or "no node", []).append(index)
        parts = []
        for node, indices in by_node.items():
            word = "expert" if len(indices) == 1 else "experts"
            parts.append(f"layer {layer} {word} {', '.join(map(str, indices))} on {node}")
        names = {name for node in by_node for name in node.split(" and ")}
        faults = "; ".join(link.fault for link in self._links if link.name in names and link.fault)
        return f"no living node holds {'; '.join(parts)}" + (f" ({faults})" if faults else "")


class _Landing:
    """Where the rows of a layer's slots arrive: those computed here, and those of peers, which a GPU is given in one piece."""

    def __init__(self, out: Tensor) -> None:
        self.width = out.shape[1]
        self._out = out
        self._rows = out.numpy() if out.is_cpu else None
        self._came: list[tuple[np.ndarray, np.ndarray]] = []

    def put(self, slots: np.ndarray, rows: Tensor) -> None:
        """Rows [n, D] that were computed here."""
        if self._rows is not None:
            self._rows[slots] = rows.numpy()
        else:
            self._out.index_copy_(0, on_device(torch.from_numpy(slots).long()), rows)

    def clear(self, slots: np.ndarray) -> None:
        """Zeros, until something comes."""
        if self._rows is not None:
            self._rows[slots] = 0.0
        else:
            self._out[torch.from_numpy(slots).long()] = 0.0

    def take(self, slots: np.ndarray, rows: np.ndarray) -> None:
        """A peer's rows [n, D]; on a GPU they are there after `close`."""
        if self._rows is not None:
            self._rows[slots] = rows
        else:
            self._came.append((slots, rows))

    def close(self) -> None:
        """Everything has come."""
        if self._came:
            slots = np.concatenate([slots for slots, _ in self._came])
            rows = on_device_as_one([rows for _, rows in self._came])
            self._out.index_copy_(0, on_device(torch.from_numpy(slots).long()), rows)


def _slices_of(slices: Slices | None, slots: np.ndarray, *, as_lines: bool = False) -> Slices | None:
    """The slices of some slots [n]; as n rows of one slot, or of none."""
    if slices is None:
        return None
    masks = slices.masks.reshape(-1)[torch.from_numpy(slots).long()]
    return slices._replace(masks=masks.view(-1, 1) if as_lines else masks)
