"""Weights that are quantised on disk: what they become, and that nothing of their scales is overlooked."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from edge_runtime.errors import CheckpointError, ConfigError
from edge_runtime.model.build import add_experts, empty_store, load_experts, read_neurons
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.quantised import fp8_to_bfloat16, mxfp4_columns, mxfp4_to_bfloat16, scale_shape
from tests.support.decoders import Sequences, all_experts
from tests.support.families import mxfp4_codes, plain_copy, store_as_mxfp4, write_variant
from tests.support.tiny_models import Reference, edit_config, read_tensors, write_tensors, write_tiny

BLOCK = 128
FP8 = {
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
}
PLAIN_PARTS = ("norm", "embed_tokens", "lm_head", "gate.weight", "router", "bias")
W1 = "model.layers.0.block_sparse_moe.experts.3.w1.weight"


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 codes of [.., rows, columns] and a float32 scale for each block, the last ones partial."""
    *stack, rows, columns = weight.shape
    shape = scale_shape((rows, columns), (BLOCK, BLOCK))
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(*stack, *shape)
    for i in range(shape[0]):
        for j in range(shape[1]):
            part = (..., slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            scale = weight[part].float().abs().amax((-2, -1)) / 448
            scales[..., i, j] = scale
            codes[part] = (weight[part].float() / scale[..., None, None]).to(torch.float8_e4m3fn)
    return codes, scales


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers in float32, element by element and block by block."""
    found = torch.empty(codes.shape)
    for i in range(scales.shape[-2]):
        for j in range(scales.shape[-1]):
            part = (..., slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            found[part] = codes[part].float() * scales[..., i, j][..., None, None]
    return found


def write_fp8(folder: Path, copy: Path | None = None, family: str = "mixtral", **config) -> Path:
    """A model with fp8 matrices of 130 columns, and into `copy` the same numbers as bf16."""
    options = {"hidden_size": 130, "intermediate_size": 130, "head_dim": 32, "num_hidden_layers": 2} | config
    write_tiny(family, folder, **options)
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in read_tensors(folder).items():
        if any(part in name for part in PLAIN_PARTS):
            stored[name] = plain[name] = tensor
            continue
        stored[name], stored[f"{name}_scale_inv"] = quantise(tensor)
        plain[name] = dequantise(stored[name], stored[f"{name}_scale_inv"]).bfloat16()
    if copy is not None:
        write_tiny(family, copy, **options)
        write_tensors(copy, plain)
    write_tensors(folder, stored)
    edit_config(folder, quantization_config=FP8)
    return folder


def fault(folder: Path) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        Checkpoint.open(folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mixtral", {}),
        ("mixtral", {"as_on_hub": False}),
        ("qwen2_moe", {"moe_intermediate_size": 130, "mlp_only_layers": [0], "hidden_size": 128}),
        ("deepseek_v2", {"hidden_size": 132, "moe_intermediate_size": 130, "kv_lora_rank": 130}),
    ],
)
def test_fp8_with_partial_blocks_equals_the_same_numbers_in_transformers(tmp_path, family, options):
    folder = write_fp8(tmp_path / "fp8", tmp_path / "plain", family, **options)
    ids = list(range(5, 45))
    logits = Sequences(Checkpoint.open(folder)).whole(ids)
    expected = Reference(tmp_path / "plain").logits(ids)
    assert expected.std() > 0.2
    assert (logits - expected).abs().max() < 1e-4


def test_partial_blocks_have_scales_of_their_own():
    weight = torch.randn(130, 130, generator=torch.Generator().manual_seed(0))
    weight[128:, 128:] *= 1000
    codes, scales = quantise(weight)
    assert scales.shape == (2, 2)
    found = fp8_to_bfloat16(codes, scales, (BLOCK, BLOCK))
    assert torch.equal(found, dequantise(codes, scales).bfloat16())
    # e4m3 has 4 bits of significand: half a unit of its last place is 1/16 of a number.
    assert ((found.float() - weight).abs() <= weight.abs() / 16 + scales.amax() * 2**-9).all()


def test_a_missing_scale_is_an_error_that_names_it(tmp_path):
    folder = write_fp8(tmp_path)
    tensors = read_tensors(folder)
    del tensors[f"{W1}_scale_inv"]
    write_tensors(folder, tensors)
    assert f"tensor {W1} is fp8, but its block scales {W1}_scale_inv are missing" in fault(folder)


def test_an_unknown_scale_is_an_error_that_names_it(tmp_path):
    folder = write_fp8(tmp_path)
    tensors = read_tensors(folder)
    write_tensors(folder, tensors | {f"{W1.removesuffix('weight')}input_scale": torch.ones(1)})
    assert "belong to no part of a mixtral model" in fault(folder)
    norm = "model.layers.0.input_layernorm.weight_scale_inv"
    write_tensors(folder, tensors | {norm: torch.ones(1)})
    assert norm in fault(folder)


def test_scales_of_another_block_size_are_an_error(tmp_path):
    folder = write_fp8(tmp_path)
    edit_config(folder, quantization_config=FP8 | {"weight_block_size": [64, 128]})
    assert "_scale_inv has shape [" in fault(folder)


def test_fp8_that_the_config_does_not_announce_is_an_error(tmp_path):
    folder = write_fp8(tmp_path)
    edit_config(folder, remove=("quantization_config",))
    message = fault(folder)
    assert "F8_E4M3" in message or "belong to no part" in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quant_method": "gptq"}, "quantization_config.quant_method = 'gptq' is not supported"),
        ({"activation_scheme": "static"}, "quantization_config.activation_scheme = 'static'"),
        ({"fmt": "e5m2"}, "quantization_config.fmt = 'e5m2'"),
        ({"weight_block_size": None}, "quantization_config.weight_block_size = None"),
        ({"weight_block_size": [128]}, r"quantization_config.weight_block_size = [128]"),
        ({"bits": 4}, "quantization_config.bits = 4 is not known"),
    ],
)
def test_a_quantisation_that_is_not_read_is_refused_by_key_and_value(tmp_path, changes, said):
    folder = write_tiny("mixtral", tmp_path)
    edit_config(folder, quantization_config=FP8 | changes)
    if changes == {"weight_block_size": None}:
        said = "weight_block_size is missing, expected the rows"
    assert said in fault(folder)


def test_mxfp4_is_only_read_where_a_family_has_it(tmp_path):
    folder = write_tiny("mixtral", tmp_path)
    edit_config(folder, quantization_config={"quant_method": "mxfp4"})
    assert "quantization_config.quant_method = 'mxfp4' is not supported, only 'fp8'" in fault(folder)


def test_mxfp4_is_decoded_as_transformers_decodes_it(tmp_path):
    folder = write_variant("gpt_oss", "mxfp4", tmp_path / "mxfp4")
    plain = read_tensors(plain_copy(folder, tmp_path / "plain"))
    stored = read_tensors(folder)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    found = mxfp4_to_bfloat16(stored[f"{name}_blocks"][5], stored[f"{name}_scales"][5])
    assert torch.equal(found, plain[name][5].T)


def test_mxfp4_codes_stand_for_their_sixteen_numbers():
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0] * 2)
    blocks, scales = mxfp4_codes(numbers[None] * 8)
    assert scales.tolist() == [[130]]
    assert torch.equal(mxfp4_to_bfloat16(blocks, scales), (numbers[None] * 8).bfloat16())


def test_missing_mxfp4_scales_are_an_error_that_names_them(tmp_path):
    folder = write_variant("gpt_oss", "mxfp4", tmp_path)
    tensors = read_tensors(folder)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    del tensors[name]
    write_tensors(folder, tensors)
    assert f"1 of {len(tensors) + 1} tensors are missing ({name})" in fault(folder)


def test_mxfp4_needs_widths_of_whole_blocks(tmp_path):
    folder = write_tiny("gpt_oss", tmp_path, intermediate_size=40)
    edit_config(folder, quantization_config={"quant_method": "mxfp4"})
    assert "intermediate_size = 40 is not a multiple of 32, as mxfp4 needs" in fault(folder)


def test_one_expert_is_read_without_the_others(tmp_path):
    checkpoint = Checkpoint.open(write_variant("gpt_oss", "mxfp4", tmp_path))
    stored = read_tensors(tmp_path)
    with checkpoint.read([checkpoint.table.part("expert_up", 0, 3)]) as (found,):
        assert torch.equal(found.blocks, stored["model.layers.0.mlp.experts.gate_up_proj_blocks"][3, 1::2])
        assert torch.equal(found.scales, stored["model.layers.0.mlp.experts.gate_up_proj_scales"][3, 1::2])


def test_mxfp4_stays_mxfp4_in_memory_unless_another_format_is_asked_for(tmp_path):
    checkpoint = Checkpoint.open(write_variant("gpt_oss", "mxfp4", tmp_path))
    ids = list(range(5, 45))
    sizes, logits = {}, {}
    for weight_format in ("as_stored", "mxfp4", "bfloat16", "float32", "int8"):
        store = load_experts(
            checkpoint, checkpoint.spec, all_experts(checkpoint.spec), weight_format=weight_format
        )
        sizes[weight_format] = store.nbytes
        logits[weight_format] = Sequences(checkpoint, store=store).whole(ids)
    assert sizes["as_stored"] == sizes["mxfp4"] < sizes["int8"] < sizes["bfloat16"] < sizes["float32"]
    assert torch.equal(logits["mxfp4"], logits["as_stored"])
    # The same numbers; but a block's scale is multiplied once, behind the sum of its 32 products.
    assert torch.equal(logits["bfloat16"], logits["float32"])
    assert (logits["float32"] - logits["mxfp4"]).abs().max() < 1e-4
    assert 1e-4 < (logits["int8"] - logits["as_stored"]).abs().mean() < 0.1


def test_a_scale_that_is_no_number_is_told_of_by_tensor(tmp_path):
    folder = write_variant("gpt_oss", "mxfp4", tmp_path)
    tensors = read_tensors(folder)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name][2, 5, 0] = 255
    write_tensors(folder, tensors)
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError, match=f"tensor {name} has a scale of 255, which is no number"):
        load_experts(checkpoint, checkpoint.spec, all_experts(checkpoint.spec))


def test_columns_of_mxfp4_change_places_within_groups_and_as_groups():
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (5, 3, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(120, 134, (5, 3), generator=draw, dtype=torch.uint8)
    order = torch.cat([32 * group + torch.randperm(32, generator=draw) for group in (2, 0, 1)])
    moved = mxfp4_columns(blocks, scales, order)
    assert moved is not None
    assert torch.equal(mxfp4_to_bfloat16(*moved), mxfp4_to_bfloat16(blocks, scales)[:, order])
    torn = order.clone()
    torn[[0, 40]] = order[[40, 0]]
    assert mxfp4_columns(blocks, scales, torn) is None


def test_experts_in_mxfp4_take_another_order_of_whole_groups_and_refuse_any_other(tmp_path):
    store_as_mxfp4(write_tiny("gpt_oss", tmp_path, intermediate_size=96))
    checkpoint = Checkpoint.open(tmp_path)
    spec, experts, ids = checkpoint.spec, all_experts(checkpoint.spec), list(range(5, 25))
    width = spec.layers[spec.moe_layers[0]].ffn.width
    draw = torch.Generator().manual_seed(1)
    groups = torch.randperm(width // 32, generator=draw)
    order = torch.cat([32 * int(group) + torch.randperm(32, generator=draw) for group in groups])
    plain = Sequences(checkpoint, store=load_experts(checkpoint, spec, experts)).whole(ids)

    def stored(weight_format: str, order: torch.Tensor):
        store = empty_store(spec)
        add_experts(store, checkpoint, experts, weight_format=weight_format, order_of=lambda expert: order)
        return store

    moved = stored("as_stored", order)
    assert moved.nbytes == load_experts(checkpoint, spec, experts).nbytes, "it stays mxfp4"
    assert (Sequences(checkpoint, store=moved).whole(ids) - plain).abs().max() < 1e-4
    torn = torch.randperm(width, generator=draw)
    with pytest.raises(CheckpointError, match="columns of a matrix in mxfp4 .*weight_format = .bfloat16"):
        stored("as_stored", torn)
    assert (Sequences(checkpoint, store=stored("bfloat16", torn)).whole(ids) - plain).abs().max() < 1e-4
    some = read_neurons(checkpoint, experts[0], torn[:8])
    assert some is not None, "a few neurons are numbers of their own, whatever the order"
