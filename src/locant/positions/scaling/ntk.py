"""Larger bases, which stretch slow pairs more than fast ones: fixed, by the length at hand, and mixed."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

import torch

from locant.arguments import one_of
from locant.errors import RangeError
from locant.positions.frequencies import PRECISION, inverse_frequencies
from locant.positions.scaling.base import Frequencies, Rounded, Scaling, powers

__all__ = ["NTK", "DynamicNTK", "MixedNTK", "ntk_exponent"]


@dataclass(frozen=True, kw_only=True)
class NTK(Scaling):
    r"""NTK-aware scaling (bloc97 2023): a larger base, which stretches slow pairs more than fast ones.

    .. math:: \theta_i' = (\text{base} \cdot s^{d / (d - 2)})^{-2i/d}

    ``form="aware"``, the default, divides the slowest frequency by exactly `factor` s and leaves the fastest alone;
    ``form="base"`` uses ``base * factor``, as Code Llama's larger theta does.

    Limits:
        Pairs between are stretched by less than `factor`, so the longest context that works is shorter than
        `factor` promises.

    Tested against:
        50-digit arithmetic (mpmath) on the shapes of published models; and where `transformers` has it, its own
        functions, bit for bit.

    >>> NTK(factor=4.0)
    NTK(factor=4.0, form='aware')
    """

    name = "ntk"

    factor: float
    form: str = "aware"

    def __post_init__(self) -> None:
        self._settle_reals("factor", above=0)
        one_of("NTK's form", self.form, ("aware", "base"), "NTK(factor=4.0)")

    def frequencies(self, dim: int, base: float, seq_len: int | None = None) -> Frequencies:
        return inverse_frequencies(dim, stretched_base(dim, base, Decimal(self.factor), self.form))

    def rounded(self, dim: int, base: float, seq_len: int | None = None) -> Rounded:
        return 1.0 / powers(dim, base * self.factor ** (ntk_exponent(dim) if self.form == "aware" else 1.0))


@dataclass(frozen=True, kw_only=True)
class DynamicNTK(Scaling):
    r"""NTK-aware scaling by as much as the sequence at hand needs (emozilla 2023).

    .. math:: \theta_i' = \left( \text{base} \cdot \left( s \frac{n}{L} - (s - 1) \right)^{d / (d - 2)}
        \right)^{-2i/d}

    n is the length of the sequence, L is `original_max_seq_len`, and s is `factor`. Up to `original_max_seq_len` it is
    plain RoPE, bit for bit. Beyond, the base depends on the length of the whole sequence, which has to be given: see
    `Rotary.for_length`.

    Limits:
        Keys in a cache were rotated for a shorter sequence: `Rotary.rerotate` moves them, or they are wrong.

    Tested against:
        50-digit arithmetic (mpmath) on the shapes of published models; and where `transformers` has it, its own
        functions, bit for bit.

    >>> DynamicNTK(factor=2.0, original_max_seq_len=4096).length_that_matters
    4096
    """

    name = "dynamic"
    aliases = ("dynamic_ntk",)

    factor: float
    original_max_seq_len: int

    def __post_init__(self) -> None:
        self._settle_reals("factor", low=1)
        self._settle_length()

    @property
    def length_that_matters(self) -> int:
        return self.original_max_seq_len

    def frequencies(self, dim: int, base: float, seq_len: int | None = None) -> Frequencies:
        length = max(seq_len or 0, self.original_max_seq_len)
        factor = Decimal(self.factor)
        longer = PRECISION.divide(Decimal(length), Decimal(self.original_max_seq_len))
        stretch = PRECISION.fma(factor, longer, PRECISION.subtract(1, factor))
        return inverse_frequencies(dim, stretched_base(dim, base, stretch, "aware"))

    def rounded(self, dim: int, base: float, seq_len: int | None = None) -> Rounded:
        # The reference takes the length off the position ids, so its arithmetic on it is that of a float32 tensor.
        length = torch.tensor(float(max(seq_len or 0, self.original_max_seq_len)), dtype=torch.float32, device="cpu")
        stretch = (self.factor * length / self.original_max_seq_len) - (self.factor - 1)
        return 1.0 / powers(dim, base * stretch ** ntk_exponent(dim))


@dataclass(frozen=True, kw_only=True)
class MixedNTK(Scaling):
    r"""NTK scaling that grows with a power of the pair's number: Su 2023, as vLLM's ``mixed_b``.

    .. math:: \theta_i' = \theta_i \, e^{-a (i + 1)^b}, \qquad a = \frac{\ln s}{(d / 2)^b}

    The slowest pair is stretched by exactly `factor` s. With b = 0 all pairs are stretched alike, as by `Linear`; with
    b = 1 by a geometric ladder, nearly as by `NTK`. See https://kexue.fm/archives/9706.

    Limits:
        As of `NTK`: the longest context that works is shorter than `factor` promises.

    Tested against:
        The formula in mpmath, and vLLM's arithmetic in NumPy's float32.

    >>> from locant import Rotary
    >>> Rotary(8, scaling=MixedNTK(factor=4.0)).inv_freq[-1] * 4
    tensor(0.0010, dtype=torch.float64)
    """

    name = "mixed_ntk"

    factor: float
    b: float = 0.625

    def __post_init__(self) -> None:
        self._settle_reals("factor", low=1)
        self._settle_reals("b", low=0, high=8)

    def frequencies(self, dim: int, base: float, seq_len: int | None = None) -> Frequencies:
        pairs = (dim + 1) // 2
        log, b = Decimal(self.factor).ln(PRECISION), Decimal(self.b)
        scaled: list[Decimal] = []
        for pair, frequency in enumerate(inverse_frequencies(dim, base)):
            share = PRECISION.power(PRECISION.divide(pair + 1, pairs), b)
            scaled.append(PRECISION.divide(frequency, PRECISION.exp(PRECISION.multiply(log, share))))
        return tuple(scaled)

    def rounded(self, dim: int, base: float, seq_len: int | None = None) -> Rounded:
        plain = 1.0 / powers(dim, base)
        a = torch.tensor(self.factor, dtype=torch.float32, device="cpu").log() / len(plain) ** self.b
        numbers = torch.arange(1, len(plain) + 1, dtype=torch.float32, device="cpu")
        return plain / (a * numbers**self.b).exp()


def ntk_exponent(dim: int) -> float:
    """The power of the factor by which a base grows for the slowest of ``dim / 2`` pairs to be stretched by it."""
    if dim <= 2:
        raise RangeError(f"got NTK scaling of {dim} dimensions, expected 4 or more", "Linear(factor=...)")
    return dim / (dim - 2)


def stretched_base(dim: int, base: float, stretch: Decimal, form: str) -> Decimal:
    ntk_exponent(dim)
    exponent = PRECISION.divide(dim, dim - 2) if form == "aware" else Decimal(1)
    return PRECISION.multiply(Decimal(base), PRECISION.power(stretch, exponent))
