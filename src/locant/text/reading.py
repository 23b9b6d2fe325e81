"""Reading texts: files as they are, and a text that needs no file at all.

A file is one document, in UTF-8, read whole. A byte order mark is dropped; everything else is kept as it stands.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

from locant.errors import InputError

STDIN = "-"


@runtime_checkable
class Readable(Protocol):
    """What bytes can be read from."""

    def read(self, size: int = -1, /) -> bytes: ...


def sample_text() -> str:
    """Real English that every CPython carries: its own language reference, about 465 000 characters.

    Raises:
        InputError: if this Python was installed without `pydoc_data`.

    >>> sample_text() == sample_text(), len(sample_text()) > 400_000
    (True, True)
    """
    try:
        from pydoc_data import topics
    except ModuleNotFoundError:
        cause = f"the sample text is the documentation inside Python, and {sys.executable} has none"
        raise InputError(cause, "pass a text file of yours") from None
    return "\n\n".join(topics.topics[name].strip("\n") for name in sorted(topics.topics)) + "\n"


def read_texts(paths: str | Path | Iterable[str | Path]) -> list[str]:
    r"""The text of every file, one document each; ``-`` is standard input.

    Raises:
        InputError: for a file that is missing, a folder, empty, not readable or not text in UTF-8, with the byte.

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
            remedy = "iconv -f LATIN1 -t UTF-8 on it first, if it is text in an older encoding"
            raise InputError(cause, remedy) from None
        if not texts[-1]:
            raise InputError(f"{name} is empty, expected text", "use a file with text in it")
    return texts


def well_formed(text: str) -> str:
    """Text that UTF-8 can hold: surrogates that make a pair are joined, lone ones replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def standard_input() -> Readable:
    """The bytes of standard input; a shell can start a program without it (``<&-``)."""
    if sys.stdin is None:
        raise InputError("got - for standard input, which is closed", "pass a file, or use a pipe")
    return sys.stdin.buffer


def _read_bytes(path: Path) -> bytes:
    try:
        if not path.is_char_device():  # some never end
            return path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"got {path}, but there is no such file", "pass the path of a text file") from None
    except IsADirectoryError:
        raise InputError(f"got {path}, which is a folder, expected a text file", f"{path / '*.txt'}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"cannot read {path}: {reason}", "use a file that you may read") from None
    except ValueError:  # a NUL character in the path
        raise InputError(
            f"got {str(path)!r}, which cannot be the name of a file", "pass the path of a text file"
        ) from None
    raise InputError(f"got {path}, which is a device, expected a text file", "pass the path of a text file")


def require_text(data: bytes, name: str, remedy: str = "iconv -f UTF-16 -t UTF-8 on it first") -> None:
    """Refuse what begins like UTF-16, for which the `remedy` is, or has a NUL in it as binary files have."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError(f"{name} begins like UTF-16, expected UTF-8", remedy)
    if (zero := data.find(0)) >= 0:
        raise InputError(f"{name} is binary: byte {zero} is NUL, expected text in UTF-8", "use a .txt or .md file")
