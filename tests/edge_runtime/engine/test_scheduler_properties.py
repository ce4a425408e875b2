"""Whatever is added, aborted, failed or abandoned, in any order: nothing is lost, doubled, leaked or starved."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_runtime.cache.block_pool import BLOCK_TOKENS, BlockPool
from edge_runtime.engine.plan import Finished, StepPlan
from edge_runtime.engine.request import Request, SamplingParams
from edge_runtime.engine.scheduler import Scheduler, SchedulerSettings
from edge_runtime.errors import RequestError

VOCAB = 8
EOS = 7


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a small scheduler and keeps its own account of every request.

    A fake of the KV memory holds, per block and offset, the prefix of tokens that was computed there. A row may
    only be computed if the blocks before it hold just its request's tokens: so a block that was given away too
    early, reused wrongly or not computed at all is seen at once.
    """

    @initialize(
        num_blocks=st.integers(5, 10),
        max_rows=st.integers(4, 40),
        max_running=st.integers(1, 4),
        context=st.integers(20, 120),
    )
    def build(self, num_blocks: int, max_rows: int, max_running: int, context: int) -> None:
        self.settings = SchedulerSettings(
            vocab_size=VOCAB,
            context_tokens=context,
            eos_ids=(EOS,),
            max_rows=max_rows,
            max_running=max_running,
            ageing_rows_per_s=10.0,
        )
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(self.settings, self.pool, model_hash="m", tokenizer_hash="t")
        self.now = 0.0
        self.memory: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        self.live: dict[str, Request] = {}
        self.ended: dict[str, Finished] = {}
        self.in_flight: list[tuple[StepPlan, dict[str, list[int]]]] = []  # with the block tables as planned
        self.num_added = 0

    # What happens.

    @rule(
        length=st.sampled_from([16, 32, 48]) | st.integers(1, 60),
        max_tokens=st.integers(1, 60),
        kind=st.integers(0, 2),
        salt=st.sampled_from(["", "other"]),
        early_s=st.floats(0, 3),
    )
    def add(self, length: int, max_tokens: int, kind: int, salt: str, early_s: float) -> None:
        name = f"r{self.num_added}"
        self.num_added += 1
        prompt = [(kind + i // 20) % 5 for i in range(length)]  # prompts of one kind share prefixes
        request = Request(name, prompt, SamplingParams(max_tokens=max_tokens), self.now - early_s, salt=salt)
        computed = min(length + max_tokens, self.settings.context_tokens) - 1
        fits = computed <= self.pool.num_blocks * BLOCK_TOKENS and length < self.settings.context_tokens
        try:
            self.scheduler.add(request)
        except RequestError:
            assert not fits
        else:
            assert fits
            self.live[name] = request

    @rule(turns=st.integers(1, 20), token=st.integers(0, VOCAB - 2))
    def go_on(self, turns: int, token: int) -> None:
        """Some steps in which nothing else happens; with a plan in flight besides, if there was one."""
        for _ in range(turns):
            self.begin_step()
            if self.in_flight:
                self.end_step(len(self.in_flight) - 1, token, None)

    @precondition(lambda self: self.in_flight)
    @rule(token=st.integers(0, VOCAB - 1), fail=st.booleans(), data=st.data())
    def end_one(self, token: int, fail: bool, data: st.DataObject) -> None:
        self.end_step(data.draw(st.integers(0, len(self.in_flight) - 1)), token, data if fail else None)

    @precondition(lambda self: len(self.in_flight) < 3)
    @rule()
    def begin_step(self) -> None:
        running = [request for request in self.live.values() if request.state == "running"]
        oldest = min(running, key=lambda request: request.age, default=None)
        preemptions = oldest.num_preemptions if oldest else 0
        plan = self.scheduler.plan_step(self.now)
        assert oldest is None or oldest.num_preemptions == preemptions, (
            "the oldest running request was preempted"
        )
        if plan is None:
            assert self.in_flight or not self.live, (
                "requests are there, no step is under way, and nothing is planned"
            )
            return
        assert 0 < plan.num_rows == sum(piece.count for piece in plan.slices) <= self.settings.max_rows
        names = [piece.request.request_id for piece in plan.slices]
        assert len(set(names)) == len(names)
        counts = [piece.count for piece in plan.slices if len(piece.request.tokens) - piece.start == 1]
        assert len(counts) <= self.settings.max_running
        tables = {}
        for piece in plan.slices:
            request = piece.request
            assert request.request_id in self.live and piece.count > 0
            assert piece.start == request.num_computed, "rows computed twice or left out"
            assert piece.samples == (piece.start + piece.count == len(request.tokens))
            assert piece.start + piece.count <= len(request.block_table) * BLOCK_TOKENS
            tables[request.request_id] = list(request.block_table)
        self.in_flight.append((plan, tables))

    def end_step(self, index: int, token: int, data: st.DataObject | None) -> None:
        plan, tables = self.in_flight.pop(index)
        self.compute(plan, tables)
        self.now += 0.1
        failed = {}
        if data is not None:
            piece = data.draw(st.sampled_from(plan.slices))
            failed = {piece.request.request_id: "its node is lost"}
        sampled = {piece.request.request_id: token for piece in plan.slices if piece.samples}
        for done in self.scheduler.complete(plan, sampled, self.now, failed=failed):
            self.take_in(done)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        plan, _ = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))
        self.scheduler.abandon(plan)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        done = self.scheduler.abort(name)
        assert done is not None and done.reason == "abort"
        self.take_in(done)
        assert self.scheduler.abort(name) is None

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    # What it means.

    def compute(self, plan: StepPlan, tables: dict[str, list[int]]) -> None:
        """Write the plan's rows into the fake memory, as a runner would, after looking at what they attend to."""
        for piece in plan.slices:
            table, request = tables[piece.request.request_id], piece.request
            tokens = request.tokens
            for position in range(piece.start):
                held = self.memory.get((table[position // BLOCK_TOKENS], position % BLOCK_TOKENS))
                assert held == (request.salt, tuple(tokens[: position + 1])), (
                    f"{request} reads foreign memory"
                )
            for position in range(piece.start, piece.start + piece.count):
                place = (table[position // BLOCK_TOKENS], position % BLOCK_TOKENS)
                self.memory[place] = (request.salt, tuple(tokens[: position + 1]))

    def take_in(self, done: Finished) -> None:
        name = done.request_id
        assert self.live.pop(name) is done.request and name not in self.ended
        self.ended[name] = done
        request = done.request
        output = request.output_ids
        assert request.tokens == request.prompt_ids + output
        full = len(output) == request.params.max_tokens or len(request.tokens) == self.settings.context_tokens
        if done.reason == "stop":
            assert output[-1] == EOS
        elif done.reason == "length":
            assert full and output[-1] != EOS
        elif done.reason == "error":
            assert done.error
        assert EOS not in output[:-1]

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        assert self.scheduler.num_running <= self.settings.max_running

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        # Without further arrivals all end, within as many steps as there are rows to compute at worst.
        most = sum(request.token_limit for request in self.live.values()) * (1 + len(self.live)) + 10
        for _ in range(most):
            if not self.live:
                break
            self.turn_without_choice()
            self.holds()
        assert not self.live, f"{list(self.live.values())} never ended"
        while self.in_flight:
            self.end_step(0, 0, None)
        self.holds()
        assert self.scheduler.is_idle and self.pool.num_free == self.pool.num_blocks
        assert self.scheduler.plan_step(self.now) is None

    def turn_without_choice(self) -> None:
        if len(self.in_flight) < 3:
            self.begin_step()
        if self.in_flight:
            self.end_step(0, 0, None)


TestAnyOrderOfEvents = SchedulerMachine.TestCase
TestAnyOrderOfEvents.settings = settings(stateful_step_count=60)
