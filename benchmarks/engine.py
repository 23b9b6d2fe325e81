"""How fast are many documents encoded, and how much memory does that take? `tokenizers` beside gigatoken.

One process, one thread each, in turns; cold is a fresh engine, warm one that has met these words. Refuses to report if
the ids differ. Memory is what the process grew by over invented words, none twice, which no cache can help.

    python benchmarks/engine.py [FILE]
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np

from locant.text import Tokenizer, sample_text
from locant.text.tokenizer.engine import Engine
from locant.text.tokenizer.fast import GROWTH, resident_bytes

MEGA = 1e6
REPEATS = 3


def rate(engine: Engine, documents: list[bytes]) -> float:
    """Megabytes in a second."""
    start = time.perf_counter()
    engine.encode(documents)
    return sum(map(len, documents)) / MEGA / (time.perf_counter() - start)


def invented(seed: int, size: int) -> bytes:
    """Words of eight letters that nobody has met before."""
    letters = np.random.default_rng(seed).integers(97, 123, (size // 9, 9), dtype=np.uint8)
    letters[:, -1] = 32
    return letters.tobytes()


def main() -> None:
    """Print both comparisons."""
    text = Path(sys.argv[1]).read_bytes()[:20_000_000] if len(sys.argv) > 1 else sample_text().encode() * 4
    documents = text.split(b"\n\n")
    tokenizer = Tokenizer.train(text[:2_000_000].decode(errors="replace"), 16_000)
    trusted, fast = (Engine(tokenizer, name, parallel=False) for name in ("tokenizers", "gigatoken"))
    for ours, theirs in zip(fast.encode(documents), trusted.encode(documents), strict=True):
        assert np.array_equal(ours, theirs), "the ids differ"

    rows: dict[str, list[float]] = {"tokenizers": [], "gigatoken, cold": [], "gigatoken, warm": []}
    for _ in range(REPEATS):
        rows["tokenizers"].append(rate(trusted, documents))
        rows["gigatoken, cold"].append(rate(Engine(tokenizer, "gigatoken", parallel=False), documents))
        rows["gigatoken, warm"].append(rate(fast, documents))
    slowest = statistics.median(rows["tokenizers"])
    for name, rates in rows.items():
        print(f"{name:16} {statistics.median(rates) / slowest:6.1f} x   {statistics.median(rates):6.1f} MB/s")

    if (before := resident_bytes()) is None:
        return
    engine, most = Engine(tokenizer, "gigatoken", parallel=False), before
    for seed in range(50):
        engine.encode([invented(seed, 2_000_000)])
        most = max(most, resident_bytes() or 0)
    print(
        f"memory over 100 MB of invented words: +{(most - before) / MEGA:.0f} MB, bound {GROWTH / MEGA:.0f} MB a build"
    )


if __name__ == "__main__":
    main()
