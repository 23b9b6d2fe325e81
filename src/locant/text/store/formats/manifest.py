"""`store.json`, the manifest of a locant store: what the store is made of.

It is written last, so a folder that has one is a complete store.

The text is JSON, one line per field. Its last two fields are the SHA-256 of every byte before them, and
``"complete": true``, in one spelling that is checked before anything is parsed: a changed or missing byte is always
found. The shards are a table of columns, because a table of rows takes several times as long to read. No file is
named: names are made from numbers, so no manifest can point outside its folder.

Opening a store needs everything but the sources, which are most of the text where a store was made from very many
files: they are hashed with the rest, and parsed when they are first asked for.
"""

from __future__ import annotations

import json
import re
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
from locant.errors import InputError, RangeError
from locant.files import write_whole
from locant.text.store.formats.megatron_index import index_size
from locant.text.store.formats.records import (
    FaultError,
    FileRecord,
    ShardRecord,
    count_of,
    fields_of,
    file_of,
    hash_of,
    is_hex,
)
from locant.text.store.token_files import MAX_SIZE, read_file, require_file, sha256_of, token_dtype
from locant.text.tokenizer import Tokenizer

__all__ = ["AGAIN", "MANIFEST", "TOKENIZER", "Manifest", "read_manifest", "shard_name", "write_manifest"]

MANIFEST = "store.json"
TOKENIZER = "tokenizer.json"
VERSION = 1
LARGEST = 1 << 30
"""Bytes of a manifest: ten million files of input need more."""

HEAD = re.compile(rb'\{\n "schema": "locant token store",\n "version": (\d{1,9}),\n')
TAIL = re.compile(rb',\n "sha256": "([0-9a-f]{64})",\n "complete": true\n\}\n')
TAIL_SIZE = len(',\n "sha256": "",\n "complete": true\n}\n') + 64
SOURCES, BEHIND_SOURCES = b'\n "sources": ', b',\n "shards": '
"""The sources stand between these: a text in JSON holds no line feed, and only fields of the manifest begin so."""
AGAIN = "preparing the store again, or a fresh copy of it"

SHARD_COLUMNS = ("tokens", "documents", "bin_size", "bin_sha256", "idx_size", "idx_sha256")


def shard_name(number: int) -> str:
    """The name of a shard, without its suffix.

    >>> shard_name(7)
    'shard-00007'
    """
    return f"shard-{number:05d}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """What `store.json` holds, checked."""

    sha256: str
    """Of the manifest itself, so two stores with the same are the same."""
    dtype: np.dtype
    vocab_size: int
    end_of_text: int | None
    """The id that stands after each document, if one was appended."""
    tokens: Int[np.ndarray, " shards"]
    documents: Int[np.ndarray, " shards"]
    bin_sha256: Sequence[str]
    idx_sha256: Sequence[str]
    tokenizer: FileRecord
    tokenizer_fingerprint: str
    options: dict[str, Any]
    path: Path
    """The file, from which the sources are read."""

    @cached_property
    def sources(self) -> list[dict[str, Any]]:
        """What the texts came from; read when first asked for.

        Raises:
            InputError: the manifest is gone, is another one by now, or its sources are not as they were written.
        """
        content = _content(self.path.parent)
        if parse_manifest(content, self.path).sha256 != self.sha256:
            raise InputError(f"{self.path} was written anew since it was opened", "opening it again")
        return parse_sources(content, self.path)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a store.

    Raises:
        InputError: there is none, it is of a later version, or it is not as it was written.
    """
    return parse_manifest(_content(folder), folder / MANIFEST)


def parse_manifest(content: bytes, path: Path) -> Manifest:
    """Check the content of a manifest; `path` is its name in errors."""
    _require_readable(len(content), path)
    with _naming(path):
        digest = _require_intact(content)
        return _manifest(_parse(_without_sources(content)), digest, path)


def parse_sources(content: bytes, path: Path) -> list[dict[str, Any]]:
    """The sources in the content of a manifest that `parse_manifest` has checked."""
    with _naming(path):
        return _sources(_parse(content).get("sources"))


@contextmanager
def _naming(path: Path) -> Generator[None]:
    try:
        yield
    except FaultError as fault:
        raise InputError(f"{path} is no intact manifest of a store: {fault}", AGAIN) from None


def _without_sources(content: bytes) -> bytes:
    """The same with no sources in it; all of it, if it is not spelled as we write it."""
    begin, end = content.find(SOURCES), content.rfind(BEHIND_SOURCES)
    if not 0 <= begin < end:
        return content
    return content[: begin + len(SOURCES)] + b"[]" + content[end:]


def _content(folder: Path) -> bytes:
    path = folder / MANIFEST
    if not folder.is_dir():
        raise InputError(f"got {folder}, which is not a folder", "a folder that locant prepare made, or a format=")
    if not path.exists():
        raise InputError(
            f"{folder} holds no finished store: it has no {MANIFEST}",
            "locant prepare, the same command again if it was interrupted; or format= for stores of other programs",
        )
    size = require_file(path, AGAIN)
    _require_readable(size, path)
    return read_file(path, size, AGAIN)


def _require_readable(size: int, path: Path) -> None:
    """Before it is read, and before one is written that could not be read."""
    if size > LARGEST:
        raise InputError(f"{path} has {size} bytes, more than {LARGEST}", "a store of fewer and larger files")


def _require_intact(content: bytes) -> str:
    head = HEAD.match(content)
    if not head:
        raise FaultError("it does not begin like one")
    if int(head[1]) != VERSION:
        cause = f"got a store of version {int(head[1])}, and this package reads version {VERSION}"
        raise InputError(cause, "pip install --upgrade locant")
    tail = TAIL.fullmatch(content, max(0, len(content) - TAIL_SIZE))
    if not tail:
        raise FaultError("its end is missing")
    digest = tail[1].decode()
    if sha256_of(memoryview(content)[:-TAIL_SIZE]) != digest:
        raise FaultError("it was changed after it was written")
    return digest


def _parse(content: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(content, object_pairs_hook=_without_duplicates, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise FaultError("it is not JSON") from None
    if not isinstance(fields, dict):
        raise FaultError("it is not a JSON object")
    return fields


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise FaultError("a name occurs twice in it")
    return fields


def _refuse(constant: str) -> None:
    raise FaultError(f"it holds {constant}, which is not JSON")


def _manifest(fields: dict[str, Any], digest: str, path: Path) -> Manifest:
    vocab_size = count_of(fields.get("vocab_size"), "vocab_size")
    try:
        dtype = token_dtype(vocab_size)
    except RangeError as error:
        raise FaultError(error.cause) from None
    if fields.get("dtype") != dtype.name:
        raise FaultError(f"dtype is {fields.get('dtype')!r}, and {vocab_size} entries take {dtype.name}")
    shards = _shards(fields.get("shards"), dtype)
    for name in ("tokens", "documents"):
        if count_of(fields.get(name), name) != sum(shards[name]):
            raise FaultError(f"{name} is {fields[name]}, and its shards have {sum(shards[name])}")
    tokenizer = fields_of(fields.get("tokenizer"), "tokenizer", ("size", "sha256", "fingerprint"))
    _sources(fields.get("sources"))
    return Manifest(
        sha256=digest,
        dtype=dtype,
        vocab_size=vocab_size,
        end_of_text=_end_of_text(fields, vocab_size),
        tokens=np.array(shards["tokens"], dtype=np.int64),
        documents=np.array(shards["documents"], dtype=np.int64),
        bin_sha256=shards["bin_sha256"],
        idx_sha256=shards["idx_sha256"],
        tokenizer=file_of(tokenizer, "tokenizer"),
        tokenizer_fingerprint=hash_of(tokenizer["fingerprint"]),
        options=fields_of(fields.get("options"), "options", ()),
        path=path.absolute(),
    )


def _shards(value: Any, dtype: np.dtype) -> dict[str, list[Any]]:
    shards = fields_of(value, "shards", SHARD_COLUMNS)
    if not all(isinstance(shards[name], list) for name in SHARD_COLUMNS):
        raise FaultError("a column of its shards is no list")
    if len({len(shards[name]) for name in SHARD_COLUMNS}) > 1:
        raise FaultError("the columns of its shards differ in length")
    for name in ("tokens", "documents", "bin_size", "idx_size"):
        _require_counts(shards[name], name)
    _require_hashes(shards["bin_sha256"])
    _require_hashes(shards["idx_sha256"])
    if shards["bin_size"] != [dtype.itemsize * tokens for tokens in shards["tokens"]]:
        raise FaultError("the sizes of its shards do not fit their tokens")
    if shards["idx_size"] != [index_size(documents) for documents in shards["documents"]]:
        raise FaultError("the sizes of its indices do not fit their documents")
    return shards


def _require_counts(column: list[Any], name: str) -> None:
    if not set(map(type, column)) <= {int} or (column and min(column) < 0) or sum(column) > MAX_SIZE:
        raise FaultError(f"{name} of its shards are no counts")


def _require_hashes(column: list[Any]) -> None:
    if not set(map(type, column)) <= {str} or not set(map(len, column)) <= {64} or not is_hex("".join(column)):
        raise FaultError("a hash of its shards is none")


def _end_of_text(fields: dict[str, Any], vocab_size: int) -> int | None:
    number, appended = fields.get("end_of_text"), fields.get("end_of_text_appended")
    if type(appended) is not bool:
        raise FaultError(f"end_of_text_appended is {appended!r}, expected true or false")
    if number is None and not appended:
        return None
    if count_of(number, "end_of_text") >= vocab_size:
        raise FaultError(f"end_of_text is {number}, and the vocabulary has {vocab_size} entries")
    return number if appended else None


def _sources(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(source, dict) for source in value):
        raise FaultError("sources is not a list of objects")
    return value


def write_manifest(
    folder: Path,
    *,
    shards: Sequence[ShardRecord],
    tokenizer: Tokenizer,
    end_of_text: int | None,
    sources: list[dict[str, Any]],
    options: dict[str, Any],
) -> None:
    """Finish a store: write its `tokenizer.json`, and then, last, its `store.json`.

    Args:
        folder: holds the files of shards 0, 1, ..., as `ShardWriter` made them.
        shards: what `ShardWriter.close` returned for each.
        tokenizer: the one that made the ids.
        end_of_text: the id that was appended to each document, if one was.
        sources: what the texts came from, as JSON.
        options: how the store was made, as JSON.

    Raises:
        InputError: a finished store is there that is another one, a shard is missing, or the system refuses to write.
    """
    text = tokenizer.to_json().encode()
    if end_of_text is not None:
        whole("end_of_text", end_of_text, 0, tokenizer.vocab_size - 1, remedy="an id of the vocabulary, or None")
    fields: dict[str, Any] = {
        "schema": "locant token store",
        "version": VERSION,
        "package": __version__,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text if end_of_text is None else end_of_text,
        "end_of_text_appended": end_of_text is not None,
        "tokens": sum(shard.tokens for shard in shards),
        "documents": sum(shard.documents for shard in shards),
        "tokenizer": {"size": len(text), "sha256": sha256_of(text), "fingerprint": tokenizer.fingerprint},
        "options": options,
        "sources": sources,
        "shards": _columns(shards),
    }
    content = _spelled(fields)
    path = folder / MANIFEST
    parse_manifest(content, path)  # what could not be read again is not written
    parse_sources(content, path)
    if path.exists():
        if path.read_bytes() == content:
            return
        raise InputError(f"got {folder}, which holds another finished store", "another folder")
    _require_shards(folder, shards)
    write_whole(folder / TOKENIZER, text)
    write_whole(path, content)


def _spelled(fields: dict[str, Any]) -> bytes:
    try:
        body = ("{\n" + ",\n".join(f" {json.dumps(name)}: {_json(value)}" for name, value in fields.items())).encode()
    except (TypeError, ValueError, RecursionError) as error:
        cause = f"got sources or options that are no JSON: {error}"
        raise InputError(cause, "texts, numbers, lists and dicts") from None
    return body + f',\n "sha256": "{sha256_of(body)}",\n "complete": true\n}}\n'.encode()


def _columns(shards: Sequence[ShardRecord]) -> dict[str, list[Any]]:
    rows = [(s.tokens, s.documents, s.bin.size, s.bin.sha256, s.idx.size, s.idx.sha256) for s in shards]
    return {name: [row[place] for row in rows] for place, name in enumerate(SHARD_COLUMNS)}


def _json(value: Any) -> str:
    """Plain ASCII; a line for each part of what has parts that have parts."""
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if not any(isinstance(part, (dict, list)) for part in parts):
        return json.dumps(value, allow_nan=False)
    if isinstance(value, dict):
        lines = [f"  {json.dumps(name)}: {json.dumps(part, allow_nan=False)}" for name, part in value.items()]
        return "{\n" + ",\n".join(lines) + "\n }"
    return "[\n" + ",\n".join(f"  {json.dumps(part, allow_nan=False)}" for part in parts) + "\n ]"


def _require_shards(folder: Path, shards: Sequence[ShardRecord]) -> None:
    for number, shard in enumerate(shards):
        for suffix, record in (("bin", shard.bin), ("idx", shard.idx)):
            path = folder / f"{shard_name(number)}.{suffix}"
            size = require_file(path, "writing the shard again")
            if size != record.size:
                raise InputError(f"{path} has {size} bytes, expected {record.size}", "writing the shard again")
