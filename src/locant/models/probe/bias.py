"""What a bias on attention scores is a function of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from locant.models.probe.report import BIASED, BiasReport
from locant.models.probe.subject import name_of
from locant.models.probe.trial import FAILED, Tried, UnusableError, refuse_unsteady
from locant.positions.base import PositionEncoding
from locant.positions.encodings.alibi import ALiBi, alibi_slopes
from locant.positions.encodings.t5 import T5Bias

__all__ = ["bias_report"]

HIDDEN = -1e4
SAME = 1e-5

FAR = 4096
"""Tokens of the single row and the single column in which buckets are looked for, where these can be asked for."""

BiasOf = Callable[[int, int], Tensor]


def bias_report(target: Any, expected: PositionEncoding | None, tried: Tried) -> BiasReport | None:
    """What a bias does; ``None``: it is none that can be called by two lengths, and `tried` says why."""
    found = _called(target, tried)
    if found is None:
        return None
    called, bias_of = found
    whole = bias_of(BIASED, BIASED)
    refuse_unsteady(name_of(target), whole, bias_of(BIASED, BIASED))
    rows = torch.arange(BIASED)
    later = rows > rows[:, None]
    hidden = whole <= HIDDEN
    causal = bool(hidden[:, later].all()) and not bool(hidden[:, ~later].any())
    seen = whole.masked_fill(hidden, torch.nan)
    of_distance = _is_toeplitz(seen)
    relative = _relative(seen)
    up_to_rows = _is_toeplitz(relative)
    curve = seen if of_distance else relative
    earlier, after = _farther(bias_of, *_by_distance(curve)) if of_distance else _by_distance(curve)
    slopes = -earlier[:, 1] if up_to_rows else None
    rounded = _rounding(earlier, slopes)
    if slopes is not None and rounded is None and not _is_linear(earlier, slopes):
        slopes = None
    counts = (_values(earlier[:, 1:]), _values(after[:, 1:]))
    shared = any(0 < 2 * count < side.shape[1] for count, side in zip(counts, (earlier, after), strict=True))
    encoding, alike = None, ()
    if slopes is not None and rounded is None:
        usual = torch.allclose(slopes, torch.tensor(alibi_slopes(len(whole)), dtype=torch.float64), rtol=1e-5)
        encoding = ALiBi(len(whole)) if usual else ALiBi(len(whole), slopes=slopes.tolist())
    elif of_distance:
        encoding, alike = _bucketed(earlier, None if causal else after)
    agrees, of_all = None, True
    if encoding is not None:
        apart = (_relative(encoding.matrix(BIASED).double()) - relative).abs().masked_fill(hidden, 0)
        of_all = float(apart.max()) <= SAME * max(float(relative.nan_to_num().abs().max()), 1.0)
        agrees = float((apart if of_all else apart[:, ~later]).max())
    return BiasReport(
        subject=name_of(target),
        called=called,
        encoding=encoding,
        agrees=agrees,
        of_all=of_all,
        alike=alike,
        expected=expected,
        differences=() if expected is None else tuple(_differences(relative, expected, hidden)),
        num_heads=len(whole),
        of_distance=of_distance,
        up_to_rows=up_to_rows,
        causal=causal,
        symmetric=not causal and torch.allclose(earlier[:, :BIASED], after[:, :BIASED], atol=SAME),
        slopes=None if slopes is None else tuple(slopes.tolist()),
        buckets=counts if up_to_rows and slopes is None and shared else None,
        farthest=min(earlier.shape[1], after.shape[1]) - 1,
        cached=_is_cached(bias_of, relative),
        rounded=rounded,
    )


def _called(target: Any, tried: Tried) -> tuple[str, BiasOf] | None:
    ways: dict[str, Callable[[int, int], Any]] = {"f(query_len, key_len)": lambda q, k: target(q, k)}
    if isinstance(target, PositionEncoding):
        ways = {"encoding.matrix(query_len, key_len)": lambda q, k: target.matrix(q, k)}
    elif hasattr(target, "compute_bias"):
        compute = target.compute_bias
        cached = "past_seen_tokens" in inspect.signature(compute).parameters
        ways = {
            "module.compute_bias(query_len, key_len)": (
                (lambda q, k: compute(q, k, past_seen_tokens=k - q)) if cached else compute
            ),
            **ways,
        }
    for called, way in ways.items():

        def bias_of(q: int, k: int, way: Callable[[int, int], Any] = way) -> Tensor:
            with torch.no_grad():
                found = way(q, k)
            if not isinstance(found, Tensor) or found.ndim < 2 or found.shape[-2:] != (q, k):
                raise UnusableError(
                    f"gave no tensor whose last two sizes are [{q}, {k}]", "a bias [heads, queries, keys]"
                )
            return found.double().reshape(-1, q, k)

        try:
            bias_of(5, 7)
        except FAILED as error:
            tried.setdefault(called, error)
        else:
            return called, bias_of
    return None


def _relative(bias: Tensor) -> Tensor:
    """To the entry of the query's own token, whose row loses a constant, which softmax does not see."""
    return bias - bias.diagonal(dim1=1, dim2=2)[..., None]


def _by_distance(bias: Tensor) -> tuple[Tensor, Tensor]:
    """The values of earlier keys, and of later ones, from distance 0 up."""
    return bias[:, -1].flip(-1), bias[:, 0]


def _farther(bias_of: BiasOf, *sides: Tensor) -> tuple[Tensor, ...]:
    """The same up to `FAR`, from a row and a column that say the same, whichever tokens these count as the last."""
    lines: list[Tensor] = []
    for queries, keys in ((1, FAR), (FAR, 1)):
        try:
            line = bias_of(queries, keys).flatten(1)
        except FAILED:
            continue
        line = line.masked_fill(line <= HIDDEN, torch.nan)
        lines += [line, line.flip(-1)]

    def same(line: Tensor, side: Tensor) -> bool:
        return torch.allclose(line[:, :BIASED], side, rtol=0, atol=0, equal_nan=True)

    return tuple(next((line for line in lines if same(line, side)), side) for side in sides)


def _is_toeplitz(bias: Tensor) -> bool:
    moved = (bias[:, 1:, 1:] - bias[:, :-1, :-1]).nan_to_num()
    return float(moved.abs().max()) <= SAME * max(float(bias.nan_to_num().abs().max()), 1.0)


def _is_linear(earlier: Tensor, slopes: Tensor) -> bool:
    line = -slopes[:, None] * torch.arange(earlier.shape[1])
    return bool(slopes.abs().max() > 0) and torch.allclose(earlier - earlier[:, :1], line, rtol=1e-4, atol=SAME)


def _rounding(earlier: Tensor, slopes: Tensor | None) -> str | None:
    """The dtype in which a straight line has steps."""
    if slopes is None:
        return None
    line = -slopes[:, None] * torch.arange(earlier.shape[1])
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(earlier, line.to(dtype).double()) and not torch.equal(earlier, line):
            return str(dtype).removeprefix("torch.")
    return None


def _values(curves: Tensor) -> int:
    """How many there are, of all heads together."""
    kept = curves[:, ~curves.isnan().any(0)]
    return torch.unique(kept, dim=1).shape[1] if kept.numel() else 0


def _is_cached(bias_of: BiasOf, relative: Tensor) -> bool | None:
    try:
        newest = bias_of(1, BIASED)
    except FAILED:
        return None
    newest = newest - newest[..., -1:]
    return bool(torch.allclose(newest[:, 0], relative[:, -1], atol=SAME, equal_nan=True))


class _Buckets(NamedTuple):
    """T5's buckets, with the largest distances, the first and the last, that give them; the last may be `UNBOUNDED`."""

    bidirectional: bool
    num_buckets: int
    lowest: int
    highest: int

    def __str__(self) -> str:
        """As arguments of `T5Bias`."""
        span = f"{self.lowest} to {self.highest}" if self.highest < UNBOUNDED else f"{self.lowest} or more"
        far = f"{self.lowest}" if self.lowest == self.highest else span
        return f"num_buckets={self.num_buckets}, max_distance={far}, bidirectional={self.bidirectional}"


UNBOUNDED = 2 * FAR
"""A largest distance that nothing that is looked at tells from larger ones."""


def _bucketed(earlier: Tensor, after: Tensor | None) -> tuple[PositionEncoding | None, tuple[str, ...]]:
    """T5's bias with its table read off, and all settings that share these values out alike, if there are several.

    `after` is ``None`` where later keys are hidden.
    """
    starts = _starts(earlier)
    one_way = after is None or bool((after == after[:, :1]).all())
    both = after is None or _starts(after) == starts
    found = [
        _Buckets(bidirectional, rows, lowest, highest)
        for count, lowest, highest in _settings(starts, earlier.shape[1])
        for bidirectional, rows in ((False, count), (True, 2 * count), (True, 2 * count + 1))
        if (both if bidirectional else one_way)
    ]
    for each in sorted(found, key=_plainness):
        usual = [128, *(2**power for power in range(14))]
        reach = next((far for far in usual if each.lowest <= far <= each.highest), each.lowest)
        bias = T5Bias(
            len(earlier), num_buckets=each.num_buckets, max_distance=reach, bidirectional=each.bidirectional
        )  # fmt: skip
        distance = torch.arange(earlier.shape[1])
        sides = ((earlier, distance), *(() if after is None else ((after, -distance[: after.shape[1]]),)))
        with torch.no_grad():
            bias.weight.zero_()
            for side, where in sides:
                bias.weight[bias.buckets(where)] = side.T.float()
            if all(torch.equal(bias.weight[bias.buckets(where)].T, side.float()) for side, where in sides):
                several = len(found) > 1 or each.lowest < each.highest
                return bias, tuple(map(str, sorted(found, key=_plainness))) if several else ()
    return None, ()


def _plainness(buckets: _Buckets) -> tuple[bool, bool, int]:
    """The usual settings first: 128 tokens, a power of two."""
    return not buckets.lowest <= 128 <= buckets.highest, buckets.num_buckets.bit_count() > 1, buckets.num_buckets


def _starts(side: Tensor) -> list[int]:
    """The distances from 1 on whose values are not those of the distance before, in some head."""
    return ((side[:, 1:] != side[:, :-1]).any(0).nonzero()[:, 0] + 1).tolist()


def _settings(starts: list[int], count: int) -> Iterator[tuple[int, int, int]]:
    """T5's numbers of buckets of one side, and the largest distances, first and last, whose buckets begin there.

    A bucket is one distance up to half their number, so that half is no more than the distances that stand alone.
    """
    alone = next((place for place, start in enumerate(starts, 1) if place != start), len(starts) + 1)
    if not starts or alone >= count:  # one value, or as many as distances: no buckets
        return
    ends = torch.tensor([*starts, count], dtype=torch.float64) - 1
    firsts = torch.tensor([0, *starts], dtype=torch.float64)
    for exact, buckets in ((exact, 2 * exact + odd) for exact in range(1, alone + 1) for odd in (0, 1)):

        def bucket(distance: Tensor, far: Tensor, exact: int = exact, buckets: int = buckets) -> Tensor:
            share = (distance.clamp(min=1) / exact).log() / (far / exact).log()[:, None] * (buckets - exact)
            return torch.where(distance < exact, distance, (exact + share.floor()).clamp(max=buckets - 1))

        far = torch.arange(exact + 1, UNBOUNDED + 1, dtype=torch.float64)
        for least in (len(starts) - 1, 0):  # few pass the last bucket alone
            first, last = bucket(firsts[least:], far), bucket(ends[least:], far)
            far = far[(first == last).all(1) & (first[:, 1:] > last[:, :-1]).all(1)]
        if len(far):
            yield buckets, int(far[0]), int(far[-1])


def _differences(relative: Tensor, expected: PositionEncoding, hidden: Tensor) -> list[str]:
    other = expected.matrix(BIASED).double()
    if len(other) != len(relative):
        return [f"it has {len(relative)} heads"]
    other = _relative(other)
    apart = (relative - other).masked_fill(hidden, 0).abs()
    if float(apart.max()) <= SAME * max(float(other.abs().max()), 1.0):
        return []
    if torch.allclose(relative.transpose(1, 2), other, atol=SAME):
        return ["earlier and later keys are exchanged"]
    head = int(apart.amax((1, 2)).gt(SAME).nonzero()[0])
    wrong = apart[head].gt(SAME)
    rows = torch.arange(BIASED)
    distance = int((rows[:, None] - rows).abs()[wrong].min())
    heads = int(apart.amax((1, 2)).gt(SAME).sum())
    return [f"the biases of {heads} heads differ, in head {head} from distance {distance} on"]
