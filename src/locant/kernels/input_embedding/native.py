"""The same on a CPU by ``native/embedding.c``: what it takes, and how it is told.

Forward it is one parallel region of torch's own threads, backward one for the sums in the order of the slots and one
for every table whose rows are gathered; a few tokens start none. Random bits are torch's, drawn before.
"""

from __future__ import annotations

import struct

import torch
from jaxtyping import Int
from torch import Tensor

from locant.kernels import native
from locant.kernels.input_embedding import cpu
from locant.kernels.input_embedding.cpu import Forward, Gradients
from locant.kernels.input_embedding.reference import Operands

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
    if not all(native.is_in_rows(table) for table in tables):
        return "the elements of a row do not lie side by side in memory"
    return None


def forward(o: Operands) -> Forward:
    """As `cpu.forward`, with the same bits."""
    y, mean, rstd = cpu.empty_forward(o)
    _call(FORWARD, o, y, mean, rstd, cpu.empty_backward(o, [False] * len(o.learned)))
    return y, mean, rstd


def backward(grad: Tensor, mean: Tensor, rstd: Tensor, o: Operands, needs: list[bool]) -> Gradients:
    """As `cpu.backward`, with the same bits."""
    if grad.dtype not in DTYPES or not native.is_in_rows(grad):
        dtype = grad.dtype if grad.dtype in DTYPES else torch.float32
        grad = torch.empty(grad.shape, dtype=dtype).copy_(grad)
    gradients = cpu.empty_backward(o, needs)
    _call(BACKWARD, o, grad, mean.contiguous(), rstd.contiguous(), gradients)
    return gradients


def _call(name: str, o: Operands, out: Tensor, mean: Tensor, rstd: Tensor, gradients: Gradients) -> None:
    """`out` is the result to be written, or the gradient on it; `gradients` that are not wanted are empty."""
    batch, seq_len = o.ids.shape
    of_token, of_position, of_segment, of_gamma, of_beta = gradients
    index, segments = o.position_index, o.segments
    run = _first_of_run(index) if of_position.numel() else None
    if of_position.numel() and run is None and index is not None:
        index = index.expand(o.ids.shape)
    few = len(of_segment) <= cpu.FEW
    if not few and segments is None:
        segments = torch.zeros_like(o.ids)
    token = _Table(o.token, o.ids, of_token, gathered=True)
    position = _Table(None if index is None else o.position, index, of_position, gathered=run is None)
    segment = _Table(o.segment, segments, of_segment, gathered=not few)
    gamma, beta = (None if table is None else table.float().contiguous() for table in (o.gamma, o.beta))
    gamma = torch.ones(o.width) if gamma is None and beta is not None else gamma
    drawn = cpu.draw(o, o.seed) if o.dropping and o.seed is not None else None
    threads, slots, sums = native.threads(), cpu.slots_of_chunk(batch), 2 + few * len(of_segment)
    in_slots = name == BACKWARD and (o.eps is not None or run is not None or sums > 2)
    buffers = torch.empty(threads * BUFFERS * o.width)
    along = torch.empty(2 * o.num_tokens if in_slots else 0)
    partial = torch.empty(-(-seq_len // slots) * sums * o.width if in_slots else 0)
    batch_step, seq_step = (step * out.element_size() for step in out.stride()[:2])
    packed = pack(
        threads, batch, seq_len, o.width, native.DTYPES[o.token.dtype],
        *token.packed(), *position.packed(), *segment.packed(),
        index is not None and index.shape[0] == 1, -1 if run is None else run, slots,
        -1 if o.padding_idx is None else o.padding_idx, o.eps is not None, o.scale, o.eps or 0.0,
        _place(gamma), _place(beta), _place(mean), _place(rstd),
        _place(out), native.DTYPES[out.dtype], batch_step, seq_step,
        *((0,) * 6 if drawn is None else (_place(drawn.bits), _place(drawn.limits), *drawn[2:])),
        1 / (1 - o.p), _place(buffers), _place(along), _place(partial), _place(of_gamma), _place(of_beta),
    )  # fmt: skip
    if not native.function(name)(packed):
        cpu.require_rows(o)


class _Table:
    """``Table`` in C, and what it points to."""

    def __init__(self, rows: Tensor | None, ids: Tensor | None, gradient: Tensor, *, gathered: bool) -> None:
        self.rows = rows
        self.ids = None if ids is None else ids.contiguous()
        self.gradient = gradient
        room = len(gradient) + ids.numel() if gathered and ids is not None and gradient.numel() else 0
        self.sorted = torch.empty(room, dtype=torch.int64)

    def packed(self) -> tuple[int, ...]:
        if self.rows is None:
            return (0,) * 7
        step, dtype = self.rows.stride(0) * self.rows.element_size(), native.DTYPES[self.rows.dtype]
        places = _place(self.ids), _place(self.gradient), _place(self.sorted)
        return self.rows.data_ptr(), step, dtype, len(self.rows), *places


def _first_of_run(index: Int[Tensor, "#batch seq"] | None) -> int | None:
    """Where positions begin that go up in steps of one and are those of every row of the batch."""
    if index is None or index.shape[0] != 1:
        return None
    first = int(index[0, 0])
    return first if torch.equal(index[0], torch.arange(first, first + index.shape[1])) else None


def _place(x: Tensor | None) -> int:
    """Its address, or 0 if there is nothing of it."""
    return 0 if x is None or not x.numel() else x.data_ptr()
