"""What a decoding step's rotation takes of the host, beside a launch that could not be less.

``python -m benchmarks.host_time`` prints microseconds of one thread's time, the least of many turns in which
all contenders come one after the other. Everything happens but the call of the CUDA driver, for all alike.
"""

# ruff: noqa: N803 - constexpr arguments are written in capitals
# A launch of a Triton kernel takes plain values for `constexpr`:
# pyright: reportArgumentType=none

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from locant import Positions, Rotary
from locant.kernels.rotary import op
from locant.kernels.rotary import triton as kernel
from locant.kernels.rotary.choice import KernelChoice
from tests.gpu_without_gpu import launcher

__all__: list[str] = []

TURNS, CALLS = 15, 150


@triton.jit
def copy(x, y, count, BLOCK: tl.constexpr):
    """As little as a kernel can do."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + o, tl.load(x + o, mask=o < count), mask=o < count)


@triton.jit
def rotate_one(
    out, x, cos, sin, lengths, offset, seq, heads, rotary_dim, table_length,
    out_batch, out_seq, out_head, out_dim, x_batch, x_seq, x_head, x_dim,
    BLOCK_K: tl.constexpr, IS_OFFSET_TENSOR: tl.constexpr, IS_VARLEN: tl.constexpr, INTERLEAVED: tl.constexpr,
    CONJUGATE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """With the arguments of flash-attention's kernel for one tensor; what it computes does not matter here."""
    o = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m = o < seq + heads + rotary_dim + table_length + out_batch + out_seq + out_head + x_batch + x_seq + x_head
    tl.store(out + o * out_dim, tl.load(x + o * x_dim, mask=m) + tl.load(cos + o) + tl.load(sin + o), mask=m)


def usual(x: Tensor, cos: Tensor) -> Tensor:
    """As flash-attention launches it, in its own order of dimensions."""
    out, (batch, heads, seq, dim) = torch.empty_like(x), x.shape
    rotate_one[lambda meta: (triton.cdiv(heads, meta["BLOCK_H"]), triton.cdiv(seq, meta["BLOCK_M"]), batch)](
        out, x, cos, cos, None, 0, seq, heads, dim, seq, *out.stride(), *x.stride(),
        BLOCK_K=128, IS_OFFSET_TENSOR=False, IS_VARLEN=False, INTERLEAVED=False, CONJUGATE=False, BLOCK_M=8, BLOCK_H=2,
    )  # fmt: skip
    return out


def least(contenders: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds of each call."""
    found = dict.fromkeys(contenders, float("inf"))
    for turn in range(TURNS):
        for name, call in contenders.items():
            before = time.thread_time()
            for _ in range(CALLS):
                call()
            if turn:
                found[name] = min(found[name], (time.thread_time() - before) / CALLS * 1e6)
    return found


def contenders(batch: int) -> dict[str, Callable[[], object]]:
    """32 heads of queries and 8 of keys, one token each."""
    q, k = (torch.zeros(batch, heads, 1, 128, dtype=torch.bfloat16) for heads in (32, 8))
    outs, cos = (torch.empty_like(q), torch.empty_like(k)), torch.zeros(64)
    rotary, where = Rotary(128), Positions.after(4_096, 1)
    tables = rotary.angles.tables(q.device, where.max_index)
    leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
    return {
        "the least launch there is": lambda: copy[(4,)](q, outs[0], q.numel(), BLOCK=1_024),
        "the usual kernel, on q and on k": lambda: (usual(q, cos), usual(k, cos)),
        "our launch for q and k": lambda: kernel.rotate_(q, k, *outs, where.index, tables, "half", False),
        "Rotary.rotate": lambda: rotary.rotate(q, k, where),
        "Rotary.rotate, in place": lambda: rotary.rotate(q, k, where, inplace=True),
        "Rotary.rotate, with gradients": lambda: rotary.rotate(*leaves, where),
    }


def main() -> None:
    torch.set_num_threads(1)
    launcher.start(Path(tempfile.mkdtemp(prefix="locant-host-time-")))
    launcher._Launcher.__call__ = _nothing  # type: ignore[method-assign]
    kernel._is_interpreted = lambda: True  # tensors of the CPU will do
    op.choose_kernel = _choose
    for batch in (1, 64):
        for name, microseconds in least(contenders(batch)).items():
            print(f"batch {batch:3}  {name:34}{microseconds:7.1f} us")


def _nothing(*_: object) -> None: ...


def _choose(*given: Any) -> KernelChoice:
    """As on a GPU, where this is asked in every call."""
    reason = kernel.why_not_triton(*given)
    return KernelChoice("triton", "q is on a GPU") if reason is None else KernelChoice("reference", reason)


if __name__ == "__main__":
    main()
