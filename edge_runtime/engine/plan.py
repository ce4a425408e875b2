"""What one step of the engine will compute, as values. Made by the scheduler, carried out by the runner."""

import msgspec

from edge_runtime.engine.request import FinishReason, Request

# msgspec structs and not dataclasses: a frozen dataclass takes about 1 us to make, and a step has one per request.


class StepSlice(msgspec.Struct, frozen=True, gc=False):
    """Tokens `[start, start + count)` of one request, each one row of the step.

    samples  the last row's logits choose the request's next token; that token's position is `start + count`
    """

    request: Request
    start: int
    count: int
    samples: bool


class StepPlan(msgspec.Struct, frozen=True):
    """One step: its slices in row order, decode rows before prefill chunks. No request is in it twice."""

    slices: tuple[StepSlice, ...]
    num_rows: int
    step_index: int = 0


class Finished(msgspec.Struct, frozen=True):
    """A request that has left the scheduler, and why; `error` is a sentence if the reason is `error`."""

    request: Request
    reason: FinishReason
    error: str = ""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer, one that ended it included."""
        return len(self.request.output_ids)

    @property
    def cached_tokens(self) -> int:
        """Tokens that came from the cache instead of being computed."""
        return self.request.num_cached
