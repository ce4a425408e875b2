"""Encoder-decoder models for tests: tiny random checkpoints, transformers' answers, and our model on a few sequences."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edge_runtime.cache.pages import KVPages
from edge_runtime.engine.request import encoder_prompt
from edge_runtime.model.attention import AttentionBatch
from edge_runtime.model.build import load_experts, load_trunk
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.encoder_decoder import EncoderDecoder, TwoHalves, two_halves
from edge_runtime.model.moe import LocalExperts
from tests.support.decoders import BLOCK, all_experts
from tests.support.tiny_models import quiet_transformers, randomise

TINY_SWITCH = {
    "vocab_size": 512,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_heads": 4,
    "num_layers": 3,
    "num_decoder_layers": 4,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 2,
    "num_experts": 8,
    "relative_attention_max_distance": 24,
    "decoder_start_token_id": 0,
    "eos_token_id": 2,
}
START = 0


def write_tiny_switch(
    folder: Path,
    *,
    num_shards: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    **config: Any,
) -> Path:
    """A random model: width 64, 3 encoder and 4 decoder layers, every second of these with 8 experts, vocabulary 512.

    Queries are small as the family's are, since its scores are not scaled.
    """
    import transformers

    with quiet_transformers():
        keys = TINY_SWITCH | config
        model = transformers.SwitchTransformersForConditionalGeneration(
            transformers.SwitchTransformersConfig(**keys)
        )
        randomise(model, seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("Attention.q.weight"):
                    parameter.mul_(keys["d_kv"] ** -0.5)
        model = model.to(dtype)
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        model.save_pretrained(
            folder, max_shard_size=num_bytes + 1 if num_shards == 1 else num_bytes * 6 // 10
        )
    return folder


class Seq2SeqReference:
    """transformers on the same weights: float32, eager attention."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForSeq2SeqLM

        with quiet_transformers():
            self.model = AutoModelForSeq2SeqLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            ).eval()

    def encoded(self, input_ids: Sequence[int]) -> Tensor:
        """[S, D] float32, what the encoder gives."""
        with torch.no_grad():
            return self.model.encoder(input_ids=torch.tensor([list(input_ids)])).last_hidden_state[0]

    def logits(self, input_ids: Sequence[int], answer_ids: Sequence[int]) -> Tensor:
        """[1 + answer, V] float32: the start token's and each answer token's logits of the next one, in one call."""
        decoder_ids = torch.tensor([[START, *answer_ids]])
        with torch.no_grad():
            return self.model(
                input_ids=torch.tensor([list(input_ids)]), decoder_input_ids=decoder_ids
            ).logits[0]

    def step_logits(self, input_ids: Sequence[int], answer_ids: Sequence[int]) -> Tensor:
        """The same token by token with transformers' cache, as it generates."""
        found, cache = [], None
        with torch.no_grad():
            encoded = self.model.encoder(input_ids=torch.tensor([list(input_ids)]))
            for token in (START, *answer_ids):
                given = self.model(
                    encoder_outputs=encoded,
                    decoder_input_ids=torch.tensor([[token]]),
                    cache=cache,
                    use_cache=True,
                )
                cache = given.cache
                found.append(given.logits[0, 0])
        return torch.stack(found)

    def greedy(self, input_ids: Sequence[int], num_tokens: int) -> list[int]:
        """What `generate` answers, end tokens ignored."""
        with quiet_transformers():
            answer = self.model.generate(
                torch.tensor([list(input_ids)]),
                attention_mask=torch.ones(1, len(input_ids), dtype=torch.int64),
                do_sample=False,
                num_beams=1,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                decoder_start_token_id=START,
                eos_token_id=None,
            )
        return answer[0, 1:].tolist()


class Pairs:
    """Up to `num_sequences` pairs of input and answer on the whole model, in one stage or more; see Sequences."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        num_sequences: int = 1,
        context_tokens: int = 160,
        max_rows: int = 320,
        cuts: Sequence[int] = (),
    ) -> None:
        spec = checkpoint.spec
        self.port = LocalExperts(load_experts(checkpoint, spec, all_experts(spec)))
        blocks_each = -(-context_tokens // BLOCK)
        num_blocks = blocks_each * num_sequences
        tables = torch.arange(num_blocks, dtype=torch.int32).flip(0).view(blocks_each, num_sequences).T
        self.block_tables = tables.contiguous()
        self.tokens: list[list[int]] = [[] for _ in range(num_sequences)]
        self.computed = [0] * num_sequences
        self.encoder_tokens = [1] * num_sequences
        self.decoders = []
        for first, last in pairwise([0, *cuts, spec.num_layers]):
            trunk = load_trunk(checkpoint, spec, first, last, context_tokens=context_tokens)
            pages = KVPages(num_blocks, spec.kv_shapes(first, last))
            self.decoders.append(EncoderDecoder(spec, trunk, pages, max_rows=max_rows))

    def begin(self, sequence: int, input_ids: Sequence[int], answer_ids: Sequence[int] = ()) -> int:
        """Give a sequence its input and the beginning of its answer; how many rows of it are not computed yet."""
        self.tokens[sequence] = [*encoder_prompt(input_ids, START), *answer_ids]
        self.computed[sequence], self.encoder_tokens[sequence] = 0, len(input_ids)
        return len(self.tokens[sequence])

    def place(self, pieces: Sequence[tuple[int, int]]) -> tuple[Tensor, TwoHalves]:
        """Token ids and places of the next rows of some sequences: pieces are (sequence, count)."""
        ids, positions, slots, requests = [], [], [], []
        for sequence, count in pieces:
            for _ in range(count):
                position = self.computed[sequence]
                block = int(self.block_tables[sequence, position // BLOCK])
                ids.append(self.tokens[sequence][position])
                positions.append(position)
                slots.append(block * BLOCK + position % BLOCK)
                requests.append(sequence)
                self.computed[sequence] += 1
        rows = (torch.tensor(values, dtype=torch.int32) for values in (ids, positions, slots, requests))
        token_ids, row_positions, row_slots, row_request = rows
        batch = AttentionBatch(row_positions, row_slots, row_request, self.block_tables)
        return token_ids, two_halves(batch, torch.tensor(self.encoder_tokens, dtype=torch.int32))

    def step(self, pieces: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Run the next rows of some sequences: for each piece, hidden [count, D] behind the last layer."""
        rows, batch = self.place(pieces)
        for decoder in self.decoders:
            rows = decoder.run(rows, batch, self.port)
        return list(rows.clone().split([count for _, count in pieces]))

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, V] of rows of the decoder."""
        return self.decoders[-1].head(hidden).clone()

    def whole(
        self, input_ids: Sequence[int], answer_ids: Sequence[int] = (), sequence: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Input and answer in one step: what the encoder gives [S, D], and logits [1 + answer, V]."""
        (hidden,) = self.step([(sequence, self.begin(sequence, input_ids, answer_ids))])
        return self.split(hidden, sequence)

    def split(self, hidden: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
        """Rows of a sequence from its first one on: the encoder's, and logits of the decoder's."""
        count = self.encoder_tokens[sequence]
        return hidden[:count], self.logits(hidden[count + -count % BLOCK :])

    def decode(self, sequence: int, token_id: int) -> Tensor:
        """Logits [V] after one more token."""
        self.tokens[sequence].append(token_id)
        return self.logits(self.step([(sequence, 1)])[0])[0]
