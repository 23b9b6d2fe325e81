"""`locant vocabulary`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

from locant import TokenEmbedding, Tokenizer
from tests.cli.conftest import Complains, Run
from tests.minilm import MINILM


def test_a_vocabulary_of_a_text(run: Run, folder: Path) -> None:
    facts = json.loads(run("vocabulary", MINILM, "text.txt", "--keep", 4000, "-o", "small", "--json").stdout)
    assert facts["files"] == ["text.txt"]
    assert (facts["before"], facts["rows"], facts["corpus_after"]) == (30_522, 4_000, facts["corpus_before"])
    assert TokenEmbedding.from_pretrained(folder / "small").vocab_size == 4_000
    assert Tokenizer.load(folder / "small").vocab_size == 4_000


def test_tokens_are_added_once(run: Run, succeeds: Run, folder: Path, complains: Complains) -> None:
    said = run("vocabulary", MINILM, "--add", "<tool>", "--multiple-of", 64, "-o", "new").stdout
    assert "30,522 → 30,528, for 30,523 tokens" in " ".join(said.split())
    assert "not empty" in complains("vocabulary", MINILM, "--add", "<tool>", "-o", "new")
    succeeds("vocabulary", MINILM, "--add", "<a>", "-o", "new", "--force")
    assert Tokenizer.load(folder / "new").id_of("<tool>") is None


def test_one_of_two_changes_is_asked_for(complains: Complains) -> None:
    assert "neither or both" in complains("vocabulary", MINILM)
    assert "neither or both" in complains("vocabulary", MINILM, "--add", "<a>", "--keep", 9)
    assert "--keep without a FILE" in complains("vocabulary", MINILM, "--keep", 4000, "-o", "new")
    assert "reads no text" in complains("vocabulary", MINILM, "text.txt", "--add", "<a>", "-o", "new")
    keeping = ("vocabulary", MINILM, "text.txt", "--keep", 4000, "-o", "new")
    assert "--multiple-of and --seed beside --keep" in complains(*keeping, "--multiple-of", 64, "--seed", 0)
    assert "entries have to be kept" in complains("vocabulary", MINILM, "text.txt", "--keep", 9, "-o", "new")


def test_a_folder_that_holds_the_text_is_not_replaced(complains: Complains, folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    text = (folder / "text.txt").rename(folder / "model" / "text.txt")
    asked = ("vocabulary", MINILM, "model/text.txt", "--keep", 4000, "--force", "-o", "model")
    assert "holds or lies in the input model/text.txt" in complains(*asked)
    assert text.exists()
