"""Work done unit by unit that goes on where it was stopped: what a pass knows is kept in a file now and then.

A pass that is stopped and started again ends with the very numbers of one that was not: units come in order, and whatever
is drawn at random is drawn from the unit's own seed. Knows files and clocks; knows no model.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from edge_runtime.clock import Clock

FOLDER_NAME = ".unfinished"
SAVE_EVERY_S = 15.0


class Pass(Protocol):
    """One kind of measurement over `num_units` pieces of work."""

    name: str

    @property
    def num_units(self) -> int: ...

    def run(self, unit: int) -> None:
        """Do one piece; pieces come in order, each once."""

    def state(self) -> dict[str, Tensor]:
        """Everything known so far."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Know again what `state` gave."""


Progress = Callable[[str, int, int], None]
"""Called as (name of the pass, units done, units in all)."""


class Unfinished:
    """The folder in which an unfinished calibration keeps what it knows.

    fingerprint   of requests, model and options: what was kept by another calibration is not taken up
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.folder = folder / FOLDER_NAME
        self._fingerprint = fingerprint

    def save(self, name: str, state: Mapping[str, Tensor], units: int) -> None:
        """Keep a pass's state after so many units; a reader sees the old one or this one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        said = {"fingerprint": self._fingerprint, "units": str(units)}
        content = safetensors.torch.save(dict(state), metadata=said)
        scratch = self.folder / f".{name}.{os.getpid()}"
        scratch.write_bytes(content)
        scratch.replace(self._path(name))

    def load(self, name: str) -> tuple[dict[str, Tensor], int] | None:
        """State and units done; None if there are none of this calibration."""
        try:
            content = self._path(name).read_bytes()
            size = int.from_bytes(content[:8], "little")
            said: dict[str, Any] = json.loads(content[8 : 8 + size])["__metadata__"]
            if said["fingerprint"] != self._fingerprint:
                return None
            return safetensors.torch.load(content), int(said["units"])
        except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError):
            return None  # not there, or of a machine that went down while it wrote: begin again

    def remove(self, name: str | None = None) -> None:
        """Forget one pass, or everything, once the artifact has what it found."""
        if name is None:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        self._path(name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others are not finished
            self.folder.rmdir()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def run_pass(
    work: Pass,
    unfinished: Unfinished,
    clock: Clock,
    progress: Progress,
    *,
    save_every_s: float = SAVE_EVERY_S,
) -> int:
    """Run a pass to its end, from where it was stopped. Returns the units that had been done before."""
    kept = unfinished.load(work.name)
    begun = 0
    if kept is not None and kept[1] <= work.num_units:
        work.restore(kept[0])
        begun = kept[1]
    saved_at = clock.now()
    progress(work.name, begun, work.num_units)
    for unit in range(begun, work.num_units):
        work.run(unit)
        progress(work.name, unit + 1, work.num_units)
        if clock.now() - saved_at >= save_every_s or unit + 1 == work.num_units:
            unfinished.save(work.name, work.state(), unit + 1)
            saved_at = clock.now()
    return begun


def generator(*seeds: int) -> torch.Generator:
    """Randomness of one unit."""
    mixed = 0
    for seed in seeds:
        mixed = (mixed * 1_000_003 + seed + 1) % (1 << 62)
    return torch.Generator().manual_seed(mixed)


def joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """The parts one after another; an empty one of `like`'s dtype and row shape if there are none."""
    return torch.cat(list(parts)) if parts else like[:0]
