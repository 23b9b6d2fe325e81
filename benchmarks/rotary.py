"""What does turning queries and keys cost, beside copying them and beside the usual code?"""

from __future__ import annotations

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from benchmarks.timing import Row, measure
from locant import Positions, Rotary

__all__ = ["rows"]

HEADS, KV_HEADS, LENGTH, HEAD_DIM = 32, 8, 4_096, 128


def rows() -> list[Row]:
    """Every contender, in both dtypes; and the angles alone."""
    return [*_rotation(torch.float32), *_rotation(torch.bfloat16), *_angles()]


def _rotation(dtype: torch.dtype) -> list[Row]:
    q = torch.randn(1, HEADS, LENGTH, HEAD_DIM).to(dtype)
    k = torch.randn(1, KV_HEADS, LENGTH, HEAD_DIM).to(dtype)
    q_into, k_into = torch.empty_like(q), torch.empty_like(k)
    positions = Positions.arange(LENGTH)
    half, interleaved = Rotary(HEAD_DIM), Rotary(HEAD_DIM, layout="interleaved")
    peer = LlamaRotaryEmbedding(LlamaConfig(hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS))

    def usual() -> None:
        cos, sin = peer(q, positions.index)
        apply_rotary_pos_emb(q, k, cos, sin)

    contenders = {
        "copy of q and k into existing memory (the limit)": lambda: (q_into.copy_(q), k_into.copy_(k)),
        "locant Rotary, half layout": lambda: half.rotate(q, k, positions),
        "locant Rotary, interleaved layout": lambda: interleaved.rotate(q, k, positions),
        "transformers, eager": usual,
    }
    return measure(f"rotate q 1x{HEADS}x{LENGTH}x{HEAD_DIM} and k with {KV_HEADS} heads, {dtype}", contenders, rounds=7)


def _angles() -> list[Row]:
    exact, usual = Rotary(HEAD_DIM), Rotary(HEAD_DIM, angles="float32")
    near, far = Positions.arange(LENGTH), Positions.after(1_000_000, LENGTH)
    contenders = {
        "float32 product, cos, sin": lambda: usual.cos_sin(near),
        "exact, around position 0": lambda: exact.cos_sin(near),
        "exact, around position 1 000 000": lambda: exact.cos_sin(far),
    }
    return measure(f"cos and sin of {LENGTH} positions x {HEAD_DIM // 2} pairs", contenders)
