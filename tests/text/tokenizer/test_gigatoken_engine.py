"""The fast engine and the trusted one know different versions of Unicode; their ids are the same all the same."""

from __future__ import annotations

import functools
import unicodedata

import numpy as np
import pytest
import tokenizers

from locant.text import Tokenizer
from locant.text.tokenizer.engine import Engine
from locant.text.tokenizer.local_files import ENCODINGS

pytest.importorskip("gigatoken", reason="the fast engine needs the extra `fast`")

TEMPLATES = (
    "{c}", "a{c}", "{c}a", "1{c}", "{c}1", " {c}", "{c} ", "{c}'s", "'{c}", "{c}{c}", ".{c}", "{c}.", "a{c}b", "1{c}2",
    "\u00e9{c}\u00e9", " {c}\n", "{c}\n", "\n{c}", "{c}'ll x", "A{c}a", "a{c}A", "\u65e5{c}\u65e5",
)  # fmt: skip
BRIEFLY = ("a{c}Ab1{c}.{c} {c}'s\n",)
NEW = (0x088F, 0x0C5C, 0x1ACF, 0xA7CE, 0x10940, 0x11F04, 0x16EC0, 0x1E4D0, 0x2EBF0, 0x31350, 0x323B0, 0x3295C)
CODES = [code for code in (*range(0x80, 0x33480), *range(0xE0000, 0xE0200)) if not 0xD800 <= code < 0xE000]


def is_one_of_many(code: int) -> bool:
    """An ideograph among ideographs, and what is private or unknown among the same: fifteen of sixteen of those."""
    return code >= 0x3100 and code % 16 > 0 and unicodedata.category(chr(code)) in ("Lo", "So", "Co", "Cn")


def document(code: int, templates: tuple[str, ...] = TEMPLATES) -> bytes:
    return "\x01\x02".join(template.format(c=chr(code)) for template in templates).encode()


@functools.cache
def trained(pattern: str | None) -> Tokenizer:
    """With merges of what the trusted engine keeps together, so that other words give other ids."""
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = level
    if pattern is not None:
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])
    library.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=4000, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator([document(code).decode() for code in (*NEW * 3, *CODES[::199])], trainer)
    return Tokenizer.from_json(library.to_str())


def disagreements(pattern: str | None, codes: list[int]) -> list[str]:
    trusted, fast = Engine(trained(pattern)), Engine(trained(pattern), "gigatoken")
    found = []
    for first in range(0, len(codes), 4096):
        some = codes[first : first + 4096]
        documents = [document(code, BRIEFLY if is_one_of_many(code) else TEMPLATES) for code in some]
        (ids, lengths), (others, other_lengths) = (engine.encode(documents) for engine in (trusted, fast))
        if np.array_equal(ids, others) and np.array_equal(lengths, other_lengths):
            continue
        rows, other_rows = np.split(ids, np.cumsum(lengths)[:-1]), np.split(others, np.cumsum(other_lengths)[:-1])
        found += [hex(code) for code, *pair in zip(some, rows, other_rows, strict=True) if not np.array_equal(*pair)]
    return found


PATTERNS = {"gpt2": None, "cl100k": ENCODINGS["cl100k_base"].pattern, "o200k": ENCODINGS["o200k_base"].pattern}


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_young_characters_have_the_same_ids(pattern: str | None) -> None:
    assert disagreements(pattern, [*NEW, *CODES[::397]]) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_every_character_has_the_same_ids(name: str) -> None:
    """With the pattern that tells most categories apart; with the others every letter, and every 16th ideograph."""
    codes = CODES if name == "o200k" else [code for code in CODES if code < 0x3100 or code % 16 == 0]
    assert disagreements(PATTERNS[name], codes) == []
