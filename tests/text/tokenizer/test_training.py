"""Training a tokenizer: the same from the same texts, in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from locant.errors import InputError, RangeError
from locant.text import Tokenizer, sample_text
from tests.refusal import refuses


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
