"""What the kernels are asked, and the answer by NumPy in float64, transcribed from the formulas of the papers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from locant.kernels.input_embedding import Operands, native

__all__ = ["LEARNED", "Answer", "Kernel", "answer", "operands", "poisoned"]

LEARNED = ("token", "position", "segment", "gamma", "beta")
EVERY = [True] * len(LEARNED)

Array = np.ndarray


def operands(
    shape: tuple[int, int] = (3, 5),
    width: int = 13,
    *,
    dtype: torch.dtype = torch.float32,
    without: tuple[str, ...] = (),
    **changes: Any,
) -> Operands:
    """Random tables whose sizes are distinct primes; `without` some of the parts."""
    batch, seq_len = shape
    tables = {
        name: torch.randn(rows, width).to(dtype) for name, rows in [("token", 23), ("position", 37), ("segment", 3)]
    }
    given: dict[str, Any] = {
        **tables,
        "ids": _with_padding(torch.randint(23, shape)),
        "position_index": torch.randint(37, shape),
        "segments": torch.randint(3, shape),
        "gamma": torch.randn(width).to(dtype),
        "beta": torch.randn(width).to(dtype),
        "scale": 1.7,
        "padding_idx": 2,
        "eps": 1e-5,
    }
    given |= changes
    for name in without:
        del given[name]
    assert given["ids"].shape == (batch, seq_len)
    return Operands(**given)


def _with_padding(ids: Tensor) -> Tensor:
    """Among several tokens one of padding, whose row would have a gradient if it were not removed."""
    if ids.numel() > 1:
        ids.view(-1)[-1] = 2
    return ids


@dataclass
class Answer:
    """The result, and what a cotangent on it means for every table, in float64."""

    y: Array
    gradients: dict[str, Array]


def answer(o: Operands, cotangent: Tensor, keep: Tensor | None = None) -> Answer:
    """Vaswani et al. 2017, section 3.4; Ba et al. 2016, equation 4; Srivastava et al. 2014, scaled at training time."""
    a: dict[str, Any] = {f.name: getattr(o, f.name) for f in dataclasses.fields(o)}
    a = {
        k: v.detach().cpu().double().numpy() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in a.items()
    }
    ids = o.ids.cpu().numpy()
    index = None if o.position_index is None else np.broadcast_to(o.position_index.cpu().numpy(), ids.shape)
    segments = np.zeros_like(ids) if o.segments is None else o.segments.cpu().numpy()
    width = o.token.shape[1]
    x = a["token"][ids] * o.scale
    if a["position"] is not None and index is not None:
        x = x + a["position"][index]
    if a["segment"] is not None:
        x = x + a["segment"][segments]
    y, gamma = x, np.ones(width) if a["gamma"] is None else a["gamma"]
    if o.eps is not None:
        centred = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + o.eps)
        normed = centred / deviation
        y = normed * gamma + (0 if a["beta"] is None else a["beta"])
    drop = np.ones_like(y) if keep is None else keep.cpu().numpy() / (1 - o.p)
    dy = cotangent.detach().cpu().double().numpy() * drop
    found: dict[str, Array] = {}
    dx = dy
    if o.eps is not None:
        found["gamma"], found["beta"] = (dy * normed).sum((0, 1)), dy.sum((0, 1))
        inner = dy * gamma
        along = (inner * normed).mean(-1, keepdims=True)
        dx = (inner - inner.mean(-1, keepdims=True) - normed * along) / deviation
    for name, rows, factor in [("token", ids, o.scale), ("position", index, 1), ("segment", segments, 1)]:
        if a[name] is not None and rows is not None:
            found[name] = np.zeros_like(a[name])
            np.add.at(found[name], rows, dx * factor)
    if o.padding_idx is not None:
        found["token"][o.padding_idx] = 0
    return Answer(y * drop, found)


class Kernel:
    """The native one, in memory that is full of NaN."""

    def forward(self, o: Operands) -> tuple[Tensor, ...]:
        with poisoned():
            return native.forward(o)

    def kept(self, o: Operands) -> Tensor:
        with poisoned():
            return native.kept(o)

    def both(self, grad: Tensor, o: Operands, needs: list[bool] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        with poisoned():
            y, mean, rstd = native.forward(o)
            found = native.backward(grad, mean, rstd, o, needs or EVERY)
        return y, dict(zip(LEARNED, found, strict=True))

    def backward(self, grad: Tensor, o: Operands, needs: list[bool] | None = None) -> dict[str, Tensor]:
        return self.both(grad, o, needs)[1]


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is full of NaN and of the largest integers meanwhile."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
