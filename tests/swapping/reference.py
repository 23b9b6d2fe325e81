"""The attention of a model of `transformers` written out plainly, with a choice of positions: none of it is locant's.

The formulas of positions are those of the papers: ALiBi (Press 2021), KERPLE (Chi 2022), xPos (Sun 2022), YaRN (Peng
2023), PoPE (Gopalakrishnan 2025), Self-Extend (Jin 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["alibi", "kerple", "logits", "nope", "pope", "rotary", "self_extend", "xpos", "yarn"]

Turn = Callable[[Tensor, int], Tensor]
Bias = Callable[[Tensor], Tensor]
Product = Callable[[Tensor, Tensor], Tensor]


class Way:
    """What a model does with order: to queries (side 1) and keys (side -1), and to scores by distance."""

    def __init__(
        self, turn: Turn = lambda x, side: x, bias: Bias | None = None, product: Product | None = None
    ) -> None:
        self.turn, self.bias, self.product = turn, bias, product


def nope() -> Way:
    return Way()


def alibi(heads: int) -> Way:
    slopes = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)], dtype=torch.float64)
    return Way(bias=lambda distance: -slopes[:, None, None] * distance)


def kerple(r1: Tensor, r2: Tensor) -> Way:
    r1, r2 = r1.double().reshape(-1, 1, 1), r2.double().reshape(-1, 1, 1)
    return Way(bias=lambda distance: -r1 * torch.log(1 + r2 * distance))


def rotary(width: int, base: float = 10000.0) -> Way:
    frequencies = [base ** (-2 * pair / width) for pair in range(width // 2)]
    return Way(lambda x, side: _turned(x, frequencies, width))


def pope(width: int, base: float = 10000.0) -> Way:
    """Without shifts."""
    frequencies = torch.tensor([base ** (-channel / width) for channel in range(width)], dtype=torch.float64)

    def turn(x: Tensor, side: int) -> Tensor:
        angle = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * frequencies
        size = F.softplus(x)
        return torch.cat([size * angle.cos(), size * angle.sin()], -1)

    return Way(turn)


def self_extend(width: int, group: int, window: int, base: float = 10000.0) -> Way:
    """The product of every pair, rotated by its distance."""
    frequencies = torch.tensor([base ** (-2 * pair / width) for pair in range(width // 2)], dtype=torch.float64)

    def product(q: Tensor, k: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        apart = torch.where(i - j < window, i - j, i // group - j // group + window - window // group)
        turned = torch.exp(-1j * apart[..., None] * frequencies)
        q, k = (torch.complex(*x.chunk(2, -1)) for x in (q, k))
        return torch.einsum("bhip,bhjp,ijp->bhij", q.conj(), k, turned).real

    return Way(product=product)


def yarn(width: int, factor: float, trained: int, base: float = 10000.0) -> Way:
    def correction(rotations: float) -> float:
        return width * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(correction(32)), 0), min(math.ceil(correction(1)), width - 1)
    high = high + 0.001 if low == high else high
    frequencies = []
    for pair in range(width // 2):
        kept = 1 - min(max((pair - low) / (high - low), 0), 1)
        plain = base ** (-2 * pair / width)
        frequencies.append(plain * kept + plain / factor * (1 - kept))
    temperature = 0.1 * math.log(factor) + 1
    return Way(lambda x, side: _turned(x, frequencies, width, torch.full((1, 1), temperature, dtype=torch.float64)))


def xpos(width: int, base: float = 10000.0, scale_base: float = 512.0, gamma: float = 0.4) -> Way:
    frequencies = [base ** (-2 * pair / width) for pair in range(width // 2)]
    zeta = [(2 * pair / width + gamma) / (1 + gamma) for pair in range(width // 2)]

    def turn(x: Tensor, side: int) -> Tensor:
        places = torch.arange(x.shape[2], dtype=torch.float64)[:, None]
        return _turned(x, frequencies, width, torch.tensor(zeta, dtype=torch.float64) ** (side * places / scale_base))

    return Way(turn)


def _turned(x: Tensor, frequencies: list[float], width: int, size: Tensor | float = 1.0) -> Tensor:
    """Halves of the first `width` channels are pairs."""
    angle = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    cos, sin = angle.cos() * size, angle.sin() * size
    a, b, rest = x.split([width // 2, width // 2, x.shape[-1] - width], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


NAME = "tests of locant: attention written out"


def logits(model: Any, ids: Tensor, way: Way | list[Way]) -> Tensor:
    """Of a model whose own code is told that every token stands at 0, with the attention that is written out here.

    `way` may be a list with one for each layer.
    """
    ways = way if isinstance(way, list) else [way] * model.config.num_hidden_layers
    before = model.config._attn_implementation

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        return _attended(q, k, v, ways[module.layer_idx]), None

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS, NAME, attention)
        model.set_attn_implementation(NAME)
        out = model(ids, position_ids=torch.zeros_like(ids)).logits
        model.set_attn_implementation(before)
    return out


def _attended(q: Tensor, k: Tensor, v: Tensor, way: Way) -> Tensor:
    q, k = way.turn(q, 1), way.turn(k, -1)
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(2, 3) if way.product is None else way.product(q, k)) / math.sqrt(v.shape[-1])
    distance = torch.arange(length)[:, None] - torch.arange(length)
    if way.bias is not None:
        scores = scores + way.bias(distance.clamp(min=0).double())
    return (scores.masked_fill(distance < 0, -math.inf).softmax(-1) @ v).transpose(1, 2)
