"""The folder that a comparison writes: `results.json`, and what is drawn from it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from locant.errors import InputError
from locant.files import json_text, write_whole

__all__ = ["BY_LENGTH", "BY_POSITION", "PAGE", "ResultsFolder"]

RESULTS = "results.json"
PAGE, BY_LENGTH, BY_POSITION = DRAWN = ("report.html", "loss_by_length.png", "loss_by_position.png")


class ResultsFolder:
    """A folder to write results into, made if it is not there; what a comparison did not write is never changed.

    An earlier report stays until the first result of the new one. Any other folder with something in it is refused,
    unless `force` allows to write beside what is there.
    """

    def __init__(self, path: Path | str, *, force: bool = False) -> None:
        self.path = Path(path)
        self.holds_earlier = _is_results(self.path / RESULTS)
        self._stale = DRAWN if self.holds_earlier else ()
        elsewhere = f"-o {self.path}-report"
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"got {self.path}, which is a file, as the folder of the report", elsewhere)
        if self.path.is_dir() and any(self.path.iterdir()) and not (self.holds_earlier or force):
            remedy = f"{elsewhere}, or --force to write beside them"
            raise InputError(f"{self.path} holds other things than a report", remedy)
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot make {self.path}: {error.strerror}", "a folder that you may write to") from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise InputError(f"got {self.path}, where nothing may be written", "a folder that you may write to")

    def write(self, results: Mapping[str, Any]) -> None:
        """Replace the results; what was drawn from earlier ones is removed."""
        write_whole(self.path / RESULTS, json_text(results))
        for name in self._stale:
            (self.path / name).unlink(missing_ok=True)
        self._stale = ()

    def remove_if_empty(self) -> None:
        """Remove the folders that were made here, if nothing was written into them."""
        for folder in self._made:
            if any(folder.iterdir()):
                return
            folder.rmdir()


def _is_results(path: Path) -> bool:
    """Whether a file is the `results.json` of a comparison."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and {"settings", "environment", "records"} <= content.keys()
