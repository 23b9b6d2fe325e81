"""Megatron-LM's format, ``PREFIX.bin`` and ``PREFIX.idx``: tokens, and the index that `megatron_index` describes.

Megatron-LM reads it with ``IndexedDataset("PREFIX")``. The shards of a locant store are such pairs of files, as they
are; exporting makes one pair of them all.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from jaxtyping import Int

from locant.errors import InputError
from locant.text.store.formats.base import ExportSource, StoreFormat, StoreOptions, only_file
from locant.text.store.formats.megatron_index import Index, read_index
from locant.text.store.formats.shard_writer import ShardWriter
from locant.text.store.token_files import token_dtype

__all__ = ["MegatronFormat"]


class MegatronFormat(StoreFormat):
    """Two files, ``PREFIX.bin`` and ``PREFIX.idx``: what Megatron-LM's ``preprocess_data.py`` writes."""

    def __init__(self, path: Path, options: StoreOptions) -> None:
        if options.dtype is not None:
            raise InputError("got a dtype for Megatron-LM's files, which say it themselves", "no dtype")
        prefix = os.path.abspath(only_file(path, ".idx"))  # noqa: PTH100
        prefix = prefix[: -len(".bin")] if prefix.endswith((".bin", ".idx")) else prefix
        self._idx = f"{prefix}.idx"
        index = read_index(self._idx)
        super().__init__([f"{prefix}.bin"], index.dtype, options)
        self._require_covered(index)

    def offsets(self, shard: int) -> Int[np.ndarray, " offsets"]:
        index = read_index(self._idx)
        self._require_covered(index)
        return index.offsets

    def verify(self) -> None:
        self.offsets(0)
        super().verify()

    def _require_covered(self, index: Index) -> None:
        counted, found = int(index.sequences.sum(dtype=np.int64)), int(self.tokens[0])
        if counted != found:
            path = self.files[0]
            raise InputError(f"{path} has {found} tokens, and {self._idx} counts {counted}", f"a fresh copy of {path}")

    @classmethod
    def write(cls, source: ExportSource, folder: Path) -> np.dtype:
        with ShardWriter(folder, 0, source.vocab_size, name="tokens") as writer:
            for shard in source.shards:
                for ids, lengths, continues in source.documents(shard):
                    writer.append(ids, lengths, continues=continues)
            writer.close()
        return token_dtype(source.vocab_size)
