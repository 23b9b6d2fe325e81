"""The reports of `locant.probe`: numbers, sentences and warnings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import nn

from locant.position_costs import matters
from locant.positions.base import PositionEncoding
from locant.probing.costs import ROUNDING_COSTS, Finding
from locant.probing.norm import NormReport
from locant.probing.precision import CAST_UP_TO, EXACT, RESTARTS, UNHARMED, Arrangement
from locant.probing.rotation import EVEN, NEAR, ROUNDED, Rotation, odd_pairs
from locant.spelling import spell

SIDES = ("queries", "keys")

DEPENDS = 1e-3
"""Scores depend on more than distances if they change by more than this share of |q| |k| over a thousand positions."""

FACTOR = 1e-5
"""Relative changes of a length up to this size are ignored."""

ROUNDED_TABLES = 2.0**-6
"""Relative changes of lengths and of scores up to this size may come from cosines and sines in bfloat16."""
ROUNDED_ANGLES = 2.0**-3
"""Changes of angles up to this size, in radians at positions up to 61, may come from angles in bfloat16."""

NEGLIGIBLE = 1e-2
"""Changes of an angle by a cast are ignored up to this size, in radians at positions up to 4,097."""
UNEXPLAINED = "which no known rounding explains"

ARRANGED = {
    "neighbours": "The rotation of a token depends on the tokens next to it, so it is wrong with left padding, with a "
    "cache, and for positions with gaps.",
    "rows": "Rows of a batch do not have separate positions: the second row is rotated as if it were another row.",
    "grows_at": "The rotation of a token depends on the largest position in the call (from {:,} on), so it does not "
    "match the keys in a cache.",
    "remembers": "The rotation depends on earlier calls: after a long sequence, a short one is rotated differently.",
    "crowds": "Some tokens are rotated differently among thousands of tokens than among a few, as if another kernel "
    "were chosen for many tokens.",
    "strided": "Tokens in a view of a larger tensor, such as a fused projection, are rotated differently, or the rest "
    "of that tensor changes.",
    "writes": "It overwrites the tokens that are passed to it.",
}
"""A description of the problem for each part of an `Arrangement`."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report of `locant.probe`. `str` returns it in sentences.

    Args:
        subject: the name of the target.
        called: the calling convention that worked.
        encoding: the encoding of this package with the same effect, if there is one.
        agrees: the largest difference from `encoding` in random tokens at positions up to 61, added vectors or biases.
            ``None`` if nothing was compared.
        expected: the encoding that the target was compared with.
        differences: the differences from `expected`.
        costs: the id of each difference in `locant.position_costs`, if the cost of such a mistake was measured.
    """

    subject: str
    called: str
    encoding: PositionEncoding | None
    agrees: float | None
    expected: PositionEncoding | None
    differences: tuple[str, ...]
    costs: tuple[str | None, ...] = ()

    @property
    def compared(self) -> str:
        """A description of what was compared with the encoding."""
        return f"on random tokens at positions up to {NEAR[-1]}"

    @property
    def warnings(self) -> tuple[str, ...]:
        """Descriptions of mistakes and risks, the most important first."""
        return tuple(text for _, text in self._describe_findings())

    def _describe_findings(self) -> Iterator[tuple[Finding, str]]:
        """Yield the findings in words. The cost of a mistake is stated once."""
        kinds = set[str | None]()
        for finding in self._findings():
            yield finding, finding.text if finding.kind in kinds else str(finding)
            kinds.add(finding.kind)

    def _findings(self) -> list[Finding]:
        costs = (*self.costs, *[None] * (len(self.differences) - len(self.costs)))
        named = zip(self.differences, costs, strict=True)
        parted = [Finding(f"It is not {self.expected!r}: {text}.", self._kind(kind)) for text, kind in named]
        return sorted([*self._warnings(), *parted], key=lambda finding: finding.rank)

    def _kind(self, kind: str | None) -> str | None:
        """Return the id of a difference, which other measurements may know if the comparison does not."""
        return kind

    def _warnings(self) -> Iterator[Finding]:
        raise NotImplementedError

    def _facts(self) -> Iterator[str]:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return {**{each.name: _plain(getattr(self, each.name)) for each in fields(self)}, "warnings": [*self.warnings]}

    def __str__(self) -> str:
        lines = [f"{self.subject}, called as {self.called}.", *self._facts()]
        if self.encoding is not None:
            lines.append(f"The same as {self.encoding!r}, to {spell(self.agrees or 0, 2)} {self.compared}.")
        findings = (
            f"{'Warning' if finding.matters else 'Note'}: {text}" for finding, text in self._describe_findings()
        )
        return "\n".join([*lines, *findings])


@dataclass(frozen=True, kw_only=True)
class RotationReport(Report):
    """The report on a target that rotates tokens.

    Args:
        head_dim: the width of a head.
        axes: the number of indices of a position.
        given: whether the target takes positions that have an effect. Otherwise it counts tokens from 0.
        queries, keys: the rotation of each side, one object if both sides are rotated equally.
        each: the encoding with the angles of queries and the encoding with the angles of keys, if the sides differ.
        shifts: the change of q . k, relative to the lengths of q and k, for each common shift of their positions.
        errors: the largest error of an angle at each position, in radians. Empty if the true angles are not known. This
            field and the following fields about angles describe the side with the larger errors.
        last: the last position whose angles were measured.
        rounding: the arithmetic that explains the angles, or ``None`` if no known arithmetic does.
        uneven: if neither the true angles nor an exact rounding are known, the first position whose angles do not grow
            evenly, and the error of these angles.
        worse: the side with the larger errors, if the angles of the two sides are rounded differently.
        casts: for each narrower dtype, the largest error up to position 4,097 after a cast of the module, and the
            rounding that explains it.
        sampled: whether the errors after casts were measured only at a few positions.
        narrow: the rounding that explains the angles of bfloat16 tokens, or ``None`` if it was not measured.
        arrangement: the dependence of the rotation on more than the position of a token.
        ended: the error that a position after `last` raises, if the positions end there.
        norm: the report on a norm before the rotation, if one was expected.
        note: another remark.
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
    sampled: bool = False
    ended: str | None = None
    norm: NormReport | None = None
    note: str | None = None

    @property
    def moves(self) -> bool:
        """Return whether positions have any effect."""
        return self.queries.moves or self.keys.moves

    @property
    def is_rotation(self) -> bool:
        """Return whether both members of every pair have the same angle, in queries and in keys."""
        blocks = (*self.queries.blocks, *self.keys.blocks)
        return bool(blocks) and all(block.is_rotation for block in blocks)

    @property
    def layout(self) -> str | None:
        """The layout: ``"half"``, ``"interleaved"``, ``"of its own"``, or ``None`` if there are no pairs."""
        dims = [block.dims for block in self.queries.blocks]
        count = len(dims)
        if dims == [(i, i + count) for i in range(count)]:
            return "half" if dims else None
        return "interleaved" if dims == [(2 * i, 2 * i + 1) for i in range(count)] else "of its own"

    @property
    def reversed(self) -> bool:
        """Return whether every pair is rotated from its second dimension towards its first."""
        return bool(self.queries.blocks) and all(sum(block.frequencies) < 0 for block in self.queries.blocks)

    @property
    def reciprocal(self) -> bool:
        """Return whether keys shrink as queries grow, as with xPos."""
        near = [move for shift, move in self.shifts.items() if shift <= 1000]
        grows = self.queries is not self.keys and self.queries.change > FACTOR
        return grows and bool(near) and max(near) < DEPENDS

    def _facts(self) -> Iterator[str]:
        q, k, width = self.queries, self.keys, self.head_dim
        side, name = (q, SIDES[0]) if q.blocks else (k, SIDES[1])
        blocks = side.blocks
        yield from () if self.norm is None else self.norm.facts()
        if not blocks:
            return
        rotated = f"{2 * len(blocks)} of {width} dimensions" if 2 * len(blocks) < width else f"all {width} dimensions"
        of = "" if q is k or self.reciprocal else f" of {name}"
        pairs = first_and_last(block.dims for block in blocks)
        yield f"It rotates {rotated}{of}, in pairs {pairs}: layout {self.layout}."
        if self.axes > 1:
            runs = [sum(axis in block.axes for block in blocks) for axis in range(self.axes)]
            yield "Pairs per axis: " + ", ".join(f"{count} follow axis {axis}" for axis, count in enumerate(runs)) + "."
        if side.bent <= EVEN:
            speeds = [abs(each) for block in blocks for each in block.frequencies if each]
            yield f"Frequencies from {spell(max(speeds))} down to {spell(min(speeds))} radians per position."
        if max(abs(q.factor - 1), abs(k.factor - 1)) > FACTOR:
            yield f"Queries are multiplied by {spell(q.factor)}, keys by {spell(k.factor)}."
        if q.order is not None and q.order == k.order:
            yield "Dimensions come back in another order, which scores do not see."
        if q.num_heads is not None:
            yield f"Only the first {q.num_heads} heads are rotated."
        if self.reciprocal:
            yield "Queries grow with position as keys shrink, so that scores depend on distances alone (xPos)."
        for name, encoding in zip(SIDES, self.each, strict=False):
            if encoding is not None:
                yield f"By themselves, {name} have the pairs, frequencies and lengths of {encoding!r}."
        of = "" if self.worse is None else f" of {self.worse}"
        if self.errors:
            places = [place for place in self.errors if place > 1] or [*self.errors]
            phrase = ", ".join(f"{spell(self.errors[place], 2)} at {place:,}" for place in places)
            why = self.rounding or "none is known"
            yield f"Angles{of} are off by {phrase} (radians). The explanation: {why}."
        elif self.rounding is not None:
            phrase = "continue evenly" if self.rounding == EXACT else f"are those of {self.rounding}"
            limit = "Frequencies are known as far as they were measured, so errors of angles are not"
            yield f"{limit}: up to position {self.last:,} angles{of} {phrase}."
        if self.ended is not None:
            yield f"Its positions end at {self.last:,}: a later one raises {self.ended}."
        if self.note is not None:
            yield self.note
        if self.arrangement.grows_at is not None:
            largest = f"{self.arrangement.grows_at:,} or more"
            yield f"Small positions are rotated differently if the call has a position of {largest}."

    def _warnings(self) -> Iterator[Finding]:
        q, k, of_which = self.queries, self.keys, self.arrangement.of
        if not self.moves:
            phrase = "It does nothing that depends on positions."
            if not (q.is_multiple and k.is_multiple):
                phrase += " It changes tokens in the same way at every position, as a projection does."
            yield Finding(phrase, "not-rotated")
        yield from () if self.norm is None else map(Finding, self.norm.warnings())
        for side, of in ((q, ""),) if q is k or self.reciprocal else ((q, "Of queries: "), (k, "Of keys: ")):
            yield from (Finding(of + warning, self._rounded_tables(side)) for warning in self._no_rotation(side))
        for shift, moved in self.shifts.items():
            if moved > DEPENDS and shift <= 1000:
                change = f"q . k changes by {spell(moved, 2)} of |q| |k| when both move on by {shift:,} positions"
                yield Finding(f"Scores depend on more than distances: {change}.", self._rounded_tables(q))
                break
        if q is not k:
            yield from (
                Finding(f"Queries and keys are not {parted}.", kind)
                for parted, kind in _first_difference(q, k, self.reciprocal)
            )
        if not (q.same_heads and k.same_heads):
            yield Finding("Heads are rotated differently. This report describes the first head.")
        begin = q.begin if q.bent <= EVEN else 0
        if begin != 0 and (q is k or begin == k.begin):
            phrase = "by angles of no position" if begin is None else f"as far as position {spell(begin)} should be"
            seen = "for queries and keys alike, which attention does not see unless other code rotates one of them"
            phrase = f"Position 0 is already rotated, {phrase}. Counting begins elsewhere, {seen}."
            yield Finding(phrase, harms=False)
        sound = self.is_rotation and max(q.bent, k.bent) <= EVEN
        sound = sound and (self.reciprocal or max(q.change, k.change) <= FACTOR)
        if sound and self.axes == 1 and (times := self._times_counted()) > 1 + FACTOR:
            phrase = f"Frequencies begin at {spell(times)} radians per position, not at 1: positions are"
            if math.isclose(times, round(times), rel_tol=FACTOR):
                often = "twice" if round(times) == 2 else f"{times:.0f} times"
                kind = "rotated-twice" if often == "twice" else None
                yield Finding(f"{phrase} counted {often}, as if tokens were rotated {often}.", kind)
            else:
                yield Finding(f"{phrase} multiplied by {spell(times)}.")
        if self.reversed and sound:
            phrase = "a positive position rotates the second dimension of a pair towards the first"
            phrase = f"The direction is reversed: {phrase}."
            yield Finding(
                f"{phrase} It does not fit weights that were trained with the usual one.", "direction-reversed"
            )
        if self.axes > 1 and q.blocks and (unused := self._unused_axes()):
            one = len(unused) == 1
            phrase = (
                f"{'Axis' if one else 'Axes'} {' and '.join(map(str, unused))} {'has' if one else 'have'} no effect"
            )
            phrase = f"{phrase}: no pair of dimensions follows {'it' if one else 'them'}, as where a kernel reads one"
            yield Finding(f"{phrase} position for each token and drops the others.")
        if sound:
            yield from self._imprecise()
        if self.moves and not self.given and "positions" in self.called.split(":")[0]:
            phrase = "it counts tokens from 0, so left padding, packed documents and a cache are rotated wrongly"
            yield Finding(f"The positions that are passed to it have no effect: {phrase}.", "restarts")
        for name, phrase in ARRANGED.items():
            if part := getattr(self.arrangement, name):
                phrase = ("" if of_which is None else f"For {of_which} only: ") + phrase.format(part)
                yield Finding(phrase, harms=name != "writes")

    def _kind(self, kind: str | None) -> str | None:
        return kind or self._rounded_tables(self.queries) or self._rounded_tables(self.keys)

    def _rounded_tables(self, side: Rotation) -> str | None:
        """Return the id of the rounding that small changes of lengths and angles come from, or ``None``.

        Rounded cosines and sines change scores by as much at a large shift as at a small one. A rounded product of
        position and frequency changes them by more and more.
        """
        if not side.blocks or not FACTOR < side.change <= ROUNDED_TABLES or side.bent > ROUNDED_ANGLES:
            return None
        far = max((moved for shift, moved in self.shifts.items() if shift <= 1000), default=0.0)
        step = "float16" if side.change < ROUNDED_TABLES / 8 else "bfloat16"
        return f"tables-{step}" if max(far, side.bent) <= ROUNDED_TABLES else f"product-{step}"

    def _times_counted(self) -> float:
        """Return the angle of the fastest pair at position 1, usually 1. Return 1 if the rotation is as expected."""
        if self.expected is not None and not self.differences:
            return 1.0
        return max(abs(sum(block.frequencies)) for block in (*self.queries.blocks, *self.keys.blocks))

    def _unused_axes(self) -> list[int]:
        blocks = (*self.queries.blocks, *self.keys.blocks)
        used = {axis for block in blocks for axis in (*block.axes, *block.cosine_axes)}
        return [axis for axis in range(self.axes) if axis not in used]

    def _imprecise(self) -> Iterator[Finding]:
        """Yield warnings about wrong angles, in the target's own dtype or after a cast."""
        of, why = "" if self.worse is None else f" of {self.worse}", self.rounding or ""
        kind = "restarts" if why.startswith(RESTARTS.split("{")[0]) else ROUNDING_COSTS.get(why)
        if self.uneven is not None:
            place, error = self.uneven
            off = f"off by {spell(error, 2)} radians at position {place:,}"
            explained = f", as with {why}" if why else ""
            phrase = (
                f"Angles{of} do not continue evenly{explained}: frequencies that explain smaller positions are {off}."
            )
            yield Finding(phrase, kind)
        if self.errors and self.rounding not in UNHARMED:
            place, error = next(((p, e) for p, e in self.errors.items() if e > NEGLIGIBLE), [*self.errors.items()][-1])
            explained = f"as with {why}" if why else "which rounding of float32 products does not explain"
            phrase = f"Angles{of} are wrong, {explained}: off by {spell(error, 2)} radians at position {place:,}."
            yield Finding(phrase, kind)
        harmed = {dtype: each for dtype, each in self.casts.items() if each[0] > NEGLIGIBLE}
        if self.rounding not in (*UNHARMED, None):
            return
        kinds = {dtype: ROUNDING_COSTS.get(why or "") for dtype, (_, why) in harmed.items()}
        if not any(map(matters, kinds.values())):  # one note for all of them
            kinds = dict.fromkeys(kinds, next(iter(kinds.values()), None))
        for kind in dict.fromkeys(kinds.values()):
            casts = {dtype: each for dtype, each in harmed.items() if kinds[dtype] == kind}
            off = " and ".join(spell(error, 2) for error, _ in casts.values())
            reasons = dict.fromkeys(why or "no known rounding" for _, why in casts.values())
            explained = f"as with {' and '.join(reasons)}" if any(each[1] for each in casts.values()) else UNEXPLAINED
            off = f"{'at least' if self.sampled else 'up to'} {off} radians, {explained}"
            phrase = f"Casting its module to {' or '.join(casts)} casts its table: angles up to position"
            yield Finding(f"{phrase} {min(CAST_UP_TO, self.last):,} are then off by {off}.", kind)
        if self.narrow is not None and self.narrow not in UNHARMED and self.rounding in UNHARMED:
            kind = ROUNDING_COSTS.get(self.narrow)
            yield Finding(f"With bfloat16 tokens angles are computed in bfloat16: {self.narrow}.", kind)

    def _no_rotation(self, side: Rotation) -> Iterator[str]:
        if not side.moves:
            return
        if not side.blocks:
            phrase = f"groups of {side.mixed} dimensions depend on each other"
            phrase = (
                phrase if side.mixed > 1 else "each dimension is multiplied by a number that depends on the position"
            )
            yield f"It is not a rotation of pairs: {phrase}."
        torn = [block for block in side.blocks if block.cosine_axes]
        if torn:
            of_sine = [axis for axis in torn[0].axes if axis not in torn[0].cosine_axes]
            cosine, sine = (" and ".join(map(str, axes)) for axes in (torn[0].cosine_axes, of_sine))
            more = f", and so in {len(torn) - 1} more" if len(torn) > 1 else ""
            phrase = f"the cosine of pair {torn[0].dims} follows axis {cosine} and its sine axis {sine or 'none'}{more}"
            yield f"It is not a rotation: {phrase}."
        odd = [block for block in side.blocks if not block.is_rotation and not block.cosine_axes]
        if odd:
            speeds = f"{_per_axis(odd[0].frequencies)} and the second {_per_axis(odd[0].of_second)}"
            phrase = (
                f"the two members of {len(odd)} pairs get different angles, the first of pair {odd[0].dims} {speeds}"
            )
            phrase = f"{phrase} radians per position"
            yield f"It is not a rotation: {phrase}."
        if side.change > FACTOR and not self.reciprocal:
            change = f"{side.change:.1%}" if side.change > 1e-3 else f"{spell(side.change, 1)} of itself"
            yield f"Lengths change: up to position {NEAR[-1]}, the length of a pair changes by up to {change}."
        if side.bent > EVEN:
            bent = f"up to {spell(side.bent, 2)} radians off a straight line"
            yield f"Angles do not grow evenly with the position: {bent}."


def first_and_last(values: Iterable[Any]) -> str:
    """Return the first three values and the last value, or up to four values, in words."""
    phrase = [spell(each, 4) if isinstance(each, float) else str(each) for each in values]
    return ", ".join(phrase if len(phrase) <= 4 else [*phrase[:3], "...", phrase[-1]])


Dims = Sequence[tuple[int, int]]


def first_difference(one: Dims, other: Dims, name: str, other_name: str) -> str:
    """Describe the first difference between two lists of pairs. If one begins with the other, describe the lengths."""
    differing = (number for number, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    same = next(differing, min(len(one), len(other)))
    if same == 0:
        return f"{name} are {first_and_last(one) or 'none'}, {other_name} {first_and_last(other) or 'none'}"
    if same in (len(one), len(other)):
        return f"{name} number {len(one)}, {other_name} {len(other)}, and the first {same} are the same"
    return f"after {same} equal pairs {name} continue with {one[same]}, {other_name} with {other[same]}"


def _per_axis(frequencies: tuple[float, ...]) -> str:
    axes = [f" of axis {axis}" if len(frequencies) > 1 else "" for axis in range(len(frequencies))]
    return " and ".join(f"{spell(each, 4)}{axis}" for axis, each in zip(axes, frequencies, strict=True) if each) or "0"


def _first_difference(q: Rotation, k: Rotation, reciprocal: bool) -> Iterator[tuple[str, str | None]]:
    """Yield the differences that affect scores, as ends of "Queries and keys are not ...", and ids of the mistakes."""
    if not k.blocks or not q.blocks:
        if q.mixed == 1 or k.mixed == 1:
            yield f"rotated alike: {'keys' if q.blocks else 'queries'} are not rotated at all", None
        return
    if q.order != k.order:
        yield "given back with their dimensions in one order, which scores see", None
    if q.num_heads != k.num_heads:
        yield "rotated in the same heads", "heads-not-rotated"
    if not reciprocal and not math.isclose(q.factor, k.factor, rel_tol=FACTOR):
        scaled = f"queries are multiplied by {spell(q.factor)} and keys by {spell(k.factor)}"
        yield f"scaled alike: {scaled}, so scores by {spell(q.factor * k.factor)}", "attention-factor"
    if max(q.bent, k.bent) > EVEN:
        return
    of_q, of_k = ([block.dims for block in side.blocks] for side in (q, k))
    if of_q != of_k:
        yield f"rotated alike: {first_difference(of_q, of_k, 'pairs of queries', 'pairs of keys')}", None
        return
    odd, opposite = odd_pairs(q, k, ROUNDED / NEAR[-1])
    if odd and opposite and len(odd) == len(q.blocks):
        yield "rotated alike: keys in the opposite direction", None
    elif odd:
        (a, b), *_ = odd
        text = (
            f"rotated alike: {len(odd)} of {len(q.blocks)} pairs have other frequencies in keys, the first of them "
            f"{a.dims} with {_per_axis(b.frequencies)} for {_per_axis(a.frequencies)} radians per position"
        )
        yield text, None
    if q.begin is None or k.begin is None:
        turns = [a.offset - b.offset for a, b in zip(q.blocks, k.blocks, strict=True)]
        if any(abs(math.remainder(turn, math.tau)) > ROUNDED for turn in turns):
            yield "rotated alike at position 0: their angles differ, but not by the angle of a position", None
    elif q.begin != k.begin:
        text = (
            f"counted alike: position 0 is rotated as position {spell(q.begin)} in queries and {spell(k.begin)} in "
            f"keys, so every distance is off by {q.begin - k.begin:+.6g}"
        )
        yield text, "keys-off-by-one" if abs(q.begin - k.begin) == 1 else None


def _plain(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return repr(value)
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
