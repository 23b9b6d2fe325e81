"""Models of `transformers`, made small and made to turn the other pairs: with code of `transformers` for those pairs.

A model whose weights were converted and whose rotation was exchanged has to compute what it computed before.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from transformers.models.gptj import modeling_gptj  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

__all__ = ["MODELS", "SIZES", "Small", "build", "hidden_states", "turn_otherwise"]

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 10,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
EXPERTS = {"first_k_dense_replace": 2, "n_group": 1, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Small:
    """A small configuration of one architecture, and how its rotation wants its cosines."""

    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    layout: str = "half"
    doubled: str = "in halves"

    @property
    def other(self) -> str:
        return "half" if self.layout == "interleaved" else "interleaved"


def _small(model_type: str, *, layout: str = "half", doubled: str = "in halves", **options: Any) -> Small:
    return Small(model_type, options, layout, doubled)


MODELS: dict[str, Small] = {
    "llama": _small("llama", **GROUPED),
    "llama with biases and wide heads": _small("llama", attention_bias=True, head_dim=20, **GROUPED),
    "qwen2": _small("qwen2", **GROUPED),
    "qwen3": _small("qwen3", head_dim=16, **GROUPED),
    "olmo2": _small("olmo2", **GROUPED),
    "olmoe": _small("olmoe", num_key_value_heads=4, num_experts=4, num_experts_per_tok=2),
    "cohere": _small("cohere", layout="interleaved", doubled="in pairs", use_qk_norm=True, **GROUPED),
    "ernie4_5": _small("ernie4_5", layout="interleaved", head_dim=12, **GROUPED),
    "helium": _small("helium", layout="interleaved", head_dim=12, **GROUPED),
    "glm": _small("glm", layout="interleaved", head_dim=12, partial_rotary_factor=0.5, **GROUPED),
    "glm4_moe": _small(
        "glm4_moe", head_dim=16, partial_rotary_factor=0.5, use_qk_norm=True, attention_bias=True, **EXPERTS, **GROUPED
    ),
    "phi": _small("phi", partial_rotary_factor=0.5, qk_layernorm=True, **GROUPED),
    "phi3": _small("phi3", **GROUPED),
    "stablelm": _small("stablelm", partial_rotary_factor=0.5, qk_layernorm=True, use_qkv_bias=True, **GROUPED),
    "persimmon": _small("persimmon", partial_rotary_factor=0.5, qk_layernorm=True),
    "gpt_neox": _small("gpt_neox", rotary_pct=0.5),
    "falcon": _small("falcon", new_decoder_architecture=True, num_kv_heads=2, bias=True),
    "falcon of one key": _small("falcon", multi_query=True),
    "falcon of many keys": _small("falcon", multi_query=False),
    "gptj": _small("gptj", layout="interleaved", rotary_dim=8),
    "codegen": _small("codegen", layout="interleaved", rotary_dim=8),
    "modernbert": _small("modernbert", attention_bias=True, cls_token_id=1, sep_token_id=2),
    "gpt_oss": _small(
        "gpt_oss", doubled="not", head_dim=12, num_local_experts=4, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 150_000.0}, **GROUPED,
    ),
    "gemma3": _small("gemma3_text", head_dim=12, layer_types=["sliding_attention", "full_attention"], **GROUPED),
    "gemma4": _small(
        "gemma4_text", head_dim=12, global_head_dim=20, vocab_size_per_layer_input=61, hidden_size_per_layer_input=8,
        layer_types=["sliding_attention", "full_attention"], **GROUPED,
    ),
    "llama4": _small(
        "llama4_text", layout="interleaved", head_dim=12, intermediate_size_mlp=20, num_local_experts=2, **GROUPED
    ),
    "deepseek_v2": _small("deepseek_v2", layout="interleaved", **LATENT, **EXPERTS),
    "deepseek_v3": _small("deepseek_v3", layout="interleaved", **LATENT, **EXPERTS),
    "deepseek_v3 with whole queries": _small(
        "deepseek_v3", layout="interleaved", **{**LATENT, "q_lora_rank": None}, **EXPERTS
    ),
    "smollm3": _small("smollm3", no_rope_layer_interval=2, **GROUPED),
}  # fmt: skip


def build(small: Small) -> torch.nn.Module:
    """A model without a head, in float64, whose weights and biases are all random; norms too."""
    config = transformers.CONFIG_MAPPING[small.model_type](**{**SIZES, **small.options})
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModel.from_config(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(around + 0.3 * torch.randn_like(parameter))
    return model


def hidden_states(model: torch.nn.Module) -> Tensor:
    ids = torch.arange(3, 3 + 2 * 11).view(2, 11)
    with torch.no_grad():
        return model(input_ids=ids).last_hidden_state


def rotate_like_gptj(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved pairs of ``batch heads seq dim``, by the code of GPT-J."""
    return modeling_gptj.apply_rotary_pos_emb(x.transpose(1, 2), sin, cos).transpose(1, 2)


def rotate_like_llama(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs in halves, by the code of Llama."""
    cos, sin = (torch.cat([table, table], dim=-1) for table in (cos, sin))
    return modeling_llama.apply_rotary_pos_emb(x, x, cos, sin)[0]


def turn_otherwise(monkeypatch: pytest.MonkeyPatch, small: Small, model: torch.nn.Module) -> None:
    """Make this architecture turn the pairs of the other layout, by the code of another architecture."""
    if small.model_type == "deepseek_v3":  # knows both
        monkeypatch.setattr(model.config, "rope_interleave", False)
        return
    rotation = rotate_like_gptj if small.layout == "half" else rotate_like_llama

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The first dimensions of ``batch heads seq dim``; cosines are ``batch seq pairs``."""
        dims = 2 * cos.shape[-1]
        cos, sin = cos.expand(x.shape[0], -1, -1).double(), sin.expand(x.shape[0], -1, -1).double()
        return torch.cat([rotation(x[..., :dims], cos, sin), x[..., dims:]], dim=-1)

    def pairs(table: Tensor) -> Tensor:
        half = table.shape[-1] // 2
        return {"in halves": table[..., :half], "in pairs": table[..., ::2], "not": table}[small.doubled]

    def both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        assert unsqueeze_dim == 1
        return rotated(q, pairs(cos), pairs(sin)), rotated(k, pairs(cos), pairs(sin))

    def one(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
        assert unsqueeze_dim == 2
        return rotated(x.transpose(1, 2), pairs(cos), pairs(sin)).transpose(1, 2)

    def of_gptj(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        return rotated(x.transpose(1, 2), cos, sin).transpose(1, 2)

    def heads_first(q: Tensor, k: Tensor, complex_: Tensor) -> tuple[Tensor, Tensor]:
        return rotated(q, complex_.real, complex_.imag), rotated(k, complex_.real, complex_.imag)

    def heads_last(q: Tensor, k: Tensor, complex_: Tensor) -> tuple[Tensor, Tensor]:
        q, k = heads_first(q.transpose(1, 2), k.transpose(1, 2), complex_)
        return q.transpose(1, 2), k.transpose(1, 2)

    special = {
        "gemma4_text": ("apply_rotary_pos_emb", one),
        "gptj": ("apply_rotary_pos_emb", of_gptj),
        "codegen": ("apply_rotary_pos_emb", of_gptj),
        "llama4_text": ("apply_rotary_emb", heads_last),
        "deepseek_v2": ("apply_rotary_emb", heads_first),
    }
    name, function = special.get(small.model_type, ("apply_rotary_pos_emb", both))
    module = importlib.import_module(type(model).__module__)
    assert callable(getattr(module, name)), "the modeling code calls its rotation otherwise"
    monkeypatch.setattr(module, name, function)
