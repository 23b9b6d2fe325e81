"""Norm, rotation and cache in one call, beside the same as three calls and beside a copy of the same bytes.

``python -m benchmarks.append`` prints the least of many turns in which all contenders come one after the other, and its
ratio to the copy. The heads are those of Qwen3-8B: 32 of queries, 8 of keys and values, 128 wide. The copy writes
queries over queries, and keys and values into a cache. With ``--threads N`` torch uses N threads (default: 1, for which
the time of the thread is measured, so that other processes matter less).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from locant import HeadNorm, KVCache, Positions, Rotary

__all__: list[str] = []

HEADS, KV_HEADS, WIDTH = 32, 8, 128
CASES = (
    (1, 4_096, 0, torch.bfloat16), (1, 4_096, 0, torch.float32), (32, 1, 1_024, torch.bfloat16),
    (32, 1, 1_024, torch.float32), (1, 1, 128, torch.bfloat16),
)  # fmt: skip
"""Rows, new tokens, cached tokens, dtype."""


def contenders(rows: int, new: int, cached: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Every call begins with the same cache, because it ends with `truncate`, which moves nothing."""
    rotary, weight = Rotary(WIDTH, base=1e6), torch.rand(WIDTH).to(dtype)
    norm, positions, cache = HeadNorm(weight, weight), Positions.after(cached, new), KVCache(cached + new)
    q, k, v = (torch.randn(rows, new, heads, WIDTH).to(dtype).transpose(1, 2) for heads in (HEADS, KV_HEADS, KV_HEADS))
    old = torch.zeros(rows, KV_HEADS, cached, WIDTH, dtype=dtype)
    cache.append(old, old, Positions.arange(cached))
    out, keys, values = torch.empty_like(q), *torch.empty(2, rows, KV_HEADS, cached + new, WIDTH, dtype=dtype)

    def copy() -> None:
        out.copy_(q)
        keys[:, :, cached:].copy_(k)
        values[:, :, cached:].copy_(v)

    def three() -> None:
        normed = (F.rms_norm(x, (WIDTH,), weight, 1e-6) for x in (q, k))
        cache.append(rotary.rotate(*normed, positions=positions, inplace=True)[1], v, positions)
        cache.truncate(cached)

    def two() -> None:
        cache.append(rotary.rotate(q, k, positions, norm=norm)[1], v, positions)
        cache.truncate(cached)

    def one(inplace: bool, norm: HeadNorm | None) -> None:
        cache.rotate_and_append(rotary, q, k, v, positions, norm=norm, inplace=inplace)
        cache.truncate(cached)

    def append() -> None:
        cache.append(k, v, positions)
        cache.truncate(cached)

    return {
        "copy": copy,
        "norm, rotate, append": three,
        "norm and rotate, append": two,
        "in one call": lambda: one(False, norm),
        "in one call, in place": lambda: one(True, norm),
        "in one call, in place, no norm": lambda: one(True, None),
        "append alone": append,
        "truncate alone": lambda: cache.truncate(cached),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    now = time.thread_time if options.threads == 1 else time.perf_counter
    for case in CASES:
        calls, runs = 1 if case[1] > 1 else 20, contenders(*case)
        found = dict.fromkeys(runs, float("inf"))
        for _ in range(options.turns):
            for name, run in runs.items():
                began = now()
                for _ in range(calls):
                    run()
                found[name] = min(found[name], (now() - began) / calls)
        rows, new, cached, dtype = case
        print(f"\n{rows} x {new} tokens behind {cached}, {dtype}")
        for name, seconds in found.items():
            print(f"  {name:32} {seconds * 1e6:12,.1f} us  {seconds / found['copy']:6.2f}")


if __name__ == "__main__":
    main()
