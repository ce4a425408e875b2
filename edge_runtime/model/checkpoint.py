"""A model folder on disk: config, safetensors files, every tensor accounted for when it is opened.

Reads only the parts that are asked for and leaves none of the file in this process's memory. Knows how weights may be
quantised on disk; knows no device, no packing and no node.
"""

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from edge_runtime.errors import CheckpointError, cut
from edge_runtime.model import quantised
from edge_runtime.model.architectures import read_model
from edge_runtime.model.architectures.config_reader import MOST, Quantisation
from edge_runtime.model.architectures.table import Part, Shape, TensorTable
from edge_runtime.model.json_file import read_json, read_json_if_present
from edge_runtime.model.safetensors_file import FLOAT_DTYPES, ITEM_BYTES, Extent, SafetensorsFile
from edge_runtime.model.spec import ModelSpec
from kernels.ops import MXFP4
from topology.ids import ExpertId

log = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SHOWN_NAMES = 4
HASH_ALL_BYTES = 256 << 20  # up to here the hash reads every byte: 35 MB take 50 ms, 256 MB 0.4 s
HASH_SAMPLES = 64
HASH_PAGE_BYTES = 4096
COPY_AGAIN = "copy the model's files again"
MAY_BE_INFINITE = (
    "gate_bias",
    "gate_selection_bias",
    "sinks",
)  # minus infinity: an expert, or a sink, that is left out
NO_SCALE = 255  # the one exponent of mxfp4 that stands for NaN


class Known(NamedTuple):
    """What is known of a folder that holds only some of its tensors, and cannot be read off it.

    is_here  whether bytes (file name, start, end) of it may be read; all else are holes
    """

    model_hash: str
    tied_head: bool
    is_here: Callable[[str, int, int], bool]


class Checkpoint:
    """One model folder: `spec` says what it is, `read` gives its tensors.

    spec        what the config describes; `tied_head` is settled by what the files hold
    table       role -> where it lies
    config      the parsed config.json
    """

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        spec: ModelSpec,
        table: TensorTable,
        files: list[SafetensorsFile],
        quantisation: Quantisation,
        known: Known | None = None,
    ) -> None:
        self.folder = folder
        self.config = config
        self.spec = spec
        self.table = table
        self._files = files
        self._file_of = {name: file for file in files for name in file.extents}
        self._quantisation = quantisation
        self._known = known
        self._hash: str | None = known.model_hash if known else None
        table.bind(self._file_of.keys())

    @classmethod
    def open(cls, folder: str | Path, known: Known | None = None) -> "Checkpoint":
        """Read config and headers and check them against each other; no weight is read yet.

        known  of a folder that holds only some of its tensors
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"model folder {folder} does not exist")
        config = read_json(folder / "config.json")
        start = read_json_if_present(folder / "generation_config.json").get("decoder_start_token_id")
        if start is not None:  # wins, as in transformers
            if type(start) is not int or not 0 <= start < MOST:
                raise CheckpointError(
                    f"{folder / 'generation_config.json'}: found decoder_start_token_id {cut(repr(start))}, expected an id, a "
                    "whole number from 0 on; correct it, or copy the file again"
                )
            config = config | {"decoder_start_token_id": start}
        spec, table, quantisation = read_model(config, source=str(folder / "config.json"))
        files = _open_files(folder)
        checkpoint = cls(folder, config, spec, table, files, quantisation, known)
        checkpoint._account()
        checkpoint._settle_head()
        return checkpoint

    def extent(self, name: str) -> Extent:
        """dtype, shape and place of one stored tensor."""
        return self._file_of[name].extents[name]

    def stored_dtype(self, part: Part) -> str:
        """How a part's numbers are stored: BF16, F16, F32, F8_E4M3 or MXFP4."""
        return "MXFP4" if part.mxfp4 else self.extent(part.name).dtype

    def stored_bytes(self, part: Part) -> int:
        """Bytes of one part in its file, without the scales of a quantised one."""
        num_bytes = 0.5 if part.mxfp4 else ITEM_BYTES[self.extent(part.name).dtype]
        return int(math.prod(part.shape) * num_bytes)

    def expert_names(self, experts: Iterable[ExpertId]) -> list[Part]:
        """The parts of these routed experts."""
        return [part for expert in experts for part in self.expert_parts(expert)]

    def expert_parts(self, expert: ExpertId) -> list[Part]:
        """The parts of one routed expert, in the order of `TensorTable.expert_roles`."""
        return [
            self.table.part(role, expert.layer, expert.index)
            for role in self.table.expert_roles(expert.layer)
        ]

    @property
    def files(self) -> Sequence[SafetensorsFile]:
        """The weight files."""
        return self._files

    def ranges(self, parts: Iterable[Part]) -> list[tuple[str, int, int]]:
        """Which bytes of which files `read` needs for these parts: (file name, start, end), each once, in any order."""
        found: dict[tuple[str, int, int], None] = {}
        for part in parts:
            names = [name for name, *_ in part.tensors]
            if self.extent(names[0]).dtype == quantised.FP8_DTYPE:
                names.append(quantised.scale_name(part.name))
            for name in names:
                _, shape, start, end = self.extent(name)
                if part.expert is not None:  # the experts lie one after another along the first axis
                    size = (end - start) // shape[0]
                    start, end = start + part.expert * size, start + (part.expert + 1) * size
                found[self._file_of[name].path.name, start, end] = None
        return list(found)

    @contextmanager
    def read(self, parts: Sequence[Part]) -> Iterator[list[Any]]:
        """The parts as [outputs, inputs] or vectors, Tensor or MXFP4, only valid inside the block.

        What is stored as plain numbers or mxfp4 is a view of the mapped file as it is stored; fp8 becomes bfloat16,
        rounded once. The file's pages leave this process's memory at the end of the
        block, so what is copied or packed inside is all that stays. Ask for few at a time: one expert, one layer's
        projections.
        """
        if self._known is not None:
            for name, start, end in self.ranges(parts):
                if not self._known.is_here(name, start, end):
                    raise CheckpointError(f"{self.folder / name}: bytes {start} to {end} were not fetched")
        try:
            yield [self._tensor(part) for part in parts]
        finally:
            for path in {self._file_of[name].path for part in parts for name, *_ in part.tensors}:
                self._of_path[path].drop_pages()

    @cached_property
    def _of_path(self) -> dict[Path, SafetensorsFile]:
        return {file.path: file for file in self._files}

    def _raw(self, name: str, expert: int | None) -> Tensor:
        tensor = self._file_of[name].tensor(name)
        return tensor if expert is None else tensor[expert]

    def _tensor(self, part: Part) -> Tensor | MXFP4:
        if part.mxfp4:
            blocks, scales = (_taken(self._raw(name, part.expert), part.take) for name, *_ in part.tensors)
            if (scales == NO_SCALE).any():
                name = part.tensors[1][0]
                raise CheckpointError(
                    f"{self._file_of[name].path}: tensor {name} has a scale of {NO_SCALE}, which is no number; {COPY_AGAIN}"
                )
            return MXFP4(blocks, scales)
        tensor = self._raw(part.name, part.expert)
        if self.extent(part.name).dtype == quantised.FP8_DTYPE:
            # Before rows are taken or turned: scales belong to blocks of the matrix as it is stored.
            scales = self._raw(quantised.scale_name(part.name), part.expert)
            self._refuse_spoilt(part, quantised.scale_name(part.name), scales)
            tensor = quantised.fp8_to_bfloat16(tensor, scales, self._quantisation.block)
        self._refuse_spoilt(part, part.name, tensor)
        return _taken(tensor.t() if part.transposed else tensor, part.take)

    def _refuse_spoilt(self, part: Part, name: str, tensor: Tensor) -> None:
        """CheckpointError for numbers that are not finite. One pass at the memory's speed, where packing takes several."""
        low, high = map(float, torch.aminmax(tensor))  # both are NaN if one number is
        if math.isfinite(low) and math.isfinite(high):
            return
        if part.role in MAY_BE_INFINITE and not math.isnan(low):
            return
        wrong = (~tensor.isfinite()).nonzero()
        first, of_expert = wrong[0].tolist(), "" if part.expert is None else f" of expert {part.expert}"
        raise CheckpointError(
            f"{self._file_of[name].path}: tensor {name}{of_expert} has {len(wrong)} of {tensor.numel()} numbers that are not "
            f"finite, the first {float(tensor[tuple(first)])} at {first}; {COPY_AGAIN}, or take another model"
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all weight files."""
        return sum(file.num_bytes for file in self._files)

    @property
    def model_hash(self) -> str:
        """32 hex digits that differ when config or weights differ, for handshakes.

        Covers the config's values, every file's header and size, and the content: all of it up to 256 MB, beyond
        that 64 pages of 4 KiB spread evenly over each file, since reading 60 GB takes minutes. Two fine-tunes of one
        model differ in nearly every page and are told apart; a file damaged in a few bytes is not.
        File names do not count, so a repacked index changes nothing.
        """
        if self._hash is None:
            self._hash = self._compute_hash()
        return self._hash

    def _compute_hash(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        digest.update(json.dumps(self.config, sort_keys=True).encode())
        reads_all = self.num_bytes <= HASH_ALL_BYTES
        for file in sorted(self._files, key=lambda file: file.header_bytes):
            digest.update(file.num_bytes.to_bytes(8, "little"))
            digest.update(file.header_bytes)
            start = 8 + len(file.header_bytes)
            if reads_all:
                ranges = [(start, file.num_bytes)]
            else:
                last = max(start, file.num_bytes - HASH_PAGE_BYTES)
                firsts = [start + (last - start) * i // (HASH_SAMPLES - 1) for i in range(HASH_SAMPLES)]
                ranges = [(first, min(first + HASH_PAGE_BYTES, file.num_bytes)) for first in firsts]
            for first, end in ranges:
                for chunk in file.chunks(first, end):
                    digest.update(chunk)
        return digest.hexdigest()

    def _account(self) -> None:
        """Every tensor of the model is there with its shape and a dtype that is read, and nothing else is."""
        expected = {
            name: (shape, dtypes) for part in self.table.all_parts() for name, shape, dtypes in part.tensors
        }
        head = self.table.name("head")
        missing = [name for name in expected if name not in self._file_of]
        if head in missing and self.spec.tied_head:
            missing.remove(head)
        if missing == [head]:
            said = (self.config.get("text_config") or self.config).get("tie_word_embeddings")
            raise CheckpointError(
                f"{self.folder}: tensor {head} is missing, and tie_word_embeddings in config.json is "
                f"{'not set' if said is None else json.dumps(said)}; copy the file that holds {head}, or set "
                "tie_word_embeddings to true if the head is the embedding"
            )
        scales = self._scales(expected)
        extra = [
            name
            for name in self._file_of
            if name not in expected and name not in scales and not self.table.is_ignored(name)
        ]
        if missing:
            files = "no index" if not (self.folder / INDEX_FILE).exists() else INDEX_FILE
            what = "copy all files of the model again"
            if extra:
                what = (
                    f"and {len(extra)} are there that it has no place for ({_some(extra)}), so config.json and weights are of "
                    "different models: take both from one"
                )
            raise CheckpointError(
                f"{self.folder}: {len(missing)} of {len(expected)} tensors are missing "
                f"({_some(missing)}); {len(self._files)} weight files were read ({files}); {what}"
            )
        if extra:
            path = self._file_of[extra[0]].path
            raise CheckpointError(
                f"{path}: {len(extra)} tensors belong to no part of a {self.spec.family} model of this config "
                f"({_some(extra)}); take config.json and weights of one model, or a checkpoint without them"
            )
        for name, (shape, dtypes) in (expected | scales).items():
            if name not in self._file_of:
                continue  # the head that is tied
            extent, path = self.extent(name), self._file_of[name].path
            if extent.shape != shape:
                raise CheckpointError(
                    f"{path}: tensor {name} has shape {list(extent.shape)}, expected {list(shape)} by config.json; "
                    "take both from one model"
                )
            allowed = dtypes or (*FLOAT_DTYPES, *self._extra_dtypes(shape))
            if extent.dtype not in allowed:
                raise CheckpointError(
                    f"{path}: tensor {name} has dtype {extent.dtype}, expected one of {', '.join(allowed)}; take a "
                    "checkpoint that holds it so"
                )

    def _extra_dtypes(self, shape: Shape) -> tuple[str, ...]:
        """Dtypes of matrices beside the plain ones."""
        return (quantised.FP8_DTYPE,) if self._quantisation.method == "fp8" and len(shape) > 1 else ()

    def _scales(self, expected: Iterable[str]) -> dict[str, tuple[Shape, tuple[str, ...] | None]]:
        """The scales that the fp8 matrices among these need, with shape and dtype."""
        found: dict[str, tuple[Shape, tuple[str, ...] | None]] = {}
        for name in expected:
            if name not in self._file_of or self.extent(name).dtype != quantised.FP8_DTYPE:
                continue
            scales = quantised.scale_name(name)
            if scales not in self._file_of:
                raise CheckpointError(
                    f"{self._file_of[name].path}: tensor {name} is fp8, but its block scales {scales} are missing; "
                    "copy all files of the model again"
                )
            shape = quantised.scale_shape(self.extent(name).shape, self._quantisation.block)
            found[scales] = (shape, None)
        return found

    def _settle_head(self) -> None:
        """Decide whether the head is the embedding: an explicit tensor wins over what the config says."""
        head, embed = self.table.name("head"), self.table.name("embed")
        if self._known is not None:
            self.spec = msgspec.structs.replace(self.spec, tied_head=self._known.tied_head)
            return
        if not self.spec.tied_head or head not in self._file_of:
            return
        if self._same_bytes(head, embed):
            return  # one copy serves both
        log.warning(
            "%s: config.json ties the head to the embedding, but %s is there and differs; using the tensor",
            self.folder,
            head,
        )
        self.spec = msgspec.structs.replace(self.spec, tied_head=False)

    def _same_bytes(self, a: str, b: str) -> bool:
        first, second = self.extent(a), self.extent(b)
        if first.dtype != second.dtype:
            return False
        chunks_a = self._file_of[a].chunks(first.start, first.end)
        chunks_b = self._file_of[b].chunks(second.start, second.end)
        return all(x == y for x, y in zip(chunks_a, chunks_b, strict=True))


def _open_files(folder: Path) -> list[SafetensorsFile]:
    """The weight files: those the index names, or every *.safetensors if there is no index."""
    try:
        present = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    except OSError as error:
        raise CheckpointError(f"the model folder {folder} cannot be listed: {error.strerror}") from error
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        if not present:
            raise CheckpointError(f"{folder} holds no *.safetensors file; only safetensors weights are read")
        return _without_doubles([SafetensorsFile(folder / name) for name in present])

    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index_path} has no weight_map of tensor name to file name")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index_path} names a file outside the folder: {name!r}")
        if name not in present:
            held = sum(1 for file in weight_map.values() if file == name)
            others = sorted(set(present) - set(names))
            hint = f"; {_some(others)} is there but not in the index" if others else ""
            raise CheckpointError(
                f"{folder / name} is missing: {INDEX_FILE} puts {held} tensors in it{hint}; copy it"
            )
    files = {name: SafetensorsFile(folder / name) for name in names}
    for tensor, name in weight_map.items():
        if tensor not in files[name].extents:
            raise CheckpointError(
                f"{folder / name}: tensor {tensor} is not in it, though {INDEX_FILE} says so; copy both again"
            )
    return _without_doubles(list(files.values()))


def _without_doubles(files: list[SafetensorsFile]) -> list[SafetensorsFile]:
    seen: dict[str, Path] = {}
    for file in files:
        for name in file.extents:
            if name in seen:
                raise CheckpointError(f"tensor {name} is in both {seen[name]} and {file.path}; keep one")
            seen[name] = file.path
    return files


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(cut, names[:SHOWN_NAMES]))
    return shown if len(names) <= SHOWN_NAMES else f"{shown}, ..."


def _taken(tensor: Tensor, take: str) -> Tensor:
    """The rows that a role has of a tensor it shares."""
    half = tensor.shape[0] // 2
    match take:
        case "first_half":
            return tensor[:half]
        case "second_half":
            return tensor[half:]
        case "even":
            return tensor[0::2]
        case "odd":
            return tensor[1::2]
    return tensor
