"""Finishing a store: its tokenizer, and then, last, its manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from locant._version import __version__
from locant.errors import InputError, RangeError
from locant.files import write_whole
from locant.text.store.layout import MANIFEST, TOKENIZER, require_file, shard_name, token_dtype
from locant.text.store.manifest import SCHEMA, VERSION, parse_manifest, parse_sources
from locant.text.store.records import FileRecord, ShardRecord
from locant.text.tokenizer import Tokenizer

__all__ = ["write_manifest"]


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
        shards: what `ShardWriter.close` said of each.
        tokenizer: the one that made the ids.
        end_of_text: the id that was appended to each document, if one was.
        sources: what the texts came from, as JSON.
        options: how the store was made, as JSON.

    Raises:
        InputError: a finished store is there that is another one, a shard is missing, or the system refuses to write.
    """
    text = tokenizer.to_json().encode()
    content = _render(
        shards, tokenizer, FileRecord(size=len(text), sha256=_sha256(text)), end_of_text, sources, options
    )
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


def _render(
    shards: Sequence[ShardRecord],
    tokenizer: Tokenizer,
    tokenizer_file: FileRecord,
    end_of_text: int | None,
    sources: list[dict[str, Any]],
    options: dict[str, Any],
) -> bytes:
    if end_of_text is not None and not 0 <= end_of_text < tokenizer.vocab_size:
        raise RangeError(
            f"got {end_of_text} as the end of a text, which is not in the vocabulary",
            f"an id within 0..{tokenizer.vocab_size - 1}, or None",
        )
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        "version": VERSION,
        "package": __version__,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text if end_of_text is None else end_of_text,
        "end_of_text_appended": end_of_text is not None,
        "tokens": sum(shard.tokens for shard in shards),
        "documents": sum(shard.documents for shard in shards),
        "tokenizer": {**tokenizer_file.to_json(), "fingerprint": tokenizer.fingerprint},
        "options": options,
        "sources": sources,
        "shards": _columns(shards),
    }
    try:
        body = ("{\n" + ",\n".join(f" {json.dumps(name)}: {_json(value)}" for name, value in fields.items())).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"got sources or options that are no JSON: {error}", "texts, numbers, lists and dicts"
        ) from None
    return body + f',\n "sha256": "{_sha256(body)}",\n "complete": true\n}}\n'.encode()


def _columns(shards: Sequence[ShardRecord]) -> dict[str, list[Any]]:
    return {
        "tokens": [shard.tokens for shard in shards],
        "documents": [shard.documents for shard in shards],
        "bin_size": [shard.bin.size for shard in shards],
        "bin_sha256": [shard.bin.sha256 for shard in shards],
        "idx_size": [shard.idx.size for shard in shards],
        "idx_sha256": [shard.idx.sha256 for shard in shards],
    }


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


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
