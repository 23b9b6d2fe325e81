"""`HeadNorm`, the RMSNorm of queries and keys before their rotation, as a value."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from locant.arguments import flag, real, short_repr
from locant.errors import RangeError, ShapeError
from locant.spelling import dtype_name

__all__ = ["HeadNorm"]


class HeadNorm:
    r"""RMSNorm of queries and keys, which Qwen3, Gemma 3, Olmo 2 and others apply to each head before the rotation.

    .. math:: y_i = \frac{x_i}{\sqrt{\frac{1}{d} \sum_j x_j^2 + \epsilon}} \, w_i

    This is a value without state. `Rotary.rotate` and the caches take it, and the weights stay parameters of your own
    modules. Arithmetic is in float32 (float64 for float64 inputs). The result is rounded to the dtype of the input
    before the rotation, as in separate calls.

    Args:
        q_weight, k_weight: the weights of queries and of keys, or ``None`` for a norm without weights. A weight with
            ``head_dim`` elements is for a norm of each head (Qwen3, Gemma 3). A weight with ``heads * head_dim``
            elements is for one norm over all heads of a token (Olmo 2, Olmo 3, MiniMax).
        eps: the number to add to the mean of the squares.
        plus_one: multiply by ``1 + weight``, as Gemma does.
        round_before_weight: round to the dtype of the input before the product with the weight, too (Qwen3 and most
            others, whose product is then rounded again). Otherwise the product is in float32 and is rounded once
            (Gemma 3, Olmo 2, Olmo 3). The default is ``not plus_one``. In float32 both are equal.

    Raises:
        ShapeError: a weight is not a floating-point vector. `Rotary.rotate` raises it if the width or the device of a
            weight does not match q or k.

    >>> norm = HeadNorm(torch.ones(64), torch.ones(64))
    >>> q, k = norm.apply(torch.full((1, 8, 5, 64), 3.0), torch.full((1, 2, 5, 64), -2.0))
    >>> q[0, 0, 0, 0], k[0, 0, 0, 0]
    (tensor(1.0000), tensor(-1.0000))
    """

    __slots__ = ("eps", "k_weight", "plus_one", "q_weight", "round_before_weight")

    def __init__(
        self,
        q_weight: Float[Tensor, " q_width"] | None,
        k_weight: Float[Tensor, " k_width"] | None,
        eps: float = 1e-6,
        plus_one: bool = False,
        *,
        round_before_weight: bool | None = None,
    ) -> None:
        for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
            if weight is not None:
                _require_vector(name, weight)
        self.q_weight = q_weight
        self.k_weight = k_weight
        self.eps = float(real("eps", eps, low=0, remedy="eps=1e-6"))
        self.plus_one = flag("plus_one", plus_one)
        self.round_before_weight = (
            not self.plus_one if round_before_weight is None else flag("round_before_weight", round_before_weight)
        )

    def apply(
        self, q: Float[Tensor, "batch heads seq head_dim"], k: Float[Tensor, "batch kv_heads seq head_dim"]
    ) -> tuple[Float[Tensor, "batch heads seq head_dim"], Float[Tensor, "batch kv_heads seq head_dim"]]:
        """Return the norms without a rotation, for layers that do not rotate. This uses torch's operators."""
        from locant.kernels.norm_rotary.reference import normalize

        self.require_fits(q, k)
        return normalize(q, self.q_weight, self), normalize(k, self.k_weight, self)

    def for_keys(self) -> HeadNorm:
        """Return the norm whose weight of queries is this norm's weight of keys, for keys that are rotated alone."""
        return HeadNorm(self.k_weight, None, self.eps, self.plus_one, round_before_weight=self.round_before_weight)

    def require_fits(self, q: Tensor, k: Tensor | None) -> None:
        """Raise unless the widths and devices of the weights match `q` and `k` (``batch heads seq head_dim``)."""
        for name, weight, x in (("q", self.q_weight, q), ("k", self.k_weight, k)):
            if weight is None or x is None:
                continue
            heads, width = x.shape[1], x.shape[3]
            if weight.shape[0] not in (width, heads * width):
                got = f"got {name}_weight of {weight.shape[0]} elements for {name} with {heads} heads of {width}"
                remedy = f"use a weight of {width} elements for each head, or of {heads * width} for all heads together"
                raise ShapeError(got, remedy)
            if weight.device != x.device:
                raise ShapeError(
                    f"got {name}_weight on {weight.device} for {name} on {x.device}", f"{name}_weight.to({name}.device)"
                )

    def __repr__(self) -> str:
        widths = (None if weight is None else weight.shape[0] for weight in (self.q_weight, self.k_weight))
        names = ("q_weight", "k_weight", "eps", "plus_one", "round_before_weight")
        values = (*(_describe(width) for width in widths), self.eps, self.plus_one, self.round_before_weight)
        return f"HeadNorm({', '.join(f'{name}={value}' for name, value in zip(names, values, strict=True))})"


def _describe(width: int | None) -> str:
    return "None" if width is None else f"<{width} elements>"


def _require_vector(name: str, weight: Any) -> None:
    if not isinstance(weight, Tensor):
        got = f"got {short_repr(weight)} for {name}, expected a tensor or None"
        raise RangeError(got, f"{name[0]}_norm.weight")
    if weight.ndim != 1 or not weight.is_floating_point() or weight.dtype.itemsize < 2:
        got = f"got {name} of shape {tuple(weight.shape)} and dtype {dtype_name(weight.dtype)}"
        raise ShapeError(f"{got}, expected a vector of floating-point numbers", f"{name}.flatten().float()")
