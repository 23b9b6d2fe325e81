"""Write files atomically, and read JSON that all readers interpret in the same way.

A file is written to a temporary file in the same folder, flushed to the disk, and renamed. The rename is atomic, and
the folder is flushed after it. A reader sees the old file or the new one, and a failed or killed write does not change
the old one. Windows cannot flush a folder, cannot rename a folder in which a file is open, and cannot lock whole files.
Errors of the system (a full disk, a device that fails) become an `InputError`.
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
"""Bytes of small writes that `NewFile` buffers. It passes larger writes to the system at once."""


@contextmanager
def replace_file(path: Path | str) -> Generator[Path]:
    """Yield a temporary path with the suffix of `path`. It becomes `path` if the block succeeds, else it is removed.

    Errors of the system inside the block are not wrapped.
    """
    path = Path(path)
    handle, temporary = _open_temporary(path)
    os.close(handle)
    try:
        yield temporary  # the caller may replace this file, as safetensors does
        with wrap_os_errors(path):
            temporary.chmod(_usual_mode())
            flush(temporary)
            temporary.replace(path)
            flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path | str, content: str | bytes) -> None:
    """Write a whole file, or leave the old file unchanged."""
    with NewFile(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.fsync()
        file.publish()


class NewFile:
    """A file that is written piece by piece and gets its name only when it is complete.

    `fsync` flushes it to the disk, and `publish` renames it. Before that it is a temporary file, which `discard` or
    the end of the ``with`` block removes. So several files can be flushed before the first one is published.

    >>> folder = Path(tempfile.mkdtemp())
    >>> with NewFile(folder / "a.txt") as file:
    ...     file.write(b"?hole")
    ...     file.overwrite(b"w", at=0)
    ...     file.fsync()
    ...     file.publish()
    >>> (folder / "a.txt").read_text(), len(list(folder.iterdir()))
    ('whole', 1)
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.size = 0
        """Bytes written so far."""
        self._pending = bytearray()
        self._handle, self._temporary = _open_temporary(self.path)
        self._is_open = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append these bytes."""
        view = memoryview(data).cast("B")
        self.size += len(view)
        if len(self._pending) + len(view) > BUFFER:
            self._drain()
        if len(view) < BUFFER:
            self._pending += view
        else:
            self._write(view)

    def overwrite(self, data: bytes, *, at: int) -> None:
        """Replace bytes that are already written, starting at byte `at`."""
        self._drain()
        with wrap_os_errors(self.path):
            os.lseek(self._handle, at, os.SEEK_SET)
            self._write(memoryview(data))
            os.lseek(self._handle, 0, os.SEEK_END)

    def read(self, size: int, *, at: int) -> bytes:
        """Return `size` bytes that are already written, starting at byte `at`."""
        self._drain()
        with wrap_os_errors(self.path):
            os.lseek(self._handle, at, os.SEEK_SET)
            data = os.read(self._handle, size)
            os.lseek(self._handle, 0, os.SEEK_END)
            return data

    def fsync(self) -> None:
        """Flush everything to the disk and close the file."""
        self._drain()
        with wrap_os_errors(self.path):
            self._temporary.chmod(_usual_mode())
            os.fsync(self._handle)
            self._close()

    def publish(self, *, flush_folder: bool = True) -> None:
        """Rename the flushed file to its path. The new name survives a crash once the folder is flushed too."""
        with wrap_os_errors(self.path):
            self._temporary.replace(self.path)
            if flush_folder:
                flush(self.path.parent)

    def discard(self) -> None:
        """Remove the temporary file, unless it is already published."""
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
        """Write all bytes. One system call may write only some of them."""
        with wrap_os_errors(self.path):
            while view:
                written = os.write(self._handle, view)
                if not written:
                    raise OSError(errno.EIO, "nothing was written")
                view = view[written:]


@contextmanager
def new_folder(path: Path, *, force: bool = False) -> Generator[Path]:
    """Yield a temporary folder next to `path`. It becomes `path` if the block succeeds, else it is removed.

    The caller must flush the files that it writes there, as `write_whole` and `NewFile` do. With `force`, the new
    folder replaces an existing one once the new one is complete.
    """
    replaces = force and path.is_dir()
    if not replaces:
        require_new(path)
    target = path.resolve()
    new, old = (target.with_name(f".{target.name}.{secrets.token_hex(4)}") for _ in range(2))
    with wrap_os_errors(path):
        new.mkdir()
    try:
        yield new
        with wrap_os_errors(path):
            mode = _usual_mode()
            for file in new.rglob("*"):
                if file.is_file():
                    file.chmod(mode)  # safetensors lets only the owner read what it writes
            if replaces:
                target.replace(old)
            elif target.is_dir():
                target.rmdir()  # an empty folder, which Windows would not replace
            new.replace(target)
            flush(target.parent)
    finally:
        if old.exists() and not target.exists():
            old.replace(target)
        for folder in (new, old):
            shutil.rmtree(folder, ignore_errors=True)


def require_new(path: Path) -> None:
    """Raise unless a new folder can be created at `path`. An empty folder may be replaced."""
    if path.exists() and not path.is_dir():
        raise InputError(f"got {path}, which is a file, as the folder to write", "pass the name of a new folder")
    if path.is_dir() and any(path.iterdir()):
        raise InputError(f"got {path}, which is not empty", "pass the name of a new folder")
    if not path.resolve().parent.is_dir():
        raise InputError(f"got {path}, but there is no folder {path.parent}", f"mkdir -p {path.parent}")


def require_file(path: Path) -> None:
    """Raise if a file cannot be written at `path`, because `path` is a folder or its folder does not exist."""
    if path.is_dir():
        raise InputError(f"got {path}, which is a folder, as the file to write", f"{path / 'a-file-name'}")
    if not path.parent.is_dir():
        raise InputError(f"got {path}, but there is no folder {path.parent}", f"mkdir -p {path.parent}")


def require_apart(output: Path, read: Path) -> None:
    """Raise if `output` is the input `read`, lies in it or contains it. Targets of links in `read` count as input."""
    target, source = output.resolve(), read.resolve()
    inputs = (source, *(file.resolve() for file in source.iterdir())) if source.is_dir() else (source,)
    if source in target.parents or any(target in (each, *each.parents) for each in inputs):
        got = f"got {output} as output, which is, contains or lies in the input {read}"
        raise InputError(got, "pass another path as output")


def flush(path: Path) -> None:
    """Wait until a file or the list of a folder's files is on the disk. A rename survives a crash only after this."""
    if fcntl is None and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY if fcntl else os.O_RDWR)  # Windows flushes only files that are open for writing
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock(file: IO[bytes]) -> bool | None:
    """Lock a file until the process ends, however it ends. Return ``False`` if another process has the lock.

    Return ``None`` and close the file if the system or the file system has no locks. It is closed because Windows
    cannot move an open file.
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


def _usual_mode() -> int:
    """Return the permissions of a new file. The system returns its mask of permissions only when one is set."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _open_temporary(path: Path) -> tuple[int, Path]:
    """Create an empty temporary file in the folder of `path`, open for reading and writing."""
    require_file(path)
    with wrap_os_errors(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    return handle, Path(name)


@contextmanager
def wrap_os_errors(path: Path) -> Generator[None]:
    """Raise an `InputError` for an error of the system inside the block, which writes `path`."""
    try:
        yield
    except OSError as error:
        remedy = "use a disk with free space and a folder that you may write to"
        raise InputError(f"cannot write {path}: {error.strerror}", remedy) from error


def json_text(value: Any) -> str:
    """Return readable JSON, with one line for each record and each flat list.

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
    """Return the number of brackets around the innermost value."""
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(_depth, value), default=0) if isinstance(value, (list, tuple)) else 0


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, or ``None`` if the file does not exist or is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


class FaultError(Exception):
    """A fault in the content of a file, without the file's name. The reader of the file raises an `InputError`."""


def strict_json(content: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object in `content`. Errors refer to it as `what`.

    Raise a `FaultError` if `content` is not a JSON object, or if two readers may interpret it differently.

    >>> strict_json(b'{"a": 1, "a": 2}', "it")
    Traceback (most recent call last):
    ...
    locant.files.FaultError: 'a' occurs twice in it
    """

    def to_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
            raise FaultError(f"{name!r} occurs twice in {what}")
        return fields

    def reject_constant(constant: str) -> None:
        raise FaultError(f"{what} contains {constant}, which is not JSON")

    try:
        fields = json.loads(content.decode(), object_pairs_hook=to_fields, parse_constant=reject_constant)
    except UnicodeDecodeError:
        raise FaultError(f"{what} is not UTF-8") from None
    except (ValueError, RecursionError):
        raise FaultError(f"{what} is not JSON") from None
    if not isinstance(fields, dict):
        raise FaultError(f"{what} is not a JSON object")
    return fields
