"""The plain reference of the norm with the rotation, forward and backward. All faster kernels must agree with it.

For each row, a head of a token or all heads of a token::

    r = 1 / sqrt(mean(x * x) + eps)
    n = x * r                         rounded to the dtype of x, if norm.round_before_weight and there is a weight
    h = n * weight                    or n * (1 + weight), rounded to the dtype of x
    y = h rotated                     as in `kernels/rotary/reference.py`, rounded to the dtype of x

Arithmetic is in float32 for every dtype of x (float64 for float64), and every operation is rounded. The order in which
a kernel adds the squares is its own, but it is one order for all layouts of memory. On a CPU the order is that of
torch's ``mean`` over contiguous rows on the same machine, so that float32 results have the bits of `transformers`.

The backward treats roundings as the identity, as autograd does. With g the gradient of y in float32, rotated back and
not rounded::

    dweight = sum of g * n over all rows        n as in the product, rounded or not
    m = g * weight
    dx = r * (m - x * r * mean(m * x * r))      rounded once to the dtype of x
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.kernels.norm_rotary.head_norm import HeadNorm
from locant.kernels.rotary.reference import Layout, Tables, cos_sin, rotate, rotate_pairs


def norm_and_rotate(
    q: Float[Tensor, "batch heads seq head_dim"],
    k: Float[Tensor, "batch kv_heads seq head_dim"] | None,
    positions: Int[Tensor, "#batch seq"] | Int[Tensor, "#batch seq axes"],
    tables: Tables,
    layout: Layout,
    norm: HeadNorm,
) -> tuple[Tensor, Tensor | None]:
    """Return the norms of `q` and `k`, rotated by the angles of their positions."""
    normed_k = None if k is None else normalize(k, norm.k_weight, norm)
    return rotate(normalize(q, norm.q_weight, norm), normed_k, positions, tables, layout)


def norm_and_rotate_(
    q: Tensor, k: Tensor | None, out_q: Tensor, out_k: Tensor | None,
    positions: Tensor, tables: Tables, layout: Layout, norm: HeadNorm | None,
    v: Tensor | None = None, out_v: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the result into `out_q` and `out_k`, and `v` into `out_v`, as the kernels do."""
    if norm is None:
        rotated_q, rotated_k = rotate(q, k, positions, tables, layout)
    else:
        rotated_q, rotated_k = norm_and_rotate(q, k, positions, tables, layout, norm)
    for x, out in ((rotated_q, out_q), (rotated_k, out_k), (v, out_v)):
        if x is not None and out is not None:
            out.copy_(x)


def normalize(
    x: Float[Tensor, "batch heads seq head_dim"], weight: Float[Tensor, " width"] | None, norm: HeadNorm
) -> Float[Tensor, "batch heads seq head_dim"]:
    """Return the norm of each head, or of all heads together if the weight has their width."""
    rows = _rows(x, weight)
    normed = _normed(rows, rows * _inverse_rms(rows, norm.eps), x.dtype, weight, norm)
    scaled = normed if weight is None else normed * _scale(weight, norm, rows.dtype)
    return _heads(scaled.to(x.dtype), x, weight)


def norm_and_rotate_backward(
    grad_q: Float[Tensor, "batch heads seq head_dim"],
    grad_k: Float[Tensor, "batch kv_heads seq head_dim"] | None,
    q: Float[Tensor, "batch heads seq head_dim"],
    k: Float[Tensor, "batch kv_heads seq head_dim"] | None,
    positions: Int[Tensor, "#batch seq"] | Int[Tensor, "#batch seq axes"],
    tables: Tables,
    layout: Layout,
    norm: HeadNorm,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of q, k, the weight of queries and the weight of keys. `q` and `k` are the inputs.

    A gradient is ``None`` if its tensor is.
    """
    cos, sin = cos_sin(positions, tables, torch.promote_types(q.dtype, torch.float32))
    dq, dq_weight = _backward(grad_q, q, norm.q_weight, cos, -sin, layout, norm)
    if k is None or grad_k is None:
        return dq, None, dq_weight, None
    dk, dk_weight = _backward(grad_k, k, norm.k_weight, cos, -sin, layout, norm)
    return dq, dk, dq_weight, dk_weight


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, layout: Layout, norm: HeadNorm
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of `x` and of its weight. `sin` has the sign of the rotation back."""
    rows = _rows(x, weight)
    grad_rows = _rows(rotate_pairs(grad.to(cos.dtype), cos, sin, layout), weight)
    inverse_rms = _inverse_rms(rows, norm.eps)
    unit = rows * inverse_rms
    if weight is None:
        grad_unit, grad_weight = grad_rows, None
    else:
        products = grad_rows * _normed(rows, unit, x.dtype, weight, norm)
        grad_weight = products.sum(tuple(range(rows.ndim - 1))).to(weight.dtype)
        grad_unit = grad_rows * _scale(weight, norm, rows.dtype)
    grad_x = inverse_rms * (grad_unit - unit * (grad_unit * unit).mean(-1, keepdim=True))
    return _heads(grad_x.to(x.dtype), x, weight), grad_weight


# ---------------------------------------------------------------------- rows: heads, or all heads of a token


def _is_over_all_heads(x: Tensor, weight: Tensor | None) -> bool:
    return weight is not None and weight.shape[0] != x.shape[-1]


def _rows(x: Tensor, weight: Tensor | None) -> Tensor:
    """Return `x` in the working precision, with rows in the last dimension that are contiguous in memory."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if _is_over_all_heads(x, weight):  # `flatten` does not support batched gradients
        wide = wide.transpose(1, 2).reshape(x.shape[0], x.shape[2], x.shape[1] * x.shape[3])
    return wide.contiguous()


def _heads(rows: Tensor, x: Tensor, weight: Tensor | None) -> Tensor:
    """Return rows in the shape of `x`."""
    if not _is_over_all_heads(x, weight):
        return rows
    return rows.reshape(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def _inverse_rms(rows: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)


def _normed(rows: Tensor, unit: Tensor, dtype: torch.dtype, weight: Tensor | None, norm: HeadNorm) -> Tensor:
    """Return the first factor of the product with the weight, rounded to `dtype` if the norm rounds it."""
    return unit.to(dtype).to(rows.dtype) if norm.round_before_weight and weight is not None else unit


def _scale(weight: Tensor, norm: HeadNorm, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) + 1 if norm.plus_one else weight.to(dtype)
