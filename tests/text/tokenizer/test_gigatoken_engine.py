"""The fast engine gives the same ids for every character, and its memory is bounded."""

from __future__ import annotations

import functools
import gc
import unicodedata

import numpy as np
import pytest

from locant.text import Tokenizer
from locant.text.tokenizer import gigatoken_engine
from locant.text.tokenizer.engine import Engine
from locant.text.tokenizer.gigatoken_engine import MAX_GROWTH, GigatokenEngine, resident_bytes
from locant.text.tokenizer.local_files import ENCODINGS
from tests.text.tokenizer.zoo import TEXTS, loaded, rows, with_split

gigatoken = pytest.importorskip("gigatoken", reason="the fast engine needs the extra `fast`")


class TestMemory:
    def words(self, seed: int, size: int) -> bytes:
        letters = np.random.default_rng(seed).integers(97, 123, (size // 9, 9), dtype=np.uint8)
        letters[:, -1] = 32
        return letters.tobytes()

    def test_is_given_back_when_it_has_grown(self) -> None:
        claimed = iter(range(0, 10**12, 70 * 2**20))  # each look at it, the process has grown by 70 MiB
        engine = GigatokenEngine(loaded("byte level"), parallel=False, resident=lambda: next(claimed))
        builds = []
        for _ in range(7):
            engine.encode([b"the " * 500_000])
            builds.append(engine.builds)
        assert builds == [1, 1, 1, 2, 2, 2, 3]

    def test_of_others_does_not_count(self) -> None:
        """What grows between two calls is not its cache, and what it returns is not either."""
        seen = iter([0, 0, 10**10, 10**10, 2 * 10**10, 2 * 10**10])
        engine = GigatokenEngine(loaded("byte level"), parallel=False, resident=lambda: next(seen))
        for _ in range(3):
            engine.encode([b"the " * 1_100_000])
        assert engine.builds == 1

    def test_gives_the_same_ids_before_and_after(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gigatoken_engine, "MAX_UNMEASURED", 10)
        engine = GigatokenEngine(loaded("byte level"), parallel=False, resident=lambda: None)
        expected = [loaded("byte level").encode(text).tolist() for text in TEXTS]
        assert all(rows(*engine.encode(TEXTS)) == expected for _ in range(5))
        assert engine.builds > 2

    @pytest.mark.slow
    @pytest.mark.skipif(resident_bytes() is None, reason="only Linux tells how much a process holds")
    def test_stays_bounded_over_words_that_never_come_again(self) -> None:
        engine = Engine(loaded("trained here"), "gigatoken", parallel=False)
        engine.encode([self.words(0, 10**6)])
        gc.collect()
        before = most = resident_bytes() or 0
        for seed in range(60):
            engine.encode([self.words(seed, 2 * 10**6)])
            most = max(most, resident_bytes() or 0)
        assert most - before < 3 * MAX_GROWTH
        assert engine._fast is not None
        assert engine._fast.builds > 2


def test_an_interruption_that_the_library_swallows_is_one() -> None:
    fast = GigatokenEngine(loaded("byte level"), parallel=False)
    fast.encode([b"one"])
    fast._library = type("Interrupted", (), {"encode_batch": lambda *_, **__: [[1], [2]]})()
    with pytest.raises(KeyboardInterrupt):
        fast.encode([b"one", b"two"])


TEMPLATES = (
    "{c}", "a{c}", "{c}a", "1{c}", "{c}1", " {c}", "{c} ", "{c}'s", "'{c}", "{c}{c}", ".{c}", "{c}.", "a{c}b", "1{c}2",
    "\u00e9{c}\u00e9", " {c}\n", "{c}\n", "\n{c}", "{c}'ll x", "A{c}a", "a{c}A", "\u65e5{c}\u65e5",
)  # fmt: skip

BRIEFLY = ("a{c}Ab1{c}.{c} {c}'s\n",)

NEW = (0x088F, 0x0C5C, 0x1ACF, 0xA7CE, 0x10940, 0x11F04, 0x16EC0, 0x1E4D0, 0x2EBF0, 0x31350, 0x323B0, 0x3295C)

CODES = [code for code in (*range(0x80, 0x33480), *range(0xE0000, 0xE0200)) if not 0xD800 <= code < 0xE000]


def is_one_of_many(code: int) -> bool:
    """A character like the one before it, as ideographs and what is unknown mostly are: fifteen of sixteen of those."""
    return code % 16 > 0 and unicodedata.category(chr(code)) == unicodedata.category(chr(code - 1))


def document(code: int, templates: tuple[str, ...] = TEMPLATES) -> bytes:
    return "\x01\x02".join(template.format(c=chr(code)) for template in templates).encode()


@functools.cache
def trained(pattern: str | None) -> Tokenizer:
    """With merges of what the trusted engine keeps together, so that other words give other ids."""
    texts = [document(code).decode() for code in (*NEW * 3, *CODES[::199])]
    return with_split(*([] if pattern is None else [pattern]), texts=texts, vocab_size=4000)


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
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_every_letter_and_every_sixteenth_ideograph_has_the_same_ids(pattern: str | None) -> None:
    assert disagreements(pattern, [code for code in CODES if code < 0x3100 or code % 16 == 0]) == []


@pytest.mark.slow
@pytest.mark.sweep
def test_every_character_has_the_same_ids() -> None:
    """With the pattern that tells most categories apart."""
    assert disagreements(PATTERNS["o200k"], CODES) == []
