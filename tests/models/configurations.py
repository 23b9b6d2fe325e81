"""Configurations for tests: a Llama to be changed, one dictionary of rope parameters per type, and what to compare."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from locant import InputError, PositionEncoding, Rotary
from locant.models import with_defaults
from locant.models.registry import ARCHITECTURES
from tests.refusal import refuses

__all__ = ["ROPES", "ROTARY_KEYS", "ROWS", "fields", "llama", "warns_of_default_or_raises"]

FIELDS = ("head_dim", "base", "scaling", "layout", "rotary_dim", "sections")
PAIRS = 32
NOT_SERVED = {"bitnet", "codegen", "helium", "ministral", "qwen3_vl_moe_text"}
ROWS = {name: row for name, row in ARCHITECTURES.items() if row.rotary is not None and (row.vllm or name in NOT_SERVED)}
"""Those of the most used models, whose whole code runs here; test_every_rotary_module.py has all of them."""

ROTARY_KEYS = {name: row.rotary_keys for name, row in ROWS.items()}


def fields(rotary: Rotary) -> dict[str, Any]:
    return {name: getattr(rotary, name) for name in FIELDS} | {"angles": rotary.angles.mode}


def llama(rope: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    sizes = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 8192}
    return {**sizes, "rope_theta": 10_000.0, "rope_scaling": rope, **others}


def warns_of_default_or_raises(
    config: dict[str, Any],
    key: str,
    layer_type: str | None = None,
    *,
    read: Callable[..., PositionEncoding] = Rotary.from_config,
    named: str | None = None,
) -> None:
    """Without the key, the default of `explain` and a warning that names both are expected, or else an error."""
    full = with_defaults(config)
    if key not in full:
        with refuses(InputError, named or f"without {key}", str(config["model_type"])):
            read(config, layer_type=layer_type)
        return
    with pytest.warns(UserWarning, match=f"without .*{key}.*{re.escape(repr(full[key]))}"):
        encoding = read(config, layer_type=layer_type)
    assert repr(encoding) == repr(read(full, layer_type=layer_type))


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8192},
    "yarn": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024, "beta_fast": 20.0,
        "beta_slow": 2.0, "truncate": True, "attention_factor": 1.3,
    },
    "yarn, weights": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024, "mscale": 1.2,
        "mscale_all_dim": 0.7,
    },
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0 + pair / 50 for pair in range(PAIRS)],
        "long_factor": [2.0 + pair for pair in range(PAIRS)], "original_max_position_embeddings": 1024, "factor": 8.0,
    },
    "longrope, attention factor": {
        "rope_type": "longrope", "short_factor": [1.0 + pair / 50 for pair in range(PAIRS)],
        "long_factor": [2.0 + pair for pair in range(PAIRS)], "original_max_position_embeddings": 1024, "factor": 8.0,
        "attention_factor": 1.1,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
}  # fmt: skip
