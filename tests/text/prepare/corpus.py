"""A small corpus, the options it is prepared with, and by hand what a store of it holds."""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from locant import InputError
from locant.text.prepare import byte_ranges, compression, json_lines, parquet_rows, readers, separators
from locant.text.prepare.byte_ranges import Tally, cut
from locant.text.prepare.plan import Plan, read_plan
from locant.text.prepare.readers import Batch, documents
from locant.text.prepare.sources import find_sources, read_stdin
from locant.text.store import TokenStore

SEPARATOR = "\n\n"
TEXTS = [[f"document {file}.{i} " * (1 + (file * i) % 5) for i in range(7)] for file in range(4)]
END = 256


def options(**others: Any) -> dict[str, Any]:
    return {"tokenizer": "bytes", "separator": SEPARATOR, "workers": 1, "shard_size": 20, **others}


def expected(files: list[list[str]], end: int | None = END) -> tuple[list[int], list[int]]:
    """Ids and lengths by hand: a byte tokenizer's ids are bytes, and documents without a byte are left out."""
    documents = [[*text.encode(), *([] if end is None else [end])] for texts in files for text in texts if text]
    return [number for one in documents for number in one], [len(one) for one in documents]


def require_ids(store: TokenStore, files: list[list[str]], end: int | None = END) -> None:
    ids, lengths = expected(files, end)
    assert store[:].tolist() == ids
    assert np.diff(store.documents).tolist() == lengths
    store.verify()


def together(batches: Iterable[Batch]) -> list[bytes]:
    """Documents whose parts are joined, by the rule that the docstring of `readers.documents` states."""
    found: list[bytes] = []
    goes_on = False
    for texts, unfinished in batches:
        assert texts, "an empty batch"
        if goes_on:
            found[-1] += texts[0]
        found += texts[goes_on:]
        goes_on = unfinished
    assert not goes_on, "the last document has no end"
    return found


def planned(store: Path) -> Plan:
    """The plan of unfinished work."""
    plan = read_plan(store)
    assert plan is not None
    return plan


def small_blocks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Read so many bytes at a time."""
    for module in (byte_ranges, compression, json_lines, parquet_rows, readers, separators):
        monkeypatch.setattr(module, "BLOCK", size)


def edited(path: Path) -> None:
    path.write_text(path.read_text() + "more")


def contents(folder: Path) -> dict[str, str]:
    """Every file under a folder, hidden ones too, and its hash."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def is_valid(folder: Path) -> bool:
    """Whether a store opens; one that opens has to be right to the last byte."""
    try:
        store = TokenStore(folder)
    except InputError:
        return False
    store.verify()
    return True


def write(folder: Path, **files: bytes) -> None:
    for name, data in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def texts(*paths: str | Path, separator: str | None = None, field: str | None = None) -> list[bytes]:
    """All documents, joined where they come in parts."""
    sources = find_sources(paths, separator=separator, field=field)
    ranges = [byte_range for source in sources for byte_range in cut(source, 2**30)]
    return [text for byte_range in ranges for text in together(documents(byte_range, Tally()))]


def from_stdin(data: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: str) -> tuple[list[bytes], str]:
    """The documents of standard input, and its hash."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    source, sha256 = read_stdin(find_sources("-", **options)[0], folder / "stdin")
    (byte_range,) = cut(source, 2**30)
    return together(documents(byte_range, Tally())), sha256
