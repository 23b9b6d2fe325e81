"""What the files of a store are called, and how many bytes a token takes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from locant.errors import InputError, RangeError

__all__ = [
    "BLOCK",
    "MANIFEST",
    "MAX_SIZE",
    "TOKENIZER",
    "read_file",
    "require_file",
    "require_known",
    "shard_name",
    "token_dtype",
]

MANIFEST = "store.json"
TOKENIZER = "tokenizer.json"

SMALL_VOCABULARY = 65_500
"""From this size on, Megatron-LM takes four bytes for a token; the last ids below 2**16 stay free for its padding."""

BLOCK = 1 << 19
"""Ids that are checked, narrowed, hashed and written at a time: what the cache of a core holds."""

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


def shard_name(number: int) -> str:
    """The name of a shard without its suffix. Names come from numbers, so no manifest can lead out of its folder.

    >>> shard_name(7)
    'shard-00007'
    """
    return f"shard-{number:05d}"


def require_known(ids: Integer[np.ndarray, " tokens"], vocab_size: int, place: int) -> None:
    """All ids are those of a vocabulary; `place` is where they begin, for the message.

    Raises:
        RangeError: one is not.
    """
    # Read as unsigned, a negative id is a large one, so that one pass finds both.
    unsigned = ids.view(ids.dtype.str.replace("i", "u"))
    signed = np.issubdtype(ids.dtype, np.signedinteger)
    limit = min(vocab_size, int(np.iinfo(ids.dtype).max) + 1) if signed else vocab_size
    for first in range(0, len(ids), BLOCK):
        block = unsigned[first : first + BLOCK]
        if int(block.max()) >= limit:
            at = first + int(np.argmax(block >= limit))
            raise RangeError(
                f"got id {ids[at]} at place {place + at}, expected ids within 0..{vocab_size - 1}",
                "the tokenizer that made the ids",
            )


def require_file(path: str | Path, remedy: str) -> int:
    """The size of a regular file; a pipe would block whoever opens it.

    Raises:
        InputError: there is none.
    """
    try:
        is_file, size = os.path.isfile(path), os.stat(path).st_size  # noqa: PTH113, PTH116  # strings, for their speed
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", remedy) from None
    except ValueError as error:
        raise InputError(f"cannot read {str(path)!r}: {error}", remedy) from None
    if not is_file:
        raise InputError(f"got {path}, which is not a file", remedy)
    return size


def read_file(path: str | Path, size: int, remedy: str) -> bytes:
    """The whole content of a file that has exactly `size` bytes.

    Raises:
        InputError: it has fewer or more, or cannot be read.
    """
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
