"""`transformers` generate: greedy, bfloat16 as stored, its own choice of attention and of how experts are run."""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from testbed.bench.peers.worker import Moment, Took, moment, serve


class _Stamps(LogitsProcessor):
    """Notes when each token's logits are there."""

    def __init__(self) -> None:
        self.at: list[Moment] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.at.append(moment())
        return scores


class TransformersRunner:
    """One model."""

    def __init__(self, order: dict[str, Any]) -> None:
        torch.set_num_threads(order["threads"])
        transformers.logging.set_verbosity_error()
        self._model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.bfloat16).eval()
        how = getattr(self._model.config, "_experts_implementation", None)
        self.facts = {
            "version": f"transformers {transformers.__version__}, torch {torch.__version__}, experts {how}"
        }

    def decode(self, prompts: list[list[int]], steps: int) -> Took:
        at = self._generate(torch.tensor(prompts), steps + 1)
        return Took(at[0], at[-1], len(prompts) * steps)

    def prefill(self, prompt: list[int]) -> Took:
        began = moment()
        return Took(began, self._generate(torch.tensor([prompt]), 1)[0], len(prompt))

    def _generate(self, ids: torch.Tensor, tokens: int) -> list[Moment]:
        stamps = _Stamps()
        with torch.inference_mode():
            self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([stamps]),
            )
        return stamps.at


if __name__ == "__main__":
    serve(TransformersRunner)
