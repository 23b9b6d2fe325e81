"""The benchmarks run, from the first to the last row, at a size that takes seconds."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from benchmarks import whole_model, windows
from benchmarks.__main__ import NAMES
from locant.text.store import TokenStore

FOLDER = Path(__file__).parents[1] / "benchmarks"
TINY = whole_model.Size(vocab=64, width=64, layers=2, heads=2, mlp=192, batch=2, length=16, prompt=24, rounds=1)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_a_file_whose_first_line_states_the_question(name: str) -> None:
    file = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    assert "rows" in {each.name for each in file.body if isinstance(each, ast.FunctionDef)}
    first_line = (ast.get_docstring(file) or "").splitlines()[0]
    assert re.search(r"\?", first_line), f"{name} does not state what it measures"


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_a_whole_model_is_trained_read_and_continued_by_each_library() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("x_transformers")
    rows = whole_model.rows(TINY)
    questions = [*dict.fromkeys(row.question for row in rows)]
    assert [question.split(" of ")[0] for question in questions] == [
        "a training step", "a prompt", "10 times one more token behind 24, a Llama",
    ]  # fmt: skip
    for question in questions:
        contenders = [row.contender for row in rows if row.question == question]
        assert contenders == ["plain torch", "locant", "transformers", "x-transformers"]


@pytest.mark.slow
@pytest.mark.unchecked
def test_a_model_with_other_logits_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_model.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(whole_model, "_rotate_half", lambda x: x)
    with pytest.raises(AssertionError, match="the logits of locant are off by"):
        whole_model.rows(TINY)


@pytest.mark.slow
@pytest.mark.unchecked
def test_worker_processes_are_compared_with_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "TOKENS", 4_000)
    monkeypatch.setattr(windows, "WITH_WORKERS", (4, 16))
    store = TokenStore(windows._write_store(tmp_path / "store", 1))
    rows = windows._workers(store, batches=3, rounds=1)
    assert [row.contender for row in rows] == ["0 worker processes", "2 worker processes"]
