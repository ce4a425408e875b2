"""Runs a range of decoder layers for one step's rows, on buffers allocated once.

A layer is an attention segment and an MoE segment, with an ExpertPort between them. Knows no request, no sampling
and no node; `AttentionBatch` says where each row stands.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from edge_runtime.errors import ClusterError
from edge_runtime.model.attention import (
    AttentionBatch,
    AttentionRows,
    LatentRows,
    LatentWeights,
    Pages,
    attend,
    attention_floats,
    attention_rows,
    paged_options,
)
from edge_runtime.model.gate import gate, gate_options, gate_rule
from edge_runtime.model.layers import LayerWeights, Trunk
from edge_runtime.model.moe import Beside, ExpertPort, Missing, Slices, joined
from edge_runtime.model.spec import LayerSpec, ModelSpec
from kernels import backends, host_pages, ops
from kernels.layer_runs import RunLayer, SliceGate
from kernels.ops import Counting, ExpertBank
from kernels.reference.gate_topk import count
from kernels.segments import AttentionParts, AttentionSegment, bind_attention_segment
from kernels.transfers import on_device, on_host

INT32_BUFFERS = ("counting", "zeros", "expert_ids")


class _Layer(NamedTuple):
    spec: LayerSpec
    weights: LayerWeights
    pages: tuple[Tensor, Tensor]
    paged_options: dict[str, Any]
    gate_options: dict[str, Any]
    output_scale: float | None
    segment: AttentionSegment | None  # attention and gate in one call, where kernels have it for such a layer
    counts: Tensor | None  # [num_blocks, E] of the layer, where experts chosen are counted by block


class _StepRows(NamedTuple):
    """Views of the buffers for one T."""

    hidden: Tensor  # [T, D]
    x: Tensor  # [T, D], what attention reads, then what the experts read
    scratch: Tensor  # [T * floats of a layer's attention]
    attention: dict[int, AttentionRows | LatentRows]  # by layer; layers of one kind share them
    gate_logits: Tensor  # [T, E]
    chosen: tuple[Tensor, Tensor]  # expert ids [T, K] int32 and gate weights [T, K] of the layer at hand
    slots: Tensor  # [T, K] int32, 0 .. T*K - 1
    expert_out: Tensor  # [T*K, D]
    dense_out: Tensor  # [T, D]
    side: Tensor  # [T, D], what a gate or a dense MLP with a norm of its own reads
    branch: Tensor  # [T, D], what is normed before it is added to the residual
    rows: Tensor  # [T] int32, 0 .. T - 1
    zeros: Tensor  # [T] int32


class RunBuffers(NamedTuple):
    """What a run of layers over T rows is computed in; see kernels.layer_runs. Views that steps of all sizes share."""

    hidden: Tensor  # [T, D]
    x: Tensor  # [T, D]
    scratch: Tensor  # [T * floats of a layer's attention]
    gate_logits: Tensor  # [T, E]
    ids: Tensor  # [L, T, K] int32
    weights: Tensor  # [L, T, K]
    expert_out: Tensor  # [T*K, D]
    dense_out: Tensor  # [T, D]
    zeros: Tensor  # [T] int32


class Decoder:
    """Layers [first_layer, last_layer) on this node.

    pages      where keys and values of these layers are kept
    max_rows   most rows of a step, T
    counts     [num_blocks, L, E] int8 or int32, L the MoE layers of the range in order: where the experts that rows choose
               are counted by KV block, see ops.Counting; None: nowhere

    routed     [n] int64 or None: which rows of the step the last `attention_segment` chose experts for; None for all

    Whatever is returned is a view of a buffer that the next step overwrites.
    """

    routed: Tensor | None = None
    recorded_sum: Tensor | None = None
    """[] float32, while work is recorded: gets the sum that `moe_segment` looks at otherwise."""

    def __init__(
        self, spec: ModelSpec, trunk: Trunk, pages: Pages, *, max_rows: int, counts: Tensor | None = None
    ) -> None:
        self.spec = spec
        self.first_layer = trunk.first_layer
        self.last_layer = trunk.last_layer
        self.max_rows = max_rows
        self._trunk = trunk
        moe_layers = [layer for layer in spec.moe_layers if trunk.first_layer <= layer < trunk.last_layer]
        counts_of = {} if counts is None else dict(zip(moe_layers, counts.unbind(1), strict=True))
        self._layers = {
            index: _layer(
                spec.layers[index],
                weights,
                (pages.k(index), pages.v(index)),
                spec.norm_eps,
                counts_of.get(index),
            )
            for index, weights in enumerate(trunk.layers, trunk.first_layer)
        }
        self._device = backends.device()
        self._buffers = {
            name: torch.empty(
                max_rows,
                n,
                dtype=torch.int32 if name in INT32_BUFFERS else torch.float32,
                device=self._device,
            )
            for name, n in row_numbers(spec).items()
        }
        counting = self._buffers["counting"].view(-1)
        torch.arange(len(counting), dtype=torch.int32, out=counting)
        self._buffers["zeros"].zero_()
        self._num_columns = self._buffers["expert_ids"].shape[1]
        self._logits = torch.empty(0, spec.vocab_size, device=self._device)
        self._step_rows: dict[int, _StepRows] = {}
        self._chosen: tuple[Tensor, Tensor] | None = (
            None  # ids and weights of all layers, where one call runs them
        )

    @property
    def num_columns(self) -> int:
        """Experts per token, K; 0 where no layer is routed."""
        return self._num_columns

    def give_back(self) -> None:
        """Let the system have the memory of its buffers; no step follows."""
        for buffer in (*self._buffers.values(), self._logits):
            host_pages.drop_tensor(buffer)

    def run_buffers(self, num_rows: int) -> RunBuffers:
        """What a run of layers over so many rows is computed in; L layers of the range."""
        rows, num_layers = self._rows(num_rows), self.last_layer - self.first_layer
        if self._chosen is None:
            size = num_layers * self.max_rows * self._num_columns
            self._chosen = (
                torch.empty(size, dtype=torch.int32, device=self._device),
                torch.empty(size, device=self._device),
            )
        shape = num_layers, num_rows, self._num_columns
        ids, weights = (buffer[: math.prod(shape)].view(shape) for buffer in self._chosen)
        dense = rows.dense_out
        return RunBuffers(
            rows.hidden,
            rows.x,
            rows.scratch,
            rows.gate_logits,
            ids,
            weights,
            rows.expert_out,
            dense,
            rows.zeros,
        )

    def layer_in_run(self, layer: int, bank: ExpertBank | None, slices: SliceGate | None) -> RunLayer | None:
        """A layer as a run of layers takes it, with `bank` its experts; None where it has more in it than a run does."""
        spec, weights, *_, output_scale, segment, counts = self._layers[layer]
        if segment is None or output_scale is not None or weights.ffn_out_norm is not None:
            return None
        if spec.gate is None:
            return None if weights.dense is None else RunLayer(segment, weights.dense)
        if bank is None or weights.dense is not None or weights.shared_gate is not None:
            return None
        return RunLayer(segment, bank, counts, slices)

    def embed(self, token_ids: Tensor, batch: AttentionBatch | None = None) -> Tensor:
        """Start a step's residual. token_ids [T] int32 -> hidden [T, D] float32, whatever places the rows have."""
        if self._trunk.embed is None:
            raise ValueError(
                f"layers [{self.first_layer}, {self.last_layer}) do not embed: layer 0 is elsewhere"
            )
        hidden = ops.embed(token_ids, self._trunk.embed, out=self._rows(token_ids.shape[0]).hidden)
        return hidden if self.spec.embed_scale == 1.0 else hidden.mul_(self.spec.embed_scale)

    def attention_segment(
        self, layer: int, hidden: Tensor, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Attention and gate of one layer; hidden [T, D] float32 gets the attention added.

        returns  x [T, D] float32, what the experts see; expert_ids [T, K] int32 and gate_weights [T, K] float32,
                 both None in a dense layer
        """
        spec, weights, *_, segment, counts = self._layers[layer]
        rows, eps = self._rows(hidden.shape[0]), self.spec.norm_eps
        counted = None
        if counts is not None:
            counted = rows.zeros if batch.counted is None else batch.counted
        if segment is not None:
            logits, (ids, shares) = (
                (None, (None, None)) if spec.gate is None else (rows.gate_logits, rows.chosen)
            )
            segment.run(hidden, rows.x, *batch[:4], rows.scratch, logits, ids, shares, counts, counted)
            return rows.x, ids, shares
        attend_and_gate(self._layers[layer], rows.attention[layer], rows, eps, hidden, batch, counted)
        return (rows.x, None, None) if weights.gate is None else (rows.x, *rows.chosen)

    def attention_call(self, layer: int, hidden: Tensor, batch: AttentionBatch) -> tuple[Any, ...]:
        """What `attend_and_gate` takes to do as `attention_segment` does but for counting: the same tensors every time."""
        rows = self._rows(hidden.shape[0])
        return self._layers[layer], rows.attention[layer], rows, self.spec.norm_eps, hidden, batch, None

    def count_chosen(self, layer: int, batch: AttentionBatch) -> None:
        """Count what `attend_and_gate` chose without counting."""
        counts, rows = self._layers[layer].counts, self._rows(len(batch.slots))
        if counts is not None:
            counted = rows.zeros if batch.counted is None else batch.counted
            count(rows.chosen[0].long(), counts, batch.slots, counted)

    def chosen(self, layer: int, num_rows: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What the last `attention_segment` of so many rows returned, if it was this layer's."""
        rows = self._rows(num_rows)
        return (rows.x, None, None) if self._layers[layer].weights.gate is None else (rows.x, *rows.chosen)

    def static_hidden(self, num_rows: int) -> Tensor:
        """[num_rows, D] where `embed` starts the residual of so many rows."""
        return self._rows(num_rows).hidden

    def is_plain_moe(self, layer: int) -> bool:
        """Whether all that follows attention in a layer is the weighted sum of its experts."""
        spec, weights, *_, output_scale, _, _ = self._layers[layer]
        beside = weights.dense, weights.shared_gate, weights.dense_norm, weights.ffn_out_norm, output_scale
        return spec.gate is not None and all(part is None for part in beside)

    def adds_experts(self, layer: int) -> bool:
        """Whether what routed experts give is added to the residual as it is, so that it may be added later as well."""
        _, weights, *_ = layer_parts = self._layers[layer]
        return weights.gate is not None and weights.dense_norm is None and layer_parts.output_scale is None

    def not_finite(self, layer: int, expert_ids: Tensor, port: ExpertPort) -> Missing | None:
        """The slots of a run's last layer, expert_ids [T, K], whose expert gave NaN or Inf; see `_not_finite`."""
        rows = self._rows(len(expert_ids))
        return _not_finite(layer, rows.x, rows.expert_out, rows.slots, expert_ids, port)

    def gate_logits(self, num_rows: int) -> Tensor:
        """[num_rows, E] float32: the scores behind what the last `attention_segment` chose, for whoever observes."""
        return self._rows(num_rows).gate_logits

    def moe_segment(
        self,
        layer: int,
        hidden: Tensor,
        x: Tensor,
        expert_ids: Tensor | None,
        gate_weights: Tensor | None,
        port: ExpertPort,
        slices: Slices | None = None,
    ) -> Missing | None:
        """The feed-forward half of one layer; hidden [T, D] gets the experts' weighted sum added.

        x, expert_ids, gate_weights   as `attention_segment` gave them
        slices                        parts of the experts that run; None for all

        Slots that did not come add nothing and are returned; the rows they belong to are not the model's any more.
        """
        rows, weights = self._rows(hidden.shape[0]), self._layers[layer].weights
        missing = None
        if expert_ids is None or gate_weights is None:
            self._dense(weights, x, rows)
        elif weights.dense_norm is not None:
            missing = self._experts_beside_dense(layer, hidden, x, expert_ids, gate_weights, port, slices)
        else:
            beside = None if weights.dense is None else partial(self._dense, weights, x, rows)
            missing = self._experts(layer, hidden, x, expert_ids, gate_weights, port, beside, slices)
        if weights.shared_gate is not None:
            self._add_gated(weights, hidden, x, rows)
        elif weights.dense is not None:
            out = rows.dense_out
            if weights.ffn_out_norm is not None:
                ops.rms_norm(out, weights.ffn_out_norm, self.spec.norm_eps, out=out)
            hidden.add_(out)
        scale = self._layers[layer].output_scale
        if scale is not None:
            hidden.mul_(scale)
        return missing

    def _dense(self, weights: LayerWeights, x: Tensor, rows: _StepRows) -> None:
        """dense_out = the MLP that all rows use, applied to x."""
        assert weights.dense is not None, "a layer has neither experts nor an MLP"
        ops.grouped_ffn(x, rows.rows, rows.zeros, weights.dense, out=rows.dense_out)

    def _add_gated(self, weights: LayerWeights, hidden: Tensor, x: Tensor, rows: _StepRows) -> None:
        """hidden += the shared expert's output times a sigmoid: an expert of its own, the only one to choose from."""
        assert weights.shared_gate is not None, "only a shared expert behind a gate is added so"
        logits = ops.linear(x, weights.shared_gate)
        _, share = ops.gate_topk(logits, 1, renormalise=False, scores="sigmoid")
        ops.combine(rows.dense_out, rows.rows.view(-1, 1), share, hidden)

    def _experts_beside_dense(
        self,
        layer: int,
        hidden: Tensor,
        x: Tensor,
        expert_ids: Tensor,
        gate_weights: Tensor,
        port: ExpertPort,
        slices: Slices | None,
    ) -> Missing | None:
        """dense_out = the dense MLP of the residual plus the experts' sum, each behind a norm of its own."""
        rows, weights, eps = self._rows(hidden.shape[0]), self._layers[layer].weights, self.spec.norm_eps
        ops.rms_norm(hidden, weights.dense_norm, eps, out=rows.side)
        routed = rows.branch.zero_()
        beside = partial(self._dense, weights, rows.side, rows)
        missing = self._experts(layer, routed, x, expert_ids, gate_weights, port, beside, slices)
        ops.rms_norm(rows.dense_out, weights.dense_out_norm, eps, out=rows.dense_out)
        rows.dense_out.add_(ops.rms_norm(routed, weights.routed_out_norm, eps, out=routed))
        return missing

    def _experts(
        self,
        layer: int,
        out: Tensor,
        x: Tensor,
        expert_ids: Tensor,
        gate_weights: Tensor,
        port: ExpertPort,
        beside: Beside,
        slices: Slices | None = None,
    ) -> Missing | None:
        """out [T, D] += the weighted sum of what the routed experts give for x; `beside` runs while they are awaited."""
        rows = self._rows(x.shape[0])
        slots, expert_out = rows.slots, rows.expert_out
        if expert_ids.shape != slots.shape:  # sub-experts of more experts than the model's own gate chooses
            slots = torch.arange(expert_ids.numel(), dtype=torch.int32).view(expert_ids.shape)
            expert_out = torch.empty(expert_ids.numel(), self.spec.width)
        arguments = layer, x, expert_ids, expert_out
        sliced = () if slices is None else (slices,)  # a port that never sees slices need not know them
        if beside is None:
            is_finite = port.add_here(layer, x, expert_ids, gate_weights, out, expert_out, *sliced)
            if is_finite:
                return None
            if is_finite is not None:
                return _not_finite(layer, x, expert_out, slots, expert_ids, port)
            missing = port.run(*arguments) if slices is None else port.run(*arguments, None, slices)
        else:
            missing = port.run(*arguments, beside, *sliced)
        if missing is not None:
            slots = slots.clone()
            slots.view(-1)[missing.slots] = -1
        ops.combine(expert_out, slots, gate_weights, out)
        # One sum and not a look at each number: NaN and Inf survive it, and finite rows do not reach 1e38.
        if self.recorded_sum is not None:  # nobody may look while work is recorded
            torch.sum(out.view(-1), dim=0, out=self.recorded_sum)
        elif not math.isfinite(float(out.sum())):
            return joined(missing, _not_finite(layer, x, expert_out, slots, expert_ids, port))
        return missing

    def head(self, hidden: Tensor) -> Tensor:
        """Final norm and output head. hidden [R, D] float32, untouched -> logits [R, V] float32."""
        if self._trunk.head is None:
            raise ValueError(f"layers [{self.first_layer}, {self.last_layer}) have no head")
        num_rows = hidden.shape[0]
        if num_rows > len(self._logits):
            self._logits = torch.empty(num_rows, self.spec.vocab_size, device=self._device)
        x = self._buffers["x"][:num_rows]
        ops.rms_norm(hidden, self._trunk.final_norm, self.spec.norm_eps, out=x)
        logits = ops.linear(x, self._trunk.head, out=self._logits[:num_rows])
        cap = self.spec.logit_soft_cap
        if cap is not None:
            ops.soft_cap(logits, cap)
        return logits

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
        hidden = self.embed(start, batch) if start.dim() == 1 else start
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
        scratch, counting = self._buffers["attention"].view(-1), self._buffers["counting"].view(-1)
        by_spec = {
            spec: attention_rows(spec, scratch, num_rows)
            for spec in {layer.spec.attention for layer in self._layers.values()}
        }
        return _StepRows(
            hidden=part["hidden"],
            x=part["x"],
            scratch=scratch,
            attention={index: by_spec[layer.spec.attention] for index, layer in self._layers.items()},
            gate_logits=part["gate_logits"],
            chosen=(part["expert_ids"], part["gate_weights"]),
            slots=counting[:num_slots].view(num_rows, self._num_columns),
            expert_out=part["expert_out"].view(num_slots, self.spec.width),
            dense_out=part["dense_out"],
            side=part["side"],
            branch=part["branch"],
            rows=counting[:num_rows],
            zeros=self._buffers["zeros"].view(-1)[:num_rows],
        )


def attend_and_gate(
    layer: _Layer,
    own: AttentionRows | LatentRows,
    rows: _StepRows,
    eps: float,
    hidden: Tensor,
    batch: AttentionBatch,
    counted: Tensor | None,
) -> None:
    """Attention and gate of a layer by single operations: hidden [T, D] gets the attention added, and rows.x and
    rows.chosen are written.

    own      buffers of the layer's attention
    counted  [T] int32, None where choices are not counted
    """
    spec, weights, pages, paged, chosen_by, *_ = layer
    ops.rms_norm(hidden, weights.input_norm, eps, out=rows.x)
    normed = weights.attention_out_norm
    attend(
        spec.attention,
        weights.attention,
        rows.x,
        hidden if normed is None else rows.branch,
        batch,
        own,
        pages=pages,
        norm_eps=eps,
        add=normed is None,
        options=paged,
    )
    if normed is not None:
        hidden.add_(ops.rms_norm(rows.branch, normed, eps, out=rows.branch))
    ops.rms_norm(hidden, weights.post_norm, eps, out=rows.x)
    if weights.gate is None:
        return
    assert spec.gate is not None, "a layer has gate weights but its spec has no gate"
    read = rows.x
    if weights.gate.norm is not None:
        read = ops.rms_norm(hidden, weights.gate.norm, eps, out=rows.side)
    counts = layer.counts
    counting = None if counts is None or counted is None else Counting(counts, batch.slots, counted)
    gate(
        spec.gate,
        weights.gate,
        read,
        logits=rows.gate_logits,
        out=rows.chosen,
        options=chosen_by,
        counting=counting,
    )


def row_numbers(spec: ModelSpec) -> dict[str, int]:
    """Numbers of 4 bytes per row of each buffer of a step, whatever range of layers is run."""
    D, layers = spec.width, spec.layers
    gates = [layer.gate for layer in layers if layer.gate]
    has_dense = any(layer.gate is None or layer.shared or layer.parallel_dense for layer in layers)
    has_side = any(layer.parallel_dense or (layer.gate and layer.gate.reads_residual) for layer in layers)
    has_branch = any(layer.output_norms or layer.parallel_dense for layer in layers)
    num_columns = max((gate.top_k for gate in gates), default=0)
    return {
        "hidden": D,
        "x": D,
        "counting": max(num_columns, 1),
        "zeros": 1,
        "expert_ids": num_columns,
        "gate_weights": num_columns,
        "attention": max(attention_floats(layer.attention) for layer in layers),
        "gate_logits": max((gate.num_experts for gate in gates), default=0),
        "expert_out": D * num_columns,
        "dense_out": D if has_dense else 0,
        "side": D if has_side or spec.encoder else 0,
        "branch": D if has_branch or spec.encoder else 0,
    }


def _layer(
    spec: LayerSpec,
    weights: LayerWeights,
    pages: tuple[Tensor, Tensor],
    norm_eps: float,
    counts: Tensor | None,
) -> _Layer:
    return _Layer(
        spec,
        weights,
        pages,
        paged_options(spec.attention, weights.attention),
        gate_options(spec.gate, weights.gate) if spec.gate and weights.gate else {},
        None if weights.output_scale is None else float(weights.output_scale),
        _segment(spec, weights, pages, norm_eps),
        counts,
    )


def _segment(
    spec: LayerSpec, weights: LayerWeights, pages: tuple[Tensor, Tensor], norm_eps: float
) -> AttentionSegment | None:
    """Attention and gate of a layer in one call, if it has no more than such a call does and the kernels have one."""
    attention, part = spec.attention, weights.attention
    if (
        isinstance(part, LatentWeights)
        or attention.kv_shared_with is not None
        or attention.values_are_keys
        or attention.relative_bias is not None
        or attention.value_norm
        or attention.clip is not None
        or spec.output_norms
        or (spec.gate is not None and spec.gate.reads_residual)
    ):
        return None
    gated = (
        {}
        if spec.gate is None or weights.gate is None
        else {
            "gate": weights.gate.weight,
            "gate_bias": weights.gate.bias,
            "top_k": spec.gate.top_k,
            "rule": gate_rule(spec.gate, weights.gate),
        }
    )
    return bind_attention_segment(
        AttentionParts(
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_width=attention.head_width,
            norm_eps=norm_eps,
            input_norm=weights.input_norm,
            qkv=part.qkv,
            rope=part.rope,
            pages=pages,
            scale=attention.scale,
            out=part.out,
            post_norm=weights.post_norm,
            qkv_bias=part.qkv_bias,
            q_norm=part.q_norm,
            k_norm=part.k_norm,
            interleaved=attention.interleaved,
            window=attention.window,
            sinks=part.sinks,
            soft_cap=attention.soft_cap,
            out_bias=part.out_bias,
            **gated,  # type: ignore[arg-type]
        )
    )


def _not_finite(
    layer: int, x: Tensor, expert_out: Tensor, slots: Tensor, expert_ids: Tensor, port: ExpertPort
) -> Missing | None:
    """Slots whose expert gave NaN or Inf here, as if they had not come; None if none did.

    A peer's rows are looked at where they arrive, so what is left is this node's own work: that of the experts, or of
    what comes before them where the rows x [T, D] that they read were spoilt already.
    """
    used = slots.view(-1) >= 0
    wrong = on_host((used & ~expert_out.isfinite().all(dim=1)).nonzero().view(-1))
    if not len(wrong):
        return None
    host = port.host_names[0]
    read = x[on_device(wrong // expert_ids.shape[1])]
    if not read.isfinite().all():
        return Missing(
            wrong,
            f"attention or a norm of layer {layer} on {host}, or what comes before it, gave numbers that are not finite",
        )
    experts = ", ".join(map(str, expert_ids.view(-1)[wrong].unique().tolist()))
    return Missing(wrong, f"layer {layer} experts {experts} on {host} gave numbers that are not finite")
