"""Tokenizers: what goes in comes out, in every process, from every file, or there is an error that says why not."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models

from locant.errors import InputError, LocantError, RangeError, ShapeError
from locant.text import Tokenizer, sample_text
from tests.refusal import refuses
from tests.text.tokenizer.zoo import KINDS, definition, library

LOSSLESS = ["bytes", "trained here", "byte level"]
LOSSLESS += [f"byte level, {what}" for what in ("a word is special", "whole words", "every flag", "with dropout")]
LOSSY = [kind for kind in KINDS if kind not in LOSSLESS]


@functools.cache
def loaded(kind: str) -> Tokenizer:
    return Tokenizer.from_json(definition(kind))


surrogates = st.sampled_from("\ud800\ud83d\udbff\udc00\ude42\udfff")
# A union of characters would be drawn from as one set, in which the surrogates are few.
any_text = st.lists(st.text(max_size=10) | surrogates, max_size=8).map("".join)
plain_text = st.text(st.sampled_from("the catsing \n\tÉé日本🙂<>|[]/ENDx0.▁Ġ"), max_size=60)


def well_formed(text: str) -> str:
    """The rule, written another way: pairs of surrogates are characters, single ones are U+FFFD."""
    pair = re.compile("([\ud800-\udbff])([\udc00-\udfff])")
    joined = pair.sub(lambda m: chr(0x10000 + (ord(m[1]) - 0xD800) * 0x400 + ord(m[2]) - 0xDC00), text)
    return re.sub("[\ud800-\udfff]", "\ufffd", joined)


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


class TestTraining:
    def test_gives_a_vocabulary_of_the_size_asked_for(self) -> None:
        for size in (257, 300, 1000):
            assert Tokenizer.train(sample_text(), size).vocab_size == size

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
        code = "from locant.text import *; print(Tokenizer.train(sample_text()[:100_000], 1000).fingerprint)"
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
        with refuses(RangeError, f"got vocab_size={size!r}, expected 257 or more"):
            Tokenizer.train("text", size)  # type: ignore[arg-type]

    def test_does_not_take_a_path_for_a_text(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("text")
        with pytest.raises(InputError, match=r"is the name of a file; try: pathlib.Path\("):
            Tokenizer.train(str(tmp_path / "a.txt"))
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
            InputError, match=r"got the special token 'END', which is also a token .*; try: '<\|END\|>'"
        ):
            Tokenizer.train("END END END END", special_tokens=("END",))
        with pytest.raises(InputError, match="special token '!'"):
            Tokenizer.train("text", special_tokens="!")


class TestRoundTrips:
    @pytest.mark.parametrize("kind", LOSSLESS)
    @given(data=st.binary(max_size=60) | any_text.map(lambda text: text.encode("utf-8", "surrogatepass")))
    def test_every_byte_comes_back_from_a_lossless_tokenizer(self, kind: str, data: bytes) -> None:
        tokenizer = loaded(kind)
        assert tokenizer.lossless
        assert tokenizer.decode_bytes(tokenizer.encode(data)) == data

    @pytest.mark.parametrize("kind", LOSSLESS)
    @given(text=any_text)
    def test_every_text_comes_back_with_surrogates_as_the_rule_says(self, kind: str, text: str) -> None:
        tokenizer = loaded(kind)
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

    def test_the_corpora_and_the_sample_text_come_back(self, corpora: Path) -> None:
        for path in (corpora / "the-verdict.txt", corpora / "shakespeare.txt"):
            tokenizer = Tokenizer.train(path, 1000)
            assert tokenizer.decode_bytes(tokenizer.encode(path.read_bytes())) == path.read_bytes()


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


class TestSaving:
    @pytest.mark.parametrize("kind", KINDS)
    def test_and_loading_keeps_ids_and_fingerprint(self, kind: str, tmp_path: Path) -> None:
        first = loaded(kind)
        first.save(tmp_path / "a.json")
        second = Tokenizer.load(tmp_path / "a.json")
        second.save(str(tmp_path))
        third = Tokenizer.load(str(tmp_path))
        assert first.fingerprint == second.fingerprint == third.fingerprint
        assert first.special_tokens == third.special_tokens
        assert (first.vocab_size, first.end_of_text, first.lossless) == (
            third.vocab_size, third.end_of_text, third.lossless,
        )  # fmt: skip
        text = "the cat, <mask> [CLS] END </s> é\n" + sample_text()[:1000]
        assert first.encode(text).tolist() == third.encode(text).tolist()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "tokenizer.json"]

    def test_keeps_what_others_read_in_the_file(self, tmp_path: Path) -> None:
        loaded("word piece").save(tmp_path)
        saved = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
        assert saved == json.loads(definition("word piece"))
        assert saved["post_processor"]

    def test_that_fails_leaves_the_old_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "tokenizer.json"
        path.write_text("old")

        def full(handle: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises((OSError, InputError), match="No space"):
            Tokenizer.bytes().save(path)
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]

    def test_in_a_folder_that_is_not_there_says_so(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="there is no folder"):
            Tokenizer.bytes().save(tmp_path / "nowhere" / "tokenizer.json")

    @pytest.mark.parametrize("kind", ["bytes", "trained here", "byte level, every flag"])
    def test_is_not_needed_to_hand_one_to_a_worker(self, kind: str) -> None:
        again = ForkingPickler.loads(ForkingPickler.dumps(loaded(kind)))
        assert again.fingerprint == loaded(kind).fingerprint
        assert again.encode("the <mask> é").tolist() == loaded(kind).encode("the <mask> é").tolist()


class TestTheFingerprint:
    def test_tells_tokenizers_apart(self) -> None:
        different = [kind for kind in KINDS if kind != "byte level, with dropout"]
        assert len({loaded(kind).fingerprint for kind in different}) == len(different)
        assert Tokenizer.train("abab", special_tokens=("<a>",)).fingerprint != Tokenizer.train("abab").fingerprint

    def test_ignores_how_a_file_is_written_and_what_decides_no_id(self) -> None:
        data = json.loads(definition("byte level"))
        wanted = loaded("byte level").fingerprint
        older = copy.deepcopy(data)
        older["model"]["merges"] = [" ".join(pair) for pair in older["model"]["merges"]]
        del older["model"]["unk_token"]
        turned = dict(reversed(data.items()))
        around = data | {"truncation": json.loads(definition("byte level, every flag"))["truncation"], "decoder": None}
        for same in (older, turned, around):
            assert Tokenizer.from_json(json.dumps(same, indent=3)).fingerprint == wanted

    @pytest.mark.parametrize(
        ("place", "value"),
        [
            (("model", "ignore_merges"), True),
            (("model", "merges", 0), ["Ġ", "d"]),
            (("normalizer",), {"type": "Lowercase"}),
            (("pre_tokenizer", "add_prefix_space"), True),
            (("added_tokens", 0, "special"), False),
            (("added_tokens", 0, "lstrip"), True),
        ],
    )
    def test_changes_with_everything_that_can_change_an_id(self, place: tuple[str | int, ...], value: object) -> None:
        data = json.loads(definition("byte level"))
        *way, last = place
        at = data
        for key in way:
            at = at[key]
        assert at[last] != value
        at[last] = value
        assert Tokenizer.from_json(json.dumps(data)).fingerprint != loaded("byte level").fingerprint


def places(data: object, way: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place in a JSON document, but only some of a long list or dict."""
    if way:
        yield way
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in list(items)[:40]:
        yield from places(value, (*way, key))


class TestAFileThatIsNone:
    @pytest.mark.parametrize(
        "text",
        [
            *("", "{", "[]", "{}", "null", "NaN", "5", '"text"', "\ufeff{}", "[" * 100_000),
            *('{"model": 5}', '{"model": {}}', '{"model": {"type": "Nope"}}'),
            '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        ],
    )
    def test_is_refused_by_name(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=r"tokenizer\.json.*; try: "):
            Tokenizer.load(tmp_path)

    def test_is_refused_wherever_it_is_cut_off(self) -> None:
        text = definition("word level")
        for length in range(len(text)):
            with pytest.raises(InputError):
                Tokenizer.from_json(text[:length])

    @pytest.mark.parametrize("kind", ["byte level, every flag", "unigram", "word piece", "byte fallback"])
    @given(data=st.data())
    def test_or_is_damaged_gives_a_typed_error_or_a_tokenizer(self, kind: str, data: st.DataObject) -> None:
        document = json.loads(definition(kind))
        *way, last = data.draw(st.sampled_from(list(places(document))))
        at = document
        for key in way:
            at = at[key]
        values = [None, -1, 0, 2**40, 1e308, "", "x", [], {}, True, [["a"]], "\ud800", {"type": "Nope"}, "remove"]
        value = data.draw(st.sampled_from(values))
        if value == "remove":
            del at[last]
        else:
            at[last] = value
        try:
            tokenizer = Tokenizer.from_json(json.dumps(document))
            ids = tokenizer.encode("the [CLS] é <mask>")
            tokenizer.decode(ids)
        except LocantError:
            return
        model = document["model"]
        special = {number for name, number in tokenizer.special_tokens.items() if name != model.get("unk_token")}
        assert not {*ids.tolist()} & special - {model.get("unk_id")}

    def test_or_holds_half_a_character_is_refused(self) -> None:
        text = definition("word level").replace('"cat"', '"\\ud800"')
        assert "ud800" in text
        with pytest.raises(InputError, match="surrogates not allowed"):
            Tokenizer.from_json(text)

    def test_that_the_library_would_abort_the_process_over_is_refused(self) -> None:
        """It cuts the prefix off by its number of bytes, in the middle of a character, and no `except` stops that."""
        data = json.loads(definition("byte level"))
        data["model"]["continuing_subword_prefix"] = "x"
        code = "import sys, tokenizers; tokenizers.Tokenizer.from_str(sys.stdin.read())"
        run = [sys.executable, "-c", code]
        theirs = subprocess.run(run, input=json.dumps(data), capture_output=True, text=True, check=False)
        assert theirs.returncode != 0
        assert "Exception:" not in theirs.stderr
        for merges in (data["model"]["merges"], [" ".join(pair) for pair in data["model"]["merges"]]):
            data["model"]["merges"] = merges
            with pytest.raises(InputError, match="merges that do not fit its continuing_subword_prefix"):
                Tokenizer.from_json(json.dumps(data))

    def test_or_that_has_a_prefix_that_fits_is_read(self) -> None:
        unknown = "a"
        vocab = {unknown: 0, "##b": 1, "ab": 2, "[CLS]": 3}
        made = models.BPE(vocab, [("a", "##b")], continuing_subword_prefix="##", unk_token=unknown)
        theirs = tokenizers.Tokenizer(made)
        theirs.add_special_tokens(["[CLS]"])
        ours = Tokenizer.from_json(theirs.to_str())
        assert ours.encode("ab").tolist() == theirs.encode("ab").ids == [2]
        assert 3 not in ours.encode("[CLS]ab")
        theirs.add_special_tokens(["ab"])
        assert Tokenizer.from_json(theirs.to_str()).encode("ab").tolist() == [0, 1]

    def test_or_numbers_its_added_tokens_otherwise_is_refused(self) -> None:
        data = json.loads(definition("byte level"))
        data["added_tokens"].append(data["added_tokens"][0] | {"id": 5000, "content": "<gap>"})
        with pytest.raises(InputError, match="gives the added token '<gap>' the id 5000, its vocabulary says 400"):
            Tokenizer.from_json(json.dumps(data))

    def test_that_cannot_spell_a_text_says_so_when_it_meets_it(self) -> None:
        data = json.loads(definition("word level"))
        data["model"]["vocab"] = {"the": 0}
        data["added_tokens"] = []
        with pytest.raises(InputError, match=r"cannot encode the text: .*; try: .*Tokenizer.bytes\(\)"):
            Tokenizer.from_json(json.dumps(data)).encode("the unknown")

    def test_errors_that_are_not_the_librarys_pass_through(self) -> None:
        from locant.text.tokenizer.definition import LibraryErrors

        for error in (KeyError("a"), TypeError("b"), KeyboardInterrupt()):
            with pytest.raises(type(error)), LibraryErrors("cause", "remedy"):
                raise error
        with pytest.raises(InputError, match="cause: bare; try: remedy"), LibraryErrors("cause", "remedy"):
            raise Exception("bare")
