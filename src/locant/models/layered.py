"""Models whose layers differ: some have no positions, or each type of layers has rope parameters of its own.

Which layers are rotated is told by their windows, by a list, or by a base of 0. Gemma has had a base for each type of
layers since its third version, and ModernBERT.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from locant.arguments import shown
from locant.errors import InputError
from locant.models.architecture import SHARE, Architecture, LayerKind, RotaryKeys, rotary_row, warn_if
from locant.models.config_values import WIDTHS, Config, flag, integer, number, required, stated
from locant.models.weights import RMS_NORMED, InputTables, one_after_another
from locant.positions.base import PositionEncoding

WINDOWED = ("sliding_attention", "full_attention")
LISTED = ("with", "without")
OFF = "'use_mem_rope': false, unless the model was trained with it"
DENSE_PATTERN = "prefix_dense_sliding_window_pattern"

EncodingOf = Callable[[Config, str | None], PositionEncoding | None]
"""As a row of an architecture has it: ``None`` is for rotary positions."""


def windowed_layers(config: Config) -> tuple[str, ...]:
    """``sliding_attention`` and ``full_attention``, unless no layer has a window (Cohere 2, Exaone 4)."""
    window = stated(config, "sliding_window", "'sliding_window': its width, or null where no layer has a window")
    return () if window is None else WINDOWED


def _nope_where(test: Callable[[Config, str | None], bool]) -> EncodingOf:
    """No positions in layers for which this holds, and rotary ones in all others."""
    return lambda config, layer_type: PositionEncoding() if test(config, layer_type) else None


def nope_in_full_attention(*, rotary_without_windows: bool) -> EncodingOf:
    """Rotary positions where attention slides, and none where it is full; without windows, in all layers or in none."""
    return _nope_where(
        lambda config, kind: kind == "full_attention" if windowed_layers(config) else not rotary_without_windows
    )


none_where_full = _nope_where(lambda config, kind: kind == "full_attention")
"""Whatever the windows are (AFMoE)."""
none_without = _nope_where(lambda config, kind: kind == "without")
"""For the kinds of `listed_layers` and of ``layer_rope_theta``."""
none_of_granite = _nope_where(lambda config, kind: config.get("position_embedding_type") != "rope")
none_of_zamba = _nope_where(lambda config, kind: not flag("use_mem_rope", stated(config, "use_mem_rope", OFF)))
none_of_olmo = _nope_where(
    lambda config, kind: isinstance(rope := config.get("rope_parameters"), Mapping) and rope.get("rope_theta") is None
)
"""Where the base is null, as in released models."""


def _cohere_2_moe(config: Config, layer_type: str | None) -> PositionEncoding | None:
    """As `none_where_full`, but for dense layers, of which a key has to tell."""
    if layer_type == "full_attention":
        stated(config, DENSE_PATTERN, "1, as released models have it")
    return none_where_full(config, layer_type)


def _based_layers(config: Config) -> tuple[str, ...]:
    """``with`` and ``without`` rotary positions by ``layer_rope_theta``: a base for each layer, of which 0 means none.

    Layers with several bases are refused: they want an encoding each.
    """
    bases = config.get("layer_rope_theta")
    if bases is None:
        return ()
    if not isinstance(bases, (list, tuple)) or not bases:
        raise InputError(f"got layer_rope_theta={shown(bases)}, expected a base for each layer", "[10000.0, 0, ...]")
    distinct = {number("layer_rope_theta", base) for base in bases}
    if len(distinct - {0.0}) > 1:
        got = f"got layer_rope_theta with {len(distinct - {0.0})} bases, and one encoding for all layers to make"
        raise InputError(got, "a configuration with layer_rope_theta of the layers of one base, for each base")
    return _kinds({base != 0 for base in distinct})


def listed_layers(*, default_interval: int | None = None) -> Callable[[Config], tuple[str, ...]]:
    """``with`` and ``without`` rotary positions, as far as there are such layers; none, where all layers have them.

    ``no_rope_layers`` is a list with 1 for layers that do have rotary positions; ``no_rope_layer_interval`` gives every
    how many layers one has none. Published configurations of Llama 4 have an empty list and mean the default interval.
    """
    return lambda config: _kinds(_rotary_layers(config, default_interval))


def _kinds(rotary: Collection[bool]) -> tuple[str, ...]:
    """The kinds of layers that there are, unless all have rotary positions."""
    kinds = tuple(kind for kind, has in zip(LISTED, (True, False), strict=True) if has in rotary)
    return () if kinds == ("with",) else kinds


def _rotary_layers(config: Config, default_interval: int | None) -> set[bool]:
    """Whether layers have rotary positions, over all layers."""
    listed = config.get("no_rope_layers")
    every = config.get("no_rope_layer_interval", default_interval if listed == [] else None)
    if listed or every is None or (listed == [] and default_interval is None):
        return _listed(config)
    every = integer("no_rope_layer_interval", every)
    return {(layer + 1) % every != 0 for layer in range(required(config, "num_hidden_layers"))}


def _listed(config: Config) -> set[bool]:
    remedy = "1 for each layer with positions, else 0"
    listed = stated(config, "no_rope_layers", remedy)
    count = integer("num_hidden_layers", config["num_hidden_layers"]) if "num_hidden_layers" in config else None
    right = isinstance(listed, (list, tuple)) and all(isinstance(one, int) and one in (0, 1) for one in listed)
    if not right or not listed or count not in (None, len(listed)):
        expected = "ones and zeros" if count is None else f"{count} ones and zeros"
        raise InputError(f"got no_rope_layers={shown(listed)}, expected a list of {expected}", remedy)
    return {bool(one) for one in listed}


DENSE_LAYERS = warn_if(
    lambda config, encoding: config.get(DENSE_PATTERN) == 1,
    "layers of full attention have no positions, but dense ones among them are rotated as sliding ones are",
)
SCALED_LAYERS = warn_if(
    lambda config, encoding: (
        config.get("rope_scaling_layers") is not None
        and getattr(encoding, "scaling", None) is not None
        and len(config["rope_scaling_layers"]) != config.get("num_hidden_layers")
    ),
    "only the layers in rope_scaling_layers have this scaling: the others have the same base without it",
)


def _by_layer_type(
    max_seq_len: int, head_dim: int, share_required: bool = False, **ropes: dict[str, Any]
) -> Architecture:
    """Rope parameters per layer type, with a share of each head."""
    keys = RotaryKeys(per_layer=True, share_keys=SHARE, share_required=share_required)
    return rotary_row(None, max_seq_len, head_dim, keys=keys, defaults={"rope_parameters": ropes})


def of_types(**base_keys: str) -> dict[str, LayerKind]:
    """The types of layers of configurations with a base each, by the keys of these."""
    return {name: LayerKind(base_key=key) for name, key in base_keys.items()}


def rope(base: float, share: float | None = None, rope_type: str = "default") -> dict[str, Any]:
    """The rope parameters of one type of layers."""
    part = {} if share is None else {"partial_rotary_factor": share}
    return {"rope_type": rope_type, "rope_theta": base, **part}


def _based(base: float, max_seq_len: int, head_dim: int | None = None, **row: Any) -> Architecture:
    """A base for each layer in ``layer_rope_theta``, of which 0 means no positions."""
    return rotary_row(
        base,
        max_seq_len,
        head_dim,
        keys=RotaryKeys(other_keys=("layer_rope_theta",)),
        encoding=none_without,
        layer_types=_based_layers,
        **row,
    )


def _windowed(max_seq_len: int, head_dim: int | None, window: int, *, rotary_without_windows: bool) -> Architecture:
    return rotary_row(
        1e4,
        max_seq_len,
        head_dim,
        encoding=nope_in_full_attention(rotary_without_windows=rotary_without_windows),
        layer_types=windowed_layers,
        defaults={"sliding_window": window},
    )


def _rounded_to_8_bits(config: Config) -> float:
    """RecurrentGemma has the square root of its width in bfloat16, whatever its own dtype."""
    mantissa, exponent = math.frexp(required(config, *WIDTHS) ** 0.5)
    return math.ldexp(round(mantissa * 2**8), exponent - 8)


GEMMA_TABLES = InputTables(scale="sqrt_d_model_rounded")
GEMMA_3 = RotaryKeys(
    per_layer=True,
    layer_kinds={
        "full_attention": LayerKind(base_key="rope_theta"),
        "sliding_attention": LayerKind(base_key="rope_local_base_freq", scaled=False),
    },
)
GEMMA_4 = RotaryKeys(full_head_dim_key="global_head_dim", per_layer=True)

LAYERS = {"sliding_attention": rope(1e4), "full_attention": rope(1e6)}
PROPORTIONAL = {**LAYERS, "full_attention": rope(1e6, 0.25, "proportional")}
GEMMA_3_4B = {
    "vocab_size": 262208, "hidden_size": 2560, "num_attention_heads": 8, "head_dim": 256, "num_hidden_layers": 34,
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "sliding_window": 1024, "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip


def _gemma_4(max_seq_len: int, rope: Mapping[str, Any], *, keys: RotaryKeys = GEMMA_4, **row: Any) -> Architecture:
    defaults = {"global_head_dim": 512, "rope_parameters": rope}
    return rotary_row(None, max_seq_len, 256, keys=keys, defaults=defaults, inputs=GEMMA_TABLES, **row)


BEFORE_GEMMA_3 = rotary_row(1e4, 8192, 256, inputs=GEMMA_TABLES, vllm=True)

MODERN_BERT = Architecture(
    rotary=RotaryKeys(
        per_layer=True,
        layer_kinds=of_types(full_attention="global_rope_theta", sliding_attention="local_rope_theta"),
    ),
    defaults={"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0, "max_position_embeddings": 8192},
    inputs=InputTables(
        tokens="embeddings.tok_embeddings",
        norm="embeddings.norm",
        norm_eps="norm_eps",
        norm_bias_key="norm_bias",
        dropout_key="embedding_dropout",
    ),
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "afmoe": rotary_row(1e4, 16384, 128, encoding=none_where_full, layer_types=lambda config: WINDOWED),
    "beam": rotary_row(
        None, 8192, 128, keys=RotaryKeys(per_layer=True),
        defaults={"rope_parameters": {"sliding_attention": rope(1e4), "full_attention": None}},
    ),
    "cohere2_moe": rotary_row(
        1e4, 8192, 128, keys=RotaryKeys(layout="interleaved"), encoding=_cohere_2_moe, layer_types=windowed_layers,
        defaults={"sliding_window": 4096, DENSE_PATTERN: 1},
        warnings=(DENSE_LAYERS,),
    ),
    "exaone_moe": _windowed(2048, None, 4096, rotary_without_windows=True),
    "flint": _windowed(262144, 128, 513, rotary_without_windows=False),
    "granite_swa": _based(1e4, 8192),
    "granitemoe_swa": _based(1e4, 2048),
    "kolibri1": _windowed(262144, 128, 513, rotary_without_windows=True),
    "laguna": _by_layer_type(131072, 128, full_attention=rope(5e5, 0.5), sliding_attention=rope(1e4, 1.0)),
    "lfm3": _by_layer_type(128000, 128, sliding_attention=rope(1e4), full_attention=rope(1e6, 0.5, "proportional")),
    "mellum": _by_layer_type(131072, 128, full_attention=rope(5e5), sliding_attention=rope(1e4)),
    "mimo_v2_flash": _by_layer_type(
        131072, 192, True, full_attention=rope(5e6, 0.334), sliding_attention=rope(1e4, 0.334)
    ),
    "molmo2_text": rotary_row(
        1e4, 36864, 128, keys=RotaryKeys(other_keys=("rope_scaling_layers",)), warnings=(SCALED_LAYERS,),
    ),
    "muse_glimmer_text": _based(1e4, 131072, 128, inputs=RMS_NORMED),
    "muse_spark_text": _based(5e5, 1048576, 64, inputs=RMS_NORMED),
    "olmo_hybrid": rotary_row(1e4, 65536, encoding=none_of_olmo),
    "step3p5": _by_layer_type(128000, 128, full_attention=rope(1e4), sliding_attention=rope(1e4)),
    "zaya": _by_layer_type(131072, 128, hybrid=rope(5e6, 0.5), hybrid_sliding=rope(1e4, 0.5)),
    "gemma": BEFORE_GEMMA_3,
    "gemma2": replace(BEFORE_GEMMA_3, full_attention_every=2),
    "gemma3_text": rotary_row(
        1e6, 131072, 256, keys=GEMMA_3, full_attention_every=6, defaults={"rope_local_base_freq": 1e4},
        inputs=GEMMA_TABLES, presets={"gemma-3-4b": GEMMA_3_4B}, vllm=True,
    ),
    "gemma3n_text": rotary_row(
        1e6, 32768, 256, keys=GEMMA_3, defaults={"rope_local_base_freq": 1e4},
        inputs=replace(GEMMA_TABLES, why_not="the layers get four mixtures of a sum (AltUp)"),
    ),
    "gemma4_text": _gemma_4(131072, PROPORTIONAL, vllm=True),
    "gemma4_unified_text": _gemma_4(262144, PROPORTIONAL),
    "diffusion_gemma_text": _gemma_4(131072, PROPORTIONAL, keys=replace(GEMMA_4, share_keys=SHARE)),
    "embedding_gemma2_text": _gemma_4(262144, LAYERS),
    **dict.fromkeys(
        ("t5gemma2_text", "t5gemma2_decoder"),
        rotary_row(
            None, 131072, 256, keys=RotaryKeys(per_layer=True), defaults={"rope_parameters": LAYERS},
            inputs=GEMMA_TABLES,
        ),
    ),
    **dict.fromkeys(("t5_gemma_module", "vaultgemma"), rotary_row(1e4, 8192, 256, inputs=GEMMA_TABLES)),
    "recurrent_gemma": rotary_row(1e4, share=0.5, inputs=InputTables(scale=_rounded_to_8_bits)),
    "ultrabert": rotary_row(
        None, 32768, keys=RotaryKeys(per_layer=True),
        defaults={"rope_parameters": {"sliding_attention": rope(1e4), "full_attention": rope(2.56e6)}},
    ),
    "modernbert-decoder": MODERN_BERT,
    "modernbert": replace(MODERN_BERT, projections={"Wqkv": one_after_another}, vllm=True),
}  # fmt: skip
