"""Measure the slopes, buckets and dependence on distances of a bias that is added to attention scores."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from locant.positions.base import PositionEncoding
from locant.positions.encodings.alibi import ALiBi, alibi_slopes
from locant.positions.encodings.t5 import T5Bias
from locant.probing.costs import Finding
from locant.probing.report import Report, first_and_last
from locant.probing.subject import name_of, refuse_unsteady
from locant.probing.token_calls import CALL_ERRORS, Failures, UnusableError, function_of
from locant.spelling import dtype_name

NUM_TOKENS = 300
"""The number of tokens whose bias is measured. It exceeds most bucket counts and bfloat16's range of exact integers."""

FAR = 4096
"""The length of the row and the column in which we look for buckets, if the target can return them."""

UNBOUNDED = 2 * FAR
"""A `max_distance` that the measured values do not distinguish from a larger one."""

HIDDEN = -1e4
SAME = 1e-5

BiasOf = Callable[[int, int], Tensor]


@dataclass(frozen=True, kw_only=True)
class BiasReport(Report):
    """The report on a bias that is added to attention scores.

    Args:
        num_heads: the number of heads.
        of_distance: whether the bias depends only on the distance.
        up_to_rows: whether the bias depends only on the distance, apart from a constant per row that softmax ignores.
        causal: whether later keys are hidden.
        symmetric: whether earlier and later keys at the same distance have the same bias.
        slopes: the slope of each head if the bias is linear in the distance, else ``None``.
        slopes_of: the number of heads of an ALiBi that contains these slopes, and the number of the head with the first
            slope, or ``None`` if there is no such ALiBi.
        buckets: the numbers of different values for earlier and for later keys, if the bias is not linear and one of
            these numbers is less than half the number of distances.
        farthest: the largest distance at which buckets were measured.
        alike: all settings of the encoding that give the same buckets up to `farthest`. Empty if there is only one
            setting.
        of_all: whether the encoding agrees at later keys too, if these are not hidden.
        cached: whether a call with one query returns the last row of the matrix, or ``None`` if such a call fails.
        rounded: the dtype to which the bias is rounded, so that far distances share a value, or ``None``.
    """

    num_heads: int
    of_distance: bool
    up_to_rows: bool
    causal: bool
    symmetric: bool
    slopes: tuple[float, ...] | None
    slopes_of: tuple[int, int] | None
    buckets: tuple[int, int] | None
    farthest: int
    alike: tuple[str, ...]
    of_all: bool
    cached: bool | None
    rounded: str | None

    @property
    def compared(self) -> str:
        """A description of what was compared with the encoding."""
        return f"among {NUM_TOKENS} tokens" + (
            "" if self.of_all else ", for earlier keys alone: a causal mask is needed"
        )

    def _facts(self) -> Iterator[str]:
        yield f"It adds a bias to the scores of {self.num_heads} heads."
        if self.of_distance:
            yield f"Among {NUM_TOKENS} tokens the bias is a function of the distance alone."
        elif self.up_to_rows:
            constant = "up to a constant per row, which softmax does not see"
            yield f"Among {NUM_TOKENS} tokens the bias is a function of the distance, {constant}."
        yield "Later keys are hidden." if self.causal else "Later keys are not hidden."
        if self.slopes is not None:
            yield f"It falls linearly with the distance, with slopes {first_and_last(self.slopes)}."
            if self.slopes_of is not None and self.slopes_of[0] > self.num_heads:
                total, first = self.slopes_of
                heads = f"heads {first} to {first + self.num_heads - 1} of {total}"
                yield f"These are the slopes of {heads}, as one rank of several has them."
        if self.buckets is not None:
            counts = f"{self.buckets[0]} for earlier keys, {self.buckets[1]} for later ones"
            yield f"Distances up to {self.farthest:,} share values: {counts}."
        if self.symmetric and not self.causal:
            yield "Earlier and later keys at the same distance have the same bias."
        if self.alike:
            yield f"Distances up to {self.farthest:,} do not distinguish T5Bias with {' or '.join(self.alike)}."

    def _warnings(self) -> Iterator[Finding]:
        if not (self.of_distance or self.up_to_rows):
            yield Finding("The bias depends on more than the distance.")
        if self.slopes is not None and min(self.slopes) < 0:
            yield Finding("Far tokens count more than near ones: the sign of the slopes is reversed.")
        elif self.slopes is not None and self.slopes_of is None and self.expected is None:
            usual = first_and_last(alibi_slopes(self.num_heads))
            text = f"The slopes follow no known rule: ALiBi has {usual} for {self.num_heads} heads"
            powers = [2.0 ** (-8 * (head + 1) / self.num_heads) for head in range(self.num_heads)]
            if _are_equal(self.slopes, powers):
                text += ". They are powers of one number, as in ALiBi if the number of heads is a power of two"
            if _are_equal(self.slopes, [2.0 ** (-8 * head / self.num_heads) for head in range(self.num_heads)]):
                text += ". They begin one head too early"
            yield Finding(f"{text}. Weights that were trained with ALiBi are wrong with them.")
        if self.buckets is not None and self.buckets[0] == 1 < self.buckets[1]:
            reason = "the distance is counted in the other direction"
            yield Finding(f"Earlier keys all have one value and later keys have different ones: {reason}.")
        if self.cached is False:
            text = "With a cache the newest query gets another bias than in the whole sequence"
            yield Finding(f"{text}: it is treated as the first token.")
        if self.rounded is not None:
            yield Finding(f"The bias is rounded to {self.rounded}: far distances share one value.")


def _are_equal(slopes: Sequence[float], others: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(slopes, others, strict=True))


def _find_alibi(slopes: Sequence[float]) -> tuple[int, int] | None:
    """Return the number of heads of an ALiBi that contains these slopes, and the first such head, or ``None``."""
    count = len(slopes)
    for num_heads in (count, *(count * times for times in (2, 3, 4, 5, 6, 8, 10, 12, 16, 32, 64))):
        usual = alibi_slopes(num_heads)
        for first in range(0, num_heads, count):
            if _are_equal(slopes, usual[first : first + count]):
                return num_heads, first
    return None


def bias_report(target: Any, expected: PositionEncoding | None, failures: Failures) -> BiasReport | None:
    """Return a report on a bias, or ``None`` if no call with two lengths works. `failures` then holds the reasons."""
    for called, call in _calls(target).items():
        bias_of = partial(_bias, call)
        try:
            bias_of(5, 7)
            break
        except CALL_ERRORS as error:
            failures.setdefault(called, error)
    else:
        return None
    whole = bias_of(NUM_TOKENS, NUM_TOKENS)
    refuse_unsteady(target, whole, bias_of(NUM_TOKENS, NUM_TOKENS))
    later = torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).triu(1)
    hidden = whole <= HIDDEN
    causal = bool(hidden[:, later].all()) and not bool(hidden[:, ~later].any())
    visible = whole.masked_fill(hidden, torch.nan)
    relative = _relative(visible)
    of_distance, up_to_rows = _is_toeplitz(visible), _is_toeplitz(relative)
    earlier, after = _by_distance(bias_of, visible) if of_distance else _sides(relative)
    slopes, rounded = _slopes(earlier) if up_to_rows else (None, None)
    counts = [_count_values(side[:, 1:]) for side in (earlier, after)]
    shared = any(0 < 2 * count < side.shape[1] for count, side in zip(counts, (earlier, after), strict=True))
    encoding, alike, agrees, of_all = None, (), None, True
    if slopes is not None and rounded is None:
        usual = torch.allclose(slopes, torch.tensor(alibi_slopes(len(whole)), dtype=torch.float64), rtol=1e-5)
        encoding = ALiBi(len(whole)) if usual else ALiBi(len(whole), slopes=slopes.tolist())
    elif of_distance:
        encoding, alike = _find_t5(earlier, None if causal else after)
    if encoding is not None:
        errors = (_relative(encoding.matrix(NUM_TOKENS).double()) - relative).abs().masked_fill(hidden, 0)
        of_all = float(errors.max()) <= SAME * _largest(relative)
        agrees = float((errors if of_all else errors[:, ~later]).max())
    return BiasReport(
        subject=name_of(target), called=called, encoding=encoding, agrees=agrees, of_all=of_all, alike=alike,
        expected=expected, differences=() if expected is None else tuple(_differences(relative, expected, hidden)),
        num_heads=len(whole), of_distance=of_distance, up_to_rows=up_to_rows, causal=causal,
        symmetric=not causal and torch.allclose(earlier[:, :NUM_TOKENS], after[:, :NUM_TOKENS], atol=SAME),
        slopes=None if slopes is None else tuple(slopes.tolist()),
        slopes_of=None if slopes is None else _find_alibi(slopes.tolist()),
        buckets=(counts[0], counts[1]) if up_to_rows and slopes is None and shared else None,
        farthest=min(earlier.shape[1], after.shape[1]) - 1, cached=_is_cached(bias_of, relative), rounded=rounded,
    )  # fmt: skip


def _calls(target: Any) -> dict[str, BiasOf]:
    """Return the calls with two lengths, by their notation."""
    if isinstance(target, PositionEncoding):
        return {"encoding.matrix(query_len, key_len)": target.matrix}
    calls: dict[str, BiasOf] = {}
    with contextlib.suppress(TypeError, ValueError):  # it takes other arguments, or is written in C
        inspect.signature(function_of(target)).bind(1, 1)
        calls["f(query_len, key_len)"] = lambda q, k: target(q, k)
    if not hasattr(target, "compute_bias"):
        return calls
    compute = target.compute_bias
    if "past_seen_tokens" in inspect.signature(compute).parameters:
        compute = lambda q, k: target.compute_bias(q, k, past_seen_tokens=k - q)  # noqa: E731
    return {"module.compute_bias(query_len, key_len)": compute, **calls}


def _bias(call: BiasOf, query_len: int, key_len: int) -> Tensor:
    bias = call(query_len, key_len)
    if not isinstance(bias, Tensor) or bias.ndim < 2 or bias.shape[-2:] != (query_len, key_len):
        got = f"returned no tensor whose last two sizes are [{query_len}, {key_len}]"
        raise UnusableError(got, "return a bias [heads, queries, keys]")
    return bias.double().reshape(-1, query_len, key_len)


def _relative(bias: Tensor) -> Tensor:
    """Return the bias minus the bias of the query's own token. Softmax ignores such a constant per row."""
    return bias - bias.diagonal(dim1=1, dim2=2)[..., None]


def _largest(bias: Tensor) -> float:
    return max(float(bias.nan_to_num().abs().max()), 1.0)


def _is_toeplitz(bias: Tensor) -> bool:
    moved = (bias[:, 1:, 1:] - bias[:, :-1, :-1]).nan_to_num()
    return float(moved.abs().max()) <= SAME * _largest(bias)


def _sides(bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of earlier keys and of later keys, ``[heads, distance]``, beginning at distance 0."""
    return bias[:, -1].flip(-1), bias[:, 0]


def _by_distance(bias_of: BiasOf, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of earlier keys and of later keys, for `FAR` distances if a long row or column has them.

    Such a row or column must begin with the values in the matrix, in its own or in reverse order.
    """
    lines: list[Tensor] = []
    for queries, keys in ((1, FAR), (FAR, 1)):
        try:
            line = bias_of(queries, keys).flatten(1)
        except CALL_ERRORS:
            continue
        line = line.masked_fill(line <= HIDDEN, torch.nan)
        lines += [line, line.flip(-1)]
    same = partial(torch.allclose, rtol=0, atol=0, equal_nan=True)
    earlier, after = (next((line for line in lines if same(line[:, :NUM_TOKENS], side)), side) for side in _sides(bias))
    return earlier, after


def _slopes(earlier: Tensor) -> tuple[Tensor | None, str | None]:
    """Return the slope of each head and the dtype that rounds the bias.

    Both are ``None`` if the bias is not linear. The dtype is also ``None`` if the bias is not rounded.
    """
    slopes = -earlier[:, 1]
    line = -slopes[:, None] * torch.arange(earlier.shape[1])
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(earlier, line.to(dtype).double()) and not torch.equal(earlier, line):
            return slopes, dtype_name(dtype)
    is_straight = torch.allclose(earlier - earlier[:, :1], line, rtol=1e-4, atol=SAME)
    return slopes if bool(slopes.abs().max() > 0) and is_straight else None, None


def _count_values(curves: Tensor) -> int:
    """Return the number of different values. The values of all heads at one distance count as one value."""
    visible = curves[:, ~curves.isnan().any(0)]
    return torch.unique(visible, dim=1).shape[1] if visible.numel() else 0


def _is_cached(bias_of: BiasOf, relative: Tensor) -> bool | None:
    try:
        newest = bias_of(1, NUM_TOKENS)
    except CALL_ERRORS:
        return None
    return torch.allclose((newest - newest[..., -1:])[:, 0], relative[:, -1], atol=SAME, equal_nan=True)


class _Buckets(NamedTuple):
    """T5's buckets, and the range of `max_distance` that gives these buckets. The range may end at `UNBOUNDED`."""

    bidirectional: bool
    num_buckets: int
    lowest: int
    highest: int

    def __str__(self) -> str:
        """Return the arguments of `T5Bias`."""
        span = f"{self.lowest} to {self.highest}" if self.highest < UNBOUNDED else f"{self.lowest} or more"
        far = f"{self.lowest}" if self.lowest == self.highest else span
        return f"num_buckets={self.num_buckets}, max_distance={far}, bidirectional={self.bidirectional}"

    @property
    def oddity(self) -> tuple[bool, bool, int]:
        """A sort key. It is smallest for a `max_distance` of 128 and a power of two as the number of buckets."""
        return not self.lowest <= 128 <= self.highest, self.num_buckets.bit_count() > 1, self.num_buckets


def _find_t5(earlier: Tensor, after: Tensor | None) -> tuple[PositionEncoding | None, tuple[str, ...]]:
    """Return T5's bias with the measured table, and all settings with the same buckets, if there are several.

    If no settings give these buckets, the bias is ``None``. `after` is ``None`` if later keys are hidden.
    """
    starts = _starts(earlier)
    one_way = after is None or bool((after == after[:, :1]).all())
    both = after is None or _starts(after) == starts
    settings = [
        _Buckets(bidirectional, rows, lowest, highest)
        for count, lowest, highest in _settings(starts, earlier.shape[1])
        for bidirectional, rows in ((False, count), (True, 2 * count), (True, 2 * count + 1))
        if (both if bidirectional else one_way)
    ]
    settings.sort(key=lambda each: each.oddity)
    distance = torch.arange(earlier.shape[1])
    sides = [(earlier, distance), *([] if after is None else [(after, -distance[: after.shape[1]])])]
    for bidirectional, num_buckets, lowest, highest in settings:
        usual = [128, *(2**power for power in range(14))]
        reach = next((far for far in usual if lowest <= far <= highest), lowest)
        bias = T5Bias(len(earlier), num_buckets=num_buckets, max_distance=reach, bidirectional=bidirectional)
        bias.weight.zero_()
        for side, distances in sides:
            bias.weight[bias.buckets(distances)] = side.T.float()
        if all(torch.equal(bias.weight[bias.buckets(distances)].T, side.float()) for side, distances in sides):
            return bias, tuple(map(str, settings)) if len(settings) > 1 or lowest < highest else ()
    return None, ()


def _starts(side: Tensor) -> list[int]:
    """Return each distance at which the value of some head differs from its value at the previous distance."""
    return ((side[:, 1:] != side[:, :-1]).any(0).nonzero()[:, 0] + 1).tolist()


def _settings(starts: list[int], count: int) -> Iterator[tuple[int, int, int]]:
    """Yield each possible number of buckets of one side, with the range of `max_distance` that gives these starts.

    Each bucket in the first half of T5's buckets holds one distance. So this half does not have more buckets than there
    are distances with a separate value.
    """
    num_single = next((place for place, start in enumerate(starts, 1) if place != start), len(starts) + 1)
    if not starts or num_single >= count:  # all distances have one value, or each has a separate one
        return
    ends = torch.tensor([*starts, count], dtype=torch.float64) - 1
    firsts = torch.tensor([0, *starts], dtype=torch.float64)
    for exact, buckets in ((exact, 2 * exact + odd) for exact in range(1, num_single + 1) for odd in (0, 1)):

        def bucket(distance: Tensor, far: Tensor, exact: int = exact, buckets: int = buckets) -> Tensor:
            share = (distance.clamp(min=1) / exact).log() / (far / exact).log()[:, None] * (buckets - exact)
            return torch.where(distance < exact, distance, (exact + share.floor()).clamp(max=buckets - 1))

        far = torch.arange(exact + 1, UNBOUNDED + 1, dtype=torch.float64)
        for least in (len(starts) - 1, 0):  # few values of `far` pass the test of the last bucket
            first, last = bucket(firsts[least:], far), bucket(ends[least:], far)
            far = far[(first == last).all(1) & (first[:, 1:] > last[:, :-1]).all(1)]
        if len(far):
            yield buckets, int(far[0]), int(far[-1])


def _differences(relative: Tensor, expected: PositionEncoding, hidden: Tensor) -> list[str]:
    other = expected.matrix(NUM_TOKENS).double()
    if len(other) != len(relative):
        return [f"it has {len(relative)} heads"]
    other = _relative(other)
    errors = (relative - other).masked_fill(hidden, 0).abs()
    if float(errors.max()) <= SAME * max(float(other.abs().max()), 1.0):
        return []
    if torch.allclose(relative.transpose(1, 2), other, atol=SAME):
        return ["earlier and later keys are exchanged"]
    wrong = errors.gt(SAME)
    heads = wrong.any(2).any(1).nonzero()[:, 0]
    rows = torch.arange(NUM_TOKENS)
    distance = int((rows[:, None] - rows).abs()[wrong[heads[0]]].min())
    return [f"the biases of {len(heads)} heads differ, in head {int(heads[0])} from distance {distance} on"]
