"""Angles in float32 mode are the bits of `transformers`' own rotary modules, built from the same configurations."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig

from locant import Positions, Rotary
from tests.positions.published import PUBLISHED, as_object, layer_type_of
from tests.tolerances import FORMULA


def reference(config: Any) -> nn.Module:
    config = getattr(config, "text_config", config)
    kind = config.model_type.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    (name,) = (name for name in vars(module) if name.endswith("RotaryEmbedding") and "Vision" not in name)
    return getattr(module, name)(config)


def pairs(cos: Tensor, rotary: Rotary) -> Tensor:
    """One column per pair, of however many the reference writes them into."""
    if cos.shape[-1] == rotary.rotary_dim // 2:
        return cos
    repeated = torch.equal(cos[..., ::2], cos[..., 1::2]) and not torch.equal(cos[..., :1], cos[..., 2:3])
    return cos[..., ::2] if repeated else cos[..., : rotary.rotary_dim // 2]


def their_angles(config: Any, index: Tensor, rotary: Rotary, layer_type: str | None) -> tuple[Tensor, Tensor]:
    module, like = reference(config), torch.zeros(1, 1, 1)
    position_ids = index.expand(3, 1, -1) if rotary.sections else index[None]
    extra = (layer_type,) if layer_type else ()
    rotated = module(like, position_ids, *extra)
    return pairs(rotated[0], rotary), pairs(rotated[1], rotary)


def around(length: int) -> Tensor:
    """0 to 4096, and the neighbourhood of a length."""
    near = torch.arange(length - 40, length + 41)
    return torch.cat([torch.arange(4097), near[near > 4096]])


def assert_same_bits(config: Any, index: Tensor, layer_type: str | None = None) -> None:
    rotary = Rotary.from_config(config, layer_type=layer_type, angles="float32")
    if rotary.scaling.length_threshold is not None:
        rotary = rotary.for_length(int(index.max()) + 1)
    cos, sin = rotary.cos_sin(Positions.of(index))
    their_cos, their_sin = their_angles(config, index, rotary, layer_type)
    assert their_cos.shape == cos.shape
    assert torch.equal(cos, their_cos)
    assert torch.equal(sin, their_sin)


def lengths_of(name: str) -> list[int]:
    """The original length, and the longest one where that is another."""
    config = PUBLISHED[name]
    rope = config.get("rope_scaling") or {}
    longest = config.get("max_position_embeddings", 2048)
    trained = rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings", longest))
    return sorted({trained, longest})


ELSEWHERE = ("gptj", "deepseek_v2", "llama4_text")
"""Without a module, or with complex numbers: `tests/models/test_every_rotary_module.py` runs them, and all others."""


@pytest.mark.parametrize("name", [name for name in PUBLISHED if PUBLISHED[name]["model_type"] not in ELSEWHERE])
def test_published_configurations_rotate_as_in_transformers_bit_for_bit(name: str) -> None:
    facts = PUBLISHED[name]
    config = as_object(facts)
    for length in lengths_of(name):
        assert_same_bits(config, around(length), layer_type_of(facts))


@pytest.mark.filterwarnings("ignore:.*is not the encoding of all layers:UserWarning")
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_configuration_and_its_dictionary_give_the_same_encoding(name: str) -> None:
    facts = PUBLISHED[name]
    from_dict = Rotary.from_config(facts, layer_type=layer_type_of(facts), angles="float32")
    from_object = Rotary.from_config(as_object(facts), layer_type=layer_type_of(facts), angles="float32")
    for field in ("head_dim", "base", "scaling", "layout", "rotary_dim", "sections"):
        assert getattr(from_dict, field) == getattr(from_object, field), field


def llama(rope: dict[str, Any], **sizes: Any) -> LlamaConfig:
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 8192, **sizes}
    return LlamaConfig(rope_parameters=rope, **sizes)


FACTORS = [1 + 0.11 * pair for pair in range(32)]
ROPE_TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.7},
    "dynamic": {"rope_type": "dynamic", "factor": 3.3},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024},
    "yarn, untruncated": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "truncate": False,
    },
    "yarn, truncated": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 131072, "truncate": True,
    },
    "yarn, derived factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 2048},
    "yarn, weights": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
        "mscale_all_dim": 0.8, "beta_fast": 40, "beta_slow": 2,
    },
    "yarn, attention factor": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "attention_factor": 1.2345,
    },
    "longrope": {
        "rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS[::-1],
        "original_max_position_embeddings": 4096,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize("name", ROPE_TYPES)
def test_every_rope_type_rotates_as_in_transformers_bit_for_bit(name: str, base: float) -> None:
    config = llama({**ROPE_TYPES[name], "rope_theta": base})
    for length in (1024, 2048, 4096, 8192):
        assert_same_bits(config, around(length))


@pytest.mark.parametrize("share", [1.0, 0.5, 0.375, 0.25])
@pytest.mark.parametrize("name", ["default", "linear", "dynamic", "yarn", "llama3"])
@pytest.mark.parametrize("model_type", ["gpt_neox", "phi"])
def test_partial_rotation_scales_as_in_transformers(model_type: str, name: str, share: float) -> None:
    # Exponents and the ramp count rotated dimensions, not those of the head.
    rope = {**ROPE_TYPES[name], "rope_theta": 10_000.0, "partial_rotary_factor": share}
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 8192}
    config = AutoConfig.for_model(model_type, **sizes, rope_parameters=rope)
    assert Rotary.from_config(config).rotary_dim == int(64 * share)
    assert reference(config).inv_freq.shape == (int(64 * share) // 2,)
    assert_same_bits(config, around(2048))


def test_equal_factors_of_llama_3_are_a_step_as_in_transformers() -> None:
    step = {**ROPE_TYPES["llama3"], "low_freq_factor": 2.0, "high_freq_factor": 2.0, "rope_theta": 10_000.0}
    config = llama(step)
    assert_same_bits(config, around(8192))
    waves = [2 * math.pi * 10_000 ** (2 * pair / 64) for pair in range(32)]
    expected = [wave * (8.0 if wave > 2048 / 2.0 else 1.0) for wave in waves]
    exact = [2 * math.pi / float(frequency) for frequency in Rotary.from_config(config).angles.frequencies]
    assert exact == pytest.approx(expected, rel=FORMULA, abs=0)
    assert {round(mine / wave) for mine, wave in zip(exact, waves, strict=True)} == {1, 8}


@pytest.mark.parametrize("past", [0, 1, 2, 1000])
def test_dynamic_and_longrope_switch_at_the_original_length_as_in_transformers(past: int) -> None:
    dynamic = llama({**ROPE_TYPES["dynamic"], "rope_theta": 10_000.0}, max_position_embeddings=2048)
    assert_same_bits(dynamic, torch.arange(2048 + past))
    longrope = llama({**ROPE_TYPES["longrope"], "rope_theta": 10_000.0})
    assert_same_bits(longrope, torch.arange(4096 + past))
