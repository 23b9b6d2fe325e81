"""What makes no sense as an argument of `prepare` is said at once, in words, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from locant import Tokenizer
from locant.errors import InputError, LocantError, RangeError
from locant.text.prepare import finalize, parts, prepare
from locant.text.prepare.plan import Plan, discard_plan
from locant.text.tokenizer import engine
from tests.refusal import refuses

ODD: list[dict[str, Any]] = [
    *({"workers": workers} for workers in ("2", 1.5, True, 0)),
    *({"shard_size": size} for size in ("3", None, 1.5, True, 0, 2**63)),
    *({"vocab_size": size} for size in ("300", 1.5, 256, 10**9)),
    *({"separator": text} for text in (5, b"x", "", "\ud800")),
    *({"field": field} for field in (5, "")),
    *({"tokenizer": tokenizer} for tokenizer in (5, b"x", [])),
    *({"append_end_of_text": odd} for odd in ("yes", 1)),
    *({"resume": odd} for odd in ("no", None, 1, [])),
    *({"ray": address} for address in (5, b"local", "")),
    {"progress": 5},
    {"engine": "fast"},
    {"task": 1},
    {"num_tasks": 2},
    *({"task": task, "num_tasks": 2} for task in (2, -1, 0.5)),
]
TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("num_tasks", {"task": 0, "num_tasks": 10**12}),
    ("ray", {"task": 0, "num_tasks": 2, "ray": "local"}),
    ("anew", {"task": 0, "num_tasks": 2, "resume": False}),
    ("2 workers", {"task": 0, "num_tasks": 2, "workers": 2}),
    ("vocabulary size", {"tokenizer": "bytes", "vocab_size": 300}),
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("one text and another")
    return tmp_path / "a.txt"


@pytest.mark.parametrize(("named", "options"), [*((next(iter(odd)), odd) for odd in ODD), *TOGETHER], ids=str)
def test_odd_options_are_refused(source: Path, tmp_path: Path, named: str, options: dict[str, Any]) -> None:
    tokenizer = {} if {"tokenizer", "vocab_size"} & options.keys() else {"tokenizer": "bytes"}
    with refuses(RangeError, named):
        prepare(source, tmp_path / "store", **tokenizer, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("paths", [None, 5, b"a.txt", [5]])
def test_odd_paths_are_refused(tmp_path: Path, paths: Any) -> None:
    with refuses(InputError, "as a path, expected str or Path"):
        prepare(paths, tmp_path / "store", tokenizer="bytes")


@pytest.mark.parametrize("out", [None, 7, "", "a\0b"])
def test_odd_folders_are_refused(source: Path, out: Any) -> None:
    with refuses(InputError, "as the folder of a store"):
        prepare(source, out, tokenizer="bytes")
    with refuses(InputError, "as the folder of a store"):
        finalize(out)


def test_standard_input_that_is_closed_is_refused(tmp_path: Path) -> None:
    command = f'"$0" -m locant prepare - -o {tmp_path / "store"} --tokenizer bytes <&-'
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("locant: got - for standard input, which is closed")


def test_a_text_that_cannot_be_encoded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "WHOLE", 2**20)
    (tmp_path / "long.txt").write_text("x" * 2**21)
    tokenizer = Tokenizer.train("some words", 260)
    with pytest.raises(LocantError, match=r"long\.txt, after byte 0: a document has \d+ bytes"):
        prepare(tmp_path / "long.txt", tmp_path / "store", tokenizer=tokenizer, engine="tokenizers", workers=1)


def test_the_loser_of_a_race_is_told_so(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = parts._write_range

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(parts, "_write_range", write)
        prepare(source, tmp_path / "store", tokenizer="bytes", workers=1)
        return write(*arguments)

    monkeypatch.setattr(parts, "_write_range", meanwhile)
    with pytest.raises(LocantError, match="another run has finished"):
        prepare(source, tmp_path / "store", tokenizer="bytes", workers=1)
    prepare(source, tmp_path / "store", tokenizer="bytes").verify()


def joining(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """Join a task, with something else happening when the first shard is about to move."""
    prepare(source, out, tokenizer="bytes", task=0, num_tasks=1)
    number = parts._numbering

    def numbered(plan: Plan) -> Any:
        monkeypatch.setattr(parts, "_numbering", number)
        numbers = number(plan)
        meanwhile()
        return numbers

    monkeypatch.setattr(parts, "_numbering", numbered)
    finalize(out).verify()


def test_two_that_join_the_same_parts_get_the_same_store(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joining(source, tmp_path / "store", monkeypatch, lambda: finalize(tmp_path / "store"))


def test_work_that_is_discarded_while_it_is_joined_is_told(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refuses(InputError, "has vanished while", "--restart"):
        joining(source, tmp_path / "store", monkeypatch, lambda: discard_plan(tmp_path / "store"))


def test_a_shard_of_another_size_is_not_joined(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "store"
    with refuses(InputError, "shard-00000.bin has 3 bytes, expected 42", "--restart"):
        joining(source, out, monkeypatch, lambda: os.truncate(out / ".prepare/part-00000/shard-00000.bin", 3))
    prepare(source, out, tokenizer="bytes", workers=1, resume=False).verify()


def test_every_folder_is_flushed_before_what_relies_on_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename lasts once its folder was flushed: that of a part before it counts as done, the store's at the end."""
    flushed: list[str] = []
    monkeypatch.setattr(parts, "flush", lambda path: flushed.append(path.name))
    prepare(source, tmp_path / "store", tokenizer="bytes", workers=1, task=0, num_tasks=1)
    assert flushed == [".prepare"]
    finalize(tmp_path / "store")
    assert "store" in flushed[1:]
