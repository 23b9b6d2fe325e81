"""The scale of scores is the one that the attention modules of `transformers` have."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, GPT2Config, GPTNeoConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from locant.checkpoints.explanation import explain
from locant.checkpoints.score_scale import BY_MULTIPLIER, BY_SCALAR, BY_WIDTH, ONE, score_scale
from tests.tolerances import FEW_ROUNDINGS, LOGITS

KINDS: dict[str, dict[str, Any]] = {
    **{name: {"query_pre_attn_scalar": 168} for name in sorted(BY_SCALAR)},
    **{name: {"attention_multiplier": 0.0078125} for name in sorted(BY_MULTIPLIER)},
    **{name: {} for name in sorted({*ONE, *BY_WIDTH} - {"gpt_neo"})},
    "llama": {},
    "qwen3": {},
}


def _attention(config: Any) -> Any:
    """The first attention module of the file of a configuration that is made for it."""
    kind = type(config).__name__
    module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    for name, cls in vars(module).items():
        if inspect.isclass(cls) and issubclass(cls, nn.Module) and name.endswith("Attention"):
            code = inspect.getsource(cls)  # a class that may be exchanged for a kernel does not show its signature
            if any(f"config: {each}" in code for each in (kind, kind.replace("DecoderConfig", "TextConfig"))):
                with torch.device("meta"):
                    return cls(config, layer_idx=0)
    raise AssertionError(f"no attention for {type(config).__name__}")


@pytest.mark.parametrize("kind", KINDS)
def test_the_scale_is_that_of_the_attention_module(kind: str) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    config = CONFIG_MAPPING[kind](**KINDS[kind])
    module, found = _attention(config), score_scale(config.to_dict())
    assert (found is None) == (kind in ("llama", "qwen3"))
    expected = module.head_dim**-0.5 if found is None else found.value
    assert module.scaling == pytest.approx(expected, rel=FEW_ROUNDINGS, abs=0)
    assert found is None or found.usual == pytest.approx(module.head_dim**-0.5, rel=FEW_ROUNDINGS, abs=0)


def test_gpt_neo_does_not_divide_its_scores() -> None:
    """Its attention has no attribute for it, so two tokens are attended to and the weights solved for the factor."""
    config = GPTNeoConfig(hidden_size=32, num_heads=2, num_layers=2, attention_types=[[["global", "local"], 1]])
    torch.manual_seed(0)
    module = GPTNeoSelfAttention(config, "global", 0).eval()
    query, key = torch.randn(1, 2, 2, 16), torch.randn(1, 2, 2, 16)
    _, weights = module._attn(query, key, torch.randn(1, 2, 2, 16))
    score = (query[..., 1, :] * (key[..., 1, :] - key[..., 0, :])).sum(-1)
    factor = (weights[..., 1, 1] / weights[..., 1, 0]).log() / score
    found = score_scale(config.to_dict())
    assert found is not None
    assert factor.tolist() == [[pytest.approx(found.value, abs=10 * LOGITS)] * 2]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"scale_attn_weights": False}, "scale=1"),
        ({"scale_attn_by_inverse_layer_idx": True}, "also divides its scores by n + 1"),
        ({}, ""),
    ],
)
def test_keys_of_gpt_2_are_read(keys: dict[str, Any], words: str) -> None:
    config = GPT2Config(n_embd=32, n_head=4, n_layer=4, **keys)
    factors = [GPT2Attention(config, layer_idx=layer).scaling for layer in range(4)]
    by_layer = [1 / (number + 1) for number in range(4)] if "n + 1" in words else [1.0] * 4
    first = 1.0 if words == "scale=1" else 8**-0.5
    assert factors == pytest.approx([first * each for each in by_layer], rel=FEW_ROUNDINGS, abs=0)
    said = " ".join(explain(config).layers[0].warnings)
    assert words in said
    assert ("attend with scale" in said) == (words == "scale=1")


def test_a_model_with_a_scale_of_its_own_is_warned_of() -> None:
    sizes = {"hidden_size": 5376, "num_attention_heads": 32, "head_dim": 128, "num_hidden_layers": 2}
    config = {"model_type": "gemma3_text", **sizes, "max_position_embeddings": 8192, "rope_theta": 1e6}
    for layers in explain({**config, "query_pre_attn_scalar": 168}).layers:
        assert any(
            "attend with scale=0.0771517, not with head_dim**-0.5, which is 0.0883883" in one for one in layers.warnings
        )
    assert not any(
        "scale=" in one
        for layers in explain({**config, "query_pre_attn_scalar": 128}).layers
        for one in layers.warnings
    )
