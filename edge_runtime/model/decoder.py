"""Runs a range of decoder layers for one step's rows, on buffers allocated once.

A layer is an attention segment and an MoE segment, with an ExpertPort between them. Knows no request, no sampling
and no node; `AttentionBatch` says where each row stands.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from edge_runtime.errors import ClusterError
from edge_runtime.model.attention import AttentionBatch, AttentionRows, Pages, attend, attention_rows
from edge_runtime.model.gate import gate
from edge_runtime.model.layers import LayerWeights, Trunk
from edge_runtime.model.moe import ExpertPort, Missing
from edge_runtime.model.spec import LayerSpec, ModelSpec
from kernels import ops


class _Layer(NamedTuple):
    spec: LayerSpec
    weights: LayerWeights
    k_pages: Tensor
    v_pages: Tensor
    scale: float


class _StepRows(NamedTuple):
    """Views of the buffers for one T."""

    hidden: Tensor  # [T, D]
    x: Tensor  # [T, D]
    attention: AttentionRows
    gate_logits: Tensor  # [T, E]
    slots: Tensor  # [T, K] int32, 0 .. T*K - 1
    expert_out: Tensor  # [T*K, D]
    dense_out: Tensor  # [T, D]
    dense_rows: Tensor  # [T] int32, 0 .. T - 1
    dense_ids: Tensor  # [T] int32, all 0


class Decoder:
    """Layers [first_layer, last_layer) on this node.

    pages      where keys and values of these layers are kept
    max_rows   most rows of a step, T

    Whatever is returned is a view of a buffer that the next step overwrites.
    """

    def __init__(self, spec: ModelSpec, trunk: Trunk, pages: Pages, *, max_rows: int) -> None:
        self.spec = spec
        self.first_layer = trunk.first_layer
        self.last_layer = trunk.last_layer
        self.max_rows = max_rows
        self._trunk = trunk
        self._layers = {
            index: _Layer(
                spec.layers[index],
                weights,
                pages.k(index),
                pages.v(index),
                attention_scale(spec.layers[index]),
            )
            for index, weights in enumerate(trunk.layers, trunk.first_layer)
        }
        self._buffers = {name: torch.empty(max_rows, n) for name, n in row_floats(spec).items()}
        num_columns = max((layer.gate.top_k for layer in spec.layers if layer.gate), default=0)
        self._num_columns = num_columns
        self._counting = torch.arange(max_rows * max(num_columns, 1), dtype=torch.int32)
        self._zeros = torch.zeros(max_rows, dtype=torch.int32)
        self._logits = torch.empty(0, spec.vocab_size)
        self._step_rows: dict[int, _StepRows] = {}

    def embed(self, token_ids: Tensor) -> Tensor:
        """Start a step's residual. token_ids [T] int32 -> hidden [T, D] float32."""
        if self._trunk.embed is None:
            raise ValueError(
                f"layers [{self.first_layer}, {self.last_layer}) do not embed: layer 0 is elsewhere"
            )
        return ops.embed(token_ids, self._trunk.embed, out=self._rows(token_ids.shape[0]).hidden)

    def attention_segment(
        self, layer: int, hidden: Tensor, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Attention and gate of one layer; hidden [T, D] float32 gets the attention added.

        returns  x [T, D] float32, what the experts see; expert_ids [T, K] int32 and gate_weights [T, K] float32,
                 both None in a dense layer
        """
        spec, weights, k_pages, v_pages, scale = self._layers[layer]
        rows, eps = self._rows(hidden.shape[0]), self.spec.norm_eps
        ops.rms_norm(hidden, weights.input_norm, eps, out=rows.x)
        attend(
            weights.attention,
            rows.x,
            hidden,
            batch,
            rows.attention,
            k_pages=k_pages,
            v_pages=v_pages,
            rope=self._trunk.rope,
            norm_eps=eps,
            scale=scale,
        )
        ops.rms_norm(hidden, weights.post_norm, eps, out=rows.x)
        if weights.gate is None:
            return rows.x, None, None
        assert spec.gate is not None, f"layer {layer} has gate weights but its spec has no gate"
        expert_ids, gate_weights = gate(spec.gate, weights.gate, rows.x, logits=rows.gate_logits)
        return rows.x, expert_ids, gate_weights

    def moe_segment(
        self,
        layer: int,
        hidden: Tensor,
        x: Tensor,
        expert_ids: Tensor | None,
        gate_weights: Tensor | None,
        port: ExpertPort,
    ) -> Missing | None:
        """The feed-forward half of one layer; hidden [T, D] gets the experts' weighted sum added.

        x, expert_ids, gate_weights   as `attention_segment` gave them

        Slots that did not come add nothing and are returned; the rows they belong to are not the model's any more.
        """
        rows = self._rows(hidden.shape[0])
        if expert_ids is None:
            bank = self._layers[layer].weights.dense
            assert bank is not None, f"layer {layer} has neither gate nor MLP"
            ops.grouped_ffn(x, rows.dense_rows, rows.dense_ids, bank, out=rows.dense_out)
            hidden.add_(rows.dense_out)
            return None
        missing = port.run(layer, x, expert_ids, rows.expert_out)
        slots = rows.slots
        if missing is not None:
            slots = slots.clone()
            slots.view(-1)[missing.slots] = -1
        ops.combine(rows.expert_out, slots, gate_weights, hidden)
        return missing

    def head(self, hidden: Tensor) -> Tensor:
        """Final norm and output head. hidden [R, D] float32, untouched -> logits [R, V] float32."""
        if self._trunk.head is None:
            raise ValueError(f"layers [{self.first_layer}, {self.last_layer}) have no head")
        num_rows = hidden.shape[0]
        if num_rows > len(self._logits):
            self._logits = torch.empty(num_rows, self.spec.vocab_size)
        x = self._buffers["x"][:num_rows]
        ops.rms_norm(hidden, self._trunk.final_norm, self.spec.norm_eps, out=x)
        return ops.linear(x, self._trunk.head, out=self._logits[:num_rows])

    def run(
        self,
        start: Tensor,
        batch: AttentionBatch,
        port: ExpertPort,
        *,
        missing: list[tuple[int, Missing]] | None = None,
    ) -> Tensor:
        """All layers of the range, one after another.

        start     token_ids [T] int32 if layer 0 is here, else hidden [T, D] float32, which is changed in place
        missing   gets (layer, what did not come); without it, something missing is a ClusterError
        returns   hidden [T, D] float32
        """
        hidden = self.embed(start) if start.dim() == 1 else start
        for layer in range(self.first_layer, self.last_layer):
            x, expert_ids, gate_weights = self.attention_segment(layer, hidden, batch)
            lacks = self.moe_segment(layer, hidden, x, expert_ids, gate_weights, port)
            if lacks is not None:
                if missing is None:
                    raise ClusterError(lacks.why)
                missing.append((layer, lacks))
        return hidden

    def _rows(self, num_rows: int) -> _StepRows:
        rows = self._step_rows.get(num_rows)
        if rows is None:
            rows = self._step_rows[num_rows] = self._make_rows(num_rows)
        return rows

    def _make_rows(self, num_rows: int) -> _StepRows:
        if num_rows > self.max_rows:
            raise ValueError(f"a step of {num_rows} rows, but buffers for {self.max_rows}")
        part = {name: buffer[:num_rows] for name, buffer in self._buffers.items()}
        num_slots = num_rows * self._num_columns
        return _StepRows(
            hidden=part["hidden"],
            x=part["x"],
            attention=attention_rows(self.spec.layers[0].attention, part["qkv"], part["mixed"]),
            gate_logits=part["gate_logits"],
            slots=self._counting[:num_slots].view(num_rows, self._num_columns),
            expert_out=part["expert_out"].view(num_slots, self.spec.width),
            dense_out=part["dense_out"],
            dense_rows=self._counting[:num_rows],
            dense_ids=self._zeros[:num_rows],
        )


def row_floats(spec: ModelSpec) -> dict[str, int]:
    """Float32 numbers per row of each buffer of a step, whatever range of layers is run."""
    attention, D = spec.layers[0].attention, spec.width
    H, G, P = attention.num_heads, attention.num_kv_heads, attention.head_width
    gates = [layer.gate for layer in spec.layers if layer.gate]
    return {
        "hidden": D,
        "x": D,
        "qkv": (H + 2 * G) * P,
        "mixed": H * P,
        "gate_logits": max((gate.num_experts for gate in gates), default=0),
        "expert_out": D * max((gate.top_k for gate in gates), default=0),
        "dense_out": D if len(gates) < spec.num_layers else 0,
    }


def attention_scale(layer: LayerSpec) -> float:
    """What scores are multiplied with before the softmax."""
    return layer.attention.head_width**-0.5
