"""Tiny random models of `transformers`, and the same models as GGUF files, written with the package `gguf`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

__all__ = [
    "BASE", "CONTEXT", "HEAD_DIM", "KINDS", "PER_LAYER_KINDS", "SCALED_BASE", "TRAINED", "add_tokenizer",
    "random_model", "scaled_model", "write_gguf", "write_per_layer_tables",
]  # fmt: skip

KINDS = {"llama": "llama", "gemma3": "gemma3_text"}
"""The architectures of `random_model`, and their names in `transformers`."""
PER_LAYER_KINDS = {"gemma3n": "gemma3n_text", "gemma4": "gemma4_text"}
"""The same for files of which only the input tables are written."""
ARCHITECTURES = {name: kind for kind, name in {**KINDS, **PER_LAYER_KINDS, "gptneox": "gpt_neox"}.items()}
"""The names of architectures in a file by their names in `transformers`, if they differ."""
SIZES = {
    "vocab_size": 300, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "initializer_range": 0.3,
    "pad_token_id": 0,
}  # fmt: skip
KV_HEADS, HEAD_DIM, VOCAB = 2, 16, 300
PAIRS = HEAD_DIM // 2
SPECIAL = {"llama": ["<unk>", "<s>", "</s>"], "gemma3": ["<pad>", "<bos>", "<eos>", "<unk>", "<mask>"]}
WINDOW, BASE = 8, {"llama": 50_000.0, **dict.fromkeys(("gemma3", "gemma3n", "gemma4"), 1_000_000.0)}

SCALED_BASE, CONTEXT, TRAINED = 10_000.0, 256, 64
"""The base, the context and the trained length of `scaled_model`."""
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


def random_model(kind: str, **more: Any) -> PreTrainedModel:
    """Return a model with random weights and six layers. The last of six layers of Gemma 3 has full attention."""
    more = {
        "num_hidden_layers": 6, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
        "rope_theta": BASE[kind], **({"sliding_window": WINDOW} if kind == "gemma3" else {}), **more,
    }  # fmt: skip
    return _with_random_weights(KINDS[kind], more)


def scaled_model(kind: str, rope_type: str, **rope: Any) -> PreTrainedModel:
    """Return a model with random weights, two layers and a scaling. `rope` is added to its rope parameters."""
    more: dict[str, Any] = {
        "num_hidden_layers": 2, "tie_word_embeddings": False,
        "max_position_embeddings": TRAINED if rope_type == "dynamic" else CONTEXT,
    }  # fmt: skip
    parameters = {"rope_type": rope_type, "rope_theta": SCALED_BASE, **ROPES[rope_type], **rope}
    if kind == "gpt_neox":
        parameters["partial_rotary_factor"] = more["rotary_pct"] = 0.5
    else:
        more |= {"num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5}
    if kind == "phi3":
        more |= {"original_max_position_embeddings": TRAINED, "bos_token_id": 1, "eos_token_id": 2}
    return _with_random_weights(kind, {**more, "rope_parameters": parameters})


def _with_random_weights(model_type: str, more: Mapping[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **more)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    *,
    architecture: str | None = None,
    quantisation: str = "F32",
    keys: Mapping[str, str | int | float] | None = None,
    scaling_keys: Mapping[str, float] | None = None,
    scaling_type: str | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    reordered: bool = True,
    tokenizer: bool = True,
    weights: bool = True,
) -> Path:
    """Write a model as llama.cpp's converter does: q and k of Llama are reordered, and Gemma's norms have 1 added.

    Args:
        architecture: the name of the architecture, if it is not the model's own.
        quantisation: the type of matrices. Norms are float32.
        keys: more metadata, or other values.
        scaling_keys: more keys below ``rope.scaling``.
        scaling_type: the type of the scaling, if it is not the model's own.
        tensors: more tensors.
        reordered: whether the rows of q and k of Llama are reordered.
        tokenizer: whether to write a vocabulary of bytes.
        weights: whether to write tensors.
    """
    config: Any = model.config
    kind = ARCHITECTURES.get(config.model_type, config.model_type)
    architecture = architecture or kind
    writer = gguf.GGUFWriter(path, architecture)
    _add_sizes(writer, config, kind)
    for key, value in (scaling_keys or {}).items():
        writer.add_float32(f"{architecture}.rope.scaling.{key}", value)
    factors = _add_scaling(writer, config, scaling_type)
    if tokenizer:
        add_tokenizer(writer, SPECIAL.get(kind, SPECIAL["llama"]))
    for key, value in (keys or {}).items():
        for written in writer.kv_data:
            written.pop(key, None)  # an older writer refuses a key that it has
        {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](key, value)
    own = {**_tensors(model, kind, reordered), **factors} if weights else {}
    for name, tensor in {**own, **(tensors or {})}.items():
        as_type = gguf.GGMLQuantizationType[quantisation if tensor.ndim > 1 else "F32"]
        plain = np.ascontiguousarray(tensor, np.float32)
        writer.add_tensor(name, gguf.quants.quantize(plain, as_type), raw_dtype=as_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_per_layer_tables(model: PreTrainedModel, path: Path, **options: Any) -> Path:
    """Write the token table and the per-layer embedding of a model, with the names that the package `gguf` gives them.

    The converter of llama.cpp adds nothing to the norms of Gemma 3n and Gemma 4.
    """
    names = _names(model, ARCHITECTURES[model.config.model_type])
    tensors = {}
    for name, parameter in model.named_parameters():
        module, _, part = name.rpartition(".")
        if "per_layer" in name or name == "embed_tokens.weight":
            tensors[f"{names.get_name(f'model.{module}')}.{part}"] = parameter.detach().float().numpy()
    return write_gguf(model, path, weights=False, tokenizer=False, tensors=tensors, **options)


def _add_sizes(writer: Any, config: Any, kind: str) -> None:
    sizes = config.to_dict()  # which also has sizes that differ between layers
    head_dim = sizes.get("head_dim") or HEAD_DIM
    rope = sizes.get("rope_parameters") or {}
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(rope["rope_theta"] if "rope_theta" in rope else BASE[kind])
    if kind == "gptneox":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_parallel_residual(True)
        writer.add_rope_dimension_count(head_dim // 2)
        return
    writer.add_head_count_kv(sizes["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    if kind == "gemma3":
        writer.add_sliding_window(config.sliding_window)


def _add_scaling(writer: Any, config: Any, scaling_type: str | None) -> dict[str, np.ndarray]:
    """Add the keys of a scaling, and return its tensors."""
    rope = config.to_dict().get("rope_parameters") or {}
    rope_type = rope.get("rope_type")
    if rope_type in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling_type or rope_type))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope_type in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(TRAINED)
    if rope_type == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(4) / math.log(TRAINED)))
        return {"rope_factors_long.weight": np.array(LONG), "rope_factors_short.weight": np.array(SHORT)}
    return {"rope_freqs.weight": np.array([_llama3(pair) for pair in range(PAIRS)])} if rope_type == "llama3" else {}


def _llama3(pair: int) -> float:
    """Return the number by which Llama 3's rule divides the frequency of a pair."""
    rotations = TRAINED / (2 * math.pi * SCALED_BASE ** (2 * pair / HEAD_DIM))
    if rotations > 4:
        return 1.0
    return 8.0 if rotations < 1 else 1 / ((4 - rotations) / 3 / 8 + (rotations - 1) / 3)


def add_tokenizer(writer: Any, special: list[str] = SPECIAL["llama"]) -> None:
    """Add a vocabulary of special tokens, bytes and words."""
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [gguf.TokenType.UNKNOWN if token == "<unk>" else gguf.TokenType.CONTROL for token in special]  # noqa: S105
    rest = VOCAB - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*tokens, *(f"t{number}" for number in range(rest))])
    writer.add_token_scores([0.0] * VOCAB)
    kinds += [*[gguf.TokenType.BYTE] * 256, *[gguf.TokenType.NORMAL] * rest]
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def _names(model: PreTrainedModel, kind: str) -> Any:
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    return gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)


def _tensors(model: PreTrainedModel, kind: str, reordered: bool) -> dict[str, np.ndarray]:
    config: Any = model.config
    names, tensors = _names(model, kind), {}
    heads = {"attn_q": config.num_attention_heads, "attn_k": KV_HEADS}
    for name, parameter in model.named_parameters():  # without the head, if it is tied
        module, _, part = name.rpartition(".")
        tensor, new = parameter.detach().float().numpy(), names.get_name(module)
        last = new.rpartition(".")[2]
        if kind == "gemma3" and "norm" in name:
            tensor = tensor + 1
        if kind == "llama" and reordered and last in heads:
            tensor = tensor.reshape(heads[last], 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
        if kind == "gptneox" and last == "attn_qkv":  # one head after another in `transformers`
            tensor = tensor.reshape(heads["attn_q"], 3, HEAD_DIM, -1).swapaxes(0, 1).reshape(tensor.shape)
        tensors[f"{new}.{part}"] = tensor
    return tensors
