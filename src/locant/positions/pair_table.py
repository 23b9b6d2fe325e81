"""Which dimensions are rotated together, by which index of a token, and how fast: a row for each pair.

Every rotary scheme in print is such a table. `Rotary` writes it from ``layout``, ``rotary_dim``, ``sections`` and
``axial``, and takes any other as it is. A table whose dimensions are a layout, in either direction, runs as fast as
that layout, whatever its axes and frequencies are; for any other the channels of q and k are put in order before they
are rotated, and back afterwards, which changes no bit. On a CPU that takes 3 to 6 times as long: least where channels
stay together in a few runs (a layout in each half), most where they are scattered.
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

from locant.arguments import Real, entries, flag, one_of, real, shown, whole
from locant.errors import RangeError
from locant.kernels.rotary import Layout
from locant.positions.constant import Constant
from locant.positions.frequencies import MAX_DIM
from locant.positions.scaling import Scaling

MAX_AXES = 2**15
"""The most indices that a token can have."""

MOST_RUNS = 8
"""Up to so many slices are cheaper than to look every channel up: on a CPU that takes eight times a copy."""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The pairs of dimensions of a head that are rotated, one row each; all other dimensions stay as they are.

    Args:
        dims: the two dimensions of each pair. A positive angle rotates the first towards the second, so ``(j, i)``
            is ``(i, j)`` in the other direction.
        axes: which index of a token rotates the pair, where it has several (frame, row, column); default: the only one.
        rungs: the inverse frequency of each, as ``(ladder, rung)``: the rung-th of those that the base and the scaling
            of the encoding give a ladder over so many dimensions, ``base ** (-2 rung / ladder)`` without scaling.
            Default: one ladder over all pairs.
        inv_freq: in their place, the inverse frequencies themselves, in radians per position; base and scaling then
            have no effect. Negative ones rotate in the other direction.
        num_axes: how many indices a token has; default: as many as the axes that are used.
        num_heads: only so many heads of q and of k are rotated, the first ones; default: all.

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
        settle = functools.partial(object.__setattr__, self)
        settle("dims", tuple(_two("dims", pair) for pair in entries("dims", self.dims, "[(0, 1), ...]")))
        count = len(self.dims)
        flat = [dim for pair in self.dims for dim in pair]
        if not flat or len({*flat}) != len(flat):
            raise RangeError(f"got dims {shown(self.dims)}, expected dimensions in one pair each", "[(0, 1), (2, 3)]")
        axes = [0] * count if self.axes is None else entries("axes", self.axes, "an axis for each pair")
        remedy = "0 for the first"
        settle("axes", tuple(whole("an entry of axes", axis, 0, MAX_AXES - 1, remedy=remedy) for axis in axes))
        if self.inv_freq is not None and self.rungs is not None:
            raise RangeError("got rungs beside inv_freq, expected one of them", "rungs=None")
        if self.inv_freq is not None:
            given = entries("inv_freq", self.inv_freq, "a number for each pair")
            settle("inv_freq", tuple(float(real("an entry of inv_freq", each, remedy="0.01")) for each in given))
        else:
            rungs = [(2 * count, rung) for rung in range(count)] if self.rungs is None else self.rungs
            settle("rungs", tuple(_rung(each) for each in entries("rungs", rungs, "[(64, 0), (64, 1), ...]")))
        for name in ("axes", "rungs", "inv_freq"):
            rows = getattr(self, name)
            if rows is not None and len(rows) != count:
                raise RangeError(f"got {len(rows)} {name} for {count} pairs", f"{count} {name}, one for each pair")
        last = max(self.axes or (), default=0) + 1
        num_axes = last if self.num_axes is None else self.num_axes
        settle("num_axes", whole("num_axes", num_axes, last, MAX_AXES, remedy=f"{last}"))
        if self.num_heads is not None:
            settle("num_heads", whole("num_heads", self.num_heads, 1, remedy="1, or None for all heads"))

    @classmethod
    def of(
        cls, rotary_dim: int, *, layout: Layout = "half", sections: Sequence[int] | None = None, axial: bool = False
    ) -> Pairs:
        """The table that `Rotary` writes of these; an odd `rotary_dim` leaves its last pair half empty.

        >>> Pairs.of(4, layout="interleaved").dims
        ((0, 1), (2, 3))
        """
        remedy = "the layout the weights were trained with"
        layout = one_of("layout", layout, get_args(Layout), remedy)  # type: ignore[assignment]
        rotary_dim = whole("rotary_dim", rotary_dim, 1, MAX_DIM, remedy="the dimensions that are rotated, such as 64")
        if flag("axial", axial) and sections is None:
            raise RangeError("got axial=True without sections", "sections=(pairs of the first axis, ...)")
        if sections is not None:
            sections = sections_of(sections, (rotary_dim + 1) // 2)
        return _written(rotary_dim, layout, sections, axial)

    def __len__(self) -> int:
        return len(self.dims)

    def __repr__(self) -> str:
        ladders = len({ladder for ladder, _ in self.rungs or ()})
        said = [f"{len(self)} pairs", self.layout or "no layout"]
        said += [f"{self.num_axes} axes"] if self.num_axes != 1 else []
        said += [f"{ladders} ladders"] if ladders > 1 else []
        said += ["frequencies of their own"] if self.rungs is None else []
        return f"<{', '.join([*said, *([] if self.num_heads is None else [f'heads up to {self.num_heads}'])])}>"

    @property
    def layout(self) -> Layout | None:
        """The layout that these dimensions are, in whichever direction; ``None``: none."""
        count, turned = len(self), [tuple(sorted(pair)) for pair in self.dims]
        if turned == [(i, i + count) for i in range(count)]:
            return "half"
        return "interleaved" if turned == [(2 * i, 2 * i + 1) for i in range(count)] else None

    @property
    def runs_as(self) -> Layout | None:
        """The layout whose kernel rotates these pairs as they are; ``None``: channels are put in order first."""
        return self.layout if self.num_heads is None else None

    def frequencies(self, scaling: Scaling, base: float, seq_len: int | None) -> tuple[list[Decimal], Tensor]:
        """Radians per position of each pair: exact, and in float32 as reference implementations round them."""
        if self.rungs is None:
            exact = [Decimal(float(each)) for each in self.inv_freq or ()]
            rounded = torch.tensor([*map(float, exact)], dtype=torch.float32, device="cpu")
        else:
            ladders = sorted({ladder for ladder, _ in self.rungs})
            of_ladder = {dim: scaling.frequencies(dim, base, seq_len) for dim in ladders}
            rounded_of_ladder = {dim: scaling.rounded(dim, base, seq_len) for dim in ladders}
            exact = [of_ladder[ladder][rung] for ladder, rung in self.rungs]
            rounded = torch.stack([rounded_of_ladder[ladder][rung] for ladder, rung in self.rungs])
        back = [i > j and self.runs_as is not None for i, j in self.dims]  # the kernel of a layout takes i first
        signs = torch.tensor([-1.0 if each else 1.0 for each in back], dtype=torch.float32, device="cpu")
        return [one.copy_negate() if each else one for one, each in zip(exact, back, strict=True)], rounded * signs


class Channels:
    """The order of channels in which the pairs of a table are a layout, with the channels that are not rotated last.

    It is the layout that leaves the longest runs of channels as they are; few runs are copied as slices.
    """

    def __init__(self, pairs: Pairs, head_dim: int) -> None:
        firsts, seconds = ([pair[place] for pair in pairs.dims] for place in (0, 1))
        rest = sorted({*range(head_dim)} - {*firsts, *seconds})
        orders: dict[Layout, list[int]] = {
            "half": [*firsts, *seconds, *rest],
            "interleaved": [*itertools.chain(*pairs.dims), *rest],
        }
        self.layout: Layout = min(orders, key=lambda layout: len(_runs(orders[layout])))
        there = torch.tensor(orders[self.layout], dtype=torch.int64, device="cpu")
        self._there, self._back = _Order(there), _Order(there.argsort())
        self._num_heads = pairs.num_heads

    def gather(self, x: Float[Tensor, "batch heads seq head_dim"]) -> Float[Tensor, "batch rotated seq head_dim"]:
        """What is rotated of `x`, in this order."""
        return self._there.of(x[:, : self._num_heads])

    def scatter(
        self, rotated: Float[Tensor, "batch rotated seq head_dim"], x: Float[Tensor, "batch heads seq head_dim"]
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        """It in the order of `x`, with the heads of `x` that are not rotated."""
        back = self._back.of(rotated)
        return back if self._num_heads is None else torch.cat([back, x[:, self._num_heads :]], dim=1)


class _Order:
    """Channels in another order."""

    def __init__(self, order: Int[Tensor, " head_dim"]) -> None:
        self._order = Constant(order)
        self._runs = _runs(order.tolist())

    def of(self, x: Float[Tensor, "*tokens head_dim"]) -> Float[Tensor, "*tokens head_dim"]:
        if len(self._runs) <= MOST_RUNS:
            return torch.cat([x[..., start:stop] for start, stop in self._runs], dim=-1)
        return x.index_select(-1, self._order.on(x.device))


def _runs(order: Sequence[int]) -> list[tuple[int, int]]:
    """Where channels follow each other: the first of each run, and the one after its last."""
    breaks = [0, *(place for place in range(1, len(order)) if order[place] != order[place - 1] + 1), len(order)]
    return [(order[start], order[stop - 1] + 1) for start, stop in itertools.pairwise(breaks)]


@functools.lru_cache(maxsize=64)
def _written(rotary_dim: int, layout: Layout, sections: tuple[int, ...] | None, axial: bool) -> Pairs:
    """The table of these; layers share it."""
    count = (rotary_dim + 1) // 2
    dims = [(i, i + count) if layout == "half" else (2 * i, 2 * i + 1) for i in range(count)]
    rungs = [(rotary_dim, rung) for rung in range(count)]
    if sections is None:
        return Pairs(dims=dims, rungs=rungs)
    axes = [axis for axis, pairs in enumerate(sections) for _ in range(pairs)]
    if axial:
        rungs = [(2 * pairs, rung) for pairs in sections for rung in range(pairs)]
    return Pairs(dims=dims, axes=axes, rungs=rungs, num_axes=len(sections))


def sections_of(sections: Any, pairs: int) -> tuple[int, ...]:
    """How many of these pairs each axis has, as a constructor was given it."""
    remedy = "rotary_dim / 2 pairs in all"
    given = entries("sections", sections, remedy)
    counts = tuple(whole("an entry of sections", count, 0, remedy=remedy) for count in given)
    if sum(counts) != pairs:
        raise RangeError(f"got {shown(counts)} for sections, expected them to add up to {pairs} pairs", remedy)
    return counts


def _two(name: str, pair: Any, high: int = MAX_DIM - 1) -> tuple[int, int]:
    remedy = "two numbers each, such as (0, 1)"
    given = entries(name, pair, remedy)
    if len(given) != 2:
        raise RangeError(f"got {shown(pair)} in {name}", remedy)
    one, other = (whole(f"an entry of {name}", each, 0, high, remedy=remedy) for each in given)
    return one, other


def _rung(each: Any) -> tuple[int, int]:
    ladder, rung = _two("rungs", each, MAX_DIM)
    whole("the ladder of an entry of rungs", ladder, 1, MAX_DIM, remedy="the dimensions of all its pairs, such as 64")
    if rung >= (ladder + 1) // 2:
        got = f"got rung {rung} of a ladder over {ladder} dimensions in rungs"
        raise RangeError(got, f"0 to {(ladder + 1) // 2 - 1}")
    return ladder, rung
