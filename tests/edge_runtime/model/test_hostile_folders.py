"""Folders that no tool wrote: any value for any key of a config, any header of a shard, any file in another's place.

What is wrong is one sentence, whatever it is; what is taken can be run. Nothing hangs, and nothing large is allocated for it.
"""

import copy
import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.errors import CheckpointError, ConfigError, UserError
from edge_runtime.model.architectures import read_model
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.folder import open_whole
from edge_runtime.model.footprint import footprint
from edge_runtime.model.rope import rope_keys, rope_table
from tests.support.encoder_decoders import write_tiny_switch
from tests.support.families import write_variant
from tests.support.tiny_models import INDEX_FILE, TINY, edit_config, write_tiny, write_tokenizer

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**24, 2**24 + 1, 2**31, 2**64, 10**400, 0.0, 0.5, -1.5, float("nan"), float("inf"),
    1e308, 1e-308, 1e30, 1e-30, "", "x", "1", "silu", "\ud800", "a\nb", "x" * 3000, [], [[]], [-1], [None], [0] * 5000,
    ["full_attention"], {}, {"a\nb": 1}, {"0": {}}, {"9" * 5000: {}}, {"rope_type": []}, {"rope_type": {}}, [{}],
)  # fmt: skip
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 1.0},
    {"rope_type": "default", "rope_theta": 1e-30},
    {"rope_type": "linear", "factor": 1e-37},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10**30},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 1.0},
    {"rope_type": "yarn", "factor": 4.0, "mscale": "much", "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": float("nan")},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
    {"type": "longrope", "factor": [1, 2]},
)
ENTRIES: tuple[Any, ...] = (
    None, True, -1, 1.5, "x", [], {}, [1], [-1], [1.5], [[1]], ["a"], [2**62], [2**70], [1] * 2000, [0], "F32", "I4", "F8_E4M3",
    ["F32"], {"a": 1}, float("nan"), 10**300,
)  # fmt: skip
NAMES = ("", "a\nb", "x" * 5000, "\ud800", "model.layers.99.mlp.gate.weight")
MORE_KEYS = ("rope_scaling", "quantization_config", "partial_rotary_factor", "text_config", "layer_types")
NUM_CONFIGS, NUM_HEADERS = 250, 60  # of each family, drawn from thousands
KINDS = [*sorted(TINY), "gpt_oss in mxfp4", "gemma4 with towers", "switch_transformers"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in found:
            folder = tmp_path_factory.mktemp("whole") / "model"
            if kind == "switch_transformers":
                write_tiny_switch(folder)
            elif kind in TINY:
                write_tiny(kind, folder)
            else:
                family, _, _ = kind.partition(" ")
                variant = {"gpt_oss": "mxfp4", "gemma4": "whole model with other towers"}[family]
                write_variant(family, variant, folder)
            write_tokenizer(folder)
            found[kind] = folder
        return found[kind]

    return folder_of


def linked(whole: Path, folder: Path) -> Path:
    """A folder of links, whose files can be replaced one by one."""
    folder.mkdir()
    for file in whole.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def replace(file: Path, content: bytes) -> None:
    file.unlink(missing_ok=True)
    file.write_bytes(content)


def refused(folder: Path) -> str | None:
    """The sentence with which a folder is refused; None where it is taken, and then it can be planned and turned."""
    try:
        checkpoint, _ = open_whole(folder)
    except UserError as error:
        said = str(error)
        assert said.isprintable() and len(said) < 2100, said
        return said
    spec = checkpoint.spec
    assert footprint(checkpoint).width == spec.width
    for rope, width in rope_keys(spec):
        for table in rope_table(rope, width, min(spec.context_tokens, 256)):
            assert table.isfinite().all(), (rope, width)
    return None


def places(config: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*path, key)
        if isinstance(value, Mapping):
            yield from places(value, (*path, key))


def changed(config: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The config with another value in one place; without it for `...`."""
    whole: dict[str, Any] = copy.deepcopy(dict(config))
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    if value is ...:
        del inner[path[-1]]
    return whole


@pytest.mark.parametrize("kind", KINDS)
def test_any_value_of_any_key_is_taken_or_refused_in_one_sentence(kind, folder_of, tmp_path):
    folder = linked(folder_of(kind), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    everywhere = [*places(config), *((key,) for key in MORE_KEYS if key not in config)]
    tried = [
        (path, value)
        for path in everywhere
        for value in (*VALUES, ...)
        if not (value is ... and path[0] not in config)
    ]
    for path, value in random.Random(kind).sample(tried, NUM_CONFIGS):
        replace(folder / "config.json", json.dumps(changed(config, path, value)).encode())
        try:
            refused(folder)
        except Exception as error:
            raise AssertionError(f"{'.'.join(path)} = {value!r:.60}") from error


@pytest.mark.parametrize("settings", ROPES, ids=str)
@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v2"])
def test_settings_of_rope_that_turn_nothing_are_refused_when_they_are_read(
    kind, settings, folder_of, tmp_path
):
    config = json.loads((folder_of(kind) / "config.json").read_text())
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ConfigError, match="rope"):
            read_model(config | {"rope_parameters": None, key: settings})


@pytest.mark.parametrize("kind", KINDS)
def test_any_header_of_a_shard_is_taken_or_refused_in_one_sentence(kind, folder_of, tmp_path):
    folder = linked(folder_of(kind), tmp_path / "model")
    shard = min(folder.glob("*.safetensors"))
    content = shard.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    seeded, names = random.Random(kind), [name for name in header if name != "__metadata__"]
    for _ in range(NUM_HEADERS):
        name, other = seeded.choice(names), copy.deepcopy(header)
        match seeded.randrange(6):
            case 0:
                other[name] = seeded.choice(ENTRIES)
            case 1 | 2 | 3:
                other[name][seeded.choice(("dtype", "shape", "data_offsets"))] = seeded.choice(ENTRIES)
            case 4:
                del other[name][seeded.choice(("dtype", "shape", "data_offsets"))]
            case _:
                other[seeded.choice(NAMES)] = other.pop(name) if seeded.random() < 0.5 else other[name]
        packed = json.dumps(other).encode()
        if seeded.random() < 0.3:
            damaged = bytearray(packed)
            damaged[seeded.randrange(len(damaged))] = seeded.randrange(256)
            packed = bytes(damaged)
        claimed = len(packed) if seeded.random() < 0.9 else seeded.choice((0, 1, size, 2**31, 2**64 - 1))
        replace(shard, claimed.to_bytes(8, "little") + packed + data)
        try:
            said = refused(folder)
        except Exception as error:
            raise AssertionError(f"the header {packed[:300]!r}") from error
        assert said is not None or json.loads(packed) == header, "a header that is another one was taken"


FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    INDEX_FILE,
    "model-00001-of-00002.safetensors",
)


@pytest.mark.parametrize("file", FILES)
def test_what_is_no_file_is_refused_and_never_waited_for(file, folder_of, tmp_path):
    folder = linked(folder_of("qwen3_moe"), tmp_path / "model")
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    assert f"{folder / file} is no file" in (refused(folder) or "")
    (folder / file).unlink()
    (folder / file).mkdir()
    assert f"{folder / file} is no file" in (refused(folder) or "")


def test_a_file_of_json_that_is_weights_is_not_read_whole(folder_of, tmp_path):
    folder = linked(folder_of("qwen3_moe"), tmp_path / "model")
    for file in ("config.json", "tokenizer.json", INDEX_FILE):
        replace(folder / file, b"")
        os.truncate(folder / file, 60 << 30)  # a hole of 60 GiB, which takes no room
        assert "has 64424509440 bytes, expected at most" in (refused(folder) or "")
        (folder / file).unlink()
        (folder / file).symlink_to(folder_of("qwen3_moe") / file)


@pytest.mark.parametrize(
    "name", ["", "..", ".", "/etc/passwd", "a\0b", "x" * 5000, "a\nb.safetensors", "config.json", None, 5, []]
)
def test_an_index_may_name_any_file_and_opens_none_but_those_of_weights(name, folder_of, tmp_path):
    folder = linked(folder_of("qwen3_moe"), tmp_path / "model")
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"]["lm_head.weight"] = name
    replace(folder / INDEX_FILE, json.dumps(index).encode())
    assert str(folder) in (refused(folder) or "")


@pytest.mark.parametrize(
    "value", [True, -1, 1.5, "2", [None], [2, "x"], [-1], 10**30, [10**9] * 5000, {}, [[2]], float("nan")]
)
@pytest.mark.parametrize("key", ["eos_token_id", "decoder_start_token_id"])
def test_a_token_that_is_none_is_told_with_the_file_that_names_it(key, value, folder_of, tmp_path):
    folder = linked(folder_of("switch_transformers"), tmp_path / "model")
    replace(folder / "generation_config.json", json.dumps({key: value}).encode())
    said = refused(folder) or ""
    assert key in said and ("generation_config.json" in said or "below vocab_size" in said)


def test_more_experts_than_any_model_has_are_refused_before_a_name_is_made_for_each(folder_of, tmp_path):
    folder = Path(shutil.copytree(folder_of("qwen3_moe"), tmp_path / "model"))
    edit_config(folder, num_hidden_layers=4096, num_local_experts=4096, layer_types=None)
    with pytest.raises(ConfigError, match="4096 layers have 16777216 experts in all, expected at most 65536"):
        Checkpoint.open(folder)


def test_heads_of_an_odd_width_cannot_turn(folder_of, tmp_path):
    write_tiny("qwen3_moe", tmp_path / "odd", head_dim=22)
    edit_config(tmp_path / "odd", head_dim=21)
    with pytest.raises(ConfigError, match="layer 0: rope over an odd width 21"):
        Checkpoint.open(tmp_path / "odd")


def test_a_sentence_stays_one_line_whatever_it_quotes():
    said = str(CheckpointError("tensor a\nb\x1b[31m of \ud800 " + "x" * 9000 + " is missing"))
    assert said.startswith("tensor a\\nb\\x1b[31m of \\ud800 xxx") and said.endswith("xxx is missing")
    assert said.isprintable() and len(said) < 2100
