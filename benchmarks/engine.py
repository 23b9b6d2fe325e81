"""How fast are many documents encoded, and how much memory does that take? `tokenizers` beside gigatoken.

One process, one thread each, in turns; cold is a fresh engine, warm one that has met these words. Refuses to report if
the ids differ. Memory is what the process grew by over invented words, none twice, which no cache can help.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.timing import Row, measure
from locant.text import Tokenizer, sample_text
from locant.text.tokenizer.engine import Engine
from locant.text.tokenizer.gigatoken_engine import MAX_GROWTH, resident_bytes

__all__ = ["rows"]

MEGA = 1e6


def invented(seed: int, size: int) -> bytes:
    """Words of eight letters that are in no text so far."""
    letters = np.random.default_rng(seed).integers(97, 123, (size // 9, 9), dtype=np.uint8)
    letters[:, -1] = 32
    return letters.tobytes()


def rows() -> list[Row]:
    """Speed and memory of both."""
    text = sample_text().encode() * 4
    documents = text.split(b"\n\n")
    tokenizer = Tokenizer.train(text[:2_000_000].decode(errors="replace"), 16_000)
    trusted, fast = (Engine(tokenizer, name, parallel=False) for name in ("tokenizers", "gigatoken"))
    for ours, theirs in zip(fast.encode(documents), trusted.encode(documents), strict=True):
        assert np.array_equal(ours, theirs), "the ids differ"
    contenders = {
        "gigatoken, warm": lambda: fast.encode(documents),
        "gigatoken, cold": lambda: Engine(tokenizer, "gigatoken", parallel=False).encode(documents),
        "tokenizers": lambda: trusted.encode(documents),
    }
    question = f"{len(text) / MEGA:.1f} MB of text to ids, one thread"
    return [*measure(question, contenders, rounds=5, warmup=1), *_memory(tokenizer)]


def _memory(tokenizer: Tokenizer) -> list[Row]:
    """What is held at most while a hundred megabytes of invented words are encoded, beyond what was held before."""
    if (before := resident_bytes()) is None:
        return []
    engine, most, began = Engine(tokenizer, "gigatoken", parallel=False), before, time.perf_counter()
    for seed in range(50):
        engine.encode([invented(seed, 2_000_000)])
        most = max(most, resident_bytes() or 0)
    return [
        Row(
            question=f"memory over 100 MB of invented words; built anew after {MAX_GROWTH / MEGA:.0f} MB",
            contender="gigatoken",
            milliseconds=round(1000 * (time.perf_counter() - began), 1),
            ratio=1.0,
            megabytes=round((most - before) / MEGA, 1),
        )
    ]
