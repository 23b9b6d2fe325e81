"""Engines give what the tokenizer gives, document by document, whichever library does the work."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, normalizers

from locant.errors import InputError, RangeError
from locant.text import Tokenizer
from locant.text.tokenizer import engine as engines
from locant.text.tokenizer.engine import Engine, choose_engine
from locant.text.tokenizer.gigatoken_engine import GigatokenEngine
from locant.text.tokenizer.probe_texts import PROBE_TEXTS
from tests.refusal import refuses
from tests.text.tokenizer.zoo import KINDS, SPLITS, TEXTS, loaded, rows, with_split

gigatoken = pytest.importorskip("gigatoken", reason="the fast engine needs the extra `fast`")

FAST = [
    "trained here", "byte level", "byte level, a word is special", "byte level, every flag", "byte level, normalized",
    "byte level, a space before", "byte level, a token strips", "byte level, with dropout",
]  # fmt: skip


class TestEncode:
    @pytest.mark.parametrize("kind", [*KINDS, *SPLITS])
    @pytest.mark.parametrize("name", ["tokenizers", "gigatoken"])
    def test_is_encode_of_each(self, kind: str, name: str) -> None:
        if name == "gigatoken" and kind not in (*FAST, *SPLITS):
            pytest.skip("refused, see below")
        engine, texts = choose_engine(name, loaded(kind), TEXTS), [*TEXTS, *PROBE_TEXTS]  # type: ignore[arg-type]
        ids, lengths = engine.encode(texts)
        assert (engine.name, ids.dtype, lengths.dtype) == (name, np.int32, np.int64)
        assert rows(ids, lengths) == [loaded(kind).encode(text).tolist() for text in texts]

    @pytest.mark.parametrize("name", ["tokenizers", "gigatoken"])
    def test_of_nothing_is_nothing(self, name: str) -> None:
        engine = Engine(loaded("byte level"), name)  # type: ignore[arg-type]
        for documents in ([], [b""], [b"", b""]):
            ids, lengths = engine.encode(documents)
            assert (ids.tolist(), lengths.tolist()) == ([], [0] * len(documents))

    def test_composes_letters_as_the_trusted_engine_does(self) -> None:
        """A Malayalam mark of 2017 is put in another order by gigatoken, and not by tokenizers, which is older."""
        made, text = loaded("byte level, normalized"), "x\u05b9\u0d3b e\u0301 日".encode()
        theirs = gigatoken.Tokenizer.from_json(made.to_json())
        expected = made.encode(text).tolist()
        assert theirs.encode_batch([text], parallel=False).to_list() != [expected]
        for others in ([], [b"x\xff"]):
            assert rows(*Engine(made, "gigatoken").encode([b"plain", text, *others]))[1] == expected


class TestChoice:
    def test_says_why(self) -> None:
        reasons = {kind: choose_engine("auto", loaded(kind), TEXTS) for kind in (*KINDS, *SPLITS)}
        assert [kind for kind, engine in reasons.items() if engine.name == "gigatoken"] == [*FAST, *SPLITS]
        assert reasons["byte level"].reason == "its ids are those of tokenizers on a sample of the texts"
        assert reasons["bytes"].reason == "every byte is an id, so there is nothing to look up"
        assert reasons["word piece"].reason == "the tokenizer is not a byte-level BPE"
        assert "Unknown pre_tokenizer Split regexes" in reasons["byte level, whole words"].reason
        made = with_split(*SPLITS["Llama 3"], normalizer=normalizers.NFKC())
        assert choose_engine("auto", made, []).reason == "the tokenizer changes texts first (NFKC)"

    def test_by_name_is_kept_or_refused(self) -> None:
        assert choose_engine("tokenizers", loaded("byte level"), TEXTS).reason == "asked for"
        with pytest.raises(
            InputError, match="gigatoken cannot be used here: the tokenizer is not a byte-level BPE; try: "
        ):
            choose_engine("gigatoken", loaded("unigram"), TEXTS)
        with refuses(RangeError, "'fast'", "engine="):
            choose_engine("fast", loaded("byte level"), TEXTS)  # type: ignore[arg-type]

    def test_without_gigatoken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "gigatoken", None)
        assert choose_engine("auto", loaded("byte level"), TEXTS).reason.startswith("gigatoken is not installed: pip")
        with pytest.raises(InputError, match=r"not installed: pip install 'locant\[fast\]'"):
            choose_engine("gigatoken", loaded("byte level"), TEXTS)

    @pytest.mark.parametrize(
        "where", [b"a word of the sample", PROBE_TEXTS[20], None], ids=["sample", "probe", "lengths"]
    )
    def test_another_id_anywhere_is_found(self, monkeypatch: pytest.MonkeyPatch, where: bytes | None) -> None:
        """And the same ids in other documents."""
        real = GigatokenEngine.encode

        def wrong(self: GigatokenEngine, texts: list[bytes], is_utf8: bool) -> tuple[np.ndarray, np.ndarray]:
            ids, lengths = (x.copy() for x in real(self, texts, is_utf8))
            if where is None:
                lengths[int(np.flatnonzero(lengths)[0]) :][:2] += [-1, 1]
            else:
                ids[lengths[: texts.index(where)].sum()] ^= 1
            return ids, lengths

        monkeypatch.setattr(GigatokenEngine, "encode", wrong)
        engine = choose_engine("auto", loaded("byte level"), [b"one", b"a word of the sample"])
        told = "gigatoken gives other ids for " + ("" if where is None else repr(where[:60]))
        assert (engine.name, engine.reason[: len(told)]) == ("tokenizers", told)
        with pytest.raises(InputError, match="gives other ids"):
            choose_engine("gigatoken", loaded("byte level"), [b"one", b"a word of the sample"])

    def test_every_special_token_is_spelled_to_both(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked, encode = list[list[bytes]](), Engine.encode
        monkeypatch.setattr(Engine, "encode", lambda self, texts: (asked.append([*texts]), encode(self, texts))[1])
        special = loaded("trained here")
        choose_engine("auto", special, [b"a text without any"])
        assert len(asked) == 2
        for texts in asked:
            assert all(any(name.encode() in text for text in texts) for name in special.special_tokens)

    def test_a_panic_is_a_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class PanicException(BaseException):
            """As Rust's panics come to Python."""

        class Panicking:
            def encode_batch(self, texts: list[bytes], parallel: bool | None) -> None:
                raise PanicException("index out of bounds\nat src/lib.rs")

        monkeypatch.setattr(GigatokenEngine, "_build", lambda self: Panicking())
        engine = choose_engine("auto", loaded("byte level"), TEXTS)
        assert (engine.name, engine.reason) == ("tokenizers", "gigatoken fails: index out of bounds")


def with_tokens(*tokens: AddedToken, composes: bool = False) -> Tokenizer:
    library = tokenizers.Tokenizer.from_str(loaded("trained here").to_json())
    if composes:
        library.normalizer = normalizers.NFC()
    library.add_tokens([*tokens])
    return Tokenizer.from_json(library.to_str())


UNUSUAL = {
    "whole words": ([AddedToken("Hamlet", single_word=True)], False, "'Hamlet' is only found as a whole word"),
    "composed by the normalizer": ([AddedToken("e\u0301x")], True, "may be changed by its normalizer"),
    "strips before another": ([AddedToken("ab", lstrip=True), AddedToken("  ")], False, "'ab' strips white space"),
    "one is found first": ([AddedToken("é "), AddedToken(" the", normalized=False)], False, "may overlap"),
    "one in another": ([AddedToken("abxc"), AddedToken("bx", normalized=False)], False, "may overlap"),
}

USUAL = {
    "names": [AddedToken("<think>"), AddedToken("</think>"), AddedToken("<think")],
    "not normalized": [AddedToken("<a>", normalized=False), AddedToken("<a><b>", normalized=False)],
    "runs of spaces": [AddedToken(" " * size, normalized=False) for size in range(2, 25)],
    "one strips": [AddedToken("<fim>", lstrip=True, rstrip=True)],
}


class TestAddedTokens:
    @pytest.mark.parametrize("case", UNUSUAL)
    def test_that_are_found_elsewhere_are_refused_by_name(self, case: str) -> None:
        tokens, composes, said = UNUSUAL[case]
        engine = choose_engine("auto", with_tokens(*tokens, composes=composes), [b"plain"])
        assert engine.name == "tokenizers"
        assert said in engine.reason

    @pytest.mark.parametrize("composes", [False, True])
    @pytest.mark.parametrize("case", USUAL)
    def test_have_the_same_ids(self, case: str, composes: bool) -> None:
        tokenizer = with_tokens(*USUAL[case], composes=composes)
        engine, random = choose_engine("gigatoken", tokenizer, []), np.random.default_rng(0)
        atoms = [*(token.content for token in USUAL[case]), "a", " ", "  ", "\n", "é", "e\u0301", "1", "<", "the "]
        texts = ["".join(random.choice(atoms, 20)) for _ in range(300)]
        expected = [tokenizers.Tokenizer.encode(_reference(tokenizer), text).ids for text in texts]
        assert rows(*engine.encode([text.encode() for text in texts])) == expected

    def test_are_all_spelled_to_both(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked, encode = list[list[bytes]](), Engine.encode
        monkeypatch.setattr(Engine, "encode", lambda self, texts: (asked.append([*texts]), encode(self, texts))[1])
        choose_engine("auto", with_tokens(*USUAL["names"]), [])
        assert all(any(token.content.encode() in text for text in asked[0]) for token in USUAL["names"])

    def test_a_normalizer_that_does_nothing_is_none(self) -> None:
        library = tokenizers.Tokenizer.from_str(loaded("trained here").to_json())
        library.normalizer = normalizers.Sequence([])  # as DeepSeek's
        made = Tokenizer.from_json(library.to_str())
        assert (choose_engine("auto", made, TEXTS).name, made.lossless) == ("gigatoken", True)


def _reference(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The library's own, without the special token, which is not spelled here."""
    return tokenizers.Tokenizer.from_str(tokenizer.to_json())


class TestOnDemand:
    TEXT = "the cat's hat né 日本 <|endoftext|>\n\n  12 " * 400

    @pytest.fixture(autouse=True)
    def _little_is_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engines, "CHOICE_BYTES", 20_000)

    def test_encode_uses_the_fast_engine_for_much_text(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenizer = Tokenizer.from_json(loaded("trained here").to_json())
        expected = tokenizers.Tokenizer.encode_batch(tokenizer._encoder(()), [self.TEXT, "", "a", "\ufffd", self.TEXT])
        texts = [self.TEXT, "", b"a", "\ud800", self.TEXT.encode()]
        calls = list[int]()
        run = GigatokenEngine.encode
        monkeypatch.setattr(GigatokenEngine, "encode", lambda self, *given: (calls.append(1), run(self, *given))[1])
        for _ in range(2):
            found = tokenizer.encode_batch(texts)
            assert [row.tolist() for row in found] == [one.ids for one in expected]
            assert all(row.dtype == np.int32 and row.flags.writeable and row.base is None for row in found)
        assert len(calls) >= 3, "a check and two calls"
        assert tokenizer.encode(self.TEXT, allowed_special="all").size < expected[0].ids.__len__()

    def test_another_thread_and_a_document_that_cannot_be_cut_are_no_obstacle(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engines, "PART_BYTES", 1000)
        monkeypatch.setattr(engines, "MAX_UNCUT_BYTES", 20_000)
        tokenizer = Tokenizer.from_json(loaded("trained here").to_json())
        assert tokenizer.encode("a" * 30_000).size == tokenizer.encode_by_reference(["a" * 30_000])[0].size
        with tokenizer._fast._lock:
            assert tokenizer.encode(self.TEXT).tolist() == tokenizer.encode_by_reference([self.TEXT])[0].tolist()


class TestLongDocuments:
    def test_that_cannot_be_cut_are_refused_in_words(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engines, "PART_BYTES", 100)
        monkeypatch.setattr(engines, "MAX_UNCUT_BYTES", 1000)
        engine = Engine(loaded("byte level"))
        assert engine.encode([b"a" * 1000])[1].tolist() == [engine.tokenizer.encode(b"a" * 1000).size]
        for refused in (lambda: engine.encode([b"a" * 1001]), lambda: list(engine.stream([([b"a" * 1001], True)]))):
            with pytest.raises(
                InputError, match=r"1001 bytes or more .* it has no letter before white.*try: pass separator="
            ):
                refused()
        with pytest.raises(InputError, match="because its normalizer Prepend would write its text before every part"):
            Engine(loaded("byte fallback")).encode([b"a b " * 300])
        assert len(Engine(Tokenizer.bytes()).encode([b"a" * 5000])[0]) == 5000
