"""The rotation written down plainly; what every faster form has to agree with.

A pair (a, b) becomes (a cos - b sin, b cos + a sin): a positive angle turns from the first towards the second. Which
two dimensions form a pair is the layout: ``"half"`` pairs i with i + rotary_dim / 2 (Llama, NeoX), ``"interleaved"``
pairs 2i with 2i + 1 (the paper, GPT-J). Dimensions from `rotary_dim` on are passed through untouched.

Arithmetic is float32 whatever the dtype of the input (float64 for float64), rounded once at the end.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["Layout", "rotate"]

Layout = Literal["half", "interleaved"]


def rotate(
    x: Float[Tensor, "batch heads seq head_dim"],
    cos: Float[Tensor, "#batch seq pairs"],
    sin: Float[Tensor, "#batch seq pairs"],
    layout: Layout,
) -> Float[Tensor, "batch heads seq head_dim"]:
    """Turn the first ``2 * pairs`` dimensions of every head.

    >>> rotate(torch.tensor([[[[1.0, 0.0]]]]), torch.zeros(1, 1, 1), torch.ones(1, 1, 1), "half")
    tensor([[[[0., 1.]]]])
    """
    rotary_dim = 2 * cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = x[..., :rotary_dim].to(cos.dtype), x[..., rotary_dim:]
    if layout == "half":
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)
