"""The same on a CPU by ``native/embedding.c``: what it takes, and how it is told.

Forward it is one parallel region of torch's own threads, backward one for the sums in the order of the slots and one
for every table whose rows are gathered; a few tokens start none. Random bits are torch's, drawn before.
"""

from __future__ import annotations

import struct

import torch
from jaxtyping import Float
from torch import Tensor

from locant.kernels import native
from locant.kernels.input_embedding import cpu
from locant.kernels.input_embedding.cpu import Gradients
from locant.kernels.input_embedding.dropout import draw
from locant.kernels.input_embedding.operands import Operands

__all__ = ["backward", "forward", "unsupported"]

FORWARD, BACKWARD = "locant_embed", "locant_embed_backward"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BUFFERS = 3
"""Rows of float32 that each thread works in, as in C."""

pack = struct.Struct("=31q2d14qd5q").pack
"""``Task`` in C."""


def unsupported(o: Operands) -> str | None:
    """Why these tables cannot be read by it, or ``None``."""
    if native.function(FORWARD) is None:
        return f"native kernels are {native.status()}"
    if not o.num_tokens or not o.width:
        return "there are no tokens"
    tables = [table for table in (o.token, o.position, o.segment) if table is not None]
    if not all(table.dtype in DTYPES for table in tables):
        return f"there is no native kernel for {o.token.dtype}"
    if not all(_is_in_rows(table) for table in tables):
        return "the elements of a row do not lie side by side in memory"
    return None


def _is_in_rows(x: Tensor) -> bool:
    """Whether it is read where it lies: torch keeps some tensors negated, and zeros without memory."""
    return x.stride(-1) == 1 and not x.is_neg() and (x.data_ptr() != 0 or x.numel() == 0)


def forward(
    o: Operands,
) -> tuple[Float[Tensor, "batch seq d_model"], Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """As `cpu.forward`, with the same bits."""
    y, mean, rstd = cpu.empty_forward(o)
    nothing = o.token.new_empty(0)
    _call(FORWARD, o, y, mean, rstd, (nothing, nothing, nothing, nothing, nothing))
    return y, mean, rstd


def backward(
    grad: Float[Tensor, "batch seq d_model"],
    mean: Float[Tensor, " tokens"],
    rstd: Float[Tensor, " tokens"],
    o: Operands,
    needs: list[bool],
) -> Gradients:
    """As `cpu.backward`, with the same bits."""
    if grad.dtype not in DTYPES or not _is_in_rows(grad):
        grad = torch.empty(grad.shape, dtype=o.token.dtype).copy_(grad)
    token, position, segment, gamma, beta = (
        torch.empty_like(table, memory_format=torch.contiguous_format)
        if need and table is not None
        else o.token.new_empty(0)
        for table, need in zip((o.token, o.position, o.segment, o.gamma, o.beta), needs, strict=True)
    )
    gradients = token, position, segment, gamma, beta
    _call(BACKWARD, o, grad, mean.contiguous(), rstd.contiguous(), gradients)
    return gradients


def _call(name: str, o: Operands, out: Tensor, mean: Tensor, rstd: Tensor, gradients: Gradients) -> None:
    """`out` is the result to be written, or the gradient on it; `gradients` that are not wanted are empty."""
    batch, seq_len, width = *o.ids.shape, o.width
    token, position, segment, grad_gamma, grad_beta = gradients
    gamma, beta = (None if table is None else table.float().contiguous() for table in (o.gamma, o.beta))
    gamma = torch.ones(width) if gamma is None and beta is not None else gamma
    index, segments = o.position_index, o.segments
    run = cpu.first_of_run(index) if position.numel() else None
    if index is not None and position.numel() and run is None:
        index = index.expand(o.ids.shape)
    few = segment.numel() > 0 and len(segment) <= cpu.FEW
    if segment.numel() and not few and segments is None:
        segments = torch.zeros_like(o.ids)
    ids, index, segments = (None if x is None else x.contiguous() for x in (o.ids, index, segments))
    room = [
        torch.empty(len(table) + o.num_tokens if gathered else 0, dtype=torch.int64)
        for table, gathered in ((token, True), (position, run is None), (segment, not few))
        for gathered in [gathered and table.numel() > 0]
    ]
    drawn = draw(o, o.seed) if o.dropping and o.seed is not None else None
    threads, slots, sums = native.threads(), cpu.slots_of_chunk(batch), 2 + few * len(segment)
    in_slots = name == BACKWARD and (o.eps is not None or run is not None or few)
    buffers = torch.empty(threads * BUFFERS * width)
    along = torch.empty(2 * o.num_tokens if in_slots else 0)
    partial = torch.empty(-(-seq_len // slots) * sums * width if in_slots else 0)
    batch_step, seq_step = (step * out.element_size() for step in out.stride()[:2])
    packed = pack(
        threads, batch, seq_len, width, native.DTYPES[o.token.dtype],
        *_table(o.token, ids, token, room[0]),
        *_table(o.position if index is not None else None, index, position, room[1]),
        *_table(o.segment, segments, segment, room[2]),
        index is not None and index.shape[0] == 1, -1 if run is None else run, slots,
        -1 if o.padding_idx is None else o.padding_idx, o.eps is not None, o.scale, o.eps or 0.0,
        _place(gamma), _place(beta), _place(mean), _place(rstd),
        _place(out), native.DTYPES[out.dtype], batch_step, seq_step,
        *((0,) * 6 if drawn is None else (_place(drawn.bits), _place(drawn.limits), *drawn[2:])),
        1 / (1 - o.p), _place(buffers), _place(along), _place(partial), _place(grad_gamma), _place(grad_beta),
    )  # fmt: skip
    if not native.function(name)(packed):
        cpu.require_rows(o)


def _table(table: Tensor | None, ids: Tensor | None, gradient: Tensor, room: Tensor) -> tuple[int, ...]:
    """``Table`` in C."""
    if table is None:
        return (0,) * 7
    step = table.stride(0) * table.element_size()
    places = _place(ids), _place(gradient), _place(room)
    return table.data_ptr(), step, native.DTYPES[table.dtype], len(table), *places


def _place(x: Tensor | None) -> int:
    """Its address, or 0 if there is nothing of it."""
    return 0 if x is None or not x.numel() else x.data_ptr()
