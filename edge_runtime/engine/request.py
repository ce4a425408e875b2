"""A request: what was asked, what has been answered, and where it stands.

Checks what the user may ask for. It knows no scheduler: the fields marked so are written by the scheduler alone.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from edge_runtime.cache.block_pool import BLOCK_TOKENS, blocks_for
from edge_runtime.elastic.tiers import SERVICE_LEVELS
from edge_runtime.errors import RequestError
from edge_runtime.selector.budget import budget_of

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
TIER_OPTIONS = ("k", "sub_experts", "service")
ANY_VOCABULARY = 2**31  # what the model's is, its node knows: token ids are checked there again
LONGEST_NUMBER = 2**63 - 1  # that can be sent
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1

_LARGEST = sys.float_info.max
_TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "null": "nothing",
}

State = Literal["waiting", "running", "finished"]
FinishReason = Literal["stop", "length", "error", "abort"]


class SamplingParams(msgspec.Struct, frozen=True):
    """How to choose tokens and when to stop. `check_params` says what is allowed."""

    max_tokens: int = 128
    """Tokens to generate at most; the context may end the answer earlier."""
    temperature: float = 0.0
    """0 takes the best token; larger is more random."""
    top_k: int = 0
    """Choose among the k best tokens; 0 means all."""
    top_p: float = 1.0
    """Choose among the best tokens that together have this probability; 1 means all."""
    min_p: float = 0.0
    """Leave out tokens less probable than this share of the best one's probability; 0 means none."""
    repetition_penalty: float = 1.0
    """Above 1, tokens seen in prompt and answer become less likely; 1 changes nothing."""
    seed: int | None = None
    """With the token's position it determines every random choice. None: whoever creates the request draws one."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer and are not part of it. Found by the detokeniser, not by the scheduler."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, besides the model's own."""
    ignore_eos: bool = False
    """Go on past the model's own end tokens."""
    logprobs: int | None = None
    """Report the log probability of each token, and of this many best ones; None reports nothing."""
    quality: float | str = "exact"
    """How far a token may be off for being quicker: `exact`, `balanced`, `fast`, or a mean relative loss per token."""
    k: float | None = None
    """Experts per token, in fractions of sub-experts; None for as many as the model was trained with."""
    sub_experts: int | None = None
    """The same, counted in sub-experts."""
    service: str | None = None
    """The same, by name: `full`, `half` or `economy`."""


def read_params(fields: Mapping[str, object]) -> SamplingParams:
    """Turn named options, say from a line of JSON, into SamplingParams; `check_params` comes after."""
    known = SamplingParams.__struct_fields__
    for name in fields:
        if name not in known:
            raise RequestError(f"unknown option {name!r}; the options are {', '.join(known)}", name)
    try:
        return msgspec.convert(fields, SamplingParams)
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at `$.")  # msgspec's words for what it expected, and where
        name = re.split(r"\W", path)[0]
        expected = said.partition(", got")[0].removeprefix("Expected ").replace("`", "")
        words = [_TYPE_WORDS.get(kind, kind) for kind in expected.split(" | ")]
        raise _refused(name, fields.get(name), " or ".join(words)) from error


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Refuse options outside their range; the message has name, value and range."""
    _whole("max_tokens", params.max_tokens, 1, None)
    _number("temperature", params.temperature, ">= 0", lambda x: x >= 0)
    _whole("top_k", params.top_k, 0, None)
    _number("top_p", params.top_p, "above 0 and at most 1", lambda x: 0 < x <= 1)
    _number("min_p", params.min_p, "between 0 and 1", lambda x: 0 <= x <= 1)
    _number("repetition_penalty", params.repetition_penalty, "above 0", lambda x: x > 0)
    if params.seed is not None:
        _whole("seed", params.seed, SEED_MIN, SEED_MAX)
    if params.logprobs is not None:
        _whole("logprobs", params.logprobs, 0, MAX_LOGPROBS)
    if params.k is not None:
        _number("k", params.k, "above 0", lambda x: x > 0)
    if params.sub_experts is not None:
        _whole("sub_experts", params.sub_experts, 1, None)
    if params.service is not None and params.service not in SERVICE_LEVELS:
        raise _refused("service", params.service, f"one of {', '.join(SERVICE_LEVELS)}")
    given = [name for name in TIER_OPTIONS if getattr(params, name) is not None]
    if len(given) > 1:
        raise RequestError(
            f"a request says one of {', '.join(TIER_OPTIONS)}, found {', '.join(given)}", given[1]
        )
    if not isinstance(params.ignore_eos, bool):
        raise _refused("ignore_eos", params.ignore_eos, "true or false")
    try:
        budget_of(params.quality)
    except ValueError as error:
        raise _refused("quality", params.quality, str(error)) from error
    _few("stop", params.stop, MAX_STOP_STRINGS)
    for text in params.stop:
        if not isinstance(text, str) or not text:
            raise _refused("stop", text, "a string of at least one character")
    _few("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS)
    for token in params.stop_token_ids:
        _whole("stop_token_ids", token, 0, vocab_size - 1)


def check_options(fields: Mapping[str, object]) -> None:
    """Refuse what every node would, near whoever asks: of no vocabulary yet, and no number that cannot be sent."""
    params = read_params(fields)
    check_params(params, ANY_VOCABULARY)
    for name in ("max_tokens", "top_k", "sub_experts"):
        if (getattr(params, name) or 0) > LONGEST_NUMBER:
            raise RequestError(f"{name} is too large; allowed is at most {LONGEST_NUMBER}", name)


def check_prompt(prompt_ids: Sequence[int], vocab_size: int, context_tokens: int) -> None:
    """Refuse a prompt that is empty, leaves no room for one token, or has ids the model does not know."""
    if not prompt_ids:
        raise RequestError("the prompt is empty; it must have at least 1 token", "prompt")
    if len(prompt_ids) + 1 > context_tokens:
        raise RequestError(
            f"the prompt has {len(prompt_ids)} tokens but the context holds {context_tokens}, "
            f"of which 1 is needed for the answer; shorten the prompt to {context_tokens - 1} tokens",
            "prompt",
        )
    lowest, highest = min(prompt_ids), max(prompt_ids)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise RequestError(f"the prompt has token id {wrong}; allowed are 0 to {vocab_size - 1}", "prompt")


def check_exactness(fields: Mapping[str, object], params: SamplingParams, tier: int) -> None:
    """Refuse who asks for exact answers in so many words, and for a tier that leaves something out.

    fields  the options that were given; tier: what those mean, 0 for the whole model
    """
    if tier and fields.get("quality") is not None and not budget_of(params.quality):
        asked = next(name for name in TIER_OPTIONS if getattr(params, name) is not None)
        raise RequestError(
            f"quality is {params.quality!r}, but {asked} is {getattr(params, asked)}, which leaves part of the model out; "
            "give one of both",
            "quality",
        )


def exactness_of(params: SamplingParams, tier: int = 0) -> str:
    """What the KV of an answer depends on besides its tokens: `exact`, or the budget of the stand-ins in it and its tier."""
    budget = budget_of(params.quality)
    parts = [f"budget {budget:g}"] * bool(budget) + [f"K {tier}"] * bool(tier)
    return ", ".join(parts) or "exact"


def encoder_prompt(input_ids: Sequence[int], start_token_id: int) -> list[int]:
    """The prompt of a request to an encoder-decoder: the encoder's input, filler up to a whole block, the start token.

    So the decoder's first block is its own, and the encoder's blocks can be shared by all who ask the same.
    """
    filler = [start_token_id] * (-len(input_ids) % BLOCK_TOKENS)
    return [*input_ids, *filler, start_token_id]


def _refused(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{name} is {value!r:.80}; allowed is {allowed}", name)


def _whole(name: str, value: object, low: int, high: int | None) -> None:
    allowed = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise _refused(name, value, allowed)
    if value < low or (high is not None and value > high):
        raise _refused(name, value, allowed)


def _number(name: str, value: object, allowed: str, holds: Callable[[float], bool]) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -_LARGEST <= value <= _LARGEST or not holds(value):  # type: ignore[operator, arg-type]
        raise _refused(name, value, f"a finite number {allowed}")


def _few(name: str, values: object, most: int) -> None:
    if not isinstance(values, tuple | list):
        raise _refused(name, values, "a list")
    if len(values) > most:
        raise RequestError(f"{name} has {len(values)} entries; allowed are at most {most}", name)


class Request:
    """One prompt on its way to an answer.

    tokens        prompt and output so far, one list that only grows; do not change it
    output_ids    the output alone; a token that ended the answer (end token, stop id) is its last element
    num_computed  leading tokens whose KV stands in `block_table`, by completed steps (or from the cache)
    block_table   block of each 16 tokens; while `version` is unchanged so is the table
    version       new, and never used before, whenever `block_table` changes or another request takes the seat
    seat          0..max_running-1 while running, else -1; nobody else has it meanwhile

    How a runner follows the tables without rebuilding them: keep one int32 matrix [max_running, M], M =
    blocks_for(context_tokens), and per seat the version last copied. For each slice of a plan, if
    `versions[request.seat] != request.version`, copy `block_table` into the front of row `seat` and note the
    version. The matrix is the attention's `block_tables`, a row's seat its `row_request`. A decoding request
    changes its version once in 16 tokens.

    encoder_tokens  of an encoder-decoder model: leading tokens of the prompt that the encoder reads, all in one step.
                    The prompt is what `encoder_prompt` makes of them; 0 for models without encoder

    wants_counts    `prompt_counts` [L, E] is to say which experts the prompt's tokens chose, once it has been computed. Until
                    then no step goes across the prompt's end, and nothing behind it is taken from the cache

    is_handed_on    another engine goes on with it after its first token: its prompt's last block, which may not be full, is
                    kept for that one

    budget        mean relative loss per token that it may spend; 0: it is exact
    exactness     how its KV is computed; whoever asks for more never finds its blocks. None for `exactness_of`
    user          whose ledger it spends from; empty for one of its own
    trace         whether its bill tells of each layer
    ledger        what its own ledger holds, and what it has spent so far: of one that moves here, as its last home said

    A request that moves here from another engine comes with the `output_ids` it has so far.
    `arrival_s` is a moment on the clock whose `now` the scheduler gets.
    """

    __slots__ = (
        "age",
        "arrival_s",
        "block_hashes",
        "block_table",
        "budget",
        "chain_seed",
        "due_s",
        "encoder_blocks",
        "encoder_end",
        "encoder_tokens",
        "exactness",
        "finish_reason",
        "first_planned_s",
        "first_token_s",
        "in_flight",
        "is_handed_on",
        "ledger",
        "num_cached",
        "num_computed",
        "num_preemptions",
        "output_ids",
        "params",
        "prompt_counts",
        "prompt_ids",
        "request_id",
        "salt",
        "seat",
        "state",
        "stop_ids",
        "tier",
        "token_limit",
        "tokens",
        "trace",
        "user",
        "version",
        "wants_counts",
    )

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        arrival_s: float,
        *,
        salt: str = "",
        exactness: str | None = None,
        output_ids: Sequence[int] = (),
        encoder_tokens: int = 0,
        wants_counts: bool = False,
        user: str = "",
        trace: bool = False,
        tier: int = 0,
        is_handed_on: bool = False,
        ledger: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.request_id = request_id
        self.prompt_ids = list(prompt_ids)
        self.params = params
        self.arrival_s = arrival_s
        self.salt = salt
        self.budget = budget_of(params.quality)
        self.exactness = exactness_of(params, tier) if exactness is None else exactness
        self.user = user
        self.trace = trace
        self.ledger = ledger
        self.output_ids = list(output_ids)
        self.encoder_tokens = encoder_tokens
        self.encoder_blocks = blocks_for(encoder_tokens)
        self.wants_counts = wants_counts
        self.is_handed_on = is_handed_on
        self.tier = tier
        self.prompt_counts: np.ndarray | None = None
        self.encoder_end = self.encoder_blocks * BLOCK_TOKENS  # where the decoder's tokens begin
        self.tokens = [*self.prompt_ids, *self.output_ids]
        # All that follows is the scheduler's.
        self.num_computed = 0
        self.num_cached = 0  # prompt tokens not computed because the cache had them
        self.block_table: list[int] = []
        self.version = 0
        self.seat = -1
        self.state: State = "waiting"
        self.in_flight = False  # part of a plan that is not completed
        self.finish_reason: FinishReason | None = None
        self.first_planned_s: float | None = None
        self.first_token_s: float | None = None
        self.num_preemptions = 0
        self.age = (arrival_s, 0)  # smaller is older
        self.due_s = arrival_s
        self.token_limit = 0  # tokens (prompt and output) at which it ends with `length`
        self.stop_ids: frozenset[int] = frozenset()
        self.chain_seed = b""
        self.block_hashes: list[bytes] = []

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens the user gave."""
        return self.encoder_tokens or len(self.prompt_ids)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state}, {len(self.prompt_ids)} prompt + {len(self.output_ids)} "
            f"output tokens, {self.num_computed} computed, {len(self.block_table)} blocks)"
        )
