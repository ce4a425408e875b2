"""The requests whose home this node is: from Generate to a Request, and from outputs to messages.

Pure. Knows the tokenizer; no socket, no engine.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from edge_runtime.cache.block_pool import BLOCK_TOKENS
from edge_runtime.cache.prefix import pack_hashes, prompt_hashes
from edge_runtime.elastic.tiers import Elasticity, tier_of
from edge_runtime.engine.bill import Account
from edge_runtime.engine.engine import Ended, Output, PromptPart
from edge_runtime.engine.request import (
    FinishReason,
    Request,
    SamplingParams,
    check_exactness,
    check_params,
    check_prompt,
    encoder_prompt,
    read_params,
)
from edge_runtime.engine.step_books import WAYS
from edge_runtime.errors import RequestError
from edge_runtime.model import sampling
from edge_runtime.model.spec import EncoderSpec
from edge_runtime.model.tokenizer import Tokenizer
from edge_runtime.node.answers import AnswerStream
from edge_runtime.protocol import (
    Failed,
    Finished,
    Generate,
    Handoff,
    Prefilled,
    Prefilling,
    Served,
    StillRunning,
    Submit,
    Timing,
    TokenLogprobs,
    Tokens,
)

MOST_HASHES = 4096
"""Of a prompt's blocks that the coordinator is told of: 64 KiB, the most that it takes in one frame."""

HomeMessage = Tokens | Finished | Failed | Prefilled | Prefilling


def make_request(
    generate: Generate,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    context_tokens: int,
    now: float,
    encoder: EncoderSpec | None = None,
    elasticity: Elasticity | None = None,
) -> Request:
    """Tokenise and check. Raises RequestError with one sentence for whatever is the user's to mend.

    encoder  of an encoder-decoder model: the prompt is what it reads

    One that is only to be prefilled ends after its first token, and its choices of experts are counted.
    """
    given = [generate.prompt, generate.messages, generate.prompt_ids]
    if sum(part is not None for part in given) != 1:
        raise RequestError("a request has exactly one of prompt, messages and prompt_ids")
    texts = [generate.prompt or "", *(_content(message) for message in generate.messages or ())]
    tokenizer.refuse_hopeless(sum(map(len, texts)), context_tokens)
    if generate.prompt is not None:
        prompt_ids = tokenizer.encode(generate.prompt)
    elif generate.messages is not None:
        prompt_ids = tokenizer.encode_chat(generate.messages)
    else:
        prompt_ids = list(generate.prompt_ids or ())
    params = read_params(generate.sampling)
    check_params(params, vocab_size)
    tier = tier_of(elasticity, k=params.k, sub_experts=params.sub_experts, service=params.service)
    check_exactness(generate.sampling, params, tier)
    if params.seed is None:
        raise RequestError("a request needs a seed; the coordinator draws one where the client gives none")
    check_prompt(prompt_ids, vocab_size, context_tokens - (BLOCK_TOKENS if encoder else 0))
    if generate.output_ids and not 0 <= min(generate.output_ids) <= max(generate.output_ids) < vocab_size:
        raise RequestError(f"the answer so far has token ids outside 0 to {vocab_size - 1}")
    ledger = (0.0, 0.0)
    if generate.ledger:
        if len(generate.ledger) != 2 or not all(0 <= number < math.inf for number in generate.ledger):
            raise RequestError(
                f"the ledger so far is {generate.ledger}, expected what it holds and what was spent, both 0 or more"
            )
        ledger = (generate.ledger[0], generate.ledger[1])
    if generate.prefill_only:
        params = msgspec.structs.replace(params, max_tokens=1)
    encoder_tokens = 0
    if encoder is not None:
        encoder_tokens = len(prompt_ids)
        prompt_ids = encoder_prompt(prompt_ids, encoder.start_token_id)
    return Request(
        generate.request_id,
        prompt_ids,
        params,
        now,
        salt=generate.salt,
        output_ids=generate.output_ids,
        ledger=ledger,
        encoder_tokens=encoder_tokens,
        user=generate.user,
        trace=generate.trace,
        wants_counts=generate.prefill_only and encoder is None,
        tier=tier,
        is_handed_on=generate.prefill_only,
    )


def _content(message: Mapping[str, object]) -> str:
    """A message's text, as far as it is plain text."""
    content = message.get("content")
    return content if isinstance(content, str) else ""


def ended_by(
    output_ids: Sequence[int],
    params: SamplingParams,
    *,
    num_tokens: int,
    eos_ids: Collection[int],
    context_tokens: int,
) -> FinishReason | None:
    """Whether an answer's last token ended it, stop strings apart. num_tokens: of prompt and answer."""
    last = output_ids[-1]
    if last in params.stop_token_ids or (last in eos_ids and not params.ignore_eos):
        return "stop"
    if len(output_ids) >= params.max_tokens or num_tokens >= context_tokens:
        return "length"
    return None


@dataclass
class HomeRequest:
    """One request at its home, on its way to the client.

    stages   of its decode group, if there are several: where the layers of each begin, and its node
    handoff  what another node has done of it before
    goes_on  of a request that is only prefilled here: whether its answer goes on after the token it has, elsewhere
    """

    request: Request
    stream: AnswerStream
    node: str
    stopped: bool = False
    asked: Generate | None = None
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ended: Finished | Failed | None = None
    ended_s: float | None = None
    stages: Sequence[tuple[int, str]] = ()
    handoff: Handoff | None = None
    goes_on: Callable[[], bool] | None = None

    def resume(self, eos_ids: Collection[int], context_tokens: int, now: float) -> Ended | None:
        """Catch up with an answer that another home began. How it ended, if its last token was the end of it."""
        request = self.request
        for token_id in request.output_ids:
            self.text.append(self.stream.push(token_id))
        self.stopped = self.stream.stopped
        if not request.output_ids:
            return None
        reason: FinishReason | None = "stop"
        if not self.stopped:
            reason = ended_by(
                request.output_ids,
                request.params,
                num_tokens=len(request.tokens),
                eos_ids=eos_ids,
                context_tokens=context_tokens,
            )
        return Ended(request, reason, "", now) if reason else None

    def still_running(self) -> StillRunning:
        """What a coordinator that knows nothing of it has to know."""
        assert self.asked is not None, "a home knows what it was asked"
        fields = {name: getattr(self.asked, name) for name in Submit.__struct_fields__}
        num_tokens = self.stream.num_tokens
        return StillRunning(
            **(
                fields
                | {
                    "output_ids": self.request.output_ids[:num_tokens],
                    "ledger": list(self.request.ledger) if self.request.budget else [],
                }
            ),
            text="".join(self.text),
            logprobs=self.logprobs or None,
            ended=self.ended,
        )

    def take(self, output: Output) -> tuple[list[HomeMessage], bool]:
        """Turn one output into messages; the flag says that the engine should stop this request now."""
        if output.part is not None:
            return [Prefilling(self.request.request_id)], False
        messages: list[HomeMessage] = []
        abort = False
        if output.token_id is not None and not self.stopped:
            index = self.stream.num_tokens
            text = self.stream.push(output.token_id)
            self.stopped = self.stream.stopped
            abort = self.stopped and output.ended is None
            messages.append(self._tokens(index, output.token_id, output.logprobs, text))
        if output.ended is not None:
            messages += self._end(output.ended)
        for message in messages:
            if isinstance(message, Tokens):
                self.text.append(message.text)
                self.logprobs += message.logprobs or ()
            elif isinstance(message, Finished | Failed):
                self.ended = message
        return messages, abort

    def _slots(self, ended: Ended) -> dict[str, int]:
        """Expert slots of everybody who took part: a node that computed the prompt may have computed no expert of it."""
        worker = self.handoff.source.name if self.handoff is not None else ""
        return {self.node: 0} | ({worker: 0} if worker else {}) | dict(ended.slots)

    def _role(self, name: str) -> str:
        if name == self.node:
            return "home"
        if self.handoff is not None and name == self.handoff.source.name:
            return "prefill"
        return "stage" if any(name == node for _, node in self.stages) else "experts"

    def _runs(self, layer: int) -> str:
        """The node that runs a layer of it: its stage, else the home."""
        return next((node for first, node in reversed(self.stages) if first <= layer), self.node)

    def _trace(self, ended: Ended) -> list[dict[str, Any]] | None:
        if ended.trace is None:
            return None
        return [
            {"layer": entry["layer"], "node": self._runs(entry["layer"])} | entry for entry in ended.trace
        ]

    def _tokens(self, index: int, token_id: int, detail: sampling.TokenLogprobs | None, text: str) -> Tokens:
        logprobs = None
        if detail is not None:
            top = list(zip(detail.top_ids, detail.top_logprobs, strict=True))
            logprobs = [TokenLogprobs(token_id, detail.logprob, top)]
        ledger = list(self.request.ledger) if self.request.budget else []
        return Tokens(self.request.request_id, index, [token_id], text, logprobs, ledger)

    def _end(self, ended: Ended) -> list[HomeMessage]:
        request_id = self.request.request_id
        if ended.finish_reason == "error":
            if ended.is_users_fault:
                return [
                    Failed(request_id, "user", "request", ended.detail, node=self.node, option=ended.option)
                ]
            reason = "stage_lost" if ended.cause == "stage" else "experts"
            return [Failed(request_id, "cluster", reason, ended.detail, node=self.node)]
        messages: list[HomeMessage] = []
        is_cut = ended.finish_reason == "length" and not self.stopped
        if self.goes_on is not None and is_cut and self.goes_on():
            return [
                Prefilled(
                    request_id,
                    ended.request.num_prompt_tokens,
                    cached_tokens=ended.request.num_cached,
                    timing=_timing(ended, self.stream.num_tokens),
                    served=_served(ended.account),
                )
            ]
        rest = "" if self.stopped else self.stream.finish()
        if rest:
            messages.append(Tokens(request_id, self.stream.num_tokens, [], rest))
        reason = "stop" if self.stopped else ended.finish_reason
        weight = max(sum(ended.slots.values()), 1)
        messages.append(
            Finished(
                request_id=request_id,
                finish_reason=reason,
                prompt_tokens=ended.request.num_prompt_tokens,
                completion_tokens=self.stream.num_tokens,
                cached_tokens=self.handoff.cached_tokens if self.handoff else ended.request.num_cached,
                timing=_timing(ended, self.stream.num_tokens, self.handoff),
                nodes={
                    name: {
                        "role": self._role(name),
                        "expert_slots": slots,
                        "share": round(slots / weight, 6),
                    }
                    for name, slots in self._slots(ended).items()
                },
                bill=dict(ended.bill),
                trace=self._trace(ended),
            )
        )
        return messages


def prefilled_tensors(request: Request, part: PromptPart | None = None) -> tuple[np.ndarray, np.ndarray]:
    """What goes with Prefilled: counts and hashes; with Prefilling: those of a part."""
    if part is None:
        hashes = prompt_hashes(request.chain_seed, request.prompt_ids, request.block_hashes)
        part = PromptPart(request.prompt_counts, tuple(hashes))
    counts = part.counts if part.counts is not None else np.empty((0, 0), dtype=np.int16)
    return counts, pack_hashes(part.hashes[:MOST_HASHES])


def account_of(served: Served) -> Account | None:
    """What a request cost elsewhere; None if nothing usable is said."""
    found = _finite(served.served, (2, len(served.hosts)))
    if not served.hosts or found is None:
        return None
    traced = _finite(served.trace, (len(served.trace), 1 + len(WAYS)))
    trace = {int(row[0]): row[1:] for row in traced} if traced is not None else {}
    return Account(found, served.hosts, served.here, trace)


def _finite(numbers: Sequence[Sequence[float]], shape: tuple[int, int]) -> np.ndarray | None:
    """Numbers that a peer sent as an array; None if they are not so many, or not all finite."""
    if len(numbers) != shape[0] or any(len(row) != shape[1] for row in numbers):
        return None
    found = np.array(numbers, dtype=np.float64).reshape(shape)
    return found if np.isfinite(found).all() else None


def _served(account: Account | None) -> Served:
    if account is None:
        return Served()
    trace = [[float(layer), *weights.tolist()] for layer, weights in sorted(account.trace.items())]
    return Served(list(account.host_names), account.served.tolist(), account.here, trace)


def _timing(ended: Ended, num_tokens: int, handoff: Handoff | None = None) -> Timing:
    request, end_s = ended.request, ended.ended_s
    if (
        handoff is not None
    ):  # its first token came from elsewhere, and what followed began with its arrival here
        decode_s = max(0.0, end_s - request.arrival_s)
        tpot_s = decode_s / (num_tokens - 1) if num_tokens > 1 else 0.0
        return msgspec.structs.replace(handoff.timing, decode_s=decode_s, tpot_s=tpot_s)
    planned_s = request.first_planned_s if request.first_planned_s is not None else end_s
    first_s = request.first_token_s if request.first_token_s is not None else end_s
    decode_s = max(0.0, end_s - first_s)
    return Timing(
        queued_s=max(0.0, planned_s - request.arrival_s),
        prefill_s=max(0.0, first_s - planned_s),
        decode_s=decode_s,
        ttft_s=max(0.0, first_s - request.arrival_s),
        tpot_s=decode_s / (num_tokens - 1) if num_tokens > 1 else 0.0,
    )
