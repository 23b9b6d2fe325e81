"""What was found: numbers, sentences and warnings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import nn

from locant.models.probe.arrangement import Arrangement
from locant.models.probe.precision import EXACT, UNHARMED
from locant.models.probe.rotation import EVEN, NEAR, ROUNDED, Block, Rotation, begins_at
from locant.positions.base import PositionEncoding

__all__ = ["BIASED", "SIDES", "BiasReport", "Report", "RotationReport"]

SIDES = ("queries", "keys")

BIASED = 300
"""Tokens whose bias is looked at: past the distance of most buckets, and where bfloat16 counts in steps."""

DEPENDS = 1e-3
"""Scores that change by more than this share of |q| |k| over a thousand positions depend on more than distances."""

FACTOR = 1e-5
"""Lengths multiplied by 1 up to this share are kept."""

NEGLIGIBLE = 1e-2
"""Angles that a cast moves by no more than this, in radians up to position 4,097."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `locant.probe` found; `str` says it in sentences.

    Args:
        subject: what was probed.
        called: how it was called.
        encoding: the encoding of this package that does the same, where there is one.
        agrees: how far the two were apart on random tokens at positions up to 61, or biases; ``None``: not compared.
        expected: what it was held against.
        differences: where it parts from that.
    """

    subject: str
    called: str
    encoding: PositionEncoding | None
    agrees: float | None
    expected: PositionEncoding | None
    differences: tuple[str, ...]

    @property
    def compared(self) -> str:
        """What was compared with the encoding."""
        raise NotImplementedError

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong, or easily goes wrong, in plain words."""
        return tuple(self._warnings())

    def _warnings(self) -> Iterator[str]:
        for difference in self.differences:
            yield f"It is not {self.expected!r}: {difference}."

    def _facts(self) -> Iterator[str]:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {**{each.name: _plain(getattr(self, each.name)) for each in fields(self)}, "warnings": [*self.warnings]}

    def __str__(self) -> str:
        same = []
        if self.encoding is not None:
            same = [f"The same as {self.encoding!r}, to {self.agrees:.1e} {self.compared}."]
        warned = [f"Warning: {warning}" for warning in self.warnings]
        return "\n".join([f"{self.subject}, called as {self.called}.", *self._facts(), *same, *warned])


@dataclass(frozen=True, kw_only=True)
class RotationReport(Report):
    """What rotates tokens.

    Args:
        head_dim: the width of a head.
        axes: how many indices a position has.
        given: whether it is told positions, and they have an effect; else it counts tokens from 0.
        queries, keys: what each is multiplied by; one object where they are rotated alike.
        each: where they are not, the encoding whose angles queries have, and that whose angles keys have.
        shifts: by how much q . k changes, over the lengths of both, when both move on by so many positions.
        errors, last, rounding, uneven, casts, narrow: as in `Precision`, of the side that is further off.
        worse: that side, where something else explains the angles of the other one.
        arrangement: what else than its position a token's rotation depends on.
    """

    head_dim: int
    axes: int
    given: bool
    queries: Rotation
    keys: Rotation
    each: tuple[PositionEncoding | None, ...]
    shifts: Mapping[int, float]
    errors: Mapping[int, float]
    last: int
    rounding: str | None
    uneven: tuple[int, float] | None
    worse: str | None
    casts: Mapping[str, tuple[float, str | None]]
    narrow: str | None
    arrangement: Arrangement

    @property
    def compared(self) -> str:
        """What was compared with the encoding."""
        return "on random tokens at positions up to 61"

    @property
    def moves(self) -> bool:
        """Whether positions have any effect."""
        return any(side.blocks or side.mixed > 1 for side in (self.queries, self.keys))

    @property
    def is_rotation(self) -> bool:
        """Whether every pair of dimensions is rotated, of queries and of keys, and keeps its length up to a factor."""
        blocks = (*self.queries.blocks, *self.keys.blocks)
        return bool(blocks) and all(block.is_rotation for block in blocks)

    @property
    def layout(self) -> str | None:
        """``"half"``, ``"interleaved"`` or ``"of its own"``; ``None``: there are no pairs."""
        dims = [block.dims for block in self.queries.blocks]
        count = len(dims)
        if dims == [(i, i + count) for i in range(count)]:
            return "half" if dims else None
        return "interleaved" if dims == [(2 * i, 2 * i + 1) for i in range(count)] else "of its own"

    @property
    def reversed(self) -> bool:
        """Whether every pair is rotated from its second dimension to its first."""
        return bool(self.queries.blocks) and all(sum(block.frequencies) < 0 for block in self.queries.blocks)

    @property
    def reciprocal(self) -> bool:
        """Whether keys shrink as queries grow, as with xPos."""
        near = [move for shift, move in self.shifts.items() if shift <= 1000]
        grows = self.queries is not self.keys and self.queries.change > FACTOR
        return grows and bool(near) and max(near) < DEPENDS

    def _facts(self) -> Iterator[str]:
        number = 0 if self.queries.blocks else 1
        blocks, width = (self.queries, self.keys)[number].blocks, self.head_dim
        if not blocks:
            return
        rotated = f"{2 * len(blocks)} of {width} dimensions" if 2 * len(blocks) < width else f"all {width} dimensions"
        of = "" if self.queries is self.keys or self.reciprocal else f" of {SIDES[number]}"
        yield f"It rotates {rotated}{of}, in pairs {_some([block.dims for block in blocks])}: layout {self.layout}."
        if self.axes > 1:
            runs = {axis: sum(axis in block.axes for block in blocks) for axis in range(self.axes)}
            yield "Pairs per axis: " + ", ".join(f"{count} follow axis {axis}" for axis, count in runs.items()) + "."
        if (self.queries, self.keys)[number].bent <= EVEN:
            yield _frequencies(blocks)
        if max(abs(side.factor - 1) for side in (self.queries, self.keys)) > FACTOR:
            yield f"Queries are multiplied by {self.queries.factor:.6g}, keys by {self.keys.factor:.6g}."
        if self.queries.order is not None and self.queries.order == self.keys.order:
            yield "Dimensions come back in another order, which scores do not see."
        if self.queries.num_heads is not None:
            yield f"Only the first {self.queries.num_heads} heads are rotated."
        if self.reciprocal:
            yield "Queries grow with position as keys shrink, so that scores depend on distances alone (xPos)."
        for side, encoding in zip(SIDES, self.each, strict=False):
            if encoding is not None:
                yield f"By themselves, {side} have the pairs, frequencies and lengths of {encoding!r}."
        of = "" if self.worse is None else f" of {self.worse}"
        if self.errors:
            told = ", ".join(f"{error:.1e} at {place:,}" for place, error in self.errors.items() if place > 1)
            why = self.rounding or "nothing that is known"
            yield f"Angles{of} are off by {told} (radians); what explains it: {why}."
        elif self.rounding is not None:
            told = "go on evenly" if self.rounding == EXACT else f"are those of {self.rounding}"
            yield (
                f"Frequencies are known as far as they were measured, so errors of angles are not: up to "
                f"{self.last:,} angles{of} {told}."
            )
        if self.arrangement.grows_at is not None:
            yield f"Small positions are treated otherwise once a call has one of {self.arrangement.grows_at:,} or more."

    def _warnings(self) -> Iterator[str]:
        yield from self._no_rotation()
        yield from self._wrong_angles()
        yield from self._arranged()
        yield from super()._warnings()

    def _no_rotation(self) -> Iterator[str]:
        q, k = self.queries, self.keys
        if not self.moves:
            yield "It does nothing that depends on positions."
        for side, of in ((q, ""),) if q is k or self.reciprocal else ((q, "Of queries: "), (k, "Of keys: ")):
            yield from (of + warning for warning in self._no_rotation_of(side))
        for shift, moved in self.shifts.items():
            if moved > DEPENDS and shift <= 1000:
                yield (
                    f"Scores depend on more than distances: q . k changes by {moved:.1e} of |q| |k| when both move on "
                    f"by {shift} positions."
                )
                break
        if q is not k:
            yield from (f"Queries and keys are not {parted}." for parted in _apart(q, k, self.reciprocal))
        if not (q.same_heads and k.same_heads):
            yield "Heads are rotated differently; what is said here holds for the first one."
        begin = begins_at(q) if q.bent <= EVEN else 0
        if begin != 0 and (q is k or begin == begins_at(k)):
            told = "by angles of no position" if begin is None else f"as far as position {begin:.6g} should be"
            yield (
                f"Position 0 is rotated already, {told}: counting begins elsewhere, for queries and keys alike, which "
                f"attention does not see unless other code rotates one of them."
            )
        if self.reversed:
            yield (
                "The direction is reversed: a positive position rotates the second dimension of a pair towards the "
                "first. Weights trained with the usual direction are wrong with it."
            )

    def _no_rotation_of(self, side: Rotation) -> Iterator[str]:
        if not side.blocks and side.mixed > 1:
            yield f"It is no rotation of pairs: groups of {side.mixed} dimensions depend on each other."
        odd = [block for block in side.blocks if not block.is_rotation]
        if odd:
            yield (
                f"It is no rotation: the two members of {len(odd)} pairs get different angles, the first of pair "
                f"{odd[0].dims} {_per_axis(odd[0].frequencies)} and the second {_per_axis(odd[0].of_second)} radians "
                f"per position."
            )
        if side.change > FACTOR and not self.reciprocal:
            yield f"Lengths are not kept: up to position {NEAR[-1]} that of a pair changes by up to {side.change:.1%}."
        if side.bent > EVEN:
            yield f"Angles do not grow evenly with the position: up to {side.bent:.2g} radians off a straight line."

    def _wrong_angles(self) -> Iterator[str]:
        of = "" if self.worse is None else f" of {self.worse}"
        if self.uneven is not None and max(self.queries.bent, self.keys.bent) <= EVEN:
            place, error = self.uneven
            why = f", as with {self.rounding}" if self.rounding else ""
            yield (
                f"Angles{of} do not go on evenly{why}: frequencies that explain smaller positions are off by "
                f"{error:.2g} radians at position {place:,}."
            )
        if self.errors and self.rounding not in UNHARMED and max(self.queries.bent, self.keys.bent) <= EVEN:
            place, error = next(((p, e) for p, e in self.errors.items() if e > NEGLIGIBLE), [*self.errors.items()][-1])
            why = f"as with {self.rounding}" if self.rounding else "which rounding of float32 products does not explain"
            yield f"Angles{of} are wrong, {why}: off by {error:.2g} radians at position {place:,}."
        for dtype, (error, why) in self.casts.items():
            if error > NEGLIGIBLE and self.rounding in (*UNHARMED, None):
                told = "" if why is None else f", as with {why}"
                yield (
                    f"Casting its module to {dtype} casts its table: angles up to position 4,097 are then off by up to "
                    f"{error:.2g} radians{told}."
                )
        if self.narrow is not None and self.narrow not in UNHARMED and self.rounding in UNHARMED:
            yield f"With bfloat16 tokens angles are computed in bfloat16: {self.narrow}."

    def _arranged(self) -> Iterator[str]:
        found = self.arrangement
        of = "" if found.of is None else f"Of {found.of} alone: "
        if self.moves and not self.given and "positions" in self.called.split(":")[0]:
            yield (
                "The positions it is given have no effect: it counts tokens from 0, so left padding, packed "
                "documents and a cache are rotated wrongly."
            )
        yield from (of + warning for warning in found.warnings())


@dataclass(frozen=True, kw_only=True)
class BiasReport(Report):
    """What adds to attention scores.

    Args:
        num_heads: how many heads the bias has.
        of_distance: whether it depends on the distance alone.
        up_to_rows: whether it does once a constant of each row is taken away, which softmax does not see.
        causal: whether later keys are hidden.
        symmetric: whether earlier and later keys are told apart.
        slopes: per head, where the bias is linear in the distance; else ``None``.
        buckets: how many values there are for earlier and for later keys, where they are fewer than distances.
        farthest: the largest distance that was looked at for them.
        alike: settings of the encoding that share values out alike up to there; empty: there is one.
        of_all: whether the encoding gives the same to all keys that are not hidden, not to earlier ones alone.
        cached: whether the newest query alone gets the last row of all; ``None``: it cannot be asked for.
        rounded: the dtype that rounds the bias to steps, so that neighbouring distances share one.
    """

    num_heads: int
    of_distance: bool
    up_to_rows: bool
    causal: bool
    symmetric: bool
    slopes: tuple[float, ...] | None
    buckets: tuple[int, int] | None
    farthest: int
    alike: tuple[str, ...]
    of_all: bool
    cached: bool | None
    rounded: str | None

    @property
    def compared(self) -> str:
        """What was compared with the encoding."""
        return f"among {BIASED} tokens" + ("" if self.of_all else ", for earlier keys alone: a causal mask is needed")

    def _facts(self) -> Iterator[str]:
        yield f"It adds a bias to the scores of {self.num_heads} heads."
        if self.of_distance:
            yield f"Among {BIASED} tokens the bias is a function of the distance alone."
        elif self.up_to_rows:
            yield (
                f"Among {BIASED} tokens the bias is a function of the distance, up to a constant per row, which "
                "softmax does not see."
            )
        yield "Later keys are hidden." if self.causal else "Later keys are not hidden."
        if self.slopes is not None:
            yield f"It falls linearly with the distance, with slopes {_some(self.slopes)}."
        if self.buckets is not None:
            yield (
                f"Distances up to {self.farthest:,} share values: {self.buckets[0]} for earlier keys, "
                f"{self.buckets[1]} for later ones."
            )
        if self.symmetric and not self.causal:
            yield "Earlier and later keys at the same distance get the same."
        if self.alike:
            yield f"Distances up to {self.farthest:,} do not tell apart T5Bias with {' or '.join(self.alike)}."

    def _warnings(self) -> Iterator[str]:
        if not (self.of_distance or self.up_to_rows):
            yield "The bias depends on more than the distance."
        if self.slopes is not None and min(self.slopes) < 0:
            yield "Far tokens count more than near ones: the sign of the slopes is reversed."
        if self.buckets is not None and self.buckets[0] == 1 < self.buckets[1]:
            yield (
                "Earlier keys all get one value and later ones are told apart: the distance is counted in the other "
                "direction."
            )
        if self.cached is False:
            yield (
                "With a cache the newest query gets another bias than in the whole sequence: it is taken for the "
                "first token."
            )
        if self.rounded is not None:
            yield f"The bias is rounded to {self.rounded}: far distances share one value."
        yield from super()._warnings()


def _some(values: Any) -> str:
    """The first three, and the last one."""
    told = [f"{each:.4g}" if isinstance(each, float) else str(each) for each in values]
    return ", ".join(told if len(told) <= 4 else [*told[:3], "...", told[-1]])


def _frequencies(blocks: Sequence[Block]) -> str:
    speeds = sorted((abs(each) for block in blocks for each in block.frequencies if each), reverse=True)
    return f"Frequencies from {speeds[0]:.6g} down to {speeds[-1]:.6g} radians per position."


def _per_axis(frequencies: tuple[float, ...]) -> str:
    return " and ".join(f"{each:.4g}" + (f" of axis {axis}" if len(frequencies) > 1 else "")
                        for axis, each in enumerate(frequencies) if each) or "0"  # fmt: skip


def _apart(q: Rotation, k: Rotation, reciprocal: bool) -> Iterator[str]:
    """How keys are treated otherwise than queries, as scores see it."""
    if not k.blocks or not q.blocks:
        if q.mixed == 1 or k.mixed == 1:
            yield f"rotated alike: {'keys' if q.blocks else 'queries'} are not rotated at all"
        return
    if q.order != k.order:
        yield "given back with their dimensions in one order, which scores see"
    if q.num_heads != k.num_heads:
        yield "rotated in the same heads"
    if not reciprocal and not math.isclose(q.factor, k.factor, rel_tol=FACTOR):
        yield (
            f"scaled alike: queries are multiplied by {q.factor:.6g} and keys by {k.factor:.6g}, so scores by "
            f"{q.factor * k.factor:.6g}"
        )
    if max(q.bent, k.bent) > EVEN:
        return
    pairs = {block.dims: block for block in k.blocks}
    if pairs.keys() != {block.dims for block in q.blocks}:
        yield f"rotated alike: pairs of queries are {_some([block.dims for block in q.blocks])}, of keys {_some(pairs)}"
        return
    both = [(block, pairs[block.dims]) for block in q.blocks]
    odd = [(a, b) for a, b in both if not _near(a.frequencies, b.frequencies)]
    if odd and all(_near(a.frequencies, [-each for each in b.frequencies]) for a, b in odd) and len(odd) == len(both):
        yield "rotated alike: keys in the opposite direction"
    elif odd:
        a, b = odd[0]
        yield (
            f"rotated alike: {len(odd)} of {len(both)} pairs have other frequencies in keys, the first of them "
            f"{a.dims} with {_per_axis(b.frequencies)} for {_per_axis(a.frequencies)} radians per position"
        )
    of_q, of_k = begins_at(q), begins_at(k)
    if of_q is None or of_k is None:
        if any(abs(math.remainder(a.offset - b.offset, math.tau)) > ROUNDED for a, b in both):
            yield "rotated alike at position 0: by angles that differ as those of no two positions do"
    elif of_q != of_k:
        yield (
            f"counted alike: position 0 is rotated as position {of_q:.6g} in queries and {of_k:.6g} in keys, so every "
            f"distance is off by {of_q - of_k:+.6g}"
        )


def _near(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-5, abs_tol=ROUNDED / NEAR[-1]) for a, b in zip(one, other, strict=True))


def _plain(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return repr(value)
    if isinstance(value, Block) or is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
