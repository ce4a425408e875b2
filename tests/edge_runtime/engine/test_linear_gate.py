"""The tuned gate in an engine: it chooses what calibration's plain model chooses, and whole requests never notice it."""

import pytest
import torch
from torch.nn import functional

from calibration.elastic_eval import split_experts
from calibration.linear_gate import expanded, linear_route
from calibration.plain_model import PlainModel
from edge_runtime.artifacts import Artifact, write_section
from edge_runtime.elastic.linear_gate import LinearGates, with_linear_gate
from edge_runtime.elastic.sub_experts import SubExperts, read_sub_experts
from edge_runtime.engine.request import Request, SamplingParams
from edge_runtime.errors import ArtifactError
from edge_runtime.model.build import add_experts, empty_store, load_trunk
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.footprint import footprint
from edge_runtime.node.share import gates_for
from tests.support.clusters import MODEL
from tests.support.decoders import all_experts
from tests.support.elsewhere import Elsewhere, budget_engine, selector_of, some_elsewhere
from tests.support.engines import Whole, engine_of, placed_experts, run_to_end, whole_model
from tests.support.families import VARIANTS, write_variant

N, FULL = 4, 16
PROMPTS = [[5 + 7 * i, 90 + i, 400, 33, 12 + i] for i in range(4)]


@pytest.fixture(scope="module")
def plain(demo_model) -> Whole:
    return whole_model(demo_model)


@pytest.fixture(scope="module")
def parts(plain) -> SubExperts:
    artifact = Artifact.open(MODEL / "calibration", model_hash=plain.checkpoint.model_hash)
    found = read_sub_experts(artifact, plain.checkpoint.spec)
    assert found is not None
    tuned = with_linear_gate(found, artifact, plain.checkpoint.spec)
    assert tuned.digest != found.digest and tuned.layers is found.layers, "rows of the gate, and nothing else"
    return tuned


@pytest.fixture(scope="module")
def split(plain, parts) -> Whole:
    store = empty_store(plain.checkpoint.spec)
    order = {layer: each.permutation for layer, each in parts.layers.items()}
    add_experts(
        store,
        plain.checkpoint,
        all_experts(plain.checkpoint.spec),
        order_of=lambda e: order[e.layer][e.index],
    )
    return Whole(plain.checkpoint, store, plain.trunk)


@pytest.fixture(scope="module")
def gates(plain, parts) -> LinearGates:
    found = gates_for(plain.checkpoint, parts, plain.trunk(0, 6))
    assert isinstance(found, LinearGates)
    return found


def answers(whole, tiers, gates=None, tokens=6, *, engine=None, quality="exact"):
    engine = engine or engine_of(whole, port=placed_experts(whole))
    engine.runner.gates = gates
    for i, tier in enumerate(tiers):
        params = SamplingParams(max_tokens=tokens, seed=0, ignore_eos=True, quality=quality)
        engine.submit(Request(f"r{i}", PROMPTS[i], params, 0.0, tier=tier))
    ended = run_to_end(engine)
    return [ended[f"r{i}"] for i in range(len(tiers))]


def texts(ended):
    return [each.request.output_ids for each in ended]


def test_its_rows_are_planned(plain, gates):
    with_rows, without = footprint(plain.checkpoint, gate_rows=N), footprint(plain.checkpoint)
    assert sum(with_rows.layer_bytes) - sum(without.layer_bytes) == gates.nbytes > 0


def test_whole_requests_answer_as_the_plain_model_beside_others(plain, split, gates):
    beside = texts(answers(split, [0, 7, 0, 3], gates))
    expected = texts(answers(plain, [0, 0, 0, 0]))
    assert beside[0] == expected[0] and beside[2] == expected[2]


def test_rows_at_a_tier_answer_as_calibrations_model_and_alone_as_in_a_batch(split, parts, gates):
    together = answers(split, [6, 0, 11, 1], gates)
    for index, tier in ((0, 6), (2, 11), (3, 1)):
        alone = [0, 0, 0, 0]
        alone[index] = tier
        assert texts(answers(split, alone, gates))[index] == texts(together)[index]
    model = PlainModel(split.checkpoint)
    split_experts(model, parts)
    model.gates = dict(parts.linear)
    tokens = list(PROMPTS[2])
    with torch.no_grad():
        for _ in range(3):
            logits = model.logits(model.run(torch.tensor([tokens]), linear_route(model, N, 11)))
            tokens.append(int(logits[0, -1].argmax()))
    assert tokens[len(PROMPTS[2]) :] == together[2].request.output_ids[:3]


def test_the_bill_says_what_ran_and_where(split, gates):
    for ended, tier in zip(answers(split, [6, 11, 1], gates), (6, 11, 1), strict=True):
        bill = ended.bill
        assert bill["K"] == tier and bill["K_run"] == pytest.approx(tier)
        shares = [
            bill[name] for name in ("exact_here", "exact_elsewhere", "substituted", "deferred", "dropped")
        ]
        assert sum(shares) == pytest.approx(1) and 0 < bill["dropped"] < 1
        rows = len(PROMPTS[0]) + 5
        assert sum(ended.slots.values()) == 6 * rows * tier, "one slot for each sub-expert, and no more"


@pytest.mark.parametrize("quality", [0.0005, 0.01, 1.0])
def test_budgets_raise_k_and_are_never_overdrawn_and_stand_ins_are_left_alone(split, parts, gates, quality):
    port = Elsewhere(split, some_elsewhere(6, 32), selector_of(6, 32, 2))
    dear = LinearGates(
        split.checkpoint.spec,
        parts._replace(drop_loss=dict.fromkeys(range(6), 2.0), power=2.0),
        [(i, layer.gate) for i, layer in enumerate(split.trunk(0, 6).layers)],
    )
    [ended] = answers(split, [4], dear, engine=budget_engine(split, port), quality=quality)
    bill = ended.bill
    assert bill["budget_spent"] <= 6 * quality and bill["substituted"] == 0
    assert 4 <= bill["K_run"] <= FULL and (quality == 1.0 or bill["K_run"] > 4)


@pytest.mark.parametrize("family", sorted(set(VARIANTS) - {"gemma4"}))
def test_every_family_chooses_as_calibration_does(family, tmp_path):
    checkpoint = Checkpoint.open(write_variant(family, "plain", tmp_path))
    spec, draw = checkpoint.spec, torch.Generator().manual_seed(0)
    model = PlainModel(checkpoint)
    rows = {}
    for layer, gate in model.gates.items():
        weight, bias = expanded(gate, 2)
        rows[layer] = (weight + 0.05 * torch.randn(weight.shape, generator=draw), bias)
    trunk = load_trunk(checkpoint, spec, 0, spec.num_layers, context_tokens=32)
    own = [(i, each.gate) for i, each in enumerate(trunk.layers) if each.gate is not None]
    gates = LinearGates(spec, SubExperts(2, 1, {}, linear=rows), own)
    model.gates = rows
    layer, full = spec.moe_layers[0], gates.elasticity.full_tier
    x = torch.randn(5, spec.width, generator=draw)
    top_k = full // 2
    ids = torch.stack([torch.randperm(spec.layers[layer].gate.num_experts)[:top_k] for _ in range(5)]).int()
    weights = torch.full((5, top_k), 1 / top_k)
    for tier in range(1, full):
        with torch.no_grad():
            expected = linear_route(model, 2, tier)(layer, x, functional.linear(x, *rows[layer]))
        tiers = torch.tensor([tier, 0, tier, tier, tier], dtype=torch.int32)
        found = gates.choose(layer, x, ids, weights, tiers)
        for row in (0, 2, 3, 4):
            kept = found.slices.masks[row] > 0
            assert int(kept.sum()) == tier
            pairs = {
                (int(e), int(m)): float(w)
                for e, m, w in zip(
                    found.expert_ids[row][kept],
                    found.slices.masks[row][kept],
                    found.gate_weights[row][kept],
                    strict=True,
                )
            }
            wanted = {
                (int(e), 1 << int(w.argmax())): float(w.max())
                for e, w in zip(expected.expert_ids[row], expected.weights[row], strict=True)
            }
            assert pairs == pytest.approx(wanted, rel=1e-4)
        whole = found.slices.masks[1] > 0
        assert torch.equal(found.expert_ids[1][whole], ids[1]) and (found.slices.masks[1][whole] == 3).all()
    assert gates.choose(layer, x, ids, weights, torch.zeros(5, dtype=torch.int32)) is None


def test_who_cannot_be_served_by_it_is_told_in_a_sentence(tmp_path, plain, parts):
    spec, hash_ = plain.checkpoint.spec, plain.checkpoint.model_hash
    meta = {"num_parts": N, "layers": list(range(6))}
    write_section(tmp_path, "partition", {"permutation": torch.zeros(1)}, meta, model_hash=hash_)
    artifact = Artifact.open(tmp_path)
    with pytest.raises(ArtifactError, match='gate = "linear", but .* has no section linear_gate'):
        with_linear_gate(parts, artifact, spec)
    write_section(tmp_path, "linear_gate", {"weight": torch.zeros(6, 32, 256)}, meta, model_hash=hash_)
    with pytest.raises(
        ArtifactError, match=r"linear_gate has the shape \[6, 32, 256\], expected \[6, 128, 256\]"
    ):
        with_linear_gate(parts, Artifact.open(tmp_path), spec)
    gemma = Checkpoint.open(write_variant("gemma4", "plain", tmp_path / "gemma4"))
    own = gemma.spec.layers[gemma.spec.moe_layers[0]].gate
    rows = torch.zeros(len(gemma.spec.moe_layers), own.num_experts * N, gemma.spec.width)
    folder = tmp_path / "of gemma"
    write_section(folder, "linear_gate", {"weight": rows}, meta, model_hash=gemma.model_hash)
    with pytest.raises(ArtifactError, match='gates of gemma4 read what experts do not.*gate = "proxy"'):
        with_linear_gate(parts, Artifact.open(folder), gemma.spec)
