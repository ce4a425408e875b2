"""vLLM on the CPU, eager, bfloat16, driven step by step in this process. Runs in an environment of its own."""

from typing import Any

from testbed.bench.peers.worker import Moment, Took, moment, serve


class VllmRunner:
    """One model. No prefix is ever reused, or a second prefill would cost nothing."""

    def __init__(self, order: dict[str, Any]) -> None:
        import torch
        import vllm  # type: ignore[import-not-found]

        torch.set_num_threads(order["threads"])
        self._llm = vllm.LLM(
            model=order["model"],
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=order["context_tokens"],
            max_num_seqs=order["max_requests"],
            max_num_batched_tokens=max(order["context_tokens"], 2048),
            enable_prefix_caching=False,
            disable_log_stats=True,
            skip_tokenizer_init=False,
            seed=0,
        )
        self._params = vllm.SamplingParams
        self._num_requests = 0
        self.facts = {"version": f"vllm {vllm.__version__}, torch {torch.__version__}"}

    def decode(self, prompts: list[list[int]], steps: int) -> Took:
        for prompt in prompts:
            self._add(prompt, steps + 1 + len(prompts))  # some more: not all start in the same step
        engine = self._llm.llm_engine
        have: dict[str, int] = {}
        began: Moment | None = None
        tokens = 0
        while True:
            before = sum(have.values())
            for output in engine.step():
                have[output.request_id] = len(output.outputs[0].token_ids)
            now = moment()
            if began is not None:
                tokens += sum(have.values()) - before
                if tokens >= steps * len(prompts):
                    break
            elif len(have) == len(prompts):
                began = now
        engine.abort_request(list(have))
        while engine.has_unfinished_requests():
            engine.step()
        return Took(began, now, tokens)

    def prefill(self, prompt: list[int]) -> Took:
        began = moment()
        self._add(prompt, 1)
        engine = self._llm.llm_engine
        while engine.has_unfinished_requests():
            engine.step()
        return Took(began, moment(), len(prompt))

    def _add(self, prompt: list[int], tokens: int) -> None:
        self._num_requests += 1
        params = self._params(temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
        self._llm.llm_engine.add_request(str(self._num_requests), {"prompt_token_ids": prompt}, params)


if __name__ == "__main__":
    serve(VllmRunner)
