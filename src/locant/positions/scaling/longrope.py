"""A factor for every pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

import torch

from locant.arguments import entries, real
from locant.errors import RangeError, ShapeError
from locant.positions.frequencies import PRECISION, inverse_frequencies
from locant.positions.scaling.base import Frequencies, Rounded, Scaling, powers
from locant.positions.scaling.yarn import YaRN

__all__ = ["LongRoPE"]


@dataclass(frozen=True, kw_only=True)
class LongRoPE(Scaling):
    r"""A factor of its own for every pair, short and long sequences apart: Ding et al. 2024, arXiv 2402.13753.

    .. math:: \theta_i' = \theta_i / \lambda_i, \qquad \lambda = \text{short or long factors, by the length}

    Sequences of up to `original_max_seq_len` tokens, the trained length, use `short_factor`, longer ones
    `long_factor`. The length is that of the whole sequence, and has to be given: see `Rotary.for_length`.

    Args:
        short_factor, long_factor: one divisor per pair; kept as tuples.
        factor: the new length over the trained one; decides the attention factor.
        attention_factor: overrides ``sqrt(1 + ln(factor) / ln(original_max_seq_len))``.

    Limits:
        Keys in a cache are wrong after the sequence passed the trained length, unless `Rotary.rerotate` moves
        them. The factors are searched for one model, and mean nothing for another.

    Tested against:
        50-digit arithmetic (mpmath) on the shapes of published models; and where `transformers` has it, its own
        functions, bit for bit.

    >>> scaling = LongRoPE(short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_seq_len=4096, factor=2.0)
    >>> scaling.factors(8, seq_len=5000)
    (2.0, 2.0, 2.0, 2.0)
    """

    name = "longrope"
    aliases = ("long_rope",)

    short_factor: Sequence[float]
    long_factor: Sequence[float]
    original_max_seq_len: int
    factor: float
    attention_factor: float | None = None

    @classmethod
    def of_factor(cls, factor: float, trained: int, dim: int, base: float) -> LongRoPE:
        """Long factors that are those of YaRN's ramp: the paper's are searched on data."""
        ramp = YaRN(factor=factor, original_max_seq_len=trained).frequencies(dim, base)
        long = tuple(float(plain / each) for plain, each in zip(inverse_frequencies(dim, base), ramp, strict=True))
        short = (1.0,) * (dim // 2)
        return cls(short_factor=short, long_factor=long, original_max_seq_len=trained, factor=factor)

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            given = entries(f"LongRoPE's {name}", getattr(self, name), "one number per pair")
            if not given:
                raise RangeError(f"got nothing for LongRoPE's {name}, expected numbers above 0", f"{name}=[1.0] * 32")
            what, remedy = f"an entry of LongRoPE's {name}", "one per pair"
            self._settle(name, tuple(real(what, one, above=0, remedy=remedy) for one in given))
        self._settle_reals("factor", "attention_factor", above=0)
        self._settle_length(2)

    @property
    def length_that_matters(self) -> int:
        return self.original_max_seq_len

    @property
    def effective_attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(max(self.factor, 1)) / math.log(self.original_max_seq_len))

    def factors(self, dim: int, seq_len: int | None) -> Sequence[float]:
        """The divisors for a sequence of this length."""
        chosen = self.long_factor if (seq_len or 0) > self.original_max_seq_len else self.short_factor
        pairs = (dim + 1) // 2
        if len(chosen) != pairs:
            got = f"got {len(chosen)} LongRoPE factors for {pairs} pairs, expected one per pair"
            raise ShapeError(got, f"{pairs} factors, or rotary_dim={2 * len(chosen)}")
        return chosen

    def frequencies(self, dim: int, base: float, seq_len: int | None = None) -> Frequencies:
        divisors = map(Decimal, self.factors(dim, seq_len))
        return tuple(map(PRECISION.divide, inverse_frequencies(dim, base), divisors))

    def rounded(self, dim: int, base: float, seq_len: int | None = None) -> Rounded:
        factors = torch.tensor(self.factors(dim, seq_len), dtype=torch.float32, device="cpu")
        return 1.0 / (factors * powers(dim, base))
