"""A store that is larger than 32 bits can count: sparse files, which take no room."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from locant.files import NewFile
from locant.text.store import FileRecord, ShardRecord, write_manifest
from locant.text.store.formats.shards import IndexWriter, index_size
from tests.text.store.made import BYTES

__all__ = ["LENGTHS", "MADE_UP", "MARKS", "TOTAL", "make_large"]

LENGTHS = [2**31 - 1, 2**31 - 1, 5, 0, 2**31 - 1, 9]
TOTAL = sum(LENGTHS)
MARKS = {
    place: 1 + number for number, place in enumerate([0, 2**31 - 2, 2**31, 2**32 - 1, 2**32, 2**32 + 2, TOTAL - 1])
}
MADE_UP = "0" * 64  # hashes, which opening does not compare


def make_large(folder: Path) -> Path:
    """Two shards of 6 442 450 955 tokens each."""
    with (folder / "shard-00000.bin").open("wb") as file:
        file.truncate(2 * TOTAL)
        for place, mark in MARKS.items():
            file.seek(2 * place)
            file.write(bytes([mark, 0]))
    with NewFile(folder / "shard-00000.idx") as file:
        writer = IndexWriter(file, np.dtype("<u2"))
        writer.append(np.array(LENGTHS), continues=False)
        writer.finish()
        file.settle()
        file.publish()
    for suffix in ("bin", "idx"):
        (folder / f"shard-00001.{suffix}").hardlink_to(folder / f"shard-00000.{suffix}")
    record = ShardRecord(
        tokens=TOTAL,
        documents=len(LENGTHS),
        bin=FileRecord(size=2 * TOTAL, sha256=MADE_UP),
        idx=FileRecord(size=index_size(len(LENGTHS)), sha256=MADE_UP),
    )
    write_manifest(folder, shards=[record, record], tokenizer=BYTES, end_of_text=None, sources=[], options={})
    return folder
