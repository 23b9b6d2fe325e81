"""The folder a comparison leaves behind: `results.json`, two pictures and the page; its own files, and no others."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from locant.errors import InputError
from locant.figures.canvas import save
from locant.files import write_whole
from locant.report.comparison.curves import draw_loss_by_length, draw_loss_by_position
from locant.report.comparison.report import page
from locant.report.comparison.summary import summarise
from locant.report.console import json_text

__all__ = ["ReportFolder"]

RESULTS = "results.json"
PAGE = "report.html"
BY_LENGTH = "loss_by_length.png"
BY_POSITION = "loss_by_position.png"


class ReportFolder:
    """A folder to write a report into.

    A folder that is not there is made. One that holds an earlier report is used again: the earlier report stays as it
    is until the first result of the new one. Any other folder with something in it is refused, unless `force` says to
    write beside what is there. Nothing that this class did not write is ever changed or removed.

    Args:
        path: where; its parent folders are made too.
        force: write into a folder of other things.
    """

    def __init__(self, path: Path | str, *, force: bool = False) -> None:
        self.path = Path(path)
        self.replaces = (self.path / RESULTS).exists() and _is_report(self.path / RESULTS)
        self._began = False
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"got {self.path}, which is a file, as the folder of the report", f"-o {self.path}-report")
        if self.path.is_dir() and any(self.path.iterdir()) and not (self.replaces or force):
            raise InputError(
                f"{self.path} holds other things than a report", "another -o, or --force to write beside them"
            )
        self._made = _make(self.path)
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise InputError(f"got {self.path}, where nothing may be written", "a folder that you may write to")

    @property
    def page(self) -> Path:
        return self.path / PAGE

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Put the results so far in the place of earlier ones; pictures of other results do not stay beside them."""
        write_whole(self.path / RESULTS, json_text(results))
        if not self._began:
            self._began = True
            for name in (PAGE, BY_LENGTH, BY_POSITION) if self.replaces else ():
                (self.path / name).unlink(missing_ok=True)

    def write_report(self, results: Mapping[str, Any]) -> Path:
        """Draw the pictures and write the page; returns where it lies."""
        summary = summarise(results)
        save(draw_loss_by_length(summary), self.path / BY_LENGTH)
        save(draw_loss_by_position(summary), self.path / BY_POSITION)
        write_whole(self.page, page(results))
        return self.page

    def leave(self) -> None:
        """Remove the folders that were made here, if nothing came to be written into them."""
        for folder in self._made:
            if any(folder.iterdir()):
                return
            folder.rmdir()


def _is_report(path: Path) -> bool:
    """Whether `path` is a `results.json` of a comparison."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and {"settings", "environment", "records"} <= content.keys()


def _make(path: Path) -> list[Path]:
    """Make a folder and its parents; returns those that were not there, the innermost first."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {path}: {error.strerror}", "a folder that you may write to") from None
    return missing
