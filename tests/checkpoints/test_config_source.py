"""A path or a name stands for one configuration, whichever verb asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import Qwen3Config

from locant import InputError, Positions, Rotary, encoding_from_config
from locant.checkpoints.config_source import find_source, read_source
from locant.checkpoints.explanation import explain
from locant.checkpoints.mistral_params import config_of_params
from tests.refusal import refuses
from tests.tolerances import ANGLE_IN_DOUBLE, FEW_ROUNDINGS, FREQUENCY

MISTRAL_7B: dict[str, Any] = {
    "dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8,
    "norm_eps": 1e-05, "sliding_window": 4096, "vocab_size": 32000, "rope_theta": 10_000.0,
}  # fmt: skip
YARN: dict[str, Any] = {
    "original_max_position_embeddings": 4096, "factor": 64, "apply_scale": True, "beta": 4.0, "alpha": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3", "Qwen3Config", "Qwen3ForCausalLM"])
def test_an_architecture_is_its_default_configuration(name: str) -> None:
    config, note = find_source(name)
    assert isinstance(config, Qwen3Config)
    assert config.to_dict() == Qwen3Config().to_dict()
    assert note == f"the defaults of Qwen3Config in transformers {transformers.__version__}, not a published model"
    assert explain(config).longest == Qwen3Config().max_position_embeddings


def test_a_path_wins_over_a_preset_and_a_preset_over_an_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_source("gpt2") == (read_source("gpt2"), None)
    Path("gpt2").write_text(json.dumps({"model_type": "llama"}))
    assert find_source("gpt2") == ({"model_type": "llama"}, None)


def test_a_name_that_stands_for_nothing_is_refused() -> None:
    with refuses(InputError, "an architecture of transformers", "did you mean"):
        find_source("qwen-3-8b")


def _true_angle(config: dict[str, Any], position: int) -> list[float]:
    """Of the formula, in Python's floats: Mistral's own code takes base**(-2i / head_dim)."""
    return [position * config["rope_theta"] ** (-2 * pair / config["head_dim"]) for pair in range(64)]


def test_params_of_mistral_are_read_in_the_layout_of_its_own_weights(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps(MISTRAL_7B))
    config = read_source(tmp_path)
    rotary = encoding_from_config(config, layout="interleaved")
    assert isinstance(rotary, Rotary)
    x = torch.randn(1, 1, 1, 128, dtype=torch.float64)
    rotated = rotary.rotate_one(x, Positions.of([5]))[0, 0, 0]
    z = torch.view_as_complex(x[0, 0, 0].view(64, 2))  # as its code does: neighbours are a complex number
    angle = torch.tensor(_true_angle(MISTRAL_7B, 5), dtype=torch.float64)
    expected = torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten()
    assert (rotated - expected).abs().max() < 10 * ANGLE_IN_DOUBLE
    explained = explain(config)
    assert [layer.window for layer in explained.strip] == [4096] * 32
    assert explained.tables[0].shape == (32000, 4096)
    assert explained.vllm.answer == "yes"
    said = " ".join(explained.layers[0].warnings)
    assert "Pass layout='half' for the weights of transformers" in said


def test_yarn_of_params_is_that_of_transformers() -> None:
    """Mistral's beta and alpha are the ends of the ramp; without apply_scale, tokens keep their length."""
    from transformers import MistralConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for scaled in (True, False):
        params = {**MISTRAL_7B, "max_position_embeddings": 262144, "yarn": {**YARN, "apply_scale": scaled}}
        rotary = encoding_from_config(config_of_params(params), layout="interleaved")
        assert isinstance(rotary, Rotary)
        rope = {
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 64.0, "original_max_position_embeddings": 4096,
            "beta_fast": 4.0, "beta_slow": 1.0,
        }  # fmt: skip
        inv_freq, factor = ROPE_INIT_FUNCTIONS["yarn"](
            MistralConfig(head_dim=128, max_position_embeddings=262144, rope_parameters=rope), torch.device("cpu")
        )
        assert (rotary.inv_freq / inv_freq.double() - 1).abs().max() < FREQUENCY
        assert rotary.scaling.effective_attention_factor == pytest.approx(
            factor if scaled else 1.0, rel=FEW_ROUNDINGS, abs=0
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_lora_rank": 512}, "latent"),
        ({"multiple_of": 256}, "Meta"),
        ({"yarn": {"factor": 4}}, "yarn"),
        ({"sliding_window": [4096, 1024]}, "one width"),
        ({"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling"),
        ({"n_layers": "two"}, "n_layers"),
    ],
)
def test_other_params_are_answered(change: dict[str, Any], words: str) -> None:
    with refuses(InputError, words):
        config_of_params({**MISTRAL_7B, **change})


def test_windows_and_temperature_of_params() -> None:
    config = config_of_params({**MISTRAL_7B, "n_layers": 6, "sliding_window": [32768, None, None]})
    assert [layer.window for layer in explain(config).strip] == [32768, None, None] * 2
    scaling = {"beta": 0.1, "original_max_position_embeddings": 4096}
    config = config_of_params({**MISTRAL_7B, "yarn": YARN, "llama_4_scaling": scaling})
    rotary = encoding_from_config(config, layout="interleaved")
    assert isinstance(rotary, Rotary)
    assert rotary.temperature is not None
    assert (rotary.temperature.step, rotary.temperature.weight) == (4096, 0.1)
