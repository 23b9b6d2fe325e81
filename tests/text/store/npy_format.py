"""A store format of somebody else's package, in one file: arrays that `numpy.save` wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from locant.formats import ExportSource, StoreFormat, StoreOptions


class Npy(StoreFormat):
    """``tokens.npy``, and ``documents.npy`` with where each document begins."""

    def __init__(self, path: Path, options: StoreOptions) -> None:
        tokens = np.load(path / "tokens.npy", mmap_mode="r")
        super().__init__([path / "tokens.npy"], tokens.dtype, options, header=tokens.offset)
        self._documents = path / "documents.npy"

    def offsets(self, shard: int) -> np.ndarray:
        return np.load(self._documents)

    @classmethod
    def write(cls, source: ExportSource, folder: Path) -> np.dtype:
        np.save(folder / "tokens.npy", np.concatenate([*source.blocks()]).astype(source.dtype))
        np.save(folder / "documents.npy", source.store.all_offsets())
        return source.dtype
