"""Scalings that stretch slow pairs more than fast ones: by a fixed base, by the sequence length, and mixed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from locant.arguments import Real, one_of
from locant.errors import RangeError
from locant.positions.scaling.base import Arithmetic, Scaling, ScalingInfo


@dataclass(frozen=True, kw_only=True)
class NTK(Scaling):
    r"""NTK-aware scaling (bloc97 2023): a larger base, which stretches slow pairs more than fast ones.

    .. math:: \theta_i' = (\text{base} \cdot s^{d / (d - 2)})^{-2i/d}

    ``form="aware"``, the default, divides the slowest frequency by exactly `factor` s and keeps the fastest.
    ``form="base"`` uses ``base * factor``, like Code Llama's larger theta.

    Limits:
        The pairs in between are stretched by less than `factor`, so the longest context that works is shorter than
        `factor` suggests.

    Tested against:
        mpmath at 50 digits, on the shapes of published models.

    >>> NTK(4.0)
    NTK(factor=4.0, form='aware')
    """

    factor: Real = field(kw_only=False)
    form: str = "aware"
    info: ClassVar[ScalingInfo] = ScalingInfo(
        name="ntk",
        aliases=("ntk_aware",),
        extends="a larger base, base x factor ** (d / (d - 2)): the slowest pair is stretched by the factor, the "
        "fastest does not change",
    )

    def __post_init__(self) -> None:
        self._check_floats("factor", above=0)
        one_of("NTK's form", self.form, ("aware", "base"), "NTK(factor=4.0)")

    def formula(self, numbers: Arithmetic, dim: int, base: Real, seq_len: int | None) -> Any:
        exponent = ntk_exponent(dim, numbers.real)
        stretch = numbers.real(self.factor) ** (exponent if self.form == "aware" else 1)
        return 1 / numbers.powers(dim, numbers.real(base) * stretch)


@dataclass(frozen=True, kw_only=True)
class DynamicNTK(Scaling):
    r"""NTK-aware scaling with a factor that grows with the sequence (emozilla 2023).

    .. math:: \theta_i' = \left( \text{base} \cdot \left( s \frac{n}{L} - (s - 1) \right)^{d / (d - 2)}
        \right)^{-2i/d}

    n is the length of the whole sequence, which `Rotary.for_length` sets. L is `original_max_seq_len`, and s is
    `factor`. Up to L, this is plain RoPE, bit for bit.

    Limits:
        Cached keys were rotated for a shorter sequence and are wrong until `Rotary.rerotate` rotates them to the new
        angles.

    Tested against:
        mpmath at 50 digits, on the shapes of published models, and `transformers`' own function, bit for bit.

    >>> DynamicNTK(factor=2.0, original_max_seq_len=4096).length_threshold
    4096
    """

    factor: Real = field(kw_only=False)
    original_max_seq_len: int
    info: ClassVar[ScalingInfo] = ScalingInfo(
        name="dynamic",
        aliases=("dynamic_ntk",),
        rope_type="dynamic",
        extends="the base grows with the sequence, by factor x length / trained - (factor - 1), in the end by more "
        "than the factor; max_position_embeddings does not change, because programs read the trained length from it",
    )

    def __post_init__(self) -> None:
        self._check_floats("factor", low=1)
        self._check_length()

    @property
    def length_threshold(self) -> int:
        return self.original_max_seq_len

    def formula(self, numbers: Arithmetic, dim: int, base: Real, seq_len: int | None) -> Any:
        # The reference reads the length from a tensor of position ids, so the length is in float32.
        length, factor = numbers.number(max(seq_len or 0, self.original_max_seq_len)), numbers.real(self.factor)
        stretch = factor * length / self.original_max_seq_len - (factor - 1)
        return 1 / numbers.powers(dim, numbers.real(base) * stretch ** ntk_exponent(dim, numbers.real))


@dataclass(frozen=True, kw_only=True)
class MixedNTK(Scaling):
    r"""NTK scaling that grows with a power of the pair's index: Su 2023, as in vLLM's ``mixed_b``.

    .. math:: \theta_i' = \theta_i \, e^{-a (i + 1)^b}, \qquad a = \frac{\ln s}{(d / 2)^b}

    The slowest pair is stretched by exactly `factor` s. With b = 0 all pairs are stretched equally, as in `Linear`.
    With b = 1 the factors form a geometric series, nearly as in `NTK`. See https://kexue.fm/archives/9706.

    Limits:
        The longest context that works is shorter than `factor` suggests, as with `NTK`.

    Tested against:
        The formula in mpmath, and vLLM's arithmetic in NumPy's float32.

    >>> from locant import Rotary
    >>> Rotary(8, scaling=MixedNTK(factor=4.0)).inv_freq[-1] * 4
    tensor(0.0010, dtype=torch.float64)
    """

    factor: Real = field(kw_only=False)
    b: Real = 0.625
    info: ClassVar[ScalingInfo] = ScalingInfo(name="mixed_ntk")

    def __post_init__(self) -> None:
        self._check_floats("factor", low=1)
        self._check_floats("b", low=0, high=8)

    def formula(self, numbers: Arithmetic, dim: int, base: Real, seq_len: int | None) -> Any:
        plain = 1 / numbers.powers(dim, base)
        a = numbers.log(numbers.number(self.factor)) / numbers.real(len(plain)) ** numbers.real(self.b)
        places = numbers.vector(range(1, len(plain) + 1))
        return plain / numbers.exp(a * places ** numbers.real(self.b))


def ntk_exponent(dim: int, real: Callable[[float], Any] = float) -> Any:
    """Return the exponent of the factor in the base that stretches the slowest of ``dim / 2`` pairs by the factor."""
    if dim <= 2:
        raise RangeError(f"got NTK scaling of {dim} dimensions, expected 4 or more", "Linear(factor=...)")
    return real(dim) / (dim - 2)
