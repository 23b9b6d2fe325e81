"""What is open in one run of the explorer: files and configurations, given on the command line or dropped on a page."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locant.checkpoints.config_source import read_source
from locant.errors import InputError

if TYPE_CHECKING:
    from locant.explore.comparison import Comparison

__all__ = ["MAX_DROPPED", "Dropped", "Session"]

MAX_DROPPED = 8 * 2**20
"""Bytes of a file that is dropped on the page; those named on the command line may be of any size."""

MAX_KEPT = 16
"""Dropped files that are held in memory; the oldest goes first."""


@dataclass(frozen=True)
class Dropped:
    """A file that was dropped on a page: its name, which is shown and never opened, and its bytes."""

    name: str
    content: bytes


@dataclass
class Session:
    """What the screens may look at beside an address.

    Args:
        files: texts, and folders of reports, from the command line.
        configs: configurations from the command line, by the name they were given.
    """

    files: Sequence[Path] = ()
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    dropped: dict[str, Dropped] = field(default_factory=dict)
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, files: Sequence[str], configs: Sequence[str]) -> Session:
        """Of names from the command line, all of which have to be there."""
        for file in files:
            if not Path(file).exists():
                raise InputError(f"got no file {file}", "the path of a text, or of a report's folder")
        return cls([Path(file) for file in files], {config: read_source(config) for config in configs})

    def drop(self, name: str, content: bytes) -> str:
        """Keep a file that was dropped on the page; returns the key by which an address names it."""
        key = "dropped-" + hashlib.sha256(content).hexdigest()[:16]
        self.dropped[key] = Dropped(name[:200], content)
        while len(self.dropped) > MAX_KEPT:
            del self.dropped[next(iter(self.dropped))]
        return key

    def dropped_file(self, key: str) -> Dropped:
        """What was kept under this key."""
        if key not in self.dropped:
            raise InputError("this address names a file that was dropped on another page", "drop the file here again")
        return self.dropped[key]

    def compare(self, comparison: Comparison) -> str:
        """Keep a comparison that was started from the page; returns its key."""
        key = f"run-{len(self.comparisons) + 1}"
        self.comparisons[key] = comparison
        return key

    def close(self) -> None:
        """End what still runs; what it has measured is written."""
        for comparison in self.comparisons.values():
            comparison.close()
