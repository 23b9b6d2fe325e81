"""Read texts from files. A sample text is available without a file.

Each file is one UTF-8 document. A byte order mark is dropped, and all other bytes are kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

from locant.errors import InputError

STDIN = "-"


@runtime_checkable
class Readable(Protocol):
    """An object from which bytes can be read."""

    def read(self, size: int = -1, /) -> bytes: ...


def sample_text() -> str:
    """Return real English text that every CPython contains: its language reference, about 465,000 characters.

    Raises:
        InputError: this Python was installed without `pydoc_data`.

    >>> sample_text() == sample_text(), len(sample_text()) > 400_000
    (True, True)
    """
    try:
        from pydoc_data import topics
    except ModuleNotFoundError:
        cause = f"the sample text is the documentation inside Python, but {sys.executable} has none"
        raise InputError(cause, "pass a text file") from None
    return "\n\n".join(topics.topics[name].strip("\n") for name in sorted(topics.topics)) + "\n"


def read_texts(paths: str | Path | Iterable[str | Path]) -> list[str]:
    r"""Return the text of every file. Each file is one document. ``-`` is standard input.

    Raises:
        InputError: a file is missing, a folder, empty, unreadable, or not text in UTF-8 (the error names the byte).

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.txt"
    >>> _ = path.write_bytes(b"one\r\ntwo")
    >>> read_texts(path)
    ['one\r\ntwo']
    """
    texts: list[str] = []
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        name = "standard input" if path == STDIN else str(path)
        data = standard_input().read() if path == STDIN else _read_bytes(Path(path))
        require_text(data, name)
        try:
            texts.append(data.decode("utf-8").removeprefix("\ufeff"))
        except UnicodeDecodeError as error:
            cause = f"{name} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x} ({error.reason})"
            remedy = "convert it with iconv -f LATIN1 -t UTF-8 first, if it is text in an older encoding"
            raise InputError(cause, remedy) from None
        if not texts[-1]:
            raise InputError(f"{name} is empty, expected text", "use a file with text in it")
    return texts


def well_formed(text: str) -> str:
    """Return the text in a form that UTF-8 can encode.

    Pairs of surrogates are joined, and lone surrogates become U+FFFD.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def standard_input() -> Readable:
    """Return standard input as a stream of bytes. Raise `InputError` if it is closed (a shell closes it by ``<&-``)."""
    if sys.stdin is None:
        raise InputError("got - for standard input, which is closed", "pass a file, or use a pipe")
    return sys.stdin.buffer


def _read_bytes(path: Path) -> bytes:
    try:
        if not path.is_char_device():  # some devices never end
            return path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"got {path}, but there is no such file", "pass the path of a text file") from None
    except IsADirectoryError:
        raise InputError(f"got {path}, which is a folder, expected a text file", f"pass {path / '*.txt'}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"cannot read {path}: {reason}", "use a file that you may read") from None
    except ValueError:  # a NUL character in the path
        raise InputError(
            f"got {str(path)!r}, which cannot be the name of a file", "pass the path of a text file"
        ) from None
    raise InputError(f"got {path}, which is a device, expected a text file", "pass the path of a text file")


def require_text(data: bytes, name: str) -> None:
    """Raise `InputError` if data begin like UTF-32 or UTF-16, or contain NUL, as binary files do."""
    for kind in ("UTF-32", "UTF-16"):  # in this order: the mark of UTF-16 begins the mark of UTF-32
        if data.startswith(("\ufeff".encode(f"{kind}-LE"), "\ufeff".encode(f"{kind}-BE"))):
            cause = f"{name} begins like {kind}, expected UTF-8"
            raise InputError(cause, f"convert it with iconv -f {kind} -t UTF-8 first")
    if (zero := data.find(0)) >= 0:
        raise InputError(f"{name} is binary: byte {zero} is NUL, expected text in UTF-8", "use a .txt or .md file")
