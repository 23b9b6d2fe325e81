"""datatrove's format, for each shard ``NAME.ds`` with ``NAME.ds.index`` and ``NAME.ds.metadata``.

The index holds the end of each document, as uint64. The metadata, which may be missing, begins with
``TOKENIZER|BYTES``, how many bytes a token has. datatrove reads it with ``DatatroveFolderDataset``.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from jaxtyping import Int

from locant.errors import InputError
from locant.files import write_whole
from locant.text.store.formats.base import ExportSource, StoreFormat, StoreOptions, head_of
from locant.text.store.token_files import read_file, require_file

__all__ = ["DatatroveFormat"]


class DatatroveFormat(StoreFormat):
    """A file ``.ds`` with its ``.ds.index``, or a folder of them; masks of the loss (``.ds.loss``) are not read."""

    def __init__(self, path: Path, options: StoreOptions) -> None:
        files = sorted(path.glob("*.ds")) if path.is_dir() else [path]
        if not files:
            raise InputError(f"{path} holds no file that ends with .ds", "the folder that datatrove wrote")
        sizes = {size for size in map(_bytes_per_token, files) if size}
        if len(sizes) > 1:
            raise InputError(f"{path} has files of {' and '.join(map(str, sorted(sizes)))} bytes per token", "one kind")
        in_metadata = options.dtype is None and sizes
        super().__init__(files, np.dtype(f"<u{sizes.pop()}") if in_metadata else options.token_dtype, options)

    def offsets(self, shard: int) -> Int[np.ndarray, " offsets"]:
        path, tokens = f"{self.files[shard]}.index", int(self.tokens[shard])
        if self.end_of_text is not None and not os.path.exists(path):  # noqa: PTH110
            return super().offsets(shard)
        remedy = f"a fresh copy of {path}"
        size = require_file(path, "end_of_text=, the id after each document")
        ends = np.frombuffer(read_file(path, size, remedy), "<u8", size // 8)
        covers = int(ends[-1]) == tokens if len(ends) else not tokens
        if size % 8 or not covers or (ends[1:] < ends[:-1]).any():
            raise InputError(f"{path} is not the index of a file with {tokens} tokens", remedy)
        return np.concatenate([np.zeros(1, dtype=np.int64), ends.astype(np.int64)])

    def verify(self) -> None:
        super().verify()
        self.all_offsets()

    @classmethod
    def write(cls, source: ExportSource, folder: Path) -> np.dtype:
        for shard in source.shards:
            name, count = f"{shard:05d}.ds", int(source.store.tokens[shard])
            source.write_tokens(folder / name, shard)
            write_whole(folder / f"{name}.index", source.store.offsets(shard)[1:].astype("<u8").tobytes())
            metadata = f"tokenizer.json|{source.dtype.itemsize}\n{count}\n{count / 1e6:.2f} MT"
            write_whole(folder / f"{name}.metadata", metadata)
        return source.dtype


def _bytes_per_token(path: Path) -> int | None:
    """From the metadata, where there is some."""
    metadata = f"{path}.metadata"
    if not os.path.isfile(metadata):  # noqa: PTH113
        return None
    size = head_of(metadata).split(b"\n")[0].rpartition(b"|")[2]
    if size not in (b"2", b"4"):
        raise InputError(f"{metadata} does not say how many bytes a token has", "dtype=, and no metadata file")
    return int(size)
