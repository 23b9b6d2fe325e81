"""The Your text screen: tokens, windows and vectors are those that its Python makes; a text is only text."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors

from locant.errors import InputError
from locant.explore.screens import answer
from locant.explore.session import Session
from locant.positions.registry import encodings
from tests.explore.screens import executed, numbers_of
from tests.minilm import MINILM
from tests.tolerances import SHORT_SUM

STORY = "The cat sat on the mat. The dog sat on the log. " * 20


numbers = partial(numbers_of, "text")


@pytest.mark.parametrize("encoding", ["none", *(name for name, kind in encodings().items() if "embed" in kind.doors())])
@pytest.mark.parametrize("tokenizer", ["bytes", "trained on this text"])
def test_its_python_makes_the_same_vectors(encoding: str, tokenizer: str) -> None:
    shown = numbers(typed=STORY, encoding=encoding, tokenizer=tokenizer, vocabulary="300")
    made = executed(shown)
    np.testing.assert_array_equal(made["ids"], shown["ids"])
    np.testing.assert_array_equal(made["x"][0].detach(), shown["vectors"])
    assert len(made["windows"]) == len(shown["windows"]["starts"])


def test_tokens_spell_the_text_and_windows_follow_it() -> None:
    shown = numbers(typed=STORY, tokenizer="bytes", start="4", count="9", length="4", stride="3")
    assert bytes.fromhex(" ".join(shown["bytes"])).decode() == STORY[4:13]
    assert shown["pieces"] == list(STORY[4:13].replace(" ", "␣"))
    assert shown["windows"]["inputs"] == [list("cat␣"), list("␣sat"), ["t", "␣", "", ""]]
    assert shown["windows"]["targets"] == [list("at␣s"), list("sat␣"), ["␣", "o", "", ""]]


def test_the_spelling_of_a_special_token_stays_text() -> None:
    shown = numbers(typed="<|endoftext|>", tokenizer="bytes")
    assert "".join(shown["pieces"]) == "<|endoftext|>"
    assert len(shown["ids"]) == 13


def test_a_dropped_file_is_read_as_text_or_refused() -> None:
    session = Session()
    key = session.drop("story.txt", STORY.encode())
    assert numbers(session, file=key)["name"] == "story.txt"
    for content, words in ((b"\xff\xfe", "not text in UTF-8: byte 0"), (b"", "empty")):
        with pytest.raises(InputError, match=words):
            numbers(session, file=session.drop("odd.txt", content))


def test_a_file_of_the_command_line_comes_first(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text(STORY, encoding="utf-8")
    session = Session.of([str(tmp_path / "mine.txt")], [])
    assert numbers(session)["characters"] == len(STORY)


def test_a_model_of_the_command_line_shows_its_own_vectors_and_nearest_tokens() -> None:
    session = Session.of([str(MINILM)], [])
    shown = numbers(session, typed="The king saw a house.", at="1")
    with safetensors.safe_open(MINILM / "model.safetensors", "np") as file:
        (name,) = (key for key in file.keys() if key.endswith("word_embeddings.weight"))  # noqa: SIM118
        table = file.get_tensor(name)
    assert shown["pieces"] == ["the", "king", "saw", "a", "house", "."]
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    king = int(shown["ids"][1])
    cosines = unit @ unit[king]
    expected = [int(each) for each in np.argsort(-cosines) if each != king][:8]
    assert [number for _, number, _ in shown["neighbours"]] == expected
    np.testing.assert_allclose([score for *_, score in shown["neighbours"]], cosines[expected], **SHORT_SUM)
    np.testing.assert_array_equal(shown["alone"], table[shown["ids"], :64])
    made = executed(shown)
    np.testing.assert_array_equal(made["x"][0, :, :64].detach(), shown["vectors"])
    assert made["near"].ids.tolist() == expected
    assert numbers(session, model="untrained", typed=STORY)["neighbours"] == []


def test_the_folder_of_a_model_is_no_report() -> None:
    session = Session.of([str(MINILM)], [])
    assert answer("results", {}, session)["numbers"]["rows"] == []
    assert answer("model", {}, session)["numbers"]["model_type"] == "bert"
