"""Mixed-radix RoPE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from locant.arguments import one_of
from locant.errors import RangeError
from locant.positions.scaling.base import Arithmetic, Scaling, ScalingInfo
from locant.positions.scaling.yarn import YaRN

__all__ = ["MrRoPE"]


@dataclass(frozen=True, kw_only=True)
class MrRoPE(Scaling):
    r"""Pairs as the digits of a position, the slower the more their radix grows: Tian et al. 2026, arXiv 2601.22181.

    .. math:: \theta_i' = \theta_i \, s^{-e_i}, \qquad e_i = \frac{n_i (n_i + 1)}{N (N + 1)}, \qquad
        n_i = \mathrm{clip}(i - l, 0, N), \quad N = h - l

    l and h are the ends of `YaRN`'s ramp: pairs up to l rotate more than `beta_fast` times within the trained length
    and keep their frequency, pairs from h on rotate less than `beta_slow` times and are interpolated by `factor`, s.
    From one pair to the next between them, a radix grows by s to the power of 2 n / (N (N + 1)), which is MrRoPE-Pro;
    with ``form="uniform"`` all grow alike, e = n / N, which is MrRoPE-Uni. The attention factor is that of YaRN.

    Args:
        factor: the new length over the trained one.
        beta_fast, beta_slow: rotations within the trained length, `original_max_seq_len`.
        form: ``"progressive"`` or ``"uniform"``.
        attention_factor: overrides ``0.1 ln(factor) + 1``.

    Limits:
        Its paper measured models that were not trained on with it, and no others. No configuration has it.

    Tested against:
        The paper's products of radices, pair by pair, in 50-digit arithmetic (mpmath) on the shapes of published
        models.

    >>> from locant import Rotary
    >>> plain, scaled = Rotary(16), Rotary(16, scaling=MrRoPE(factor=8.0, original_max_seq_len=2048))
    >>> (plain.inv_freq / scaled.inv_freq).round(decimals=2).tolist()
    [1.0, 1.0, 1.0, 1.23, 1.87, 3.48, 8.0, 8.0]
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    form: str = "progressive"
    attention_factor: float | None = None
    info: ClassVar[ScalingInfo] = ScalingInfo(name="mrrope", aliases=("mixed_radix", "mrrope_pro"))

    def __post_init__(self) -> None:
        self._settle_reals("factor", above=0)
        self._settle_length()
        self._settle_reals("beta_fast", "beta_slow", low=1e-9)
        self._settle_reals("attention_factor", above=0)
        one_of("MrRoPE's form", self.form, ("progressive", "uniform"), "MrRoPE(factor=4.0, original_max_seq_len=4096)")
        if self.beta_fast < self.beta_slow:
            got = f"got beta_fast={self.beta_fast} below beta_slow={self.beta_slow}"
            raise RangeError(got, "beta_fast=32, beta_slow=1")

    @property
    def effective_attention_factor(self) -> float:
        return self._yarn.effective_attention_factor

    def formula(self, numbers: Arithmetic, dim: int, base: float, seq_len: int | None) -> Any:
        low, high = map(int, self._yarn.ramp_ends(dim, base))
        steps = max(high - low, 1)
        powers = numbers.powers(dim, base)
        digits = numbers.vector(min(max(pair - low, 0), steps) for pair in range(len(powers)))
        progressive = self.form == "progressive"
        exponents = digits * (digits + 1) / (steps * (steps + 1)) if progressive else digits / steps
        return 1 / powers / numbers.real(self.factor) ** exponents

    @property
    def _yarn(self) -> YaRN:
        """With the same ramp and temperature."""
        return YaRN(
            factor=max(self.factor, 1.0), original_max_seq_len=self.original_max_seq_len, beta_fast=self.beta_fast,
            beta_slow=self.beta_slow, attention_factor=self.attention_factor,
        )  # fmt: skip
