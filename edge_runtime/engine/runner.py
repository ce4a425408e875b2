"""Runs one step plan: rows to tensors, attention and MoE segments in turn, logits of the rows that sample.

Knows the model's arithmetic and the ExpertPort; knows no socket, no scheduler and no text.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from edge_runtime.clock import Clock
from edge_runtime.engine.bill import ServedWeight
from edge_runtime.engine.plan import StepPlan
from edge_runtime.engine.request_table import RequestTable, StepRows
from edge_runtime.model.decoder import AttentionBatch, Decoder
from edge_runtime.model.moe import ExpertPort


class HostedExperts(ExpertPort, Protocol):
    """An ExpertPort that can say which host serves each slot (0 is the home itself)."""

    host_names: list[str]

    def hosts_of(self, layer: int, expert_ids: Tensor) -> np.ndarray | None:
        """[T, K] int32 host of every slot; None when the home serves the whole layer."""

    def begin_step(self) -> None:
        """Called before the first layer of a step."""


@dataclass
class StepTimes:
    """Seconds spent since the start, by part of a step."""

    plan: float = 0.0
    rows: float = 0.0
    attention: float = 0.0
    experts: float = 0.0
    head: float = 0.0
    sample: float = 0.0
    steps: int = 0
    rows_computed: int = 0


class StepResult(NamedTuple):
    """What a step produced. S slices of the plan, V vocabulary."""

    logits: Tensor  # [samples, V] float32, in slice order of those that sample
    failed: dict[str, str]  # request id -> why, for requests whose experts did not come


@dataclass
class Runner:
    """Runs layers [first, last) of one model on one home.

    The last layer's rows become logits only where the plan samples. A request whose experts are missing is
    named in `failed`; its rows go on with what came and are thrown away by the caller, so the other requests
    of the step never notice.
    """

    decoder: Decoder
    port: HostedExperts
    table: RequestTable
    clock: Clock
    times: StepTimes = field(default_factory=StepTimes)

    def __post_init__(self) -> None:
        self.served = ServedWeight(len(self.port.host_names))

    def run(self, plan: StepPlan) -> StepResult:
        """Compute every row of the plan: keys and values are in their blocks afterwards."""
        times, now = self.times, self.clock.now
        began = now()
        rows = self.table.rows(plan)
        batch = AttentionBatch(
            positions=rows.positions,
            slots=rows.slots,
            row_request=rows.row_request,
            block_tables=rows.block_tables,
        )
        self.served.begin_step(rows.row_request.numpy(), len(plan.slices))
        times.rows += now() - began

        hidden = self.decoder.embed(rows.token_ids)
        failed: dict[int, str] = {}
        self.port.begin_step()
        local_layers, num_slots = 0, 0
        for layer in range(self.decoder.first_layer, self.decoder.last_layer):
            began = now()
            x, expert_ids, gate_weights = self.decoder.attention_segment(layer, hidden, batch)
            attended = now()
            missing = self.decoder.moe_segment(layer, hidden, x, expert_ids, gate_weights, self.port)
            times.attention += attended - began
            times.experts += now() - attended
            if expert_ids is None:  # a dense layer
                continue
            num_slots = expert_ids.shape[1]
            hosts = self.port.hosts_of(layer, expert_ids)
            if hosts is None:
                local_layers += 1
            else:
                self.served.add_layer(hosts, gate_weights.numpy())
            if missing is not None:
                requests = rows.row_request[missing.slots // num_slots]
                for index in torch.unique(requests).tolist():
                    failed.setdefault(index, missing.why)
        self.served.add_local_layers(local_layers, num_slots)
        self.served.end_step([piece.request.request_id for piece in plan.slices])

        began = now()
        logits = self._head(hidden, rows)
        times.head += now() - began
        times.steps += 1
        times.rows_computed += plan.num_rows
        return StepResult(
            logits, {plan.slices[index].request.request_id: why for index, why in failed.items()}
        )

    def _head(self, hidden: Tensor, rows: StepRows) -> Tensor:
        if len(rows.sampled_rows) == hidden.shape[0]:
            return self.decoder.head(hidden)
        return self.decoder.head(hidden[torch.from_numpy(rows.sampled_rows)])
