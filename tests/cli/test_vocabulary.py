"""`locant vocabulary`, as it is typed, on a tokenizer of 290 entries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from locant import TokenEmbedding, Tokenizer
from tests.cli.conftest import Complains, Run, refused

pytestmark = pytest.mark.usefixtures("model")


def test_a_vocabulary_of_a_text(succeeds: Run, folder: Path) -> None:
    facts = json.loads(succeeds("vocabulary model text.txt --keep 270 -o small --json").stdout)
    assert facts["files"] == ["text.txt"]
    assert (facts["before"], facts["rows"], facts["corpus_after"]) == (290, 270, facts["corpus_before"])
    assert TokenEmbedding.from_pretrained(folder / "small").vocab_size == 270
    assert Tokenizer.load(folder / "small").vocab_size == 270


def test_tokens_are_added_once(run: Run, succeeds: Run, folder: Path, complains: Complains) -> None:
    said = run("vocabulary model --add '<tool>' --multiple-of 64 -o new").stdout
    assert "290 → 320, for 291 tokens" in " ".join(said.split())
    assert "not empty" in complains("vocabulary model --add '<tool>' -o new")
    succeeds("vocabulary model --add '<a>' -o new --force")
    assert Tokenizer.load(folder / "new").id_of("<tool>") is None


test_one_of_two_changes_is_asked_for = refused(
    "vocabulary model",
    ("", "neither or both"),
    ("--add '<a>' --keep 9", "neither or both"),
    ("--keep 270 -o new", "--keep without a FILE"),
    ("text.txt --add '<a>' -o new", "reads no text"),
    ("text.txt --keep 270 -o new --multiple-of 64 --seed 0", "--multiple-of and --seed beside --keep"),
    ("text.txt --keep 9 -o new", "entries have to be kept"),
    fixtures=["model"],
)


def test_a_folder_that_holds_the_text_is_not_replaced(complains: Complains, folder: Path) -> None:
    text = (folder / "text.txt").rename(folder / "model" / "text.txt")
    said = complains("vocabulary model model/text.txt --keep 270 --force -o model")
    assert "holds or lies in the input model/text.txt" in said
    assert text.exists()
