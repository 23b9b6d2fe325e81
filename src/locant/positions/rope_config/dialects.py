"""What published architectures do that their configuration does not say: which dimensions form a pair, and odd names.

The layout of a model is in its code, not in its configuration; so is the base of GPT-J, and so is what comes in where
a key is missing. A table holds these facts, and an architecture that is not in it is not guessed at. Each was read off
the code of `transformers`, which ``tests/positions/rope_config/test_dialects.py`` runs to hold the table against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from locant.arguments import shown
from locant.errors import InputError
from locant.kernels.rotary import Layout

__all__ = ["DIALECTS", "UNKNOWN", "Dialect", "LayerKind", "dialect_of"]


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """The layers of one type, in configurations older than a dictionary of rope parameters per layer type.

    Args:
        base_key: the key of their base.
        scaled: whether ``rope_scaling`` acts on them.
        only_base: the base that `transformers` gives them whatever the key says.
    """

    base_key: str
    scaled: bool = True
    only_base: float | None = None


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How one architecture speaks of its rotary positions.

    Args:
        layout: which dimensions form a pair; ``None`` for an architecture that is not known.
        base_key: the base, where it stands outside the dictionary of rope parameters.
        fixed_base: a base that is written into the modeling code; such a model has no key for it.
        share_keys: what may say, outside the dictionary of rope parameters, how much of a head is turned; none: the
            modeling code turns the whole head, whatever is said.
        share_required: whether it has to be said: the default of the class is not the whole head.
        head_dim_key: the width of a head, or of the part of it that is turned.
        head_dim_required: whether it has to be said: the default of the class is no share of the width.
        full_head_dim_key: the width of a head in layers of full attention, where it differs.
        scaling_required: whether rope parameters have to be given: the default of the class is a scaling.
        rope_types: older names of rope types.
        weighted_longrope: whether its LongRoPE reads ``short_mscale`` and ``long_mscale`` for the attention factor.
        per_layer: whether the modeling code takes a dictionary of rope parameters per layer type.
        layer_kinds: the layer types, and what configurations without such dictionaries say of each.
        sections_required: whether the model has several position axes.
        refused_sections: why `mrope_section` cannot be honoured.
        interleave_key: whether ``rope_interleave`` decides the layout.
    """

    layout: Layout | None = "half"
    base_key: str = "rope_theta"
    fixed_base: float | None = None
    share_keys: tuple[str, ...] = ()
    share_required: bool = False
    head_dim_key: str = "head_dim"
    head_dim_required: bool = False
    full_head_dim_key: str | None = None
    scaling_required: bool = False
    rope_types: Mapping[str, str] = field(default_factory=dict[str, str])
    weighted_longrope: bool = False
    per_layer: bool = False
    layer_kinds: Mapping[str, LayerKind] = field(default_factory=dict[str, LayerKind])
    sections_required: bool = False
    refused_sections: str | None = None
    interleave_key: bool = False

    @property
    def base_keys(self) -> tuple[str, ...]:
        """Every key outside the dictionary of rope parameters that holds a base."""
        if self.fixed_base is not None:
            return ()
        kinds = tuple(kind.base_key for kind in self.layer_kinds.values())
        return tuple(dict.fromkeys(kinds or (self.base_key,)))

    def base_keys_of(self, layer_type: str | None) -> tuple[str, ...]:
        """Those that hold the base of these layers."""
        kind = self.layer_kinds.get(layer_type or "")
        return self.base_keys if kind is None else (kind.base_key,)

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that speaks of rotary positions to this architecture."""
        dictionaries = () if self.fixed_base is not None else ("rope_parameters", "rope_scaling")
        shares = self.share_keys or ("partial_rotary_factor",)  # a whole head may be called a share of 1
        return (*dictionaries, *self.base_keys, *shares, self.head_dim_key, "rope_interleave", *WHICH_LAYERS)


WHICH_LAYERS = ("no_rope_layers", "no_rope_layer_interval")
"""They say which layers have rotary positions, and nothing about how these turn."""

UNKNOWN = Dialect(layout=None, share_keys=("partial_rotary_factor", "rotary_pct", "rotary_dim"), per_layer=True)
"""Any other configuration: its layout has to be given."""

_OWN_WIDTH = Dialect(head_dim_required=True)
_SHARE = ("partial_rotary_factor",)
_PARTIAL = Dialect(share_keys=_SHARE, share_required=True)
_GLM = Dialect(layout="interleaved", share_keys=_SHARE, share_required=True, head_dim_required=True)
_GPT_J = Dialect(layout="interleaved", fixed_base=10_000.0, share_keys=("rotary_dim",), share_required=True)
_GPT_NEOX = Dialect(base_key="rotary_emb_base", share_keys=("rotary_pct",), share_required=True)
_GEMMA_3 = Dialect(
    head_dim_required=True,
    per_layer=True,
    layer_kinds={
        "full_attention": LayerKind(base_key="rope_theta"),
        "sliding_attention": LayerKind(base_key="rope_local_base_freq", scaled=False),
    },
)
_GEMMA_4 = Dialect(head_dim_required=True, full_head_dim_key="global_head_dim", per_layer=True)
_OLMO_3 = Dialect(
    per_layer=True,
    layer_kinds={
        "full_attention": LayerKind(base_key="rope_theta"),
        "sliding_attention": LayerKind(base_key="rope_theta", scaled=False, only_base=500_000.0),
    },
)
_MODERN_BERT = Dialect(
    per_layer=True,
    layer_kinds={
        "full_attention": LayerKind(base_key="global_rope_theta"),
        "sliding_attention": LayerKind(base_key="local_rope_theta"),
    },
)
_DEEPSEEK_V2 = Dialect(layout="interleaved", head_dim_key="qk_rope_head_dim")
_DEEPSEEK_V3 = Dialect(layout="interleaved", head_dim_key="qk_rope_head_dim", interleave_key=True)
_QWEN_VL = Dialect(rope_types={"mrope": "default"}, sections_required=True)
_IN_TURNS = "its axes take turns pair by pair, instead of a section each"
_QWEN_3_VL = Dialect(head_dim_required=True, rope_types={"mrope": "default"}, refused_sections=_IN_TURNS)
_QWEN_3_VL_MOE = Dialect(rope_types={"mrope": "default"}, refused_sections=_IN_TURNS)

DIALECTS: Mapping[str, Dialect] = {
    **dict.fromkeys(
        (
            "arcee", "bitnet", "exaone4", "falcon", "granite", "granitemoe", "llama", "ministral", "mistral",
            "mixtral", "olmo", "olmo2", "olmoe", "qwen2", "qwen2_moe", "qwen3_moe", "smollm3", "starcoder2",
        ),
        Dialect(),
    ),
    **dict.fromkeys(("gemma", "gemma2", "qwen3", "seed_oss"), _OWN_WIDTH),
    **dict.fromkeys(("cohere", "cohere2"), Dialect(layout="interleaved")),
    **dict.fromkeys(("ernie4_5", "helium", "llama4_text"), Dialect(layout="interleaved", head_dim_required=True)),
    **dict.fromkeys(("glm4_moe", "nemotron", "persimmon", "phi", "stablelm"), _PARTIAL),
    **dict.fromkeys(("glm", "glm4"), _GLM),
    **dict.fromkeys(("gptj", "codegen"), _GPT_J),
    "gpt_neox": _GPT_NEOX,
    "gpt_oss": Dialect(head_dim_required=True, scaling_required=True),
    "apertus": Dialect(scaling_required=True),
    "phi3": Dialect(share_keys=_SHARE, rope_types={"su": "longrope", "yarn": "longrope"}),
    "phimoe": Dialect(weighted_longrope=True),
    "gemma3_text": _GEMMA_3,
    "gemma4_text": _GEMMA_4,
    "olmo3": _OLMO_3,
    "modernbert": _MODERN_BERT,
    "deepseek_v2": _DEEPSEEK_V2,
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), _DEEPSEEK_V3),
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _QWEN_VL),
    "qwen3_vl_text": _QWEN_3_VL,
    "qwen3_vl_moe_text": _QWEN_3_VL_MOE,
}  # fmt: skip
"""By ``model_type``."""


def dialect_of(config: Mapping[str, Any]) -> Dialect:
    """What is known about the architecture of a configuration."""
    name = config.get("model_type", "")
    if not isinstance(name, str):
        raise InputError(f"got model_type={shown(name)}, expected a name", "'model_type': 'llama'")
    return DIALECTS.get(name, UNKNOWN)
