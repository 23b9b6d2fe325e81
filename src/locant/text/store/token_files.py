"""Files of token ids: how many bytes an id takes, and reading such files without trust in what they hold."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from locant.errors import InputError, RangeError

__all__ = ["BLOCK", "MAX_SIZE", "read_file", "require_file", "require_known", "sha256_of", "token_dtype", "unknown_id"]

SMALL_VOCABULARY = 65_500
"""From this size on, Megatron-LM takes four bytes for a token; the last ids below 2**16 stay free for its padding."""

BLOCK = 1 << 19
"""Ids that are checked, narrowed, hashed and written at a time: they fit into the cache of a core."""

MAX_SIZE = 2**63 - 1
"""No file, and no count in one, is larger."""


def token_dtype(vocab_size: int) -> np.dtype:
    """How the tokens of a vocabulary are stored: uint16 below 65 500 entries, else int32, as in Megatron-LM.

    >>> token_dtype(65_499), token_dtype(65_500)
    (dtype('uint16'), dtype('int32'))

    Raises:
        RangeError: a vocabulary without entries, or one with ids beyond int32.
    """
    if not 1 <= vocab_size <= 2**31:
        raise RangeError(f"got a vocabulary of {vocab_size} entries, expected 1 to 2**31", "another tokenizer")
    return np.dtype("<u2" if vocab_size < SMALL_VOCABULARY else "<i4")


def require_known(ids: Integer[np.ndarray, " tokens"], vocab_size: int, place: int) -> None:
    """Raise a `RangeError` if an id is not in the vocabulary; `place` is where the ids begin, for the message."""
    if fault := unknown_id(ids, vocab_size, place):
        raise RangeError(f"got {fault}", "the tokenizer that made the ids")


def unknown_id(ids: np.ndarray, vocab_size: int | None, place: int) -> str:
    """The first id that is negative or not in the vocabulary, where it is, and what was expected; else nothing."""
    # Read as unsigned, a negative id is a large one, so that one pass finds both.
    unsigned = ids.view(ids.dtype.str.replace("i", "u"))
    of_dtype = int(np.iinfo(ids.dtype).max) + 1
    size = vocab_size or of_dtype
    for first in range(0, len(ids), BLOCK):
        block = unsigned[first : first + BLOCK]
        if int(block.max()) >= min(size, of_dtype):
            at = first + int(np.argmax(block >= min(size, of_dtype)))
            return f"id {ids[at]} at place {place + at}, expected ids within 0..{size - 1}"
    return ""


def sha256_of(content: bytes | memoryview) -> str:
    """Its SHA-256, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def require_file(path: str | Path, remedy: str) -> int:
    """The size of a regular file, or an `InputError`: opening a pipe would wait for whatever writes to it."""
    try:
        is_file, size = os.path.isfile(path), os.stat(path).st_size  # noqa: PTH113, PTH116  # strings, for their speed
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", remedy) from None
    if not is_file:
        raise InputError(f"got {path}, which is not a file", remedy)
    return size


def read_file(path: str | Path, size: int, remedy: str) -> bytes:
    """The whole content of a file that has exactly `size` bytes; else an `InputError`."""
    found = require_file(path, remedy)
    if found == size:
        try:
            with open(path, "rb") as file:  # noqa: PTH123  # a string, for its speed
                content = file.read(size)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}", remedy) from None
        found = len(content)
        if found == size:
            return content
    raise InputError(f"{path} has {found} bytes, expected {size}", remedy)
