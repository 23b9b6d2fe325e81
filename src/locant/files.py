"""Writing files so that there is never half of one, and JSON of which no two readers differ.

A file is written beside its final place, flushed to the disk, and renamed; the rename is atomic, and the folder is
flushed after it. A reader sees the old file or the new one, and a failed or killed write leaves the old one as it was.
Windows flushes no folder, renames none in which a file is open, and has no locks of whole files.
Where the system refuses (a full disk, a device that fails), the error is an `InputError`.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from locant.errors import InputError

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

BUFFER = 1 << 20
"""Bytes that `NewFile` gathers from small writes; larger ones go to the system at once."""


@contextmanager
def replacing(path: Path | str) -> Generator[Path]:
    """A temporary path, with the suffix of `path`, that becomes `path` if the block succeeds and vanishes if it fails.

    What the block writes itself, it gets the system's own errors of.
    """
    path = Path(path)
    handle, temporary = _beside(path)
    os.close(handle)
    try:
        yield temporary  # which the caller may replace, as safetensors does
        with _refusing(path):
            temporary.chmod(0o666 & ~_umask())
            flush(temporary)
            temporary.replace(path)
            flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path | str, content: str | bytes) -> None:
    """Write a whole file, or leave what was there."""
    with NewFile(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.settle()
        file.publish()


class NewFile:
    """A file that is written piece by piece, and takes its place when it is whole.

    `settle` brings it to the disk, `publish` gives it its name; until then it is a temporary file, which `discard`, or
    the end of the ``with`` block, removes. So several files can be settled before the first is published.

    >>> folder = Path(tempfile.mkdtemp())
    >>> with NewFile(folder / "a.txt") as file:
    ...     file.write(b"?hole")
    ...     file.overwrite(b"w", at=0)
    ...     file.settle()
    ...     file.publish()
    >>> (folder / "a.txt").read_text(), len(list(folder.iterdir()))
    ('whole', 1)
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.size = 0
        """Bytes written so far."""
        self._pending = bytearray()
        self._handle, self._temporary = _beside(self.path)
        self._is_open = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append."""
        view = memoryview(data).cast("B")
        self.size += len(view)
        if len(self._pending) + len(view) > BUFFER:
            self._drain()
        if len(view) < BUFFER:
            self._pending += view
        else:
            self._write(view)

    def overwrite(self, data: bytes, *, at: int) -> None:
        """Write over what was written, from byte `at` on."""
        self._drain()
        with _refusing(self.path):
            os.lseek(self._handle, at, os.SEEK_SET)
            self._write(memoryview(data))
            os.lseek(self._handle, 0, os.SEEK_END)

    def read(self, size: int, *, at: int) -> bytes:
        """What was written from byte `at` on."""
        self._drain()
        with _refusing(self.path):
            os.lseek(self._handle, at, os.SEEK_SET)
            data = os.read(self._handle, size)
            os.lseek(self._handle, 0, os.SEEK_END)
            return data

    def settle(self) -> None:
        """Bring everything to the disk, and write no more."""
        self._drain()
        with _refusing(self.path):
            self._temporary.chmod(0o666 & ~_umask())
            os.fsync(self._handle)
            self._close()

    def publish(self, *, flush_folder: bool = True) -> None:
        """Give the settled file its name; that lasts once the folder is flushed too."""
        with _refusing(self.path):
            self._temporary.replace(self.path)
            if flush_folder:
                flush(self.path.parent)

    def discard(self) -> None:
        """Remove it, unless it is published."""
        try:
            self._close()
        finally:
            self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._handle)

    def _drain(self) -> None:
        self._write(memoryview(self._pending))
        self._pending = bytearray()

    def _write(self, view: memoryview) -> None:
        """The system may write less than it was given."""
        with _refusing(self.path):
            while view:
                written = os.write(self._handle, view)
                if not written:
                    raise OSError(errno.EIO, "nothing was written")
                view = view[written:]


@contextmanager
def new_folder(path: Path, *, force: bool = False) -> Generator[Path]:
    """A folder beside `path` that takes its name if the block succeeds, and vanishes if it fails.

    The caller has to flush what it writes into it, as `write_whole` and `NewFile` do. With `force`, a folder that is
    there is replaced by the whole new one, and is itself gone only then.
    """
    replaces = force and path.is_dir()
    if not replaces:
        require_new(path)
    place = path.resolve()
    new, old = (place.with_name(f".{place.name}.{secrets.token_hex(4)}") for _ in range(2))
    with _refusing(path):
        new.mkdir()
    try:
        yield new
        with _refusing(path):
            if replaces:
                place.replace(old)
            elif place.is_dir():
                place.rmdir()  # an empty one, which Windows would not replace
            new.replace(place)
            flush(place.parent)
    finally:
        if old.exists() and not place.exists():
            old.replace(place)
        for rest in (new, old):
            shutil.rmtree(rest, ignore_errors=True)


def require_new(path: Path) -> None:
    """Raise where a folder cannot be made without changing what is there; an empty folder may be replaced."""
    if path.exists() and not path.is_dir():
        raise InputError(f"got {path}, which is a file, as the folder to write", "the name of a new folder")
    if path.is_dir() and any(path.iterdir()):
        raise InputError(f"got {path}, which is not empty", "the name of a new folder: what is there stays as it is")
    if not path.resolve().parent.is_dir():
        raise InputError(f"got {path}, but there is no folder {path.parent}", f"mkdir -p {path.parent}")


def require_file(path: Path) -> None:
    """Raise where a file cannot stand: in the place of a folder, or in a folder that is not there."""
    if path.is_dir():
        raise InputError(f"got {path}, which is a folder, as the file to write", f"{path / 'a-file-name'}")
    if not path.parent.is_dir():
        raise InputError(f"got {path}, but there is no folder {path.parent}", f"mkdir -p {path.parent}")


def require_apart(output: Path, read: Path) -> None:
    """Raise where what is written would be in the folder `read`, or above this folder or file; so too for its links."""
    place, source = output.resolve(), read.resolve()
    stays = (source, *(file.resolve() for file in source.iterdir())) if source.is_dir() else (source,)
    if source in place.parents or any(place in (each, *each.parents) for each in stays):
        got = f"got {output} as output, which is, holds or lies in the input {read}"
        raise InputError(got, "another place to write: what is read stays")


def flush(path: Path) -> None:
    """Wait until a file, or what a folder lists, is on the disk: a rename lasts once its folder was flushed."""
    if fcntl is None and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY if fcntl else os.O_RDWR)  # Windows flushes only what may be written
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock(file: IO[bytes]) -> bool | None:
    """Take the lock of a file, which ends with the process, however that ends; ``False`` where another has it.

    ``None``, and the file is closed, on a system or a file system without locks: Windows moves no open file.
    """
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except OSError:
        pass
    file.close()
    return None


def _umask() -> int:
    """The permissions that new files do not get; the only way to read it is to set it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _beside(path: Path) -> tuple[int, Path]:
    """An empty temporary file in the folder of `path`, open for reading and writing."""
    require_file(path)
    with _refusing(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    return handle, Path(name)


@contextmanager
def _refusing(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        remedy = "a disk with room, and a folder that you may write to"
        raise InputError(f"cannot write {path}: {error.strerror}", remedy) from error


def json_text(value: Any) -> str:
    """JSON for programs that people can read too: a line for every record and every flat list.

    >>> print(json_text([{"a": [1, 2]}, {"a": [3]}]), end="")
    [
     {"a": [1, 2]},
     {"a": [3]}
    ]
    """
    return _json(value, "\n") + "\n"


def _json(value: Any, new_line: str) -> str:
    if _depth(value) <= 2:
        return json.dumps(value, allow_nan=False)
    inner = new_line + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {_json(part, inner)}" for name, part in value.items()]
        return "{" + inner + f",{inner}".join(parts) + new_line + "}"
    return "[" + inner + f",{inner}".join(_json(part, inner) for part in value) + new_line + "]"


def _depth(value: Any) -> int:
    """How many brackets are around the innermost value."""
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(_depth, value), default=0) if isinstance(value, (list, tuple)) else 0


def read_json(path: Path) -> Any:
    """What a file of JSON holds; ``None`` where there is none, or something else in it."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


class FaultError(Exception):
    """What is wrong with a file, without its name: whoever reads it makes an `InputError` of both."""


def strict_json(content: bytes, what: str) -> dict[str, Any]:
    """The object that `what` holds in JSON; a `FaultError` where two readers may differ, and of all else.

    >>> strict_json(b'{"a": 1, "a": 2}', "it")
    Traceback (most recent call last):
    ...
    locant.files.FaultError: 'a' occurs twice in it
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
            raise FaultError(f"{name!r} occurs twice in {what}")
        return fields

    def refuse(constant: str) -> None:
        raise FaultError(f"{what} holds {constant}, which is not JSON")

    try:
        fields = json.loads(content.decode(), object_pairs_hook=once, parse_constant=refuse)
    except UnicodeDecodeError:
        raise FaultError(f"{what} is not UTF-8") from None
    except (ValueError, RecursionError):
        raise FaultError(f"{what} is not JSON") from None
    if not isinstance(fields, dict):
        raise FaultError(f"{what} is not a JSON object")
    return fields
