"""Engines whose logits are kept, on one backend or another, and a peer that serves experts to them."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edge_runtime.clock import SystemClock
from edge_runtime.engine.engine import Engine
from edge_runtime.engine.request import Request, SamplingParams, encoder_prompt
from edge_runtime.model.build import add_experts, empty_store
from edge_runtime.model.sampling import Sampled, Sampler
from edge_runtime.node.expert_service import ExpertService, Residents
from edge_runtime.node.peer_link import PeerLink
from edge_runtime.node.remote import PlacedExperts
from edge_runtime.protocol import ExpertCall, ExpertReply, Hello, PeerAddress, Welcome
from edge_runtime.transport.endpoint import Server
from kernels import backends
from tests.support.decoders import all_experts
from tests.support.engines import Whole, engine_of, run_to_end, whole_model

BOUND = 2e-5
"""Distance of logits over their length: float32 everywhere, sums in another order."""
WAIT_S = 120.0  # an interpreted layer takes a while


@dataclass
class Answers:
    """Tokens by request, and the logits that they were chosen from, step by step."""

    tokens: dict[str, list[int]]
    rows: list[tuple[str, Tensor]]

    @property
    def logits(self) -> Tensor:
        """[n, V] in the order in which they came."""
        return torch.stack([row for _, row in self.rows])

    def of(self, name: str) -> Tensor:
        """[n, V] of one request."""
        return torch.stack([row for owner, row in self.rows if owner == name])


class _Keeping(Sampler):
    """A sampler that keeps what it is given."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.rows: list[tuple[str, Tensor]] = []

    def sample(self, logits: Tensor, requests: Sequence[Any]) -> Sampled:
        assert logits.is_cpu, "logits are sampled in the host's memory"
        self.rows += [
            (request.request_id, row.clone()) for request, row in zip(requests, logits, strict=True)
        ]
        return super().sample(logits, requests)


def whole_by(backend: str, folder: Path) -> Whole:
    """A model packed by a backend, which serves from now on; `stays` keeps the one that serves."""
    if backend != "stays":
        backends.use(backend)
    return whole_model.__wrapped__(folder)


def answer(
    whole: Whole,
    prompts: Mapping[str, Sequence[int]],
    *,
    max_rows: int = 64,
    max_tokens: int = 3,
    port: PlacedExperts | None = None,
    engine: Engine | None = None,
    **options: Any,
) -> Answers:
    """Greedy tokens of all prompts, run together."""
    serving = whole.trunk(0, whole.checkpoint.spec.num_layers).layers[0].attention.out.backend
    if serving is not backends.active():  # another was asked for since it was packed
        backends.use(serving.NAME)
    engine = engine or engine_of(whole, max_rows=max_rows, num_blocks=24, port=port)
    engine.sampler = sampler = _Keeping(whole.checkpoint.spec.vocab_size)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for name, ids in prompts.items():
        request = Request(name, ids, params, 0.0, **options)
        if whole.checkpoint.spec.encoder is not None:
            request = Request(name, encoder_prompt(ids, 0), params, 0.0, encoder_tokens=len(ids))
        engine.submit(request)
    ended = run_to_end(engine)
    return Answers({name: end.request.output_ids for name, end in ended.items()}, sampler.rows)


def distance(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|."""
    return float((found - expected).norm() / expected.norm())


def _identity(name: str) -> Hello:
    return Hello(node=name, model_hash="m" * 32, dtype="float32", incarnation=name)


@contextmanager
def holder(whole: Whole) -> Iterator[PeerAddress]:
    """An expert service that holds all experts of a model."""
    spec = whole.checkpoint.spec
    count = max(layer.gate.num_experts for layer in spec.layers if layer.gate)
    with Server("127.0.0.1:0") as server:
        service = ExpertService(server, _identity("attic"), SystemClock(), lambda: None)
        service.residents = {1: Residents(1, whole.store, spec.width, count)}
        service.start()
        try:
            yield PeerAddress("attic", server.address)
        finally:
            service.stop()
            service.join(WAIT_S)
            assert service.fault is None


@contextmanager
def computing_peer(whole: Whole) -> Iterator[PeerAddress]:
    """A peer that holds all experts and computes by the kernels that packed them, whatever serves in this process."""
    over = threading.Event()
    with Server("127.0.0.1:0") as server:

        def serve() -> None:
            while not over.is_set():
                received = server.receive(0.05)
                if received is None:
                    continue
                peer, envelope = received
                message, call_id = envelope.message, envelope.call_id
                if isinstance(message, Hello):
                    welcome = Welcome(node="attic", model_hash="m" * 32, dtype="float32")
                    server.send(peer, welcome, call_id=call_id, epoch=1)
                elif isinstance(message, ExpertCall):
                    rows, pair_rows, experts = map(torch.from_numpy, envelope.tensors)
                    bank = whole.store.bank(message.layer)
                    assert bank is not None, f"layer {message.layer} has no experts"
                    out = torch.empty(len(experts), bank.D)
                    bank.backend.grouped_ffn(rows, pair_rows, experts, bank.handle, out)
                    reply = ExpertReply(message.layer)
                    server.send(peer, reply, call_id=call_id, epoch=1, tensors=(out.numpy(),))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield PeerAddress("attic", server.address)
        finally:
            over.set()
            thread.join(WAIT_S)


@contextmanager
def served_elsewhere(whole: Whole, peer: PeerAddress, own: Sequence[int]) -> Iterator[PlacedExperts]:
    """A port with experts `own` of each layer here and the others at the peer."""
    spec, clock = whole.checkpoint.spec, SystemClock()
    mine = [expert for expert in all_experts(spec) if expert.index in own]
    store = empty_store(spec)
    add_experts(store, whole.checkpoint, mine)
    placed = PlacedExperts(
        node="home",
        store=store,
        hosts=dict.fromkeys(all_experts(spec), (peer.name,)) | dict.fromkeys(mine, ("home",)),
        links=[PeerLink(peer, _identity("home"), 1, None, clock)],
        num_layers=spec.num_layers,
        num_experts=max(layer.gate.num_experts for layer in spec.layers if layer.gate),
        epoch=1,
        deadline_s=WAIT_S,
        clock=clock,
    )
    try:
        placed.greet_all(WAIT_S)
        yield placed
    finally:
        placed.close()
