"""Modules with rotations and attention, which are exported for other engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from locant import ALiBi, PositionEncoding, Positions, Rotary, T5Bias, attend

__all__ = [
    "HEADS", "HEAD_DIM", "LAYERS", "LENGTH", "STARTS", "Layer", "Rotation", "far", "off_in_layer", "off_in_rotation",
    "tokens",
]  # fmt: skip

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
LENGTH = torch.export.Dim("length", min=2, max=2**20)


class Layer(nn.Module):
    """Rotation and attention, as a model has them."""

    def __init__(self, encoding: PositionEncoding, **options: Any) -> None:
        super().__init__()
        self.encoding = encoding
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = Positions.arange(q.shape[2])
        q, k = self.encoding.rotate(q, k, positions)
        return attend(q, k, v, encoding=self.encoding, positions=positions, **self.options)


class Rotation(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return self.rotary.rotate_one(x, Positions(index))


def tokens(length: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(1, heads, length, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return q, k, v


LAYERS = {
    "plain": (PositionEncoding(), {}),
    "rotary": (Rotary(HEAD_DIM), {}),
    "interleaved part": (Rotary(HEAD_DIM, layout="interleaved", rotary_dim=8), {}),
    "float32 angles": (Rotary(HEAD_DIM, angles="float32"), {}),
    "alibi": (ALiBi(HEADS), {}),
    "t5": (T5Bias(HEADS), {}),
    "window": (Rotary(HEAD_DIM), {"window": 8}),
    "softcap": (Rotary(HEAD_DIM), {"softcap": 5.0}),
}

STARTS = (0, 255, 65_530, 2**24 - 3, 2**31 - 10)
"""Where ten tokens stand: the last of them at 2**31 - 1."""


def far(start: int) -> tuple[Tensor, Tensor]:
    return tokens(10)[0], torch.arange(start, start + 10)[None]


Engine = Callable[[nn.Module, tuple[Tensor, ...], Any], Callable[..., Tensor]]
"""Makes what an engine runs of a module, inputs, and `dynamic_shapes` or ``None``."""


@torch.no_grad()
def off_in_layer(engine: Engine, name: str, length: Any) -> float:
    """How far a layer is off in an engine, at one length, or where `length` is a symbol at several."""
    encoding, options = LAYERS[name]
    layer = Layer(encoding, **options).eval()
    run = engine(layer, tokens(8), None if length is None else ({2: length},) * 3)
    inputs = [tokens(each) for each in ((8,) if length is None else (8, 2, 37, 600))]
    return max(float((run(*each) - layer(*each)).abs().max()) for each in inputs)


@torch.no_grad()
def off_in_rotation(engine: Engine, rotary: Rotary, length: Any) -> float:
    """How far rotated tokens are off in an engine, wherever they stand."""
    module = Rotation(rotary).eval()
    run = engine(module, far(0), None if length is None else ({2: length}, {1: length}))
    return max(float((run(*inputs) - module(*inputs)).abs().max()) for inputs in map(far, STARTS))
