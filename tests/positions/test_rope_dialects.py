"""The layout of every architecture in the table is the one that its modeling code turns with."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from locant import Positions, Rotary
from locant.positions.rope_dialects import DIALECTS

HEADS, TOKENS, DIM = 3, 7, 16
NOT_IN_TRANSFORMERS = {"kimi_k2"}
"""Runs DeepSeek-V3's modeling code, shipped with its weights."""

KINDS = {"qwen3_vl_moe_text": "qwen3_vl_moe"}

Turn = Callable[[object, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def of_repeated_halves(module: object, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return module.apply_rotary_pos_emb(q, k, torch.cat([cos, cos], -1), torch.cat([sin, sin], -1))  # type: ignore[attr-defined]


def of_single_angles(module: object, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return module.apply_rotary_pos_emb(q, k, cos, sin)  # type: ignore[attr-defined]


def of_repeated_neighbours(module: object, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return module.apply_rotary_pos_emb(q, k, cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1))  # type: ignore[attr-defined]


def of_deepseek(module: object, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return module.apply_rotary_pos_emb_interleave(q, k, torch.cat([cos, cos], -1), torch.cat([sin, sin], -1))  # type: ignore[attr-defined]


def one_by_one(module: object, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    twice = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    return module.apply_rotary_pos_emb(q, *twice), module.apply_rotary_pos_emb(k, *twice)  # type: ignore[attr-defined]


def of_gpt_j(module: object, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    turned = (module.apply_rotary_pos_emb(x.transpose(1, 2), sin, cos).transpose(1, 2) for x in (q, k))  # type: ignore[attr-defined]
    return next(turned), next(turned)


def of_complex(module: object, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return module.apply_rotary_emb(q, k, torch.complex(cos, sin))  # type: ignore[attr-defined]


def of_complex_by_token(module: object, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    turned = module.apply_rotary_emb(q.transpose(1, 2), k.transpose(1, 2), torch.complex(cos, sin))  # type: ignore[attr-defined]
    return turned[0].transpose(1, 2), turned[1].transpose(1, 2)


TURNS: dict[str, Turn] = {
    "cohere": of_repeated_neighbours,
    "cohere2": of_repeated_neighbours,
    "codegen": of_gpt_j,
    "deepseek_v2": of_complex,
    "deepseek_v3": of_deepseek,
    "gemma4_text": one_by_one,
    "gpt_oss": of_single_angles,
    "gptj": of_gpt_j,
    "llama4_text": of_complex_by_token,
}
"""How the code of an architecture wants its angles; most want them twice, half after half."""


@pytest.mark.parametrize("model_type", sorted(DIALECTS.keys() - NOT_IN_TRANSFORMERS))
def test_the_layout_is_that_of_the_modeling_code(model_type: str) -> None:
    kind = KINDS.get(model_type, model_type.removesuffix("_text"))
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    q, k = torch.randn(1, HEADS, TOKENS, DIM), torch.randn(1, HEADS, TOKENS, DIM)
    positions = Positions.after(5, TOKENS)
    scores = {}
    for layout in ("half", "interleaved"):
        rotary = Rotary(DIM, layout=layout)  # type: ignore[arg-type]
        turned_q, turned_k = rotary.rotate(q, k, positions)
        scores[layout] = turned_q @ turned_k.transpose(-1, -2)
    cos, sin = rotary.cos_sin(positions)
    their_q, their_k = TURNS.get(model_type, of_repeated_halves)(module, q, k, cos, sin)
    theirs = their_q @ their_k.transpose(-1, -2)
    near = {layout for layout, ours in scores.items() if torch.allclose(ours, theirs, rtol=1e-5, atol=1e-4)}
    assert near == {DIALECTS[model_type].layout}
