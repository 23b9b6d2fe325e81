"""What does one more token cost: its rotation in every layer, and its attention over a long cache?

Of the rotation, on a GPU, only the host's time is taken: the kernels themselves are shorter. It refuses to report where
a result is not that of the formula. ``PYTHONPATH=src python -m benchmarks decoding``
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import Row, measure
from locant import ALiBi, PositionEncoding, Positions, Rotary, T5Bias, attend

__all__ = ["rows"]

LAYERS, HEADS, KV_HEADS, HEAD_DIM, CACHED = 32, 32, 8, 128, 8_192
CACHES = [(1, 4_096), (1, 65_536), (8, 4_096)]
"""Rows, and tokens of each: up to half a GiB of keys and values in float32."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEAR = {torch.float32: 2e-3, torch.bfloat16: 6e-2}
"""How far from float64 a contender may be; others' float32 angles are off by 3e-4 at position 8 191."""


def rows() -> list[Row]:
    """In float32 and bfloat16 on a CPU, in bfloat16 on a GPU."""
    dtypes = (torch.bfloat16,) if DEVICE == "cuda" else (torch.float32, torch.bfloat16)
    with torch.no_grad():
        rotations = [row for dtype in dtypes for row in _rotation(dtype)]
        return rotations + [row for dtype in dtypes for cache in CACHES for row in _attention(dtype, *cache)]


def _rotation(dtype: torch.dtype) -> list[Row]:
    rotary = Rotary(HEAD_DIM)
    q, k = (torch.randn(1, heads, 1, HEAD_DIM, device=DEVICE, dtype=dtype) for heads in (HEADS, KV_HEADS))
    contenders: dict[str, Callable[[Positions], tuple[Tensor, Tensor]]] = {}
    if importlib.util.find_spec("transformers"):
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        angles = rotary.inv_freq.to(DEVICE, torch.float32) * (CACHED - 1)
        cos, sin = (torch.cat([x, x])[None, None].to(dtype) for x in (angles.cos(), angles.sin()))
        contenders["transformers' function, given cosines and sines"] = lambda _: apply_rotary_pos_emb(q, k, cos, sin)
    else:
        print("not installed, and so not measured: transformers")
    contenders["locant"] = lambda here: rotary.rotate(q, k, here)
    contenders["locant, in place"] = lambda here: rotary.rotate(q, k, here, inplace=True)
    here = _next_token()
    expected = rotary.rotate(q.double(), k.double(), here)
    for name, contender in contenders.items():
        found = contender(here) if "in place" not in name else rotary.rotate(q.clone(), k.clone(), here, inplace=True)
        for ours, wanted in zip(found, expected, strict=True):
            error = float((ours.double() - wanted).abs().max() / wanted.abs().max())
            assert error < NEAR[dtype], f"{name} is off by {error}"
    question = (
        f"rotation of one token in {LAYERS} layers, q {HEADS} and k {KV_HEADS} heads of {HEAD_DIM}, {dtype}, {DEVICE} "
        "(wanted: 1)"
    )
    return measure(question, {name: _in_every_layer(each) for name, each in contenders.items()})


def _next_token() -> Positions:
    return Positions.after(CACHED - 1, 1, device=DEVICE)


def _in_every_layer(contender: Callable[[Positions], object]) -> Callable[[], None]:
    """One forward pass, which makes its positions."""

    def run() -> None:
        here = _next_token()
        for _ in range(LAYERS):
            contender(here)

    return run


def _attention(dtype: torch.dtype, batch: int, cached: int) -> list[Row]:
    keys, here = Positions.arange(cached, device=DEVICE), Positions.after(cached - 1, 1, device=DEVICE)
    q = torch.randn(batch, HEADS, 1, HEAD_DIM, device=DEVICE).to(dtype)
    k, v = (torch.randn(batch, KV_HEADS, cached, HEAD_DIM, device=DEVICE).to(dtype) for _ in range(2))
    kinds: dict[str, tuple[PositionEncoding | None, int | None]] = {
        "without a bias": (None, None), "ALiBi": (ALiBi(HEADS), None), "T5": (T5Bias(HEADS).to(DEVICE), None),
        "a window of 1 024": (None, 1_024), "ALiBi, a window of 1 024": (ALiBi(HEADS), 1_024),
    }  # fmt: skip
    contenders: dict[str, Callable[[], Tensor]] = {
        "SDPA": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    }
    for name, (encoding, window) in kinds.items():
        options = {"encoding": encoding, "positions": here, "k_positions": keys, "window": window}
        contenders[f"locant, {name}"] = lambda options=options: attend(q, k, v, **options)
        truth = attend(q[:1].double(), k[:1].double(), v[:1].double(), backend="eager", **options)
        error = float((attend(q, k, v, **options)[:1].double() - truth).abs().max())
        assert error < NEAR[dtype], f"{name} is off by {error}"
    question = (
        f"attention of one token in each of {batch} rows behind {cached - 1} in the cache, {HEADS} heads and "
        f"{KV_HEADS} of keys of {HEAD_DIM}, {dtype}, {DEVICE} (wanted: 1.15)"
    )
    rounds = max(3, min(15, 2**18 // (batch * cached)))
    return measure(question, {name: _waiting(each) for name, each in contenders.items()}, rounds=rounds)


def _waiting(contender: Callable[[], Tensor]) -> Callable[[], None]:
    def run() -> None:
        contender()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    return run
