"""The factor on attention scores, for models in which it is not ``head_dim**-0.5``.

It follows the code of `transformers`. A test compares it with the attention modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from locant.models.config_values import HEADS, WIDTHS, Config, integer_at, number, value_at
from locant.spelling import spell

USUAL = 1e-6
"""The largest relative difference from the usual factor that is ignored."""

BY_SCALAR = {"gemma2", "gemma3_text", "t5_gemma_module", "t5gemma2_text", "t5gemma2_decoder", "vaultgemma"}
"""Architectures whose factor is ``query_pre_attn_scalar**-0.5``. The key's default is 256."""

BY_MULTIPLIER = {
    "granite", "granite_docling_text", "granite_swa", "granite4_vision_text", "granitemoe", "granitemoe_swa",
    "granitemoehybrid", "granitemoeshared", "hyperclovax",
}  # fmt: skip
"""Architectures whose factor is ``attention_multiplier``. The key's default is 1."""

ONE = {
    "gemma3n_text", "gemma4_text", "gemma4_unified_text", "diffusion_gemma_text", "embedding_gemma2_text", "gpt_neo",
    "dia_decoder", "dia_encoder",
}  # fmt: skip
"""Architectures that do not divide scores."""

BY_WIDTH = {"inkling_text": (1.0, -1.0), "zamba": (0.5, -0.5), "zamba2": (0.5, -0.5)}
"""Architectures whose factor is ``(share * head_dim) ** power``, by share and power."""

WITHOUT_SCALE = ("gpt2", "gpt_bigcode", "imagegpt", "decision_transformer")
"""Architectures with a key that turns the factor off. Another key can divide it by the layer's number."""


BY_LAYER = "scale_attn_by_inverse_layer_idx"


class ScoreScale(NamedTuple):
    """The factor on scores, its origin, and the usual factor for the width of a head."""

    value: float
    origin: str
    usual: float


def score_scale(config: Config, head_dim: int | None = None) -> ScoreScale | None:
    """Return the factor on scores of a configuration with defaults, or ``None`` if it is the usual one or unknown.

    >>> score_scale({"model_type": "gemma2", "query_pre_attn_scalar": 144, "head_dim": 128}).value
    0.08333333333333333
    """
    head_dim = head_dim or _head_dim(config)
    if head_dim is None:
        return None
    usual = head_dim**-0.5
    stated = _stated_scale(config, head_dim)
    return None if stated is None or math.isclose(stated[0], usual, rel_tol=USUAL) else ScoreScale(*stated, usual)


def scale_warnings(config: Config, head_dim: int | None = None) -> Iterator[str]:
    """Yield warnings about a factor that differs from the usual factor."""
    scale = score_scale(config, head_dim)
    if scale is not None:
        usual = f"not with head_dim**-0.5, which is {spell(scale.usual)}"
        yield f"{scale.origin}: attend with scale={spell(scale.value)}, {usual}"
    if config.get("model_type") in WITHOUT_SCALE and config.get(BY_LAYER) is True:
        yield f"{BY_LAYER} is true: layer n (from 0) also divides its scores by n + 1"


def _stated_scale(config: Config, head_dim: int) -> tuple[float, str] | None:
    name = str(config.get("model_type"))
    if name in BY_SCALAR:
        scalar = number("query_pre_attn_scalar", config.get("query_pre_attn_scalar", 256), above=0)
        return scalar**-0.5, f"query_pre_attn_scalar is {spell(scalar)}, and scores are divided by its square root"
    if name in BY_MULTIPLIER:
        factor = number("attention_multiplier", config.get("attention_multiplier", 1.0))
        return factor, f"attention_multiplier is {spell(factor)}, and scores are multiplied by it"
    if name in ONE:
        return 1.0, f"the code of {name} does not divide scores"
    if name in BY_WIDTH:
        share, power = BY_WIDTH[name]
        width = f"{spell(share)} x head_dim" if share != 1 else "head_dim"
        by = f"the square root of {width}" if power == -0.5 else width
        return (share * head_dim) ** power, f"the code of {name} divides scores by {by}"
    if name in WITHOUT_SCALE and config.get("scale_attn_weights") is False:
        return 1.0, "scale_attn_weights is false, and scores are not divided"
    attention: Any = config.get("attn_config")
    if name == "mpt" and isinstance(attention, dict) and attention.get("softmax_scale") is not None:
        return number("softmax_scale", attention["softmax_scale"]), "attn_config has softmax_scale"
    return None


def _head_dim(config: Config) -> int | None:
    width, heads = integer_at(config, "head_dim", "attention_head_dim"), value_at(config, *HEADS)
    if width is not None or not isinstance(heads, int) or heads < 1:
        return width
    whole = integer_at(config, *WIDTHS)
    if whole is not None and config.get("model_type") in ("zamba", "zamba2"):
        whole *= 2  # its attention reads hidden states and token embeddings
    return None if whole is None or whole < heads else whole // heads
