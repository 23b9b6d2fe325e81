"""A small corpus, the options it is prepared with, and by hand what a store of it holds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from locant import InputError
from locant.text.prepare import byte_ranges, compression, json_lines, parquet_rows, readers, separators
from locant.text.prepare.plan import Plan, read_plan
from locant.text.prepare.readers import Batch
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
