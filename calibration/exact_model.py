"""The whole model on this machine, run exactly over many requests at once, with a look at what each layer routes.

Uses the runtime's own decoder and experts, for every family. Whoever looks may also change what is routed: that is how
substitution is measured. Knows no corpus and no artifact.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from calibration.requests import CalibrationRequest
from edge_runtime.cache.pages import KVPages, kv_bytes_per_block
from edge_runtime.engine.request import encoder_prompt
from edge_runtime.errors import ConfigError
from edge_runtime.model.attention import AttentionBatch
from edge_runtime.model.build import load_experts, load_trunk
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.decoder import row_numbers
from edge_runtime.model.encoder_decoder import decoder_of, two_halves
from edge_runtime.model.moe import ExpertPort, ExpertStore, LocalExperts
from edge_runtime.model.spec import ModelSpec
from kernels import ops
from kernels.packing import KV_BLOCK_TOKENS
from topology.ids import ExpertId

STEP_ROWS = 2048


class Step(NamedTuple):
    """Rows of some requests that are computed together; T rows, B requests."""

    token_ids: Tensor  # [T] int32
    place: AttentionBatch  # where each row stands in its whole request
    encoder_tokens: Tensor | None  # [B] int32, of models with an encoder
    request: Tensor  # [T] int64, index among the step's requests
    is_decode: Tensor  # [T] bool, whether the row decodes (else it is the prompt's)
    next_ids: Tensor  # [T] int64, the token that follows in the text; -1 where none does or none is predicted

    @property
    def batch(self) -> Any:
        """What the decoder takes: AttentionBatch, or TwoHalves."""
        return self.place if self.encoder_tokens is None else two_halves(self.place, self.encoder_tokens)

    def rows(self, index: Tensor) -> "Step":
        """Some rows [n] of it; what they attend to must have been run before, or be among them."""
        place = self.place
        return Step(
            self.token_ids[index],
            AttentionBatch(
                place.positions[index], place.slots[index], place.row_request[index], place.block_tables
            ),
            self.encoder_tokens,
            self.request[index],
            self.is_decode[index],
            self.next_ids[index],
        )

    def turns(self) -> list[Tensor]:
        """Its rows as a node runs them: those of all prompts, then one decoding row of each request at a time."""
        decoding = self.is_decode.nonzero().view(-1)
        of = self.request[decoding]
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(of).cumsum(0)])
        turn = torch.arange(len(decoding)) - starts[of]
        parts = [decoding[turn == number] for number in range(int(turn.max()) + 1 if len(turn) else 0)]
        return [part for part in [(~self.is_decode).nonzero().view(-1), *parts] if len(part)]


class Routed(NamedTuple):
    """What one layer's gate chose; n rows of the step. Views that the next segment overwrites."""

    layer: int
    rows: Tensor | None  # [n] int64, which rows of the step; None for all of them
    x: Tensor  # [n, D] float32, what the experts read
    expert_ids: Tensor  # [n, K] int32, best first
    gate_weights: Tensor  # [n, K] float32
    logits: Tensor  # [n, E] float32


Choice = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor] | None
"""Expert ids [n, K] int32 and gate weights [n, K] float32 in place of the gate's; None leaves them. A third one, [n, K] bool,
says which slots' outputs are added one layer late, behind a layer that adds its experts to the residual, as this one does."""
Look = Callable[[Routed], Choice]


class ExactModel:
    """A model with all its experts.

    step_rows   rows of a step; a longer request makes steps as long as it is
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        context_tokens: int,
        step_rows: int = STEP_ROWS,
        progress: Callable[[int, int, str], None] = lambda done, total, what: None,
    ) -> None:
        self.checkpoint = checkpoint
        self.spec: ModelSpec = checkpoint.spec
        self.step_rows = max(step_rows, context_tokens + KV_BLOCK_TOKENS)
        self.moe_layers = self.spec.moe_layers
        num_layers = self.spec.num_layers
        shapes = self.spec.kv_shapes(0, num_layers)
        num_blocks = 2 * self.step_rows // KV_BLOCK_TOKENS + 1  # each request's last block may hold one token
        _refuse_too_large(checkpoint, num_blocks * kv_bytes_per_block(shapes), self.step_rows)
        trunk = load_trunk(
            checkpoint, self.spec, 0, num_layers, context_tokens=context_tokens, progress=progress
        )
        self.decoder = decoder_of(self.spec, trunk, KVPages(num_blocks, shapes), max_rows=self.step_rows)
        self.store: ExpertStore = load_experts(
            checkpoint, self.spec, all_experts(self.spec), progress=progress
        )
        self.port: ExpertPort = LocalExperts(self.store, "this machine")

    @property
    def num_experts(self) -> int:
        """E; 0 in a model without routed layers."""
        return max((gate.num_experts for gate in self._gates()), default=0)

    @property
    def top_k(self) -> int:
        """K."""
        return max((gate.top_k for gate in self._gates()), default=0)

    def _gates(self) -> Iterator[Any]:
        return (layer.gate for layer in self.spec.layers if layer.gate is not None)

    def batches(self, requests: Sequence[CalibrationRequest]) -> list[list[CalibrationRequest]]:
        """The requests in their order, as many in a step as its rows allow."""
        found: list[list[CalibrationRequest]] = []
        rows = self.step_rows
        for request in requests:
            needed = request.num_tokens + 1
            if rows + needed > self.step_rows:
                found.append([])
                rows = 0
            found[-1].append(request)
            rows += needed
        return found

    def place(self, requests: Sequence[CalibrationRequest]) -> Step:
        """A step with every row of these requests."""
        encoder = self.spec.encoder
        parts = [
            _rows_of(request, None if encoder is None else encoder.start_token_id) for request in requests
        ]
        tables, first_block = [], 0
        slots = []
        for _, positions, _, _ in parts:
            num_blocks = int(positions[-1]) // KV_BLOCK_TOKENS + 1
            tables.append(np.arange(first_block, first_block + num_blocks, dtype=np.int32))
            slots.append(first_block * KV_BLOCK_TOKENS + positions)
            first_block += num_blocks
        widest = max(map(len, tables))
        table = np.stack([np.pad(each, (0, widest - len(each))) for each in tables])
        ids, positions, is_decode, next_ids = (np.concatenate(each) for each in zip(*parts, strict=True))
        request = np.repeat(np.arange(len(parts)), [len(part[0]) for part in parts])
        place = AttentionBatch(
            positions=torch.from_numpy(positions.astype(np.int32)),
            slots=torch.from_numpy(np.concatenate(slots).astype(np.int32)),
            row_request=torch.from_numpy(request.astype(np.int32)),
            block_tables=torch.from_numpy(table),
        )
        prompts = torch.tensor([len(request.prompt_ids) for request in requests], dtype=torch.int32)
        return Step(
            token_ids=torch.from_numpy(ids.astype(np.int32)),
            place=place,
            encoder_tokens=None if encoder is None else prompts,
            request=torch.from_numpy(request),
            is_decode=torch.from_numpy(is_decode),
            next_ids=torch.from_numpy(next_ids),
        )

    def run(
        self,
        step: Step,
        look: Look,
        *,
        first_layer: int = 0,
        hidden: Tensor | None = None,
        saved: dict[int, Tensor | None] | None = None,
        port: ExpertPort | None = None,
    ) -> Tensor:
        """Every layer from `first_layer` on; `look` sees what each routed layer chose, and may change it.

        hidden   [T, D] float32, the residual before `first_layer`, changed in place; None to begin with the tokens
        port     who computes the routed experts; None for the model's own
        saved    for each layer that it names, gets a copy of the residual before that layer
        returns  hidden [T, D] float32, a view that the next step overwrites
        """
        decoder, batch, port = self.decoder, step.batch, port or self.port
        if hidden is None:
            hidden = decoder.embed(step.token_ids, batch)
        owed: Tensor | None = None  # [T, D], what the layer before gives late
        for layer in range(first_layer, self.spec.num_layers):
            if saved is not None and layer in saved:
                saved[layer] = hidden.clone()
            x, expert_ids, gate_weights = decoder.attention_segment(layer, hidden, batch)
            owes: Tensor | None = None
            if expert_ids is not None and gate_weights is not None:
                logits = decoder.gate_logits(len(x))
                routed = Routed(layer, decoder.routed, x, expert_ids, gate_weights, logits)
                chosen = look(routed)
                if chosen is not None:
                    expert_ids, gate_weights, *late = chosen
                    if late:
                        owes = self._late_outputs(layer, x, expert_ids, gate_weights, late[0], port)
                        gate_weights = gate_weights.masked_fill(late[0], 0.0)
            missing = decoder.moe_segment(layer, hidden, x, expert_ids, gate_weights, port)
            if missing is not None:
                raise ConfigError(f"{self.checkpoint.folder} cannot be run: {missing.why}")
            if owed is not None:
                hidden.add_(owed)
            owed = owes
        return hidden

    def may_be_late(self, layer: int) -> bool:
        """Whether what a layer's experts give can be added behind the next layer."""
        decoder, following = self.decoder, layer + 1
        both = (
            decoder.adds_experts(layer)
            and following < self.spec.num_layers
            and decoder.adds_experts(following)
        )
        return both and self.spec.encoder is None

    def _late_outputs(
        self, layer: int, x: Tensor, expert_ids: Tensor, gate_weights: Tensor, late: Tensor, port: ExpertPort
    ) -> Tensor:
        """[T, D] the weighted sum of the slots that are late."""
        out = torch.empty(expert_ids.numel(), x.shape[1])
        port.run(layer, x, expert_ids, out)
        slots = torch.arange(expert_ids.numel(), dtype=torch.int32).view(expert_ids.shape)
        found = torch.zeros(x.shape)
        ops.combine(out, slots, gate_weights.masked_fill(~late, 0.0), found)
        return found

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """[n, V] float32 of some rows [n] of what `run` gave; a view that the next call overwrites."""
        return self.decoder.head(hidden[rows])


def all_experts(spec: ModelSpec) -> list[ExpertId]:
    """Every routed expert of a model."""
    return [
        ExpertId(index, expert)
        for index, layer in enumerate(spec.layers)
        if layer.gate is not None
        for expert in range(layer.gate.num_experts)
    ]


def _rows_of(request: CalibrationRequest, start: int | None) -> tuple[np.ndarray, ...]:
    """token ids, positions, is_decode and next ids of a request's rows; `start` of models with an encoder."""
    prompt, decode = list(request.prompt_ids), list(request.decode_ids)
    if start is None:
        ids = np.array(prompt + decode)
        positions = np.arange(len(ids))
        next_ids = np.append(ids[1:], -1)
        return ids, positions, positions >= len(prompt), next_ids
    whole = np.array(encoder_prompt(prompt, start) + decode)
    first = len(whole) - len(decode) - 1  # where the decoder's start token stands
    positions = np.concatenate([np.arange(len(prompt)), np.arange(first, len(whole))])
    next_ids = np.concatenate([np.full(len(prompt), -1), whole[first + 1 :], [-1]])
    return whole[positions], positions, positions > first, next_ids


def _refuse_too_large(checkpoint: Checkpoint, kv_bytes: int, step_rows: int) -> None:
    needed = checkpoint.num_bytes + kv_bytes + 4 * step_rows * sum(row_numbers(checkpoint.spec).values())
    available = psutil.virtual_memory().available
    if needed > available:
        raise ConfigError(
            f"{checkpoint.folder} needs {needed} bytes to be run whole and {available} are available on this machine; "
            f"calibrate it on a larger one, and copy the artifact"
        )
