"""The window of every layer is the one that the attention weights of `transformers` show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from locant import InputError
from locant.checkpoints.explanation import explain
from locant.checkpoints.layer_strip import layer_strip
from tests.refusal import refuses

LENGTH = 40
SIZES = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "starcoder2": {"sliding_window": 7},
    "qwen2": {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 4},
    "qwen3": {"sliding_window": 7, "use_sliding_window": False, "head_dim": 8},
    "gemma2": {"sliding_window": 7, "head_dim": 8},
    "gemma3_text": {"sliding_window": 8, "head_dim": 8},
    "cohere2": {"sliding_window": 7},
    "exaone4": {"sliding_window": 7, "sliding_window_pattern": 3},
    "gpt_oss": {"sliding_window": 7, "head_dim": 8, **EXPERTS},
    "olmo3": {"sliding_window": 7},
    "llama4_text": {
        "attention_chunk_size": 10, "head_dim": 8, "intermediate_size_mlp": 32, "num_local_experts": 2,
    },
    "modernbert": {"local_attention": 11, "global_attn_every_n_layers": 2},
    "modernbert-decoder": {"local_attention": 12, "global_attn_every_n_layers": 3},
    "ultrabert": {"sliding_window": 5},
    "openai_privacy_filter": {"sliding_window": 5, "head_dim": 8, **EXPERTS},
    "embedding_gemma2_text": {"sliding_window": 5, "head_dim": 8},
    "gpt_neo": {"window_size": 9, "attention_types": [[["global", "local"], 3]]},
    "recurrent_gemma": {"attention_window_size": 9, "lru_width": 32, "block_types": ["recurrent", "attention"]},
}  # fmt: skip
ENCODERS = ("modernbert", "ultrabert", "openai_privacy_filter", "embedding_gemma2_text")
NAMES = {"gpt_neo": {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}}


def _config(kind: str) -> Any:
    names = NAMES.get(kind, {})
    return AutoConfig.for_model(kind, **{**{names.get(key, key): size for key, size in SIZES.items()}, **KINDS[kind]})


@pytest.mark.parametrize("kind", KINDS)
def test_the_window_of_each_layer_is_that_of_the_attention_weights(kind: str) -> None:
    config = _config(kind)
    torch.manual_seed(0)
    model = AutoModel.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        weights = model(torch.randint(3, 60, (1, LENGTH)), output_attentions=True, use_cache=False).attentions
    strip = layer_strip(config)
    assert len(strip) == 6
    attending = [layer for layer in strip if layer.window != 0]
    assert len(weights) == len(attending)
    row = LENGTH // 2 + 6
    for layer, each in zip(attending, weights, strict=True):
        seen = (each[0, :, row] > 0).any(0).nonzero()[:, 0]
        everything = LENGTH if kind in ENCODERS else row + 1
        before = layer.window if layer.place != "chunk" else row % 10 + 1
        assert len(seen) == (everything if before is None else min(before, everything))
        place = "chunk" if kind.startswith("llama4") else "around" if kind in ENCODERS else "before"
        assert layer.window is None or layer.place == place
        assert int(seen.max()) == (row if kind not in ENCODERS else LENGTH - 1 if layer.window is None else row + 5)
    written = {key: value for key, value in config.to_dict().items() if key not in ("layer_types", "layers_block_type")}
    if kind not in (
        "cohere2",
        "gpt_oss",
        "olmo3",
        "modernbert",
        "modernbert-decoder",
        "exaone4",
        "gemma2",
        "qwen2",
        *ENCODERS,
    ):
        assert [layer.window for layer in layer_strip(written)] == [layer.window for layer in strip]


def test_published_configurations_of_older_architectures() -> None:
    """As their files have them, without a list of layer types."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6, "vocab_size": 9}
    bert = {"model_type": "modernbert", **sizes, "local_attention": 128, "global_attn_every_n_layers": 3}
    assert [layer.window for layer in layer_strip(bert)] == [None, 129, 129, None, 129, 129]
    griffin = {"model_type": "recurrent_gemma", **sizes, "attention_window_size": 2048, "rope_theta": 1e4}
    assert [layer.window for layer in layer_strip(griffin)] == [0, 0, 2048, 0, 0, 2048]
    neo = {"model_type": "gpt_neo", "num_layers": 4, "num_heads": 4, "hidden_size": 64, "max_position_embeddings": 32}
    assert [layer.window for layer in layer_strip({**neo, "attention_layers": ["global", "local"] * 2})] == [
        None,
        256,
    ] * 2
    assert [layer.window for layer in explain(neo).strip] == [None, 256] * 2
    with refuses(InputError, "attention_types"):
        layer_strip({**neo, "attention_types": 7})
