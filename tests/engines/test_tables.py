"""The tables that other programs read: bit for bit those that `transformers`, vLLM and SGLang make for themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from locant import RangeError, Rotary
from tests import oracles
from tests.engines.record import record
from tests.refusal import refuses
from tests.tolerances import ANGLE_IN_DOUBLE, FREQUENCY

ROPES: dict[str, dict[str, Any]] = {
    "none": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}  # fmt: skip
LENGTH = 4096


def _config(name: str) -> LlamaConfig:
    rope = {"rope_theta": 10_000.0, **ROPES[name]}
    return LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=LENGTH, rope_parameters=rope)


@pytest.mark.parametrize("name", ROPES)
def test_a_cache_has_the_bits_of_transformers(name: str) -> None:
    config = _config(name)
    module = LlamaRotaryEmbedding(config)
    cos, sin = (table[0] for table in module(torch.zeros(1, 1), torch.arange(LENGTH)[None]))
    pairs = cos.shape[-1] // 2  # theirs stand twice
    rotary = Rotary.from_config(config, angles="float32")
    expected = torch.cat([cos[:, :pairs], sin[:, :pairs]], dim=-1)
    difference = float((rotary.cos_sin_cache(LENGTH) - expected).abs().max())
    record("transformers", "tables of cosines and sines", difference, package="transformers", unit="absolute")
    assert torch.equal(rotary.cos_sin_cache(LENGTH), expected)
    assert torch.equal(rotary.inv_freq_float32, module.inv_freq)
    assert torch.equal(rotary.replace(angles="exact").inv_freq_float32, module.inv_freq)
    assert (rotary.inv_freq / module.inv_freq - 1).abs().max() < FREQUENCY


def test_a_cache_of_partial_rotation() -> None:
    """As vLLM computes it, which has no more than the formula."""
    inv_freq = 1.0 / (10_000.0 ** (torch.arange(0, 32, 2, dtype=torch.float) / 32))
    angle = torch.outer(torch.arange(LENGTH, dtype=torch.float), inv_freq)
    cache = Rotary(64, rotary_dim=32, angles="float32").cos_sin_cache(LENGTH)
    assert torch.equal(cache, torch.cat([angle.cos(), angle.sin()], dim=-1))


def test_a_dynamic_cache_is_for_one_length() -> None:
    """vLLM fixes a dynamic scaling at the longest length, and its base is a Python float where others' is float32."""
    trained, factor, dim = 512, 4.0, 64
    config: dict[str, Any] = {
        "model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": trained,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": factor},
    }  # fmt: skip
    longest = int(trained * factor)
    base = 10_000.0 * ((factor * longest / trained) - (factor - 1)) ** (dim / (dim - 2))
    inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
    rotary = Rotary.from_config(config, angles="float32").for_length(longest)
    assert (rotary.inv_freq_float32 / inv_freq - 1).abs().max() < FREQUENCY
    assert rotary.cos_sin_cache(longest).shape == (longest, dim)


@pytest.mark.parametrize(("dtype", "loss"), [(torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12)])
def test_what_a_cache_of_16_bits_loses(dtype: torch.dtype, loss: float) -> None:
    rotary = Rotary(128)
    cache = rotary.cos_sin_cache(5000, dtype)
    assert cache.dtype == dtype
    off = (cache.double() - rotary.cos_sin_cache(5000).double()).abs().max()
    assert loss / 2 < off <= loss


def test_a_cache_of_64_bits_has_their_accuracy() -> None:
    cache = Rotary(16, base=500_000.0).cos_sin_cache(70_000, torch.float64)
    places = [0, 1, 255, 256, 65_535, 65_536, 69_999]
    expected = np.concatenate(oracles.true_angles(places, 16, 500_000.0), axis=-1)
    assert np.abs(cache[places].numpy() - expected).max() < ANGLE_IN_DOUBLE


def test_tables_without_torch() -> None:
    rotary = Rotary(64, layout="interleaved")
    cos, sin = rotary.tables(7)
    assert isinstance(cos, np.ndarray)
    assert isinstance(sin, np.ndarray)
    assert np.array_equal(np.concatenate([cos, sin], axis=-1), rotary.cos_sin_cache(7).numpy())
    assert all(isinstance(table, torch.Tensor) for table in rotary.tables(7, like="torch"))
    assert rotary.cos_sin_cache(0).shape == (0, 64)
    odd: list[Any] = ["int8", np.float32, torch.int32]
    for dtype in odd:
        with refuses(RangeError, "dtype"):
            rotary.cos_sin_cache(4, dtype=dtype)
    for call, word in ((lambda: rotary.tables(7, like="jax"), "like"), (lambda: rotary.cos_sin_cache(-1), "-1")):  # type: ignore[arg-type]
        with refuses(RangeError, word):
            call()
