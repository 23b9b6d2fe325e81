"""Configurations of published models, as far as they decide how queries and keys are rotated."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import AutoConfig

from locant.models.registry import presets


class _Presets(Mapping[str, dict[str, Any]]):
    """Hands out copies: configuration classes of transformers write into the dictionaries that they are made of."""

    def __getitem__(self, name: str) -> dict[str, Any]:
        return presets()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(presets())

    def __len__(self) -> int:
        return len(presets())


PRESETS: Mapping[str, dict[str, Any]] = _Presets()


def _llama(width: int, heads: int, base: float, longest: int, **rest: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": width, "num_attention_heads": heads, "rope_theta": base,
        "max_position_embeddings": longest, **rest,
    }  # fmt: skip


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


def _yarn(factor: float, original: int, **rest: Any) -> dict[str, Any]:
    return {"type": "yarn", "factor": factor, "original_max_position_embeddings": original, **rest}


PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-2-7b": _llama(4096, 32, 10000.0, 4096),
    "Llama-2-70b": _llama(8192, 64, 10000.0, 4096),
    "CodeLlama-7b": _llama(4096, 32, 1000000.0, 16384),
    "Llama-3-8B": _llama(4096, 32, 500000.0, 8192),
    "Llama-3.1-8B": dict(PRESETS["llama-3.1-8b"]),
    "Llama-3.2-1B": _llama(2048, 32, 500000.0, 131072, head_dim=64, rope_scaling=_llama3(32.0)),
    "Llama-3.3-70B": _llama(8192, 64, 500000.0, 131072, rope_scaling=_llama3(8.0)),
    "vicuna-7b-v1.5-16k": _llama(4096, 32, 10000.0, 4096, rope_scaling={"type": "linear", "factor": 4.0}),
    "Yarn-Llama-2-7b-128k": _llama(4096, 32, 10000.0, 131072, rope_scaling=_yarn(32.0, 4096)),
    "internlm2-chat-7b-llama": _llama(4096, 32, 1000000.0, 32768, rope_scaling={"type": "dynamic", "factor": 2.0}),
    "Mistral-7B-v0.3": dict(PRESETS["mistral-7b"]),
    "Mixtral-8x7B": {**_llama(4096, 32, 1000000.0, 32768), "model_type": "mixtral"},
    "Qwen2.5-7B-Instruct": dict(PRESETS["qwen2.5-7b"]),
    "Qwen2.5-7B-Instruct, 128k": {**PRESETS["qwen2.5-7b"], "rope_scaling": _yarn(4.0, 32768)},
    "Qwen3-8B": {**_llama(4096, 32, 1000000.0, 40960, head_dim=128), "model_type": "qwen3"},
    "Qwen2-VL-7B": dict(PRESETS["qwen2-vl-7b"]),
    "phi-2": dict(PRESETS["phi-2"]),
    "Phi-3-mini-4k": {**_llama(3072, 32, 10000.0, 4096), "model_type": "phi3"},
    "Phi-3-mini-128k": dict(PRESETS["phi-3-mini-128k"]),
    "gemma-7b": {**_llama(3072, 16, 10000.0, 8192, head_dim=256), "model_type": "gemma"},
    "gemma-2-9b": {**_llama(3584, 16, 10000.0, 8192, head_dim=256), "model_type": "gemma2"},
    "gemma-3-4b": dict(PRESETS["gemma-3-4b"]),
    "gpt-neox-20b": dict(PRESETS["gpt-neox-20b"]),
    "pythia-6.9b": {**PRESETS["gpt-neox-20b"], "hidden_size": 4096, "num_attention_heads": 32},
    "gpt-j-6b": dict(PRESETS["gpt-j-6b"]),
    "DeepSeek-V3": dict(PRESETS["deepseek-v3"]),
    "DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2", "qk_rope_head_dim": 64, "rope_theta": 10000, "max_position_embeddings": 163840,
        "rope_scaling": _yarn(40, 4096, beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707),
    },
    "gpt-oss-20b": dict(PRESETS["gpt-oss-20b"]),
    "falcon-7b": dict(PRESETS["falcon-7b"]),
    "stablelm-2-1_6b": {
        **_llama(2048, 32, 10000, 4096), "model_type": "stablelm", "partial_rotary_factor": 0.25,
    },
    "Llama-4-Scout-17B-16E": {
        **_llama(5120, 40, 500000.0, 10485760, head_dim=128), "model_type": "llama4_text",
        "rope_scaling": {**_llama3(16.0), "low_freq_factor": 1.0, "high_freq_factor": 1.0},
    },
    "c4ai-command-r": {**_llama(8192, 64, 8000000.0, 131072), "model_type": "cohere"},
    "glm-4-9b": {
        **_llama(4096, 32, 10000.0, 131072, head_dim=128), "model_type": "glm", "partial_rotary_factor": 0.5,
    },
}  # fmt: skip


def layer_type_of(config: dict[str, Any]) -> str | None:
    """The layers to ask for, where they differ."""
    return "full_attention" if config["model_type"] == "gemma3_text" else None


def as_object(config: dict[str, Any]) -> Any:
    """The configuration as an object of `transformers`, which would write into the dictionary it is made of."""
    return AutoConfig.for_model(**copy.deepcopy(config))
