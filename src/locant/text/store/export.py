"""Stores in the formats of other programs, and theirs in ours.

=============  ======================================================  ==========================================
``nanogpt``    ``train.bin``: all tokens, and nothing else             ``np.memmap("train.bin", dtype=np.uint16)``
``megatron``   ``tokens.bin`` and ``tokens.idx``                       ``IndexedDataset("tokens")``
``datatrove``  ``00000.ds`` and its index and metadata, per shard      ``DatatroveFolderDataset``
``locant``     a store of our own, out of another program's            ``TokenStore``
=============  ======================================================  ==========================================

nanoGPT's and datatrove's tokens have two bytes up to 65 536 entries of the vocabulary, and four beyond; Megatron-LM's
and ours have two up to 65 499. The shards of a store are Megatron-LM's files as they are; exporting makes one pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from locant.errors import InputError
from locant.files import NewFile, new_folder, write_whole
from locant.text.store.contents import check_tokens
from locant.text.store.finishing import write_manifest
from locant.text.store.layout import TOKENIZER, require_known, token_dtype
from locant.text.store.store import TokenStore
from locant.text.store.writer import ShardWriter
from locant.text.tokenizer import Tokenizer

__all__ = ["Export", "Target", "export_store"]

Target = Literal["nanogpt", "megatron", "datatrove", "locant"]

BLOCK = 1 << 20
"""Tokens that are held at a time."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was written."""

    output: str
    to: Target
    files: list[str]
    tokens: int
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def export_store(
    store: TokenStore, output: Path, *, to: Target, progress: Callable[[int], None] | None = None
) -> Export:
    """Write a store in another format, into a new folder that appears when it is whole.

    The tokenizer goes with it where there is one. Every id is checked against its vocabulary.

    Args:
        store: is left as it is.
        output: a folder that is not there yet, or empty.
        to: the format, see the module.
        progress: is told how many tokens are done.

    Raises:
        InputError: the folder is in use, the system refuses to write, or the store does not say what the format needs
            (documents; for ``locant`` a tokenizer). RangeError: an id that is not in the vocabulary.
    """
    if to not in _WRITERS:
        raise InputError(f"got format {to!r}, expected one of {', '.join(_WRITERS)}", "to='nanogpt'")
    tokenizer = _tokenizer(store)
    vocab_size = store.vocab_size or _entries_seen(store)
    with new_folder(output) as folder:
        dtype = _WRITERS[to](_Source(store, vocab_size, tokenizer, progress or _quiet), folder)
        if tokenizer is not None and to != "locant":
            write_whole(folder / TOKENIZER, tokenizer.to_json())
        files = sorted(path.name for path in folder.iterdir())
    return Export(output=str(output), to=to, files=files, tokens=len(store), dtype=dtype.name)


@dataclass(frozen=True)
class _Source:
    store: TokenStore
    vocab_size: int
    tokenizer: Tokenizer | None
    progress: Callable[[int], None]

    @property
    def narrow_dtype(self) -> np.dtype:
        """Where four bytes are needed, and no earlier."""
        if self.vocab_size > 2**32:
            raise InputError(f"got ids up to {self.vocab_size - 1}, which take more than four bytes", "another dtype")
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")

    def blocks(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Tokens in order, checked."""
        for first in range(start, stop, BLOCK):
            ids = self.store[first : min(first + BLOCK, stop)]
            require_known(ids, self.vocab_size, first)
            yield ids
            self.progress(first + len(ids))


def _to_nanogpt(source: _Source, folder: Path) -> np.dtype:
    _write_tokens(source, folder / "train.bin", 0, len(source.store))
    return source.narrow_dtype


def _to_datatrove(source: _Source, folder: Path) -> np.dtype:
    dtype, store = source.narrow_dtype, source.store
    starts = store.shard_starts.tolist()
    for number, (start, stop) in enumerate(pairwise(starts)):
        name = f"{number:05d}.ds"
        _write_tokens(source, folder / name, start, stop)
        write_whole(folder / f"{name}.index", store.shard_documents(number)[1:].astype("<u8").tobytes())
        count = stop - start
        write_whole(folder / f"{name}.metadata", f"{TOKENIZER}|{dtype.itemsize}\n{count}\n{count / 1e6:.2f} MT")
    return dtype


def _write_tokens(source: _Source, path: Path, start: int, stop: int) -> None:
    with NewFile(path) as file:
        for ids in source.blocks(start, stop):
            file.write(ids.astype(source.narrow_dtype).data.cast("B"))
        file.settle()
        file.publish()


def _to_megatron(source: _Source, folder: Path) -> np.dtype:
    with ShardWriter(folder, 0, source.vocab_size, name="tokens") as writer:
        for number in range(len(source.store.shards)):
            _append_shard(source, writer, number)
        writer.close()
    return token_dtype(source.vocab_size)


def _to_own(source: _Source, folder: Path) -> np.dtype:
    store, tokenizer = source.store, source.tokenizer
    if tokenizer is None:
        raise InputError("got a store without a tokenizer, and ours have one", "tokenizer=, --tokenizer")
    records: list[Any] = []
    for number in range(len(store.shards)):
        with ShardWriter(folder, number, source.vocab_size) as writer:
            _append_shard(source, writer, number)
            records.append(writer.close())
    write_manifest(
        folder,
        shards=records,
        tokenizer=tokenizer,
        end_of_text=store.end_of_text,
        sources=[_origin(store, number) for number in range(len(store.shards))],
        options={"format": store.format},
    )
    return token_dtype(source.vocab_size)


def _origin(store: TokenStore, number: int) -> dict[str, Any]:
    path, tokens = store.shard_path(number), int(np.diff(store.shard_starts)[number])
    again = f"a fresh copy of {path}"
    digest = check_tokens(path, dtype=store.dtype, tokens=tokens, vocab_size=store.vocab_size, remedy=again)
    return {"path": path, "size": tokens * store.dtype.itemsize, "sha256": digest}


def _append_shard(source: _Source, writer: ShardWriter, number: int) -> None:
    """Documents by the block; one that is longer than a block goes in parts."""
    begin = int(source.store.shard_starts[number])
    offsets = source.store.shard_documents(number)
    first = 0
    while first < len(offsets) - 1:
        after = int(np.searchsorted(offsets, offsets[first] + BLOCK, side="right")) - 1
        last = max(first + 1, after)
        start, stop = int(offsets[first]), int(offsets[last])
        if stop - start <= BLOCK:
            ids = np.concatenate([*source.blocks(begin + start, begin + stop)] or [source.store[:0]])
            writer.append(ids, np.diff(offsets[first : last + 1]))
        else:
            for part, ids in enumerate(source.blocks(begin + start, begin + stop)):
                writer.append(ids, np.array([len(ids)]), continues=part > 0)
        first = last


def _tokenizer(store: TokenStore) -> Tokenizer | None:
    return store.tokenizer if store.has_tokenizer else None


def _entries_seen(store: TokenStore) -> int:
    """The smallest vocabulary that has every id."""
    largest = 0
    for first in range(0, len(store), BLOCK):
        ids = store[first : first + BLOCK]
        if int(ids.min()) < 0:
            raise InputError(f"{store.path} has negative ids", "another dtype")
        largest = max(largest, int(ids.max()))
    return largest + 1


def _quiet(_: int) -> None:
    pass


_WRITERS: dict[str, Callable[[_Source, Path], np.dtype]] = {
    "nanogpt": _to_nanogpt,
    "megatron": _to_megatron,
    "datatrove": _to_datatrove,
    "locant": _to_own,
}
