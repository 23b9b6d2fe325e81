"""What the known bugs are looked for in: every encoding of the package, and the one way in which all are put to use.

Parameters are set to small whole numbers, which no dtype rounds: whatever moves when a module is cast is a constant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from locant import (
    ALiBi,
    ContinuousGridBias,
    Learned,
    LearnedGrid,
    PositionEncoding,
    Positions,
    Rotary,
    Sandwich,
    Sinusoidal,
    T5Bias,
    XPos,
)
from locant.positions import ModelShape, Pairs, RotaryByClass, Temperature
from locant.positions.encodings.path import PaTH
from locant.positions.encodings.selective_rope import SelectiveRoPE
from locant.positions.registry import encodings
from locant.positions.rotary_by_class import products
from locant.positions.scaling import KINDS, NTK, Linear, Resonance, Scaling
from locant.positions.scaling.diffusion import DyPE, RIFLEx

__all__ = [
    "CONSTANT", "DISTINCT", "EACH_CODE", "EVERY", "HEADS", "ROTARY_OPTIONS", "WIDTH", "Build", "differences", "queries",
    "rotary", "use",
]  # fmt: skip

Build = Callable[[], PositionEncoding]

HEADS, WIDTH = 4, 16

PAIRS = WIDTH // 2
SCALINGS: dict[str, Scaling] = {
    kind.info.name: kind.by_factor(4.0, 2048, WIDTH, 10_000.0) for kind in KINDS.values() if kind.info.name
}
SCALINGS |= {
    "ntk of base": NTK(factor=4.0, form="base"), "resonance": Resonance(scaling=Linear(factor=4.0)),
    "riflex": RIFLEx(num_frames=66, pair=2), "dype": DyPE(factor=4.0),
}  # fmt: skip
ROTARY_OPTIONS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "rotary interleaved": {"layout": "interleaved"},
    "rotary float32": {"angles": "float32"},
    "rotary float32 interleaved": {"angles": "float32", "layout": "interleaved"},
    "rotary partial": {"rotary_dim": WIDTH // 2},
    "rotary base 500 000": {"base": 500_000.0},
    "rotary sections": {"sections": (2, 3, 3)},
    "rotary axial": {"sections": (2, 3, 3), "axial": True},
    "rotary of a known length": {"seq_len": 4096},
    "rotary temperature": {"temperature": Temperature(step=4, weight=0.1)},
    "rotary pairs": {"pairs": Pairs(dims=[(i, WIDTH - 1 - i) for i in range(PAIRS)])},
    **{f"rotary {name}": {"scaling": scaling} for name, scaling in SCALINGS.items()},
    **{f"rotary float32 {name}": {"scaling": scaling, "angles": "float32"} for name, scaling in SCALINGS.items()},
}
"""Every kind of rotary there is. A new option belongs here; test_16 notices one that is missing."""


def rotary(**options: Any) -> Rotary:
    """One of these kinds, ready for any position: scalings that depend on the length are told the largest."""
    encoding = Rotary(WIDTH, **options)
    return encoding if encoding.scaling.length_threshold is None else encoding.for_length(2**31)


def _settled(encoding: PositionEncoding) -> PositionEncoding:
    with torch.no_grad():
        for parameter in encoding.parameters():
            if not parameter.is_meta:
                parameter.copy_(torch.arange(1, parameter.numel() + 1).view_as(parameter) % 251)
    return encoding


def _building(kind: Callable[..., PositionEncoding], *sizes: int, **options: Any) -> Build:
    return lambda: _settled(kind(*sizes, **options))


CONSTANT: dict[str, Build] = {
    **{name: _building(rotary, **options) for name, options in ROTARY_OPTIONS.items()},
    "sinusoidal": _building(Sinusoidal, WIDTH),
    "alibi": _building(ALiBi, HEADS),
    "alibi of 12 heads": _building(ALiBi, 12),
    "t5": _building(T5Bias, HEADS),
    "t5 bidirectional": _building(T5Bias, HEADS, bidirectional=True),
    "xpos": _building(XPos, WIDTH, scale_base=2.0**31),
    "sandwich": _building(Sandwich, HEADS),
}
"""Everything that has numbers of its own, which follow from its configuration."""

EVERY: dict[str, Build] = {
    **CONSTANT,
    "learned": _building(Learned, 4096, WIDTH),
    "learned_grid": _building(LearnedGrid, 1, 4096, WIDTH),
    "continuous_grid_bias": _building(ContinuousGridBias, HEADS, 1, 4096, hidden=1),
}
SHAPE = ModelShape(d_model=HEADS * WIDTH, num_heads=HEADS, max_seq_len=4096)
EVERY |= {name: _building(kind.for_model, SHAPE) for name, kind in encodings().items() if name not in EVERY}
del EVERY["convolutional"]  # whose documents have to be whole


DISTINCT = (
    "rotary", "rotary float32 interleaved", "rotary partial", "rotary axial", "rotary dynamic", "rotary yarn",
    "sinusoidal", "alibi", "t5 bidirectional", "nope", "learned",
)  # fmt: skip
"""Some whose code differs, for checks that take long."""

EACH_CODE = {name: build for name, build in EVERY.items() if name in DISTINCT or not name.startswith("rotary ")}
"""Every encoding, and rotary as often as its code differs: scalings differ in their numbers alone."""


def queries(encoding: nn.Module, seq_len: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Tokens for `use`, of shape ``1 heads seq width``: the same ones for the same length."""
    heads = getattr(encoding, "num_heads", HEADS)
    generator = torch.Generator().manual_seed(seq_len)
    x = torch.randn(1, heads, seq_len, WIDTH, generator=generator, dtype=torch.float32)
    return x.to(device, dtype)


def use(encoding: PositionEncoding, x: Tensor, positions: Positions) -> dict[str, Tensor]:
    """What comes out of each of the three methods; a method that an encoding does not have hands its input through."""
    if isinstance(encoding, PaTH | SelectiveRoPE) and positions.start != 0 and positions.document_or_none is None:
        order = torch.arange(positions.seq_len, device=x.device)[None]  # no token is missing, whatever the indices are
        positions = dataclasses.replace(positions, order_or_none=order, start=None)
    positions = encoding.read(x.transpose(1, 2).flatten(2), positions)
    q, k = encoding.rotate(x, x, positions)
    out = {"embed": encoding.embed(x[:, 0], positions), "q": q, "k": k}
    if isinstance(encoding, RotaryByClass):  # whose rotations are those of pairs
        out["products"] = products(encoding.pair_classes(positions), q, k)
    bias = encoding.bias(x, x, positions)
    return out if bias is None else {**out, "bias": bias}


def differences(ours: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """By how much each method moved; a change of dtype counts as infinite, and equal bits as nothing at all."""
    assert ours.keys() == other.keys(), f"{sorted(ours)} against {sorted(other)}"
    moved = {}
    for method, value in ours.items():
        if value.dtype != other[method].dtype or value.shape != other[method].shape:
            moved[method] = float("inf")
        elif not torch.equal(value, other[method]):
            moved[method] = float((value.detach().double() - other[method].detach().double()).abs().max())
    return moved
