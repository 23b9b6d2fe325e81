"""`locant export`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from locant.text.store import TokenStore
from tests.cli.conftest import Complains, Run
from tests.text.store.made import BYTES, TOKENS, make


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


def test_json_is_all_there_is_on_stdout(run: Run, store: TokenStore) -> None:
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
