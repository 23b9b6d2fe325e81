"""Every rotary module of `transformers` is rotated as it rotates, from its own default configuration."""

from __future__ import annotations

from typing import Any

import pytest

from locant import Rotary
from locant.models import with_defaults
from locant.models.config_values import HEADS, WIDTHS
from locant.models.registry import read
from tests.models.rotary_modules import Case, cases, folders, outcome

REFUSED = {
    "clvp",
    "cohere_compass",
    "cosmos3_edge",
    "deepseek_v4",
    "dinov3_vit",
    "dots3_note",
    "edgetam_video",
    "efficientloftr",
    "eomt_dinov3",
    "ernie4_5_vl_moe",
    "esmfold2",
    "exaone4_5",
    "gemma4",
    "glm4_moe",
    "glm4v",
    "glm4v_moe",
    "glm5_next",
    "glm_image",
    "glm_ocr",
    "hunyuan_vl",
    "inkling2",
    "kimi_k25",
    "lfm3_vl",
    "llama4",
    "minimax_m3_vl",
    "mlcd",
    "muse_glimmer",
    "muse_spark",
    "musicflamingo",
    "nanochat",
    "neomme",
    "paddleocr_vl",
    "pixtral",
    "qwen2_5_omni",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_omni_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen4_exp",
    "sam2_video",
    "sam3",
    "sam3_tracker_video",
    "sapiens2",
    "step3p7",
    "video_llama_3",
    "vjepa2",
}
"""Folders of which a module is refused: its pairs need more than a layout."""


@pytest.mark.slow
@pytest.mark.parametrize("folder", folders())
def test_every_rotary_module_of_a_folder_is_equal_or_refused_for_what_it_is(folder: str) -> None:
    found = cases(folder)
    assert found
    for case in found:
        result = outcome(case)
        assert result.verdict in ("same bits", "equal") or folder in REFUSED, (case.name, result)


def sizes(case: Case) -> dict[str, Any]:
    """What its configuration has to say beside the defaults of its row: the sizes of the model."""
    values, row = read(case.config)
    kept = {"model_type", "layer_types", "per_layer_config", "num_hidden_layers", *WIDTHS, *HEADS, *row.attribute_map}
    kept |= {row.rotary_keys.head_dim_key} if row.rotary_keys.head_dim_required else set()
    return {key: value for key, value in values.items() if key in kept and key not in row.defaults}


@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted({*folders()} - REFUSED))
def test_defaults_are_those_of_the_class_in_transformers(folder: str) -> None:
    for case in cases(folder):
        if case.config.to_dict().get("model_type") in WITHOUT_DEFAULTS:
            continue
        ours = Rotary.from_config(with_defaults(sizes(case)), layer_type=case.layer_type)
        assert repr(ours) == repr(Rotary.from_config(case.config, layer_type=case.layer_type)), case.name


WITHOUT_DEFAULTS = {""}
"""Those without a ``model_type``, which no dictionary can name."""
