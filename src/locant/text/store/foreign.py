"""Stores that other programs made: nanoGPT's, Megatron-LM's and datatrove's files, read where they lie.

None of them has hashes, a vocabulary or a tokenizer, so less can be checked: sizes, that indices cover the tokens
without a gap, and, if the tokenizer is given, that every id is one of its own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from locant.arguments import whole
from locant.errors import InputError
from locant.text.store.contents import Contents, check_tokens
from locant.text.store.index import read_index
from locant.text.store.layout import read_file, require_file
from locant.text.tokenizer import Tokenizer

__all__ = ["DatatroveContents", "MegatronContents", "NanogptContents"]

HEADER_OF_LLM_C = 20240520
"""How the files of llm.c and modded-nanogpt begin, as int32: their tokens come after a header of 1 024 bytes."""
DTYPES = ("uint8", "uint16", "uint32", "int16", "int32", "int64")
HEAD = 4096


class ForeignContents(Contents):
    """Files without a manifest. What is known of them is their sizes when they were opened."""

    def __init__(
        self,
        bins: Sequence[str],
        dtype: np.dtype,
        tokenizer: Tokenizer | str | Path | None,
        end_of_text: int | None,
    ) -> None:
        self.dtype = dtype
        self.tokens = np.array([_tokens(path, dtype) for path in bins], dtype=np.int64)
        self._bins = [os.path.abspath(path) for path in bins]  # noqa: PTH100  # a program may change its folder
        self._tokenizer = tokenizer if tokenizer is None or isinstance(tokenizer, Tokenizer) else _loaded(tokenizer)
        self.vocab_size = self._tokenizer.vocab_size if self._tokenizer else None
        largest = self.vocab_size - 1 if self.vocab_size else int(np.iinfo(dtype).max)
        remedy = "the id that stands after each document"
        self.end_of_text = None if end_of_text is None else whole("end_of_text", end_of_text, 0, largest, remedy=remedy)

    @property
    def identity(self) -> str:
        names = [f"{path} {os.stat(path).st_mtime_ns}" for path in self._bins]  # noqa: PTH116
        return _sha256([self.fingerprint, *names])

    @property
    def fingerprint(self) -> str:
        """Of the sizes and of how each file begins."""
        tokenizer = self._tokenizer.fingerprint if self._tokenizer else ""
        heads = [_head(path).hex() for path in self._bins]
        return _sha256([self.dtype.str, tokenizer, str(self.end_of_text), str(self.tokens.tolist()), *heads])

    def bin_path(self, number: int) -> str:
        return self._bins[number]

    def offsets(self, number: int) -> Int[np.ndarray, " offsets"]:
        """By the end of text; formats with an index have better."""
        path, tokens = self._bins[number], int(self.tokens[number])
        if self.end_of_text is None:
            raise InputError(f"{path} does not say where its documents begin", "end_of_text=, the id after each")
        ids = np.frombuffer(read_file(path, tokens * self.dtype.itemsize, _again(path)), self.dtype)
        ends = np.flatnonzero(ids == self.end_of_text) + 1
        if tokens and (not len(ends) or int(ends[-1]) != tokens):
            ends = np.append(ends, tokens)  # the last document was not ended
        return np.concatenate([[0], ends]).astype(np.int64)

    def load_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InputError("got a store of another program, which has no tokenizer", "tokenizer=")
        return self._tokenizer

    def verify(self) -> None:
        for path, tokens in zip(self._bins, self.tokens.tolist(), strict=True):
            check_tokens(path, dtype=self.dtype, tokens=tokens, vocab_size=self.vocab_size, remedy=_again(path))


class NanogptContents(ForeignContents):
    """A file of tokens: what nanoGPT's ``prepare.py`` writes."""

    def __init__(
        self,
        path: Path,
        *,
        dtype: str | np.dtype | None,
        tokenizer: Tokenizer | str | Path | None,
        end_of_text: int | None,
    ) -> None:
        file = _only(path, ".bin") if path.is_dir() else path
        require_file(file, "the file that nanoGPT's prepare.py wrote, such as train.bin")
        if _head(str(file))[:4] == HEADER_OF_LLM_C.to_bytes(4, "little"):
            raise InputError(f"{file} begins with the header of llm.c", "the file without its first 1024 bytes")
        super().__init__([str(file)], _dtype(dtype), tokenizer, end_of_text)


class MegatronContents(ForeignContents):
    """Two files, ``PREFIX.bin`` and ``PREFIX.idx``: what Megatron-LM's ``preprocess_data.py`` writes."""

    def __init__(
        self,
        path: Path,
        *,
        dtype: str | np.dtype | None,
        tokenizer: Tokenizer | str | Path | None,
        end_of_text: int | None,
    ) -> None:
        if dtype is not None:
            raise InputError("got a dtype for Megatron-LM's files, which say it themselves", "no dtype")
        file = _only(path, ".idx") if path.is_dir() else path
        prefix = os.path.abspath(file)  # noqa: PTH100
        prefix = prefix[: -len(".bin")] if prefix.endswith((".bin", ".idx")) else prefix
        self._idx = f"{prefix}.idx"
        index = read_index(self._idx)
        super().__init__([f"{prefix}.bin"], index.dtype, tokenizer, end_of_text)
        self._require_covered(index.sequences)

    def offsets(self, number: int) -> Int[np.ndarray, " offsets"]:
        index = read_index(self._idx)
        self._require_covered(index.sequences)
        return index.offsets

    def verify(self) -> None:
        self.offsets(0)
        super().verify()

    def _require_covered(self, sequences: np.ndarray) -> None:
        counted, found = int(sequences.sum(dtype=np.int64)), int(self.tokens[0])
        if counted != found:
            raise InputError(
                f"{self._bins[0]} has {found} tokens, and {self._idx} counts {counted}", _again(self._bins[0])
            )


class DatatroveContents(ForeignContents):
    """A file ``.ds`` with its ``.ds.index``, or a folder of them: what datatrove's tokenizer steps write.

    With ``.ds.metadata`` beside it the number of bytes of a token is read there. Masks of the loss (``.ds.loss``) are
    left alone.
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: str | np.dtype | None,
        tokenizer: Tokenizer | str | Path | None,
        end_of_text: int | None,
    ) -> None:
        files = sorted(str(file) for file in path.glob("*.ds")) if path.is_dir() else [str(path)]
        if not files:
            raise InputError(f"{path} holds no file that ends with .ds", "the folder that datatrove wrote")
        sizes = {size for size in map(_bytes_per_token, files) if size}
        if len(sizes) > 1:
            raise InputError(f"{path} has files of {' and '.join(map(str, sorted(sizes)))} bytes per token", "one kind")
        said = _dtype(dtype) if dtype is not None or not sizes else np.dtype(f"<u{sizes.pop()}")
        super().__init__(files, said, tokenizer, end_of_text)

    def offsets(self, number: int) -> Int[np.ndarray, " offsets"]:
        path, tokens = f"{self._bins[number]}.index", int(self.tokens[number])
        if self.end_of_text is not None and not os.path.exists(path):  # noqa: PTH110
            return super().offsets(number)
        size = require_file(path, "end_of_text=, the id after each document")
        ends = np.frombuffer(read_file(path, size, _again(path)), "<u8", size // 8)
        covers = int(ends[-1]) == tokens if len(ends) else not tokens
        if size % 8 or not covers or (ends[1:] < ends[:-1]).any():
            raise InputError(f"{path} is not the index of a file with {tokens} tokens", _again(path))
        return np.concatenate([np.zeros(1, dtype=np.int64), ends.astype(np.int64)])

    def verify(self) -> None:
        super().verify()
        for number in range(len(self._bins)):
            self.offsets(number)


def _only(folder: Path, suffix: str) -> Path:
    """The one file with this suffix; to join several (a train and a validation split) is nobody's wish."""
    files = sorted(folder.glob(f"*{suffix}"))
    if len(files) != 1:
        what = ", ".join(file.name for file in files[:4]) or "none"
        raise InputError(f"got {folder}, expected one file that ends with {suffix}, found {what}", "one of its files")
    return files[0]


def _tokens(path: str, dtype: np.dtype) -> int:
    size = require_file(path, _again(path))
    if size % dtype.itemsize:
        raise InputError(f"{path} has {size} bytes, which is no number of {dtype.name} tokens", "another dtype")
    return size // dtype.itemsize


def _dtype(name: str | np.dtype | None) -> np.dtype:
    try:
        dtype = np.dtype("uint16" if name is None else name)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in DTYPES or dtype.byteorder == ">":
        cause = f"got dtype {name!r}, expected one of {', '.join(DTYPES)}, little-endian"
        raise InputError(cause, "dtype='uint16', as nanoGPT writes")
    return dtype.newbyteorder("<")


def _bytes_per_token(path: str) -> int | None:
    """From ``NAME|BYTES`` in the first line of the metadata, where there is one."""
    metadata = f"{path}.metadata"
    if not os.path.isfile(metadata):  # noqa: PTH113
        return None
    size = _head(metadata).split(b"\n")[0].rpartition(b"|")[2]
    if size not in (b"2", b"4"):
        raise InputError(f"{metadata} does not say how many bytes a token has", "dtype=, and no metadata file")
    return int(size)


def _head(path: str) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read(HEAD)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", _again(path)) from None


def _loaded(tokenizer: str | Path) -> Tokenizer:
    return Tokenizer.load(tokenizer)


def _again(path: Any) -> str:
    return f"a fresh copy of {path}"


def _sha256(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()
