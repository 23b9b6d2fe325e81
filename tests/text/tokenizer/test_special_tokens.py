"""Text is only text: no spelling of a special token becomes one, unless it is allowed by name."""

from __future__ import annotations

import itertools
import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from locant.errors import InputError
from locant.text import Tokenizer
from locant.text.tokenizer.definition import hide_tokens
from tests.text.tokenizer.zoo import KINDS, definition, forbidden, library, loaded


def spellings(name: str) -> list[str]:
    """A special token's spelling, in every company that could make it be recognised."""
    around = [
        "{}", " {}", "{} ", " {} ", "a{}", "{}b", "the {} cat", "\n{}\n", "{0}{0}", "{0} {0}", "\t{}", ".{}.",
        "\u2581{}",
    ]  # fmt: skip
    changed = {name, name.lower(), name.upper(), name.replace("<", "< "), name[:-1] + "\u200b" + name[-1:]}
    return [place.format(each) for place in around for each in sorted(changed)]


class TestPlainText:
    @pytest.mark.parametrize("kind", KINDS)
    def test_is_never_a_special_token_however_it_is_spelled(self, kind: str) -> None:
        tokenizer = loaded(kind)
        assert forbidden(tokenizer)
        for name in tokenizer.special_tokens:
            for text in spellings(name):
                for given_as in (text, text.encode(), b"\xff" + text.encode() + b"\xff"):
                    assert not forbidden(tokenizer) & {*tokenizer.encode(given_as).tolist()}, (name, given_as)

    def test_keeps_its_ordinary_added_tokens(self) -> None:
        tokenizer = loaded("byte level, every flag")
        number = library("byte level, every flag").token_to_id("<think>")
        assert "<think>" not in tokenizer.special_tokens
        assert tokenizer.encode("a<think>").tolist()[-1] == number

    def test_gets_nothing_put_around_it(self) -> None:
        cls, sep = 2, 3
        assert library("word piece").encode("the cat").ids[0] == cls
        assert not {cls, sep} & {*loaded("word piece").encode("the cat").tolist()}

    def test_is_not_repeated(self) -> None:
        """A post-processor may put the text twice, and the library does even where no special tokens are added."""
        theirs = library("byte level")
        theirs.post_processor = processors.TemplateProcessing(single="$A $A", special_tokens=[])
        once = library("byte level").encode("the cat").ids
        assert Tokenizer.from_json(theirs.to_str()).encode("the cat").tolist() == once
        assert theirs.encode("the cat", add_special_tokens=False).ids == once * 2

    def test_of_unknown_words_still_is_unknown(self) -> None:
        tokenizer = loaded("word level")
        assert tokenizer.encode("the [CLS] dog [UNK]").tolist() == [2, 0, 0, 0]
        assert loaded("unigram").encode("日").tolist()[-1] == loaded("unigram").special_tokens["<unk>"]

    @pytest.mark.parametrize(("kind", "unknown"), [("BPE", None), ("BPE", "<unk>"), ("Unigram", "<unk>")])
    def test_falls_back_to_bytes_that_are_flagged_special(self, kind: str, unknown: str | None) -> None:
        """The only way to train byte fallback with the library flags these tokens so (tokenizers#1407)."""
        names = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁helo"]
        if kind == "BPE":
            vocab = {name: number for number, name in enumerate(names)}
            model = models.BPE(vocab=vocab, merges=[], unk_token=unknown, byte_fallback=True)
        else:
            model = models.Unigram([(name, -1.0) for name in names], 0, byte_fallback=True)
        theirs = tokenizers.Tokenizer(model)
        theirs.pre_tokenizer = pre_tokenizers.Metaspace()
        theirs.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        theirs.add_special_tokens([AddedToken(name, special=True) for name in names[:258]])
        tokenizer, text = Tokenizer.from_json(theirs.to_str()), "hello 日本 ö 😀"
        assert tokenizer.encode(text).tolist() == theirs.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
        if kind == "BPE":  # a Unigram model finds every entry of its vocabulary in a text, this one too
            spelled = tokenizer.encode("<0xE6>").tolist()
            assert 2 + 0xE6 not in spelled
            assert tokenizer.decode(spelled) == "<0xE6>"

    def test_cannot_spell_the_hidden_name(self) -> None:
        """Special tokens are renamed to something random, so nothing that is written in the code makes one."""
        names = [
            {token["content"] for token in hide_tokens(json.loads(definition("word level")), {"[CLS]"})["added_tokens"]}
            for _ in range(2)
        ]
        assert names[0] & names[1] == {"[UNK]"}
        (hidden,) = names[0] - {"[UNK]"}
        assert len(hidden) >= 32

    def test_cannot_be_normalized_into_the_hidden_name(self) -> None:
        """A normalizer that takes away what is random in it would leave the name itself."""
        unknown = "?"
        theirs = tokenizers.Tokenizer(models.WordLevel({"CLS": 0, "the": 1, unknown: 2}, unk_token=unknown))
        theirs.normalizer = normalizers.Replace(tokenizers.Regex("[0-9a-f]"), "")
        theirs.add_special_tokens([AddedToken("CLS", normalized=True)])
        assert 0 in theirs.encode("aCLSb").ids
        assert 0 not in Tokenizer.from_json(theirs.to_str()).encode("aCLSb")


class TestAllowed:
    def test_one_is_recognised_and_the_others_are_text(self) -> None:
        tokenizer = Tokenizer.train("some text", special_tokens=("<|endoftext|>", "<pad>"))
        end, pad = tokenizer.special_tokens["<|endoftext|>"], tokenizer.special_tokens["<pad>"]
        text = "a<|endoftext|><pad>b"
        for allowed in (["<|endoftext|>"], {"<|endoftext|>"}, "<|endoftext|>", {"<|endoftext|>": end}):
            ids = tokenizer.encode(text, allowed_special=allowed).tolist()
            assert end in ids
            assert pad not in ids
        assert tokenizer.encode(text, allowed_special=tokenizer.special_tokens).tolist() == [
            *tokenizer.encode("a"), end, pad, *tokenizer.encode("b"),
        ]  # fmt: skip
        assert {end, pad} & {*tokenizer.encode(text)} == set()

    @pytest.mark.parametrize("kind", KINDS)
    def test_ones_are_those_named_for_every_choice(self, kind: str) -> None:
        tokenizer = loaded(kind)
        names = [name for name in tokenizer.special_tokens if "unk" not in name.lower()][:3]
        text = " the ".join(names)
        for size in range(len(names) + 1):
            for allowed in itertools.combinations(names, size):
                ids = {*tokenizer.encode(text, allowed_special=allowed).tolist()} & forbidden(tokenizer)
                assert ids == {tokenizer.special_tokens[name] for name in allowed}

    def test_once_is_not_allowed_for_ever(self) -> None:
        tokenizer = Tokenizer.bytes()
        before = tokenizer.encode("<|endoftext|>").tolist()
        assert tokenizer.encode("<|endoftext|>", allowed_special=["<|endoftext|>"]).tolist() == [256]
        assert tokenizer.encode("<|endoftext|>").tolist() == before == list(b"<|endoftext|>")

    def test_in_bytes_and_batches_too(self) -> None:
        tokenizer = Tokenizer.bytes()
        texts = ["<|endoftext|>a", b"\xff<|endoftext|>\xfe", ""]
        ids = tokenizer.encode_batch(texts, allowed_special=["<|endoftext|>"])
        assert [row.tolist() for row in ids] == [[256, 97], [255, 256, 254], []]

    def test_all_of_them_as_tiktoken_says_it(self) -> None:
        tokenizer = Tokenizer.train("the cat", special_tokens=["<|a|>", "<|b|>"])
        ids = tokenizer.encode("<|b|>e<|a|>", allowed_special="all").tolist()
        assert ids == [tokenizer.special_tokens["<|b|>"], tokenizer.id_of("e"), tokenizer.special_tokens["<|a|>"]]
        assert tokenizer.encode("<|b|>").size == 5  # and nothing is allowed afterwards
        plain = Tokenizer.train("the cat", special_tokens=())
        assert plain.encode("<|b|>", allowed_special="all").size == 5
        with pytest.raises(InputError, match="got 'all' in allowed_special"):
            tokenizer.encode("<|b|>", allowed_special=["all"])

    @pytest.mark.parametrize("name", ["<|end|>", "a", ""])
    def test_names_must_be_special_tokens(self, name: str) -> None:
        with pytest.raises(
            InputError, match=r"in allowed_special, which is not a special token; try: use some of: '<\|endof"
        ):
            Tokenizer.bytes().encode("text", allowed_special=[name])
        with pytest.raises(InputError, match="some of: none"):
            Tokenizer.train("text", special_tokens=()).encode("text", allowed_special=["<|endoftext|>"])


class TestABytesSpelling:
    def test_as_a_special_token_is_refused_unless_it_is_allowed(self) -> None:
        """Hidden, it would take a byte with it, and text would lose that byte without a word."""
        theirs = library("byte level")
        theirs.add_special_tokens([AddedToken("é", normalized=False)])
        tokenizer = Tokenizer.from_json(theirs.to_str())
        assert not tokenizer.lossless
        with pytest.raises(InputError, match=r"got the special token 'é', which also spells the byte 0xe9"):
            tokenizer.encode("text")
        assert tokenizer.encode("te", allowed_special=["é"]).size

    def test_elsewhere_is_only_a_letter(self) -> None:
        vocab = {letter: number for number, letter in enumerate(["[UNK]", "a", "é"])}
        theirs = tokenizers.Tokenizer(models.WordPiece(vocab))
        theirs.pre_tokenizer = pre_tokenizers.Whitespace()
        theirs.add_special_tokens(["é"])
        assert Tokenizer.from_json(theirs.to_str()).encode("a é a").tolist() == [1, 0, 1]
