"""Any string and any bytes, by either engine: the same ids, none special, and the text again or a declared loss.

Ten thousand texts for the sweep, two thousand for the slow suite, some hundred for the quick one. They are made of
what has broken tokenizers: surrogates, NUL, right-to-left text, invalid UTF-8, special tokens spelled out, runs of one
character.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from locant.text import Tokenizer
from locant.text.tokenizer.engine import Engine, choose_engine
from locant.text.tokenizer.probe_texts import PROBE_TEXTS
from tests.text.tokenizer.zoo import (
    ATOMS,
    KINDS,
    SPLITS,
    any_text,
    forbidden,
    loaded,
    plain_text,
    well_formed,
)

EVERY = [*KINDS, *SPLITS]
BATCH = 40
"""Texts in one example."""

SPECIAL = sorted({name for kind in EVERY for name in loaded(kind).special_tokens})

RIGHT_TO_LEFT = st.text(st.characters(min_codepoint=0x590, max_codepoint=0x8FF), max_size=8)
STRINGS = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(categories=["Cs", "Cc", "Cn", "Co", "Mn", "Zs", "Nd"]), max_size=12),
    RIGHT_TO_LEFT.map(lambda text: f"\u202e{text}\u202c"),
    st.lists(st.sampled_from([*ATOMS, *SPECIAL, *(name[:-1] for name in SPECIAL)]), max_size=12).map("".join),
    st.tuples(st.sampled_from(ATOMS), st.integers(0, 300)).map(lambda pair: pair[0] * pair[1]),
)
TEXTS = st.one_of(
    STRINGS.map(lambda text: text.encode(errors="surrogatepass")),
    st.binary(max_size=20),
    st.tuples(STRINGS, st.binary(max_size=3), STRINGS).map(
        lambda parts: parts[0].encode(errors="replace") + parts[1] + parts[2].encode(errors="replace")
    ),
    st.sampled_from(PROBE_TEXTS),
)


@functools.cache
def both(kind: str) -> list[Engine]:
    """The trusted engine, and the fast one where it may be used."""
    trusted, chosen = Engine(loaded(kind)), choose_engine("auto", loaded(kind), [])
    return [trusted] if chosen.name == "tokenizers" else [trusted, chosen]


def check(texts: list[bytes]) -> None:
    for kind in EVERY:
        made = loaded(kind)
        results = [engine.encode(texts) for engine in both(kind)]
        for ids, lengths in results[1:]:
            assert np.array_equal(ids, results[0][0]), kind
            assert np.array_equal(lengths, results[0][1]), kind
        ids, lengths = results[0]
        assert not forbidden(made) & {*ids.tolist()}, kind
        assert lengths.sum() == len(ids)
        if made.lossless:
            assert made.decode_bytes(ids) == b"".join(texts), kind
            step = max(1, len(texts) // 200)  # one by one is slow
            rows = np.split(ids, np.cumsum(lengths)[:-1])[::step]
            assert [made.decode_bytes(row) for row in rows] == texts[::step], kind


@settings(max_examples=6)
@given(texts=st.lists(TEXTS, min_size=BATCH, max_size=BATCH))
def test_every_string_has_ids_and_comes_back(texts: list[bytes]) -> None:
    check(texts)


@pytest.mark.slow
@settings(max_examples=50)
@given(texts=st.lists(TEXTS, min_size=BATCH, max_size=BATCH))
def test_two_thousand_strings_have_ids_and_come_back(texts: list[bytes]) -> None:
    check(texts)


@pytest.mark.slow
@pytest.mark.sweep
@settings(max_examples=250)
@given(texts=st.lists(TEXTS, min_size=BATCH, max_size=BATCH))
def test_ten_thousand_strings_have_ids_and_come_back(texts: list[bytes]) -> None:
    check(texts)


LOSSLESS = ["bytes", "trained here", "byte level"]
LOSSLESS += [f"byte level, {what}" for what in ("a word is special", "whole words", "every flag", "with dropout")]
LOSSY = [kind for kind in KINDS if kind not in LOSSLESS]


class TestRoundTrips:
    @pytest.mark.parametrize("kind", LOSSLESS)
    @given(text=any_text)
    def test_every_text_comes_back_with_surrogates_as_the_rule_says(self, kind: str, text: str) -> None:
        tokenizer = loaded(kind)
        assert tokenizer.lossless
        assert tokenizer.decode(tokenizer.encode(text)) == well_formed(text)

    @pytest.mark.parametrize("kind", LOSSY)
    def test_a_tokenizer_that_changes_some_text_says_so(self, kind: str) -> None:
        tokenizer = loaded(kind)
        assert not tokenizer.lossless
        hard = ["e\u0301", " a", "a", "the <think> b", "\U0001f642", "Ünknown", "The  cat\n", "▁"]
        assert any(tokenizer.decode(tokenizer.encode(text)) != text for text in hard)

    @settings(max_examples=150)
    @given(kind=st.sampled_from([*KINDS]), text=plain_text, data=st.binary(max_size=40))
    def test_any_bytes_are_defined_and_those_of_a_text_have_its_ids(self, kind: str, text: str, data: bytes) -> None:
        """Where they cannot be kept, they are read as Python reads them with `errors="replace"`."""
        tokenizer = loaded(kind)
        assert tokenizer.encode(text.encode()).tolist() == tokenizer.encode(text).tolist()
        if not tokenizer.lossless:
            assert tokenizer.encode(data).tolist() == tokenizer.encode(data.decode(errors="replace")).tolist()

    def test_a_million_times_the_same_and_nothing_at_all(self) -> None:
        for kind in ("bytes", "trained here"):
            tokenizer = loaded(kind)
            for text in ("", "a" * 1_000_000, " \n" * 100_000, "\0"):
                assert tokenizer.decode(tokenizer.encode(text)) == text
        assert Tokenizer.bytes().encode("").shape == (0,)
