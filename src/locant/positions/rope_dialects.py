"""What published architectures do that their configuration does not say: which dimensions form a pair, and odd names.

The layout of a model is in its code, not in its configuration; so is the base of GPT-J. A table holds these facts, and
an architecture that is not in it is not guessed at. Each was read off the modeling code of `transformers`, and
``tests/positions/test_rope_dialects.py`` turns queries with that code to hold the layouts against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from locant.kernels.rotary import Layout

__all__ = ["DIALECTS", "UNKNOWN", "Dialect"]


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How one architecture speaks of its rotary positions.

    Args:
        layout: which dimensions form a pair; ``None`` for an architecture that is not known.
        base_key: the base, where it stands outside the dictionary of rope parameters.
        fixed_base: a base that is written into the modeling code; such a model has no key for it.
        share_keys: what may say how much of a head is turned.
        share_required: whether it has to be said: the default of the class is not the whole head.
        head_dim_key: the width of a head, or of the part of it that is turned.
        full_head_dim_key: the width of a head in layers of full attention, where it differs.
        rope_types: older names of rope types.
        layer_base_keys: layer types and the key of their base, in configurations older than nested dictionaries.
        sections_required: whether the model has several position axes.
        refused_sections: why `mrope_section` cannot be honoured.
        interleave_key: whether ``rope_interleave`` decides the layout.
    """

    layout: Layout | None = "half"
    base_key: str = "rope_theta"
    fixed_base: float | None = None
    share_keys: tuple[str, ...] = ("partial_rotary_factor", "rotary_dim")
    share_required: bool = False
    head_dim_key: str = "head_dim"
    full_head_dim_key: str | None = None
    rope_types: Mapping[str, str] = field(default_factory=dict[str, str])
    layer_base_keys: Mapping[str, str] = field(default_factory=dict[str, str])
    sections_required: bool = False
    refused_sections: str | None = None
    interleave_key: bool = False

    @property
    def base_keys(self) -> tuple[str, ...]:
        """Every key outside the dictionary of rope parameters that holds a base."""
        if self.fixed_base is not None:
            return ()
        return tuple(self.layer_base_keys.values()) or tuple(dict.fromkeys(("rope_theta", self.base_key)))

    def base_keys_of(self, layer_type: str | None) -> tuple[str, ...]:
        """Those that hold the base of these layers."""
        key = self.layer_base_keys.get(layer_type or "")
        return self.base_keys if key is None else (key,)

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that speaks of rotary positions to this architecture."""
        dictionaries = () if self.fixed_base is not None else ("rope_parameters", "rope_scaling")
        return (*dictionaries, *self.base_keys, *self.share_keys, self.head_dim_key, "rope_interleave", *WHICH_LAYERS)


WHICH_LAYERS = ("no_rope_layers", "no_rope_layer_interval")
"""They say which layers have rotary positions, and nothing about how these turn."""

UNKNOWN = Dialect(layout=None, share_keys=("partial_rotary_factor", "rotary_pct", "rotary_dim"))
"""Any other configuration: its layout has to be given."""

_HALF = Dialect()
_INTERLEAVED = Dialect(layout="interleaved")
_PARTIAL = Dialect(share_required=True)
_GPT_J = Dialect(layout="interleaved", fixed_base=10_000.0, share_keys=("rotary_dim",), share_required=True)
_NEOX = Dialect(base_key="rotary_emb_base", share_keys=("partial_rotary_factor", "rotary_pct"), share_required=True)
_PHI_3 = Dialect(rope_types={"su": "longrope", "yarn": "longrope"})
_GEMMA_3 = Dialect(layer_base_keys={"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"})
_GEMMA_4 = Dialect(full_head_dim_key="global_head_dim")
_MODERN_BERT = Dialect(layer_base_keys={"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"})
_DEEPSEEK_V2 = Dialect(layout="interleaved", head_dim_key="qk_rope_head_dim")
_DEEPSEEK_V3 = Dialect(layout="interleaved", head_dim_key="qk_rope_head_dim", interleave_key=True)
_QWEN_VL = Dialect(rope_types={"mrope": "default"}, sections_required=True)
_QWEN_3_VL = Dialect(
    rope_types={"mrope": "default"}, refused_sections="its axes take turns pair by pair, instead of a section each"
)

DIALECTS: Mapping[str, Dialect] = {
    **dict.fromkeys(
        (
            "apertus", "arcee", "bitnet", "exaone4", "falcon", "gemma", "gemma2", "gpt_oss", "granite", "granitemoe",
            "llama", "ministral", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "phimoe", "qwen2",
            "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
        ),
        _HALF,
    ),
    **dict.fromkeys(("cohere", "cohere2", "ernie4_5", "helium", "llama4_text"), _INTERLEAVED),
    **dict.fromkeys(("glm4_moe", "nemotron", "persimmon", "phi", "stablelm"), _PARTIAL),
    **dict.fromkeys(("glm", "glm4"), Dialect(layout="interleaved", share_required=True)),
    **dict.fromkeys(("gptj", "codegen"), _GPT_J),
    "gpt_neox": _NEOX,
    "phi3": _PHI_3,
    "gemma3_text": _GEMMA_3,
    "gemma4_text": _GEMMA_4,
    "modernbert": _MODERN_BERT,
    "deepseek_v2": _DEEPSEEK_V2,
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), _DEEPSEEK_V3),
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _QWEN_VL),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe_text"), _QWEN_3_VL),
}  # fmt: skip
"""By ``model_type``."""
