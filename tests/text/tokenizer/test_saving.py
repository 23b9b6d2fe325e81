"""A saved tokenizer is the same tokenizer, and its fingerprint says so."""

from __future__ import annotations

import copy
import json
import os
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest

from locant.errors import InputError
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
