"""Results of a long comparison, kept one file each, so that one that is stopped goes on where it was.

Knows names, settings and rows of plain values; knows not what was measured.
"""

import json
import re
from pathlib import Path
from typing import Any

import msgspec

Row = dict[str, Any]


class Kept:
    """Results of one set of settings. Those of any other are as if they were not there.

    folder    None: nothing is kept
    settings  plain values, tuples and frozen sets among them, that a result depends on beside its name
    """

    def __init__(self, folder: Path | None, *settings: object) -> None:
        self._folder, self._settings = folder, settings

    def get(self, name: str, *more: object) -> Row | None:
        """The row that was kept under this name with the same settings, and `more` of its own."""
        if self._folder is None:
            return None
        try:
            found = json.loads(self._place(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        is_same = isinstance(found, dict) and found.get("settings") == self._known(more)
        return found["row"] if is_same else None

    def put(self, name: str, row: Row, *more: object) -> None:
        """Keep a row, in place of another of that name."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        place = self._place(name)
        scratch = place.with_suffix(".new")
        scratch.write_text(json.dumps({"settings": self._known(more), "row": row}), encoding="utf-8")
        scratch.replace(place)

    def _place(self, name: str) -> Path:
        assert self._folder is not None, "nothing is kept"
        return self._folder / f"{re.sub('[^a-z0-9.]+', '-', name)}.json"

    def _known(self, more: tuple[object, ...]) -> object:
        return json.loads(msgspec.json.encode([self._settings, more], order="sorted", enc_hook=str))
