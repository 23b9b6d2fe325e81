"""The locant format: a folder of shards (files of Megatron-LM), a tokenizer, and a manifest of all files.

`store.json`, the manifest, is written last, so a folder that has one is a complete store. It is JSON, one line per
field. Its last two fields are the SHA-256 of every byte before them and ``"complete": true``. Their spelling is fixed,
and is checked before anything is parsed, so a changed or missing byte is always found. The shards are a table of
columns, because a table of rows takes several times as long to read. The manifest does not contain file names. They are
made from numbers, so no manifest can point outside its folder. If a store was made from many files, most of the
manifest is the list of sources. It is hashed with the rest, but parsed only on first use.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from locant._version import __version__
from locant.arguments import whole
from locant.errors import InputError, RangeError, Remedy
from locant.files import FaultError, strict_json, write_whole
from locant.text.store.formats import base
from locant.text.store.formats.base import ExportSource, StoreFormat, StoreOptions
from locant.text.store.formats.shards import (
    MANIFEST,
    FileRecord,
    ShardRecord,
    ShardWriter,
    index_size,
    read_index,
    shard_name,
)  # fmt: skip
from locant.text.tokenizer import Tokenizer

TOKENIZER = "tokenizer.json"
VERSION = 1
MAX_MANIFEST_BYTES = 1 << 30
"""The largest size of a manifest in bytes. Ten million input files would need more."""

HEAD = re.compile(rb'\{\n "schema": "locant token store",\n "version": (\d{1,9}),\n')
TAIL = re.compile(rb',\n "sha256": "([0-9a-f]{64})",\n "complete": true\n\}\n')
TAIL_SIZE = len(',\n "sha256": "",\n "complete": true\n}\n') + 64
SOURCES, BEHIND_SOURCES = b'\n "sources": ', b',\n "shards": '
"""The bytes before and after the sources. Texts in JSON have no line feed, so only fields of the manifest match."""
REMEDY = "prepare the store again, or get a fresh copy of it"

SHARD_COLUMNS = ("tokens", "documents", "bin_size", "bin_sha256", "idx_size", "idx_sha256")
HEX = "0123456789abcdef"


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """The checked content of `store.json`."""

    sha256: str
    """The SHA-256 of the manifest itself. Stores with equal hashes are equal."""
    dtype: np.dtype
    vocab_size: int
    end_of_text: int | None
    """The id after each document, if one was appended."""
    tokens: Int[np.ndarray, " shards"]
    documents: Int[np.ndarray, " shards"]
    bin_sha256: Sequence[str]
    idx_sha256: Sequence[str]
    tokenizer: FileRecord
    tokenizer_fingerprint: str
    options: dict[str, Any]
    path: Path
    """The path of the manifest, from which the sources are read."""

    @cached_property
    def sources(self) -> list[dict[str, Any]]:
        """The sources of the texts, which are read on first use."""
        content = _content(self.path.parent)
        with _naming(self.path):
            if _require_intact(content) != self.sha256:
                raise InputError(f"{self.path} was rewritten after it was opened", "open it again")
            return _sources(strict_json(content, "it"))


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a store. Raise `InputError` if there is none, or if it was changed."""
    content, path = _content(folder), folder / MANIFEST
    begin, end = content.find(SOURCES), content.rfind(BEHIND_SOURCES)
    is_ours = 0 <= begin < end  # else another program wrote it, and all of it is parsed
    without_sources = content[: begin + len(SOURCES)] + b"[]" + content[end:] if is_ours else content
    with _naming(path):
        digest = _require_intact(content)
        return _manifest(strict_json(without_sources, "it"), digest, path)


@contextmanager
def _naming(path: Path) -> Generator[None]:
    try:
        yield
    except FaultError as fault:
        raise InputError(f"{path} is not an intact manifest of a store: {fault}", REMEDY) from None


def _content(folder: Path) -> bytes:
    path = folder / MANIFEST
    if not folder.is_dir():
        raise InputError(
            f"got {folder}, which is not a folder",
            Remedy("pass a folder that locant prepare made, or a {}", format=...),
        )
    if not path.exists():
        raise InputError(
            f"{folder} holds no finished store: it has no {MANIFEST}",
            Remedy(
                "run locant prepare, or run it again if it was interrupted, or pass {} for stores of other programs",
                format=...,
            ),
        )
    size = base.require_file(path, REMEDY)
    _require_readable(size, path)
    return base.read_file(path, size, REMEDY)


def _require_readable(size: int, path: Path) -> None:
    """Raise `InputError` for a manifest that is too large to be read, before it is read or written."""
    if size > MAX_MANIFEST_BYTES:
        raise InputError(
            f"{path} has {size} bytes, more than {MAX_MANIFEST_BYTES}", "use a store of fewer and larger files"
        )


def _require_intact(content: bytes) -> str:
    """Return the SHA-256 at the end of a manifest. Raise an error unless the content has this hash."""
    head = HEAD.match(content)
    if not head:
        raise FaultError("it does not begin like a manifest")
    if int(head[1]) != VERSION:
        cause = f"got a store of version {int(head[1])}, but this package reads version {VERSION}"
        raise InputError(cause, "pip install --upgrade locant")
    tail = TAIL.fullmatch(content, max(0, len(content) - TAIL_SIZE))
    if not tail:
        raise FaultError("its end is missing")
    digest = tail[1].decode()
    base.require(base.sha256_of(memoryview(content)[:-TAIL_SIZE]) == digest, "it was changed after it was written")
    return digest


def _manifest(fields: dict[str, Any], digest: str, path: Path) -> Manifest:
    """Check all fields and return them. The hash proves that they are unchanged, not that they are consistent."""
    vocab_size = _count(fields, "vocab_size")
    try:
        dtype = base.token_dtype(vocab_size)
    except RangeError as error:
        raise FaultError(error.cause) from None
    dtype_fault = f"dtype is {fields.get('dtype')!r}, but {vocab_size} entries need {dtype.name}"
    base.require(fields.get("dtype") == dtype.name, dtype_fault)
    shards = _shards(_object(fields, "shards"), dtype)
    for name in ("tokens", "documents"):
        total = sum(shards[name])
        base.require(_count(fields, name) == total, f"{name} is {fields[name]}, but its shards have {total}")
    tokenizer = _object(fields, "tokenizer")
    _require_hashes([tokenizer.get("sha256"), tokenizer.get("fingerprint")])
    _sources(fields)
    end, appended = fields.get("end_of_text"), fields.get("end_of_text_appended")
    base.require(type(appended) is bool, f"end_of_text_appended is {appended!r}, expected true or false")
    if (end is not None or appended) and _count(fields, "end_of_text") >= vocab_size:
        raise FaultError(f"end_of_text is {end}, but the vocabulary has {vocab_size} entries")
    return Manifest(
        sha256=digest,
        dtype=dtype,
        vocab_size=vocab_size,
        end_of_text=end if appended else None,
        tokens=np.array(shards["tokens"], dtype=np.int64),
        documents=np.array(shards["documents"], dtype=np.int64),
        bin_sha256=shards["bin_sha256"],
        idx_sha256=shards["idx_sha256"],
        tokenizer=FileRecord(size=_count(tokenizer, "size"), sha256=tokenizer["sha256"]),
        tokenizer_fingerprint=tokenizer["fingerprint"],
        options=_object(fields, "options"),
        path=path.absolute(),
    )


def _object(fields: dict[str, Any], name: str) -> dict[str, Any]:
    base.require(isinstance(fields.get(name), dict), f"{name} is not an object")
    return fields[name]


def _count(fields: dict[str, Any], name: str) -> int:
    """Return an integer from 0 to the largest size of a file. JSON's ``true`` and ``1.0`` are not integers."""
    value = fields.get(name)
    if type(value) is not int or not 0 <= value <= base.MAX_SIZE:
        raise FaultError(f"{name} is {value!r}, expected a count")
    return value


def _require_hashes(values: list[Any]) -> None:
    """Raise `FaultError` unless all values are SHA-256 hashes in lower-case hexadecimal digits."""
    are_texts = all(isinstance(value, str) and len(value) == 64 for value in values)
    base.require(are_texts and not "".join(values).strip(HEX), "a hash is not a SHA-256")


def _shards(columns: dict[str, Any], dtype: np.dtype) -> dict[str, list[Any]]:
    """Check the columns of the table of shards and return them."""
    shards: dict[str, Any] = {name: columns.get(name) for name in SHARD_COLUMNS}
    if not all(isinstance(column, list) and len(column) == len(shards["tokens"]) for column in shards.values()):
        raise FaultError("the columns of its shards are not lists of one length")
    for name, column in shards.items():
        if name.endswith("sha256"):
            _require_hashes(column)
        elif not set(map(type, column)) <= {int} or min(column, default=0) < 0 or sum(column) > base.MAX_SIZE:
            raise FaultError(f"{name} of its shards are not counts")
    sizes = [dtype.itemsize * tokens for tokens in shards["tokens"]]
    base.require(shards["bin_size"] == sizes, "the sizes of its shards do not fit their tokens")
    sizes = [index_size(documents) for documents in shards["documents"]]
    base.require(shards["idx_size"] == sizes, "the sizes of its indices do not fit their documents")
    return shards


def _sources(fields: dict[str, Any]) -> list[dict[str, Any]]:
    sources = fields.get("sources")
    if not isinstance(sources, list) or not all(isinstance(source, dict) for source in sources):
        raise FaultError("sources is not a list of objects")
    return sources


def write_manifest(
    folder: Path,
    *,
    shards: Sequence[ShardRecord],
    tokenizer: Tokenizer,
    end_of_text: int | None,
    sources: list[dict[str, Any]],
    options: dict[str, Any],
) -> None:
    """Finish a store: write its `tokenizer.json`, and then its `store.json`.

    `shards` are the results of `ShardWriter.close`. `end_of_text` is the id that was appended to each document, if any.
    `sources` and `options` are JSON, and describe the texts and how the store was made.

    Raises:
        InputError: the folder holds another finished store, a shard is missing, or the system refuses to write.
    """
    text = tokenizer.to_json().encode()
    if end_of_text is not None:
        whole("end_of_text", end_of_text, 0, tokenizer.vocab_size - 1, remedy="pass an id of the vocabulary, or None")
    rows = [(s.tokens, s.documents, s.bin.size, s.bin.sha256, s.idx.size, s.idx.sha256) for s in shards]
    fields: dict[str, Any] = {
        "schema": "locant token store",
        "version": VERSION,
        "package": __version__,
        "dtype": base.token_dtype(tokenizer.vocab_size).name,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text if end_of_text is None else end_of_text,
        "end_of_text_appended": end_of_text is not None,
        "tokens": sum(shard.tokens for shard in shards),
        "documents": sum(shard.documents for shard in shards),
        "tokenizer": {"size": len(text), "sha256": base.sha256_of(text), "fingerprint": tokenizer.fingerprint},
        "options": options,
        "sources": sources,
        "shards": {name: [row[place] for row in rows] for place, name in enumerate(SHARD_COLUMNS)},
    }
    try:
        body = ("{\n" + ",\n".join(f" {json.dumps(name)}: {_json(value)}" for name, value in fields.items())).encode()
    except (TypeError, ValueError, RecursionError) as error:
        cause = f"got sources or options that are not JSON: {error}"
        raise InputError(cause, "use texts, numbers, lists and dicts") from None
    content = body + f',\n "sha256": "{base.sha256_of(body)}",\n "complete": true\n}}\n'.encode()
    path = folder / MANIFEST
    _require_readable(len(content), path)
    with _naming(path):  # a manifest that cannot be read is not written
        manifest = _manifest(strict_json(content, "it"), _require_intact(content), path)
    if path.exists():
        if path.read_bytes() == content:
            return
        raise InputError(f"got {folder}, which holds another finished store", "use another folder")
    require_files(folder, manifest, but=TOKENIZER)
    write_whole(folder / TOKENIZER, text)
    write_whole(path, content)


def _json(value: Any) -> str:
    """Return JSON in ASCII. Each part of a nested value is on its own line."""
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if not any(isinstance(part, (dict, list)) for part in parts):
        return json.dumps(value, allow_nan=False)
    names = [f"{json.dumps(name)}: " for name in value] if isinstance(value, dict) else [""] * len(parts)
    lines = [f"  {name}{json.dumps(part, allow_nan=False)}" for name, part in zip(names, parts, strict=True)]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return f"{begin}\n" + ",\n".join(lines) + f"\n {end}"


def require_files(folder: Path, manifest: Manifest, *, but: str = "") -> None:
    """Raise `InputError` unless every file exists and has its recorded size. This takes one system call per file."""
    sizes = {TOKENIZER: manifest.tokenizer.size}
    counts = zip(manifest.tokens.tolist(), manifest.documents.tolist(), strict=True)
    for number, (tokens, documents) in enumerate(counts):
        name = shard_name(number)
        sizes[f"{name}.bin"], sizes[f"{name}.idx"] = manifest.dtype.itemsize * tokens, index_size(documents)
    sizes.pop(but, None)
    try:
        for name, size in sizes.items():
            status = os.stat(f"{folder}/{name}")  # noqa: PTH116  # a `Path` for each of 20,000 files would take longer
            if status.st_size != size or not stat.S_ISREG(status.st_mode):
                raise InputError(f"{folder / name} has {status.st_size} bytes, expected {size}", REMEDY)
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}", REMEDY) from None


class LocantFormat(StoreFormat):
    """A folder with a manifest. When it is opened, the size of every file is compared with the manifest."""

    def __init__(self, path: Path, options: StoreOptions) -> None:
        if names := [name for name, value in vars(options).items() if value is not None]:
            raise InputError(
                f"got {names[0]} for a locant store, which records it",
                Remedy(f"pass {{}}, or no {names[0]}", format=...),
            )
        self._folder = path.absolute()  # a program may change its working folder meanwhile
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
        return base.sha256_of("\n".join([*parts, *self.manifest.bin_sha256, *self.manifest.idx_sha256]).encode())

    def offsets(self, shard: int) -> Int[np.ndarray, " offsets"]:
        path, documents = self._folder / f"{shard_name(shard)}.idx", int(self.manifest.documents[shard])
        index = read_index(path)
        offsets = index.offsets
        fits = len(index.sequences) == documents == len(index.documents) - 1 and index.dtype == self.dtype
        if not fits or int(offsets[-1]) != int(self.tokens[shard]) or (np.diff(index.documents) != 1).any():
            raise InputError(f"{path} is not the index of its shard", REMEDY)
        return offsets

    def load_tokenizer(self) -> Tokenizer:
        record, path = self.manifest.tokenizer, self._folder / TOKENIZER
        content = base.read_file(path, record.size, REMEDY)
        _require_hash(path, base.sha256_of(content), record.sha256)
        tokenizer = Tokenizer.from_json(content.decode(errors="replace"), str(path))
        facts = (tokenizer.fingerprint, tokenizer.vocab_size)
        if facts != (self.manifest.tokenizer_fingerprint, self.vocab_size):
            raise InputError(f"{path} is not the tokenizer that {MANIFEST} names", REMEDY)
        return tokenizer

    def verify(self) -> None:
        if read_manifest(self._folder).sha256 != self.identity:
            raise InputError(f"{self._folder} was rewritten after it was opened", "open it again")
        _ = self.manifest.sources  # the only part that was not read before
        self.load_tokenizer()
        for shard, path in enumerate(self.files):
            _require_hash(path, self.check(shard, REMEDY), self.manifest.bin_sha256[shard])
            index, size = f"{path.removesuffix('.bin')}.idx", index_size(int(self.manifest.documents[shard]))
            _require_hash(index, base.sha256_of(base.read_file(index, size, REMEDY)), self.manifest.idx_sha256[shard])
            self.offsets(shard)

    @classmethod
    def write(cls, source: ExportSource, folder: Path) -> np.dtype:
        if source.tokenizer is None:
            raise InputError("got a store without a tokenizer, which a locant store needs", Remedy(tokenizer=...))
        store, records, sources = source.store, list[ShardRecord](), list[dict[str, Any]]()
        for shard, path in enumerate(store.files):
            with ShardWriter(folder, shard, source.vocab_size) as writer:
                for ids, lengths, continues in source.documents(shard):
                    writer.append(ids, lengths, continues=continues)
                records.append(writer.close())
            size = store.header + int(store.tokens[shard]) * store.dtype.itemsize
            sources.append({"path": path, "size": size, "sha256": store.check(shard, base.damage_remedy(path))})
        write_manifest(
            folder,
            shards=records,
            tokenizer=source.tokenizer,
            end_of_text=store.end_of_text,
            sources=sources,
            options={"format": source.format},
        )
        return base.token_dtype(source.vocab_size)


def _require_hash(path: str | Path, actual: str, expected: str) -> None:
    if actual != expected:
        raise InputError(f"{path} was changed after it was written: its SHA-256 has changed", REMEDY)
