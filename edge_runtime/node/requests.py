"""The requests whose home this node is: from Generate to a Request, and from outputs to messages.

Pure. Knows the tokenizer; no socket, no engine.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from edge_runtime.cache.block_pool import BLOCK_TOKENS
from edge_runtime.engine.engine import Ended, Output
from edge_runtime.engine.request import (
    FinishReason,
    Request,
    check_params,
    check_prompt,
    encoder_prompt,
    read_params,
)
from edge_runtime.errors import RequestError
from edge_runtime.model import sampling
from edge_runtime.model.spec import EncoderSpec
from edge_runtime.model.tokenizer import Tokenizer
from edge_runtime.node.answers import AnswerStream
from edge_runtime.protocol import Failed, Finished, Generate, Timing, TokenLogprobs, Tokens


def make_request(
    generate: Generate,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    context_tokens: int,
    now: float,
    encoder: EncoderSpec | None = None,
) -> Request:
    """Tokenise and check. Raises RequestError with one sentence for whatever is the user's to mend.

    encoder  of an encoder-decoder model: the prompt is what it reads
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
    if params.seed is None:
        raise RequestError("a request needs a seed; the coordinator draws one where the client gives none")
    check_prompt(prompt_ids, vocab_size, context_tokens - (BLOCK_TOKENS if encoder else 0))
    if generate.output_ids and not 0 <= min(generate.output_ids) <= max(generate.output_ids) < vocab_size:
        raise RequestError(f"the answer so far has token ids outside 0 to {vocab_size - 1}")
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
        encoder_tokens=encoder_tokens,
        user=generate.user,
        trace=generate.trace,
    )


def _content(message: Mapping[str, object]) -> str:
    """A message's text, as far as it is plain text."""
    content = message.get("content")
    return content if isinstance(content, str) else ""


@dataclass
class HomeRequest:
    """One request at its home, on its way to the client. stages: nodes of its decode group, if there are several."""

    request: Request
    stream: AnswerStream
    node: str
    stopped: bool = False
    stages: Sequence[str] = ()

    def resume(self, eos_ids: Collection[int], context_tokens: int, now: float) -> Ended | None:
        """Catch up with an answer that another home began. How it ended, if its last token was the end of it."""
        request = self.request
        for token_id in request.output_ids:
            self.stream.push(token_id)
        self.stopped = self.stream.stopped
        if not request.output_ids:
            return None
        params, last = request.params, request.output_ids[-1]
        reason: FinishReason | None = None
        if self.stopped or last in params.stop_token_ids or (last in eos_ids and not params.ignore_eos):
            reason = "stop"
        elif len(request.output_ids) >= params.max_tokens or len(request.tokens) >= context_tokens:
            reason = "length"
        return Ended(request, reason, "", now) if reason else None

    def take(self, output: Output) -> tuple[list[Tokens | Finished | Failed], bool]:
        """Turn one output into messages; the flag says that the engine should stop this request now."""
        messages: list[Tokens | Finished | Failed] = []
        abort = False
        if output.token_id is not None and not self.stopped:
            index = self.stream.num_tokens
            text = self.stream.push(output.token_id)
            self.stopped = self.stream.stopped
            abort = self.stopped and output.ended is None
            messages.append(self._tokens(index, output.token_id, output.logprobs, text))
        if output.ended is not None:
            messages += self._end(output.ended)
        return messages, abort

    def _role(self, name: str) -> str:
        if name == self.node:
            return "home"
        return "stage" if name in self.stages else "experts"

    def _tokens(self, index: int, token_id: int, detail: sampling.TokenLogprobs | None, text: str) -> Tokens:
        logprobs = None
        if detail is not None:
            top = list(zip(detail.top_ids, detail.top_logprobs, strict=True))
            logprobs = [TokenLogprobs(token_id, detail.logprob, top)]
        return Tokens(self.request.request_id, index, [token_id], text, logprobs)

    def _end(self, ended: Ended) -> list[Tokens | Finished | Failed]:
        request_id = self.request.request_id
        if ended.finish_reason == "error":
            if ended.is_users_fault:
                return [Failed(request_id, "user", "request", ended.detail, node=self.node)]
            reason = "stage_lost" if ended.cause == "stage" else "experts"
            return [Failed(request_id, "cluster", reason, ended.detail, node=self.node)]
        messages: list[Tokens | Finished | Failed] = []
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
                cached_tokens=ended.request.num_cached,
                timing=_timing(ended, self.stream.num_tokens),
                nodes={
                    name: {
                        "role": self._role(name),
                        "expert_slots": slots,
                        "share": round(slots / weight, 6),
                    }
                    for name, slots in ({self.node: 0} | dict(ended.slots)).items()
                },
                bill=dict(ended.bill),
                trace=ended.trace,
            )
        )
        return messages


def _timing(ended: Ended, num_tokens: int) -> Timing:
    request, end_s = ended.request, ended.ended_s
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
