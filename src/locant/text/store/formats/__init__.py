"""Formats of token stores, by name. Each format can be read and written. `register_format` adds a format.

=============  ======================================================  ==========================================
``locant``     a folder of shards with a manifest and the tokenizer    `locant.TokenStore`
``megatron``   ``tokens.bin`` and ``tokens.idx``                       ``IndexedDataset("tokens")``
``nanogpt``    ``train.bin``: all tokens, and nothing else             ``np.memmap("train.bin", dtype=np.uint16)``
``datatrove``  ``00000.ds`` and its index and metadata, per shard      ``DatatroveFolderDataset``
=============  ======================================================  ==========================================

Tokens of nanoGPT and datatrove have two bytes for up to 65,536 entries of the vocabulary, and four bytes for more.
Tokens of Megatron-LM and locant have two bytes for up to 65,499 entries. Only the locant format (`formats.locant`)
contains hashes and the tokenizer.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from locant.arguments import short_repr
from locant.errors import InputError, RangeError, Remedy
from locant.files import write_whole
from locant.registry import Registry
from locant.text.store.formats import base
from locant.text.store.formats.base import ExportSource, StoreFormat, StoreOptions
from locant.text.store.formats.locant import LocantFormat
from locant.text.store.formats.shards import Index, ShardWriter, read_index

__all__ = ["FORMATS", "ExportSource", "StoreFormat", "StoreOptions", "register_format"]

LLM_C = {20240520: "<u2", 20240801: "<u4"}
"""The first int32 in files of llm.c and modded-nanogpt, and the dtype of the tokens after the header.

The first entry is for GPT-2, and the second entry is for Llama 3.
"""
LLM_C_EVALUATION = 20240522
LLM_C_HEADER = 1024
"""The size of a header in bytes. It has 256 int32 numbers, and the third is the number of tokens."""

SPLIT = re.compile(r"(?<![a-z])(train|val|valid|validation|dev|test)(?![a-z])")


class MegatronFormat(StoreFormat):
    """Two files, ``PREFIX.bin`` and ``PREFIX.idx``, as Megatron-LM's ``preprocess_data.py`` writes them.

    The shards of a locant store already are such pairs of files. An export joins all shards into one pair.
    """

    def __init__(self, path: Path, options: StoreOptions) -> None:
        if options.dtype is not None:
            raise InputError("got a dtype for Megatron-LM's files, which state their dtype", "pass no dtype")
        prefix = os.path.abspath(base.only_file(path, ".idx"))  # noqa: PTH100
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
        counted, tokens, path = int(index.sequences.sum(dtype=np.int64)), int(self.tokens[0]), self.files[0]
        if counted != tokens:
            raise InputError(f"{path} has {tokens} tokens, but {self._idx} counts {counted}", base.damage_remedy(path))

    @classmethod
    def write(cls, source: ExportSource, folder: Path) -> np.dtype:
        with ShardWriter(folder, 0, source.vocab_size, name="tokens") as writer:
            for shard in source.shards:
                for ids, lengths, continues in source.documents(shard):
                    writer.append(ids, lengths, continues=continues)
            writer.close()
        return base.token_dtype(source.vocab_size)


class NanogptFormat(StoreFormat):
    """A file of tokens and nothing else, as nanoGPT's ``prepare.py`` writes it. The file does not state its dtype.

    A folder means all its files, which must belong to one split. Files of llm.c have a header, which states the
    dtype and the number of tokens.
    """

    def __init__(self, path: Path, options: StoreOptions) -> None:
        files = sorted(path.glob("*.bin")) if path.is_dir() else [path]
        if not files:
            raise InputError(
                f"{path} holds no file that ends with .bin", "pass the folder that nanoGPT's prepare.py wrote"
            )
        splits = {match[1]: file.name for file in files if (match := SPLIT.search(file.name.lower()))}
        if len(splits) > 1:
            cause = f"{path} holds files of several splits: {', '.join(splits.values())}"
            raise InputError(
                cause, f"pass one file, such as {path / next(iter(splits.values()))}, or move a split elsewhere"
            )
        for file in files:
            base.require_file(file, "pass the file that nanoGPT's prepare.py wrote, such as train.bin")
        heads = {self._magic(file) for file in files}
        if len(heads) > 1:
            raise InputError(
                f"{path} holds files with and without a header of llm.c, or with two kinds of header",
                "use files of one kind",
            )
        dtype = LLM_C.get(next(iter(heads)) or 0)
        if dtype is None:
            super().__init__(files, options.token_dtype, options)
            return
        if options.dtype is not None and np.dtype(options.dtype) != np.dtype(dtype):
            cause = f"got dtype {options.dtype}, but the header of {files[0]} states {np.dtype(dtype).name}"
            raise InputError(cause, "pass no dtype")
        super().__init__(files, np.dtype(dtype), options, header=LLM_C_HEADER)
        for file, count in zip(files, self.tokens.tolist(), strict=True):
            stated = int.from_bytes(base.head_of(file)[8:12], "little")
            if stated != count:
                raise InputError(f"{file} has {count} tokens, but its header states {stated}", base.damage_remedy(file))

    @staticmethod
    def _magic(file: Path) -> int | None:
        """Return the number at the beginning of a file of llm.c, or ``None`` for another file."""
        magic = int.from_bytes(base.head_of(file)[:4], "little")
        if magic == LLM_C_EVALUATION:
            raise InputError(f"{file} is an evaluation file of llm.c: questions with answers", "pass a file of tokens")
        return magic if magic in LLM_C else None

    @classmethod
    def write(cls, source: ExportSource, folder: Path) -> np.dtype:
        source.write_tokens(folder / "train.bin")
        return source.dtype


class DatatroveFormat(StoreFormat):
    """A ``.ds`` file with its ``.ds.index``, or a folder of such files. Loss masks (``.ds.loss``) are not read.

    The index holds the end of each document, as uint64. ``.ds.metadata``, which may be missing, begins with
    ``TOKENIZER|BYTES``. ``BYTES`` is the number of bytes of a token.
    """

    def __init__(self, path: Path, options: StoreOptions) -> None:
        files = sorted(path.glob("*.ds")) if path.is_dir() else [path]
        if not files:
            raise InputError(f"{path} holds no file that ends with .ds", "pass the folder that datatrove wrote")
        sizes: set[int] = set()
        for metadata in (f"{file}.metadata" for file in files):
            if os.path.isfile(metadata):  # noqa: PTH113
                size = base.head_of(metadata).split(b"\n")[0].rpartition(b"|")[2]
                if size not in (b"2", b"4"):
                    cause = f"{metadata} does not state how many bytes a token has"
                    raise InputError(cause, Remedy("pass {}, and remove the metadata file", dtype=...))
                sizes.add(int(size))
        if len(sizes) > 1:
            raise InputError(
                f"{path} has files of {' and '.join(map(str, sorted(sizes)))} bytes per token",
                "use files with the same number of bytes per token",
            )
        in_metadata = options.dtype is None and sizes
        super().__init__(files, np.dtype(f"<u{sizes.pop()}") if in_metadata else options.token_dtype, options)

    def offsets(self, shard: int) -> Int[np.ndarray, " offsets"]:
        path, tokens = f"{self.files[shard]}.index", int(self.tokens[shard])
        if self.end_of_text is not None and not os.path.exists(path):  # noqa: PTH110
            return super().offsets(shard)
        remedy = base.damage_remedy(path)
        size = base.require_file(path, "pass end_of_text=, the id after each document")
        ends = np.frombuffer(base.read_file(path, size, remedy), "<u8", size // 8)
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


def register_format(name: str, format: type[StoreFormat]) -> None:  # noqa: A002  # what the field calls it
    """Register a format for ``TokenStore(path, format=name)`` and ``locant export``, as an entry point does.

    Raises:
        RangeError: the class is not a subclass of `StoreFormat`, or the name is in use.
    """
    FORMATS.register(name, format)


def _check(name: str, value: Any) -> None:
    if not (isinstance(value, type) and issubclass(value, StoreFormat)):
        raise RangeError(
            f"got {short_repr(value)} for store format {name!r}, expected a class", "pass a subclass of StoreFormat"
        )


FORMATS: Registry[type[StoreFormat]] = Registry("store format", "locant.formats", _check)
FORMATS.register("locant", LocantFormat)
FORMATS.register("megatron", MegatronFormat)
FORMATS.register("nanogpt", NanogptFormat)
FORMATS.register("datatrove", DatatroveFormat)
