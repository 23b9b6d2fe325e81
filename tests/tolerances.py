"""How close is equal: one table for the whole suite, so that no test can be made to pass by loosening its own.

What is a copy, a look-up or the same arithmetic in the same order is compared with `torch.equal`, not with this.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ANGLE", "GATHERED", "TENSOR_CORES", "TOLERANCES", "TURNED", "assert_close"]

TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-12, 1e-13),
    torch.float32: (1e-5, 2e-6),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}
"""Relative and absolute: a few roundings of numbers around 1, for sums of up to some hundred of them."""

ANGLE = 6e-8
"""How far a float32 cosine may be from the true one: 2**-24 is the spacing of float32 just below 1."""

TURNED = 2e-7
"""How far a pair turned in float32 may be from the true one, over its length: a rounded cosine, two products, a sum."""

GATHERED: dict[torch.dtype, float] = {torch.float32: 1e-4, torch.float16: 3.5e-4, torch.bfloat16: 2.8e-3}
"""How far, over its norm, a gradient in this dtype may be that gathers every pair of tokens: where it is narrow it is
rounded once, at the end; in float32 a million products have nearly cancelled."""

TENSOR_CORES: dict[torch.dtype, float] = {torch.float32: 2e-3, torch.bfloat16: 2e-2}
"""How far, over its largest element, what FlexAttention computes on a GPU may be, which multiplies float32 as TF32."""


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """`actual` is `expected`, up to what the dtype of `actual` (or the one named) can hold; NaN equals nothing.

    The shapes have to be the same: nothing is broadcast.
    """
    rtol, atol = TOLERANCES[actual.dtype if dtype is None else dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol)
