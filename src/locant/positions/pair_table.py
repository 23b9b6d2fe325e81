"""`Pairs`, a table with a row for each rotated pair: its two dimensions, the axis of its index, and its frequency.

Every published rotary scheme is such a table. `Rotary` builds it from ``layout``, ``rotary_dim``, ``sections`` and
``axial``, and accepts any other table. A table whose dimensions form a layout, in either direction, is as fast as that
layout, whatever its axes and frequencies are. For any other table the channels of q and k are reordered before the
rotation and restored after it. The bits stay the same. On a CPU this takes 3 times as long if channels stay together in
a few runs (a layout in each half), and up to 6 times as long if they are scattered.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.arguments import Real, entries, flag, one_of, real, short_repr, whole
from locant.errors import RangeError
from locant.kernels.rotary import Layout
from locant.positions.constant import Constant
from locant.positions.frequencies import MAX_DIM
from locant.positions.scaling import Scaling

MAX_AXES = 2**15
"""The largest number of indices per token."""

MAX_RUNS = 8
"""The largest number of slices for which slicing is cheaper than a look-up of every channel.

A look-up costs as much as eight copies on a CPU.
"""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The pairs of dimensions of a head that are rotated, one row each. All other dimensions stay unchanged.

    Args:
        dims: the two dimensions of each pair. A positive angle rotates the first towards the second, so ``(j, i)``
            rotates in the other direction than ``(i, j)``.
        axes: the index that rotates each pair, if a token has several indices (frame, row, column). Default: the first.
        rungs: the inverse frequency of each pair as ``(ladder, rung)``. The ladder is a number of dimensions, for which
            the encoding's base and scaling give a list of frequencies. The rung is an index into this list. Without
            scaling, the frequency is ``base ** (-2 rung / ladder)``. Default: one ladder over all pairs.
        inv_freq: the inverse frequencies in radians per position, instead of `rungs`. Base and scaling then have no
            effect. Negative frequencies rotate in the other direction.
        num_axes: the number of indices per token. Default: enough for the axes in use.
        num_heads: the number of heads of q and of k that are rotated, beginning with the first. Default: all.

    >>> Pairs(dims=[(0, 2), (1, 3)], axes=[0, 1]).num_axes
    2
    """

    dims: Sequence[tuple[int, int]]
    axes: Sequence[int] | None = None
    rungs: Sequence[tuple[int, int]] | None = None
    inv_freq: Sequence[Real] | None = None
    num_axes: int | None = None
    num_heads: int | None = None

    def __post_init__(self) -> None:
        set_field = functools.partial(object.__setattr__, self)
        set_field("dims", tuple(_check_pair("dims", pair) for pair in entries("dims", self.dims, "[(0, 1), ...]")))
        count = len(self.dims)
        flat = [dim for pair in self.dims for dim in pair]
        if not flat or len({*flat}) != len(flat):
            raise RangeError(
                f"got dims {short_repr(self.dims)}, expected dimensions in one pair each", "[(0, 1), (2, 3)]"
            )
        axes = [0] * count if self.axes is None else entries("axes", self.axes, "pass an axis for each pair")
        remedy = "use 0 for the first axis"
        set_field("axes", tuple(whole("an entry of axes", axis, 0, MAX_AXES - 1, remedy=remedy) for axis in axes))
        if self.inv_freq is not None and self.rungs is not None:
            raise RangeError("got both rungs and inv_freq, expected one of them", "rungs=None")
        if self.inv_freq is not None:
            values = entries("inv_freq", self.inv_freq, "pass a number for each pair")
            set_field("inv_freq", tuple(float(real("an entry of inv_freq", each, remedy="0.01")) for each in values))
        else:
            rungs = [(2 * count, rung) for rung in range(count)] if self.rungs is None else self.rungs
            set_field("rungs", tuple(_check_rung(each) for each in entries("rungs", rungs, "[(64, 0), (64, 1), ...]")))
        for name in ("axes", "rungs", "inv_freq"):
            rows = getattr(self, name)
            if rows is not None and len(rows) != count:
                raise RangeError(f"got {len(rows)} {name} for {count} pairs", f"pass {count} {name}, one for each pair")
        last = max(self.axes or (), default=0) + 1
        num_axes = last if self.num_axes is None else self.num_axes
        set_field("num_axes", whole("num_axes", num_axes, last, MAX_AXES, remedy=f"{last}"))
        if self.num_heads is not None:
            set_field("num_heads", whole("num_heads", self.num_heads, 1, remedy="use 1, or None for all heads"))

    @classmethod
    def of(
        cls, rotary_dim: int, *, layout: Layout = "half", sections: Sequence[int] | None = None, axial: bool = False
    ) -> Pairs:
        """Return the table that `Rotary` builds from these options. An odd `rotary_dim` leaves half a pair empty.

        >>> Pairs.of(4, layout="interleaved").dims
        ((0, 1), (2, 3))
        """
        remedy = "use the layout that the weights were trained with"
        layout = one_of("layout", layout, get_args(Layout), remedy)  # type: ignore[assignment]
        rotary_dim = whole(
            "rotary_dim", rotary_dim, 1, MAX_DIM, remedy="pass the number of rotated dimensions, such as 64"
        )
        if flag("axial", axial) and sections is None:
            raise RangeError("got axial=True without sections", "sections=(pairs of the first axis, ...)")
        if sections is not None:
            sections = check_sections(sections, (rotary_dim + 1) // 2)
        return _make_table(rotary_dim, layout, sections, axial)

    def __len__(self) -> int:
        return len(self.dims)

    def __repr__(self) -> str:
        ladders = len({ladder for ladder, _ in self.rungs or ()})
        facts = [f"{len(self)} pairs", self.layout or "no layout"]
        facts += [f"{self.num_axes} axes"] if self.num_axes != 1 else []
        facts += [f"{ladders} ladders"] if ladders > 1 else []
        facts += ["frequencies of their own"] if self.rungs is None else []
        return f"<{', '.join([*facts, *([] if self.num_heads is None else [f'heads up to {self.num_heads}'])])}>"

    @property
    def layout(self) -> Layout | None:
        """The layout that these dimensions form, in either direction, or ``None``."""
        count, sorted_pairs = len(self), [tuple(sorted(pair)) for pair in self.dims]
        if sorted_pairs == [(i, i + count) for i in range(count)]:
            return "half"
        return "interleaved" if sorted_pairs == [(2 * i, 2 * i + 1) for i in range(count)] else None

    @property
    def runs_as(self) -> Layout | None:
        """The layout whose kernel rotates these pairs directly, or ``None`` if channels are reordered first."""
        return self.layout if self.num_heads is None else None

    def frequencies(self, scaling: Scaling, base: Real, seq_len: int | None) -> tuple[list[Decimal], Tensor]:
        """Return the radians per position of each pair: exact, and in float32 as in reference implementations."""
        if self.rungs is None:
            exact = [Decimal(float(each)) for each in self.inv_freq or ()]
            rounded = torch.tensor([*map(float, exact)], dtype=torch.float32, device="cpu")
        else:
            ladders = sorted({ladder for ladder, _ in self.rungs})
            exact_by_ladder = {dim: scaling.frequencies(dim, base, seq_len) for dim in ladders}
            rounded_by_ladder = {dim: scaling.rounded(dim, base, seq_len) for dim in ladders}
            exact = [exact_by_ladder[ladder][rung] for ladder, rung in self.rungs]
            rounded = torch.stack([rounded_by_ladder[ladder][rung] for ladder, rung in self.rungs])
        is_reversed = [i > j and self.runs_as is not None for i, j in self.dims]  # a layout's kernel needs i < j
        signs = torch.tensor([-1.0 if each else 1.0 for each in is_reversed], dtype=torch.float32, device="cpu")
        signed = [value.copy_negate() if each else value for value, each in zip(exact, is_reversed, strict=True)]
        return signed, rounded * signs


class Channels:
    """An order of channels in which the pairs of a table form a layout. Channels that are not rotated come last.

    It uses the layout with fewer runs of adjacent channels. If there are few runs, they are copied as slices.
    """

    def __init__(self, pairs: Pairs, head_dim: int) -> None:
        firsts, seconds = ([pair[place] for pair in pairs.dims] for place in (0, 1))
        rest = sorted({*range(head_dim)} - {*firsts, *seconds})
        orders: dict[Layout, list[int]] = {
            "half": [*firsts, *seconds, *rest],
            "interleaved": [*itertools.chain(*pairs.dims), *rest],
        }
        self.layout: Layout = min(orders, key=lambda layout: len(_runs(orders[layout])))
        order = torch.tensor(orders[self.layout], dtype=torch.int64, device="cpu")
        self._order, self._inverse = _ChannelOrder(order), _ChannelOrder(order.argsort())
        self._num_heads = pairs.num_heads

    def gather(self, x: Float[Tensor, "batch heads seq head_dim"]) -> Float[Tensor, "batch rotated seq head_dim"]:
        """Return the rotated heads of `x`, with channels in this order."""
        return self._order.apply(x[:, : self._num_heads])

    def scatter(
        self, rotated: Float[Tensor, "batch rotated seq head_dim"], x: Float[Tensor, "batch heads seq head_dim"]
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        """Restore the order of `x`, and append the heads of `x` that are not rotated."""
        restored = self._inverse.apply(rotated)
        return restored if self._num_heads is None else torch.cat([restored, x[:, self._num_heads :]], dim=1)


class _ChannelOrder:
    """A permutation of channels."""

    def __init__(self, order: Int[Tensor, " head_dim"]) -> None:
        self._order = Constant(order)
        self._runs = _runs(order.tolist())

    def apply(self, x: Float[Tensor, "*tokens head_dim"]) -> Float[Tensor, "*tokens head_dim"]:
        if len(self._runs) <= MAX_RUNS:
            return torch.cat([x[..., start:stop] for start, stop in self._runs], dim=-1)
        return x.index_select(-1, self._order.on(x.device))


def _runs(order: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first channel of each run of adjacent channels, and the channel after the last of the run."""
    breaks = [0, *(place for place in range(1, len(order)) if order[place] != order[place - 1] + 1), len(order)]
    return [(order[start], order[stop - 1] + 1) for start, stop in itertools.pairwise(breaks)]


@functools.lru_cache(maxsize=64)
def _make_table(rotary_dim: int, layout: Layout, sections: tuple[int, ...] | None, axial: bool) -> Pairs:
    """Return the table of these options. Layers share it."""
    count = (rotary_dim + 1) // 2
    dims = [(i, i + count) if layout == "half" else (2 * i, 2 * i + 1) for i in range(count)]
    rungs = [(rotary_dim, rung) for rung in range(count)]
    if sections is None:
        return Pairs(dims=dims, rungs=rungs)
    axes = [axis for axis, pairs in enumerate(sections) for _ in range(pairs)]
    if axial:
        rungs = [(2 * pairs, rung) for pairs in sections for rung in range(pairs)]
    return Pairs(dims=dims, axes=axes, rungs=rungs, num_axes=len(sections))


def check_sections(sections: Any, pairs: int) -> tuple[int, ...]:
    """Check the numbers of pairs per axis that a constructor received, and return them."""
    remedy = "use rotary_dim / 2 pairs in all"
    values = entries("sections", sections, remedy)
    counts = tuple(whole("an entry of sections", count, 0, remedy=remedy) for count in values)
    if sum(counts) != pairs:
        raise RangeError(f"got {short_repr(counts)} for sections, expected them to add up to {pairs} pairs", remedy)
    return counts


def _check_pair(name: str, pair: Any, high: int = MAX_DIM - 1) -> tuple[int, int]:
    remedy = "use two numbers each, such as (0, 1)"
    values = entries(name, pair, remedy)
    if len(values) != 2:
        raise RangeError(f"got {short_repr(pair)} in {name}", remedy)
    first, second = (whole(f"an entry of {name}", each, 0, high, remedy=remedy) for each in values)
    return first, second


def _check_rung(each: Any) -> tuple[int, int]:
    ladder, rung = _check_pair("rungs", each, MAX_DIM)
    whole(
        "the ladder of an entry of rungs", ladder, 1, MAX_DIM, remedy="pass the dimensions of all its pairs, such as 64"
    )
    if rung >= (ladder + 1) // 2:
        got = f"got rung {rung} of a ladder over {ladder} dimensions in rungs"
        raise RangeError(got, f"use 0 to {(ladder + 1) // 2 - 1}")
    return ladder, rung
