"""Tiny random models of `transformers`, and the same models as GGUF files, written with the package `gguf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

__all__ = ["KINDS", "PER_LAYER_KINDS", "random_model", "write_gguf", "write_per_layer_tables"]

KINDS = {"llama": "llama", "gemma3": "gemma3_text"}
"""The architectures of the files, and their names in `transformers`."""
PER_LAYER_KINDS = {"gemma3n": "gemma3n_text", "gemma4": "gemma4_text"}
"""The same for files of which only the input tables are written."""
SIZES = {
    "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96, "max_position_embeddings": 128, "initializer_range": 0.3,
    "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True,
}  # fmt: skip
"""Six layers, because the last of six layers of Gemma 3 has full attention."""
SPECIAL = {"llama": ["<unk>", "<s>", "</s>"], "gemma3": ["<pad>", "<bos>", "<eos>", "<unk>", "<mask>"]}
WINDOW, BASE = 8, {"llama": 50_000.0, **dict.fromkeys(("gemma3", "gemma3n", "gemma4"), 1_000_000.0)}


def random_model(kind: str, **more: Any) -> PreTrainedModel:
    """Return a model with random weights, and with the bases and windows that `write_gguf` states."""
    torch.manual_seed(0)
    more = {"rope_theta": BASE[kind], **({"sliding_window": WINDOW} if kind == "gemma3" else {}), **more}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(KINDS[kind], **SIZES, **more)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    *,
    quantisation: str = "F32",
    keys: dict[str, str | int | float] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    tokenizer: bool = True,
    weights: bool = True,
) -> Path:
    """Write a model as llama.cpp's converter does: q and k of Llama are reordered, and Gemma's norms have 1 added.

    Args:
        quantisation: the type of matrices. Norms are float32.
        keys: more metadata, or other values.
        tensors: more tensors.
        tokenizer: whether to write a vocabulary of bytes.
        weights: whether to write tensors.
    """
    config: Any = model.config
    kinds = {**KINDS, **PER_LAYER_KINDS}
    kind = next(name for name, model_type in kinds.items() if model_type == config.model_type)
    sizes = config.to_dict()  # which also has sizes that differ between layers
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(sizes["num_key_value_heads"])
    writer.add_key_length(sizes["head_dim"])
    writer.add_value_length(sizes["head_dim"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(sizes["head_dim"])
    writer.add_rope_freq_base(BASE[kind])
    writer.add_vocab_size(config.vocab_size)
    if kind == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    if tokenizer:
        _write_tokenizer(writer, SPECIAL[kind])
    for key, value in (keys or {}).items():
        for written in writer.kv_data:
            written.pop(key, None)  # an older writer refuses a key that it has
        {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](key, value)
    for name, tensor in {**(_tensors(model, kind) if weights else {}), **(tensors or {})}.items():
        as_type = gguf.GGMLQuantizationType[quantisation if tensor.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(tensor), as_type), raw_dtype=as_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_per_layer_tables(model: PreTrainedModel, path: Path, **options: Any) -> Path:
    """Write the token table and the per-layer embedding of a model, with the names that the package `gguf` gives them.

    The converter of llama.cpp adds nothing to the norms of Gemma 3n and Gemma 4.
    """
    kind = next(name for name, model_type in PER_LAYER_KINDS.items() if model_type == model.config.model_type)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    tensors = {}
    for name, parameter in model.named_parameters():
        module, _, part = name.rpartition(".")
        if "per_layer" in name or name == "embed_tokens.weight":
            tensors[f"{names.get_name(f'model.{module}')}.{part}"] = parameter.detach().float().numpy()
    return write_gguf(model, path, weights=False, tokenizer=False, tensors=tensors, **options)


def _write_tokenizer(writer: Any, special: list[str]) -> None:
    """Write a vocabulary of special tokens, bytes and words."""
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [*[gguf.TokenType.CONTROL] * len(special), *[gguf.TokenType.BYTE] * 256]
    rest = SIZES["vocab_size"] - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*tokens, *(f"t{number}" for number in range(rest))])
    writer.add_token_scores([0.0] * SIZES["vocab_size"])
    writer.add_token_types([int(kind) for kind in [*kinds, *[gguf.TokenType.NORMAL] * rest]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def _tensors(model: PreTrainedModel, kind: str) -> dict[str, np.ndarray]:
    config: Any = model.config
    names = gguf.get_tensor_name_map(
        {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[kind], config.num_hidden_layers
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    written = {}
    for name, parameter in model.named_parameters():  # without the head, which is tied
        module, _, part = name.rpartition(".")
        tensor, new = parameter.detach().float().numpy(), names.get_name(module)
        if kind == "gemma3" and "norm" in name:
            tensor = tensor + 1
        if kind == "llama" and (count := heads.get(new.rpartition(".")[2])):
            tensor = tensor.reshape(count, 2, config.head_dim // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
        written[f"{new}.{part}"] = tensor
    return written
