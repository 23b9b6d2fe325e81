"""The rotation on a CPU where there is no native kernel, or none for these tensors: torch's own loops over blocks.

Nothing of the size of q is allocated but the result, and nothing at all in place: a block stays in cache. Every element
is multiplied by its sine and by its cosine, in two passes over the block, and two over half of it each put the products
together. Half precision is widened and narrowed block by block. Every product is rounded before the sum is, as in the
reference.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from locant.kernels.rotary.reference import Layout, Tables, cos_sin

__all__ = ["rotate_"]

ANGLES = 2**17
"""Angles made at a time: 1 MiB each of cosines and sines in float64."""
BLOCK = 2**19
"""Elements rotated at a time: 2 MiB of float32. A fourth of it takes 1.4 times as long: threads start and stop."""


def rotate_(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    tables: Tables,
    layout: Layout,
    rotary_dim: int,
    out_q: Tensor,
    out_k: Tensor | None,
    inverse: bool = False,
) -> None:
    """Write the rotated `q` and `k` into `out_q` and `out_k`, which may be `q` and `k` themselves."""
    work = [(q, out_q)] if k is None or out_k is None else [(q, out_q), (k, out_k)]
    work = [(x, out) for x, out in work if x.numel()]
    for x, out in work:
        if out is not x:
            out[..., rotary_dim:].copy_(x[..., rotary_dim:])
    work = [(x[..., :rotary_dim], out[..., :rotary_dim]) for x, out in work]
    dtype = torch.promote_types(q.dtype, torch.float32)
    for tokens in _cut(positions.shape[1] if work else 0, ANGLES // (positions.shape[0] * tables.pairs())):
        cos, sin = cos_sin(positions[:, tokens], tables, dtype)
        cos, sin = _twice(cos, layout), _twice(-sin if inverse else sin, layout)
        for x, out in work:
            _rotate_tokens(x[:, :, tokens], out[:, :, tokens], cos, sin, layout)


def _cut(length: int, step: int) -> Iterator[slice]:
    """``0:length`` in parts of `step`."""
    step = max(step, 1)
    return (slice(begin, min(begin + step, length)) for begin in range(0, length, step))


def _twice(part: Tensor, layout: Layout) -> Tensor:
    """Cosines or sines where the first of each pair lies, and where its second does: ``rows 1 seq rotary_dim``."""
    return (torch.cat((part, part), -1) if layout == "half" else part.repeat_interleave(2, -1))[:, None]


def _rotate_tokens(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> None:
    """Some sequences and heads at a time; the result may lie where the input does."""
    batch, heads, length, dim = x.shape
    shared = cos.shape[0] == 1
    for rows in _cut(batch, BLOCK // (heads * length * dim)):
        for some in _cut(heads, BLOCK // (length * dim)):
            wide, into = x[rows, some].to(cos.dtype), out[rows, some]
            result = into if into.dtype == cos.dtype else wide
            _rotate_block(wide, result, cos if shared else cos[rows], sin if shared else sin[rows], layout)
            if result is not into:
                into.copy_(result)


def _rotate_block(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> None:
    a_sin, b_sin = _parts(x * sin, layout)
    a, b = _parts(torch.mul(x, cos, out=out), layout)
    a.sub_(b_sin)
    b.add_(a_sin)


def _parts(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The first and the second of every pair."""
    if layout == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second
