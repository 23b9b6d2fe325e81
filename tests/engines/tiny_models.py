"""Tiny models of `transformers` with random weights, and what they give for a batch and for its documents alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

VOCABULARY = 90
IMAGE, VIDEO = 80, 81
LONGEST = 64

SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": LONGEST, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": LONGEST},
    "opt": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2},
}
VISION = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
SECTIONS = {"rope_type": "default", "rope_theta": 10.0, "mrope_section": [2, 1, 1]}


def tiny(kind: str, attention: str | None = None) -> PreTrainedModel:
    """A model of this ``model_type``, with weights so large that a wrong position shows."""
    torch.manual_seed(0)
    if kind in VISION_LANGUAGE:
        config = vision_language_config(kind)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation=attention)
    else:
        config = CONFIG_MAPPING[kind](**SIZES.get(kind, SMALL))
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval().requires_grad_(False)


def vision_language_config(kind: str) -> Any:
    text: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "rope_parameters": SECTIONS, "head_dim": 8}
    text["max_position_embeddings"] = 256
    text["layer_types"] = ["full_attention"] * 2
    vision = {**VISION, **VISION_LANGUAGE[kind]}
    config: Any = CONFIG_MAPPING[kind]
    return config(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=82,
        vision_end_token_id=83,
    )  # fmt: skip


VISION_LANGUAGE: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 32, "mlp_ratio": 1, "hidden_size": 32},
    "qwen2_5_vl": {"tokens_per_second": 2, "fullatt_block_indexes": [0]},
    "qwen3_vl": {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
}


Place = tuple[int, slice]


def logits(model: PreTrainedModel, batch: Mapping[str, Any], places: Sequence[Place]) -> Tensor:
    """The logits at these places of the batch, one after the other."""
    known = {name: value for name, value in batch.items() if name not in ("labels", "seq_idx")}
    given = {name: torch.as_tensor(value) for name, value in known.items()}
    out = model(**{"use_cache": False, **given}).logits
    return torch.cat([out[row, slots] for row, slots in places])


def alone(model: PreTrainedModel, documents: Sequence[Tensor]) -> Tensor:
    """Return the logits of each document in its own row, one after the other."""
    return torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in documents])


def off_by(model: PreTrainedModel, batch: Mapping[str, Any], places: Sequence[Place], expected: Tensor) -> float:
    """How far logits are from those of the documents alone; infinite where the model fails."""
    try:
        got = logits(model, batch, places)
    except (RuntimeError, IndexError):
        return float("inf")
    return float("inf") if bool(got.isnan().any()) else float((got - expected).abs().max())
