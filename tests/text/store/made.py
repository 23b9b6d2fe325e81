"""Small stores for tests, and the arrays that they have to hold."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from locant import Tokenizer
from locant.text.store import ShardRecord, ShardWriter, TokenStore, write_manifest

__all__ = ["BYTES", "SHARDS", "TOKENS", "index_of", "make", "write_shard"]

BYTES = Tokenizer.bytes()

SHARDS: list[list[list[int]]] = [[[5, 6, 7], [], [8]], [], [[256], [0, 1, 2, 3, 4]], [[]], [[9, 9], [255]]]
"""Documents by shard: empty ones first, in the middle and last, a shard of none, and one without a token."""

TOKENS = np.array([token for shard in SHARDS for document in shard for token in document])


def write_shard(folder: Path, number: int, documents: Sequence[Sequence[int]], vocab_size: int = 257) -> ShardRecord:
    with ShardWriter(folder, number, vocab_size) as writer:
        for document in documents:
            writer.append(np.array(document, dtype=np.int64), np.array([len(document)]))
        return writer.close()


def make(folder: Path, shards: Sequence[Sequence[Sequence[int]]] = SHARDS, **options: Any) -> TokenStore:
    """A finished store; `options` are those of `write_manifest`."""
    folder.mkdir(exist_ok=True)
    records = [write_shard(folder, number, documents) for number, documents in enumerate(shards)]
    defaults: dict[str, Any] = {"tokenizer": BYTES, "end_of_text": None, "sources": [], "options": {}}
    write_manifest(folder, shards=records, **{**defaults, **options})
    return TokenStore(folder)


def index_of(lengths: list[int], code: int = 8, documents: list[int] | None = None) -> bytes:
    """An index that does not contradict itself."""
    documents = list(range(len(lengths) + 1)) if documents is None else documents
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(documents))
    pointers = 2 * np.cumsum([0, *lengths])[:-1]
    return header + np.array(lengths, "<i4").tobytes() + pointers.tobytes() + np.array(documents, "<i8").tobytes()
