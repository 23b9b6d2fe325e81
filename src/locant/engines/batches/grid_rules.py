"""The rules by which vision-language models number the tokens of images and videos, from their ``get_rope_index``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GridRule:
    """The rule by which a model numbers the tokens of its images and videos.

    Args:
        merge: the number of patches per side of a token.
        merge_frames: the number of frames of a video in one token.
        per_second: the number of ids per second of a video. ``None`` means that frames are 1 apart.
        by_frame: whether each frame of a video is a separate grid, with text in between (Qwen3-VL).
    """

    merge: int = 2
    merge_frames: int = 1
    per_second: int | None = None
    by_frame: bool = False


ONE_GRID = ("qwen2_vl", "paddleocr_vl")
IN_SECONDS = ("qwen2_5_vl",)
BY_FRAME = (
    "cohere_compass", "cosmos3_edge", "cosmos3_omni", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "qwen3_5",
    "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp",
)  # fmt: skip
MERGED_FRAMES = ("ernie4_5_vl_moe",)
OTHER_RULES = ("glm_image", "hunyuan_vl", "hy_v4_vl", "minicpmv4_7", "qwen2_5_omni", "qwen3_omni_moe")


def rule_of(name: str, config: Mapping[str, Any]) -> GridRule | None:
    """Return the rule of a ``model_type``, or ``None`` if locant does not know it."""
    vision = config.get("vision_config")
    vision = vision if isinstance(vision, Mapping) else {}
    merge = _positive(vision, "spatial_merge_size", 2)
    if name in ONE_GRID:
        return GridRule(merge=merge)
    if name in IN_SECONDS:
        return GridRule(merge=merge, per_second=_positive(vision, "tokens_per_second", 4))
    if name in BY_FRAME:
        return GridRule(merge=merge, by_frame=True)
    if name in MERGED_FRAMES:
        return GridRule(merge=merge, merge_frames=_positive(vision, "temporal_merge_size", 2))
    return None


def _positive(vision: Mapping[str, Any], key: str, default: int) -> int:
    value = vision.get(key, default)
    return value if isinstance(value, int) and value > 0 else default
