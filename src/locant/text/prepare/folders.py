"""Folders that appear whole or not at all, and what is left of those whose process died.

A folder is written under another name beside its place, `NAME.RANDOM`, and renamed when everything in it is on the
disk. Meanwhile its maker holds a lock on a file in it, which the system releases when a process ends in any way. On a
file system without locks, no folder counts as left behind.
"""

from __future__ import annotations

import errno
import fcntl
import secrets
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from locant.errors import InputError

__all__ = ["LOCK", "cannot_write", "is_abandoned", "locked_folder", "place_aside", "take_place"]

LOCK = "lock"
YOUNG = 60.0
"""Seconds in which a new folder may come to have its lock."""


@contextmanager
def locked_folder(place: Path) -> Generator[Path]:
    """A folder beside `place` to write in, where it has a file `LOCK`; gone afterwards unless it took its place."""
    folder = place_aside(place)
    folder.mkdir()
    try:
        with (folder / LOCK).open("wb") as file:
            _lock(file.fileno())
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def place_aside(place: Path) -> Path:
    """A name beside `place` that nothing has."""
    return place.with_name(f"{place.name}.{secrets.token_hex(4)}")


def take_place(folder: Path, place: Path) -> bool:
    """Give a folder its name; ``False`` if something stands there already. Who wrote in it has flushed it."""
    try:
        folder.replace(place)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def is_abandoned(folder: Path) -> bool:
    """Whether the process that worked in a folder has ended."""
    try:
        with (folder / LOCK).open("rb") as file:
            return _lock(file.fileno())
    except FileNotFoundError:  # its lock is not there yet, or not any more: for a moment, or for ever
        return time.time() - folder.stat().st_mtime > YOUNG


def _lock(handle: int) -> bool:
    """Whether this process now holds the lock; a file system without locks gives none."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def cannot_write(what: str, error: OSError) -> InputError:
    """The error where the system refuses to write."""
    where = f": {error.filename}" if error.filename else ""
    remedy = "making room or giving access, then the same again: what is done is kept"
    return InputError(f"cannot {what}: {error.strerror or error}{where}", remedy)
