"""The locant format: a folder of shards (Megatron-LM's files as they are), a tokenizer, and a manifest of all files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from locant.errors import InputError
from locant.text.store.formats.base import ExportSource, StoreFormat, StoreOptions
from locant.text.store.formats.manifest import (
    AGAIN,
    MANIFEST,
    TOKENIZER,
    Manifest,
    ShardRecord,
    read_manifest,
    require_files,
    shard_name,
    write_manifest,
)  # fmt: skip
from locant.text.store.formats.megatron_index import index_size, read_index
from locant.text.store.formats.shard_writer import ShardWriter
from locant.text.store.token_files import read_file, sha256_of, token_dtype
from locant.text.tokenizer import Tokenizer

__all__ = ["LocantFormat"]


class LocantFormat(StoreFormat):
    """A folder with a manifest. Opening it compares the size of every file with the manifest."""

    def __init__(self, path: Path, options: StoreOptions) -> None:
        if given := [name for name, value in vars(options).items() if value is not None]:
            raise InputError(f"got {given[0]} for a locant store, which records it", f"format=, or no {given[0]}")
        self._folder = path.absolute()  # a program may change its folder while it reads
        self.manifest: Manifest = read_manifest(path)
        bins = [f"{self._folder}{os.sep}{shard_name(number)}.bin" for number in range(len(self.manifest.tokens))]
        super().__init__(bins, self.manifest.dtype, options, tokens=self.manifest.tokens)
        self.vocab_size = self.manifest.vocab_size
        self.end_of_text = self.manifest.end_of_text
        require_files(self._folder, self.manifest)

    @property
    def identity(self) -> str:
        return self.manifest.sha256

    @property
    def fingerprint(self) -> str:
        parts = [self.dtype.str, self.manifest.tokenizer_fingerprint, str(self.end_of_text)]
        return sha256_of("\n".join([*parts, *self.manifest.bin_sha256, *self.manifest.idx_sha256]).encode())

    def offsets(self, shard: int) -> Int[np.ndarray, " offsets"]:
        path, documents = self._folder / f"{shard_name(shard)}.idx", int(self.manifest.documents[shard])
        index = read_index(path)
        offsets = index.offsets
        fits = len(index.sequences) == documents == len(index.documents) - 1 and index.dtype == self.dtype
        if not fits or int(offsets[-1]) != int(self.tokens[shard]) or (np.diff(index.documents) != 1).any():
            raise InputError(f"{path} is not the index of its shard", AGAIN)
        return offsets

    def load_tokenizer(self) -> Tokenizer:
        record, path = self.manifest.tokenizer, self._folder / TOKENIZER
        content = read_file(path, record.size, AGAIN)
        _require_hash(path, sha256_of(content), record.sha256)
        tokenizer = Tokenizer.from_json(content.decode(errors="replace"), str(path))
        known = (tokenizer.fingerprint, tokenizer.vocab_size)
        if known != (self.manifest.tokenizer_fingerprint, self.vocab_size):
            raise InputError(f"{path} is not the tokenizer that {MANIFEST} names", AGAIN)
        return tokenizer

    def verify(self) -> None:
        if read_manifest(self._folder).sha256 != self.identity:
            raise InputError(f"{self._folder} was written anew since it was opened", "opening it again")
        _ = self.manifest.sources  # all that opening leaves unread
        self.load_tokenizer()
        for shard, path in enumerate(self.files):
            _require_hash(path, self.check(shard, AGAIN), self.manifest.bin_sha256[shard])
            index, size = f"{path.removesuffix('.bin')}.idx", index_size(int(self.manifest.documents[shard]))
            _require_hash(index, sha256_of(read_file(index, size, AGAIN)), self.manifest.idx_sha256[shard])
            self.offsets(shard)

    @classmethod
    def write(cls, source: ExportSource, folder: Path) -> np.dtype:
        if source.tokenizer is None:
            raise InputError("got a store without a tokenizer, which a locant store needs", "tokenizer=, --tokenizer")
        records: list[ShardRecord] = []
        for shard in source.shards:
            with ShardWriter(folder, shard, source.vocab_size) as writer:
                for ids, lengths, continues in source.documents(shard):
                    writer.append(ids, lengths, continues=continues)
                records.append(writer.close())
        write_manifest(
            folder,
            shards=records,
            tokenizer=source.tokenizer,
            end_of_text=source.store.end_of_text,
            sources=[_origin(source.store, shard) for shard in source.shards],
            options={"format": source.format},
        )
        return token_dtype(source.vocab_size)


def _origin(store: StoreFormat, shard: int) -> dict[str, Any]:
    path = store.files[shard]
    size = store.header + int(store.tokens[shard]) * store.dtype.itemsize
    return {"path": path, "size": size, "sha256": store.check(shard, f"a fresh copy of {path}")}


def _require_hash(path: str | Path, found: str, expected: str) -> None:
    if found != expected:
        raise InputError(f"{path} was changed after it was written: its SHA-256 is another one", AGAIN)
