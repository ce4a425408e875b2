"""Recorded segments give what layers run one by one give: bit for bit where calls are repeated, within a bound compiled."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edge_runtime.elastic.gates import ProxyGates
from edge_runtime.engine.engine import Engine
from edge_runtime.engine.request import Request, SamplingParams
from edge_runtime.model.decoder import Decoder
from kernels import backends, gathered, ops, slices
from kernels.replay import REPEATING, Recording, compiled_by
from tests.edge_runtime.engine.test_prepared import answers, engine_on, gates_of
from tests.support.engines import Whole, whole_model
from tests.support.families import write_variant

FAMILIES = ("qwen3_moe", "olmoe", "deepseek_v2", "gpt_oss", "gemma4", "qwen2_moe")
TRACED = compiled_by("eager")
"""Traced as for a compiler, and run without one: what a compiler is given, in a second."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def make(family: str):
        if family not in made:
            made[family] = write_variant(family, "plain", tmp_path_factory.mktemp("model"))
        return made[family]

    return make


@pytest.fixture(scope="module")
def plain(folder_of) -> Whole:
    return whole_model(folder_of("qwen3_moe"), 128)


@pytest.fixture
def torch_kernels():
    before = backends.active().NAME
    backends.use("torch")
    yield
    backends.use(before)


def recorded(whole: Whole, gates: ProxyGates | None, record: Recording | None) -> Engine:
    engine = engine_on(whole)
    engine.runner.joins, engine.runner.gates, engine.runner.record = False, gates, record
    return engine


def tiers_for(gates: ProxyGates | None) -> tuple[int, ...]:
    if gates is None:
        return (0,) * 5
    return tuple(tier if tier < gates.elasticity.full_tier else 0 for tier in (0, 1, 3, 0, 2))


class Unseen(TorchDispatchMode):
    """Refuses what a captured graph refuses: to look at numbers while work is on its way."""

    LOOKS = ("aten._local_scalar_dense", "aten.nonzero", "aten._unique2", "aten.masked_select", "aten.equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not str(func).startswith(self.LOOKS), f"{func} would wait for the device"
        return func(*args, **(kwargs or {}))


class Blind:
    """Work that is repeated as a graph is: once to warm up, then without a look at any number."""

    nbytes = 7

    def __init__(self, work, *arguments, restored=()):
        before = [tensor.clone() for tensor in restored]
        work(*arguments)
        for tensor, kept in zip(restored, before, strict=True):
            tensor.copy_(kept)
        self._call = lambda: work(*arguments)

    def __call__(self):
        with Unseen():
            self._call()


BLIND = Recording("graphs", Blind)


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_are_those_of_layers_one_by_one(folder_of, family):
    """Also who warms up first, and may not look: as a graph on a GPU."""
    whole = whole_model(folder_of(family), 128)
    gates = gates_of(whole)
    expected = answers(recorded(whole, gates, None), tiers_for(gates))
    engine = recorded(whole, gates, BLIND)
    assert answers(engine, tiers_for(gates)) == expected
    counts = engine.runner.segment_counts()
    assert counts.used > 5 and counts.attention > 1 and counts.num_bytes >= 7 * counts.made


def test_attention_is_kept_by_shape_and_experts_by_budget_too(plain):
    gates = gates_of(plain)
    engine = recorded(plain, gates, REPEATING)
    answers(engine, tiers_for(gates))
    rows, keys = engine.runner.captured.table.keys()
    assert len(rows) == len(set(rows)) and {key.rows for key in keys} == set(rows)
    assert len(keys) > len(rows) and any(key.budget for key in keys)


def test_what_is_recorded_may_be_thrown_away_any_time(plain):
    gates = gates_of(plain)
    expected = answers(recorded(plain, gates, None), tiers_for(gates))
    engine = recorded(plain, gates, BLIND)
    engine.runner.captured.table._most = 1
    assert answers(engine, tiers_for(gates)) == expected
    assert engine.runner.segment_counts().dropped > 2


def test_experts_that_others_hold_are_asked_for_between_recorded_attention(plain):
    """A layer whose experts are not all here runs by the port, after recorded attention."""
    gates = gates_of(plain)
    expected = answers(recorded(plain, gates, None), tiers_for(gates))
    engine = recorded(plain, gates, BLIND)
    here = engine.runner.port.banks_here()
    some = {layer: bank for layer, bank in here.items() if layer != min(here)}
    asked, run = [], engine.runner.port.run
    engine.runner.port.banks_here = lambda: some

    def noted(layer, *arguments):
        asked.append(layer)
        return run(layer, *arguments)

    engine.runner.port.run = noted
    engine.runner.port.add_here = lambda *arguments: None
    assert answers(engine, tiers_for(gates)) == expected
    assert set(asked) >= {min(here)}


def test_numbers_that_are_not_finite_fail_their_request_and_no_other(plain, monkeypatch):
    expected = answers(recorded(plain, None, BLIND), (0, 0))
    engine = recorded(plain, None, BLIND)
    embed, steps = Decoder.embed, []

    def spoilt(self, token_ids, batch=None):
        hidden = embed(self, token_ids, batch)
        if len(token_ids) == 2:
            steps.append(1)
            hidden[1] = torch.inf
        return hidden

    monkeypatch.setattr(Decoder, "embed", spoilt)
    ended = {}
    for index in range(2):
        ids = [5 + (11 * index + 7 * i) % 500 for i in range(3 + 9 * index)]
        params = SamplingParams(max_tokens=4 + 3 * (index % 3), ignore_eos=True)
        engine.submit(Request(f"r{index}", ids, params, 0.0))
        engine.step()
    while not engine.is_idle:
        ended |= {out.ended.request.request_id: out.ended for out in engine.step() if out.ended is not None}
    assert steps and ended["r1"].finish_reason == "error" and "not finite" in ended["r1"].detail
    assert ended["r0"].request.output_ids == expected["r0"][0]


@pytest.mark.slow
@pytest.mark.usefixtures("torch_kernels")
def test_what_is_traced_for_a_compiler_gives_the_tokens_of_layers_one_by_one(folder_of):
    whole = whole_model.__wrapped__(folder_of("qwen3_moe"), 128)
    gates = gates_of(whole)
    expected = answers(recorded(whole, gates, None), (0, 1))
    engine = recorded(whole, gates, TRACED)
    found = answers(engine, (0, 1))
    assert {name: each[0] for name, each in found.items()} == {
        name: each[0] for name, each in expected.items()
    }
    assert engine.runner.segment_counts().made > 2


@pytest.mark.usefixtures("torch_kernels")
@pytest.mark.parametrize("kind", ["swiglu", "clamped_swiglu", "relu"])
def test_gathered_experts_are_the_experts(kind):
    """Distance over length below 1e-6 of the whole layer: the same float32 products, summed in another order."""
    T, K, E, N, D, F = 3, 2, 5, 4, 24, 32
    generator = torch.Generator().manual_seed(2)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    bank = ops.ExpertBank(E, D, F)
    biases = {}
    for index in range(E):
        gate = None if kind == "relu" else draw(F, D)
        if kind == "clamped_swiglu":
            biases = {"gate_bias": draw(F), "up_bias": draw(F), "down_bias": draw(D), "limit": 7.0}
        bank.set(index, ops.pack_expert(gate, draw(F, D), draw(D, F), activation=kind, **biases))
    x, ids, weights = draw(T, D), torch.tensor([[4, 0], [1, 2], [0, 3]], dtype=torch.int32), draw(T, K).abs()
    masks = torch.tensor([[15, 0], [5, 8], [1, 14]], dtype=torch.int32)
    expected, expected_sliced = torch.ones(2, T, D).unbind(0)
    ops.experts(x, ids, weights, bank, expected, expert_out=torch.empty(T * K, D))
    slices.sliced_experts(x, ids, weights, masks, N, bank, expected_sliced, expert_out=torch.empty(T * K, D))
    stacked = gathered.stack_experts(bank)
    assert stacked is not None and bank.handle[1].up.data_ptr() == stacked.up[1].data_ptr()
    found, found_sliced = torch.ones(2, T, D).unbind(0)
    gathered.add_experts(stacked, x, ids, weights, found)
    gathered.add_slices(stacked, x, ids, weights, masks, N, 12, found_sliced)
    for one, other in ((found, expected), (found_sliced, expected_sliced)):
        assert float((one - other).norm() / other.norm()) < 1e-6
    after = torch.ones(T, D)
    ops.experts(x, ids, weights, bank, after, expert_out=torch.empty(T * K, D))
    assert torch.equal(after, expected), "the bank computes as before on what is stacked"


@pytest.mark.usefixtures("torch_kernels")
def test_experts_kept_as_codes_are_not_stacked():
    bank = ops.ExpertBank(1, 32, 32)
    weight = torch.randn(32, 32)
    bank.set(0, ops.pack_expert(weight, weight, weight, format="int8"))
    assert gathered.stack_experts(bank) is None
