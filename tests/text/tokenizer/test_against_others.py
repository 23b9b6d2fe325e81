"""The library and transformers read the same file and give the same ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from locant.text import sample_text
from tests.text.tokenizer.texts import plain_text
from tests.text.tokenizer.zoo import KINDS, library, loaded


class TestAgainstOthers:
    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "byte level, with dropout"])
    @given(text=plain_text)
    def test_ids_of_plain_text_are_those_of_the_library(self, kind: str, text: str) -> None:
        tokenizer, theirs = loaded(kind), library(kind)
        theirs.no_truncation()
        theirs.no_padding()
        for name in tokenizer.special_tokens:
            text = text.replace(name, "")
        assert tokenizer.encode(text).tolist() == theirs.encode(text, add_special_tokens=False).ids

    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "byte level, with dropout"])
    @given(parts=st.lists(plain_text | st.integers(0, 99), max_size=6))
    def test_with_every_special_token_allowed_too(self, kind: str, parts: list[str | int]) -> None:
        tokenizer, theirs = loaded(kind), library(kind)
        theirs.no_truncation()
        theirs.no_padding()
        names = list(tokenizer.special_tokens)
        text = "".join(part if isinstance(part, str) else names[part % len(names)] for part in parts)
        wanted = theirs.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, allowed_special=tokenizer.special_tokens).tolist() == wanted

    @pytest.mark.parametrize("kind", ["bytes", "trained here", "byte level, every flag", "word piece", "unigram"])
    def test_transformers_reads_the_saved_file_and_gives_the_same_ids(self, kind: str, tmp_path: Path) -> None:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        loaded(kind).save(tmp_path / "tokenizer.json")
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        text = "The cat is sitting,\n\n  on 1234 mats; don't <you> see? " + sample_text()[1000:3000]
        for theirs in (
            PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json")),
            AutoTokenizer.from_pretrained(tmp_path),
        ):
            assert (
                theirs(text, add_special_tokens=False, truncation=False)["input_ids"]
                == loaded(kind).encode(text).tolist()
            )

    @pytest.mark.parametrize("kind", ["trained here", "word piece", "unigram", "byte fallback", "word level"])
    @given(text=plain_text)
    def test_text_of_ids_is_that_of_the_library(self, kind: str, text: str) -> None:
        ids = loaded(kind).encode(text).tolist()
        assert loaded(kind).decode(ids) == library(kind).decode(ids, skip_special_tokens=False)

    def test_an_added_token_spelled_like_a_byte_decodes_to_itself(self) -> None:
        """The library takes each letter é for the byte 0xE9, which is how byte-level vocabularies spell it."""
        tokenizer = loaded("byte level, every flag")
        ids = [tokenizer.special_tokens["éé"]]
        assert tokenizer.decode(ids) == "éé"
        assert library("byte level, every flag").decode(ids, skip_special_tokens=False) == "\ufffd\ufffd"
