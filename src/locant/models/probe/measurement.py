"""All measurements of one rotation, put into a report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace

import torch
from torch import Tensor

from locant.errors import InputError
from locant.models.probe.arrangement import COUNTED, arrangement_of, counts_itself, require_steady, shifts
from locant.models.probe.naming import is_recognised, named
from locant.models.probe.precision import (
    FLOAT32,
    READ_OFF_NARROW,
    UNHARMED,
    Precision,
    errors_of,
    rounding_of,
    uneven_at,
)
from locant.models.probe.report import SIDES, RotationReport
from locant.models.probe.rotation import EVEN, NEAR, Rotation, begins_at, measured_rotation
from locant.models.probe.subject import Subject, counting, subject_of
from locant.models.probe.trial import FAILED, HEADS
from locant.positions.angles import AngleMode
from locant.positions.base import PositionEncoding
from locant.positions.encodings.rotary import Rotary
from locant.positions.encodings.xpos import XPos
from locant.positions.scaling import Unscaled

__all__ = ["probe_encoding", "probe_rotation"]

CAST_UP_TO = 4097
NARROW = (torch.bfloat16, torch.float16)
UNEXPLAINED = "in a way that no rounding of one number explains"
SAME = 1e-3
"""How far tokens of length 1 in each dimension may be apart; float32 angles up to 61 radians move them by 1e-5."""


def probe_rotation(subject: Subject, expected: PositionEncoding | None = None) -> RotationReport:
    """All that is measured of a rotation; short sequences come first."""
    require_steady(subject)
    if subject.given and counts_itself(subject):
        subject = counting(subject)
    if not subject.given:
        subject = subject.within(COUNTED - 1)
    q, k = measured_rotation(subject)
    differences = () if expected is None else tuple(_differences((q, k), expected))
    sides = subject.sides()
    fresh = [side if side.again is None else side.again(None) for side in sides]
    arrangement = arrangement_of(fresh[0])
    if len(fresh) > 1:
        arrangement = arrangement.with_keys(arrangement_of(fresh[1]))
    reach = subject if arrangement.grows_at is None else subject.within(arrangement.grows_at - 1)
    names = [named(side, subject.width, subject.axes) for side in ((q,) if k is q else (q, k))]
    precisions = [
        _precision(side, *of, None if differences else expected)
        for side, of in zip(reach.sides(), ((q, names[0]), (k, names[-1])), strict=False)
    ]
    precision = max(precisions, key=lambda each: each.error)
    mode: AngleMode = "float32" if precision.rounding == FLOAT32 else "exact"
    compared = ((each, _apart(subject, (q, k), each)) for each in _candidates(q, names[0], mode))
    encoding, agrees = next(((each, apart) for each, apart in compared if apart <= SAME * q.factor), (None, None))
    return RotationReport(
        subject=subject.name,
        called=subject.called,
        encoding=encoding,
        agrees=agrees,
        expected=expected,
        differences=differences,
        head_dim=subject.width,
        axes=subject.axes,
        given=subject.given,
        queries=q,
        keys=k,
        each=tuple(names) if encoding is None and k is not q else (),
        shifts=shifts(reach, q.factor * k.factor, min(precision.last, reach.limit or precision.last)),
        arrangement=arrangement,
        worse=None if precisions[0].is_like(precisions[-1]) else SIDES[precisions.index(precision)],
        **{each.name: getattr(precision, each.name) for each in fields(Precision)},
    )


def _candidates(rotation: Rotation, angles: Rotary | None, mode: AngleMode) -> Iterator[PositionEncoding]:
    """Encodings with these angles, rounded as they were found to be, which differ in what they do to lengths."""
    if angles is None:
        return
    yield angles.alike(angles=mode)
    if rotation.change > 1e-3 and angles.is_short:
        yield XPos(angles.head_dim, angles.base, layout=angles.layout, angles=mode)


def _precision(
    subject: Subject, rotation: Rotation, angles: Rotary | None, expected: PositionEncoding | None
) -> Precision:
    """What is told of errors of angles of one side; `expected` has these frequencies, if it is one."""
    if angles is None:
        return Precision()
    is_scaled = not isinstance(angles.scaling, Unscaled)
    is_measured = not isinstance(expected, Rotary) and not is_recognised(angles)
    if is_measured:
        angles = _with_frequencies(angles, {block.dims: sum(block.frequencies) for block in rotation.blocks})
    elif isinstance(expected, Rotary):
        angles = _with_frequencies(angles, dict(zip(expected.pairs.dims, expected.inv_freq.tolist(), strict=True)))
    true = _frequencies(rotation, angles)
    index, found, errors = errors_of(subject, rotation, angles)
    near = subject.within(CAST_UP_TO)
    casts = {str(dtype).removeprefix("torch."): _cast(near, rotation, angles, dtype) for dtype in NARROW}
    try:
        _, of_narrow, _ = errors_of(near, rotation, angles, torch.bfloat16)
        narrow = rounding_of(of_narrow, index[: len(of_narrow)], rotation, true, READ_OFF_NARROW) or UNEXPLAINED
    except FAILED:
        narrow = None
    rounding = rounding_of(found, index, rotation, true, is_measured=is_measured, is_scaled=is_scaled)
    coarse = rounding not in UNHARMED
    return Precision(
        errors={} if is_measured else errors,
        last=int(index[-1]),
        rounding=rounding,
        uneven=uneven_at(found, index, true, NEAR[-1]) if is_measured and coarse else None,
        casts={name: cast for name, cast in casts.items() if cast is not None},
        narrow=narrow,
    )


def _with_frequencies(angles: Rotary, of_dims: Mapping[tuple[int, int], float]) -> Rotary:
    """The same pairs with these frequencies, each of its two dimensions."""
    sizes = {frozenset(dims): abs(each) for dims, each in of_dims.items()}
    inv_freq = [sizes.get(frozenset(pair), 0.0) for pair in angles.pairs.dims]
    return Rotary(angles.head_dim, pairs=replace(angles.pairs, rungs=None, inv_freq=inv_freq))


def _cast(
    subject: Subject, rotation: Rotation, encoding: Rotary, dtype: torch.dtype
) -> tuple[float, str | None] | None:
    """How wrong its angles are once its module is cast, and why; ``None``: it is none, or cannot be called then."""
    if subject.again is None:
        return None
    try:
        index, angles, errors = errors_of(subject.again(dtype), rotation, encoding)
    except FAILED:
        return None
    return max(errors.values()), rounding_of(angles, index, rotation, _frequencies(rotation, encoding))


def probe_encoding(encoding: PositionEncoding, expected: PositionEncoding | None) -> RotationReport:
    """The same of an encoding of this package, which rotates."""
    return probe_rotation(_of_encoding(encoding), expected)


def _of_encoding(encoding: PositionEncoding) -> Subject:
    subject = subject_of(encoding)
    if subject is None:
        got = f"got {encoding!r}, which does not give {HEADS} heads back in the width they came in"
        raise InputError(got, "an encoding that rotates, such as locant.Rotary(64)")
    return subject


def _frequencies(rotation: Rotation, encoding: Rotary) -> Tensor:
    """The exact ones of the measured pairs, negative where a pair is rotated from its second dimension to its first."""
    rows = zip(encoding.pairs.dims, encoding.inv_freq.abs().tolist(), strict=True)
    of_dims = {tuple(sorted(pair)): each if pair[0] < pair[1] else -each for pair, each in rows}
    return torch.tensor([of_dims[block.dims] for block in rotation.blocks], dtype=torch.float64)


def _apart(subject: Subject, sides: tuple[Rotation, Rotation], encoding: PositionEncoding) -> float:
    """How far its queries and keys are from those of the encoding, whatever the order of dimensions they share."""
    if sides[0].order != sides[1].order:
        return math.inf
    generator = torch.Generator().manual_seed(0)
    last = 61 if subject.limit is None else min(61, subject.limit)
    orders = [torch.randperm(last + 1, generator=generator)[:16] for _ in range(subject.axes)]
    index = torch.stack(orders, -1)[None]
    x = torch.randn(1, HEADS, index.shape[1], subject.width, generator=generator)
    found, other = (torch.stack(one.rotate(x.clone(), index)) for one in (subject, _of_encoding(encoding)))
    if sides[0].order is not None:
        found = found[..., torch.tensor(sides[0].order).argsort()]
    return float((found - other).abs().max())


def _differences(found: tuple[Rotation, Rotation], expected: PositionEncoding) -> Iterator[str]:
    """Where what was measured parts from an encoding, which is measured in the same way."""
    told = [[*_parted(*sides)] for sides in zip(found, measured_rotation(_of_encoding(expected)), strict=True)]
    for side, differences in zip(SIDES, told, strict=True):
        yield from (each if told[0] == told[1] else f"of its {side}, {each}" for each in differences)
        if told[0] == told[1]:
            return


def _parted(found: Rotation, other: Rotation) -> Iterator[str]:
    """Where one side parts from the same side of an encoding."""
    ours, theirs = ({block.dims: block for block in one.blocks} for one in (found, other))
    if ours.keys() != theirs.keys():
        yield f"its pairs are {_some(ours)}, and those of the encoding {_some(theirs)}"
        return
    if found.bent > EVEN:
        yield "angles do not grow evenly with the position"
        return
    speeds = [(ours[pair], theirs[pair]) for pair in ours]
    reversed_pairs = [(a, b) for a, b in speeds if all(map(_opposite, a.frequencies, b.frequencies))]
    odd = [(a, b) for a, b in speeds if not all(map(_same, a.frequencies, b.frequencies))]
    if reversed_pairs and len(reversed_pairs) == len(odd):
        yield f"{len(reversed_pairs)} of {len(speeds)} pairs are rotated in the other direction"
    elif odd:
        a, b = odd[0]
        axes = "" if a.axes == b.axes else f" of axes {a.axes}, not {b.axes}"
        yield (
            f"{len(odd)} of {len(speeds)} pairs have another frequency, the first of them {a.dims} with "
            f"{sum(a.frequencies):.6g} for {sum(b.frequencies):.6g} radians per position{axes}"
        )
    if not math.isclose(found.factor, other.factor, rel_tol=1e-5):
        yield f"tokens are multiplied by {found.factor:.6g}, not by {other.factor:.6g}"
    begin = begins_at(found)
    if begin != begins_at(other):
        yield "position 0 is rotated " + (f"as position {begin:.6g}" if begin is not None else "as no position is")


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-12)


def _opposite(one: float, other: float) -> bool:
    return _same(one, -other)


def _some(pairs: Iterable[tuple[int, int]]) -> str:
    """The first two."""
    told = [str(pair) for pair in pairs]
    return ", ".join(told[:2]) + (" and so on" if len(told) > 2 else "") or "none"
