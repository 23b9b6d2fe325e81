"""Small tokenizers of every kind, as other programs write them, for tests that must hold for all."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from locant.text import Tokenizer, sample_text
from locant.text.tokenizer.local_files import ENCODINGS

TEXT = sample_text()[:60_000]
LETTERS = [chr(code) for code in range(0x21, 0x7F)]


def byte_level(
    vocab_size: int = 400, special: tuple[str, ...] = ("<|endoftext|>",), **options: Any
) -> tokenizers.Tokenizer:
    """As the library's own users train it: the special tokens known from the start."""
    made = tokenizers.Tokenizer(models.BPE(**options))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT, "the END\nEND\n(END)END\n" * 400], trainer)
    return made


def _merged_special() -> tokenizers.Tokenizer:
    """A special token that is an ordinary word too: training has merges that make it."""
    made = byte_level(special=("END", "<|endoftext|>"))
    assert any("".join(pair) == "END" for pair in json.loads(made.to_str())["model"]["merges"])
    return made


def _with(**steps: Any) -> tokenizers.Tokenizer:
    """With other steps than those that it was trained with."""
    made = byte_level()
    for name, step in steps.items():
        setattr(made, name, step)
    return made


def _split_at_spaces(behavior: str) -> Any:
    split = pre_tokenizers.Split(tokenizers.Regex(r"\s"), behavior)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])


def _whole_words() -> tokenizers.Tokenizer:
    """A word that is in the vocabulary is taken from there, merges or not; with a word that is special."""
    made = byte_level()
    data = json.loads(made.to_str())
    data["model"]["ignore_merges"] = True
    made = tokenizers.Tokenizer.from_str(json.dumps(data))
    made.pre_tokenizer = _split_at_spaces("isolated")
    return made


def _flags() -> tokenizers.Tokenizer:
    """Special tokens of every flag, ordinary added tokens, a text around the text, truncation and padding."""
    made = byte_level()
    made.add_special_tokens(
        [
            AddedToken("<mask>", lstrip=True),
            AddedToken("<right>", rstrip=True),
            AddedToken("<word>", single_word=True),
            AddedToken("<Normal>", normalized=True),
            AddedToken("<|im_start|>", normalized=False),
            AddedToken("éé", normalized=False),
        ]
    )
    made.add_tokens([AddedToken("<think>", normalized=False), AddedToken("\n\n\n", normalized=False)])
    made.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|endoftext|>",
        special_tokens=[(name, made.token_to_id(name)) for name in ("<|im_start|>", "<|endoftext|>")],
    )
    made.enable_truncation(5)
    made.enable_padding(length=20, pad_id=1)
    return made


def _word_piece() -> tokenizers.Tokenizer:
    """As BERT has it: lower case, [CLS] and [SEP] around, [UNK] for unknown words."""
    unknown = "[UNK]"
    special = ["[PAD]", unknown, "[CLS]", "[SEP]", "[MASK]"]
    words = ["the", "cat", "cls", "sep", "mask", "##s", "##ing"]
    pieces = [*special, *LETTERS, *("##" + letter for letter in LETTERS), *words]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    made = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=unknown, max_input_chars_per_word=100))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    made.add_special_tokens(special)
    return made


def _unigram() -> tokenizers.Tokenizer:
    """As T5 has it: the special tokens are pieces like the others, of score 0."""
    special = ["<pad>", "</s>", "<unk>"]
    pieces = [(name, 0.0) for name in special] + [("▁", -3.0), *((letter, -5.0) for letter in LETTERS)]
    made = tokenizers.Tokenizer(models.Unigram([*pieces, ("▁the", -2.0), ("ing", -2.5)], unk_id=2, byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    made.add_special_tokens([*special, "<extra_id_0>"])
    return made


def _word_level() -> tokenizers.Tokenizer:
    """Whole words between spaces, the special ones among them."""
    unknown = "[UNK]"
    vocab = {unknown: 0, "[CLS]": 1, "the": 2, "cat": 3}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([unknown, "[CLS]"])
    return made


def _byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2 has it: merges over text in which spaces are ▁, bytes for what is unknown."""
    unknown = "<unk>"
    special = [unknown, "<s>", "</s>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS, "▁t", "he", "▁the"]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.add_special_tokens([AddedToken(name, normalized=True) for name in special])
    return made


def _strips() -> tokenizers.Tokenizer:
    """An ordinary added token that takes the spaces around it along."""
    made = byte_level()
    made.add_tokens([AddedToken("<think>", normalized=False, lstrip=True, rstrip=True)])
    return made


def _words_end() -> tokenizers.Tokenizer:
    """As CLIP has it: the last piece of a word is another than the same piece elsewhere."""
    data = json.loads(byte_level().to_str())
    vocab = data["model"]["vocab"]
    data["model"]["vocab"] = {**vocab, **{f"{piece}</w>": 1000 + number for piece, number in vocab.items()}}
    data["model"]["end_of_word_suffix"] = "</w>"
    return tokenizers.Tokenizer.from_str(json.dumps(data))


KINDS = {
    "bytes": lambda: tokenizers.Tokenizer.from_str(Tokenizer.bytes().to_json()),
    "trained here": lambda: tokenizers.Tokenizer.from_str(
        Tokenizer.train(TEXT, 400, ("<|endoftext|>", "<pad>")).to_json()
    ),
    "byte level": byte_level,
    "byte level, a word is special": _merged_special,
    "byte level, whole words": _whole_words,
    "byte level, every flag": _flags,
    "byte level, normalized": lambda: _with(normalizer=normalizers.NFC()),
    "byte level, a space before": lambda: _with(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "byte level, spaces dropped": lambda: _with(pre_tokenizer=_split_at_spaces("removed")),
    "byte level, a token strips": _strips,
    "byte level, words end": _words_end,
    "byte level, with dropout": lambda: byte_level(dropout=0.9),  # only the file says so
    "word piece": _word_piece,
    "unigram": _unigram,
    "word level": _word_level,
    "words": lambda: tokenizers.Tokenizer.from_str(Tokenizer.words(TEXT[:9_000]).to_json()),
    "byte fallback": _byte_fallback,
}


@functools.cache
def definition(kind: str) -> str:
    """The `tokenizer.json` of one kind."""
    return KINDS[kind]().to_str()


def library(kind: str) -> tokenizers.Tokenizer:
    """The library's tokenizer of one kind: a fresh one, that no setting of ours has touched."""
    return tokenizers.Tokenizer.from_str(definition(kind))


def forbidden(tokenizer: Tokenizer) -> set[int]:
    """Every special id but the one for unknown words: that is what a word of an unknown spelling gets."""
    return {number for name, number in tokenizer.special_tokens.items() if "unk" not in name.lower()}


surrogates = st.sampled_from("\ud800\ud83d\udbff\udc00\ude42\udfff")
# A union of characters would be drawn from as one set, in which the surrogates are few.
any_text = st.lists(st.text(max_size=10) | surrogates, max_size=8).map("".join)
plain_text = st.text(st.sampled_from("the catsing \n\tÉé日本🙂<>|[]/ENDx0.▁Ġ"), max_size=60)


def well_formed(text: str) -> str:
    """The rule, written another way: pairs of surrogates are characters, single ones are U+FFFD."""
    pair = re.compile("([\ud800-\udbff])([\udc00-\udfff])")
    joined = pair.sub(lambda m: chr(0x10000 + (ord(m[1]) - 0xD800) * 0x400 + ord(m[2]) - 0xDC00), text)
    return re.sub("[\ud800-\udfff]", "\ufffd", joined)


ATOMS = [
    *(" ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\x0b"),
    *("a", "B", "the", "don't", "'s", "'S", "'", "'re", "s", "1", "23", ".", "!?", "/", "-", "_", "\0"),
    *("é", "e\u0301", "日", "の", "한", "я", "א", "ش", "क", "ก", "ß", "٣", "½", "🙂", "\u0301"),
    *("<|endoftext|>", "<think>", "\n\n\n", "END"),
]
"""What is hard to split."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"

_GPT_4O = "|".join(
    [
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?", f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?", r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACE,
    ]
)  # fmt: skip
# As it stands in the file: with the characters themselves, a carriage return and a newline.
_DEEPSEEK = [
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+",
    " ?[\\p{P}\\p{S}]+[\r\n]*",
    "\\s*[\r\n]+",
    r"\s+(?!\S)|\s+",
]

SPLITS: dict[str, list[str]] = {
    "GPT-2": [],
    "GPT-4": [ENCODINGS["cl100k_base"].pattern or ""],
    "GPT-4o": [ENCODINGS["o200k_base"].pattern or ""],
    "GPT-4o, converted": [_GPT_4O],
    "Llama 3": [rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}|{_SPACE}"],
    "Qwen 2": [rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}|{_MARKS}|{_SPACE}"],
    "DeepSeek": [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", "|".join(_DEEPSEEK)],
}
"""The patterns by which each splits, one after the other; GPT-2's is built into the library."""


def _hard_text() -> str:
    luck = random.Random(0)
    return "".join(luck.choice(ATOMS) for _ in range(40_000))


def with_split(
    *patterns: str, normalizer: Any = None, texts: Sequence[str] | None = None, vocab_size: int = 1500
) -> Tokenizer:
    """A byte-level BPE that splits by these patterns."""
    made = tokenizers.Tokenizer(models.BPE())
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, level]) if patterns else level
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([_hard_text()] if texts is None else texts, trainer)
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    if normalizer is not None:
        made.normalizer = normalizer
    return Tokenizer.from_json(made.to_str())


@functools.cache
def loaded(kind: str) -> Tokenizer:
    """One of the zoo, or one of these, as ours."""
    return with_split(*SPLITS[kind]) if kind in SPLITS else Tokenizer.from_json(definition(kind))


TEXTS = [b"", b"the cat's hat\n\n  sat", "né 日本 <|endoftext|> END".encode(), b"", b"a\xff\xfeb", b" "]
"""Documents for engines: none, words, a special token, and bytes that are not UTF-8."""


def rows(ids: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    """The ids of each document, from the ids of all and the length of each."""
    assert lengths.sum() == len(ids)
    return [row.tolist() for row in np.split(ids, np.cumsum(lengths)[:-1])]
