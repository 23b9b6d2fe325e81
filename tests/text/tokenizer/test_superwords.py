"""SuperBPE: a token may hold several words, so no place in a text can be cut, and the ids are those of `tokenizers`.

The tokenizers here have the structure of the published ones (https://arxiv.org/abs/2503.13423): byte-level BPE whose
first merges stay within words, whose later merges cross white space, and whose pre-tokenizer splits only digits.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers, trainers

from locant import TokenStore, prepare
from locant.text import Tokenizer
from locant.text.tokenizer import engine as engines
from locant.text.tokenizer.definition import last_cut
from locant.text.tokenizer.engine import Engine

CORPUS = [
    "by the way, one of the two of them is one of the best of the year 2026 by the way",
    "in the end of the day\nby the way  the end of the 1234567 days was one of the days of the year",
    "what of the end? One of the ways by the end of the day. Über den Tag of the day",
] * 3
SUPERWORDS = 40


@cache
def superwords(by_three: bool = True) -> tokenizers.Tokenizer:
    """A tokenizer of both stages. The second stage adds the most frequent pair of tokens, again and again."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(CORPUS, trainer)
    library.decoder = tokenizers.decoders.ByteLevel()
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pattern = r"(?=(\d{3})+(?!\d))" if by_three else r"\p{N}"
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in (r"\p{N}+", pattern)]
    library.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    for _ in range(SUPERWORDS):
        pairs = Counter[tuple[str, str]]()
        for text in CORPUS:
            pairs.update(itertools.pairwise(library.encode(text).tokens))
        pair = max(pairs, key=lambda each: (pairs[each], each))
        definition = json.loads(library.to_str())
        definition["model"]["merges"].append(list(pair))
        definition["model"]["vocab"].setdefault("".join(pair), len(definition["model"]["vocab"]))
        library = tokenizers.Tokenizer.from_str(json.dumps(definition))
    return library


@cache
def ours(by_three: bool = True) -> Tokenizer:
    return Tokenizer.from_json(superwords(by_three).to_str())


PIECES = ["of the", " of", " the ", "by the way", "\n", "1234", " 1", "end", "ü", "日本", "  ", "?"]
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=20).map("".join)


@pytest.mark.parametrize("by_three", [True, False])
@given(text=TEXTS)
def test_the_ids_and_the_text_are_those_of_tokenizers(by_three: bool, text: str) -> None:
    found = ours(by_three).encode(text)
    assert found.tolist() == superwords(by_three).encode(text, add_special_tokens=False).ids
    assert ours(by_three).decode(found) == text
    assert Tokenizer.from_json(ours(by_three).to_json()).fingerprint == ours(by_three).fingerprint


def test_a_token_crosses_white_space_and_a_text_is_not_cut_there() -> None:
    text = b"one of the days"
    assert "ĠofĠthe" in superwords().encode(text.decode()).tokens
    place = last_cut(text, 0, 8)
    assert text[:place] == b"one of"
    assert [*ours().encode(text[:place]), *ours().encode(text[place:])] != ours().encode(text).tolist()
    for by_three in (True, False):
        assert "white space" in (Engine(ours(by_three)).why_not_cut or "")


def test_a_long_document_in_pieces_has_the_ids_of_the_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pieces of a stream end anywhere, and parts of a long document would end between words."""
    monkeypatch.setattr(engines, "PART_BYTES", 16)
    text = " ".join(CORPUS)
    expected = superwords().encode(text, add_special_tokens=False).ids
    data = text.encode()
    pieces = [data[first : first + 7] for first in range(0, len(data), 7)]
    batches = [([piece], number < len(pieces) - 1) for number, piece in enumerate(pieces)]
    streamed = np.concatenate([batch.ids for batch in Engine(ours()).stream(batches)])
    assert streamed.tolist() == expected
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    prepare([tmp_path / "text.txt"], tmp_path / "store", tokenizer=ours(), workers=1)
    stored = TokenStore(tmp_path / "store")[:].tolist()
    assert stored[: len(expected)] == expected
