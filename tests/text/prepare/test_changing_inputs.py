"""An input that changes after the work was planned: before it is read, and in the middle of being read.

Nothing here waits or races. What was planned is made in steps, and a file is changed between two of them: when the work
has been planned and nothing read, or when the first documents of the file have been handed on and the rest is still to
be read. Blocks are small here, so that there is a rest.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from locant import InputError
from locant.text.prepare import finalize, parts, prepare
from locant.text.prepare.parts import finished_part
from locant.text.prepare.readers import documents
from locant.text.prepare.workers import Workers
from locant.text.store import TokenStore
from tests.refusal import refuses
from tests.text.prepare.corpus import SEPARATOR, contents, options, planned, small_blocks

SHARD_SIZE = 4_000
"""Tokens, which makes parts of 16 000 bytes."""


@cache
def texts(word: str) -> list[str]:
    """Some 27 000 bytes that no compression makes small: more than what is sniffed, and two parts."""
    return [f"{word} {number} {hash_of(word, number)}" for number in range(250)]


def hash_of(word: str, number: int) -> str:
    return "".join(f"{pow(3, 1000 * number + ord(word[0]) + i, 2**61 - 1):x}" for i in range(6))


def as_text(words: list[str]) -> bytes:
    return SEPARATOR.join(words).encode()


def as_json(words: list[str]) -> bytes:
    return "".join(json.dumps({"n": 1, "body": word}) + "\n" for word in words).encode()


def as_parquet(words: list[str]) -> bytes:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'locant[data]'")
    from pyarrow import parquet

    sink = arrow.BufferOutputStream()
    parquet.write_table(arrow.table({"text": words}), sink, row_group_size=25, compression="none")
    return sink.getvalue().to_pybytes()


def zstandard(data: bytes) -> bytes:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'locant[data]'")
    return arrow.compress(data, codec="zstd", asbytes=True)


KINDS: dict[str, tuple[Callable[[list[str]], bytes], dict[str, Any]]] = {
    "b.txt": (as_text, {}),
    "whole.txt": (as_text, {"separator": None}),
    "b.jsonl": (as_json, {"field": "body"}),
    "b.parquet": (as_parquet, {}),
    "b.txt.gz": (lambda words: gzip.compress(as_text(words), mtime=0), {}),
    "b.txt.zst": (lambda words: zstandard(as_text(words)), {}),
    "b.jsonl.gz": (lambda words: gzip.compress(as_json(words), mtime=0), {"field": "body"}),
    "b.parquet.zst": (lambda words: zstandard(as_parquet(words)), {}),
}


def later(path: Path) -> None:
    """As if it had been written a second later; the clock of a file system may tick only a few times in one."""
    times = path.stat()
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))


def grown(path: Path) -> None:
    with path.open("ab") as file:
        file.write(path.read_bytes()[:5_000])
    later(path)


def shrunk(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)
    later(path)


def emptied(path: Path) -> None:
    os.truncate(path, 0)
    later(path)


def rewritten(path: Path) -> None:
    """In place, in its old size."""
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.write(data[::-1])
    later(path)


def replaced(path: Path) -> None:
    """By another whole file of its kind and name, with the time of the old one."""
    make, _ = KINDS.get(path.name, KINDS["b.txt"])
    times, new = path.stat(), path.with_name("new")
    new.write_bytes(make(texts("other")[:-30]))
    os.utime(new, ns=(times.st_atime_ns, times.st_mtime_ns))
    new.replace(path)


SAID = {**dict.fromkeys([grown, shrunk, emptied, rewritten, replaced], "changed"), Path.unlink: "vanished"}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 1_000)


class Change:
    """Changes a file, once, at a moment."""

    def __init__(self, path: Path, change: Callable[[Path], object]) -> None:
        self.path, self.change, self.is_done = path, change, False

    def __call__(self) -> None:
        if not self.is_done:
            self.is_done = True
            self.change(self.path)

    def when_planned(self, _: pytest.MonkeyPatch) -> dict[str, Any]:
        """The first report of progress comes before anything is made."""
        return {"progress": lambda _, __: self()}

    def when_read(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """When the first documents of the file have been handed on."""

        def hooked(byte_range: Any, tally: Any) -> Iterator[Any]:
            for batch in documents(byte_range, tally):
                yield batch
                if byte_range.source.path == str(self.path):
                    self()

        monkeypatch.setattr(parts, "documents", hooked)
        return {}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_bytes(as_text(texts("first")))
    return folder


def called(corpus: Path, out: Path, name: str, **others: Any) -> TokenStore:
    return prepare(corpus, out, **options(shard_size=SHARD_SIZE, **{**KINDS[name][1], **others}))


def require_no_store(out: Path) -> None:
    with refuses(InputError, "holds no finished store"):
        TokenStore(out)
    assert not [*out.glob("shard-*")]


CASES = [
    ("b.txt", grown, Change.when_read), ("b.txt", rewritten, Change.when_planned),
    ("whole.txt", shrunk, Change.when_read), ("b.jsonl", rewritten, Change.when_read),
    ("b.parquet", replaced, Change.when_planned), ("b.txt.gz", emptied, Change.when_read),
    ("b.txt.zst", Path.unlink, Change.when_read), ("b.jsonl.gz", shrunk, Change.when_read),
    ("b.parquet.zst", Path.unlink, Change.when_planned),
]  # fmt: skip
"""Each kind, each change and both moments, most of which readers would take for damage."""


@pytest.mark.parametrize(("name", "change", "moment"), CASES)
def test_a_change_ends_the_work_and_nothing_of_it_is_mixed(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: Any, moment: Any
) -> None:
    said = SAID[change]
    path, out = corpus / name, tmp_path / "store"
    path.write_bytes(KINDS[name][0](texts("second")))
    before, times = path.read_bytes(), path.stat()
    whole = contents(called(corpus, tmp_path / "undisturbed", name).path)
    changing = Change(path, change)
    with monkeypatch.context() as patch, refuses(InputError, f"{name} has {said} since", "run again"):
        called(corpus, out, name, **moment(changing, patch))
    assert changing.is_done
    require_no_store(out)

    # Nothing is joined until the file was read again.
    with refuses(InputError, "is not finished"):
        finalize(out)
    path.write_bytes(KINDS[name][0](texts("third")))
    later(path)
    third = contents(called(corpus, tmp_path / "third", name).path)
    made: set[tuple[str, int]] = set()

    def watched(byte_range: Any, tally: Any) -> Iterator[Any]:
        made.add((os.path.basename(byte_range.source.path), byte_range.start))  # noqa: PTH119
        return documents(byte_range, tally)

    monkeypatch.setattr(parts, "documents", watched)
    assert contents(called(corpus, out, name).path) == third
    assert (name, 0) in made
    assert ("a.txt", 0) not in made, "the first part, which reads nothing of the file that has changed"

    # Of a finished store, no file may have changed.
    path.write_bytes(before)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with refuses(InputError, f"{name} changed from"):
        called(corpus, out, name)
    assert contents(called(corpus, tmp_path / "undisturbed", name).path) == whole


@pytest.mark.parametrize("change", [grown, rewritten, Path.unlink])
def test_what_has_changed_is_not_even_begun(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    """Reading it would take as long as it is large, only to say so at its end."""
    changing = Change(corpus / "a.txt", change)
    monkeypatch.setattr(parts, "documents", lambda byte_range, _: pytest.fail(f"{byte_range.source.path} was read"))
    with refuses(InputError, f"a.txt has {SAID[change]} since"):
        called(corpus, tmp_path / "store", "b.txt", **changing.when_planned(monkeypatch))


def test_beginning_anew_takes_the_file_as_it_is_now(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "b.txt"
    path, out = corpus / name, tmp_path / "store"
    path.write_bytes(KINDS[name][0](texts("second")))
    with monkeypatch.context() as patch, refuses(InputError, f"{name} has changed since"):
        called(corpus, out, name, **Change(path, replaced).when_read(patch))
    plan = planned(out)
    assert any(finished_part(plan, number) for number in range(plan.num_parts)), "something to mix it with"
    anew = called(corpus, out, name, resume=False)
    anew.verify()
    assert contents(anew.path) == contents(called(corpus, tmp_path / "other", name).path)
    assert "other 1 " in anew.tokenizer.decode(anew[:])
    assert "second" not in anew.tokenizer.decode(anew[:])


def test_workers_say_the_same(corpus: Path, tmp_path: Path) -> None:
    called(corpus, tmp_path / "store", "b.txt", task=1, num_tasks=50)
    plan = planned(tmp_path / "store")
    assert finished_part(plan, 0) is None
    (corpus / "a.txt").unlink()
    with refuses(InputError, "a.txt has vanished since"), closing(Workers(1)) as workers:
        workers.load(plan.store)
        workers.make("tokenizers", [0], lambda _: None)
    assert finished_part(plan, 0) is None
