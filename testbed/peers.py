"""Other engines on the same weights and the same work, for comparison. Reads an order in JSON, prints rates in JSON.

`transformers` is optional: it comes with the dev extras. One thread, float32, greedy, as our own path computes.
"""

import json
import sys

from edge_runtime.clock import SystemClock


def main() -> None:
    """Tokens per second of decode by batch size, one number per round: time of N tokens less time of one token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    order = json.load(sys.stdin)
    torch.set_num_threads(1)
    clock = SystemClock()
    tokenizer = AutoTokenizer.from_pretrained(order["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.float32).eval()
    prompts, max_tokens = order["prompts"], order["max_tokens"]
    rates: dict[int, list[float]] = {}
    for batch in order["streams"]:
        texts = [prompts[index % len(prompts)] for index in range(batch)]
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        for round_index in range(order["rounds"] + 1):
            seconds = []
            for num_tokens in (1, max_tokens):
                began = clock.now()
                with torch.no_grad():
                    model.generate(
                        **inputs,
                        max_new_tokens=num_tokens,
                        min_new_tokens=num_tokens,
                        do_sample=False,
                        pad_token_id=0,
                    )
                seconds.append(clock.now() - began)
            if round_index:  # the first warms up
                rates.setdefault(batch, []).append(batch * (max_tokens - 1) / (seconds[1] - seconds[0]))
    json.dump(rates, sys.stdout)


if __name__ == "__main__":
    main()
