"""What goes into a tokenizer comes out, or the tokenizer says that it changes some text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from locant.text import Tokenizer
from tests.text.tokenizer.texts import any_text, plain_text, well_formed
from tests.text.tokenizer.zoo import KINDS, loaded

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

    @pytest.mark.parametrize("kind", KINDS)
    @given(data=st.binary(max_size=40))
    def test_any_bytes_are_defined(self, kind: str, data: bytes) -> None:
        """Where they cannot be kept, they are read as Python reads them with `errors="replace"`."""
        tokenizer = loaded(kind)
        if not tokenizer.lossless:
            assert tokenizer.encode(data).tolist() == tokenizer.encode(data.decode(errors="replace")).tolist()

    @pytest.mark.parametrize("kind", KINDS)
    @given(text=plain_text)
    def test_bytes_and_str_of_a_text_have_the_same_ids(self, kind: str, text: str) -> None:
        assert loaded(kind).encode(text.encode()).tolist() == loaded(kind).encode(text).tolist()

    def test_a_million_times_the_same_and_nothing_at_all(self) -> None:
        for kind in ("bytes", "trained here"):
            tokenizer = loaded(kind)
            for text in ("", "a" * 1_000_000, " \n" * 100_000, "\0"):
                assert tokenizer.decode(tokenizer.encode(text)) == text
        assert Tokenizer.bytes().encode("").shape == (0,)
