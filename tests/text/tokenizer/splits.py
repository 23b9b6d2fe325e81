"""Byte-level BPEs that split words as the models do whose tokenizers people load most.

They are trained on what is hard to split, so that a word which is split otherwise has other ids.
"""

from __future__ import annotations

import functools
import random

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from locant.text import Tokenizer
from locant.text.tokenizer.local_files import ENCODINGS
from tests.text.tokenizer.zoo import definition

__all__ = ["ATOMS", "SPLITS", "tokenizer", "with_split"]

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


def with_split(*patterns: str, normalizer: tokenizers.normalizers.Normalizer | None = None) -> Tokenizer:
    """A byte-level BPE that splits by these patterns."""
    made = tokenizers.Tokenizer(models.BPE())
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, level]) if patterns else level
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([_hard_text()], trainer)
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    if normalizer is not None:
        made.normalizer = normalizer
    return Tokenizer.from_json(made.to_str())


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    """One of the zoo, or one of these."""
    return with_split(*SPLITS[kind]) if kind in SPLITS else Tokenizer.from_json(definition(kind))
