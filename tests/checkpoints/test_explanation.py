"""What is said about a configuration is true: counted, measured and compared with what others compute."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from locant import InputError, Positions, Rotary
from locant.checkpoints.config_source import read_source
from locant.checkpoints.explanation import Explanation, explain
from locant.checkpoints.rotary_settings import RotarySettings
from locant.models.registry import presets
from tests import oracles
from tests.positions.published import PRESETS
from tests.refusal import refuses
from tests.tolerances import FORMULA


def llama(**others: Any) -> dict[str, Any]:
    sizes = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 8192}
    return {**sizes, "rope_theta": 10_000.0, **others}


def yarn(**others: Any) -> dict[str, Any]:
    return {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, **others}


def rotary_of(explanation: Explanation) -> RotarySettings:
    (layers,) = explanation.layers
    assert layers.rotary is not None
    return layers.rotary


def warnings_of(config: dict[str, Any]) -> str:
    return "\n".join(warning for layers in explain(config).layers for warning in layers.warnings)


@pytest.mark.parametrize("name", ["gpt2", "opt-1.3b", "bert-base", "roberta-base", "t5-base"])
def test_the_tables_weigh_what_the_models_tables_weigh(name: str) -> None:
    small = {
        key: 40 if key in ("n_positions", "max_position_embeddings") else value for key, value in PRESETS[name].items()
    }
    config = AutoConfig.for_model(**{**small, "num_hidden_layers": 1, "n_layer": 1, "num_layers": 1})
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    names = ("wte", "wpe", "embed_tokens", "embed_positions", "embeddings", "relative_attention_bias", "shared")
    theirs = {key: parameter for key, parameter in model.named_parameters() if parameter.ndim == 2}
    total = sum(table.numel() for key, table in theirs.items() if key.split(".")[-2].endswith(names))
    ours = explain(config).tables
    assert sum(size.num_parameters for size in ours) == total


def test_the_turns_are_those_of_the_formula() -> None:
    facts = rotary_of(explain(llama()))
    for number, pair in enumerate(facts.pairs):
        assert pair.wavelength == pytest.approx(2 * math.pi * 10_000 ** (2 * number / 64), rel=FORMULA, abs=0)
        assert pair.stretch == pytest.approx(1.0, rel=FORMULA, abs=0)
    assert facts.never_round == [n for n in range(32) if 2 * math.pi * 10_000 ** (2 * n / 64) > 8192]
    assert (facts.kept, facts.between, facts.stretched, facts.still) == (list(range(32)), [], [], [])


def test_llama_3_is_cut_by_wavelength() -> None:
    facts = rotary_of(explain(PRESETS["llama-3.1-8b"]))
    plain = [2 * math.pi * 500_000 ** (2 * n / 128) for n in range(64)]
    assert facts.kept == [n for n, wave in enumerate(plain) if wave < 8192 / 4]
    assert facts.stretched == [n for n, wave in enumerate(plain) if wave > 8192]
    assert sorted([*facts.kept, *facts.between, *facts.stretched]) == list(range(64))
    assert (facts.trained, facts.length) == (8192, 131072)


def test_pairs_that_do_not_turn_are_counted_apart() -> None:
    config = llama(rope_scaling={"rope_type": "proportional", "partial_rotary_factor": 0.25})
    facts = rotary_of(explain(config))
    assert facts.still == list(range(8, 32))
    assert facts.kept == list(range(8))


def test_the_first_visible_error_is_where_an_independent_measurement_finds_it() -> None:
    index = torch.arange(2**15)
    frequency = 1.0 / 10_000 ** (torch.arange(0, 64, 2).float() / 64)  # as the reference computes them
    true, _ = oracles.angles(index.numpy(), 64, 10_000.0)
    error = ((index.float()[:, None] * frequency).cos().double() - torch.from_numpy(true)).abs().amax(1)
    assert rotary_of(explain(llama())).precision.first_visible == int((error > 1e-3).nonzero()[0])


def test_the_error_at_the_end_is_the_largest_near_it() -> None:
    config = llama(max_position_embeddings=65536)
    facts = rotary_of(explain(config))
    positions = Positions.of(torch.arange(65536 - 4096, 65536))
    exact, _ = Rotary.from_config(config).cos_sin(positions, torch.float64)
    rounded, _ = Rotary.from_config(config, angles="float32").cos_sin(positions, torch.float64)
    assert facts.precision.at_longest == float((exact - rounded).abs().max())


def test_a_stretched_model_is_measured_at_its_longest_length() -> None:
    facts = rotary_of(explain(PRESETS["phi-3-mini-128k"]))
    long = PRESETS["phi-3-mini-128k"]["rope_scaling"]["long_factor"]
    assert [pair.stretch for pair in facts.pairs] == pytest.approx(long, rel=FORMULA, abs=0)


def test_each_kind_of_layer_is_explained() -> None:
    explanation = explain(PRESETS["gemma-3-4b"])
    assert [layers.name for layers in explanation.layers] == ["full_attention", "sliding_attention"]
    assert explanation.trained is None
    without = explain(AutoConfig.for_model("smollm3", hidden_size=64, num_attention_heads=2, num_hidden_layers=4))
    assert [(layers.name, layers.kind) for layers in without.layers] == [("with", "Rotary"), ("without", "none")]


LLAMA_4 = {
    "model_type": "llama4_text", "head_dim": 64, "no_rope_layers": [1, 1, 1, 0], "attn_temperature_tuning": True,
    "floor_scale": 8192, "attn_scale": 0.1,
}  # fmt: skip
PHIMOE = {
    "type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "short_mscale": 1.2,
    "long_mscale": 1.2, "original_max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": yarn(original_max_position_embeddings=8192)}, "32,768"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "linear scaling has no trained length"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "the frequencies change after 8,192 tokens"),
        ({"model_type": "phi", "partial_rotary_factor": 0.5}, "only 32 of 64 dimensions"),
        (
            {"model_type": "phi", "head_dim": 80, "partial_rotary_factor": 0.33},
            "26.4 dimensions, rounded down to 26",
        ),
        ({"model_type": "phi", "head_dim": 65, "partial_rotary_factor": 0.5}, "head_dim 65 is odd"),
        ({"max_position_embeddings": 2**20}, "float32 angles"),
        ({"rope_scaling": yarn(truncate=True), "model_type": "gpt_oss", "head_dim": 64}, "truncate"),
        ({"rope_scaling": yarn(beta_fsat=30)}, "beta_fsat=30, which llama does not read: ignored"),
        ({"rope_interleave": True}, "these weights were converted"),
        (LLAMA_4, "multiplied by 1 + 0.1 log(1 + floor((n + 1) / 8,192))"),
        ({"model_type": "phimoe", "rope_scaling": PHIMOE}, "never uses the long ones"),
        ({**PRESETS["deepseek-v3"]}, "scale=0.135234"),
        ({"model_type": "falcon", "alibi": True}, "sqrt(head_dim)"),
        ({**PRESETS["gpt2"]}, "position 1,023"),
        ({**PRESETS["opt-1.3b"]}, "after 2 rows"),
        ({**PRESETS["t5-base"]}, "scale=1.0"),
        ({**PRESETS["deberta-v3-base"]}, "scale=0.0721688"),
        ({**PRESETS["bert-base"], "position_embedding_type": "relative_key"}, "flip(0)"),
    ],
)  # fmt: skip
def test_what_is_easily_missed_is_warned_of(change: dict[str, Any], words: str) -> None:
    assert words in warnings_of(change if "vocab_size" in change else llama(**change))


def test_what_is_fine_is_not_warned_of() -> None:
    assert warnings_of(llama()) == ""
    assert "max_position_embeddings" not in warnings_of(llama(rope_scaling=yarn()))
    assert "truncate" not in warnings_of(dict(PRESETS["gpt-oss-20b"]))


def test_the_scale_of_latent_attention_is_that_of_transformers() -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    with torch.device("meta"):
        theirs = DeepseekV3Attention(AutoConfig.for_model(**PRESETS["deepseek-v3"]), 0).scaling
    assert f"scale={theirs:.6g}" in warnings_of(dict(PRESETS["deepseek-v3"]))


@pytest.mark.parametrize(
    ("change", "answer", "words"),
    [
        ({}, "yes", ""),
        ({"rope_scaling": PRESETS["llama-3.1-8b"]["rope_scaling"]}, "yes", ""),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "differently", "fixed at the longest"),
        ({"rope_scaling": yarn(attention_factor=1.0)}, "differently", "attention_factor"),
        ({"rope_scaling": yarn(mscale=1.0, mscale_all_dim=1.0)}, "differently", "mscale"),
        (dict(PRESETS["deepseek-v3"]), "yes", ""),
        (dict(PRESETS["phi-3-mini-128k"]), "differently", "long factors"),
        ({"rope_interleave": True}, "differently", "rope_interleave"),
        ({**PRESETS["deepseek-v3"], "rope_interleave": False}, "differently", "rope_interleave"),
        (dict(PRESETS["t5-base"]), "no", "t5"),
        ({**PRESETS["bert-base"], "position_embedding_type": "relative_key"}, "no", "absolute"),
    ],
)  # fmt: skip
def test_vllm_is_judged_by_what_it_reads(change: dict[str, Any], answer: str, words: str) -> None:
    verdict = explain(change if "vocab_size" in change else llama(**change)).vllm
    assert verdict.answer == answer
    assert words in " ".join(verdict.reasons)
    assert bool(verdict.reasons) == (answer != "yes")


def test_converted_weights_are_explained_in_the_layout_they_were_converted_to() -> None:
    facts = rotary_of(explain(llama(rope_interleave=True)))
    assert facts.layout == "interleaved"
    assert rotary_of(explain(llama(rope_interleave=False))).layout == "half"
    assert "converted" not in warnings_of(llama(rope_interleave=False))
    assert "converted" not in warnings_of({**PRESETS["deepseek-v3"], "rope_interleave": False})


def test_layers_that_only_let_queries_grow_are_explained() -> None:
    turning, growing = explain(llama(**LLAMA_4)).layers
    assert (turning.name, turning.kind) == ("with", "Rotary")
    assert (growing.name, growing.kind, growing.methods) == ("without", "Tempered", ("rotate",))


@pytest.mark.parametrize("longest", [2**31, 10**12, 10**400])
def test_lengths_without_exact_angles_are_refused(longest: int) -> None:
    for config in (llama(), dict(PRESETS["bloom-7b1"]), dict(PRESETS["gpt2"])):
        key = next(key for key in ("max_position_embeddings", "seq_length", "n_positions") if key in config)
        with refuses(InputError, "expected at most 2147483647"):
            explain({**config, key: longest})


def test_the_last_position_with_an_exact_angle_is_measured() -> None:
    facts = rotary_of(explain(llama(max_position_embeddings=2**31 - 1)))
    assert facts.length == 2**31 - 1
    assert 0.1 < facts.precision.at_longest <= 2


def test_an_explanation_needs_a_known_architecture() -> None:
    with refuses(InputError, "nobodys", "register_architecture"):
        explain({"model_type": "nobodys"})


# ------------------------------------------------------------------ sources


def test_a_configuration_is_found_under_its_path_its_folder_and_its_name(tmp_path: Path) -> None:
    content = llama(note="ä")
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    assert read_source(tmp_path) == read_source(tmp_path / "config.json") == read_source(str(tmp_path)) == content
    assert read_source("gpt2") == PRESETS["gpt2"]


def test_a_preset_can_be_changed_without_harm() -> None:
    read_source("phi-3-mini-128k")["rope_scaling"]["long_factor"].clear()
    presets()["phi-3-mini-128k"]["rope_scaling"]["long_factor"].clear()
    assert len(presets()["phi-3-mini-128k"]["rope_scaling"]["long_factor"]) == 48


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1]", "a list"),
        (b"", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with refuses(InputError, words, str(path)):
        read_source(path)


def test_a_folder_without_a_configuration_and_a_name_without_a_preset_are_refused(tmp_path: Path) -> None:
    with refuses(InputError, "config.json"):
        read_source(tmp_path)
    with refuses(InputError, "gpt3", "'gpt2', did you mean"):
        read_source("gpt3")
    with refuses(InputError, "llama-3.1-8b"):
        read_source("/no/such/file.json")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ([16, 24, 24], "22 to time, 21 to rows and 21 to columns"),
        (
            [16, 16, 16],
            "32 to time, 16 to rows and 16 to columns. The 16 pairs that no section covers are rotated by time",
        ),
        ([24, 20, 20], ""),
    ],
)
def test_pairs_dealt_out_in_turns_are_counted(sections: list[int], words: str) -> None:
    """The rotary module of `transformers` has the same counts: the angles of its pairs tell their axes."""
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections, "mrope_interleaved": True}
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "head_dim": 128, "max_position_embeddings": 4096}
    config = AutoConfig.for_model("qwen3_vl_text", **sizes, rope_parameters=rope)
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    places = torch.eye(3, dtype=torch.int64)[:, None]  # token 0 is at 1 on the first axis alone, and so on
    _, sin = Qwen3VLTextRotaryEmbedding(config)(torch.zeros(1), places)
    counts = [int((sin[0, token, :64] != 0).sum()) for token in range(3)]
    said = warnings_of(config.to_dict())
    expected = f"{counts[0]} to time, {counts[1]} to rows and {counts[2]} to columns"
    assert (expected in said) == (counts != sections)
    assert words in said
    assert ("in turns" in said) == bool(words)


def test_a_learned_table_can_be_interpolated() -> None:
    assert "Learned.resize interpolates" in warnings_of(dict(PRESETS["gpt2"]))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "vjepa2"}, "by different frequencies: not a rotation"),
        (
            {
                "model_type": "hunyuan_vl_text", "hidden_size": 256, "num_attention_heads": 2,
                "rope_theta": 1e4,
                "rope_scaling": {"rope_type": "default", "mrope_section": [16, 16, 16, 16]},
            },
            "by different axes: not a rotation",
        ),
    ],
    ids=["V-JEPA 2", "HunYuan-VL"],
)  # fmt: skip
def test_code_that_does_not_rotate_is_explained_with_a_warning(config: dict[str, Any], why: str) -> None:
    [layers] = explain(config).layers
    assert layers.kind == "UnequalAngles"
    assert layers.warnings[0].startswith("its code turns the two dimensions of a pair")
    assert why in layers.warnings[0]
