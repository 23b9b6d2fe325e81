"""Rotary position embeddings (RoPE), with angles that are exact at every position below 2**31.

Forward and backward, queries and keys together or one tensor alone, all dimensions of a head or the first ones, in
half or interleaved layout, in place or not. On a CPU by C code where the build has it, on a GPU by Triton. With a
`HeadNorm`, queries and keys get the RMSNorm of their heads in the same pass.
"""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

import torch

from hub.rotary import layers
from locant.kernels import rotary
from locant.kernels.norm_rotary import HeadNorm, norm_and_rotate
from locant.positions.angles import AngleMode, Angles
from locant.positions.frequencies import inverse_frequencies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from locant.kernels.rotary import Layout

__all__ = ["Angles", "HeadNorm", "angles", "inverse_frequencies", "layers", "rotate"]


def angles(inv_freq: Sequence[float | Decimal], mode: AngleMode = "exact", *, attention_factor: float = 1.0) -> Angles:
    """What `rotate` takes its cosines and sines from; made once for a model, in a few milliseconds.

    Args:
        inv_freq: radians per position, one for each pair of dimensions: `inverse_frequencies(head_dim, 10_000.0)`, or
            those of a model as plain numbers.
        mode: ``"exact"``, or ``"float32"`` for the product of two float32 numbers that models were trained with.
        attention_factor: a factor on every cosine and sine, as of YaRN.
    """
    return Angles([Decimal(each) for each in inv_freq], mode, attention_factor=attention_factor)


def rotate(
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: torch.Tensor,
    angles: Angles,
    *,
    layout: Layout = "half",
    inverse: bool = False,
    inplace: bool = False,
    norm: HeadNorm | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The queries and keys, rotated by the angles of their positions; differentiable.

    Args:
        q: ``batch heads seq head_dim``, any floating dtype, any strides. Dimensions beyond twice the number of
            frequencies stay as they are.
        k: the same with its own number of heads, or ``None`` to rotate one tensor alone.
        positions: int64, ``batch seq`` or ``1 seq``.
        angles: made by `angles`.
        layout: ``"half"`` pairs dimension i with i + pairs (Llama), ``"interleaved"`` 2i with 2i + 1 (GPT-J).
        inverse: rotate by the negative angles.
        inplace: write into `q` and `k`.
        norm: the RMSNorm of each head before the rotation (Qwen3, Gemma 3), or of all heads of a token (OLMo 2). Its
            weights get gradients, too.
    """
    tables = angles.tables(q.device, min_index=None)
    if norm is not None:
        if inverse:
            raise ValueError("got inverse=True with a norm, whose inverse is unknown; pass norm=None")
        return norm_and_rotate(q, k, positions, tables, layout, norm, inplace=inplace)
    return rotary.rotate(q, k, positions, tables, layout, inverse=inverse, inplace=inplace)
