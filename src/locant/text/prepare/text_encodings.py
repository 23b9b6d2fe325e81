"""Detect the encoding of a text from its first bytes, and warn or raise an error if it is not the named one.

Text is read as UTF-8, or in the encoding that the user names. A byte order mark at the beginning of a file decides the
encoding of this file (`MARKS`). A file that is likely in another encoding causes a warning (`likely_other_encoding`). A
file that is likely UTF-8 although the user named another encoding (`is_misread_as`) causes a warning, or an error if
the named encoding is UTF-16 or UTF-32. A file with a NUL in its first `CHECKED_BYTES` bytes is binary. A later NUL
counts as text, because a few of a million web pages have one.
"""

from __future__ import annotations

import codecs
import dataclasses
import re
import warnings
from collections.abc import Sequence
from typing import Any

from locant.arguments import short_repr
from locant.errors import InputError, Remedy
from locant.text.prepare.byte_ranges import Source
from locant.text.reading import require_text

CHECKED_BYTES = 8192
"""Bytes at the beginning of a file that are checked for text."""

REPLACED_SHARE = 0.005
"""A text in which a larger share of the characters is not UTF-8 is likely in another encoding."""

MIN_CHARACTERS = 4
"""A warning needs at least this many of the characters in question. A smaller number may be stray bytes."""

CONTROL_SHARE = 0.1
"""The limit for control characters other than white space. UTF-16 text in other scripts contains many of them."""

NUL_SHARE = 0.3
"""A text in which a larger share of the even or of the odd bytes is NUL is likely UTF-16."""

FOREIGN_SHARE = 0.5
"""A text in which a larger share of the characters is not UTF-8 is probably not in a Western encoding."""

MAX_LISTED = 10
"""The largest number of files that a warning lists. It counts the others."""

MARKS: dict[bytes, tuple[str | None, str]] = {  # UTF-32 first, because its mark begins with the mark of UTF-16
    codecs.BOM_UTF32_LE: ("utf-32", "utf-32-le"),
    codecs.BOM_UTF32_BE: ("utf-32", "utf-32-be"),
    codecs.BOM_UTF16_LE: ("utf-16", "utf-16-le"),
    codecs.BOM_UTF16_BE: ("utf-16", "utf-16-be"),
    codecs.BOM_UTF8: (None, "utf-8-sig"),
}
"""The encoding of a file that begins with each byte order mark, in two spellings. ``None`` means UTF-8."""

WIDE = ("utf-16", "utf-32")
"""Encodings in which Latin letters have NUL bytes, by the beginnings of their names."""

REPLACEMENT = "\ufffd".encode()
"""The replacement for characters that their encoding does not define."""

_CONTROL = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x9f]")


def known_encoding(name: str) -> str | None:
    """Return Python's name of a text encoding, or ``None`` for UTF-8.

    >>> known_encoding("Latin1"), known_encoding("utf8")
    ('iso8859-1', None)
    """
    try:
        codec = codecs.lookup(name)
        "a".encode(codec.name)  # fails for encodings from bytes to bytes, such as hex
        # Fails for encodings of domain names (idna, punycode), which cannot replace bytes.
        # UTF-16 and UTF-32 need the mark.
        codecs.getincrementaldecoder(codec.name)("replace").decode(codecs.BOM_UTF32_LE, True)
    except (LookupError, ValueError, TypeError):
        cause = f"got {short_repr(name)}, which Python does not know as an encoding of text files"
        raise InputError(cause, "use one such as cp1252, gbk or utf-16-le") from None
    return None if codec.name == "utf-8" else codec.name


def with_marked_encoding(source: Source, data: bytes) -> Source:
    """Return the source with the encoding of the byte order mark in its data, or unchanged if there is no mark."""
    names = _names(data)
    return source if not names or source.encoding in names else dataclasses.replace(source, encoding=names[0])


def _names(data: bytes) -> Sequence[str | None]:
    """Return the names of the encoding whose byte order mark begins the data, or no names."""
    return next((names for mark, names in MARKS.items() if data.startswith(mark)), ())


def require_encoded_text(source: Source, data: bytes) -> None:
    """Raise `InputError` if the beginning of a file is not text in the source's encoding."""
    if source.encoding is not None:
        if source.encoding.startswith(WIDE) and is_misread_as(source.encoding, data):
            cause = f"{source.name} is not {source.encoding}: it has no NUL byte, and it is valid UTF-8"
            convert = f"convert the {source.encoding} files with iconv -f {source.encoding} -t UTF-8"
            raise InputError(cause, Remedy(f"prepare it without {{}}, or {convert}", encoding=...))
        if data and source.encoding in (needs := {"utf-16": "utf-16-le", "utf-32": "utf-32-le"}) and not _names(data):
            cause = f"{source.name} has no byte order mark, which {source.encoding} needs"
            raise InputError(cause, Remedy(encoding=needs[source.encoding]))
        data = _decode_beginning(data, source.encoding).encode(errors="replace")
    for encoding, likely in {"utf-16-le": data[1::2], "utf-16-be": data[::2]}.items():
        others = data.count(0) - likely.count(0)
        if len(likely) >= 8 and likely.count(0) > NUL_SHARE * len(likely) and others < NUL_SHARE * len(likely) / 2:
            cause = f"{source.name} is likely UTF-16 without a byte order mark: many of its bytes are NUL"
            raise InputError(cause, Remedy(encoding=encoding))
    require_text(data, source.name)


def is_misread_as(encoding: str, data: bytes) -> bool:
    """Return whether the beginning of a text is likely UTF-8, and reading it in `encoding` gives another text.

    >>> is_misread_as("cp1252", "déjà vu".encode()), is_misread_as("cp1252", "déjà vu".encode("cp1252"))
    (True, False)
    >>> is_misread_as("utf-16-le", b"plain"), is_misread_as("cp1252", b"plain")
    (True, False)
    """
    if b"\0" in data or likely_other_encoding(data) is not None:
        return False
    if data.isascii() and b"a".decode(encoding, "replace") == "a":  # such as ISO-2022-JP, which has only ASCII bytes
        return False
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data, len(data) < CHECKED_BYTES)
    except UnicodeDecodeError:
        return False
    if encoding.startswith(WIDE):
        return bool(data)
    return text.removeprefix("\ufeff") != _decode_beginning(data, encoding)


def _decode_beginning(data: bytes, encoding: str) -> str:
    """Decode the beginning of a file. It may end in the middle of a character unless it is the whole file."""
    return codecs.getincrementaldecoder(encoding)("replace").decode(data, len(data) < CHECKED_BYTES)


def warn_of_misread(names: Sequence[str], encoding: str | None) -> None:
    """Warn about files that are likely UTF-8 but are read in another encoding."""
    if not names:
        return
    if len(names) == 1:
        what, them, they_are = f"{names[0]} is valid UTF-8 but was read as {encoding}", "it", "it is"
    else:
        more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        listed = ", ".join(names[:MAX_LISTED]) + more
        what, them, they_are = (
            f"{len(names)} files are valid UTF-8 but were read as {encoding}: {listed}",
            "them",
            "they are",
        )
    what = what.replace("{", "{{").replace("}", "}}")
    warnings.warn(Remedy(f"{what}; if {they_are} UTF-8, prepare {them} without {{}}", encoding=...), stacklevel=3)


def likely_other_encoding(data: bytes) -> tuple[str, Remedy] | None:
    """Return why the beginning of a text is likely not UTF-8, and a remedy. Return ``None`` if it may be UTF-8.

    >>> likely_other_encoding("déjà vu, à l'été".encode("cp1252"))
    ('4 of its first 15 characters are not UTF-8', "pass encoding='cp1252', or its actual encoding")
    >>> likely_other_encoding("déjà vu, à l'été".encode()[:-1]) is None  # it ends within a letter
    True
    """
    text = codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data)
    replaced, control = text.count("\ufffd") - data.count("\ufffd".encode()), len(_CONTROL.findall(text))
    western = Remedy("pass {}, or its actual encoding", encoding="cp1252")
    if replaced > FOREIGN_SHARE * len(text):
        western = Remedy("pass {} with its actual encoding, for example gb18030, shift_jis or cp1251", encoding=...)
    wide = Remedy("pass {} with its actual encoding, for example utf-16-le", encoding=...)
    for count, share, what, remedy in (
        (replaced, REPLACED_SHARE, "are not UTF-8", western),
        (control, CONTROL_SHARE, "are control characters", wide),
    ):
        if count >= MIN_CHARACTERS and count > share * len(text):
            return f"{count} of its first {len(text)} characters {what}", remedy
    return None


def is_clean(texts: list[bytes], recoded: bool, decoder: Any = None, last: bool = True) -> bool:
    """Return whether texts are valid UTF-8, or were valid in the encoding from which they were recoded."""
    data = b"\n".join(texts)
    if recoded:
        return REPLACEMENT not in data
    try:
        data.decode() if decoder is None else decoder.decode(data, last)
    except UnicodeDecodeError:
        return False
    return True
