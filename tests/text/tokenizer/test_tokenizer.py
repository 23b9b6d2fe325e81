"""Tokenizers: ids of text and text of ids, and an error for what is neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from locant.errors import InputError, RangeError, ShapeError
from locant.text import Tokenizer, sample_text
from tests.refusal import refuses
from tests.text.tokenizer.zoo import KINDS, any_text, definition, library, loaded, plain_text


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


class TestIds:
    def test_are_one_axis_of_int32_whatever_the_vocabulary(self) -> None:
        for tokenizer in map(loaded, KINDS):
            ids = tokenizer.encode("the cat")
            assert ids.dtype == np.int32
            assert ids.ndim == 1
            assert ids.flags.writeable

    @settings(max_examples=100)
    @given(kind=st.sampled_from([*KINDS]), texts=st.lists(st.binary(max_size=20) | any_text, max_size=5))
    def test_of_a_batch_are_those_of_each_text(self, kind: str, texts: list[str | bytes]) -> None:
        batch = loaded(kind).encode_batch(texts)
        assert [ids.tolist() for ids in batch] == [loaded(kind).encode(text).tolist() for text in texts]

    @pytest.mark.parametrize("text", [5, None, ["text"], bytearray(b"text")])
    def test_are_of_text_only(self, text: object) -> None:
        with refuses(InputError, f"got a {type(text).__name__} to encode, expected str or bytes"):
            Tokenizer.bytes().encode(text)  # type: ignore[arg-type]

    def test_of_a_batch_need_a_list(self) -> None:
        with pytest.raises(InputError, match=r"got one text, expected a list of texts; try: encode\(text\)"):
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
            with pytest.raises(RangeError, match="got token id 999, which no token has"):
                use(999)


class TestDecoding:
    def test_takes_lists_arrays_and_tensors(self) -> None:
        tokenizer = Tokenizer.bytes()
        for ids in ([104, 105], (104, 105), np.array([104, 105], dtype=np.uint16), torch.tensor([104, 105])):
            assert tokenizer.decode(ids) == "hi"
            assert tokenizer.decode_bytes(ids) == b"hi"
        for one in (104, np.int32(104), np.array(104), torch.tensor(104)):
            assert (tokenizer.decode(one), tokenizer.decode_bytes(one)) == ("h", b"h")
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
            with pytest.raises(RangeError, match=f"got token id {bad}, which no token has; try: use ids within 0.."):
                decode([1, bad])

    @pytest.mark.parametrize("ids", [[[1, 2]], 5.0, [1.0], True, "hi", b"hi", None, torch.zeros(2), torch.zeros(())])
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


class TestTraining:
    def test_gives_a_vocabulary_of_the_size_asked_for(self) -> None:
        for size in (257, 300, 1000):
            assert Tokenizer.train(sample_text()[:50_000], size).vocab_size == size

    def test_on_a_text_with_few_pairs_gives_fewer(self) -> None:
        assert Tokenizer.train("abab", 4096).vocab_size == 256 + 1 + 1

    def test_compresses_the_text_it_has_seen(self) -> None:
        text = sample_text()
        assert len(Tokenizer.train(text, 4096).encode(text)) < len(text) / 3.5

    def test_puts_special_tokens_last_in_their_order(self) -> None:
        tokenizer = Tokenizer.train(sample_text(), 300, ("<|endoftext|>", "<pad>"))
        assert tokenizer.special_tokens == {"<|endoftext|>": 298, "<pad>": 299}
        assert tokenizer.end_of_text == 298
        assert Tokenizer.train("abab", special_tokens=()).end_of_text is None

    def test_knows_every_byte_whatever_it_has_seen(self) -> None:
        tokenizer = Tokenizer.train("aaaa", 257)
        data = bytes(range(256))
        assert sorted(tokenizer.encode(data)) == list(range(256))
        assert tokenizer.decode_bytes(tokenizer.encode(data)) == data

    def test_takes_one_text_several_or_files(self, tmp_path: Path) -> None:
        one, two = sample_text()[:5000], sample_text()[5000:9000]
        (tmp_path / "one.txt").write_bytes(one.encode())
        (tmp_path / "two.txt").write_bytes(two.encode())
        wanted = Tokenizer.train([one, two], 400).fingerprint
        assert Tokenizer.train([tmp_path / "one.txt", tmp_path / "two.txt"], 400).fingerprint == wanted
        assert Tokenizer.train([tmp_path / "one.txt", two], 400).fingerprint == wanted
        assert Tokenizer.train((text for text in (one, two)), 400).fingerprint == wanted
        assert Tokenizer.train(tmp_path / "one.txt", 400).fingerprint == Tokenizer.train(one, 400).fingerprint != wanted

    def test_gives_the_same_in_every_process(self) -> None:
        code = (
            "from locant.text import Tokenizer, sample_text\n"  # not all names: others wait for torch
            "print(Tokenizer.train(sample_text()[:100_000], 1000).fingerprint)"
        )
        environment = {**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "3"}
        other = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert {Tokenizer.train(sample_text()[:100_000], 1000).fingerprint for _ in range(3)} == {other.stdout.strip()}

    @pytest.mark.parametrize("nothing", ["", [], [""], ()])
    def test_needs_text(self, nothing: object) -> None:
        with pytest.raises(InputError, match="got no text to train on; try: "):
            Tokenizer.train(nothing)  # type: ignore[arg-type]

    @pytest.mark.parametrize("size", [256, 0, -1, 300.0, True, "300"])
    def test_needs_room_for_every_byte(self, size: object) -> None:
        with refuses(RangeError, "for vocab_size", "257"):
            Tokenizer.train("text", size)  # type: ignore[arg-type]

    def test_does_not_take_a_path_for_a_text(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("text")
        with pytest.raises(InputError, match=r"is the name of a file; try: pathlib.Path\("):
            Tokenizer.train(str(tmp_path / "a.txt"))
        with pytest.raises(InputError, match=r"looks like the name of a file; try: pathlib.Path\("):
            Tokenizer.train("missing.txt")
        assert Tokenizer.train("U.S.A. or a.txt").vocab_size >= 257  # a sentence is none
        with refuses(InputError, "got a bytes to train on"):
            Tokenizer.train([b"text"])  # type: ignore[list-item]
        with pytest.raises(InputError, match="there is no such file"):
            Tokenizer.train(tmp_path / "b.txt")

    @pytest.mark.parametrize("special", [("",), ("<a>", "<a>"), (5,), ("\ud800",)])
    def test_refuses_special_tokens_that_are_none(self, special: tuple[str, ...]) -> None:
        with refuses(InputError, "got the special token"):
            Tokenizer.train("text", special_tokens=special)

    def test_refuses_a_special_token_that_the_texts_spell_as_a_token(self) -> None:
        with pytest.raises(
            InputError, match=r"got the special token 'END', which is also a token .*; try: use '<\|END\|>'"
        ):
            Tokenizer.train("END END END END", special_tokens=("END",))
        with pytest.raises(InputError, match="special token '!'"):
            Tokenizer.train("text", special_tokens="!")


class TestAgainstOthers:
    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "byte level, with dropout"])
    @given(parts=st.lists(plain_text | st.integers(0, 99), max_size=6))
    def test_ids_are_those_of_the_library_without_special_tokens_and_with_all_of_them(
        self, kind: str, parts: list[str | int]
    ) -> None:
        tokenizer, theirs = loaded(kind), library(kind)
        theirs.no_truncation()
        theirs.no_padding()
        names = list(tokenizer.special_tokens)
        text = "".join(part if isinstance(part, str) else names[part % len(names)] for part in parts)
        wanted = theirs.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, allowed_special=tokenizer.special_tokens).tolist() == wanted
        for name in names:
            text = text.replace(name, "")
        assert tokenizer.encode(text).tolist() == theirs.encode(text, add_special_tokens=False).ids

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
