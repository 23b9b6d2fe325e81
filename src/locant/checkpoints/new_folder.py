"""A folder that appears under its name when everything in it is written, or not at all."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from locant.errors import InputError
from locant.files import flush

__all__ = ["new_folder", "require_new"]


@contextmanager
def new_folder(path: Path) -> Generator[Path]:
    """A folder beside `path` that takes its name if the block succeeds, and vanishes if it fails.

    What is written into it has to be flushed by who writes it, see `locant.files.replacing`.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp())
    >>> with new_folder(place / "new") as folder:
    ...     _ = (folder / "a.txt").write_text("whole")
    >>> [path.name for path in place.iterdir()]
    ['new']
    """
    place = path.resolve()
    made = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    try:
        made.mkdir()
    except OSError as error:
        cause = f"cannot write in {place.parent}: {error.strerror}"
        raise InputError(cause, "a folder that you may write to") from None
    try:
        yield made
        made.replace(place)
        flush(place.parent)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def require_new(path: Path) -> None:
    """Raise where a folder could not be made without touching what is there."""
    if path.exists() and not path.is_dir():
        raise InputError(f"got {path}, which is a file, as the folder to write", f"-o {path}-converted")
    if path.is_dir() and any(path.iterdir()):
        raise InputError(f"got {path}, which is not empty", "another -o: what is there stays as it is")
    if not path.resolve().parent.is_dir():
        raise InputError(f"got {path}, but there is no folder {path.parent}", f"mkdir -p {path.parent}")
