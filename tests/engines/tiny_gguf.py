"""Models of `transformers` with two layers, and the same as GGUF files, as llama.cpp's own converter writes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

__all__ = ["BASE", "CONTEXT", "HEAD_DIM", "TRAINED", "model_of", "write", "write_tokenizer"]

VOCAB, WIDTH, HEADS, KV_HEADS, LAYERS, INNER = 300, 64, 4, 2, 2, 96
HEAD_DIM = WIDTH // HEADS
PAIRS = HEAD_DIM // 2
BASE, CONTEXT, TRAINED = 10_000.0, 256, 64
SHORT = [1 + i / 16 for i in range(PAIRS)]
LONG = [1 + i * 1.5 for i in range(PAIRS)]
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": TRAINED},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": TRAINED,
    },
    "longrope": {
        "short_factor": SHORT, "long_factor": LONG, "factor": 4.0, "original_max_position_embeddings": TRAINED,
    },
}  # fmt: skip


def model_of(kind: str, rope_type: str, **rope: Any) -> PreTrainedModel:
    """A model with random weights; `rope` is joined to its rope parameters."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "intermediate_size": INNER, "initializer_range": 0.3, "tie_word_embeddings": False, "pad_token_id": 0,
        "max_position_embeddings": TRAINED if rope_type == "dynamic" else CONTEXT,
    }  # fmt: skip
    parameters = {"rope_type": rope_type, "rope_theta": BASE, **ROPES[rope_type], **rope}
    if kind == "gpt_neox":
        parameters["partial_rotary_factor"] = 0.5
        sizes["rotary_pct"] = 0.5
    else:
        sizes |= {"num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5}
    if kind == "phi3":
        sizes |= {"original_max_position_embeddings": TRAINED, "bos_token_id": 1, "eos_token_id": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, rope_parameters=parameters)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def write(
    model: PreTrainedModel,
    path: Path,
    keys: Mapping[str, float] | None = None,
    *,
    architecture: str | None = None,
    reordered: bool = True,
    scaling_type: str | None = None,
) -> Path:
    """The file of a model; `keys` are joined to its keys below ``rope.scaling``."""
    config = model.config
    architecture = architecture or {"gpt_neox": "gptneox"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    _write_sizes(writer, config)
    factors = _write_scaling(writer, config.rope_parameters, architecture, keys or {}, scaling_type)
    write_tokenizer(writer)
    weights = {name: tensor.detach().float().numpy() for name, tensor in model.state_dict().items()}
    tensors = _of_neox(weights) if config.model_type == "gpt_neox" else _of_llama(weights)
    if architecture in ("llama", "mistral3") and reordered:
        for name, tensor in tensors.items():
            if name.endswith(("attn_q.weight", "attn_k.weight")):
                heads = HEADS if "attn_q" in name else KV_HEADS
                tensors[name] = tensor.reshape(heads, 2, PAIRS, -1).swapaxes(1, 2).reshape(tensor.shape)
    for name, tensor in (tensors | factors).items():
        writer.add_tensor(name, np.ascontiguousarray(tensor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_sizes(writer: Any, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_vocab_size(VOCAB)
    writer.add_rope_freq_base(BASE)
    if config.model_type == "gpt_neox":
        writer.add_layer_norm_eps(1e-5)
        writer.add_parallel_residual(True)
        writer.add_rope_dimension_count(HEAD_DIM // 2)
    else:
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_dimension_count(HEAD_DIM)


def _write_scaling(
    writer: Any, rope: dict[str, Any], architecture: str, keys: Mapping[str, float], scaling_type: str | None
) -> dict[str, np.ndarray]:
    kind = rope["rope_type"]
    for key, value in keys.items():
        writer.add_float32(f"{architecture}.rope.scaling.{key}", value)
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling_type or kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(TRAINED)
    if kind == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(4) / math.log(TRAINED)))
        return {"rope_factors_long.weight": np.array(LONG), "rope_factors_short.weight": np.array(SHORT)}
    return {"rope_freqs.weight": np.array([_llama3(pair) for pair in range(PAIRS)])} if kind == "llama3" else {}


def _llama3(pair: int) -> float:
    """By how much Llama 3's rule divides the frequency of a pair."""
    rotations = TRAINED / (2 * math.pi * BASE ** (2 * pair / HEAD_DIM))
    if rotations > 4:
        return 1.0
    return 8.0 if rotations < 1 else 1 / ((4 - rotations) / 3 / 8 + (rotations - 1) / 3)


def write_tokenizer(writer: Any) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    rest = VOCAB - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens + [f"t{number}" for number in range(rest)])
    writer.add_token_scores([0.0] * VOCAB)
    writer.add_token_types([int(kind) for kind in [*kinds, *[gguf.TokenType.NORMAL] * rest]])


def _of_neox(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    head = "lm_head.weight" if "lm_head.weight" in weights else "embed_out.weight"
    tensors = {"token_embd.weight": weights["gpt_neox.embed_in.weight"], "output.weight": weights[head]}
    for part in ("weight", "bias"):
        tensors[f"output_norm.{part}"] = weights[f"gpt_neox.final_layer_norm.{part}"]
        for layer in range(LAYERS):
            theirs, ours = f"gpt_neox.layers.{layer}.", f"blk.{layer}."
            joined = weights[f"{theirs}attention.query_key_value.{part}"]
            by_head = joined.reshape(HEADS, 3, HEAD_DIM, -1)
            parts = [by_head[:, each].reshape(WIDTH, -1) for each in range(3)]
            tensors[f"{ours}attn_qkv.{part}"] = np.concatenate(parts).reshape(joined.shape)
            for name, module in (
                ("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"),
                ("attn_output", "attention.dense"), ("ffn_up", "mlp.dense_h_to_4h"), ("ffn_down", "mlp.dense_4h_to_h"),
            ):  # fmt: skip
                tensors[f"{ours}{name}.{part}"] = weights[f"{theirs}{module}.{part}"]
    return tensors


def _of_llama(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of Llama and those that name their modules alike: Qwen2 has biases, Phi-3 joins its projections."""
    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
        "mlp.down_proj": "ffn_down", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.gate_up_proj": "ffn_up", "self_attn.qkv_proj": "attn_qkv", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    }  # fmt: skip
    tensors = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
        "output.weight": weights["lm_head.weight"],
    }
    for layer in range(LAYERS):
        for module, name in names.items():
            for part in ("weight", "bias"):
                key = f"model.layers.{layer}.{module}.{part}"
                if key in weights:
                    tensors[f"blk.{layer}.{name}.{part}"] = weights[key]
    return tensors
