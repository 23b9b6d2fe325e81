"""What cannot be read is named and skipped if asked; nothing is left out in silence."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from locant import InputError
from locant.text.prepare import Problems, estimate, finalize, prepare, problems
from locant.text.prepare.sources import find_sources
from locant.text.store import TokenStore
from locant.text.tokenizer import Tokenizer, engine
from tests.refusal import refuses
from tests.text.prepare.corpus import contents, small_blocks

END = 256

GOOD = [json.dumps({"text": f"document {number}"}).encode() for number in range(40)]


def documents(store: TokenStore) -> list[str]:
    return [
        bytes(store[a : b - 1].tolist()).decode() for a, b in zip(store.documents, store.documents[1:], strict=False)
    ]


def called(paths: Any, out: Path, **options: Any) -> TokenStore:
    """Without what is warned of."""
    with warnings.catch_warnings(action="ignore"):
        return prepare(paths, out, **{"tokenizer": "bytes", "workers": 1, "shard_size": 20, **options})


BAD_LINES = [b"{", b'["text"]', b'{"title": "x"}', b'{"text": 3}', b'{"text": "' + b"x" * 3000 + b'"}']


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three good files, and between them one with a bad line of each kind, and broken ones of each kind."""
    monkeypatch.setattr("locant.text.prepare.json_lines.LONGEST_LINE", 2000)
    small_blocks(monkeypatch, 500)
    place = tmp_path / "corpus"
    place.mkdir()
    for name in "acz":
        (place / f"{name}.jsonl").write_bytes(b"\n".join(GOOD))
    lines = [line for i, good in enumerate(GOOD) for line in (good, *BAD_LINES[i : i + 1])]
    (place / "b.jsonl").write_bytes(b"\n".join(lines))
    return place


def broken(folder: Path) -> dict[str, int]:
    """Files that break off, are of another kind, or are damaged in the middle."""
    text = "".join(f"{pow(3, i, 2**61 - 1):x}\n" for i in range(2000)).encode()
    whole = {"gz": gzip.compress(text, mtime=0), "bz2": bz2.compress(text), "xz": lzma.compress(text)}
    files = {f"d.txt.{kind}": data[: len(data) // 2] for kind, data in whole.items()}
    files |= {
        "e.txt.bz2": whole["bz2"] + b"something else",
        "f.txt.gz": b"none",
        "g.txt": b"PNG\0",
        "h.parquet": b"PAR1",
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return dict.fromkeys((str(folder / name) for name in files), 1)


def test_what_is_bad_is_skipped_and_counted(folder: Path, tmp_path: Path) -> None:
    expected = broken(folder) | {str(folder / "b.jsonl"): len(BAD_LINES)}
    with pytest.warns(UserWarning, match=f"{sum(expected.values())} bad records were skipped: .*b.jsonl"):
        store = prepare(folder, tmp_path / "store", tokenizer="bytes", workers=1, shard_size=20, skip_bad=True)
    store.verify()
    assert problems(store) == Problems(skipped=expected, not_utf8={})
    assert documents(store) == [f"document {number}" for _ in "abcz" for number in range(40)]


@pytest.mark.parametrize("tokenizer", ["bytes", None])
def test_if_nothing_is_left_the_error_names_what_was_skipped(folder: Path, tmp_path: Path, tokenizer: Any) -> None:
    paths = [*broken(folder)]
    why = "{} skipped as broken: " + f"{paths[0]} is not a complete gzip file"
    for files, said in ((paths[:1], "1 file was"), (paths, f"{len(paths)} files were")):
        with refuses(InputError, why.format(said), "try: test it with gzip -t"):
            called(files, tmp_path / f"store-{len(files)}", tokenizer=tokenizer, skip_bad=True)
    (folder / "i.jsonl").write_bytes(BAD_LINES[1])
    with refuses(InputError, "1 file was skipped as broken", "i.jsonl, line 1", "try: repair it and run again"):
        called(folder / "i.jsonl", tmp_path / "lines", tokenizer=tokenizer, skip_bad=True)


def test_a_damaged_file_that_seems_to_be_binary_is_damaged(tmp_path: Path) -> None:
    data = bytearray(bz2.compress("".join(f"{pow(3, i, 2**61 - 1):x}\n" for i in range(2000)).encode()))
    data[290] ^= 0xFF
    assert b"\0" in bz2.BZ2Decompressor().decompress(data, 8192)
    (tmp_path / "a.txt.bz2").write_bytes(data)
    with refuses(InputError, "is not a complete bzip2 file", "bzip2 -t"):
        find_sources(tmp_path)


@pytest.mark.parametrize("layout", [{}, {"indent": 2}])
@pytest.mark.parametrize(
    ("name", "remedy"),
    [("a b.json", "jq -c '.[]' '{}' > '{}.jsonl'"), ("a.json.gz", "gzip -dc {} | jq -c '.[]' > {}.jsonl")],
)
def test_an_array_is_not_json_lines(tmp_path: Path, name: str, remedy: str, layout: dict[str, Any]) -> None:
    path = tmp_path / name
    data = json.dumps([{"text": "one"}, {"text": "two"}], **layout).encode()
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    with refuses(InputError, f"{path} is a JSON array", remedy.format(path, str(path).removesuffix(".gz"))):
        called(path, tmp_path / "store")


def test_work_that_a_bad_record_has_stopped_goes_on_in_either_way(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By mending it, or by skipping it; what was made is neither lost nor made again."""
    monkeypatch.setattr(sys.modules[prepare.__module__], "CHECKED_BYTES", 1)  # else it is seen before anything is made
    for name in ("mended", "skipped"):
        with refuses(InputError, "b.jsonl, line 2", "correct or remove that line", "skip_bad=True"):
            called(folder, tmp_path / name)
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "skipped").glob(".prepare/part-*")}
    assert done
    with refuses(InputError, "line 2"):  # the other shares are done
        called(folder, tmp_path / "skipped", task=0, num_tasks=1)
    called(folder, tmp_path / "skipped", task=0, num_tasks=1, skip_bad=True)
    assert {path: path.stat().st_mtime_ns for path in done} == done
    with refuses(InputError, "line 2"):  # a part with skipped lines is not done for a call that skips none
        called(folder, tmp_path / "skipped")
    store = called(folder, tmp_path / "skipped", skip_bad=True)
    with refuses(InputError, "5 bad records were skipped, which would now end the run"):
        called(folder, tmp_path / "skipped")
    assert problems(store).skipped == {str(folder / "b.jsonl"): len(BAD_LINES)}
    (folder / "b.jsonl").write_bytes(b"\n".join(GOOD))
    assert documents(called(folder, tmp_path / "mended")) == documents(store)
    assert contents(tmp_path / "mended") == contents(called(folder, tmp_path / "fresh").path)
    assert not [*tmp_path.glob("*/.prepare*")]


def test_tasks_go_on_with_a_mended_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[prepare.__module__], "CHECKED_BYTES", 1)
    out, (bad, whole) = tmp_path / "store", (folder / "b.jsonl", b"\n".join(GOOD))
    failed = []
    for task in range(3):
        try:
            called(folder, out, task=task, num_tasks=3)
        except InputError:
            failed.append(task)
    assert failed
    bad.write_bytes(whole)
    for task in range(3):
        called(folder, out, task=task, num_tasks=3)
    finalize(out)
    assert contents(out) == contents(called(folder, tmp_path / "fresh").path)


def test_a_document_that_is_too_long_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_UNCUT_BYTES", 5000)
    monkeypatch.setattr(engine, "PART_BYTES", 1000)
    small_blocks(monkeypatch, 1000)
    long = ["one two " * 900, "1" * 9000, "three " * 700 + "0" * 9000, "four"]
    (tmp_path / "a.txt").write_text("|".join(long))
    tokenizer = Tokenizer.train("one two three four " * 20, 300)
    options: dict[str, Any] = {"tokenizer": tokenizer, "separator": "|", "engine": "tokenizers"}
    with refuses(InputError, "can only be encoded as a whole", "skip_bad=True"):
        called(tmp_path / "a.txt", tmp_path / "store", **options)
    store = called(tmp_path / "a.txt", tmp_path / "store", **options, skip_bad=True)
    assert [*problems(store).skipped.values()] == [2]
    expected = [number for text in (long[0], long[3]) for number in (*tokenizer.encode(text), tokenizer.end_of_text)]
    assert store[:].tolist() == expected


class TestLeftOut:
    def test_is_counted_by_the_ends_of_names(self, tmp_path: Path) -> None:
        corpus = tmp_path / "corpus"
        corpus.mkdir()
        for name in ("a.csv", "b.CSV", "c.html", "d.csv.gz", "LICENSE", "package.json"):
            (corpus / name).write_text("x")
        with refuses(InputError, "no file to read", "only 2 .csv", "1 without an ending"):
            find_sources(corpus)
        with refuses(InputError, "no file to read", "only 2 .csv"):
            find_sources(f"{corpus}/**")
        (corpus / "a.txt").write_text("text")
        left_out = {".csv": 2, ".html": 1, ".csv.gz": 1, "": 1, ".json": 1}
        with pytest.warns(UserWarning, match=r"6 files left out: 2 \.csv"):
            prepare(corpus, tmp_path / "store", tokenizer="bytes")
        with pytest.warns(UserWarning, match="6 files left out"):
            assert estimate(corpus, tokenizer="bytes").left_out == left_out

    @pytest.mark.parametrize(("name", "command"), [("a.zip", "unzip"), ("b.tar.gz", "tar -xf"), ("c.TGZ", "tar -xf")])
    def test_is_an_archive_which_is_to_be_unpacked(self, tmp_path: Path, name: str, command: str) -> None:
        archive = tmp_path / "corpus" / name
        archive.parent.mkdir()
        archive.write_bytes(b"x")
        for path in (archive, archive.parent, f"{archive.parent}/*"):
            with refuses(InputError, f"unpack it first ({command} {archive})"):
                find_sources(path)
        (archive.parent / "a.txt").write_text("text")
        with pytest.warns(UserWarning, match="1 file left out: .*Unpack archives first"):
            prepare(archive.parent, tmp_path / "store", tokenizer="bytes")

    @pytest.mark.parametrize(
        "name", ["a.json.gz", "a.ndjson", "a.jsonlines", "a.jsonl.bz2", "a.ndjson.xz", "a.json.zst"]
    )
    def test_is_no_file_of_json_lines(self, tmp_path: Path, name: str) -> None:
        pa = pytest.importorskip("pyarrow")
        data = b"\n".join(GOOD)
        packed = {
            ".gz": gzip.compress, ".bz2": lambda data: bz2.compress(data[:99]) + bz2.compress(data[99:]),
            ".xz": lambda data: lzma.compress(data[:99]) + b"\0" * 4 + lzma.compress(data[99:]),
            ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True), ".ndjson": bytes, ".jsonlines": bytes,
        }  # fmt: skip
        (tmp_path / name).write_bytes(packed[os.path.splitext(name)[1]](data))  # noqa: PTH122
        expected = [f"document {number}" for number in range(40)]
        assert documents(prepare(tmp_path, tmp_path / "store", tokenizer="bytes")) == expected
