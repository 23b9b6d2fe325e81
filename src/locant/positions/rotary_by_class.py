"""`RotaryByClass`: rotations that differ by the class of a pair, near or far, of one chunk or of two.

The same query meets near keys under one rotation and far keys under another, so no single rotation of keys can be
stored. Queries and keys stay as they are, and `attend` asks for the classes: each says which pairs belong to it, as an
attention mask does, and where queries and keys stand for its rotation. Every class is attended to by itself, and the
outputs are joined by their log-sum-exps.

Costs one rotation of queries and keys per class. With a cache, whose keys are not rotated, that is a rotation of all
of them in every step. Measured on one core, 8 heads of 64 over 4 key heads, 8 192 tokens, beside plain causal attention
(0.92 s, 40 MB more): 1.15 to 1.3 times the time and 90 to 100 MB; one step of decoding takes 5 ms instead of 1.1; and
forward and backward of 4 096 tokens 2.8 to 3.2 times the time: no fused kernel has the gradient of a log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from locant.arguments import shown
from locant.errors import LocantError, RangeError, ShapeError
from locant.positions.base import Keys, PositionEncoding, Queries, require_heads, standing
from locant.positions.encodings.rotary import Rotary
from locant.positions.heads import for_query_heads
from locant.positions.pairs import bias_dtype
from locant.positions.positions import Positions, Where


class PairClass(NamedTuple):
    """Pairs of a query and a key that are rotated alike.

    Args:
        rows, columns: the slots of the queries and of the keys among which they are, the first and behind the last;
            classes have the same rows, or none in common. No slices, whose ends a compiled graph takes for constants.
        queries, keys, causal, window: which pairs of these they are, as in an attention mask; `keys` may be ``None``,
            for the tokens of the queries.
        q_at, k_at: where they stand for the rotation.
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

    def rotated(self, q: Queries, k: Keys) -> tuple[Tensor, Tensor]:
        """The queries and keys of this class, out of all of them, as they are for it."""
        part = q[:, :, slice(*self.rows)], k[:, :, slice(*self.columns)]
        return part if self.rotary is None else self.rotary.rotate(*part, self.q_at, self.k_at)


class RotaryByClass(PositionEncoding):
    """The base of encodings that rotate a pair by its class; a subclass writes `classes`.

    Args:
        rotary: how tokens are rotated, wherever they stand.
    """

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        if not isinstance(rotary, Rotary):
            got = f"got {shown(rotary)} for rotary, expected a rotary encoding"
            raise RangeError(got, f"{type(self).__name__}(locant.Rotary(head_dim=64))")
        self.rotary = rotary
        self.head_dim, self.num_axes = rotary.head_dim, rotary.num_axes
        self._turning = rotary.alike(temperature=None)

    def classes(self, positions: Positions, k_positions: Positions | None = None) -> Sequence[PairClass]:
        """The classes of pairs, which together are all that a causal mask allows; each pair is in one of them."""
        raise LocantError(f"{type(self).__name__} does not define classes", "def classes(self, positions, k_positions)")

    def pair_classes(self, positions: Positions, k_positions: Positions | None = None) -> Sequence[PairClass]:
        """`classes`, of positions that count tokens."""
        for each in (positions, *(() if k_positions is None else (k_positions,))):
            each.require_single_axis(type(self).__name__)
            if each.order_or_none is not None:
                got = f"got positions in an order of their own for {type(self).__name__}, which goes by distance"
                raise ShapeError(got, "positions whose index is their order, such as Positions.packed(lengths)")
        return [each._replace(rotary=self._turning) for each in self.classes(positions, k_positions)]

    def rotate(
        self, q: Queries, k: Keys, positions: Where = None, k_positions: Where = None, *, inplace: bool = False
    ) -> tuple[Queries, Keys]:
        """Queries and keys as they are, but for a temperature of queries: `attend` rotates them, class by class."""
        positions, keys = standing(self, q, k, positions, k_positions)
        require_heads("q", q, positions, self.head_dim)
        require_heads("k", k, keys, self.head_dim)
        temperature = self.rotary.temperature
        return (q if temperature is None else temperature.grown(q, positions, inplace=inplace)), k

    def extra_repr(self) -> str:
        return f"{self.rotary}"


def products(classes: Sequence[PairClass], q: Queries, k: Keys) -> Float[Tensor, "batch heads query key"]:
    """``q . k`` of every pair, each rotated as its class is, and 0 where a causal mask hides the key.

    A matrix, float32 at least: to look at, and for attention that knows masks by a matrix alone.
    """
    total = torch.zeros(*q.shape[:3], k.shape[2], dtype=bias_dtype(q), device=q.device)
    for each in classes:
        rotated_q, rotated_k = (x.to(total.dtype) for x in each.rotated(q, k))
        of_class = rotated_q @ for_query_heads(rotated_k, q.shape[1]).mT
        allowed = each.queries.mask(each.keys, causal=each.causal, window=each.window)
        total[:, :, slice(*each.rows), slice(*each.columns)] += of_class.masked_fill(~allowed, 0.0)
    return total


def near_and_far(
    positions: Positions,
    k_positions: Positions | None,
    window: int,
    far: Callable[[Any], Any],
    far_keys: Callable[[Any], Any],
) -> list[PairClass]:
    """Keys fewer than `window` tokens before the query, which stand where they are, and all others.

    Args:
        far, far_keys: where a query, and a key, of the others stands: of its index, functions that never fall.
    """
    keys = positions if k_positions is None else k_positions
    first, last = 0, keys.seq_len
    if positions.start is not None and keys.start is not None:
        first = min(max(positions.start - window + 1 - keys.start, 0), last)  # that is near the first query
        # 0 and 1 would make graphs of their own: where no key is far, two hidden ones are.
        fewest = min(2, last) if torch.compiler.is_compiling() else 0
        last = min(max(positions.start + positions.seq_len - window - keys.start, fewest), last)
    close, others = keys.slice(first, keys.seq_len), keys.slice(0, last)
    near = PairClass(
        columns=(first, None), queries=positions, keys=None if k_positions is None else close, window=window,
        q_at=positions, k_at=positions if k_positions is None else close,
    )  # fmt: skip
    if last == 0:
        return [near]
    earlier = _standing(positions, lambda index: index - window)  # see what is `window` tokens before, or more
    queries = replace(
        positions, index=earlier.index, min_index=earlier.min_index, max_index=earlier.max_index,
        start=None if positions.start is None else positions.start - window,
    )  # fmt: skip
    q_at, k_at = _standing(positions, far), _standing(others, far_keys)
    return [near, PairClass(columns=(0, last), queries=queries, keys=others, q_at=q_at, k_at=k_at)]


def _standing(positions: Positions, where: Callable[[Any], Any]) -> Positions:
    """Where tokens stand for a rotation: `where` of their index, a function that never falls."""
    low, high = positions.min_index, positions.max_index
    return Positions(
        where(positions.index),
        min_index=None if low is None else where(low),
        max_index=None if high is None else where(high),
    )
