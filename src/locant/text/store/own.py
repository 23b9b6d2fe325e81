"""The store's own format: shards of tokens with their indices, a tokenizer, and a manifest that knows all of them."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import numpy as np
from jaxtyping import Int

from locant.errors import InputError
from locant.text.store.contents import Contents, check_tokens
from locant.text.store.index import index_size, read_index
from locant.text.store.layout import MANIFEST, TOKENIZER, read_file, shard_name
from locant.text.store.manifest import AGAIN, Manifest, read_manifest
from locant.text.tokenizer import Tokenizer

__all__ = ["OwnContents"]


class OwnContents(Contents):
    """A folder with a manifest. Opening it compares the size of every file with the manifest."""

    def __init__(self, folder: Path) -> None:
        self._folder = os.path.abspath(folder)  # noqa: PTH100  # a program may change its folder while it reads
        self.manifest: Manifest = read_manifest(folder)
        self.dtype = self.manifest.dtype
        self.vocab_size = self.manifest.vocab_size
        self.end_of_text = self.manifest.end_of_text
        self.tokens = self.manifest.tokens
        _require_sizes(self._folder, self.manifest)

    @property
    def identity(self) -> str:
        return self.manifest.sha256

    @property
    def fingerprint(self) -> str:
        parts = [self.dtype.str, self.manifest.tokenizer_fingerprint, str(self.end_of_text)]
        return _sha256("\n".join([*parts, *self.manifest.bin_sha256, *self.manifest.idx_sha256]).encode())

    def bin_path(self, number: int) -> str:
        return f"{self._folder}{os.sep}{shard_name(number)}.bin"

    def offsets(self, number: int) -> Int[np.ndarray, " offsets"]:
        path = f"{self._folder}{os.sep}{shard_name(number)}.idx"
        index = read_index(path)
        documents = int(self.manifest.documents[number])
        offsets = index.offsets
        fits = len(index.sequences) == documents == len(index.documents) - 1 and index.dtype == self.dtype
        if not fits or int(offsets[-1]) != int(self.tokens[number]) or (np.diff(index.documents) != 1).any():
            raise InputError(f"{path} is not the index of its shard", AGAIN)
        return offsets

    def load_tokenizer(self) -> Tokenizer:
        record, path = self.manifest.tokenizer, f"{self._folder}{os.sep}{TOKENIZER}"
        content = read_file(path, record.size, AGAIN)
        _require_hash(path, _sha256(content), record.sha256)
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8: {error}", AGAIN) from None
        tokenizer = Tokenizer.from_json(text, path)
        known = (tokenizer.fingerprint, tokenizer.vocab_size)
        if known != (self.manifest.tokenizer_fingerprint, self.vocab_size):
            raise InputError(f"{path} is not the tokenizer that {MANIFEST} names", AGAIN)
        return tokenizer

    def verify(self) -> None:
        if read_manifest(Path(self._folder)).sha256 != self.identity:
            raise InputError(f"{self._folder} was written anew since it was opened", "opening it again")
        _ = self.manifest.sources  # all that opening leaves unread
        self.load_tokenizer()
        for number, tokens in enumerate(self.tokens.tolist()):
            path = self.bin_path(number)
            digest = check_tokens(path, dtype=self.dtype, tokens=tokens, vocab_size=self.vocab_size, remedy=AGAIN)
            _require_hash(path, digest, self.manifest.bin_sha256[number])
            path = f"{path.removesuffix('.bin')}.idx"
            size = index_size(int(self.manifest.documents[number]))
            _require_hash(path, _sha256(read_file(path, size, AGAIN)), self.manifest.idx_sha256[number])
            self.offsets(number)


def _require_sizes(folder: str, manifest: Manifest) -> None:
    """Every file is there and has its size: one system call each, relative to the folder."""
    bins = (manifest.dtype.itemsize * manifest.tokens).tolist()
    documents = manifest.documents.tolist()
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            for number, size in enumerate(bins):
                name = shard_name(number)
                _require_size(handle, f"{name}.bin", size)
                _require_size(handle, f"{name}.idx", index_size(documents[number]))
            _require_size(handle, TOKENIZER, manifest.tokenizer.size)
        finally:
            os.close(handle)
    except OSError as error:
        raise InputError(f"cannot read {error.filename} in {folder}: {error.strerror}", AGAIN) from None
    except _SizeError as error:
        raise InputError(f"{folder}{os.sep}{error}", AGAIN) from None


class _SizeError(Exception):
    """A file's name, and what is wrong with its size."""


def _require_size(folder: int, name: str, size: int) -> None:
    found = os.stat(name, dir_fd=folder)  # a `Path` for each of 20 000 files would take longer
    if found.st_size != size or not stat.S_ISREG(found.st_mode):
        raise _SizeError(f"{name} has {found.st_size} bytes, expected {size}")


def _require_hash(path: str, found: str, expected: str) -> None:
    if found != expected:
        raise InputError(f"{path} was changed after it was written: its SHA-256 is another one", AGAIN)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
