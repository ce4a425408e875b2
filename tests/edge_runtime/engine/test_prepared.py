"""Prepared segments give the bits of layers run one by one: every family, mixed budgets, batches that grow and shrink."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from edge_runtime.elastic.gates import ProxyGates
from edge_runtime.elastic.sub_experts import LayerParts, SubExperts
from edge_runtime.engine.engine import Engine
from edge_runtime.engine.prepared import PreparedSteps
from edge_runtime.engine.request import Request, SamplingParams
from edge_runtime.errors import CheckpointError
from edge_runtime.model.build import load_experts
from kernels import backends
from kernels.layer_runs import bind_layers
from kernels.ops import ExpertBank
from tests.support.decoders import all_experts
from tests.support.engines import Whole, engine_of, placed_experts, whole_model
from tests.support.families import VARIANTS, write_variant

CASES = [
    *((family, "plain") for family in sorted(VARIANTS)),
    ("qwen3_moe", "layer 0 dense"),
    ("qwen3_moe", "not renormalised"),
    ("qwen3_moe", "no routed layer"),
    ("qwen3_moe", "fp16"),
    ("gpt_oss", "mxfp4"),
]
N = 2


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    made: dict[tuple[str, str], Path] = {}

    def make(family: str, variant: str) -> Whole:
        if (family, variant) not in made:
            made[family, variant] = write_variant(family, variant, tmp_path_factory.mktemp("model"))
        return whole_model(made[family, variant], 128)

    return make


@pytest.fixture
def native() -> None:
    if backends.active().NAME != "native":
        pytest.skip("only the native kernels run layers together")


@pytest.fixture(scope="module")
def plain(model_of) -> Whole:
    return model_of("qwen3_moe", "plain")


def gates_of(whole: Whole) -> ProxyGates | None:
    """Slices as the neurons lie, with a random proxy; None where no layer is routed or its experts cannot be split."""
    spec = whole.checkpoint.spec
    if not spec.moe_layers or any(spec.layers[layer].ffn.width % N for layer in spec.moe_layers):
        return None
    generator = torch.Generator().manual_seed(3)
    parts = {}
    for layer in spec.moe_layers:
        gate, F = spec.layers[layer].gate, spec.layers[layer].ffn.width
        assert gate is not None
        slopes, offsets = (torch.rand(gate.num_experts, N, generator=generator) for _ in range(2))
        order = torch.arange(F).expand(gate.num_experts, F).contiguous()
        parts[layer] = LayerParts(order, slopes, offsets)
    try:
        return ProxyGates(whole.checkpoint, SubExperts(N, 2, parts), spec.moe_layers)
    except CheckpointError:  # mxfp4
        return None


def prepare(engine: Engine, gates: ProxyGates | None, joins: bool, most: int | None = None) -> PreparedSteps:
    runner = engine.runner
    runner.joins = joins
    runner.gates = gates
    if most is not None:
        runner.prepared.table._most = most
    return runner.prepared


def answers(engine: Engine, tiers=(0, 1, 3, 0, 2), *, half_way=None):
    """Tokens, log probabilities and bill of requests that come one after another and have unequal lengths."""
    ended, told, steps = {}, {}, 0
    for index, tier in enumerate(tiers):
        ids = [5 + (11 * index + 7 * i) % 500 for i in range(3 + 9 * index)]
        params = SamplingParams(max_tokens=4 + 3 * (index % 3), logprobs=2, ignore_eos=True)
        engine.submit(Request(f"r{index}", ids, params, 0.0, tier=tier))
        for _ in range(2):
            collect(engine.step(), ended, told)
    while not engine.is_idle:
        steps += 1
        if half_way is not None and steps == 2:
            half_way()
        collect(engine.step(), ended, told)
    return {name: (ended[name].request.output_ids, told[name], bill(ended[name])) for name in sorted(ended)}


def collect(outputs, ended, told):
    for output in outputs:
        if output.logprobs is not None:
            told.setdefault(output.request_id, []).append(output.logprobs)
        if output.ended is not None:
            assert output.ended.finish_reason == "length", output.ended.detail
            ended[output.request_id] = output.ended


def bill(ended):
    return {name: round(share, 9) for name, share in ended.bill.items()}


def engine_on(whole: Whole) -> Engine:
    return engine_of(whole, context_tokens=128, max_running=4, max_rows=40)


@pytest.mark.parametrize("family, variant", CASES)
def test_prepared_steps_are_those_of_layers_one_by_one(model_of, family, variant):
    whole = model_of(family, variant)
    gates = gates_of(whole)
    tiers = (0, 1, 3, 0, 2) if gates is not None else (0,) * 5
    if gates is not None:
        full = gates.elasticity.full_tier
        tiers = tuple(tier if tier < full else 0 for tier in tiers)
    found = []
    for joins in (False, True):
        engine = engine_on(whole)
        prepared = prepare(engine, gates, joins)
        found.append(answers(engine, tiers))
        spans = prepared.spans(engine.runner.port.banks_here())
        is_joined = any(run is not None for _, run in spans)
        can_join = family in ("mixtral", "qwen3_moe", "gpt_oss") and backends.active().NAME == "native"
        assert is_joined == (joins and can_join)
        assert bool(prepared.table.counts().used) == is_joined, "who runs layer by layer keeps nothing"
    assert found[0] == found[1]


@pytest.mark.usefixtures("native")
def test_what_is_kept_may_be_thrown_away_any_time(plain):
    gates = gates_of(plain)
    found = []
    for most in (None, 1):
        engine = engine_on(plain)
        prepared = prepare(engine, gates, True, most)
        found.append(answers(engine))
    assert prepared.table.counts().dropped > 3 and len(prepared.table.keys()[1]) == 1
    assert found[0] == found[1]


@pytest.mark.usefixtures("native")
def test_another_placement_is_prepared_anew(plain):
    """Half-way the engine goes over to the same experts in other memory, as a change of epoch does."""
    spec = plain.checkpoint.spec
    other = replace(plain, store=load_experts(plain.checkpoint, spec, all_experts(spec)))
    gates = gates_of(plain)
    engine = engine_on(plain)
    prepare(engine, gates, True)
    undisturbed = answers(engine)
    engine = engine_on(plain)
    prepared = prepare(engine, gates, True)
    before = prepared.spans(engine.runner.port.banks_here())

    def switch() -> None:
        engine.switch_port(engine.runner, placed_experts(other))

    found = answers(engine, half_way=switch)
    after = prepared.spans(engine.runner.port.banks_here())
    assert {name: each[:2] for name, each in found.items()} == {
        name: each[:2] for name, each in undisturbed.items()
    }
    assert before is not after and after[0].run is not before[0].run


@pytest.mark.usefixtures("native")
def test_experts_that_go_away_are_asked_for_again(plain):
    """A layer that is no longer whole runs by itself, and together with its neighbours once it is whole again."""
    spec = plain.checkpoint.spec
    own = replace(plain, store=load_experts(plain.checkpoint, spec, all_experts(spec)))
    engine = engine_on(own)
    prepared, port = prepare(engine, None, True), engine.runner.port

    def spans():
        return [(span.first, span.last, run is not None) for span, run in prepared.spans(port.banks_here())]

    assert spans() == [(0, spec.num_layers, True)]
    expert = all_experts(spec)[0]
    weight = own.store.bank(expert.layer).get(expert.index)
    own.store.drop(expert)
    assert spans()[0] == (0, 1, False) and spans()[1] == (1, spec.num_layers, True)
    own.store.add(expert, weight)
    assert spans() == [(0, spec.num_layers, True)]


def test_numbers_that_are_not_finite_fail_their_request_and_no_other(plain):
    """A run that stops is gone on with layer by layer."""
    engine = engine_on(plain)
    prepare(engine, None, True)
    healthy = answers(engine, (0, 0))
    engine = engine_on(plain)
    prepare(engine, None, True)
    decoder, table = engine.runner.decoder, engine.runner.table
    embed = decoder.embed

    def spoilt(token_ids, batch=None):
        hidden = embed(token_ids, batch)
        owners = [table._owner[line].request_id for line in range(2) if table._owner[line] is not None]
        if len(token_ids) == 2 and owners == ["r0", "r1"]:
            hidden[1] = torch.inf
        return hidden

    decoder.embed = spoilt
    ended, told = {}, {}
    for index in range(2):
        ids = [5 + (11 * index + 7 * i) % 500 for i in range(3 + 9 * index)]
        params = SamplingParams(max_tokens=4 + 3 * index, logprobs=2, ignore_eos=True)
        engine.submit(Request(f"r{index}", ids, params, 0.0))
        for _ in range(2):
            for output in engine.step():
                told.setdefault(output.request_id, []).append(output.logprobs)
                if output.ended is not None:
                    ended[output.request_id] = output.ended
    while not engine.is_idle:
        for output in engine.step():
            if output.ended is not None:
                ended[output.request_id] = output.ended
    assert ended["r1"].finish_reason == "error" and "not finite" in ended["r1"].detail
    assert ended["r0"].finish_reason == "length"
    assert ended["r0"].request.output_ids == healthy["r0"][0]


def test_sixteen_budgets_cost_a_sixth_of_whole_steps(plain):
    """Bytes of the very buffers, on the demo model's shape of layers and larger ones alike."""
    gates = gates_of(plain)
    prepared = PreparedSteps(engine_on(plain).runner.decoder, gates)
    table = prepared.table
    for rows in (1, 2, 4, 8, 16):
        for budget in range(16):
            table.get(rows, budget)
    counts = table.counts()
    assert (counts.attention, counts.experts, counts.whole) == (5, 80, 80)
    assert counts.spared > 0.84


@pytest.mark.usefixtures("native")
def test_what_does_not_belong_to_a_layer_is_named(plain):
    engine = engine_on(plain)
    decoder, store, gates = engine.runner.decoder, plain.store, gates_of(plain)
    part = decoder.layer_in_run(0, store.bank(0), gates.layer(0))
    assert part is not None and bind_layers([part]) is not None and bind_layers([]) is None
    D, E = plain.checkpoint.spec.width, part.experts.num_experts
    weight = part.experts.get(0)
    small = ExpertBank(2, D, weight.F)
    small.set(0, weight)
    with pytest.raises(ValueError, match=f"experts: found 2 of width {D}, expected {E} of width {D}"):
        bind_layers([part._replace(experts=small)])
    slices = part.slices
    with pytest.raises(ValueError, match="neurons: found"):
        bind_layers([part._replace(slices=slices._replace(neurons=small))])
    with pytest.raises(ValueError, match=r"offsets: found \[1, 2\]"):
        bind_layers([part._replace(slices=slices._replace(offsets=slices.offsets[:1]))])
    with pytest.raises(ValueError, match=r"counts: found \[1, 1\]"):
        bind_layers([part._replace(counts=torch.zeros(1, 1, dtype=torch.int8))])
    run, b = bind_layers([part]), decoder.run_buffers(2)
    ints = [torch.zeros(2, dtype=torch.int32) for _ in range(3)]
    rows = (*ints, torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="layer run: found hidden"):
        run.run(
            b.hidden, b.x, rows, b.scratch, b.gate_logits, b.ids[:, :1], b.weights, b.expert_out, b.dense_out
        )
    ints[2][1] = 7
    with pytest.raises(ValueError, match="row_request: entry 1 is 7, expected 0 to 0"):
        run.run(
            b.hidden,
            b.x,
            rows,
            b.scratch,
            b.gate_logits,
            b.ids,
            b.weights,
            b.expert_out,
            b.dense_out,
            b.zeros,
        )
