"""What windows are, written down as slowly and plainly as can be, over places 0 .. n - 1 instead of ids."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator

from locant.text import Windows

__all__ = ["PAD", "best_fit_fills", "permuted", "pieces", "share", "targets_of", "window_places"]

PAD = -100
"""Stands where there is no target: the number that losses ignore."""

Window = list[tuple[int, int]]
"""The places of an input and of its target, slot by slot."""


def document_windows(begin: int, end: int, length: int, stride: int) -> Iterator[Window]:
    """Windows a stride apart, until none of the document's targets is left."""
    start = begin
    while start + 1 < end:
        yield [(place, place + 1) for place in range(start, start + length) if place + 1 < end]
        if start + length + 1 >= end:
            return
        start += stride


def window_places(documents: list[int], length: int, stride: int, *, drop_last: bool = False) -> list[Window]:
    """All windows of all documents, which begin at these offsets and end at the next."""
    windows = [
        window
        for begin, end in itertools.pairwise(documents)
        for window in document_windows(begin, end, length, stride)
    ]
    return [window for window in windows if len(window) == length or not drop_last]


def targets_of(windows: Windows) -> list[list[int]]:
    """The targets that ours have, window by window."""
    return [[slot for slot in item["targets"].tolist() if slot != PAD] for item in windows]


def pieces(documents: list[int], length: int) -> list[Window]:
    """What is packed: the windows of document mode that do not overlap."""
    return window_places(documents, length, length)


def best_fit_fills(sizes: list[int], capacity: int) -> list[int]:
    """How full the rows get when each piece, longest first, goes where it leaves the least room; sorted."""
    fills: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [row for row, fill in enumerate(fills) if fill + size <= capacity]
        if fitting:
            fills[max(fitting, key=lambda row: fills[row])] += size
        else:
            fills.append(size)
    return sorted(fills)


def share(order: list[int], batch_size: int, rank: int, world_size: int, *, drop_last: bool = False) -> list[list[int]]:
    """The batches of one rank: its stretch of every step; the last step is dealt out one window after the other."""
    batches = []
    for first in range(0, len(order), batch_size * world_size):
        step = order[first : first + batch_size * world_size]
        if len(step) == batch_size * world_size:
            batches.append(step[rank * batch_size : (rank + 1) * batch_size])
        elif not drop_last:
            begin, end = len(step) * rank // world_size, len(step) * (rank + 1) // world_size
            batches += [step[begin:end]] if end > begin else []
    return batches


def permuted(place: int, n: int, seed: int, epoch: int) -> int:
    """What stands at a place of the order of an epoch, for n of 2**16 or more; in integers without an end."""
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=48).digest()
    keys = [int.from_bytes(digest[first : first + 8], "little") for first in range(0, 48, 8)]
    low = math.isqrt(n)
    high = (n + low - 1) // low
    left, right = divmod(place, low)
    for number, key in enumerate(keys):
        mixed = right ^ key
        for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            mixed = mixed * factor % 2**64
            mixed ^= mixed >> 32
        size = (high, low)[number % 2]
        left, right = right, (left + (mixed >> 32) * size // 2**32) % size
    found = left * low + right
    return found if found < n else permuted(found, n, seed, epoch)
