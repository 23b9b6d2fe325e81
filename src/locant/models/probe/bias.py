"""What a bias on attention scores is a function of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    relative = seen - seen.diagonal(dim1=1, dim2=2)[..., None]
    up_to_rows = _is_toeplitz(relative)
    curve = seen if of_distance else relative
    earlier, after = curve[:, -1].flip(-1), curve[:, 0]  # by distance, from 0 up
    slopes = -earlier[:, 1] if up_to_rows else None
    rounded = _rounding(earlier, slopes)
    if slopes is not None and rounded is None and not _is_linear(earlier, slopes):
        slopes = None
    counts = (_values(earlier[:, 1:]), _values(after[:, 1:]))
    bucketed = up_to_rows and slopes is None and min(counts) < BIASED // 4
    symmetric = not causal and bool(torch.allclose(earlier, after, atol=SAME))
    smooth = slopes if rounded is None else None
    encoding = _named(earlier, after, smooth, causal) if of_distance or slopes is not None else None
    shown = None if encoding is None else encoding.matrix(BIASED).double()
    if shown is not None:
        shown = shown - shown.diagonal(dim1=1, dim2=2)[..., None]
    return BiasReport(
        subject=name_of(target),
        called=called,
        encoding=encoding,
        agrees=None if shown is None else float((shown - relative)[:, ~later].abs().max()),
        expected=expected,
        differences=() if expected is None else tuple(_differences(relative, expected, hidden)),
        num_heads=len(whole),
        of_distance=of_distance,
        up_to_rows=up_to_rows,
        causal=causal,
        symmetric=symmetric,
        slopes=None if slopes is None else tuple(slopes.tolist()),
        buckets=counts if bucketed else None,
        cached=_is_cached(bias_of, relative),
        rounded=rounded,
    )


def _called(target: Any, tried: Tried) -> tuple[str, BiasOf] | None:
    ways: dict[str, Callable[[int, int], Any]] = {"f(query_len, key_len)": lambda q, k: target(q, k)}
    if isinstance(target, PositionEncoding):
        ways = {"encoding.matrix(query_len, key_len)": lambda q, k: target.matrix(q, k)}
    elif hasattr(target, "compute_bias"):
        ways = {"module.compute_bias(query_len, key_len)": lambda q, k: target.compute_bias(q, k), **ways}
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


def _named(earlier: Tensor, after: Tensor, slopes: Tensor | None, causal: bool) -> PositionEncoding | None:
    """ALiBi, or T5's bias with its table read off; others have no closed form."""
    heads = len(earlier)
    if slopes is not None:
        usual = torch.allclose(slopes, torch.tensor(alibi_slopes(heads), dtype=torch.float64), rtol=1e-5)
        return ALiBi(heads) if usual else ALiBi(heads, slopes=slopes.tolist())
    distance = torch.arange(BIASED)
    for bidirectional in (False, True):
        for num_buckets in (32, 64, 16, 128):
            for max_distance in (128, 64, 256):
                if max_distance <= num_buckets // 2:
                    continue
                bias = T5Bias(heads, num_buckets=num_buckets, max_distance=max_distance, bidirectional=bidirectional)
                of_earlier, of_later = bias.buckets(distance), bias.buckets(-distance)
                with torch.no_grad():
                    bias.weight.zero_()
                    bias.weight[of_earlier] = earlier.T.float()
                    if bidirectional:
                        bias.weight[of_later] = after.nan_to_num().T.float()
                    again = bias.weight[of_earlier].T.double(), bias.weight[of_later].T.double()
                same = torch.allclose(again[0], earlier, atol=SAME)
                if same and (causal or torch.allclose(again[1], after, atol=SAME)):
                    return bias
    return None


def _differences(relative: Tensor, expected: PositionEncoding, hidden: Tensor) -> list[str]:
    other = expected.matrix(BIASED).double()
    if len(other) != len(relative):
        return [f"it has {len(relative)} heads"]
    other = other - other.diagonal(dim1=1, dim2=2)[..., None]
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
