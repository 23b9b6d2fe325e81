"""A tokenizer of words, beside the same in plain Python: a dictionary of words, and a regular expression."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from locant.errors import InputError, RangeError
from locant.text import Tokenizer, sample_text
from tests.refusal import refuses

STORY = """Jack's well-known rival -- "a cheap genius!" -- said: 'No… (perhaps)'. It was 1907;
he'd lost, and the dog ran; the dog ran. ¿Qué? “Élan” 日本 x_1 <unk> ##a"""
STRANGE = "an unseen word"


def words_of(text: str) -> list[str]:
    """A word may have single apostrophes and hyphens inside; of marks, equal ones in a row are one."""
    return [match[0] for match in re.finditer(r"\w+(?:['’-]\w+)*|([^\w\s])\1*", text)]


def test_ids_are_places_in_the_sorted_list_of_words() -> None:
    tokenizer, vocabulary = Tokenizer.words(STORY), sorted({*words_of(STORY)})
    assert [tokenizer.token(number) for number in range(len(vocabulary))] == vocabulary
    assert tokenizer.encode(STORY).tolist() == [vocabulary.index(word) for word in words_of(STORY)]
    assert {"Jack's", "well-known", "--", "…", "he'd", "日本", "x_1"} <= {*vocabulary}
    assert tokenizer.special_tokens == {"<|endoftext|>": len(vocabulary) + 1}
    assert tokenizer.vocab_size == len(vocabulary) + 2
    assert not tokenizer.lossless


def test_what_was_never_seen_is_unknown_and_nothing_else_is() -> None:
    tokenizer = Tokenizer.words(STORY)
    unknown = tokenizer.id_of("<unk>")
    assert tokenizer.encode("the zebra ran").tolist() == [tokenizer.id_of("the"), unknown, tokenizer.id_of("ran")]
    spelled = tokenizer.encode("<unk><|endoftext|>").tolist()
    assert spelled[:3] == [*map(tokenizer.id_of, ("<", "unk", ">"))]  # words of the story
    assert tokenizer.end_of_text not in spelled
    assert tokenizer.encode("<|endoftext|>", allowed_special=["<|endoftext|>"]).tolist() == [tokenizer.end_of_text]


def test_the_word_unk_of_a_text_is_a_word() -> None:
    tokenizer = Tokenizer.words("the unk <unk>")
    assert [tokenizer.token(number) for number in range(tokenizer.vocab_size - 1)] == ["<", ">", "the", "unk", "<unk>"]
    assert tokenizer.decode(tokenizer.encode("the <unk>")) == "the < unk >"


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("The dog ran.", "<unk> dog ran."),
        ("he'd  lost,\n\nand   ran!", "he'd lost, and ran!"),
        ("(perhaps): dog; 'No…'", "(perhaps): dog; ' No… '"),
        ("“Élan” -- well-known", "“Élan” -- well-known"),
        ("", ""),
        (" \n ", ""),
    ],
)
def test_words_come_back_with_single_spaces_and_none_before_marks(text: str, read: str) -> None:
    tokenizer = Tokenizer.words(STORY)
    assert tokenizer.decode(tokenizer.encode(text)) == read


@pytest.mark.parametrize("wrong", [None, b"the dog", 7, [b"the dog"], ["the dog", None]])
@pytest.mark.parametrize("learn", [Tokenizer.words, Tokenizer.train])
def test_what_is_no_text_is_named_by_its_kind(wrong: Any, learn: Callable[..., Tokenizer]) -> None:
    kind = type(wrong[-1] if isinstance(wrong, list) else wrong).__name__
    with refuses(InputError, f"got a {kind} to train on", "data.decode(), for bytes"):
        learn(wrong)


TOKENIZER = Tokenizer.words(STORY)
LETTERS = "abtheÉé日_1 \n\t.,;:!?-'’“”…()[]{}<>|#\u3000"
"""Of which Python's regular expressions and the library's are of one mind: not of control characters."""


@given(st.text(LETTERS, max_size=40) | st.lists(st.sampled_from([*words_of(STORY), STRANGE, " ", "\n"])).map(" ".join))
def test_known_words_come_back(text: str) -> None:
    """What is decoded has the same words, the unknown ones aside; saved, too, and as other programs read the file."""
    ids = TOKENIZER.encode(text)
    vocabulary = {*words_of(STORY)}
    words = words_of(text)
    assert [TOKENIZER.token(number) for number in ids] == [word if word in vocabulary else "<unk>" for word in words]
    read = TOKENIZER.decode(ids).replace("<unk>", STRANGE.split()[1])
    kept = [word if word in vocabulary else "unseen" for word in words]
    # Marks that no space parts any more may be one: of "! !" is made "!!".
    assert "".join(words_of(read)) == "".join(kept)


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    tokenizer = Tokenizer.words([sample_text()[:20_000], STORY])
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))["model"]["type"] == "WordLevel"
    for text in (STORY, sample_text()[20_000:22_000]):
        assert loaded.encode(text).tolist() == tokenizer.encode(text).tolist()
        assert loaded.decode(loaded.encode(text)) == tokenizer.decode(tokenizer.encode(text))


@pytest.mark.parametrize("size", [3, 4, 9, None])
def test_the_most_frequent_words_are_kept(size: int | None, tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text(STORY, encoding="utf-8")
    tokenizer = Tokenizer.words(tmp_path / "story.txt", size, special_tokens=["[PAD]"])
    counts = Counter(words_of(STORY))
    frequent = sorted(counts, key=lambda word: (-counts[word], word))
    room = len(frequent) if size is None else size - 1 - len(tokenizer.special_tokens)
    spelled = [tokenizer.token(number) for number in range(tokenizer.vocab_size)]
    assert spelled == [*sorted(frequent[:room]), "<unk>", *tokenizer.special_tokens]


def test_mistakes_are_refused() -> None:
    with refuses(InputError, "no text", "pathlib.Path"):
        Tokenizer.words(["", ""])
    with refuses(InputError, "'cat'", "also a token"):
        Tokenizer.words("the cat", special_tokens=["cat"])
    with refuses(InputError, "'<unk>'", "also a token"):
        Tokenizer.words("the cat", special_tokens=["<unk>"])
    with refuses(RangeError, "got 2 for vocab_size", "vocab_size=3"):
        Tokenizer.words("the cat", 2)
