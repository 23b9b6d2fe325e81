"""Tokenizers with unusual flags, normalizers, splits and models have the library's ids, whichever engine runs them."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, processors, trainers
from tokenizers import normalizers as N
from tokenizers import pre_tokenizers as P

from locant.text import Tokenizer
from locant.text.tokenizer import engine as engines
from tests.text.tokenizer.zoo import TEXT, byte_level

Change = Callable[[tokenizers.Tokenizer], object]

ATOMS = [
    *(
        "the",
        " the",
        "a",
        "b",
        "ab",
        "x",
        "X",
        "ß",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "\u00a0",
        "\u3000",
        "\r\n",
        ".",
        "!",
    ),
    *(
        "?!",
        "'s",
        "-",
        "_",
        "1",
        "12",
        "345",
        "½",
        "é",
        "e\u0301",
        "\u212b",
        "A\u030a",
        "ﬁ",
        "İ",
        "日本",
        "語",
        "한",
        "я",
    ),
    *("א", "क", "क्", "🙂", "👩\u200d👧", "\u0301", "\ufeff", "\0", "<", "don't", "END", "▁", "##s", "Ġ", "</w>"),
]
UNKNOWN, UNKNOWN_WORD = "<unk>", "[UNK]"
TRAINING = [TEXT, "the END\nEND\n(END)END ▁the éab e\u0301x 日本 123\n" * 100]


def _trained(model: Any, trainer: Any, pre_tokenizer: Any = None, normalizer: Any = None) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(model)
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        made.normalizer = normalizer
    made.train_from_iterator(TRAINING, trainer)
    return made


def _bytes_and(learned: tokenizers.Tokenizer, **options: Any) -> tokenizers.Tokenizer:
    """A BPE with a token for each byte, to which it falls back."""
    model = json.loads(learned.to_str())["model"]
    names = [UNKNOWN, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocab = {name: number for number, name in enumerate(dict.fromkeys(names))}
    merges = [tuple(merge) for merge in model["merges"]]
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token=UNKNOWN, byte_fallback=True, **options))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def _unigram(**options: Any) -> tokenizers.Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=400, unk_token=UNKNOWN, special_tokens=[UNKNOWN], show_progress=False)
    made = _trained(models.Unigram(), trainer, P.Metaspace())
    pieces = [(piece, score) for piece, score in json.loads(made.to_str())["model"]["vocab"]]
    if options.get("byte_fallback"):
        pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    made.model = models.Unigram(pieces, unk_id=0, **options)
    return made


def _word_piece(**options: Any) -> tokenizers.Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=[UNKNOWN_WORD], show_progress=False)
    made = _trained(models.WordPiece(unk_token=UNKNOWN_WORD), trainer, P.BertPreTokenizer(), N.BertNormalizer())
    vocab = made.get_vocab(with_added_tokens=False)
    made.model = models.WordPiece(vocab, unk_token=UNKNOWN_WORD, **options)
    return made


def _bpe(pre_tokenizer: Any, normalizer: Any = None, **trained: Any) -> tokenizers.Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[UNKNOWN], show_progress=False, **trained)
    return _trained(models.BPE(unk_token=UNKNOWN), trainer, pre_tokenizer, normalizer)


def _as_llama_2() -> tokenizers.Tokenizer:
    steps = [N.Prepend("▁"), N.Replace(" ", "▁")]
    made = _bytes_and(_bpe(P.Metaspace(split=False)), fuse_unk=True)
    made.normalizer = N.Sequence(steps)
    return made


BASES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": byte_level,
    "byte fallback": lambda: _bytes_and(_bpe(P.Metaspace())),
    "as Llama 2": _as_llama_2,
    "as Gemma": lambda: _bytes_and(_bpe(P.Metaspace()), ignore_merges=True),
    "BPE of characters": lambda: _bpe(P.Whitespace()),
    "BPE, words end": lambda: _bpe(P.WhitespaceSplit(), end_of_word_suffix="</w>"),
    "BPE, words go on": lambda: _bpe(P.WhitespaceSplit(), continuing_subword_prefix="##"),
    "WordPiece": _word_piece,
    "WordPiece of short words": lambda: _word_piece(max_input_chars_per_word=4, continuing_subword_prefix="##"),
    "Unigram": _unigram,
    "Unigram, byte fallback": lambda: _unigram(byte_fallback=True),
    "WordLevel": lambda: _trained(
        models.WordLevel(unk_token=UNKNOWN_WORD),
        trainers.WordLevelTrainer(vocab_size=300, special_tokens=[UNKNOWN_WORD], show_progress=False),
        P.Whitespace(),
    ),
}


@functools.cache
def _base(name: str) -> str:
    return BASES[name]().to_str()


def _added(*names: str, special: bool = False, **flags: bool) -> Change:
    tokens = [AddedToken(name, **flags) for name in names]
    return lambda made: made.add_special_tokens(tokens) if special else made.add_tokens(tokens)


def _set(**steps: Any) -> Change:
    return lambda made: [setattr(made, name, step) for name, step in steps.items()]


def _levelled(*steps: Any, **options: Any) -> Change:
    return _set(pre_tokenizer=P.Sequence([*steps, P.ByteLevel(add_prefix_space=False, **options)]))


def _model(**fields: Any) -> Change:
    """Fields of the model, as the file spells them."""

    def change(made: tokenizers.Tokenizer) -> None:
        model = json.loads(made.to_str())["model"]
        vocab, merges = model["vocab"], [tuple(merge) for merge in model["merges"]]
        made.model = models.BPE(vocab, merges, **fields)

    return change


FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
NFC_TOKENS = _added("éa", "e\u0301x", "\u212b", normalized=True)

CASES: dict[str, tuple[str, list[Change]]] = {
    **{f"{name}, as it is": (name, []) for name in BASES},
    **{
        "tokens, " + (" ".join(itertools.compress(FLAGS, chosen)) or "no flag"): (
            "byte level",
            [_added("<tool>", "abx", " the", **dict(zip(FLAGS, chosen, strict=True)))],
        )
        for chosen in itertools.product([False, True], repeat=len(FLAGS))
    },
    **{
        f"tokens of every flag, {name}": (
            name,
            [
                _added("<tool>", "abx", normalized=False),
                _added("the", lstrip=True, rstrip=True),
                _added("END", single_word=True),
                _added("<|special|>", special=True, rstrip=True),
            ],
        )
        for name in BASES
    },
    "tokens, one begins another": ("byte level", [_added("<a>", "<a><b>", "<a")]),
    "tokens, overlapping": ("byte level", [_added("abx", "bxc", "xcd")]),
    "tokens, leftmost or longest": ("byte level", [_added("ab", "abc", "bcd")]),
    "tokens, runs of spaces": ("byte level", [_added(*(" " * size for size in range(2, 25)), normalized=False)]),
    "tokens, a space within": ("byte level", [_added("x the", "the ", "\n\n\n", "-\n")]),
    "tokens, mixed strips": ("byte level", [_added("ab", lstrip=True), _added("  "), _added("x", rstrip=True)]),
    "tokens, normalized and not": ("byte level", [_added("é "), _added(" the", normalized=False), _added("<tool")]),
    "tokens that are in the vocabulary": ("byte level", [_added("the", "Ġthe", "a")]),
    "tokens, NFC": ("byte level", [_set(normalizer=N.NFC()), NFC_TOKENS]),
    "tokens not normalized, NFC": (
        "byte level",
        [_set(normalizer=N.NFC()), _added("éa", "e\u0301x", "\u212b", normalized=False)],
    ),
    **{
        f"normalizer {name}": ("byte level", [_set(normalizer=step), _added("<Tool>", "AB"), NFC_TOKENS])
        for name, step in {
            "NFC": N.NFC(),
            "NFD": N.NFD(),
            "NFKC": N.NFKC(),
            "NFKD": N.NFKD(),
            "Lowercase": N.Lowercase(),
            "StripAccents": N.Sequence([N.NFD(), N.StripAccents()]),
            "Prepend": N.Prepend("▁"),
            "Replace": N.Replace(" ", "▁"),
            "Replace by a pattern": N.Replace(Regex(r"\s+"), " "),
            "Strip": N.Strip(),
            "BertNormalizer": N.BertNormalizer(),
            "Nmt": N.Nmt(),
            "an empty Sequence": N.Sequence([]),
            "nested Sequences": N.Sequence([N.Sequence([N.NFC()]), N.Sequence([])]),
            "NFC twice": N.Sequence([N.NFC(), N.NFC()]),
            "as ALBERT's": N.Sequence([N.Replace("``", '"'), N.NFKD(), N.StripAccents(), N.Lowercase()]),
        }.items()
    },
    "normalizer ByteLevel": ("byte level", [_set(normalizer=N.ByteLevel(), pre_tokenizer=P.Sequence([]))]),
    **{
        f"split {behavior}{', inverted' * invert}": (
            "byte level",
            [_levelled(P.Split(Regex(r"\s+|\d"), behavior, invert), use_regex=use_regex)],
        )
        for behavior in ("isolated", "removed", "merged_with_previous", "merged_with_next", "contiguous")
        for invert, use_regex in ((False, False), (True, True))
    },
    **{
        f"pre-tokenizer {name}": ("byte level", [step])
        for name, step in {
            "Digits": _levelled(P.Digits(individual_digits=False)),
            "Digits, each": _levelled(P.Digits(individual_digits=True), use_regex=False),
            "Punctuation": _levelled(P.Punctuation("contiguous")),
            "Punctuation removed": _levelled(P.Punctuation("removed")),
            "Whitespace": _levelled(P.Whitespace()),
            "WhitespaceSplit": _levelled(P.WhitespaceSplit(), use_regex=False),
            "CharDelimiterSplit": _levelled(P.CharDelimiterSplit("e")),
            "UnicodeScripts": _levelled(P.UnicodeScripts()),
            "BertPreTokenizer": _levelled(P.BertPreTokenizer()),
            "Metaspace": _levelled(P.Metaspace()),
            "a string to split at": _levelled(P.Split(" the", "isolated")),
            "ByteLevel twice": _levelled(P.ByteLevel(add_prefix_space=False)),
            "ByteLevel first": _set(pre_tokenizer=P.Sequence([P.ByteLevel(False), P.Digits()])),
            "a space before": _set(pre_tokenizer=P.ByteLevel(add_prefix_space=True)),
            "no pattern": _set(pre_tokenizer=P.ByteLevel(False, use_regex=False)),
            "an empty Sequence": _set(pre_tokenizer=P.Sequence([])),
        }.items()
    },
    **{
        f"Metaspace {scheme}, split {split}": (
            "byte fallback",
            [_set(pre_tokenizer=P.Metaspace(prepend_scheme=scheme, split=split)), _added("<tool>", "ab")],
        )
        for scheme, split in itertools.product(("always", "first", "never"), (True, False))
    },
    **{
        f"model, {name}": ("byte level", [_model(**fields), _added("END", "the")])
        for name, fields in {
            "ignore_merges": {"ignore_merges": True},
            "dropout": {"dropout": 0.0},
            "unk_token": {"unk_token": "<|endoftext|>"},
            "fuse_unk": {"unk_token": "<|endoftext|>", "fuse_unk": True},
            "byte_fallback": {"byte_fallback": True},
        }.items()
    },
    **{
        f"post-processor {name}": ("byte level", [_set(post_processor=step), _added("<tool>")])
        for name, step in {
            "Template": processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]),
            "Bert": processors.BertProcessing(("a", 1), ("b", 2)),
            "Roberta": processors.RobertaProcessing(("a", 1), ("b", 2), add_prefix_space=True),
            "ByteLevel": processors.ByteLevel(),
            "a Sequence": processors.Sequence([processors.ByteLevel(), processors.BertProcessing(("a", 1), ("b", 2))]),
        }.items()
    },
    "truncation and padding": ("byte level", [lambda made: (made.enable_truncation(5), made.enable_padding(length=9))]),
}


ENGINES = {
    "tokens, no flag": "gigatoken",
    "tokens, rstrip special": "gigatoken",
    "tokens, single_word": "tokenizers",
    "tokens, mixed strips": "tokenizers",
    "normalizer NFC": "tokenizers",
    "normalizer NFC twice": "tokenizers",
    "normalizer an empty Sequence": "gigatoken",
    "split isolated": "tokenizers",
    "as Llama 2, as it is": "tokenizers",
}


@functools.cache
def _definition(case: str) -> str:
    name, changes = CASES[case]
    made = tokenizers.Tokenizer.from_str(_base(name))
    for change in changes:
        change(made)
    return made.to_str()


def _oracle(text: str) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_str(text)
    made.no_truncation()
    made.no_padding()
    return made


def texts_of(tokenizer: Tokenizer, *, special: bool, seed: int, number: int, length: int) -> list[str]:
    """Random texts of what is hard and of the names of added tokens, with or without special ones."""
    luck = random.Random(seed)
    names = [token["content"] for token in tokenizer.added_tokens if special or not token["special"]]
    atoms = [*ATOMS, *(names + [f" {name}" for name in names] + [f"{name} " for name in names]) * 2]
    hidden = [] if special else [token["content"] for token in tokenizer.added_tokens if token["special"]]
    found = ["".join(luck.choices(atoms, k=luck.randint(0, length))) for _ in range(number)]
    for name in hidden:
        found = [text.replace(name, ".") for text in found]
    return found


@pytest.mark.parametrize("case", CASES)
def test_ids_are_those_of_the_library(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts below and above what `encode` gives to the fast engine, which is less here, and with special tokens."""
    monkeypatch.setattr(engines, "CHOICE_BYTES", 5_000)
    monkeypatch.setattr(engines, "PART_BYTES", 3_000)
    oracle, tokenizer = _oracle(_definition(case)), Tokenizer.from_json(_definition(case))

    def expected(texts: list[str]) -> list[list[int]]:
        return [one.ids for one in oracle.encode_batch(texts, add_special_tokens=False)]

    short = texts_of(tokenizer, special=False, seed=1, number=30, length=15)
    assert [tokenizer.encode(text).tolist() for text in short] == expected(short)
    long = texts_of(tokenizer, special=False, seed=2, number=2, length=9_000)
    wanted = expected([*long, *short])
    assert [row.tolist() for row in tokenizer.encode_batch([*long, *short])] == wanted
    assert [tokenizer.encode(text.encode()).tolist() for text in long] == wanted[:2]
    special = texts_of(tokenizer, special=True, seed=3, number=30, length=15)
    assert [tokenizer.encode(text, allowed_special="all").tolist() for text in special] == expected(special)


def test_both_engines_are_used() -> None:
    """So that neither is compared with itself alone."""
    used = [engines.choose_engine("auto", Tokenizer.from_json(_definition(case)), []).name for case in ENGINES]
    assert used == [*ENGINES.values()]
