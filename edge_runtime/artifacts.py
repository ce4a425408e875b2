"""What calibration learned about one model: a folder of `artifact.json` and one safetensors file per section.

The runtime reads it, calibration writes it section by section. Knows files, hashes and versions; what the tensors of a
section mean is known by whoever writes and reads that section.

A section is whole or absent, whenever its writer is stopped: files are written beside their place and renamed, and
`artifact.json` names a section only while its file is the one that it describes.
"""

import hashlib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors.torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from edge_runtime.errors import ArtifactError

KIND = "edge-runtime calibration"
FORMAT_VERSION = 1
INDEX_FILE = "artifact.json"
FOLDER_NAME = "calibration"
MADE_BY = "edge-runtime calibrate"
MAX_INDEX_BYTES = 16 << 20
_SECTION_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


class Section(msgspec.Struct, frozen=True):
    """One section's file as its writer left it."""

    file: str
    num_bytes: int
    sha256: str
    meta: dict[str, Any] = {}


class Index(msgspec.Struct, frozen=True):
    """What `artifact.json` holds."""

    kind: str
    format_version: int
    model_hash: str
    model: str = ""
    """The model folder's name, for people."""
    corpus: dict[str, Any] = {}
    """What was read: domains, requests, tokens, seed."""
    sections: dict[str, Section] = {}


class Artifact:
    """An artifact whose index was checked; each section is checked against its hash when it is read."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self.index = index

    @classmethod
    def open(cls, folder: str | Path, *, model_hash: str | None = None) -> "Artifact":
        """Read the index and look at the sizes of the sections' files.

        model_hash   the model it must have been measured on; None where any will do
        """
        folder = Path(folder)
        index = _read_index(folder)
        if model_hash is not None and index.model_hash != model_hash:
            raise ArtifactError(
                f"calibration artifact {folder} was measured on the model with hash {index.model_hash}, "
                f"expected {model_hash}; run `edge-runtime calibrate` on this model, or name its own artifact"
            )
        for name, section in index.sections.items():
            _check_size(folder, name, section)
        return cls(folder, index)

    @property
    def model_hash(self) -> str:
        """Of the model it was measured on."""
        return self.index.model_hash

    @property
    def sections(self) -> tuple[str, ...]:
        """Names of the sections that are there, sorted."""
        return tuple(sorted(self.index.sections))

    @property
    def content_hash(self) -> str:
        """32 hex digits that differ when anything measured differs, for handshakes."""
        digest = hashlib.blake2b(self.model_hash.encode(), digest_size=16)
        for name in self.sections:
            section = self.index.sections[name]
            digest.update(f"{name} {section.sha256} ".encode())
            digest.update(msgspec.json.encode(section.meta, order="sorted"))
        return digest.hexdigest()

    def has(self, section: str) -> bool:
        """Whether a section is there."""
        return section in self.index.sections

    def meta(self, section: str) -> dict[str, Any]:
        """What is said about a section beside its tensors."""
        return self._section(section).meta

    def tensors(self, section: str) -> dict[str, Tensor]:
        """A section's tensors, in memory of their own."""
        entry = self._section(section)
        path = self.folder / entry.file
        content = _read_bytes(path)
        found = hashlib.sha256(content).hexdigest()
        if found != entry.sha256:
            raise ArtifactError(
                f"{path} is damaged: its sha256 is {found}, expected {entry.sha256}; "
                f"copy it again or run `edge-runtime calibrate`"
            )
        try:
            return safetensors.torch.load(content)
        except (SafetensorError, KeyError, ValueError) as error:
            raise ArtifactError(f"{path} is not a safetensors file: {error}") from error

    def tensor(self, section: str, name: str) -> Tensor:
        """One tensor of a section."""
        tensors = self.tensors(section)
        if name not in tensors:
            raise ArtifactError(
                f"calibration artifact {self.folder}: section {section} has no tensor {name}, "
                f"found {', '.join(sorted(tensors)) or 'none'}; run `edge-runtime calibrate` again"
            )
        return tensors[name]

    def numbers(
        self,
        section: str,
        name: str,
        shape: tuple[int | None, ...],
        *,
        least: float = -math.inf,
        may_be_unknown: bool = False,
        made_by: str = MADE_BY,
    ) -> NDArray[np.float64]:
        """One tensor of a section as float64, once it is what it has to be.

        shape           length of each axis; None for any but 0
        least           no number is below
        may_be_unknown  numbers may be NaN or infinite, which stands for what was not measured
        made_by         the command that measures it
        """
        found = self.tensor(section, name).double().numpy()
        where = f"calibration artifact {self.folder}: tensor {name} of section {section}"
        fits = len(found.shape) == len(shape) and all(
            have == want if want is not None else have > 0
            for have, want in zip(found.shape, shape, strict=True)
        )
        if not fits:
            told = ", ".join("any" if want is None else str(want) for want in shape)
            raise ArtifactError(
                f"{where} has the shape {list(found.shape)}, expected [{told}]; run `{made_by}` again"
            )
        is_known = np.isfinite(found)
        if not may_be_unknown and not is_known.all():
            raise ArtifactError(
                f"{where} has {int((~is_known).sum())} numbers of {found.size} that are not finite; run "
                f"`{made_by}` again"
            )
        lowest = float(found[is_known].min(initial=math.inf))
        if lowest < least:
            raise ArtifactError(
                f"{where} has a {lowest:g}, expected at least {least:g}; run `{made_by}` again"
            )
        return found

    def whole_number(self, section: str, key: str, *, made_by: str = MADE_BY) -> int:
        """A number of at least 1 that is said beside a section's tensors."""
        found = self.meta(section).get(key)
        if type(found) is not int or found < 1:
            raise ArtifactError(
                f"calibration artifact {self.folder}: section {section} says {key} = {found!r}, expected a whole number of "
                f"at least 1; run `{made_by}` again"
            )
        return found

    def _section(self, name: str) -> Section:
        if name not in self.index.sections:
            raise ArtifactError(
                f"calibration artifact {self.folder} has no section {name}, "
                f"found {', '.join(self.sections) or 'none'}; run `edge-runtime calibrate`"
            )
        return self.index.sections[name]


def artifact_folder(model_folder: str | Path) -> Path:
    """Where a model's artifact lies unless somebody says otherwise."""
    return Path(model_folder) / FOLDER_NAME


def write_section(
    folder: str | Path,
    section: str,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any] | None = None,
    *,
    model_hash: str,
    model: str = "",
    corpus: Mapping[str, Any] | None = None,
) -> None:
    """Write one section, in place of the one of that name if there is one; makes folder and index where absent.

    meta     JSON values
    model, corpus   replace what the index says, where given
    """
    if not _SECTION_NAME.fullmatch(section):
        raise ValueError(f"section {section!r} must be lower-case letters, digits and underscores")
    folder = Path(folder)
    index = _index_to_write(folder, model_hash)
    content = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})
    entry = Section(
        file=f"{section}.safetensors",
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        meta=dict(meta or {}),
    )
    others = {name: each for name, each in index.sections.items() if name != section}
    index = msgspec.structs.replace(
        index,
        model=model or index.model,
        corpus=index.corpus if corpus is None else dict(corpus),
        sections=others,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / entry.file).exists():
            _write_index(folder, index)  # from here to the end the section is absent and never half of it
        _write_file(folder / entry.file, content)
        _write_index(folder, msgspec.structs.replace(index, sections={**others, section: entry}))
    except OSError as error:
        raise ArtifactError(
            f"calibration artifact {folder} cannot be written: {error.strerror}; name another folder"
        ) from error


def remove_section(folder: str | Path, section: str) -> None:
    """Take a section out; none of that name is as well."""
    folder = Path(folder)
    index = _read_index(folder)
    entry = index.sections.get(section)
    if entry is not None:
        kept = {name: each for name, each in index.sections.items() if name != section}
        _write_index(folder, msgspec.structs.replace(index, sections=kept))
        (folder / entry.file).unlink(missing_ok=True)


def _index_to_write(folder: Path, model_hash: str) -> Index:
    """The index that is there, or a new one. Nobody writes into the artifact of another model."""
    if not (folder / INDEX_FILE).exists():
        return Index(kind=KIND, format_version=FORMAT_VERSION, model_hash=model_hash)
    return Artifact.open(folder, model_hash=model_hash).index


def _write_index(folder: Path, index: Index) -> None:
    text = msgspec.json.encode(index, order="sorted")
    _write_file(folder / INDEX_FILE, msgspec.json.format(text, indent=1) + b"\n")


def _write_file(path: Path, content: bytes) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _read_bytes(path: Path, most: int | None = None) -> bytes:
    try:
        if most is not None and path.stat().st_size > most:
            raise ArtifactError(f"{path} has {path.stat().st_size} bytes, expected at most {most}")
        return path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error


def _read_index(folder: Path) -> Index:
    path = folder / INDEX_FILE
    if not path.exists():
        what = "has no " + INDEX_FILE if folder.is_dir() else "does not exist"
        raise ArtifactError(
            f"calibration artifact {folder} {what}; make one with `edge-runtime calibrate MODEL --out {folder}`"
        )
    content = _read_bytes(path, MAX_INDEX_BYTES)
    try:
        # What it is and which version comes first: another version may have other fields.
        head = msgspec.json.decode(content)
        if not isinstance(head, dict) or head.get("kind") != KIND:
            raise ArtifactError(f"{path} is not the index of a calibration artifact of edge-runtime")
        version = head.get("format_version")
        if version != FORMAT_VERSION:
            raise ArtifactError(
                f"{path} has format version {version!r}, this edge-runtime reads {FORMAT_VERSION}; "
                f"run `edge-runtime calibrate` of this version again"
            )
        index = msgspec.convert(head, Index)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ArtifactError(f"{path} is damaged: {error}; run `edge-runtime calibrate` again") from error
    for name, section in index.sections.items():
        if not _SECTION_NAME.fullmatch(name) or Path(section.file).name != section.file:
            raise ArtifactError(
                f"{path} is damaged: section {name!r} lies in {section.file!r}, which is no file of it"
            )
    return index


def _check_size(folder: Path, name: str, section: Section) -> None:
    path = folder / section.file
    try:
        found = path.stat().st_size
    except OSError as error:
        raise ArtifactError(
            f"{path} of section {name} cannot be read: {error.strerror}; "
            f"copy the whole folder or run `edge-runtime calibrate` again"
        ) from error
    if found != section.num_bytes:
        raise ArtifactError(
            f"{path} is truncated or foreign: it has {found} bytes, expected {section.num_bytes}; "
            f"copy it again or run `edge-runtime calibrate`"
        )
