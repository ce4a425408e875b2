"""Decide which rows of which requests the next step computes, and take in what came of it.

Continuous batching with chunked prefill over a paged KV cache. It knows no tensors, no clock (`now` is given),
no text and no machines: the daemon, the simulator and the tests drive the same object.

**Who gets rows.** A step has `max_rows` rows. Every running request that only waits for its next token gets one
row first. The rest are prefill rows: half of them go to the oldest request in prefill, the other half to those
with the fewest rows left, and what one side leaves the other takes (`share_rows`).

**Who gets a seat.** At most `max_running` requests run. Seats go in turn to the oldest waiting request and to the
shortest one. If the oldest lacks blocks, the shortest may pass it until `due_s = arrival_s + tokens /
ageing_rows_per_s`; from then on nobody is seated on its turn, so the blocks that come free add up for it.

So age and shortness each own half of the seats and half of the prefill rows, and no load of one kind can starve the
other. A request with A older ones waiting has a seat after at most 2(A + 1) seats were given, one with S shorter
ones after 2(S + 1); the oldest prompt in prefill takes about twice the steps at most that it would take alone beside
the same decodes. Seats come free in bounded time, since every answer is bounded by `max_tokens` and the context.

**Prefixes.** Full blocks that a completed step computed are found by later requests, and by those in prefill each
time they come to a block boundary. Of requests about to compute the same block only one does; the others wait for
that step.

**Blocks.** A request is seated when the blocks for all its tokens are there beside what the seated ones still
need, and takes them as its rows are planned. When a running request finds none, the youngest running one younger
than it is preempted: it gives back all blocks, waits again with its old age, and recomputes (or finds its blocks
still cached). The oldest running request is never preempted and fits alone, so there is always progress.

**Handed-on prompts.** A request that another engine goes on with leaves its prompt's last block findable though it is not
full; one that comes with a prompt computed elsewhere and all its blocks begins behind the prompt.

**Steps under way.** Several plans may be in flight (stages), each request in one at most. A request that ends
while a plan holds it keeps blocks and seat until that plan is completed or abandoned, so nobody else gets memory
that the step still writes or reads. Requests in flight are never preempted.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

import msgspec

from edge_runtime.cache.block_pool import BLOCK_MASK, BLOCK_SHIFT, BLOCK_TOKENS, BlockPool, blocks_for
from edge_runtime.cache.prefix import (
    chain_seed,
    encoder_seed,
    extend_hashes,
    prompt_hashes,
    reusable_blocks,
    tail_hash,
)
from edge_runtime.engine.plan import Finished, StepPlan, StepSlice
from edge_runtime.engine.request import FinishReason, Request, check_params, check_prompt
from edge_runtime.errors import ConfigError, Refusal, RequestError

_NO_FAILURES: Mapping[str, str] = {}


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the scheduler may use, and what the model is."""

    vocab_size: int
    """Token ids are 0 to vocab_size - 1."""
    context_tokens: int
    """Prompt and answer together; an answer ends with `length` there."""
    eos_ids: tuple[int, ...] = ()
    """Tokens with which the model ends an answer."""
    max_rows: int = 256
    """Rows (tokens) of a step at most; bounds how long a step takes."""
    max_running: int = 16
    """Requests that run at once; each has one row per step while decoding, so not above max_rows."""
    max_waiting: int = 4096
    """Requests that wait for a seat; one more is refused as `busy`."""
    ageing_rows_per_s: float = 1000.0
    """The oldest waiting request, if it lacks blocks, lets others past for one second per this many tokens it has."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= self.max_rows:
            raise ConfigError(
                f"max_running is {self.max_running}; allowed is 1 to max_rows, which is {self.max_rows}"
            )
        if self.context_tokens < 2:
            raise ConfigError(f"context_tokens is {self.context_tokens}; allowed is at least 2")
        if self.max_waiting < 1:
            raise ConfigError(f"max_waiting is {self.max_waiting}; allowed is at least 1")
        if not self.ageing_rows_per_s > 0:
            raise ConfigError(f"ageing_rows_per_s is {self.ageing_rows_per_s}; allowed is above 0")


def share_rows(needs: Sequence[int], rows: int, least: Sequence[int] = ()) -> list[int]:
    """Split `rows` prefill rows among requests that could use `needs`, given oldest first.

    The oldest gets half (rounded up, to whole blocks if rows are plenty), then those with the fewest rows left
    are served in full, older first among equals, and what is still over goes to the oldest. Nothing is left over
    while somebody could use it.

    least  rows that each can use at all: with fewer it gets none. The oldest gets at least those
    """
    shares = [0] * len(needs)
    if not needs:
        return shares
    least = least or shares
    half = (rows + 1) // 2
    if rows >= 4 * BLOCK_TOKENS:
        half = blocks_for(half) << BLOCK_SHIFT
    shares[0] = min(needs[0], max(half, least[0])) if least[0] <= rows else 0
    left = rows - shares[0]
    for index in sorted(range(1, len(needs)), key=needs.__getitem__):
        if left == 0:
            break
        if least[index] > left:
            continue
        shares[index] = min(needs[index], left)
        left -= shares[index]
    if least[0] <= rows:
        shares[0] += min(needs[0] - shares[0], left)
    return shares


class Scheduler:
    """Requests go in with `add`; `plan_step` and `complete` alternate; those that end come out as `Finished`."""

    def __init__(
        self, settings: SchedulerSettings, pool: BlockPool, *, model_hash: str, tokenizer_hash: str
    ) -> None:
        self.settings = settings
        self.pool = pool
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # tokens not computed because the cache had them
        self.is_draining = False
        self._model_hash = model_hash
        self._tokenizer_hash = tokenizer_hash
        self._eos_ids = frozenset(settings.eos_ids)
        self._requests: dict[str, Request] = {}  # waiting and running
        self._waiting: list[Request] = []  # oldest first
        self._waiting_by_length: list[Request] = []  # the same ones, shortest first
        self._is_shortest_turn = False  # else the next seat is for the oldest
        self._running: list[Request] = []  # oldest first
        self._ended_in_flight: dict[str, Request] = {}  # keep blocks and seat until their plan is done
        self._plans: dict[int, StepPlan] = {}  # in flight
        self._seats = list(range(settings.max_running - 1, -1, -1))  # free ones, lowest last
        self._num_added = 0
        self._num_planned = 0
        self._last_version = 0
        self._may_seat = False  # something changed since seating was last tried in vain

    # What it looks like from outside.

    @property
    def num_waiting(self) -> int:
        """Requests without a seat, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a seat that have not ended."""
        return len(self._running)

    @property
    def free_blocks(self) -> int:
        """Blocks that could be given away now, cached ones included."""
        return self.pool.num_free

    @property
    def is_idle(self) -> bool:
        """Nobody waits or runs, and no plan is in flight."""
        return not self._requests and not self._plans

    def get(self, request_id: str) -> Request | None:
        """The request, if it is waiting or running."""
        return self._requests.get(request_id)

    def requests(self) -> list[Request]:
        """Everything that waits or runs, oldest first."""
        return sorted(self._requests.values(), key=_age)

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Take in a request, or raise RequestError (its own fault) or Refusal (`busy`, `draining`)."""
        settings = self.settings
        check_prompt(request.prompt_ids, settings.vocab_size, settings.context_tokens)
        check_params(request.params, settings.vocab_size)
        if request.request_id in self._requests or request.request_id in self._ended_in_flight:
            raise RequestError(f"request id {request.request_id!r} is in use; choose another")
        limit = min(len(request.prompt_ids) + request.params.max_tokens, settings.context_tokens)
        if len(request.tokens) >= limit:
            raise RequestError(
                f"request {request.request_id!r} comes with {len(request.output_ids)} tokens of its answer, "
                f"which ends after {limit - len(request.prompt_ids)}"
            )
        needed = blocks_for(limit - 1)  # the last token is never computed
        if needed > self.pool.num_blocks:
            raise RequestError(
                f"prompt and answer of up to {limit} tokens need {needed} KV blocks of {BLOCK_TOKENS} tokens, but "
                f"this node has {self.pool.num_blocks} in all; shorten the prompt or max_tokens to "
                f"{self.pool.num_blocks * BLOCK_TOKENS + 1} tokens together",
                "prompt",
            )
        most = settings.max_rows - settings.max_running + 1  # others that decode have a row each
        if request.encoder_blocks * BLOCK_TOKENS > most:
            raise RequestError(
                f"the prompt has {request.encoder_tokens} tokens, which the encoder reads in one step of at most {most} "
                f"rows, in whole blocks of {BLOCK_TOKENS}; shorten the prompt or raise max_batch_rows",
                "prompt",
            )
        if self.is_draining:
            raise Refusal("draining", "this engine takes no new requests because it is stopping")
        if len(self._waiting) >= settings.max_waiting:
            raise Refusal("busy", f"{len(self._waiting)} requests wait already, as many as allowed", 1.0)
        self._num_added += 1
        request.age = (request.arrival_s, self._num_added)
        request.due_s = request.arrival_s + len(request.tokens) / settings.ageing_rows_per_s
        request.token_limit = limit
        request.stop_ids = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            request.stop_ids |= self._eos_ids
        request.chain_seed = self._seed_of(request)
        request.block_hashes = []
        self._requests[request.request_id] = request
        self._enqueue(request)

    def prompt_hashes(self, request: Request) -> list[bytes]:
        """Content hashes of the blocks of a request's prompt. Changes nothing: any thread may ask."""
        return prompt_hashes(self._seed_of(request), request.prompt_ids)

    def _seed_of(self, request: Request) -> bytes:
        seed = chain_seed(self._model_hash, self._tokenizer_hash, request.salt, request.exactness)
        if request.encoder_tokens:
            seed = encoder_seed(seed, request.prompt_ids[: request.encoder_tokens])
        return seed

    def abort(self, request_id: str) -> Finished | None:
        """End a request whose client is gone. None if it has ended already."""
        return self.finish(request_id, "abort")

    def finish(self, request_id: str, reason: FinishReason, *, error: str = "") -> Finished | None:
        """End a request for a reason found elsewhere: a stop string, a lost client, a lost node.

        Its blocks are free on return, or when the plan that holds it is completed; that plan's rows for it are
        computed and dropped. None if it has ended already.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.state == "waiting":
            self._dequeue(request)
        return self._end(request, reason, error)

    def drain(self) -> None:
        """Refuse new requests from now on; those in are served to their end (see `is_idle`)."""
        self.is_draining = True

    # Steps.

    def plan_step(self, now: float, most_decodes: int | None = None) -> StepPlan | None:
        """The next step, or None if nothing can be computed now (all idle, or all in plans in flight).

        most_decodes  requests that get their next token by it at most, oldest first; the others are left to the steps
                      after it, which stages work on at the same time. None: all
        """
        slices: list[StepSlice] = []
        prefills: list[Request] = []
        preemptions = self.num_preemptions
        for request in self._running:  # those preempted on the way leave the list behind the current one
            if request.in_flight:
                continue
            start = request.num_computed
            if len(request.tokens) - start > 1:
                prefills.append(request)
            elif most_decodes is not None and len(slices) >= most_decodes:
                continue
            elif (
                start >> BLOCK_SHIFT < len(request.block_table) or self._make_room(request, start + 1) > start
            ):
                slices.append(StepSlice(request, start, 1, True))
        rows_left = self.settings.max_rows - len(slices)
        if self._may_seat and rows_left and self.num_preemptions == preemptions:
            prefills += self._seat_waiting(now)
            prefills.sort(key=_age)
        if prefills and rows_left:
            self._plan_prefills(prefills, rows_left, slices)
            if self.num_preemptions != preemptions:  # an older prefill may have taken a planned one's blocks
                slices = [piece for piece in slices if piece.request.state == "running"]
        if not slices:
            return None
        num_rows = 0
        for piece in slices:
            piece.request.in_flight = True
            num_rows += piece.count
            if piece.request.first_planned_s is None:
                piece.request.first_planned_s = now
        self._num_planned += 1
        plan = StepPlan(tuple(slices), num_rows, self._num_planned)
        self._plans[plan.step_index] = plan
        return plan

    def complete(
        self,
        plan: StepPlan,
        token_of: Mapping[str, int],
        now: float,
        *,
        failed: Mapping[str, str] = _NO_FAILURES,
    ) -> list[Finished]:
        """Take in a computed step; returns the requests that ended with it.

        token_of  the chosen token of every request whose slice samples, by request id
        failed    requests whose rows could not be computed, with the sentence for their client. What they have
                  cached is forgotten, since nobody knows which of it is sound.
        """
        del self._plans[plan.step_index]
        finished: list[Finished] = []
        for piece in plan.slices:
            request = piece.request
            request.in_flight = False
            if request.state != "running":
                self._release_ended(request)
                continue
            if failed and request.request_id in failed:
                for block in request.block_table:
                    self.pool.forget(block)
                finished.append(self._end(request, "error", failed[request.request_id]))
                continue
            end = piece.start + piece.count
            request.num_computed = end
            if end >> BLOCK_SHIFT != piece.start >> BLOCK_SHIFT:
                self._register_full_blocks(request, piece.start, end)
            if not piece.samples:
                continue
            token = token_of[request.request_id]
            request.tokens.append(token)
            request.output_ids.append(token)
            if request.first_token_s is None:
                request.first_token_s = now
            if token in request.stop_ids:
                finished.append(self._end(request, "stop"))
            elif len(request.tokens) >= request.token_limit:
                if request.is_handed_on:
                    self._keep_tail(request)
                finished.append(self._end(request, "length"))
        return finished

    def abandon(self, plan: StepPlan) -> None:
        """The step did not happen (a node was lost on the way): its rows are planned again."""
        del self._plans[plan.step_index]
        for piece in plan.slices:
            piece.request.in_flight = False
            if piece.request.state != "running":
                self._release_ended(piece.request)

    def start_over(self) -> None:
        """What was computed is lost: no plan is in flight any more, and all that ran waits to be computed again."""
        for plan in list(self._plans.values()):
            self.abandon(plan)
        for request in list(self._running):
            self._preempt(request)
        self.pool.forget_all()

    # How it is done.

    def _enqueue(self, request: Request) -> None:
        request.state = "waiting"
        insort(self._waiting, request, key=_age)
        insort(self._waiting_by_length, request, key=_length)
        self._may_seat = True

    def _dequeue(self, request: Request) -> None:
        del self._waiting[bisect_left(self._waiting, _age(request), key=_age)]
        del self._waiting_by_length[bisect_left(self._waiting_by_length, _length(request), key=_length)]

    def _seat_waiting(self, now: float) -> list[Request]:
        """Seat waiting requests while seats and blocks last (rule: module docstring)."""
        seated: list[Request] = []
        promised = sum(
            max(0, blocks_for(len(request.tokens)) - len(request.block_table)) for request in self._running
        )
        while self._seats and self._waiting:
            request = self._waiting_by_length[0] if self._is_shortest_turn else self._waiting[0]
            took = self._seat(request, promised)
            if took is not None:
                self._is_shortest_turn = not self._is_shortest_turn
            elif self._is_shortest_turn or now >= request.due_s:
                break
            else:
                request = self._waiting_by_length[0]
                took = self._seat(request, promised)
                if took is None:
                    break
            self._dequeue(request)
            promised += took
            seated.append(request)
        # Without a seat, or blocks, it is pointless to look again before something ends, comes or is preempted.
        self._may_seat = False
        return seated

    def _seat(self, request: Request, promised: int) -> int | None:
        """Seat a request if its blocks are there; returns how many it will still take, None if they are not."""
        num_tokens = len(request.tokens)
        extend_hashes(request.block_hashes, request.chain_seed, request.tokens, num_tokens >> BLOCK_SHIFT)
        found = self._find(request, _reusable(request))
        left_free = self.pool.num_free - sum(self.pool.references(block) == 0 for block in found)
        needed = blocks_for(num_tokens) - len(found)
        # What was handed on is found here, or taken from the free ones as any block is: it needs one of them either way.
        # One block more per running request, so that their next tokens do not preempt the newcomer at once.
        if needed + promised + len(self._running) > left_free:
            return None
        request.state = "running"
        request.seat = self._seats.pop()
        self._take_found(request, found)
        needed -= self._take_tail(request)
        insort(self._running, request, key=_age)
        return needed

    def _find(self, request: Request, most: int) -> list[int]:
        """Cached blocks of what the request computes next, at most `most`; an encoder's are there all or not at all."""
        held = len(request.block_table)
        found = self.pool.match(request.block_hashes[held : held + max(0, most)], most)
        return found if held + len(found) >= request.encoder_blocks else []

    def _take_found(self, request: Request, found: Sequence[int]) -> None:
        self.pool.share(found)
        request.block_table += found
        request.num_computed = len(request.block_table) << BLOCK_SHIFT
        cached = len(found) << BLOCK_SHIFT
        if request.encoder_tokens and len(found) == len(request.block_table) > 0:
            cached -= (request.encoder_blocks << BLOCK_SHIFT) - request.encoder_tokens  # filler
        request.num_cached += cached
        self.num_cached_tokens += cached
        self._new_version(request)

    def _take_tail(self, request: Request) -> bool:
        """Go on in the last block of a prompt that another engine computed, if it is here and all before it are."""
        full, tail = divmod(len(request.prompt_ids), BLOCK_TOKENS)
        held = len(request.block_table)
        if not tail or held != full or not request.output_ids or request.wants_counts:
            return False
        parent = request.block_hashes[full - 1] if full else request.chain_seed
        block = self.pool.adopt(tail_hash(parent, request.prompt_ids[full << BLOCK_SHIFT :]))
        if block is None:
            return False
        request.block_table.append(block)
        request.num_computed = len(request.prompt_ids)
        request.num_cached += tail
        self.num_cached_tokens += tail
        self._new_version(request)
        return True

    def _keep_tail(self, request: Request) -> None:
        """Let the last block of its prompt be found, though it is not full: nobody writes in it after this request."""
        full, tail = divmod(len(request.prompt_ids), BLOCK_TOKENS)
        if tail and request.num_computed == len(request.prompt_ids):
            parent = request.block_hashes[full - 1] if full else request.chain_seed
            self.pool.register(
                request.block_table[full], tail_hash(parent, request.prompt_ids[full << BLOCK_SHIFT :])
            )

    def _plan_prefills(self, prefills: list[Request], rows: int, slices: list[StepSlice]) -> None:
        for request in prefills:  # others may have computed the next blocks since it was seated
            held = len(request.block_table)
            if request.num_computed == held << BLOCK_SHIFT:
                most = _reusable(request) - held
                found = self._find(request, most)
                if found:
                    self._take_found(request, found)
                    self._may_seat = True
        prefills = self._without_twins(prefills)
        least = [max(0, request.encoder_end - request.num_computed) for request in prefills]
        shares = share_rows([len(request.tokens) - request.num_computed for request in prefills], rows, least)
        for request, share in zip(prefills, shares, strict=True):
            if share == 0 or request.state != "running":
                continue
            start = request.num_computed
            end = start + share
            if request.wants_counts and start < len(request.prompt_ids) < end:
                end = len(request.prompt_ids)
            elif end < len(request.tokens) and end & ~BLOCK_MASK > start:
                end &= ~BLOCK_MASK  # end with a full block: it can be shared, and the next one found
            end = self._make_room(request, end)
            if end > start and end >= request.encoder_end:
                slices.append(StepSlice(request, start, end - start, end == len(request.tokens)))

    def _without_twins(self, prefills: list[Request]) -> list[Request]:
        """Leave out requests whose next block is computed by another one in this step, or by a step in flight.

        They find it in the cache when that step is completed: many prompts with one beginning compute it once.
        `prefills` and the answer are oldest first; among twins the one that `share_rows` serves first stays.
        """
        computing = {_next_block(request) for request in self._running if request.in_flight}
        computing.discard(None)
        if len(prefills) == 1 and not computing:
            return prefills
        oldest, *others = prefills
        others.sort(key=lambda request: len(request.tokens) - request.num_computed)
        staying = []
        for request in (oldest, *others):
            block = _next_block(request)
            could_wait = (
                request.num_computed & BLOCK_MASK == 0
                and request.num_computed >> BLOCK_SHIFT < _reusable(request)
            )
            if not (could_wait and block in computing):
                staying.append(request)
                if block is not None:
                    computing.add(block)
        staying.sort(key=_age)
        return staying

    def _make_room(self, request: Request, end: int) -> int:
        """Give the request blocks for its tokens up to `end`; returns up to where it has them."""
        table = request.block_table
        needed = blocks_for(end) - len(table)
        if needed > 0:
            while self.pool.num_free < needed and self._preempt_younger_than(request):
                pass
            needed = min(needed, self.pool.num_free)
            if needed:
                table += self.pool.allocate(needed)
                self._new_version(request)
        return min(end, len(table) << BLOCK_SHIFT)

    def _preempt_younger_than(self, request: Request) -> bool:
        for victim in reversed(self._running):
            if victim is request:
                return False
            if not victim.in_flight:
                self._preempt(victim)
                self.num_preemptions += 1
                return True
        return False

    def _preempt(self, victim: Request) -> None:
        """It gives back all blocks and waits again, with its old age."""
        self._running.remove(victim)
        self._release(victim)
        victim.num_computed = 0
        victim.num_preemptions += 1
        self._enqueue(victim)

    def _register_full_blocks(self, request: Request, start: int, end: int) -> None:
        full = end >> BLOCK_SHIFT
        extend_hashes(request.block_hashes, request.chain_seed, request.tokens, full)
        for index in range(start >> BLOCK_SHIFT, full):
            self.pool.register(request.block_table[index], request.block_hashes[index])

    def _end(self, request: Request, reason: FinishReason, error: str = "") -> Finished:
        was_running = request.state == "running"
        request.state = "finished"
        request.finish_reason = reason
        del self._requests[request.request_id]
        if was_running:
            self._running.remove(request)
            if request.in_flight:
                self._ended_in_flight[request.request_id] = request
            else:
                self._release(request)
        self._may_seat = True
        return Finished(request, reason, error)

    def _release_ended(self, request: Request) -> None:
        del self._ended_in_flight[request.request_id]
        self._release(request)

    def _release(self, request: Request) -> None:
        """Give back blocks and seat. The table is replaced, not emptied: a runner may still hold the old one."""
        self.pool.release(request.block_table)
        request.block_table = []
        self._seats.append(request.seat)
        request.seat = -1
        self._new_version(request)
        self._may_seat = True

    def _new_version(self, request: Request) -> None:
        self._last_version += 1
        request.version = self._last_version

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        holders = [*self._running, *self._ended_in_flight.values()]
        self.pool.check([request.block_table for request in holders])
        seats = [request.seat for request in holders]
        assert sorted(seats + self._seats) == list(range(self.settings.max_running)), (
            f"seats {seats}, {self._seats}"
        )
        assert self._running == sorted(self._running, key=_age), "running requests are out of order"
        assert self._waiting == sorted(self._waiting, key=_age), "waiting requests are out of order"
        assert self._waiting_by_length == sorted(self._waiting, key=_length), "the two queues differ"
        known = self._waiting + self._running
        assert len(known) == len(self._requests), "a request is lost, or in two places"
        assert all(self._requests[request.request_id] is request for request in known)
        planned = [piece.request for plan in self._plans.values() for piece in plan.slices]
        assert len({id(request) for request in planned}) == len(planned), "a request is in two plans"
        for request in self._waiting:
            assert request.state == "waiting" and not request.in_flight and request.seat == -1, request
            assert not request.block_table and request.num_computed == 0, request
        for request in self._running:
            assert request.state == "running", request
            assert request.num_computed < len(request.tokens) < request.token_limit, request
        for request in self._ended_in_flight.values():
            assert request.state == "finished" and request.in_flight, request
        for request in holders:
            assert request.in_flight == any(request is other for other in planned), request
            assert request.num_computed <= len(request.block_table) << BLOCK_SHIFT, request
            assert request.tokens == request.prompt_ids + request.output_ids, request
            for block in request.block_table[request.num_computed >> BLOCK_SHIFT :]:
                assert self.pool.references(block) == 1, f"{request} writes block {block}, which others use"
                assert self.pool.hash_of(block) is None, f"{request} writes block {block}, which can be found"


def _reusable(request: Request) -> int:
    """How many of its leading blocks may come from the cache."""
    most = reusable_blocks(len(request.tokens))
    return min(most, reusable_blocks(len(request.prompt_ids))) if request.wants_counts else most


def _next_block(request: Request) -> bytes | None:
    """The hash of the block that the request computes next, None if it is not a full one yet."""
    index = request.num_computed >> BLOCK_SHIFT
    return request.block_hashes[index] if index < len(request.block_hashes) else None


def _age(request: Request) -> tuple[float, int]:
    return request.age


def _length(request: Request) -> tuple[int, tuple[float, int]]:
    return len(request.tokens), request.age
