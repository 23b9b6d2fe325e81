"""How close is equal: one table for the whole suite, so that no test can be made to pass by loosening its own.

What is a copy, a look-up or the same arithmetic in the same order is compared with `torch.equal`, not with this.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "ANGLE",
    "ANGLE_IN_DOUBLE",
    "BFLOAT16_LOSS",
    "DECODED",
    "DIFFERENT",
    "DOUBLE",
    "DRAWN",
    "ESTIMATED",
    "EXPORTED",
    "FAR_DOUBLE",
    "FAR_SINES",
    "FEW_ROUNDINGS",
    "FORMULA",
    "FREQUENCY",
    "GATHERED",
    "INTERPOLATED",
    "LENGTH",
    "LLAMA_CPP",
    "LOGARITHM",
    "LOGITS",
    "LOSS",
    "OF_FLOAT32_ANGLES",
    "ONE_ROUNDING",
    "OVER_RANKS",
    "PEER",
    "PHASE",
    "POWER_IN_DOUBLE",
    "PRINTED",
    "RADIANS",
    "RATIO_OF_ONE",
    "ROTATED",
    "ROTATED_TOKEN",
    "SCATTERED",
    "SEVEN_DIGITS",
    "SHIFTED",
    "SHORT_SUM",
    "SIX_DIGITS",
    "SMALL_ROUNDING",
    "SUM_IN_BFLOAT16",
    "TENSOR_CORES",
    "TOLERANCES",
    "VLLM",
    "assert_close",
]

# ---------------------------------------------------------------------- whole tensors, relative and absolute

TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-12, 1e-13),
    torch.float32: (1e-5, 2e-6),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}
"""Relative and absolute: a few roundings of numbers around 1, for sums of up to some hundred of them."""

SHORT_SUM = {"rtol": 1e-6, "atol": 1e-6}
"""Float32 where only some ten numbers around 1 are added, or some more in the same order."""

PEER = {"rtol": 1e-5, "atol": 2e-5}
"""Beside a peer that has float32 angles of some ten radians, or gradients through two products of matrices."""

INTERPOLATED = {"rtol": 2e-7, "atol": 1e-8}
"""A row between two of a float32 table: two products and a sum in float64, rounded once."""

SCATTERED = {"rtol": 1e-5, "atol": 1e-4}
"""A float32 row of a gradient that some hundred tokens are added to, and is then scaled."""

# ---------------------------------------------------------------------- float64, and Python's own numbers

FEW_ROUNDINGS = 1e-15
"""How far a float may be, over its size, from the same formula written otherwise: four or five roundings."""

FORMULA = 1e-14
"""How far float64 may be from a formula of a power, a logarithm or a cosine of a few radians, all of size 1."""

DOUBLE = 1e-13
"""How far tokens rotated or attended in float64 may be, absolutely, with angles of up to some hundred radians."""

POWER_IN_DOUBLE = 1e-13
"""How far a power of some hundred may be, over its size: the rounding of its base, as many times."""

FAR_DOUBLE = 1e-12
"""The same with angles of some thousand radians, which the formula beside ours rounds to 2**-42 of one."""

OVER_RANKS = 1e-12
"""How far a float64 loss or gradient computed over several processes may be, over its size: sums in another order."""

ANGLE_IN_DOUBLE = 4e-15
"""How far a float64 cosine may be from the true one at any position: some roundings of 2**-53 while tables combine."""

# ---------------------------------------------------------------------- float32 and narrower

ONE_ROUNDING: dict[torch.dtype, float] = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""How far rounding to the nearest moves a number, over its size, and with it the mean of many."""

SUM_IN_BFLOAT16 = 2.0**-7
"""How far a bias may be, over its size, that a peer has in bfloat16: its slope and its product are rounded."""

ANGLE = 6e-8
"""How far a float32 cosine may be from the true one: 2**-24 is the spacing of float32 just below 1."""

PHASE = 1e-7
"""How far the angle may be that a float32 cosine and sine tell of: both may be off by `ANGLE`, at right angles."""

RADIANS = 1e-6
"""How far a float32 angle within pi and -pi may be that is computed from both: their spacing at pi is 2.4e-7."""

ROTATED = 2e-7
"""How far a pair rotated in float32 may be off, over its length: a rounded cosine, two products, a sum."""

ROTATED_TOKEN = 1e-6
"""The same for tokens drawn from the normal distribution, absolutely: no pair of them is longer than some five."""

OF_FLOAT32_ANGLES = {50: 4e-6, 520: 3.1e-5, 1_000: 3.1e-4, 15_708: 8e-3}
"""How far numbers of size 1 may be that others rotated by float32 angles of up to so many radians: some last bits."""

SMALL_ROUNDING = 1e-5
"""Below this the guide to diffusers tells no number for how far a module's float32 angles move what it rotates."""

LENGTH = 1e-6
"""How far a float32 norm may be, over the true one, or a product of two vectors of length 1: a sum of a few squares."""

SHIFTED: dict[torch.dtype, float] = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""How far ``q . k`` may move, in units of ``|q| |k|``, when both move by the same number of positions."""

FREQUENCY = 1e-6
"""How far a frequency that is computed in float32, as models were trained, may be from the formula, over its size."""

LLAMA_CPP = 1e-2
"""Of logits of size 10: it looks GELU up in float16. Another angle moves them by 1 and more."""

VLLM = 2e-4
"""Of log-probabilities of its CPU engine, which go down to -20; another angle moves them by 1 and more."""

LOGARITHM = 4e-7
"""How far a float32 bias may be, over its size, that is a logarithm or a power of a distance, and a product."""

RATIO_OF_ONE = 5e-6
"""How far FIRE's bias of the first token may move with the length: the authors' 1e-6 in a divisor, and an MLP."""

FAR_SINES = 5e-6
"""How far a float32 sum of 32 cosines may be at distances beyond 2**24, where float64 itself is good for 2e-9 each."""

DECODED = 4e-6
"""The same for results with tokens in another arrangement, some eight times what is seen: values of up to four."""

EXPORTED = 3e-5
"""How far what an exported layer computes in another engine may be, with sums in its own order."""

LOGITS = 1e-5
"""How far float32 logits behind a whole small model may be."""
BFLOAT16_LOSS = 5e-2
"""How far a loss may be, in nats per token, of a small model that was trained with sums in bfloat16."""


LOSS = 1e-6
"""How far a mean of losses of some nats may be that float32 logits give."""

GATHERED: dict[torch.dtype, float] = {torch.float32: 1e-4, torch.float16: 3.5e-4, torch.bfloat16: 2.8e-3}
"""How far, over its norm, a gradient in this dtype may be that gathers every pair of tokens: where it is narrow it is
rounded once, at the end; in float32 a million products have nearly cancelled."""

TENSOR_CORES: dict[torch.dtype, float] = {torch.float32: 2e-3, torch.bfloat16: 2e-2}
"""How far, over its largest element, what FlexAttention computes on a GPU may be, which multiplies float32 as TF32."""

# ---------------------------------------------------------------------- not of roundings

PRINTED = {decimals: 0.5 * 10.0**-decimals for decimals in (2, 3, 4, 6, 7)}
"""How far a number may be that was written down with so many decimals: half a unit of the last."""

SIX_DIGITS = 1e-5
"""How far, over its size, a number may be that a message tells with six digits."""

SEVEN_DIGITS = 1e-6
"""The same with seven digits."""

DRAWN = 0.01
"""How far the deviation of a hundred thousand drawn numbers may be, over the true one: five of its own deviations."""

ESTIMATED = 0.1
"""How far, over its size, a count may be that is estimated from a part of a large input."""

DIFFERENT = 1e-2
"""What has to be different, so that a test shows something, is so by more than this."""

QUANTILE = 1e-4
"""Relative: a quantile of Student's t by a sum over 20,001 angles (9e-5 near one degree of freedom, in a tail of 1e-5),
and numbers of tables, which have four digits."""


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """`actual` is `expected`, up to what the dtype of `actual` (or the one named) can hold; NaN equals nothing.

    The shapes have to be the same: nothing is broadcast.
    """
    rtol, atol = TOLERANCES[actual.dtype if dtype is None else dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol)
