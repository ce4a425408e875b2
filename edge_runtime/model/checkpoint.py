"""A model folder on disk: config, safetensors files, every tensor accounted for when it is opened.

Reads only the tensors that are asked for and leaves none of the file in this process's memory. Knows no device,
no packing and no node.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from edge_runtime.errors import CheckpointError
from edge_runtime.model.architectures import read_model
from edge_runtime.model.architectures.table import EXPERT_ROLES, TensorTable
from edge_runtime.model.json_file import read_json
from edge_runtime.model.safetensors_file import FLOAT_DTYPES, Extent, SafetensorsFile
from edge_runtime.model.spec import ModelSpec
from topology.ids import ExpertId

log = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SHOWN_NAMES = 4
HASH_ALL_BYTES = 256 << 20  # up to here the hash reads every byte: 35 MB take 50 ms, 256 MB 0.4 s
HASH_SAMPLES = 64
HASH_PAGE_BYTES = 4096


class Checkpoint:
    """One model folder: `spec` says what it is, `read` gives its tensors.

    spec        what the config describes; `tied_head` is settled by what the files hold
    table       role -> name and shape
    config      the parsed config.json
    """

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        spec: ModelSpec,
        table: TensorTable,
        files: list[SafetensorsFile],
    ) -> None:
        self.folder = folder
        self.config = config
        self.spec = spec
        self.table = table
        self._files = files
        self._file_of = {name: file for file in files for name in file.extents}
        self._hash: str | None = None

    @classmethod
    def open(cls, folder: str | Path) -> "Checkpoint":
        """Read config and headers and check them against each other; no weight is read yet."""
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"model folder {folder} does not exist")
        config = read_json(folder / "config.json")
        spec, table = read_model(config, source=str(folder / "config.json"))
        files = _open_files(folder)
        checkpoint = cls(folder, config, spec, table, files)
        checkpoint._account()
        checkpoint._settle_head()
        return checkpoint

    def extent(self, name: str) -> Extent:
        """dtype, shape and place of one tensor."""
        return self._file_of[name].extents[name]

    def stored_bytes(self, name: str) -> int:
        """Bytes of one tensor in its file."""
        extent = self.extent(name)
        return extent.end - extent.start

    def expert_names(self, experts: Iterable[ExpertId]) -> list[str]:
        """Names of the tensors of these routed experts."""
        return [self.table.name(role, *expert) for expert in experts for role in EXPERT_ROLES]

    @contextmanager
    def read(self, names: Sequence[str]) -> Iterator[list[Tensor]]:
        """The tensors as views of the mapped files, [..] in the stored dtype, only valid inside the block.

        Their pages leave this process's memory at the end of the block, so what is copied or packed inside is all
        that stays. Ask for few at a time: one expert, one layer's projections.
        """
        try:
            yield [self._file_of[name].tensor(name) for name in names]
        finally:
            for file in {self._file_of[name].path: self._file_of[name] for name in names}.values():
                file.drop_pages()

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
        """Every tensor of the model is there with its shape and a float dtype, and nothing else is."""
        expected = dict(self.table.all_tensors())
        head = self.table.name("head")
        missing = [name for name in expected if name not in self._file_of]
        if head in missing and self.spec.tied_head:
            missing.remove(head)
        if missing == [head]:
            raise CheckpointError(
                f"{self.folder}: tensor {head} is missing and config.json does not say tie_word_embeddings; "
                "if the head is the embedding, set it to true"
            )
        if missing:
            files = "no index" if not (self.folder / INDEX_FILE).exists() else INDEX_FILE
            raise CheckpointError(
                f"{self.folder}: {len(missing)} of {len(expected)} tensors are missing ({_some(missing)}); "
                f"{len(self._files)} weight files were read ({files})"
            )
        if extra := [name for name in self._file_of if name not in expected]:
            path = self._file_of[extra[0]].path
            raise CheckpointError(
                f"{path}: {len(extra)} tensors belong to no part of a {self.spec.family} model of this config "
                f"({_some(extra)})"
            )
        for name, file in self._file_of.items():
            extent = file.extents[name]
            if extent.shape != expected[name]:
                raise CheckpointError(
                    f"{file.path}: tensor {name} has shape {list(extent.shape)}, expected {list(expected[name])}"
                )
            if extent.dtype not in FLOAT_DTYPES:
                raise CheckpointError(
                    f"{file.path}: tensor {name} has dtype {extent.dtype}, expected one of {', '.join(FLOAT_DTYPES)}"
                )

    def _settle_head(self) -> None:
        """Decide whether the head is the embedding: an explicit tensor wins over what the config says."""
        head, embed = self.table.name("head"), self.table.name("embed")
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
    present = sorted(path.name for path in folder.glob("*.safetensors"))
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
            raise CheckpointError(f"{folder / name} is missing: {INDEX_FILE} puts {held} tensors in it{hint}")
    files = {name: SafetensorsFile(folder / name) for name in names}
    for tensor, name in weight_map.items():
        if tensor not in files[name].extents:
            raise CheckpointError(
                f"{folder / name}: tensor {tensor} is not in it, though {INDEX_FILE} says so"
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
    shown = ", ".join(names[:SHOWN_NAMES])
    return shown if len(names) <= SHOWN_NAMES else f"{shown}, ..."
