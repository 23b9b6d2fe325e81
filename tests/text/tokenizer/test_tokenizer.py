"""Tokenizers: ids of text and text of ids, and an error for what is neither."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from locant.errors import InputError, RangeError, ShapeError
from locant.text import Tokenizer, sample_text
from tests.refusal import refuses
from tests.text.tokenizer.texts import any_text, well_formed
from tests.text.tokenizer.zoo import KINDS, definition, library, loaded


class TestBytes:
    def test_ids_are_the_bytes_of_utf_8(self) -> None:
        tokenizer = Tokenizer.bytes()
        text = "naïve 日本 🙂\r\n\0"
        assert tokenizer.encode(text).tolist() == list(text.encode())
        assert tokenizer.encode(bytes(range(256))).tolist() == list(range(256))
        assert tokenizer.vocab_size == 257
        assert tokenizer.end_of_text == 256
        assert tokenizer.special_tokens == {"<|endoftext|>": 256}
        assert tokenizer.lossless

    def test_are_not_all_there_is_once_a_token_is_added(self) -> None:
        theirs = library("bytes")
        theirs.add_tokens([AddedToken("<think>", normalized=False)])
        assert Tokenizer.from_json(theirs.to_str()).encode("a<think>").tolist() == [97, 257]

    @given(text=any_text)
    def test_the_library_reads_the_same_ids_from_the_saved_definition(self, text: str) -> None:
        text = well_formed(text).replace("<|endoftext|>", "")
        assert library("bytes").encode(text, add_special_tokens=False).ids == Tokenizer.bytes().encode(text).tolist()


class TestIds:
    def test_are_one_axis_of_int32_whatever_the_vocabulary(self) -> None:
        for tokenizer in map(loaded, KINDS):
            ids = tokenizer.encode("the cat")
            assert ids.dtype == np.int32
            assert ids.ndim == 1
            assert ids.flags.writeable

    def test_hold_a_vocabulary_of_more_than_16_bits(self) -> None:
        vocab = {f"w{number}": number for number in range(70_000)}
        data = json.loads(definition("word level"))
        data["model"] = {
            "type": "WordLevel",
            "vocab": {"[UNK]": 70_000, "[CLS]": 70_001, **vocab},
            "unk_token": "[UNK]",
        }
        data["added_tokens"] = [token | {"id": token["id"] + 70_000} for token in data["added_tokens"]]
        tokenizer = Tokenizer.from_json(json.dumps(data))
        assert tokenizer.vocab_size == 70_002
        assert tokenizer.encode("w65535 w65536 w69999 other").tolist() == [65535, 65536, 69999, 70000]

    @pytest.mark.parametrize("kind", KINDS)
    @given(texts=st.lists(st.binary(max_size=20) | any_text, max_size=5))
    def test_of_a_batch_are_those_of_each_text(self, kind: str, texts: list[str | bytes]) -> None:
        batch = loaded(kind).encode_batch(texts)
        assert [ids.tolist() for ids in batch] == [loaded(kind).encode(text).tolist() for text in texts]

    @pytest.mark.parametrize("text", [5, None, ["text"], bytearray(b"text")])
    def test_are_of_text_only(self, text: object) -> None:
        with refuses(InputError, f"got a {type(text).__name__} to encode, expected str or bytes"):
            Tokenizer.bytes().encode(text)  # type: ignore[arg-type]

    def test_of_a_batch_need_a_list(self) -> None:
        with pytest.raises(InputError, match=r"got one text, expected a list of them; try: encode\(text\)"):
            Tokenizer.bytes().encode_batch("text")

    def test_do_not_depend_on_dropout_truncation_or_padding_in_the_file(self) -> None:
        random, flags = loaded("byte level, with dropout"), loaded("byte level, every flag")
        text = sample_text()[:2000]
        assert len({tuple(random.encode(text)) for _ in range(5)}) == 1
        assert random.encode(text).tolist() == loaded("byte level").encode(text).tolist()
        assert len({tuple(library("byte level, with dropout").encode(text).ids) for _ in range(5)}) > 1
        assert len(flags.encode(text)) > 20 > len(flags.encode("the"))
        assert len(library("byte level, every flag").encode(text).ids) == 20

    def test_of_unused_numbers_count_for_the_table(self) -> None:
        data = json.loads(definition("byte level"))
        data["model"]["vocab"]["<|late|>"] = 1000
        data["added_tokens"].append(data["added_tokens"][0] | {"id": 1000, "content": "<|late|>"})
        tokenizer = Tokenizer.from_json(json.dumps(data))
        assert tokenizer.vocab_size == 1001
        for use in (tokenizer.token, lambda number: tokenizer.decode([number])):
            with pytest.raises(RangeError, match="got token id 999, which is no token's"):
                use(999)


class TestDecoding:
    def test_takes_lists_arrays_and_tensors(self) -> None:
        tokenizer = Tokenizer.bytes()
        for ids in ([104, 105], (104, 105), np.array([104, 105], dtype=np.uint16), torch.tensor([104, 105])):
            assert tokenizer.decode(ids) == "hi"
            assert tokenizer.decode_bytes(ids) == b"hi"
        assert tokenizer.decode([]) == ""
        assert tokenizer.decode_bytes(np.zeros(0, dtype=np.int32)) == b""

    def test_spells_special_tokens_out(self) -> None:
        assert Tokenizer.bytes().decode([97, 256]) == "a<|endoftext|>"
        assert loaded("word piece").decode([2, 3]) == "[CLS] [SEP]"

    def test_of_half_a_character_is_the_replacement_character(self) -> None:
        assert Tokenizer.bytes().decode(list("é".encode())[:1]) == "\ufffd"

    @pytest.mark.parametrize("kind", ["bytes", "unigram"])
    @pytest.mark.parametrize("bad", [-1, -100, 10**6, 2**31, 2**63 - 1])
    def test_names_an_id_that_is_no_tokens(self, kind: str, bad: int) -> None:
        for decode in (loaded(kind).decode, loaded(kind).decode_bytes):
            with pytest.raises(RangeError, match=f"got token id {bad}, which is no token's; try: ids within 0.."):
                decode([1, bad])

    @pytest.mark.parametrize("ids", [[[1, 2]], 5, [1.0], np.array(3), torch.zeros(2)])
    def test_refuses_what_is_no_axis_of_integers(self, ids: object) -> None:
        with refuses(ShapeError, "expected one axis of integers"):
            Tokenizer.bytes().decode(ids)  # type: ignore[arg-type]

    def test_a_token_reads_well_in_a_table(self) -> None:
        tokenizer = Tokenizer.train("the cat the cat the cat", 262)
        assert tokenizer.token(tokenizer.encode(" the")[0]).startswith("␣")
        assert [Tokenizer.bytes().token(number) for number in (65, 32, 10, 195, 127, 256)] == [
            "A", "␣", "\\n", "\\xc3", "\\x7f", "<|endoftext|>",
        ]  # fmt: skip
        assert loaded("unigram").token(1) == "</s>"
        assert tokenizer.token(np.int32(5)) == tokenizer.token(5)
        for bad in (-1, tokenizer.vocab_size):
            with pytest.raises(RangeError, match=f"got token id {bad}"):
                tokenizer.token(bad)
