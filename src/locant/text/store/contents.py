"""What a store is made of, whatever its format: files of tokens, and what is known about them."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod

import numpy as np
from jaxtyping import Int

from locant.errors import InputError
from locant.text.store.layout import require_file
from locant.text.tokenizer import Tokenizer

__all__ = ["Contents", "check_tokens"]

BLOCK = 1 << 20
"""Bytes that are read at a time."""


class Contents(ABC):
    """One store on the disk. Opening it reads no tokens, and says how many there are."""

    dtype: np.dtype
    """Of the tokens in the files."""
    vocab_size: int | None
    end_of_text: int | None
    tokens: Int[np.ndarray, " shards"]

    @property
    @abstractmethod
    def identity(self) -> str:
        """A SHA-256; where it is the same, so is the store."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A SHA-256 of the tokens and where the documents begin, as far as it can be had without reading them."""

    @abstractmethod
    def bin_path(self, number: int) -> str:
        """The file that holds the tokens of a shard, and nothing else."""

    @abstractmethod
    def offsets(self, number: int) -> Int[np.ndarray, " offsets"]:
        """Where each document of a shard begins, and the end."""

    @abstractmethod
    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids."""

    @abstractmethod
    def verify(self) -> None:
        """Read everything, and raise where it is not what it should be."""


def check_tokens(path: str, *, dtype: np.dtype, tokens: int, vocab_size: int | None, remedy: str) -> str:
    """Read a whole file of tokens, in constant memory; its SHA-256.

    Raises:
        InputError: it has another size, or an id that is not in the vocabulary.
    """
    size = tokens * dtype.itemsize
    found = require_file(path, remedy)
    digest, done = hashlib.sha256(), 0
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123  # paths are strings here, for their speed
            while found == size and done < size:
                block = file.read(min(BLOCK, size - done))
                if not block:
                    found = done  # it shrank
                    break
                digest.update(block)
                _require_known(block, dtype, vocab_size, path, remedy, done)
                done += len(block)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", remedy) from None
    if found != size:
        raise InputError(f"{path} has {found} bytes, expected {size}", remedy)
    return digest.hexdigest()


def _require_known(block: bytes, dtype: np.dtype, vocab_size: int | None, path: str, remedy: str, done: int) -> None:
    limit = np.iinfo(dtype).max + 1 if vocab_size is None else vocab_size
    ids = np.frombuffer(block, dtype, len(block) // dtype.itemsize)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
        place = int(np.argmax((ids < 0) | (ids >= limit)))
        raise InputError(
            f"{path} has id {ids[place]} at place {done // dtype.itemsize + place}, expected ids within 0..{limit - 1}",
            remedy,
        )
