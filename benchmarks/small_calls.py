"""What does a small call cost, where the host's time is most of it?

Attention of one query over 128 keys, beside SDPA. A decoding step of a swapped model, beside the same model unswapped.
Positions from a mask and rotation with float32 angles, beside plain torch. Each is measured twice: with everything in
the caches, and after 64 MB were read, as much as the weights of a layer.
``PYTHONPATH=src python -m benchmarks small_calls``
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import Row, measure
from locant import ALiBi, Fire, PositionEncoding, Positions, Rotary, T5Bias, attend, swap
from locant.swapping.forward_arguments import cache_argument

__all__ = ["rows"]

HEADS, HEAD_DIM, KEYS = 8, 64, 128
LAYERS, WIDTH, MODEL_HEADS = 4, 256, 4
CALLS = 20
"""Calls in one turn, if the caches are warm."""
COLD_BYTES = 64 * 2**20
NEAR = 1e-5


def rows() -> list[Row]:
    """On a CPU, with one thread, because a small call must not start others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return [row for question, contenders in _questions() for row in _warm_and_cold(question, contenders)]
    finally:
        torch.set_num_threads(threads)


def _warm_and_cold(question: str, contenders: Mapping[str, Callable[[], object]]) -> list[Row]:
    big = torch.zeros(COLD_BYTES // 4)
    warm = measure(f"{question}, {CALLS} calls, warm", {name: _repeat(call) for name, call in contenders.items()})
    return warm + measure(f"{question}, one call after 64 MB were read", contenders, before=big.sum)


def _repeat(call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(CALLS):
            call()

    return run


def _questions() -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    question = f"attention of one query over {KEYS} keys, {HEADS} heads of {HEAD_DIM}"
    yield f"{question} (wanted: 2.8, with a bias 5.9)", _attend()
    yield f"positions of a mask of 2 x {KEYS}", _from_mask()
    yield f"rotation of one token, {HEADS} heads of {HEAD_DIM}", _rotate()
    if importlib.util.find_spec("transformers"):
        question = f"one token behind {KEYS} in a Llama of {LAYERS} layers, {MODEL_HEADS} heads and width {WIDTH}"
        yield f"{question} (wanted: 1.15, FIRE 1.3)", _swapped()
    else:
        print("not installed, and so not measured: transformers")


def _attend() -> dict[str, Callable[[], object]]:
    q, k, v = (torch.randn(1, HEADS, length, HEAD_DIM) for length in (1, KEYS, KEYS))
    options: dict[str, Any] = {"positions": Positions.after(KEYS - 1, 1), "k_positions": Positions.arange(KEYS)}
    encodings: dict[str, PositionEncoding | None] = {
        "no encoding": None, "Rotary": Rotary(HEAD_DIM), "ALiBi": ALiBi(HEADS), "T5": T5Bias(HEADS),
        "FIRE": Fire(HEADS),
    }  # fmt: skip
    contenders: dict[str, Callable[[], Tensor]] = {"SDPA": lambda: F.scaled_dot_product_attention(q, k, v)}
    for name, encoding in encodings.items():
        contenders[f"locant, {name}"] = lambda encoding=encoding: attend(q, k, v, encoding=encoding, **options)
        truth = attend(q.double(), k.double(), v.double(), encoding=encoding, backend="eager", **options)
        error = float((contenders[f"locant, {name}"]().double() - truth).abs().max())
        assert error < NEAR, f"{name} is off by {error}"
    return {**contenders}


def _from_mask() -> dict[str, Callable[[], object]]:
    mask = torch.ones(2, KEYS, dtype=torch.int64)
    padded = mask.clone()
    padded[1, :30] = 0
    return {
        "plain torch, without checks": lambda: (padded.cumsum(-1) - 1).masked_fill_(padded == 0, 1),
        "locant, with padding": lambda: Positions.from_mask(padded),
        "locant, without padding": lambda: Positions.from_mask(mask),
    }


def _rotate() -> dict[str, Callable[[], object]]:
    q, k = (torch.randn(1, HEADS, 1, HEAD_DIM) for _ in range(2))
    here, exact, rounded = Positions.after(KEYS, 1), Rotary(HEAD_DIM), Rotary(HEAD_DIM, angles="float32")
    angles = rounded.inv_freq_float32 * KEYS
    cos, sin = (torch.cat([x, x])[None, None, None] for x in (angles.cos(), angles.sin()))

    def plain() -> tuple[Tensor, Tensor]:
        return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin

    for ours, theirs in zip(rounded.rotate(q, k, here), plain(), strict=True):
        assert float((ours - theirs).abs().max()) < NEAR
    return {
        "plain torch, given cosines and sines": plain,
        "locant, exact angles": lambda: exact.rotate(q, k, here),
        "locant, float32 angles": lambda: rounded.rotate(q, k, here),
    }


def _rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


def _swapped() -> dict[str, Callable[[], object]]:
    encodings = {"ALiBi": ALiBi(MODEL_HEADS), "T5": T5Bias(MODEL_HEADS), "FIRE": Fire(MODEL_HEADS)}
    own = {"the model as it is": _decoder(None)}
    return own | {f"swapped to {name}": _decoder(encoding) for name, encoding in encodings.items()}


def _decoder(encoding: PositionEncoding | None) -> Callable[[], object]:
    """Return one decoding step, which leaves the cache as it was."""
    from transformers import DynamicCache, LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=256, hidden_size=WIDTH, intermediate_size=688, num_hidden_layers=LAYERS,
        num_attention_heads=MODEL_HEADS, num_key_value_heads=MODEL_HEADS,
    )  # fmt: skip
    model, cache, ids = LlamaModel(config).eval(), DynamicCache(config=config), torch.zeros(1, KEYS, dtype=torch.int64)
    if encoding is not None:
        swap(model, encoding)
    arguments: dict[str, Any] = {str(cache_argument(model)): cache, "use_cache": True}
    model(ids, **arguments)

    def step() -> None:
        model(ids[:, :1], **arguments)
        cache.crop(-1)

    return step
