"""A saved tokenizer is the same tokenizer, and its fingerprint says so."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from locant.errors import InputError, LocantError
from locant.text import Tokenizer, sample_text
from tests.text.tokenizer.zoo import KINDS, definition, loaded


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
            (("model", "ignore_merges"), True), (("model", "merges", 0), ["Ġ", "d"]),
            (("normalizer",), {"type": "Lowercase"}), (("pre_tokenizer", "add_prefix_space"), True),
            (("added_tokens", 0, "special"), False), (("added_tokens", 0, "lstrip"), True),
        ],
    )  # fmt: skip
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
            '{"model": {"type": "BPE", "vocab": {"a": 0, "b": 0, "ab": 0}, "merges": ["a b"]}}',
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
        with pytest.raises(InputError, match="gives the added token '<gap>' the id 5000, but its vocabulary has 400"):
            Tokenizer.from_json(json.dumps(data))

    def test_that_cannot_spell_a_text_says_so_when_it_meets_it(self) -> None:
        data = json.loads(definition("word level"))
        data["model"]["vocab"] = {"the": 0}
        data["added_tokens"] = []
        with pytest.raises(InputError, match=r"cannot encode the text: .*; try: .*Tokenizer.bytes\(\)"):
            Tokenizer.from_json(json.dumps(data)).encode("the unknown")

    def test_errors_that_are_not_the_librarys_pass_through(self) -> None:
        from locant.text.tokenizer.definition import library_errors

        for error in (KeyError("a"), TypeError("b"), KeyboardInterrupt()):
            with pytest.raises(type(error)), library_errors("cause", "remedy"):
                raise error
        with pytest.raises(InputError, match="cause: bare; try: remedy"), library_errors("cause", "remedy"):
            raise Exception("bare")
