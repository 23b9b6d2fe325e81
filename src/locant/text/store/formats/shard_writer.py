"""`ShardWriter`: writes one shard of token ids and its index, some documents at a time, in constant memory."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from locant.arguments import shown
from locant.errors import InputError, ShapeError
from locant.files import NewFile
from locant.text.store.formats.manifest import MANIFEST, FileRecord, ShardRecord, shard_name
from locant.text.store.formats.megatron_index import IndexWriter
from locant.text.store.token_files import BLOCK, require_known, token_dtype

__all__ = ["ShardWriter"]


class ShardWriter:
    """Writes the tokens and the index of one shard; both appear when `close` returns, or neither.

    The files are named from the shard's `number` in the store, or `name`. Every id has to be below `vocab_size`, which
    decides the dtype, see `token_dtype`. If the system refuses to write, nothing is left behind.
    """

    def __init__(self, folder: Path, number: int, vocab_size: int, *, name: str | None = None) -> None:
        self.tokens = 0
        """How many so far."""
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        if (folder / MANIFEST).exists():
            raise InputError(f"got {folder}, which holds a finished store", "another folder")
        name = name or shard_name(number)
        self._digest = hashlib.sha256()
        self._bin = NewFile(folder / f"{name}.bin")
        try:
            self._idx = NewFile(folder / f"{name}.idx")
        except BaseException:
            self._bin.discard()
            raise
        self._index = IndexWriter(self._idx, self._dtype)

    @property
    def documents(self) -> int:
        """How many so far."""
        return self._index.documents

    def append(
        self, ids: Integer[np.ndarray, " tokens"], lengths: Integer[np.ndarray, " docs"], *, continues: bool = False
    ) -> None:
        """Add documents: their tokens, one after the other, and how many each has; 0 is a document too.

        With `continues`, the first of them goes on where the last one of the call before ended.

        Raises:
            RangeError: an id that is not in the vocabulary. ShapeError: lengths that do not add up to the ids.
                Nothing is added then.
        """
        for name, array in (("ids", ids), ("lengths", lengths)):
            if not isinstance(array, np.ndarray) or array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
                raise ShapeError(f"got {shown(array)} for {name}, expected one axis of integers", "a NumPy array")
        # A length that is too large is found first, so that the sum cannot wrap.
        fits = not len(lengths) or (int(lengths.min()) >= 0 and int(lengths.max()) <= len(ids))
        if not fits or int(lengths.sum(dtype=np.int64)) != len(ids):
            remedy = "a length for each document, all tokens counted"
            raise ShapeError(f"got {len(ids)} ids, and lengths that do not add up to as many", remedy)
        if continues and not self.documents:
            raise ShapeError("got continues=True, but there is no document before", "continues=False")
        require_known(ids, self._vocab_size, self.tokens)
        self._index.append(lengths, continues=continues)
        self.tokens += len(ids)
        for first in range(0, len(ids), BLOCK):
            data = np.ascontiguousarray(ids[first : first + BLOCK], dtype=self._dtype).data.cast("B")
            self._digest.update(data)
            self._bin.write(data)

    def close(self) -> ShardRecord:
        """Bring both files to the disk, and give them their names: the tokens first, so no index is without them."""
        digest = self._index.finish()
        self._bin.settle()
        self._idx.settle()
        self._bin.publish(flush_folder=False)
        self._idx.publish()
        return ShardRecord(
            tokens=self.tokens,
            documents=self.documents,
            bin=FileRecord(size=self._bin.size, sha256=self._digest.hexdigest()),
            idx=FileRecord(size=self._idx.size, sha256=digest),
        )

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._bin.discard()
        self._idx.discard()
