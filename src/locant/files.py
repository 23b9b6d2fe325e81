"""Writing files so that there is never half of one.

A file is written beside its final place, flushed to the disk, and renamed; the rename is atomic, and the folder is
flushed after it. A reader sees the old file or the new one, and a failed or killed write leaves the old one as it was.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from locant.errors import InputError

__all__ = ["flush", "replacing", "write_whole"]


@contextmanager
def replacing(path: Path | str) -> Generator[Path]:
    """A temporary path, with the suffix of `path`, that becomes `path` if the block succeeds and vanishes if it fails.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with replacing(folder / "a.txt") as temporary:
    ...     _ = temporary.write_text("whole")
    >>> (folder / "a.txt").read_text(), len(list(folder.iterdir()))
    ('whole', 1)
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"got {path}, which is a folder, as the file to write", f"{path / 'a-file-name'}")
    if not path.parent.is_dir():
        raise InputError(f"got {path}, but there is no folder {path.parent}", f"mkdir -p {path.parent}")
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    except OSError as error:
        raise InputError(f"cannot write in {path.parent}: {error.strerror}", "a folder that you may write to") from None
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        flush(temporary)
        temporary.replace(path)
        flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path | str, content: str | bytes) -> None:
    """Write a whole file, or leave what was there."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def flush(path: Path) -> None:
    """Wait until a file, or what a folder lists, is on the disk: a rename lasts once its folder was flushed."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    """The permissions that new files do not get; the only way to read it is to set it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
