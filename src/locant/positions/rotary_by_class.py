"""`RotaryByClass`: rotations that depend on the class of a pair, such as near or far, or within or between chunks.

The same query meets near keys under one rotation and far keys under another, so keys cannot be stored rotated.
`rotate` leaves queries and keys unchanged, and `attend` calls `pair_classes`. A class describes its pairs, like an
attention mask, and has the positions of queries and keys for the rotation. Attention runs once per class, and the
outputs are merged by their log-sum-exps.

It costs one rotation of queries and keys per class. A cache holds keys without rotation, so every step rotates all
cached keys. It was measured on one core, with 8 heads of 64 over 4 key heads, in comparison with plain causal
attention. The forward pass over 8,192 tokens takes 1.1 to 1.3 times the time, and about 100 MB more memory. Forward and
backward over 4,096 tokens take 1.2 to 1.5 times the time, because no fused kernel has the gradient of a log-sum-exp. A
decoding step with 8,192 cached keys takes 2.1 to 2.3 times the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from locant.arguments import short_repr
from locant.errors import LocantError, RangeError, ShapeError
from locant.positions.base import Keys, PositionEncoding, Queries, require_heads, resolve_positions
from locant.positions.distances import bias_dtype
from locant.positions.encodings.rotary import Rotary
from locant.positions.heads import for_query_heads
from locant.positions.positions import OptionalPositions, Positions


class PairClass(NamedTuple):
    """Pairs of a query and a key that share a rotation.

    Args:
        rows, columns: the slots of the queries and of the keys, as the first slot and the slot after the last. Two
            classes have the same rows or no common rows. They are not slices, because a compiled graph treats the ends
            of a slice as constants.
        queries, keys, causal, window: the pairs within these slots, as in an attention mask. `keys` of ``None`` means
            the tokens of the queries.
        q_at, k_at: the positions of queries and keys for the rotation.
    """

    queries: Positions
    keys: Positions | None
    q_at: Positions
    k_at: Positions
    causal: bool = True
    window: int | None = None
    rows: tuple[int, int | None] = (0, None)
    columns: tuple[int, int | None] = (0, None)
    rotary: Rotary | None = None

    def rotate(self, q: Queries, k: Keys) -> tuple[Tensor, Tensor]:
        """Return the queries and keys of this class, rotated."""
        part = q[:, :, slice(*self.rows)], k[:, :, slice(*self.columns)]
        return part if self.rotary is None else self.rotary.rotate(*part, self.q_at, self.k_at)


class RotaryByClass(PositionEncoding):
    """The base class of encodings that rotate a pair by its class. A subclass implements `classes`.

    Args:
        rotary: the rotation, which is the same in all classes. Only the positions differ.
    """

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        if not isinstance(rotary, Rotary):
            got = f"got {short_repr(rotary)} for rotary, expected a rotary encoding"
            raise RangeError(got, f"{type(self).__name__}(locant.Rotary(head_dim=64))")
        self.rotary = rotary
        self.head_dim, self.num_axes = rotary.head_dim, rotary.num_axes
        self._rotary_without_temperature = rotary.replace(temperature=None)

    def classes(self, positions: Positions, k_positions: Positions | None = None) -> Sequence[PairClass]:
        """Return the classes of pairs. Together they hold every pair that a causal mask allows, each exactly once."""
        raise LocantError(f"{type(self).__name__} does not define classes", "def classes(self, positions, k_positions)")

    def pair_classes(self, positions: Positions, k_positions: Positions | None = None) -> Sequence[PairClass]:
        """Return `classes` with their rotation.

        Raises:
            ShapeError: the positions have several axes, are fractions, or have an order that differs from the index.
        """
        for each in (positions, *(() if k_positions is None else (k_positions,))):
            each.require_single_axis(type(self).__name__)
            if each.order_or_none is not None:
                got = f"got positions with an order for {type(self).__name__}, which depends on the distance"
                raise ShapeError(got, "use positions whose index is their order, such as Positions.packed(lengths)")
        return [each._replace(rotary=self._rotary_without_temperature) for each in self.classes(positions, k_positions)]

    def rotate(
        self,
        q: Queries,
        k: Keys,
        positions: OptionalPositions = None,
        k_positions: OptionalPositions = None,
        *,
        inplace: bool = False,
    ) -> tuple[Queries, Keys]:
        """Return queries and keys unchanged, except for a temperature of queries. `attend` rotates each class."""
        positions, keys = resolve_positions(self, q, k, positions, k_positions)
        require_heads("q", q, positions, self.head_dim)
        require_heads("k", k, keys, self.head_dim)
        temperature = self.rotary.temperature
        return (q if temperature is None else temperature.scale(q, positions, inplace=inplace)), k

    def extra_repr(self) -> str:
        return f"{self.rotary}"


def products(classes: Sequence[PairClass], q: Queries, k: Keys) -> Float[Tensor, "batch heads query key"]:
    """Return ``q . k`` of every pair under the rotation of its class, and 0 if a causal mask hides the key.

    The result is a matrix in float32 or wider, for inspection and for attention that supports only matrices as masks.
    """
    total = torch.zeros(*q.shape[:3], k.shape[2], dtype=bias_dtype(q), device=q.device)
    for each in classes:
        rotated_q, rotated_k = (x.to(total.dtype) for x in each.rotate(q, k))
        scores = rotated_q @ for_query_heads(rotated_k, q.shape[1]).mT
        allowed = each.queries.mask(each.keys, causal=each.causal, window=each.window)
        total[:, :, slice(*each.rows), slice(*each.columns)] += scores.masked_fill(~allowed, 0.0)
    return total


def near_and_far(
    positions: Positions,
    k_positions: Positions | None,
    window: int,
    far: Callable[[Any], Any],
    far_keys: Callable[[Any], Any],
) -> list[PairClass]:
    """Return a near class (keys fewer than `window` tokens before the query, at their own positions) and a far class.

    Args:
        far, far_keys: non-decreasing functions from an index to its position in the far class, for queries and keys.
    """
    keys = positions if k_positions is None else k_positions
    first, last = 0, keys.seq_len
    if positions.start is not None and keys.start is not None:
        first = min(max(positions.start - window + 1 - keys.start, 0), last)  # the first near key
        # Sizes 0 and 1 would make separate graphs. So without far keys, the far class has two hidden keys.
        fewest = min(2, last) if torch.compiler.is_compiling() else 0
        last = min(max(positions.start + positions.seq_len - window - keys.start, fewest), last)
    near_keys, far_candidates = keys.slice(first, keys.seq_len), keys.slice(0, last)
    near = PairClass(
        columns=(first, None), queries=positions, keys=None if k_positions is None else near_keys, window=window,
        q_at=positions, k_at=positions if k_positions is None else near_keys,
    )  # fmt: skip
    if last == 0:
        return [near]
    earlier = _map_index(positions, lambda index: index - window)  # hides keys fewer than `window` tokens before
    queries = replace(
        positions, index=earlier.index, min_index=earlier.min_index, max_index=earlier.max_index,
        start=None if positions.start is None else positions.start - window,
    )  # fmt: skip
    q_at, k_at = _map_index(positions, far), _map_index(far_candidates, far_keys)
    return [near, PairClass(columns=(0, last), queries=queries, keys=far_candidates, q_at=q_at, k_at=k_at)]


def _map_index(positions: Positions, function: Callable[[Any], Any]) -> Positions:
    """Apply a non-decreasing `function` to the index and to its bounds."""
    low, high = positions.min_index, positions.max_index
    return Positions(
        function(positions.index),
        min_index=None if low is None else function(low),
        max_index=None if high is None else function(high),
    )
