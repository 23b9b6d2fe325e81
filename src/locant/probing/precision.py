"""Measure the errors of angles at positions up to 2^31 - 1, and whether angles depend on more than the position.

The true angles come from the encoding that has the measured frequencies, in float64. Frequencies without a formula are
only as exact as the measurement. So for them we do not report errors, but whether angles grow evenly. Angles may also
depend on neighbours, the length, other rows, or earlier calls.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from locant.arguments import MAX_INT32
from locant.positions.base import PositionEncoding
from locant.positions.encodings.rotary import Rotary
from locant.positions.positions import Positions
from locant.positions.scaling import Unscaled
from locant.probing.rotation import NEAR, Rotation, is_recognised, wrapped
from locant.probing.subject import Subject, refuse_unsteady
from locant.probing.token_calls import CALL_ERRORS, HEADS

FAR = (1, 257, 1025, 4097, 16_385, 65_537, 2**20 + 1, 2**24 + 1, 2**28 + 1, MAX_INT32)
"""Positions just above powers of two, which narrow dtypes round."""

CAST_UP_TO = 4097
NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}

MOST_ELEMENTS = 2**23
"""The largest tensor that a call may make. If a target makes a table of all positions, this limits the positions."""

EXPLAINED = 4e-6
"""The largest difference of angles from a rounding that explains them. Angles from float32 are exact to 1e-7."""

READ_OFF, READ_OFF_NARROW = 5e-7, 1.2e-2
"""The largest error of an angle that is computed from float32 results, and from bfloat16 results."""

EXACT = "exact"
FLOAT32 = "float32(position) x float32(frequency)"
FLOAT64 = "float64(position) x float32(frequency)"
COUNTED_IN_FLOAT32 = "positions counted in float32"
IN_FLOAT32 = "arithmetic in float32"
UNHARMED = (EXACT, FLOAT32, FLOAT64, COUNTED_IN_FLOAT32, IN_FLOAT32)
"""Roundings that are not mistakes, because models are trained with them or because they are not worse."""

RESTARTS = "positions that start again at {:,}"

UNEXPLAINED = "in a way that no rounding of one number explains"

FEW_ROUNDINGS = 2.0**-21
"""The largest relative error of an angle after a few operations in float32."""

ULPS = 4
"""The largest difference of float32 frequencies, in units in the last place, because power functions differ."""

Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]

F32, F64 = torch.float32, torch.float64
ROUNDINGS: tuple[tuple[str, Dtypes], ...] = (
    (FLOAT32, (F32, F32, F32)),
    (FLOAT64, (F64, F32, F64)),
    (COUNTED_IN_FLOAT32, (F32, F64, F64)),
    *(
        (name.format(kind), dtypes)
        for kind, dtype in NARROW.items()
        for name, dtypes in (
            ("{} frequencies", (F32, dtype, F32)),
            ("{} frequencies", (F64, dtype, F64)),
            ("positions counted in {}", (dtype, F32, F32)),
            ("positions counted in {}", (dtype, F64, F64)),
            ("{0}(position) x {0}(frequency)", (dtype, dtype, dtype)),
            ("angles rounded to {}", (F32, F32, dtype)),
        )
    ),
)
"""Possible dtypes of positions, of frequencies and of their product, the most exact first."""

SAME = 1e-4
"""The largest difference of two equal rotations at small positions. Wrong ones differ by much more."""

SHORT = 8
LONGEST = 2**18
CROWD = 5200
"""A number of tokens for which code may choose another kernel."""

COUNTED = 2048
"""The largest number of tokens in one call of a target that counts positions."""


def precision_of(
    subject: Subject, rotation: Rotation, angles: Rotary | None, expected: PositionEncoding | None
) -> dict[str, Any]:
    """Return the fields of a `RotationReport` for the angles of one side. `expected` has the true frequencies."""
    if angles is None:
        return {"errors": {}, "last": CAST_UP_TO, "rounding": None, "uneven": None, "casts": {}, "narrow": None}
    is_scaled = not isinstance(angles.scaling, Unscaled)
    is_measured = not isinstance(expected, Rotary) and not is_recognised(angles)
    by_dims = {block.dims: sum(block.frequencies) for block in rotation.blocks} if is_measured else {}
    if isinstance(expected, Rotary):
        by_dims = dict(zip(expected.pairs.dims, expected.inv_freq.tolist(), strict=True))
    if by_dims:
        sizes = {frozenset(dims): abs(each) for dims, each in by_dims.items()}
        inv_freq = [sizes.get(frozenset(pair), 0.0) for pair in angles.pairs.dims]
        angles = Rotary(angles.head_dim, pairs=replace(angles.pairs, rungs=None, inv_freq=inv_freq))
    rows = zip(angles.pairs.dims, angles.inv_freq.abs().tolist(), strict=True)
    signed = {tuple(sorted(pair)): each if pair[0] < pair[1] else -each for pair, each in rows}
    true = torch.tensor([signed[block.dims] for block in rotation.blocks], dtype=torch.float64)
    index, measured, errors, ended = _errors(subject, rotation, angles)
    near, casts, narrow, sampled = subject.within(min(CAST_UP_TO, int(index[-1]))), {}, None, False
    for name, dtype in NARROW.items() if subject.original is not None else ():
        with contextlib.suppress(*CALL_ERRORS):
            cast_subject = near.fresh_copy(dtype)
            places, cast, cast_errors, _ = _errors(cast_subject, rotation, angles)
            largest = _largest_error(cast_subject, rotation, angles)
            sampled = sampled or largest is None
            casts[name] = max([*cast_errors.values(), largest or 0.0]), _rounding(cast, places, rotation, true)
    with contextlib.suppress(*CALL_ERRORS):
        if not subject.convention.undoes_norm:  # narrow tokens make a norm inexact, which hides the angles
            places, cast, _, _ = _errors(near, rotation, angles, torch.bfloat16)
            narrow = _rounding(cast, places, rotation, true, READ_OFF_NARROW) or UNEXPLAINED
    rounding = _rounding(measured, index, rotation, true, is_measured=is_measured, is_scaled=is_scaled)
    uneven = _uneven(measured, index, true, NEAR[-1]) if is_measured and rounding not in UNHARMED else None
    return {
        "errors": {} if is_measured else errors, "last": int(index[-1]), "rounding": rounding, "uneven": uneven,
        "casts": casts, "sampled": sampled, "narrow": narrow, "ended": ended,
    }  # fmt: skip


def _errors(
    subject: Subject, rotation: Rotation, encoding: Rotary, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, dict[int, float], str | None]:
    """Return positions, their angles ``[positions, pairs]``, the largest error at each position, and a name.

    This is the name of the error that the position after the last one raises, or ``None`` if there is no error.
    """
    measure, ended = _angle_reader(rotation, encoding, subject, dtype), None
    errors: dict[int, float] = {}
    rows: list[Tensor] = []
    before = MAX_INT32
    queue = sorted({min(place, subject.limit) for place in FAR})
    while queue:
        place = queue.pop(0)
        with _Largest() as sizes:
            try:
                angles, truth = measure(subject.index(place))
            except MemoryError:
                break
            except CALL_ERRORS as error:
                if ended is None and errors:  # the last position is between two tried ones
                    ended, queue = type(error).__name__, [_last_place(subject, max(errors), place)]
                    continue
                break
        errors[place] = float(wrapped(angles - truth).abs().max())
        rows.append(angles)
        if sizes.largest > max(MOST_ELEMENTS // 16, before):  # the next tensor would be 16 times as large
            break
        before = sizes.largest
    if not rows:
        raise ValueError("at no position")
    return torch.tensor([*errors]), torch.cat(rows), errors, ended


def _last_place(subject: Subject, works: int, fails: int) -> int:
    """Return the last position that works, between a position that works and a position that fails."""
    x = torch.ones(1, HEADS, 1, subject.width)
    while fails - works > 1:
        middle = (works + fails) // 2
        try:
            subject.rotate(x.clone(), subject.index(middle))
            works = middle
        except CALL_ERRORS:
            fails = middle
    return works


def _largest_error(subject: Subject, rotation: Rotation, encoding: Rotary) -> float | None:
    """Return the largest error of an angle at any position, or ``None`` if no call can take all positions."""
    if subject.convention.one_by_one:
        return None
    try:
        index = subject.index(*range(1, subject.limit + 1))
        angles, truth = _angle_reader(rotation, encoding, subject, torch.float32)(index)
    except CALL_ERRORS:
        return None
    return float(wrapped(angles - truth).abs().max())


def _angle_reader(
    rotation: Rotation, encoding: Rotary, subject: Subject, dtype: torch.dtype
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return a function of an index ``[1, seq, axes]`` that returns measured angles and true angles."""
    dims = torch.tensor([block.dims for block in rotation.blocks])
    x = torch.zeros(1, HEADS, 1, subject.width, dtype=torch.float64)
    x[..., dims[:, 0]] = 1  # one vector shows the angles of all pairs

    def angles_of(rotated: Tensor) -> Tensor:
        entries = rotated[0, 0].double()
        return torch.atan2(entries[:, dims[:, 1]], entries[:, dims[:, 0]])

    def read(index: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.expand(-1, -1, index.shape[1], -1)
        rotated = subject.rotate(tokens.to(dtype).clone(), index)[0]
        angles = angles_of(rotation.in_order(rotated)) - _offsets(rotation)
        truth = encoding.rotate_one(tokens, Positions.of(index if subject.axes > 1 else index[..., 0]))
        return angles, angles_of(truth)

    return read


def _offsets(rotation: Rotation) -> Tensor:
    return torch.tensor([block.offset for block in rotation.blocks], dtype=torch.float64)


def _uneven(
    angles: Tensor, index: Tensor, frequencies: Tensor, farthest: int, share: float = FEW_ROUNDINGS
) -> tuple[int, float] | None:
    """Return the first position whose angles do not fit the frequencies of earlier positions, and their error.

    The frequencies were measured at positions up to `farthest`. Each farther position that fits makes them more exact.
    An angle may have a relative error of `share`.
    """
    for place, row in zip(index.tolist(), angles, strict=True):
        apart = wrapped(row - place * frequencies)
        if bool((apart.abs() > READ_OFF * (1 + place / farthest) + share * place * frequencies.abs()).any()):
            return place, float(apart.abs().max())
        if place > farthest:
            frequencies, farthest = frequencies + apart / place, place
    return None


def _rounding(
    angles: Tensor, index: Tensor, rotation: Rotation, frequencies: Tensor, within: float = EXPLAINED, *,
    is_measured: bool = False, is_scaled: bool = False,
) -> str | None:  # fmt: skip
    """Return the rounding that gives these angles ``[positions, pairs]``, or ``None`` if no known rounding does.

    Cosines of narrow angles are also narrow, and this changes the angle that we compute from them. Measured frequencies
    count as exact if angles grow evenly. Scaled frequencies may have one more rounding.
    """
    if is_measured and _uneven(angles, index, frequencies, NEAR[-1], 0.0) is None:
        return EXACT
    begin = rotation.begin
    if begin and begin.is_integer():
        index, angles = index + int(begin), angles + _offsets(rotation)
    exact = wrapped(index[:, None].double() * frequencies - angles).abs()
    if float(exact.max()) <= within:
        return EXACT
    ends = [torch.full_like(frequencies, end).float() for end in (torch.inf, -torch.inf)]
    near = (itertools.accumulate([end] * ULPS, torch.nextafter, initial=frequencies.float()) for end in ends)
    candidates = torch.stack([*itertools.chain(*near)])[:, None]
    for allowed in sorted({within, READ_OFF_NARROW}):
        for name, (index_dtype, frequency_dtype, product_dtype) in ROUNDINGS:
            speeds = frequencies[None, None] if frequency_dtype == torch.float64 else candidates
            wide = torch.promote_types(index_dtype, frequency_dtype)
            product = index[:, None].to(index_dtype).to(wide) * speeds.to(frequency_dtype).to(wide)
            product = product.to(product_dtype)
            apart = wrapped(product.double() - angles).abs()
            apart = apart.masked_fill(~product.isfinite() & ~angles.isfinite(), 0.0)  # float16 ends at 65,504
            if float(apart.amax(1).amin(0).max()) <= (within if name in UNHARMED else allowed):
                return name
        if allowed == within:
            is_close = exact <= within + FEW_ROUNDINGS * index[:, None] * frequencies.abs()
            is_even = is_measured and _uneven(angles, index, frequencies, NEAR[-1]) is None
            if is_even or (is_scaled and bool(is_close.all())):
                return IN_FLOAT32
            for length in (2**power for power in range(6, 21)):
                restarted = (index % length)[:, None].double() * frequencies
                allowance = within + FEW_ROUNDINGS * restarted.abs()
                if length < int(index[-1]) and bool((wrapped(restarted - angles).abs() <= allowance).all()):
                    return RESTARTS.format(length)
    return None


class _Largest(TorchDispatchMode):
    """Record the number of elements of the largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor):
                self.largest = max(self.largest, each.numel())
        return result


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """The things other than a token's position that change its rotation.

    Args:
        neighbours: positions of one call that are equal or not consecutive, as with left padding or a cache.
        rows: rows of a batch with different positions.
        grows_at: the smallest last position of a call that also changes the rotation at small positions.
        remembers: an earlier long sequence changes the rotation of a short one.
        writes: the target overwrites its arguments, and also returns a result.
        crowds: some of thousands of tokens are rotated differently than among a few tokens.
        strided: a view into a larger tensor is rotated differently, or the rest of that tensor changes.
        of: ``"queries"`` or ``"keys"`` if only this side is affected, else ``None``.
    """

    neighbours: bool = False
    rows: bool = False
    grows_at: int | None = None
    remembers: bool = False
    writes: bool = False
    crowds: bool = False
    strided: bool = False
    of: str | None = None

    def with_keys(self, keys: Arrangement) -> Arrangement:
        """Return the union with the arrangement of keys."""
        if self == keys:
            return self
        either = {each.name: getattr(self, each.name) or getattr(keys, each.name) for each in fields(self)}
        begins = [each for each in (self.grows_at, keys.grows_at) if each is not None]
        of = "keys" if self == Arrangement() else "queries" if keys == Arrangement() else None
        return replace(self, **{**either, "grows_at": min(begins, default=None), "of": of})


def steady(subject: Subject) -> Subject:
    """Return the subject if two equal calls agree. If positions have no effect, return a subject that counts tokens.

    Raises:
        InputError: two equal calls differ.
    """
    x, near = _random(subject, SHORT), subject.index(*range(SHORT))
    first, second = (torch.cat(subject.rotate(x.clone(), near)) for _ in range(2))
    refuse_unsteady(subject.target, first, second)
    if subject.convention.takes_positions:
        x, places = _random(subject, 5), [subject.index(*range(begin, begin + 5)) for begin in (0, 7)]
        near_tokens, far_tokens = (torch.cat(subject.rotate(x.clone(), index)) for index in places)
        subject = subject.with_counting() if torch.equal(near_tokens, far_tokens) else subject
    subject = subject if subject.convention.takes_positions else subject.within(COUNTED - 1)
    try:
        subject.rotate(_random(subject, 1), subject.index(min(NEAR[-1], subject.limit)))
    except CALL_ERRORS:  # it has few positions
        subject = subject.within(_last_place(subject, SHORT - 1, NEAR[-1]))
    return subject


def arrangement_of(subject: Subject) -> Arrangement:
    """Measure the arrangement. Short sequences come first, before a target can remember a long sequence."""
    x, near, takes_positions = _random(subject, SHORT), range(SHORT), subject.convention.takes_positions
    rotated = _rotated(subject, x, near)
    written = x.clone()
    subject.rotate(written, subject.index(*near))
    alone = rows = False
    if takes_positions:
        places = [place for place in (0, 0, 0, 1, 2, 3, 40, 41) if place <= subject.limit]
        tokens = _random(subject, len(places))
        whole = _rotated(subject, tokens, places)
        for number, place in enumerate(places):
            one = _rotated(subject, tokens[:, :, number : number + 1], [place])
            alone = alone or _differ(one, whole[:, :, number : number + 1])
        last = min(30, subject.limit)
        tokens, second = _random(subject, 5).repeat(3, 1, 1, 1), range(last - 4, last + 1)
        # More rows than heads, so that no code confuses them.
        batch = _rotated_or_none(subject, tokens, range(5), second, range(5))
        rows = batch is not None and _differ(batch[1:2], _rotated(subject, tokens[1:2], second))
    grows_at = _grows_at(subject)
    longest = min(LONGEST, 4 * (grows_at or COUNTED)) if subject.limit == MAX_INT32 else subject.limit
    long = (
        (torch.cat([x, x[:, :, :1]], 2), (*near, longest - 1))
        if takes_positions
        else (_random(subject, 1), [longest - 1])
    )
    _rotated_or_none(subject, *long)
    remembers, writes = _differ(_rotated(subject, x, near), rotated), not torch.equal(written, x)
    return Arrangement(
        neighbours=alone, rows=rows, grows_at=grows_at, remembers=remembers,
        writes=writes and not subject.convention.writes,
        crowds=takes_positions and not (alone or remembers) and _crowds(subject, x, rotated),
        strided=_strided(subject, x, rotated),
    )  # fmt: skip


def _crowds(subject: Subject, x: Tensor, few: Tensor) -> bool:
    """Return whether many tokens at small positions are rotated differently from a few, as with another kernel."""
    if subject.convention.one_by_one:
        return False
    many = [place % SHORT for place in range(CROWD)]
    rotated = _rotated_or_none(subject, x[:, :, many], many)
    return rotated is not None and (bool(rotated.isnan().any()) or _differ(rotated, few[:, :, many]))


def _strided(subject: Subject, x: Tensor, rotated: Tensor) -> bool:
    """Return whether a view into the middle third of a tensor is rotated differently, or the other thirds change."""
    wide = torch.ones(*x.shape[:-1], 3 * subject.width)
    view = wide[..., subject.width : 2 * subject.width]
    view.copy_(x)
    try:
        other = subject.rotate(view, subject.index(*range(SHORT)))[0]
    except CALL_ERRORS:
        return False
    rest = torch.cat([wide[..., : subject.width], wide[..., 2 * subject.width :]], -1)
    return _differ(other, rotated) or not bool((rest == 1).all())


def shifts_of(subject: Subject, factor: float, limit: int) -> dict[int, float]:
    """Return the change of q . k, relative to the lengths of both, for each common shift of their positions.

    Args:
        factor: the factor of q . k.
    """
    x = _random(subject, 4)
    places = (0, 1, 3, 7)
    scores: dict[int, Tensor] = {}
    for shift in (0, 1, 64, 1000, 65_536, 2**20):
        if shift + max(places) > limit:
            break
        try:
            q, k = subject.rotate(x.clone(), subject.index(*(shift + place for place in places)))
        except CALL_ERRORS:  # its positions end earlier
            break
        scores[shift] = q.double() @ k.double().mT
    size = x.double().norm(dim=-1)
    lengths = size[..., :, None] * size[..., None, :] * factor
    return {shift: float(((score - scores[0]) / lengths).abs().max()) for shift, score in scores.items() if shift}


def _grows_at(subject: Subject) -> int | None:
    """Return the smallest last position that changes the rotation at small positions, or ``None`` if none does."""
    x = _random(subject, SHORT)
    rotated_alone, longer = _rotated(subject, x, range(SHORT)), torch.cat([x, x[:, :, :1]], 2)

    def changes(last: int) -> bool:
        rotated = _rotated_or_none(subject, longer, (*range(SHORT), last))
        return rotated is not None and _differ(rotated[:, :, :SHORT], rotated_alone)

    longest = LONGEST if subject.limit == MAX_INT32 else subject.limit
    end = longest if subject.convention.takes_positions else COUNTED
    low, high = SHORT, 2 * SHORT
    while high <= end and not changes(high - 1):
        low, high = high, 2 * high
    if high > end:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if changes(middle - 1) else (middle, high)
    return high - 1


def _differ(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) > SAME


def _rotated(subject: Subject, x: Tensor, *rows: Sequence[int]) -> Tensor:
    """Rotate a copy of tokens at the positions of each row, and return the queries."""
    return subject.rotate(x.clone(), torch.cat([subject.index(*row) for row in rows]))[0].clone()


def _rotated_or_none(subject: Subject, x: Tensor, *rows: Sequence[int]) -> Tensor | None:
    try:
        return _rotated(subject, x, *rows)
    except CALL_ERRORS:
        return None


def _random(subject: Subject, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(1, HEADS, tokens, subject.width, generator=generator)
