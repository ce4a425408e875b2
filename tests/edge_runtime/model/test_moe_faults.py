"""What went wrong in comparable systems around gates and experts, held to transformers or to the plain rule."""

from functools import partial

import pytest
import torch
from torch import Tensor

from edge_runtime.model.build import load_experts
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.gate import GateWeights, gate
from edge_runtime.model.moe import Beside, LocalExperts, Missing
from edge_runtime.model.spec import GateSpec
from kernels import ops
from tests.support.decoders import Sequences, all_experts
from tests.support.families import VARIANTS, write_variant
from tests.support.tiny_models import Reference, edit_config, read_tensors, write_tensors, write_tiny
from topology.ids import ExpertId

ROUTED = sorted(VARIANTS)
GATE_NAMES = (".gate.weight", ".router.weight", ".router.proj.weight")


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 509, (count,), generator=generator).tolist()


class Watched(LocalExperts):
    """Keeps the ids of every layer's last step."""

    def __init__(self, store) -> None:
        super().__init__(store)
        self.chosen: dict[int, Tensor] = {}

    def add_here(self, *arguments: object) -> None:
        """Never all in one call, which shows no ids."""

    def run(
        self, layer: int, x: Tensor, expert_ids: Tensor, out: Tensor, beside: Beside = None
    ) -> Missing | None:
        self.chosen[layer] = expert_ids.clone()
        return super().run(layer, x, expert_ids, out, beside)


def watched(checkpoint: Checkpoint, pieces: list[tuple[int, list[int]]]) -> tuple[list[Tensor], Watched]:
    """Logits of a step and the port that saw its ids."""
    port = Watched(load_experts(checkpoint, checkpoint.spec, all_experts(checkpoint.spec)))
    sequences = Sequences(checkpoint, num_sequences=len(pieces), port=port)
    return sequences.step(pieces), port


def chosen_by_transformers(reference: Reference, ids: list[int]) -> dict[int, Tensor]:
    """Layer -> ids [T, K] that transformers' own gates choose."""
    found: dict[int, Tensor] = {}

    def keep(layer: int, module: object, args: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        found[layer] = output[2]

    hooks = [
        module.register_forward_hook(partial(keep, int(name.split("layers.")[1].split(".")[0])))
        for name, module in reference.model.named_modules()
        if type(module).__name__.endswith("Router")
    ]
    reference.logits(ids)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("family", ROUTED)
def test_the_gate_of_bf16_weights_chooses_what_a_float32_gate_chooses(family, tmp_path):
    folder = write_variant(family, "plain", tmp_path)
    ids = tokens(60)
    _, port = watched(Checkpoint.open(folder), [(0, ids)])
    expected = chosen_by_transformers(Reference(folder), ids)
    assert port.chosen.keys() == expected.keys() and port.chosen
    for layer, chosen in port.chosen.items():
        assert torch.equal(chosen.sort().values.long(), expected[layer].sort().values)


@pytest.mark.parametrize("family", ROUTED)
def test_of_experts_whose_gate_rows_are_equal_the_lowest_id_wins(family, tmp_path, backend):
    folder = write_variant(family, "plain", tmp_path)
    tensors = read_tensors(folder)
    for name, tensor in tensors.items():
        if name.endswith(GATE_NAMES):
            tensor[[2, 5, 7]] = tensor[2].clone() * 3
        if name.endswith("router.bias"):
            tensor[[2, 5, 7]] = tensor[2].clone()
    write_tensors(folder, tensors)
    _, port = watched(Checkpoint.open(folder), [(0, tokens(60))])
    twins = 0
    for chosen in port.chosen.values():
        for row in chosen.tolist():
            equal = [i for i in row if i in (2, 5, 7)]
            twins += len(equal) > 1
            if (
                family == "deepseek_v2"
            ):  # groups decide first: 2 is in the second, 5 in the third, 7 in the last
                assert equal == sorted(equal)
            else:
                assert equal == [2, 5, 7][: len(equal)]
    assert twins


def rule(logits: Tensor, **spec: object) -> tuple[Tensor, Tensor]:
    """A gate whose logits are these: the identity weighs them."""
    bias = spec.pop("selection_bias", None)
    scale = spec.pop("expert_scale", None)
    E = logits.shape[1]
    weights = GateWeights(ops.pack_linear(torch.eye(E)), selection_bias=bias, expert_scale=scale)
    return gate(GateSpec(num_experts=E, **spec), weights, logits, logits=torch.empty_like(logits))


def test_a_selection_bias_picks_and_the_raw_score_weighs(backend):
    logits = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    bias = torch.zeros(8)
    bias[6] = 10.0
    ids, weights = rule(logits, top_k=2, scores="sigmoid", selection_bias=bias)
    assert (ids[:, 0] == 6).all()
    torch.testing.assert_close(weights, logits.sigmoid().gather(1, ids.long()))
    assert (weights <= 1).all()


def test_scores_near_zero_are_renormalised_without_a_zero_denominator(backend):
    logits = torch.full((3, 8), -200.0)
    ids, weights = rule(
        logits, top_k=2, scores="sigmoid", renormalise=True, selection_bias=torch.arange(8.0) * 1e-3
    )
    assert ids.tolist() == [[7, 6]] * 3 and weights.isfinite().all()


@pytest.mark.parametrize("renormalise", [True, False])
def test_weights_that_are_not_renormalised_are_a_softmax_over_all_and_never_logits(renormalise, backend):
    logits = 5 * torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    _, weights = rule(logits, top_k=3, renormalise=renormalise)
    total = weights.sum(-1)
    assert (weights > 0).all() and (total <= 1 + 1e-6).all()
    assert bool((total - 1).abs().max() < 1e-6) == renormalise


def test_the_routed_scaling_factor_is_applied_once(backend):
    logits = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    _, plain = rule(logits, top_k=2)
    _, scaled = rule(logits, top_k=2, scale=16.0)
    assert torch.equal(scaled, 16 * plain)


def test_an_experts_scale_comes_after_the_renormalisation(backend):
    logits = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    scale = torch.rand(8) + 0.5
    ids, plain = rule(logits, top_k=2, renormalise=True)
    _, scaled = rule(logits, top_k=2, renormalise=True, expert_scale=scale)
    torch.testing.assert_close(scaled, plain * scale[ids.long()], rtol=1e-6, atol=0)


def test_only_experts_of_the_best_groups_are_chosen(backend):
    logits = torch.tensor([[9.0, 0.0, 8.0, 7.5, 0.0, 0.0, 7.9, 7.8]])
    ids, _ = rule(logits, top_k=4, num_groups=4, top_groups=2)
    assert ids.tolist() == [
        [0, 2, 3, 1]
    ]  # not 6 and 7, which are better than 3 and 1 but in the third-best group


def test_a_router_with_softmax_over_the_chosen_adds_up_to_one(backend):
    logits = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    ids, weights = rule(logits, top_k=3, scores="softmax_of_top_k")
    torch.testing.assert_close(weights, logits.gather(1, ids.long()).softmax(-1))


def test_rows_are_counted_once_each_and_padding_never(tmp_path):
    checkpoint = Checkpoint.open(write_variant("mixtral", "plain", tmp_path))
    lengths = (3, 17, 1, 40, 2, 9, 5)
    prompts = [(i, tokens(n, seed=i)) for i, n in enumerate(lengths)]
    _, port = watched(checkpoint, prompts)
    chosen = sum(ids.numel() for ids in port.chosen.values())
    assert chosen == sum(lengths) * 2 * checkpoint.spec.num_layers


class Split:
    """Experts by id over several nodes, each of which holds only its own; outputs by global id."""

    def __init__(self, checkpoint: Checkpoint, num_nodes: int) -> None:
        experts = all_experts(checkpoint.spec)
        self.host_names = [f"n{i}" for i in range(num_nodes)]
        self._ports = [
            LocalExperts(
                load_experts(
                    checkpoint, checkpoint.spec, [e for e in experts if e.index % num_nodes == node]
                ),
                name,
            )
            for node, name in enumerate(self.host_names)
        ]

    def add_here(self, *arguments: object) -> None:
        """Never all in one call, which shows no ids."""

    def run(
        self, layer: int, x: Tensor, expert_ids: Tensor, out: Tensor, beside: Beside = None
    ) -> Missing | None:
        if beside is not None:
            beside()
        came = torch.zeros(expert_ids.numel(), dtype=torch.int32)
        for port in self._ports:
            part = torch.empty_like(out)
            missing = port.run(layer, x, expert_ids, part)
            here = torch.ones(len(part), dtype=torch.bool)
            if missing is not None:
                here[missing.slots] = False
            out[here] = part[here]
            came += here
        assert (came == 1).all(), "every routed slot is computed on exactly one node"
        return None


@pytest.mark.parametrize("family", ROUTED)
@pytest.mark.parametrize("num_nodes", [2, 8])
def test_shared_experts_and_dense_mlps_count_once_however_many_nodes_there_are(family, num_nodes, tmp_path):
    checkpoint = Checkpoint.open(write_variant(family, "plain", tmp_path))
    ids = tokens(30)
    alone = Sequences(checkpoint).whole(ids)
    assert torch.equal(Sequences(checkpoint, port=Split(checkpoint, num_nodes)).whole(ids), alone)


def test_the_gate_of_the_shared_expert_is_a_sigmoid(tmp_path):
    folder = write_variant("qwen2_moe", "plain", tmp_path)
    tensors = read_tensors(folder)
    ids = tokens(30)
    logits = {}
    for factor in (0.0, 1.0, 100.0):
        changed = {
            name: tensor * factor if "shared_expert_gate" in name else tensor
            for name, tensor in tensors.items()
        }
        write_tensors(folder, changed)
        logits[factor] = Sequences(Checkpoint.open(folder)).whole(ids)
        assert (logits[factor] - Reference(folder).logits(ids)).abs().max() < 1e-4
    assert (logits[0.0] - logits[1.0]).abs().max() > 0.1


def test_weights_of_the_routed_experts_alone_are_needed(tmp_path):
    """Experts that no token was sent to may be anywhere: they are not read."""
    checkpoint = Checkpoint.open(write_variant("olmoe", "plain", tmp_path))
    ids = tokens(2)
    expected, port = watched(checkpoint, [(0, ids)])
    routed = {ExpertId(layer, i) for layer, chosen in port.chosen.items() for i in chosen.view(-1).tolist()}
    assert len(routed) < 8 * checkpoint.spec.num_layers
    store = load_experts(checkpoint, checkpoint.spec, routed)
    assert torch.equal(Sequences(checkpoint, store=store).whole(ids), expected[0])


def test_fp16_experts_whose_inner_values_pass_fp16s_range_are_exact(tmp_path, backend):
    folder = write_tiny("mixtral", tmp_path, dtype=torch.float16)
    tensors = read_tensors(folder)
    for name, tensor in tensors.items():
        if ".experts.3.w1." in name or ".experts.3.w3." in name:
            tensors[name] = tensor * 1e3
        if ".experts.3.w2." in name:
            tensors[name] = tensor * 1e-4
    write_tensors(folder, tensors)
    ids = tokens(40)
    expected = Reference(folder).logits(ids)
    logits, port = watched(Checkpoint.open(folder), [(0, ids)])
    assert any((chosen == 3).any() for chosen in port.chosen.values())
    assert logits[0].isfinite().all() and (logits[0] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["mixtral", "gemma4"])
def test_numbers_that_are_not_finite_are_told_of_by_layer_expert_and_node(family, tmp_path, backend):
    checkpoint = Checkpoint.open(write_variant(family, "plain", tmp_path))
    prompts = [(0, tokens(9, seed=1)), (1, tokens(9, seed=2))]
    whole, port = watched(checkpoint, prompts)
    layer = checkpoint.spec.num_layers - 1
    wrong = int(port.chosen[layer][0, 0])

    class Broken(Watched):
        def run(
            self, at: int, x: Tensor, expert_ids: Tensor, out: Tensor, beside: Beside = None
        ) -> Missing | None:
            missing = super().run(at, x, expert_ids, out, beside)
            if at == layer:
                out[expert_ids.view(-1) == wrong] = torch.nan
            return missing

    store = load_experts(checkpoint, checkpoint.spec, all_experts(checkpoint.spec))
    port = Broken(store)
    port.host_names = ["attic"]
    sequences = Sequences(checkpoint, num_sequences=2, port=port)
    ids, batch = sequences.batch(prompts)
    missing: list[tuple[int, Missing]] = []
    hidden = sequences.decoders[0].run(ids, batch, port, missing=missing)
    ((at, lacks),) = missing
    assert at == layer
    assert lacks.why == f"layer {layer} experts {wrong} on attic gave numbers that are not finite"
    rows = {int(slot) // 2 for slot in lacks.slots}
    assert rows == {t for t, row in enumerate(port.chosen[layer].tolist()) if wrong in row}
    logits = sequences.decoders[0].head(hidden)
    for row in set(range(18)) - rows:
        assert torch.equal(logits[row], torch.cat(whole)[row]), "other rows never notice"


def test_clamp_slope_and_biases_of_gpt_oss_all_matter(tmp_path):
    folder = write_variant("gpt_oss", "plain", tmp_path)
    ids = tokens(40)
    plain = Sequences(Checkpoint.open(folder)).whole(ids)
    for changes in ({"swiglu_limit": 0.3}, {"swiglu_alpha": 1.0}):
        edit_config(folder, **{"swiglu_limit": 2.0, "swiglu_alpha": 1.702} | changes)
        assert (Sequences(Checkpoint.open(folder)).whole(ids) - plain).abs().max() > 0.01
    edit_config(folder, swiglu_limit=2.0, swiglu_alpha=1.702)
    tensors = read_tensors(folder)
    for part in ("gate_up_proj_bias", "down_proj_bias", "router.bias", "sinks", "o_proj.bias", "q_proj.bias"):
        zeroed = {n: t * 0 if n.endswith(part) else t for n, t in tensors.items()}
        write_tensors(folder, zeroed)
        assert (Sequences(Checkpoint.open(folder)).whole(ids) - plain).abs().max() > 0.01, part


def test_a_window_hides_what_is_behind_it_and_nothing_else(tmp_path):
    folder = write_tiny("mixtral", tmp_path, sliding_window=16)
    checkpoint = Checkpoint.open(folder)
    ids = tokens(100)
    other = [*tokens(40, seed=9), *ids[40:]]
    first, second = (Sequences(checkpoint).whole(each) for each in (ids, other))
    reach = 40 + 3 * 15  # three layers, each 15 positions further back
    assert not torch.equal(first[reach - 2], second[reach - 2])
    assert torch.equal(first[reach:], second[reach:])
