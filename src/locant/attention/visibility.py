"""What the queries may see, in the cheapest form that says it."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor

from locant.positions import Positions
from locant.tensors import readable

__all__ = ["Visibility", "seen_distances", "seen_keys", "steps_ahead", "visibility"]


@dataclass(frozen=True)
class Visibility:
    """Either everything, or the lower triangle of a square, or a mask.

    ``empty`` marks queries that see nothing (padding): their output is zero, not NaN.
    """

    is_causal: bool = False
    mask: Bool[Tensor, "batch 1 query key"] | None = None
    empty: Bool[Tensor, "batch 1 query 1"] | None = None


def visibility(positions: Positions, k_positions: Positions | None, causal: bool, window: int | None) -> Visibility:
    """Decided from what the host knows of the positions; a mask is built only where one is needed.

    Rows that see nothing are opened to every key in the mask and marked in `empty`, so that neither the softmax nor
    its gradient ever meets a row of minus infinities.
    """
    keys = positions if k_positions is None else k_positions
    if positions.start is not None and keys.start is not None and window is None:
        if not causal or positions.start >= keys.start + keys.seq_len - 1:
            return Visibility()
        if positions.start == keys.start and positions.seq_len == keys.seq_len:
            return Visibility(is_causal=True)
    mask = positions.mask(k_positions, causal=causal, window=window)
    empty = ~mask.any(-1, keepdim=True)
    return Visibility(mask=mask | empty, empty=empty)


def steps_ahead(positions: Positions, keys: Positions) -> int | None:
    """How far the first query stands behind the first key, where both are known to count plainly."""
    return None if positions.start is None or keys.start is None else positions.start - keys.start


def seen_distances(ahead: int, queries: int, keys: int, causal: bool, window: int | None) -> tuple[int, int]:
    """The first and the last value of ``i - j + keys - 1`` that is seen, for the slots i and j of a query and a key.

    Args:
        ahead: from `steps_ahead`.
        queries, keys: how many there are.
        causal, window: as in `attend`.
    """
    here = keys - 1 - ahead  # the value at which a query and a key stand at one place
    first, last = 0, queries + keys - 2
    if window is not None:
        first, last = max(first, here - window + 1), min(last, here + window - 1)
    return max(first, here) if causal else first, last


def seen_keys(positions: Positions, keys: Positions, causal: bool, window: int | None) -> tuple[int, int]:
    """The slots of the first and behind the last key that any of the queries sees; at least one slot.

    Known beforehand where both count plainly. On a CPU the positions are looked through; elsewhere, and in a compiled
    graph, that would be a sync, and the answer is all keys.
    """
    ahead = steps_ahead(positions, keys)
    if ahead is not None:
        first, last = seen_distances(ahead, positions.seq_len, keys.seq_len, causal, window)
        low, high = keys.seq_len - 1 - last, keys.seq_len - 1 - first + positions.seq_len
    elif readable(positions.index):
        slots = positions.mask(keys, causal=causal, window=window).any(0).any(1).flatten().nonzero()
        low, high = (int(slots[0]), int(slots[-1]) + 1) if len(slots) else (0, 0)
    else:
        return 0, keys.seq_len
    low = min(max(low, 0), keys.seq_len - 1)
    return low, max(min(high, keys.seq_len), low + 1)
