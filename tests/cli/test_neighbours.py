"""`locant neighbours`, as it is typed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from locant.figures import canvas
from tests.cli.conftest import Complains, Run
from tests.minilm import MINILM


def test_a_word_and_a_sum(run: Run) -> None:
    facts = json.loads(run("neighbours", MINILM, "king", "-k", 3, "--json").stdout)
    assert [one["token"] for one in facts["nearest"]] == ["kings", "queen", "monarch"]
    lines = run("neighbours", MINILM, "king", "-", "man", "+", "woman", "-k", 1).stdout.splitlines()
    assert lines[-1].split()[0] == "queen"


def test_a_list_with_its_pictures(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `lab`")
    monkeypatch.setattr(canvas, "DOTS_PER_INCH", 30)
    pictures = ("--figure", "h.png", "--map", "m.svg", "--positions", "p.png")
    result = run("neighbours", MINILM, "cat", "dog", "tokenizer", *pictures)
    assert (result.exit_code, result.stderr) == (0, "")
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    assert rows["cat"][-1] == "dog"
    assert "tokenizer is 2 tokens, token ##izer: its vector is the mean of their rows" in result.stdout
    assert (folder / "h.png").read_bytes().startswith(b"\x89PNG")
    assert b"tokenizer" in (folder / "m.svg").read_bytes()
    assert (folder / "p.png").exists()


def test_more_words_than_a_line_has_room_for_are_told_their_nearest(run: Run) -> None:
    words = ["king", "queen", "man", "woman", "paris", "london", "berlin", "cat", "dog", "mouse", "car", "truck", "bus"]
    lines = run("neighbours", MINILM, *words).stdout.splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert rows["king"] == ["king", "+0.627", "queen"]
    assert not any("…" in line for line in lines)


def test_what_cannot_be_shown_costs_a_line(complains: Complains) -> None:
    assert "no folder" in complains("neighbours bert-base-uncased king")
    assert "got no word" in complains("neighbours", MINILM)
    assert "got no word" in complains("neighbours", MINILM, "", " ")
    assert "no list" in complains("neighbours", MINILM, "king", "--figure", "x.png")
    assert "expected words with + or -" in complains("neighbours", MINILM, "king", "-", "+", "man")
    assert "ending in .png" in complains("neighbours", MINILM, "a", "b", "--figure", "x.jpg")


@pytest.mark.skipif(importlib.util.find_spec("umap") is not None, reason="umap-learn is installed")
def test_umap_is_asked_for_where_it_is_missing(complains: Complains) -> None:
    assert "pip install umap-learn" in complains(
        "neighbours", MINILM, "a", "b", "c", "--map", "m.png", "--layout", "umap"
    )
