"""All measurements of one rotation, put into a report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from locant.errors import InputError
from locant.models.probe.arrangement import COUNTED, arrangement_of, counts_itself, require_steady, shifts
from locant.models.probe.naming import named
from locant.models.probe.precision import FLOAT32, READ_OFF_NARROW, errors_of, rounding_of
from locant.models.probe.report import RotationReport
from locant.models.probe.rotation import Rotation, measured_rotation
from locant.models.probe.subject import Subject, counting, subject_of
from locant.models.probe.trial import FAILED, HEADS
from locant.positions.angles import AngleMode
from locant.positions.base import PositionEncoding
from locant.positions.encodings.rotary import Rotary
from locant.positions.encodings.xpos import XPos

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
    angles = named(q, subject.width, subject.axes)
    fresh = subject if subject.again is None else subject.again(None)
    arrangement = arrangement_of(fresh)
    reach = subject if arrangement.grows_at is None else subject.within(arrangement.grows_at - 1)
    precision = _precision(reach, q, angles)
    last = max(precision["errors"], default=CAST_UP_TO)
    compared = ((each, _apart(subject, q, each)) for each in _candidates(q, angles, precision["rounding"]))
    encoding, agrees = next(((each, apart) for each, apart in compared if apart <= SAME * q.factor), (None, None))
    return RotationReport(
        subject=subject.name,
        called=subject.called,
        encoding=encoding,
        agrees=agrees,
        expected=expected,
        differences=() if expected is None else tuple(_differences(q, expected)),
        head_dim=subject.width,
        axes=subject.axes,
        given=subject.given,
        queries=q,
        keys=k,
        shifts=shifts(reach, q.factor * k.factor, min(last, reach.limit or last)),
        arrangement=arrangement,
        **precision,
    )


def _candidates(rotation: Rotation, angles: Rotary | None, rounding: str | None) -> Iterator[PositionEncoding]:
    """Encodings with these angles, rounded as they were found to be, which differ in what they do to lengths."""
    if angles is None:
        return
    mode: AngleMode = "float32" if rounding == FLOAT32 else "exact"
    yield angles.alike(angles=mode)
    if rotation.change > 1e-3 and angles.is_short:
        yield XPos(angles.head_dim, angles.base, layout=angles.layout, angles=mode)


def _precision(subject: Subject, rotation: Rotation, angles: Rotary | None) -> dict[str, Any]:
    """What a report says of errors of angles; nothing where the true ones are not known."""
    found: dict[str, Any] = {"errors": {}, "rounding": None, "casts": {}, "narrow": None}
    if angles is None:
        return found
    true = _frequencies(rotation, angles)
    index, measured, errors = errors_of(subject, rotation, angles)
    near = subject.within(CAST_UP_TO)
    casts = {str(dtype).removeprefix("torch."): _cast(near, rotation, angles, dtype) for dtype in NARROW}
    try:
        _, of_narrow, _ = errors_of(near, rotation, angles, torch.bfloat16)
        narrow = rounding_of(of_narrow, index[: len(of_narrow)], rotation, true, READ_OFF_NARROW) or UNEXPLAINED
    except FAILED:
        narrow = None
    return {
        "errors": errors,
        "rounding": rounding_of(measured, index, rotation, true),
        "casts": {name: cast for name, cast in casts.items() if cast is not None},
        "narrow": narrow,
    }


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


def _apart(subject: Subject, rotation: Rotation, encoding: PositionEncoding) -> float:
    """How far its queries are from those of the encoding, whatever the order in which it gives dimensions back."""
    generator = torch.Generator().manual_seed(0)
    last = 61 if subject.limit is None else min(61, subject.limit)
    orders = [torch.randperm(last + 1, generator=generator)[:16] for _ in range(subject.axes)]
    index = torch.stack(orders, -1)[None]
    x = torch.randn(1, HEADS, index.shape[1], subject.width, generator=generator)
    found, other = subject.rotate(x.clone(), index)[0], _of_encoding(encoding).rotate(x, index)[0]
    if rotation.order is not None:
        found = found[..., torch.tensor(rotation.order).argsort()]
    return float((found - other).abs().max())


def _differences(found: Rotation, expected: PositionEncoding) -> Iterator[str]:
    """Where what was measured parts from an encoding, which is measured in the same way."""
    other, _ = measured_rotation(_of_encoding(expected))
    ours, theirs = ({block.dims: block for block in one.blocks} for one in (found, other))
    if ours.keys() != theirs.keys():
        yield f"its pairs are {_some(ours)}, and those of the encoding {_some(theirs)}"
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


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-12)


def _opposite(one: float, other: float) -> bool:
    return _same(one, -other)


def _some(pairs: Iterable[tuple[int, int]]) -> str:
    """The first two."""
    told = [str(pair) for pair in pairs]
    return ", ".join(told[:2]) + (" and so on" if len(told) > 2 else "") or "none"
