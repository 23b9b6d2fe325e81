"""Measure the norm that a fused kernel applies to each head, and undo it to measure the rotation.

Position 0 is not rotated, so it shows only the norm. We compare it with the right norm, and with the result of every
known mistake. To undo the norm, we pass tokens whose normed values are the vectors to rotate. In this way we measure
all properties of a rotation, even if a norm comes first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from locant.arguments import short_repr
from locant.errors import InputError, RangeError
from locant.kernels.norm_rotary import HeadNorm
from locant.probing.subject import Subject
from locant.probing.token_calls import HEADS, Convention
from locant.spelling import dtype_name, spell

EPS = 1e-6
"""The usual number to add to the mean square."""

SIDES = ("queries", "keys")
SIZES = (1.0, 1.0, 30.0, 1e-2, 1e-3, 1e-4)
"""The sizes of tokens to norm. Small tokens show the eps."""

EXPLAINED = 3e-5
"""A norm explains a normed head if no entry differs by more than this, relative to the largest entry."""

DIGITS = (1, 2, 4, 7)
"""The numbers of digits to which we round a measured eps, the smallest first. An intended eps has few digits."""

TINY = 1e-30
LENGTHS = 1e-3
"""A rotation changes the length of a token by at most this share."""

Kind = Literal["rms", "all heads", "mean", "length", "none"]
KINDS: dict[Kind, str] = {
    "rms": "",
    "all heads": "the mean is over all heads, not over each",
    "mean": "the mean is subtracted first: it is a LayerNorm",
    "length": "heads are divided by their length, not by the root of their mean square",
    "none": "heads are not divided by their size",
}
Dtypes = dict[str, tuple[torch.dtype | None, torch.dtype | None]]
ROUNDED: Dtypes = {
    "": (None, None),
    **{
        f"rounded to {dtype_name(dtype)} {when}": pair
        for dtype in (torch.bfloat16, torch.float16)
        for when, pair in (
            ("before the weights are multiplied", (dtype, None)),
            ("before the rotation", (None, dtype)),
            ("before and after the weights are multiplied", (dtype, dtype)),
        )
    },
}
"""The dtypes to which the divided head and the weighted head may be rounded."""


@dataclass(frozen=True, kw_only=True)
class Norm:
    """An RMSNorm of each head, or the result of a mistake in one.

    Args:
        weight: the factor of each dimension, ``[head_dim]`` in float64, or ``[]``.
        weights: a description of the mistake in the weights, empty if there is none.
        eps: the number that is added to the mean square.
        outside: whether eps is added to the root of the mean square instead.
        kind: a key of `KINDS`.
        rounding: a key of `ROUNDED`.
    """

    weight: Tensor
    weights: str
    eps: float
    outside: bool = False
    kind: Kind = "rms"
    rounding: str = ""

    def size(self, x: Tensor) -> Tensor:
        """Return the divisor of each head ``[..., heads, seq, head_dim]``."""
        if self.kind == "none":
            return torch.ones_like(x[..., :1])
        square = (torch.sum if self.kind == "length" else torch.mean)(x.square(), -1, keepdim=True)
        square = square.mean(-3, keepdim=True) if self.kind == "all heads" else square
        return square.sqrt() + self.eps if self.outside else (square + self.eps).sqrt()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normed heads."""
        x = x - x.mean(-1, keepdim=True) if self.kind == "mean" else x
        first, second = ROUNDED[self.rounding]
        divided = x / self.size(x)
        weighted = (divided if first is None else divided.float().to(first).double()) * self.weight
        return weighted if second is None else weighted.float().to(second).double()


@dataclass(frozen=True, kw_only=True)
class NormReport:
    """The measured norms of queries and of keys.

    Args:
        eps: the expected eps.
        found: the norm that explains each side, or ``None`` if no known norm does.
        off: the largest difference of each side from the expected norm at position 0, relative to the largest entry.
        wrong: descriptions of the mistakes of each side.
        after: for each side, whether the norm comes after the rotation, or ``None`` if equal weights hide the order.
        should_follow: whether the norm should come after the rotation.
    """

    eps: float
    found: tuple[str | None, ...]
    off: tuple[float, ...]
    wrong: tuple[tuple[str, ...], ...]
    after: tuple[bool | None, ...]
    should_follow: bool

    def facts(self) -> Iterator[str]:
        """Yield a sentence about the norms that are right, if any."""
        right = [side for side, wrong in zip(SIDES, self.wrong, strict=True) if not wrong]
        if right:
            order = "after" if self.should_follow else "before"
            fact = f"It norms each head of {' and '.join(right)} {order} it rotates, as expected: RMSNorm with eps"
            same = " With equal weights the other order would be the same." if None in self.after else ""
            yield f"{fact} {spell(self.eps)}.{same}"

    def warnings(self) -> Iterator[str]:
        """Yield sentences about the mistakes. If both sides have the same mistakes, the sentences are not repeated."""
        if self.wrong[0] == self.wrong[1]:
            yield from (f"The norm of queries and of keys is wrong: {each}." for each in self.wrong[0])
            return
        for side, wrong in zip(SIDES, self.wrong, strict=True):
            yield from (f"The norm of {side} is wrong: {each}." for each in wrong)


def options_of(norm: Any, eps: float, plus_one: bool) -> tuple[Any, float, bool]:
    """Return the weights, the eps and `plus_one` of the argument `norm`, which may be a `HeadNorm` with all of them.

    Raises:
        RangeError: there is a `HeadNorm` and another eps or `plus_one`, or a `HeadNorm` without weights.
    """
    if not isinstance(norm, HeadNorm):
        return norm, eps, plus_one
    if eps != EPS or plus_one:
        got = f"got eps={eps} and plus_one={plus_one} together with a HeadNorm, which has its own"
        raise RangeError(got, "HeadNorm(q_weight, k_weight, eps=..., plus_one=...)")
    if norm.q_weight is None or norm.k_weight is None:
        got = f"got {norm}, expected weights of queries and of keys"
        raise RangeError(got, "HeadNorm(torch.ones(head_dim), torch.ones(head_dim)), which is the same norm")
    return (norm.q_weight, norm.k_weight), norm.eps, norm.plus_one


def weights_of(norm: Any, width: int | None, plus_one: bool) -> tuple[Tensor, Tensor]:
    """Return the factors of queries and of keys from the argument `norm`, in float64.

    Raises:
        RangeError: `norm` is not a tensor or a pair of tensors ``[head_dim]``, or a factor is 0 and cannot be undone.
    """
    pair = (norm, norm) if isinstance(norm, Tensor) else norm
    is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(each, Tensor) for each in pair)
    if not is_pair or any(each.ndim != 1 or (width or len(each)) != len(each) for each in pair):
        expected = f"the weights [{'head_dim' if width is None else width}] of queries and of keys"
        raise RangeError(f"got {short_repr(norm)} for norm, expected {expected}", "norm=(q_norm.weight, k_norm.weight)")
    q, k = (each.detach().cpu().double() + plus_one for each in pair)
    if not all(bool((each != 0).all()) for each in (q, k)):
        got = "got weights of 0 for norm, after which nothing can be measured"
        raise RangeError(got, "use weights other than 0 in the module and in norm, such as torch.rand(head_dim) + 0.5")
    return q, k


def without_norm(
    subject: Subject, weights: tuple[Tensor, Tensor], eps: float, plus_one: bool, should_follow: bool
) -> tuple[Subject, NormReport]:
    """Return the subject with its norms undone, and a report on these norms.

    Raises:
        InputError: a norm subtracts the mean, so that it cannot be undone.
    """
    x = _tokens(subject)
    sides = [side.double() for side in subject.rotate(x.clone(), subject.index(0))]
    expected = [Norm(weight=weight, weights="", eps=eps) for weight in weights]
    off = tuple(_relative_error(side, norm(x.double())) for side, norm in zip(sides, expected, strict=True))
    norms = [_find_norm(sides[side], x.double(), expected, side, plus_one) for side in (0, 1)]
    for name, norm in zip(SIDES, norms, strict=True):
        if norm is not None and norm.kind == "mean":
            call = subject.convention.notation
            got = f"got {call}, whose norm of {name} subtracts the mean: it is a LayerNorm, not an RMSNorm"
            raise InputError(got, "use a norm that divides each head by the root of its mean square")
    undone = [norm or right for norm, right in zip(norms, expected, strict=True)]
    after = tuple(_comes_after(subject, norm, side) for side, norm in enumerate(undone))
    misplaced = [each is not None and each != should_follow for each in after]
    wrong = tuple(
        (*_describe_mistakes(*each[:3]), *(FOLLOWS if each[3] else PRECEDES for _ in range(each[4])))
        for each in zip(norms, expected, off, after, misplaced, strict=True)
    )
    convention = replace(subject.convention, call=_without_norms(subject.convention, undone, after), undoes_norm=True)
    descriptions = tuple(None if norm is None else _describe(norm) for norm in norms)
    report = NormReport(eps=eps, found=descriptions, off=off, wrong=wrong, after=after, should_follow=should_follow)
    return replace(subject, convention=convention), report


FOLLOWS = "it comes after the rotation, and its weights scale the rotated dimensions, which is not a rotation"
PRECEDES = "it comes before the rotation"


def _tokens(subject: Subject) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(SIZES), HEADS, 1, subject.width, generator=generator)
    return (x + 0.3) * torch.tensor(SIZES)[:, None, None, None]  # with a mean other than 0


def _relative_error(one: Tensor, other: Tensor) -> float:
    largest = other.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return float(((one - other).abs() / largest).max())


def _find_norm(side: Tensor, x: Tensor, expected: Sequence[Norm], number: int, plus_one: bool) -> Norm | None:
    """Return the norm with the fewest mistakes that gives these heads, or ``None`` if no known norm does."""
    right, other = expected[number], expected[1 - number]
    weights = {"": right.weight, "the weights are those of the other side": other.weight}
    weights["the weights are left out"] = torch.ones((), dtype=torch.float64)
    mistake = "the weights are multiplied as they are, not 1 + them" if plus_one else "1 + the weights are multiplied"
    weights[mistake] = right.weight - 1 if plus_one else right.weight + 1
    weights["the weights are rounded to bfloat16"] = right.weight.to(torch.bfloat16).double()
    halves = right.weight.unflatten(0, (2, -1)) if len(right.weight) % 2 == 0 else right.weight[None]
    weights["the weights are in the order of the other layout"] = halves.T.flatten()
    pairs = right.weight.unflatten(0, (-1, 2)) if len(right.weight) % 2 == 0 else right.weight[None]
    weights["the weights are in the order of the other layout, reversed"] = pairs.T.flatten()
    norms = [
        Norm(weight=weight, weights=words, eps=eps, outside=outside, kind=kind, rounding=rounding)
        for (words, weight), kind in itertools.product(weights.items(), KINDS)
        for eps, outside in _epsilons(Norm(weight=weight, weights=words, eps=0.0, kind=kind), right.eps, x, side)
        for rounding in ROUNDED
    ]

    def count_mistakes(norm: Norm) -> int:
        is_eps = norm.eps == right.eps and not norm.outside
        return bool(norm.weights) + (not is_eps) + (norm.kind != "rms") + bool(norm.rounding)

    return next((norm for norm in sorted(norms, key=count_mistakes) if _reproduces(norm, x, side)), None)


def _epsilons(bare: Norm, expected: float, x: Tensor, side: Tensor) -> list[tuple[float, bool]]:
    """Return each possible eps, and whether it is outside of the root. The smallest token shows the measured values."""
    if bare.kind == "none":
        return [(expected, False)]
    token, normed = x[-1:], side[-1:]
    token = token - token.mean(-1, keepdim=True) if bare.kind == "mean" else token
    size, divided = bare.size(token), (token * bare.weight / normed).abs().nanmedian(-1, keepdim=True).values
    measured = {False: divided.square() - size.square(), True: divided - size}
    epsilons = [(expected, False), (0.0, False), (expected, True)]
    for outside, each in measured.items():
        eps = float(each.median())
        if 0 < eps < 1e6:
            epsilons += [(float(f"{eps:.{digits - 1}e}"), outside) for digits in DIGITS]
    return [*dict.fromkeys(epsilons)]


def _reproduces(norm: Norm, x: Tensor, side: Tensor) -> bool:
    other = norm(x)
    largest = other.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    within = (side - other).abs() <= EXPLAINED * largest
    return (
        bool(within.all()) if not norm.rounding else float(within.double().mean()) > 0.98
    )  # a few entries may be rounded differently


def _without_norms(convention: Convention, norms: Sequence[Norm], after: Sequence[bool | None]) -> Any:
    """Return a call that gives the result of the rotation alone."""

    def call(target: Any, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        wide, sides = x.double(), []
        for side, norm in enumerate(norms):
            tokens = wide if after[side] else wide / norm.weight
            size = tokens.square().mean((1, 3), keepdim=True).sqrt().clamp(min=TINY)
            tokens = (16 * tokens / size).to(x.dtype)  # much larger than any eps
            rotated, normed = convention.call(target, tokens.clone(), index)[side].double(), tokens.double()
            if after[side]:
                rotated = rotated * norm.size(normed) / norm.weight * size / 16
            else:  # if tokens lie on one axis, rounding changes only their length
                lengths = [each.norm(dim=-1, keepdim=True).clamp(min=TINY) for each in (wide, norm(normed))]
                rotated = rotated * lengths[0] / lengths[1]
            sides.append(rotated.to(x.dtype))
        return sides[0], sides[1]

    return call


def _comes_after(subject: Subject, norm: Norm, side: int) -> bool | None:
    """Return whether the norm comes after the rotation, or ``None`` if equal weights hide the order.

    If it does, lengths stay the same only if the norm is undone after the rotation.
    """
    if bool((norm.weight == norm.weight.flatten()[:1]).all()):
        return None
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, HEADS, 1, subject.width, generator=generator)
    changes = []
    for after in (False, True):
        call = _without_norms(subject.convention, [norm, norm], [after, after])
        lengths = [call(subject.target, x, subject.index(place))[side].norm(dim=-1) for place in (0, 1, 5, 17)]
        changes.append(max(float((each / lengths[0] - 1).abs().max()) for each in lengths[1:]))
    return changes[1] < LENGTHS < changes[0]


def _describe(norm: Norm) -> str:
    words = [norm.weights, KINDS[norm.kind], norm.rounding]
    eps = f"eps {spell(norm.eps)}" + (" outside of the root" if norm.outside else "")
    return ", ".join([eps, *(each for each in words if each)])


def _describe_mistakes(norm: Norm | None, right: Norm, off: float) -> Iterator[str]:
    if norm is None:
        if not math.isfinite(off) or off > EXPLAINED:
            phrase = f"at position 0 it is up to {spell(off, 2)} of the largest number off"
            yield f"{phrase}, and no known mistake explains that"
    else:
        if norm.kind == "none" and not norm.weight.ndim:
            yield "it is missing"
        else:
            yield from (each for each in (norm.weights, KINDS[norm.kind]) if each)
        if norm.outside and norm.kind in ("rms", "all heads"):
            other = "" if norm.eps == right.eps else f", and it is {spell(norm.eps)}, not {spell(right.eps)}"
            phrase = f"eps is added to the root of the mean square, not to the mean square{other}"
            yield f"{phrase}, up to {spell(off, 2)} off"
        elif norm.eps != right.eps and norm.kind in ("rms", "all heads"):
            mistake = f"eps is {spell(norm.eps)}, not {spell(right.eps)}" if norm.eps else "there is no eps"
            yield f"{mistake}, so that heads of small numbers are up to {spell(off, 2)} off"
        if norm.rounding:
            yield f"heads are {norm.rounding}, {spell(off, 2)} off"
