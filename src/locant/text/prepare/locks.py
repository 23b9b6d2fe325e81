"""Folders that a process works in: by their lock one whose maker has died is told from one at work.

The system gives a lock back when a process ends in any way. Where it has no locks, nobody is taken for dead.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["LOCK", "YOUNG", "is_dead", "locked"]

LOCK = "lock"
YOUNG = 60.0
"""Seconds in which a new folder may come to have its lock."""


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """The block works in `folder`, where it leaves a file `LOCK`."""
    with (folder / LOCK).open("wb") as file:
        _lock(file.fileno())
        yield


def is_dead(folder: Path) -> bool:
    """Whether whoever worked in a folder does so no more."""
    try:
        with (folder / LOCK).open("rb") as file:
            return _lock(file.fileno())
    except FileNotFoundError:  # its lock is not there yet, or not any more: for a moment, or for ever
        return time.time() - folder.stat().st_mtime > YOUNG


def _lock(handle: int) -> bool:
    """Whether this process now holds the lock; without locks in the system, nobody can tell, and nobody does."""
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
