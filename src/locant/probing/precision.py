"""How far angles are from the truth at positions up to 2^31 - 1, and whether a position alone decides them.

The truth is that of the encoding which the frequencies were found to be, in float64. Frequencies of no formula are
known as far as they were measured, so no errors are told of them: only whether their angles go on evenly. Angles may
also hang on neighbours, the length, other rows, or earlier calls.
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
"""One past powers of two, which narrow numbers round away."""

CAST_UP_TO = 4097
NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}

MOST_ELEMENTS = 2**23
"""The largest tensor that a call may make: what keeps a table of all positions is asked no further."""

EXPLAINED = 4e-6
"""How far angles may be from those of the rounding that explains them; an angle read off float32 is good for 1e-7."""

READ_OFF, READ_OFF_NARROW = 5e-7, 1.2e-2
"""How far an angle that is read off float32 may be from what it was, and one read off bfloat16."""

EXACT = "exact"
FLOAT32 = "float32(position) x float32(frequency)"
FLOAT64 = "float64(position) x float32(frequency)"
COUNTED_IN_FLOAT32 = "positions counted in float32"
IN_FLOAT32 = "arithmetic in float32"
UNHARMED = (EXACT, FLOAT32, FLOAT64, COUNTED_IN_FLOAT32, IN_FLOAT32)
"""No mistakes: what models are trained with, or no worse."""

RESTARTS = "positions that start again at {:,}"

UNEXPLAINED = "in a way that no rounding of one number explains"

FEW_ROUNDINGS = 2.0**-21
"""By how much of itself an angle may be off after a few operations in float32."""

ULPS = 4
"""Float32 frequencies may be so many units of the last digit away: each program has its own power function."""

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
"""The dtypes of positions, of frequencies and of their product, which angles may be, the best first."""

SAME = 1e-4
"""How far two rotations of one token may be apart at small positions; wrong ones are further by far."""

SHORT = 8
LONGEST = 2**18
CROWD = 5200
"""Tokens of two heads, for which kernels are chosen that take many at once."""

COUNTED = 2048
"""How many tokens are rotated at once where positions are counted."""


def precision_of(
    subject: Subject, rotation: Rotation, angles: Rotary | None, expected: PositionEncoding | None
) -> dict[str, Any]:
    """What a `RotationReport` tells of the angles of one side; `expected` has its frequencies, if it is one."""
    if angles is None:
        return {"errors": {}, "last": CAST_UP_TO, "rounding": None, "uneven": None, "casts": {}, "narrow": None}
    is_scaled = not isinstance(angles.scaling, Unscaled)
    is_measured = not isinstance(expected, Rotary) and not is_recognised(angles)
    of_dims = {block.dims: sum(block.frequencies) for block in rotation.blocks} if is_measured else {}
    if isinstance(expected, Rotary):
        of_dims = dict(zip(expected.pairs.dims, expected.inv_freq.tolist(), strict=True))
    if of_dims:
        sizes = {frozenset(dims): abs(each) for dims, each in of_dims.items()}
        inv_freq = [sizes.get(frozenset(pair), 0.0) for pair in angles.pairs.dims]
        angles = Rotary(angles.head_dim, pairs=replace(angles.pairs, rungs=None, inv_freq=inv_freq))
    rows = zip(angles.pairs.dims, angles.inv_freq.abs().tolist(), strict=True)
    signed = {tuple(sorted(pair)): each if pair[0] < pair[1] else -each for pair, each in rows}
    true = torch.tensor([signed[block.dims] for block in rotation.blocks], dtype=torch.float64)
    index, measured, errors, ended = _errors(subject, rotation, angles)
    near, casts, narrow, sampled = subject.within(min(CAST_UP_TO, int(index[-1]))), {}, None, False
    for name, dtype in NARROW.items() if subject.original is not None else ():
        with contextlib.suppress(*CALL_ERRORS):
            after = near.fresh_copy(dtype)
            places, cast, off, _ = _errors(after, rotation, angles)
            largest = _largest_error(after, rotation, angles)
            sampled = sampled or largest is None
            casts[name] = max([*off.values(), largest or 0.0]), _rounding(cast, places, rotation, true)
    with contextlib.suppress(*CALL_ERRORS):
        if not subject.convention.undoes_norm:  # what narrow tokens make of a norm comes before all angles
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
    """Positions, the angles there of tokens in a dtype, ``[positions, pairs]``, the largest error at each, and an end.

    That is the name of the error with which the position after the last one ends, where there is such a position.
    """
    measure, ended = _angle_reader(rotation, encoding, subject, dtype), None
    errors: dict[int, float] = {}
    rows: list[Tensor] = []
    before = MAX_INT32
    asked = sorted({min(place, subject.limit) for place in FAR})
    while asked:
        place = asked.pop(0)
        with _Largest() as sizes:
            try:
                angles, truth = measure(subject.index(place))
            except MemoryError:
                break
            except CALL_ERRORS as error:
                if ended is None and errors:  # its positions end between this one and the one before
                    ended, asked = type(error).__name__, [_last_place(subject, max(errors), place)]
                    continue
                break
        errors[place] = float(wrapped(angles - truth).abs().max())
        rows.append(angles)
        if sizes.largest > max(MOST_ELEMENTS // 16, before):  # it grows: the next would be 16 times as large
            break
        before = sizes.largest
    if not rows:
        raise ValueError("at no position")
    return torch.tensor([*errors]), torch.cat(rows), errors, ended


def _last_place(subject: Subject, works: int, fails: int) -> int:
    """The last position between the two that it can be asked for."""
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
    """The largest error of an angle among all positions; ``None``: it does not take them at once."""
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
    """What reads the angles at an index ``[1, seq, axes]`` off tokens in a dtype, and the true ones."""
    dims = torch.tensor([block.dims for block in rotation.blocks])
    x = torch.zeros(1, HEADS, 1, subject.width, dtype=torch.float64)
    x[..., dims[:, 0]] = 1  # one vector tells the angles of all pairs

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
    angles: Tensor, index: Tensor, frequencies: Tensor, of: int, share: float = FEW_ROUNDINGS
) -> tuple[int, float] | None:
    """The first position whose angles no frequency explains that explains those before, and how far they are off.

    A frequency is known from positions up to `of`, and better from each farther one that it explains. An angle may be
    off by a share of itself.
    """
    for place, row in zip(index.tolist(), angles, strict=True):
        apart = wrapped(row - place * frequencies)
        if bool((apart.abs() > READ_OFF * (1 + place / of) + share * place * frequencies.abs()).any()):
            return place, float(apart.abs().max())
        if place > of:
            frequencies, of = frequencies + apart / place, place
    return None


def _rounding(
    angles: Tensor, index: Tensor, rotation: Rotation, frequencies: Tensor, within: float = EXPLAINED, *,
    is_measured: bool = False, is_scaled: bool = False,
) -> str | None:  # fmt: skip
    """What gives these angles, ``[positions, pairs]``: ``"exact"``, one of `ROUNDINGS`; ``None``: none of them.

    Cosines of narrow angles are narrow too, which moves the angle that is read off them. Frequencies that were measured
    are exact where angles go on evenly. Scaled ones may have taken a rounding more.
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
        for name, (of_index, of_speed, of_product) in ROUNDINGS:
            speeds = frequencies[None, None] if of_speed == torch.float64 else candidates
            wide = torch.promote_types(of_index, of_speed)
            product = (index[:, None].to(of_index).to(wide) * speeds.to(of_speed).to(wide)).to(of_product)
            apart = wrapped(product.double() - angles).abs().amax(1)
            if float(apart.amin(0).max()) <= (within if name in UNHARMED else allowed):
                return name
        if allowed == within:
            few = exact <= within + FEW_ROUNDINGS * index[:, None] * frequencies.abs()
            even = is_measured and _uneven(angles, index, frequencies, NEAR[-1]) is None
            if even or (is_scaled and bool(few.all())):
                return IN_FLOAT32
            for length in (2**power for power in range(6, 21)):
                again = (index % length)[:, None].double() * frequencies
                allowance = within + FEW_ROUNDINGS * again.abs()
                if length < int(index[-1]) and bool((wrapped(again - angles).abs() <= allowance).all()):
                    return RESTARTS.format(length)
    return None


class _Largest(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor):
                self.largest = max(self.largest, each.numel())
        return result


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """What else a rotation depends on.

    Args:
        neighbours: positions of one call are no consecutive numbers, or some of them equal: left padding, a cache.
        rows: rows of a batch with positions of their own.
        grows_at: the largest position of a call from which on small positions too are rotated otherwise.
        remembers: a short sequence is rotated otherwise after a long one.
        writes: it overwrites what it is given, and returns something, too.
        crowds: among thousands of tokens some are rotated otherwise than among a few.
        strided: tokens that are a view into a larger tensor are rotated otherwise, or what lies beside them changes.
        of: the one side of which that holds, ``"queries"`` or ``"keys"``; ``None``: both, or more than one thing.
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
        """That of queries and that of keys in one."""
        if self == keys:
            return self
        either = {each.name: getattr(self, each.name) or getattr(keys, each.name) for each in fields(self)}
        begins = [each for each in (self.grows_at, keys.grows_at) if each is not None]
        of = "keys" if self == Arrangement() else "queries" if keys == Arrangement() else None
        return replace(self, **{**either, "grows_at": min(begins, default=None), "of": of})


def steady(subject: Subject) -> Subject:
    """What gives the same when it is called again; as what counts tokens itself, where positions have no effect."""
    x, near = _random(subject, SHORT), subject.index(*range(SHORT))
    one, again = (torch.cat(subject.rotate(x.clone(), near)) for _ in range(2))
    refuse_unsteady(subject.target, one, again)
    if subject.convention.takes_positions:
        x, places = _random(subject, 5), [subject.index(*range(begin, begin + 5)) for begin in (0, 7)]
        here, there = (torch.cat(subject.rotate(x.clone(), index)) for index in places)
        subject = subject.with_counting() if torch.equal(here, there) else subject
    subject = subject if subject.convention.takes_positions else subject.within(COUNTED - 1)
    try:
        subject.rotate(_random(subject, 1), subject.index(min(NEAR[-1], subject.limit)))
    except CALL_ERRORS:  # it has few positions
        subject = subject.within(_last_place(subject, SHORT - 1, NEAR[-1]))
    return subject


def arrangement_of(subject: Subject) -> Arrangement:
    """All of it; short sequences come first, so that what remembers has nothing to remember yet."""
    x, near, given = _random(subject, SHORT), range(SHORT), subject.convention.takes_positions
    rotated = _rotated(subject, x, near)
    written = x.clone()
    subject.rotate(written, subject.index(*near))
    alone = rows = False
    if given:
        places = [place for place in (0, 0, 0, 1, 2, 3, 40, 41) if place <= subject.limit]
        tokens = _random(subject, len(places))
        whole = _rotated(subject, tokens, places)
        for number, place in enumerate(places):
            one = _rotated(subject, tokens[:, :, number : number + 1], [place])
            alone = alone or _apart(one, whole[:, :, number : number + 1])
        last = min(30, subject.limit)
        tokens, second = _random(subject, 5).repeat(3, 1, 1, 1), range(last - 4, last + 1)
        # More rows than heads, so that no code takes one for the other.
        batch = _rotated_or_none(subject, tokens, range(5), second, range(5))
        rows = batch is not None and _apart(batch[1:2], _rotated(subject, tokens[1:2], second))
    grows_at = _grows_at(subject)
    longest = min(LONGEST, 4 * (grows_at or COUNTED)) if subject.limit == MAX_INT32 else subject.limit
    long = (torch.cat([x, x[:, :, :1]], 2), (*near, longest - 1)) if given else (_random(subject, 1), [longest - 1])
    _rotated_or_none(subject, *long)
    remembers, writes = _apart(_rotated(subject, x, near), rotated), not torch.equal(written, x)
    return Arrangement(
        neighbours=alone, rows=rows, grows_at=grows_at, remembers=remembers, writes=writes and not subject.convention.writes,
        crowds=given and not (alone or remembers) and _crowds(subject, x, rotated),
        strided=_strided(subject, x, rotated),
    )  # fmt: skip


def _crowds(subject: Subject, x: Tensor, few: Tensor) -> bool:
    """Whether the same tokens at the same small positions come out otherwise when there are many: kernels differ."""
    if subject.convention.one_by_one:
        return False
    many = [place % SHORT for place in range(CROWD)]
    rotated = _rotated_or_none(subject, x[:, :, many], many)
    return rotated is not None and (bool(rotated.isnan().any()) or _apart(rotated, few[:, :, many]))


def _strided(subject: Subject, x: Tensor, rotated: Tensor) -> bool:
    """Whether tokens in the middle third of a tensor come out otherwise, or what lies beside them changes."""
    wide = torch.ones(*x.shape[:-1], 3 * subject.width)
    view = wide[..., subject.width : 2 * subject.width]
    view.copy_(x)
    try:
        other = subject.rotate(view, subject.index(*range(SHORT)))[0]
    except CALL_ERRORS:
        return False
    beside = torch.cat([wide[..., : subject.width], wide[..., 2 * subject.width :]], -1)
    return _apart(other, rotated) or not bool((beside == 1).all())


def shifts_of(subject: Subject, factor: float, limit: int) -> dict[int, float]:
    """By how much q . k changes when both move on together, over the lengths of both, by how far they moved.

    `factor` is by what q . k is multiplied.
    """
    x = _random(subject, 4)
    where = (0, 1, 3, 7)
    scores: dict[int, Tensor] = {}
    for shift in (0, 1, 64, 1000, 65_536, 2**20):
        if shift + max(where) > limit:
            break
        try:
            q, k = subject.rotate(x.clone(), subject.index(*(shift + place for place in where)))
        except CALL_ERRORS:  # its positions end before
            break
        scores[shift] = q.double() @ k.double().mT
    size = x.double().norm(dim=-1)
    lengths = size[..., :, None] * size[..., None, :] * factor
    return {shift: float(((score - scores[0]) / lengths).abs().max()) for shift, score in scores.items() if shift}


def _grows_at(subject: Subject) -> int | None:
    """The smallest last position, in a power of two or between, at which small positions are rotated otherwise."""
    x = _random(subject, SHORT)
    given, longer = _rotated(subject, x, range(SHORT)), torch.cat([x, x[:, :, :1]], 2)

    def changes(last: int) -> bool:
        rotated = _rotated_or_none(subject, longer, (*range(SHORT), last))
        return rotated is not None and _apart(rotated[:, :, :SHORT], given)

    end = COUNTED if not subject.convention.takes_positions else LONGEST if subject.limit == MAX_INT32 else subject.limit
    low, high = SHORT, 2 * SHORT
    while high <= end and not changes(high - 1):
        low, high = high, 2 * high
    if high > end:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if changes(middle - 1) else (middle, high)
    return high - 1


def _apart(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) > SAME


def _rotated(subject: Subject, x: Tensor, *rows: Sequence[int]) -> Tensor:
    """Queries of a copy of tokens at these positions of each row."""
    return subject.rotate(x.clone(), torch.cat([subject.index(*row) for row in rows]))[0].clone()


def _rotated_or_none(subject: Subject, x: Tensor, *rows: Sequence[int]) -> Tensor | None:
    try:
        return _rotated(subject, x, *rows)
    except CALL_ERRORS:
        return None


def _random(subject: Subject, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(1, HEADS, tokens, subject.width, generator=generator)
