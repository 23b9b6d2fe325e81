"""Tiny models of `transformers`, and what their position modules add to the input."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel

__all__ = ["TOKENS", "added", "build", "classes_of"]

TOKENS = 7

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embed_dim", "embedding_size"), 24),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "n_head"), 2),
    **dict.fromkeys(("n_heads", "num_heads", "attention_heads", "num_encoder_attention_heads"), 2),
    **dict.fromkeys(("num_decoder_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers", "n_layer", "n_layers", "layers"), 1),
    **dict.fromkeys(("num_layers", "num_encoder_layers", "num_decoder_layers"), 1),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "n_inner"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 48),
    "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 48, "vocab_size": 64, "d_kv": 12,
    "d_head": 12, "input_embedding_size": 16, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2,
    "attention_window": 4, "block_size": 48, "max_2d_position_embeddings": 16, "num_hash_buckets": 48,
    "projection_dim": 24, "n_ctx": 48,
}  # fmt: skip
"""Sizes of any model; each takes those that its configuration has."""


def build(model_type: str, cls: str | None = None, **options: Any) -> tuple[nn.Module, Any]:
    """A model with random weights, and its configuration; `cls` names the class, by default that of the whole model."""
    config_class: Any = CONFIG_MAPPING[model_type]
    usual, renamed = config_class(), getattr(config_class, "attribute_map", {})
    own = {key: value for key, value in SIZES.items() if hasattr(usual, key) and key not in renamed}
    own = {key: value for key, value in own.items() if not isinstance(getattr(usual, key), (list, tuple))}
    own = {key: value for key, value in own.items() if not isinstance(getattr(config_class, key, None), property)}
    padding = {} if getattr(usual, "pad_token_id", None) in (None, 0) else {"pad_token_id": 1}
    config = config_class(**{**own, **padding, **options})
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = classes_of(config)[cls](config) if cls else _whole(config)
    return model.eval(), config


def classes_of(config: Any) -> Mapping[str, type[nn.Module]]:
    """The modules beside a configuration's class, by name."""
    package = importlib.import_module(type(config).__module__.rpartition(".")[0])
    files = [one.name for one in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]
    modules = [importlib.import_module(name) for name in files if ".modeling_" in name]
    found = [pair for module in modules for pair in vars(module).items()]
    return {name: one for name, one in found if inspect.isclass(one) and issubclass(one, nn.Module)}


def _whole(config: Any) -> nn.Module:
    """The model class of this configuration that has the fewest heads: the one called ``...Model``."""
    mine = [
        one
        for one in classes_of(config).values()
        if issubclass(one, PreTrainedModel) and one.config_class is type(config) and one.__name__.endswith("Model")
    ]
    chosen: Any = next(one for one in mine if "pretrained" not in one.__name__.lower())
    return chosen(config)


def added(model: nn.Module, path: str, *args: Any, **kwargs: Any) -> Tensor:
    """What the module at the end of this path gives for a row of tokens, when the model is called."""
    seen: list[Tensor] = []
    with _heard(model, path, seen), torch.no_grad():
        model(*args, **kwargs)
    return seen[0].reshape(-1, seen[0].shape[-1])[:TOKENS]


@contextmanager
def _heard(model: nn.Module, path: str, seen: list[Tensor]) -> Iterator[None]:
    found = [module for name, module in model.named_modules() if f".{name}".endswith(f".{path}")]
    assert found, f"no module {path} in {type(model).__name__}"

    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output).clone())  # some models add to it in place

    handle = found[0].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
