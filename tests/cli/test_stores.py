"""`locant prepare` and `locant export`, as they are typed."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from locant.text.store import TokenStore
from tests.cli.conftest import Complains, Run, listing, refused
from tests.text.store.made import BYTES, TOKENS, make

TEXT = "the cat sat on the mat; the rat sat on the cat. " * 40


@pytest.fixture(autouse=True)
def _nothing_is_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def test_a_store_is_made_and_told_of(run: Run) -> None:
    result = run("prepare text.txt -o store --tokenizer bytes")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "store: 1,921 tokens in 1 document, 1 shard, uint16, 3,842 bytes\n"
    assert TokenStore("store")[:].tolist() == [*TEXT.encode(), 256]


def test_json_is_all_that_prepare_prints(run: Run) -> None:
    result = run("prepare text.txt -o store --vocab-size 300 --json")
    facts = json.loads(result.stdout)
    store = TokenStore("store")
    assert facts == {
        "store": "store", "tokens": len(store), "documents": 1, "shards": 1, "dtype": "uint16", "bytes": 2 * len(store),
        "vocab_size": store.vocab_size, "end_of_text": store.end_of_text, "fingerprint": store.fingerprint,
        "skipped": {}, "not_utf8": {}, "warnings": [],
    }  # fmt: skip
    assert store.tokenizer.decode(store[:-1]) == TEXT


def test_separators_can_be_typed(run: Run) -> None:
    Path("two.txt").write_text("one\n\ntwo\n\n\\nthree")
    assert "in 3 documents" in run(r"prepare two.txt -o store --tokenizer bytes --separator '\n\n'").stdout
    assert "in 2 documents" in run(r"prepare two.txt -o other --tokenizer bytes --separator '\\n'").stdout


@pytest.mark.filterwarnings("default")  # the command prints them
def test_remedies_of_warnings_are_options(run: Run) -> None:
    Path("a.txt").write_bytes("déjà vu, à l'été".encode("cp1252"))
    assert "try: pass --encoding cp1252, or" in run("prepare a.txt -o store --tokenizer bytes").stdout
    Path("b.txt").write_text("déjà vu", encoding="utf-8")
    result = run("prepare b.txt -o other --tokenizer bytes --encoding cp1252 --json")
    expected = "b.txt is valid UTF-8 but was read as cp1252; if it is UTF-8, prepare it without --encoding"
    assert json.loads(result.stdout)["warnings"] == [expected]


def test_the_end_of_text_can_be_left_out(run: Run) -> None:
    assert "1,920 tokens" in run("prepare text.txt -o store --tokenizer bytes --no-end-of-text").stdout


def test_a_dry_run_writes_nothing(run: Run, folder: Path) -> None:
    before = listing(folder)
    result = run("prepare text.txt --dry-run --tokenizer bytes")
    assert (
        result.stdout
        == "1 file of 1,920 bytes: 1 document, 1,921 tokens, 3,842 bytes in the store; 1 worker by default\n"
    )
    facts = json.loads(run("prepare text.txt --dry-run --tokenizer bytes --json").stdout)
    assert facts == {
        "files": 1, "bytes": 1920, "documents": 1, "tokens": 1921, "store_bytes": 3842, "exact": True,
        "left_out": {}, "workers": 1, "warnings": [],
    }  # fmt: skip
    assert listing(folder) == before


def test_tasks_are_done_apart_and_joined(run: Run) -> None:
    words = ("prepare", "text.txt", "-o", "store", "--tokenizer", "bytes", "--num-tasks", "2")
    said = "store: task 1 of 2 is done. When all are done: locant prepare --finalize -o store\n"
    assert run(*words, "--task", "1").stdout == said
    missing = run("prepare --finalize -o store")
    assert missing.exit_code == 2
    assert "tasks 0 of 2 are missing" in missing.stderr
    assert json.loads(run(*words, "--task", "0", "--json").stdout) == {
        "store": "store", "task": 0, "num_tasks": 2, "warnings": [],
    }  # fmt: skip
    assert run("prepare --finalize -o store").stdout.startswith("store: 1,921 tokens")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("text.txt", "got PATH... with --finalize"),
        ("--dry-run --restart", "got --dry-run, --restart with --finalize"),
        ("--separator x", "got --separator with --finalize"),
        ("--no-end-of-text", "got --end-of-text with --finalize"),
        ("--tokenizer bytes --download", "got --tokenizer, --download with --finalize"),
        ("--task 0", "got --task with --finalize"),
    ],
)
def test_joining_takes_no_other_words(run: Run, complains: Complains, words: str, said: str) -> None:
    run("prepare text.txt -o store --tokenizer bytes --num-tasks 1 --task 0")
    assert said in complains(f"prepare --finalize -o store {words}")
    assert json.loads(run("prepare --finalize -o store --json").stdout)["tokens"] == 1921


def test_bytes_are_no_name_to_be_fetched(run: Run) -> None:
    result = run("prepare text.txt -o store --tokenizer bytes --download")
    assert (result.exit_code, result.stderr) == (0, "")
    assert TokenStore("store")[:].tolist() == [*TEXT.encode(), 256]


def test_standard_input_is_a_path(run: Run) -> None:
    result = run("prepare - -o store --tokenizer bytes", input="one two")
    assert "8 tokens in 1 document" in result.stdout


def test_unfinished_work_can_be_discarded(run: Run, succeeds: Run) -> None:
    words = ("prepare", "text.txt", "-o", "store", "--tokenizer", "bytes")
    run(*words, "--task", "1", "--num-tasks", "2")
    refused = run(*words, "--no-end-of-text")
    assert refused.exit_code == 2
    assert "append_end_of_text was True and is False" in refused.stderr
    assert "--restart" in refused.stderr
    succeeds(*words, "--no-end-of-text", "--restart")


test_mistakes_cost_one_line = refused(
    "prepare",
    ("text.txt", "got no folder for the store"),
    ("-o store", "got no path"),
    ("--dry-run", "got no path"),
    ("--finalize", "got no folder for the store"),
    ("--finalize -o store", "no tasks to join"),
    ("text.txt -o store --task 0 --num-tasks 2 --workers 4", "one process does"),
    ("gone.txt -o store", "gone.txt"),
    ("text.txt -o store --tokenizer ''", "found no tokenizer ''"),
    ("text.txt -o text.txt", "which is a file"),
    ("text.txt -o .", "holds other things"),
    ("text.txt -o store --task 2", "num_tasks"),
    ("text.txt -o store --task 2 --num-tasks 2", "got 2 for task"),
    ("text.txt -o store --workers 0", "--workers"),
    ("text.txt -o store --separator ''", "separator"),
    ("text.txt -o store --engine fast", "fast"),
    ("text.txt -o store --tokenizer bytes --vocab-size 300", "vocabulary size"),
)


def parts_of(folder: Path) -> list[Path]:
    """The finished parts of unfinished work."""
    return [*folder.glob("store/.prepare/part-????????????????")]


def interrupted(words: list[str], folder: Path) -> tuple[int, str, str]:
    """Ctrl-C after the first finished part: the exit code, stdout and stderr.

    Tests that run in the background of a shell are deaf to Ctrl-C, and so would be what they start.
    """
    hear = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, **pipes, text=True, preexec_fn=hear) as process:
        while process.poll() is None and not parts_of(folder):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate()
    return process.returncode, out, errors


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on_and_the_same_command_does(folder: Path) -> None:
    """A machine that makes all of it before Ctrl-C is typed gets a text twice as long."""
    words = [sys.executable, "-m", "locant", "prepare", "large.txt", "-o", "store", "--workers", "2", "--separator"]
    words += [r"\n\n", "--shard-size", "40000", "--vocab-size", "1000", "--engine", "tokenizers"]
    lines = 80_000
    while True:
        with Path("large.txt").open("w") as file:
            file.writelines(f"line {number} of a text that takes a while\n\n" for number in range(lines))
        code, out, errors = interrupted(words, folder)
        if not Path("store/store.json").exists():
            break
        shutil.rmtree("store")
        lines *= 2
        assert lines < 4_000_000, "Ctrl-C is not heard"
    assert (code, out) == (130, "")
    assert "run the same command again to continue" in errors
    assert "Traceback" not in errors
    assert parts_of(folder)
    assert subprocess.run(words, capture_output=True, check=True).stdout.startswith(b"store: ")
    assert len(TokenStore("store").documents) == lines + 1


@pytest.fixture
def store(folder: Path) -> TokenStore:
    return make(folder / "store")


@pytest.mark.parametrize(
    ("to", "files"),
    [("nanogpt", "2 files"), ("megatron", "3 files"), ("datatrove", "16 files"), ("locant", "12 files")],
)
def test_a_store_is_exported(run: Run, store: TokenStore, to: str, files: str) -> None:
    result = run("export store --to", to, "-o", "out")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"out: 13 tokens as uint16, {to}, {files}\n"


def test_json_is_all_that_export_prints(run: Run, store: TokenStore) -> None:
    result = run("export store --to nanogpt -o out --json")
    assert json.loads(result.stdout) == {
        "output": "out", "to": "nanogpt", "files": ["tokenizer.json", "train.bin"], "tokens": 13, "dtype": "uint16",
    }  # fmt: skip
    assert np.fromfile("out/train.bin", np.uint16).tolist() == TOKENS.tolist()


def test_a_file_of_another_program_becomes_a_store(run: Run, folder: Path) -> None:
    TOKENS.astype(np.int32).tofile(folder / "a.bin")
    BYTES.save(folder / "bytes.json")
    words = ["--format", "nanogpt", "--dtype", "int32", "--tokenizer", "bytes.json", "--end-of-text", "256"]
    result = run("export a.bin", *words, "--to", "locant", "-o", "out")
    assert (result.exit_code, result.stderr) == (0, "")
    store = TokenStore("out")
    store.verify()
    assert (store[:].tolist(), store.documents.tolist(), store.end_of_text) == (TOKENS.tolist(), [0, 5, 13], 256)


def test_what_goes_wrong_is_one_line(complains: Complains, store: TokenStore) -> None:
    assert "not empty" in complains("export store --to nanogpt -o store")
    assert "not a folder" in complains("export nothing --to nanogpt -o out")
    assert "no finished store" in complains("export . --to nanogpt -o out")
    assert "parquet" in complains("export store --to parquet -o out")
    assert "--to" in complains("export store -o out")
    (store.path / "shard-00000.bin").write_bytes(b"")
    assert "shard-00000.bin has 0 bytes, expected 8" in complains("export store --to nanogpt -o out")
