"""Every encoding in every arrangement, dtype and direction, compiled to machine code for an H100 that is not there.

`test_attention_compiles.py` does a part of them, ``python -m benchmarks.compile_all`` all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from locant import ALiBi, Kerple, PositionEncoding, Positions, attend
from locant.attention.backends import dense
from locant.positions import ModelShape, constant
from locant.positions.hidden_bias import HiddenBias
from locant.positions.offset_bias import OffsetBias
from locant.positions.registry import encodings
from tests.gpu_without_gpu import inductor

__all__ = [
    "BIASES", "HEADS", "LENGTH", "ON_GRIDS", "TILED", "Case", "copied_and_kept", "every_case", "machine_code",
    "of_a_graph", "tensors",
]  # fmt: skip

HEADS, KV_HEADS, LENGTH, HEAD_DIM = 4, 2, 512, 64
SHAPE = ModelShape(d_model=HEADS * HEAD_DIM, num_heads=HEADS, max_seq_len=LENGTH)
BIASES: dict[str, Callable[[], PositionEncoding | None]] = {
    "none": lambda: None,
    **{
        name: partial(kind.for_model, SHAPE)
        for name, kind in encodings().items()
        if "bias" in kind.methods() and not issubclass(kind, HiddenBias)
    },
    "learned alibi": partial(ALiBi, HEADS, learned=True),
    "kerple, power": partial(Kerple, HEADS, "power"),
}
TILED = ("cope", "transformer_xl", "fire")
"""They have no score function for CUDA, and so no kernel of FlexAttention: what compiles is a graph around them."""

ON_GRIDS = tuple(name for name, kind in encodings().items() if issubclass(kind, OffsetBias))
"""Biases of rows and columns, for which a row of tokens is one kind of grid."""


class Case(NamedTuple):
    """One call of `attend`."""

    name: str
    arrangement: str
    dtype: str
    learning: bool
    """Whether its backward pass belongs to it."""


def every_case() -> list[Case]:
    return [
        Case(name, arrangement, dtype, learning)
        for dtype in ("bfloat16", "float16", "float32")
        for name, learning in itertools.product(BIASES, (True, False))
        for arrangement in (("grid",) if name in ON_GRIDS else ("prefill", "packed", "window", "decode"))
    ]


def machine_code(case: Case, beside: bool = False) -> list[inductor.Kernel]:
    """The kernels of one call, and of its backward pass; with sinks, a soft cap and the log-sum-exp, or without."""
    if case.name in TILED:
        return of_a_graph(case, (LENGTH,), "auto")
    encoding = BIASES[case.name]()

    def call() -> None:
        inductor.to_device(encoding, learning=case.learning)
        q, k, where = tensors(*case[1:])
        if beside:
            sinks = torch.empty(HEADS, device="cuda", requires_grad=case.learning)
            where |= {"sinks": sinks, "softcap": 30.0, "return_lse": True}
        with torch.set_grad_enabled(case.learning):
            found = attend(q, k, k, encoding=encoding, backend="flex", **where)
            y, lse = found if beside else (found, torch.zeros(q.shape[:3], device="cuda"))
            if case.learning:
                (y.sum() + lse.sum()).backward()
        assert (y.dtype, y.shape) == (q.dtype, q.shape)
        assert (lse.dtype, lse.shape) == (torch.float32, q.shape[:3])

    return inductor.compiled(call)


def of_a_graph(case: Case, lengths: tuple[int, ...], backend: str) -> list[inductor.Kernel]:
    """Attention as a part of a model that is compiled whole, with queries and keys of one length after another."""
    encoding = BIASES[case.name]()

    def layer(q: Tensor, k: Tensor, where: dict[str, Any]) -> Tensor:
        return attend(q, k, k, encoding=encoding, backend=backend, **where)

    def call() -> None:
        inductor.to_device(encoding, learning=case.learning)
        constant.copy_all(torch.device("cuda", 0))
        compiled = torch.compile(layer, fullgraph=True)
        for length in lengths:
            q, k, where = tensors(*case[1:], length)
            with torch.set_grad_enabled(case.learning):
                y = compiled(q, k, where)
                if case.learning:
                    y.sum().backward()
            assert (y.dtype, y.shape) == (q.dtype, q.shape)

    with (
        mock.patch.object(constant.Constant, "_copy", copied_and_kept),
        mock.patch.object(dense.F, "scaled_dot_product_attention", with_a_mask_of_its_dtype),
    ):
        return inductor.compiled(call)


ATTENTION = F.scaled_dot_product_attention


def with_a_mask_of_its_dtype(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, **options: Any) -> Tensor:
    assert attn_mask is None or attn_mask.dtype in (torch.bool, q.dtype), "a fused kernel may read its bytes as those"
    return ATTENTION(q, k, v, attn_mask=attn_mask, **options)


def tensors(
    arrangement: str, dtype: str, learning: bool, length: int = LENGTH
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Queries, keys, and where they are."""

    def empty(heads: int, tokens: int) -> Tensor:
        size, kind = (2, heads, tokens, HEAD_DIM), getattr(torch, dtype)
        return torch.empty(size, dtype=kind, device="cuda", requires_grad=learning)

    where: dict[str, Any] = {"positions": Positions.arange(length, device="cuda")}
    if "window" in arrangement:
        where["window"] = 100
    if "packed" in arrangement:
        lengths = torch.zeros(2, length, dtype=torch.int64, device="cuda")
        where["positions"] = Positions(lengths, lengths, None, 0, length - 1)
    if arrangement == "grid":
        where = {"positions": Positions.grid(1, length - 1, prefix=1, device="cuda"), "causal": False}
    if arrangement == "decode":
        where = {"positions": Positions.after(length - 1, 1, device="cuda"), "k_positions": where["positions"]}
    return empty(HEADS, where["positions"].seq_len), empty(KV_HEADS, length), where


def copied_and_kept(self: constant.Constant, device: torch.device) -> None:
    """As it is on a device; fake tensors would not be kept."""
    if device not in self._copies:
        self._copies[device] = torch.empty(self._value.shape, dtype=self._value.dtype).to(device)
