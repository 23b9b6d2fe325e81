"""Models whose layers differ: some layers have no positions, or each type of layers has other rope parameters.

Windows, a list, or a base of 0 decide which layers are rotated. ModernBERT, and Gemma since its third version, have a
base for each type of layers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from locant.arguments import short_repr
from locant.errors import InputError
from locant.models.architecture import SHARE, Architecture, LayerKind, RotaryKeys, rotary_row, warn_if
from locant.models.config_values import (
    WIDTHS,
    Config,
    flag,
    integer,
    integer_at,
    layer_types_in,
    number,
    required,
    required_value,
)
from locant.models.rope_parameters import rope_dictionary
from locant.models.weights import RMS_NORMED, InputTables, one_after_another
from locant.positions.base import PositionEncoding

WINDOWED = ("sliding_attention", "full_attention")
ROTATION_KINDS = ("with", "without")
LISTED_KEYS = ("no_rope_layers", "no_rope_layer_interval")
OFF = "'use_mem_rope': false, unless the model was trained with it"
DENSE_PATTERN = "prefix_dense_sliding_window_pattern"

EncodingFactory = Callable[[Config, str | None], PositionEncoding | None]
"""A function that returns the encoding of the layers of a type, or ``None`` for rotary positions."""
KindsByLayer = Callable[[Config], tuple[str, ...]]
"""A function that returns the kind of each layer, in order."""


def windowed_kinds(config: Config) -> tuple[str, ...]:
    """Return ``sliding_attention`` and ``full_attention`` if any layer has a window (Cohere 2, Exaone 4)."""
    window = required_value(config, "sliding_window", "'sliding_window': its width, or null if no layer has a window")
    return () if window is None else WINDOWED


def _nope_if(test: Callable[[Config, str | None], bool]) -> EncodingFactory:
    """Return a function that gives no positions to layers that pass this test, and rotary positions to all others."""
    return lambda config, layer_type: PositionEncoding() if test(config, layer_type) else None


def nope_in_full_attention(*, rotary_without_windows: bool) -> EncodingFactory:
    """Give rotary positions only to layers with sliding attention.

    Without windows, all layers are rotated, or none is.
    """
    return _nope_if(
        lambda config, kind: kind == "full_attention" if windowed_kinds(config) else not rotary_without_windows
    )


nope_if_full = _nope_if(lambda config, kind: kind == "full_attention")
"""The positions of AFMoE, whose windows do not matter."""
nope_if_without = _nope_if(lambda config, kind: kind == "without")
"""The positions of the kinds in `listed_kinds` and ``layer_rope_theta``."""
nope_unless_sliding = _nope_if(lambda config, kind: kind != "sliding_attention")
"""The positions of LaraMini, whose layers have a third kind."""
nope_for_granite = _nope_if(lambda config, kind: config.get("position_embedding_type") != "rope")
nope_for_zamba = _nope_if(lambda config, kind: not flag("use_mem_rope", required_value(config, "use_mem_rope", OFF)))
nope_for_olmo = _nope_if(
    lambda config, kind: isinstance(rope := config.get("rope_parameters"), Mapping) and rope.get("rope_theta") is None
)
"""The positions of OLMo Hybrid, whose released models have null for the base."""


def _cohere_2_moe(config: Config, layer_type: str | None) -> PositionEncoding | None:
    """Return the encoding of `nope_if_full`, and require the key for dense layers."""
    if layer_type == "full_attention":
        required_value(config, DENSE_PATTERN, "1, as released models have it")
    return nope_if_full(config, layer_type)


def _kinds_by_base(config: Config) -> tuple[str, ...]:
    """Return the kinds of layers in ``layer_rope_theta``, a list with a base for each layer, or 0 for no positions.

    Raise `InputError` if there are several bases, because each of them needs another encoding.
    """
    bases = config.get("layer_rope_theta")
    if bases is None:
        return ()
    if not isinstance(bases, (list, tuple)) or not bases:
        raise InputError(
            f"got layer_rope_theta={short_repr(bases)}, expected a base for each layer", "[10000.0, 0, ...]"
        )
    distinct = {number("layer_rope_theta", base, low=0) for base in bases}
    if len(distinct - {0.0}) > 1:
        got = f"got layer_rope_theta with {len(distinct - {0.0})} bases, expected one base for all layers"
        raise InputError(got, "pass one configuration for each base, with only its layers in layer_rope_theta")
    return _kinds({base != 0 for base in distinct})


def _base_kinds_by_layer(last: bool) -> KindsByLayer:
    """Return the kind of each layer by ``layer_rope_theta``.

    Without the key, every fourth layer has no positions, counted from the last or from the first.
    """

    def layers(config: Config) -> tuple[str, ...]:
        if config.get("layer_rope_theta") is not None:
            _kinds_by_base(config)
            return tuple(ROTATION_KINDS[base == 0] for base in config["layer_rope_theta"])
        count = required(config, "num_hidden_layers")
        return tuple(ROTATION_KINDS[(count - 1 - layer if last else layer + 1) % 4 == 0] for layer in range(count))

    return layers


def listed_kinds_by_layer(*, default_interval: int | None = None) -> KindsByLayer:
    """Return the kind of each layer, by the keys of `listed_kinds`."""
    return lambda config: tuple(ROTATION_KINDS[not has] for has in _rotary_layers(config, default_interval))


def full_every(step: int, *keys: str, first: bool = False) -> KindsByLayer:
    """Give full attention to the last (or the `first`) of every `step` layers, and sliding attention to the others.

    A value under one of `keys` replaces `step`. If the configuration has ``layer_types``, these decide instead.
    """

    def layers(config: Config) -> tuple[str, ...]:
        if types := layer_types_in(config):
            return types
        every = integer_at(config, *keys) or step
        count = required(config, "num_hidden_layers")
        return tuple(WINDOWED[(layer if first else layer + 1) % every == 0] for layer in range(count))

    return layers


def all_layers(kind: str) -> KindsByLayer:
    """Give all layers one kind, unless ``layer_types`` names others."""
    return lambda config: layer_types_in(config) or (kind,) * required(config, "num_hidden_layers")


def listed_kinds(*, default_interval: int | None = None) -> Callable[[Config], tuple[str, ...]]:
    """Return the kinds of layers, ``with`` and ``without`` rotary positions, or an empty tuple if all layers have them.

    ``no_rope_layers`` is a list with 1 for each layer that does have rotary positions. If ``no_rope_layer_interval`` is
    4, every fourth layer is not rotated. Published configurations of Llama 4 have an empty list for the default
    interval.
    """
    return lambda config: _kinds(set(_rotary_layers(config, default_interval)))


def _kinds(rotary: Collection[bool]) -> tuple[str, ...]:
    """Return the kinds of layers that occur, or an empty tuple if all have rotary positions."""
    kinds = tuple(kind for kind, has in zip(ROTATION_KINDS, (True, False), strict=True) if has in rotary)
    return () if kinds == ("with",) else kinds


def _rotary_layers(config: Config, default_interval: int | None) -> tuple[bool, ...]:
    """Return whether each layer has rotary positions."""
    listed = config.get("no_rope_layers")
    every = config.get("no_rope_layer_interval", default_interval if listed == [] else None)
    if listed or every is None or (listed == [] and default_interval is None):
        return _read_no_rope_layers(config)
    every = integer("no_rope_layer_interval", every)
    return tuple((layer + 1) % every != 0 for layer in range(required(config, "num_hidden_layers")))


def _read_no_rope_layers(config: Config) -> tuple[bool, ...]:
    remedy = "write 1 for each layer with positions, else 0"
    listed = required_value(config, "no_rope_layers", remedy)
    count = integer("num_hidden_layers", config["num_hidden_layers"]) if "num_hidden_layers" in config else None
    is_valid = isinstance(listed, (list, tuple)) and all(isinstance(one, int) and one in (0, 1) for one in listed)
    if not is_valid or not listed or count not in (None, len(listed)):
        expected = "ones and zeros" if count is None else f"{count} ones and zeros"
        raise InputError(f"got no_rope_layers={short_repr(listed)}, expected a list of {expected}", remedy)
    return tuple(bool(one) for one in listed)


def _full_every_sixth_and_last(config: Config) -> tuple[str, ...]:
    """Return the kinds of layers: every sixth and the last one have full attention (Beam, Gemma 4)."""
    return layer_types_in(config) or (*full_every(6)(config)[:-1], "full_attention")


def _flint_layers(config: Config) -> tuple[str, ...]:
    """Return the kinds of layers: the first two, the last one and every fourth have full attention."""
    count = 0 if layer_types_in(config) else required(config, "num_hidden_layers")
    full = (layer < 2 or layer % 4 == 1 or layer == count - 1 for layer in range(count))
    return layer_types_in(config) or tuple(WINDOWED[one] for one in full)


def _mimo_layers(config: Config) -> tuple[str, ...]:
    """Return the kinds of layers: the first one and every sixth have full attention, as in ``hybrid_layer_pattern``."""
    return layer_types_in(config) or ("full_attention", *full_every(6)(config)[1:])


def _repeat_pattern(config: Config, *pattern: str) -> tuple[str, ...]:
    return tuple(pattern[layer % len(pattern)] for layer in range(required(config, "num_hidden_layers")))


def _inkling_2(config: Config, layer_type: str | None) -> PositionEncoding:
    """Warn that the model has no rotation, but a bias that it computes from the hidden state of each query."""
    warnings.warn(
        f"{config['model_type']} has no rotation, and this encoding adds nothing. Its positions are a learned bias by "
        "distance, which its code clips; locant.Inkling has the bias without the clipping",
        stacklevel=6,
    )
    return PositionEncoding()


LARA = ("sliding_attention", "full_attention", "linear_attention")
LARA_PATTERN = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")
BY_RECURRENCE = "nothing is rotated: three of four layers are recurrent, and the others see the order in their output"
DENSE_LAYERS = warn_if(
    lambda config, encoding: config.get(DENSE_PATTERN) == 1,
    "layers of full attention have no positions, except dense layers, which are rotated like sliding ones",
)
SCALED_LAYERS = warn_if(
    lambda config, encoding: (
        config.get("rope_scaling_layers") is not None
        and getattr(encoding, "scaling", None) is not None
        and len(config["rope_scaling_layers"]) != config.get("num_hidden_layers")
    ),
    "only the layers in rope_scaling_layers have this scaling: the others have the same base without it",
)


def _row_by_layer_type(
    max_seq_len: int,
    head_dim: int,
    share_required: bool = False,
    layers: KindsByLayer | None = None,
    **ropes: dict[str, Any],
) -> Architecture:
    """Return a row with rope parameters and a rotated share per layer type. Keys outside them are not read."""
    keys = RotaryKeys(per_layer=True, share_keys=SHARE, share_required=share_required, flat_keys=False)
    defaults = {"rope_parameters": ropes}
    return rotary_row(None, max_seq_len, head_dim, keys=keys, defaults=defaults, kinds_by_layer=layers)


def kinds_from_base_keys(**base_keys: str) -> dict[str, LayerKind]:
    """Return the kinds of layers of a configuration that has a key for the base of each kind."""
    return {name: LayerKind(base_key=key) for name, key in base_keys.items()}


def rope(base: float, share: float | None = None, rope_type: str = "default") -> dict[str, Any]:
    """Return the rope parameters of one type of layers."""
    part = {} if share is None else {"partial_rotary_factor": share}
    return {"rope_type": rope_type, "rope_theta": base, **part}


def _row_by_base(base: float | None, max_seq_len: int, head_dim: int | None = None, **row: Any) -> Architecture:
    """Return a row with a base for each layer in ``layer_rope_theta``. A base of 0 means no positions."""
    return rotary_row(
        base,
        max_seq_len,
        head_dim,
        keys=RotaryKeys(layer_keys=("layer_rope_theta",)),
        encoding=nope_if_without,
        layer_types=_kinds_by_base,
        **row,
    )


def _windowed_row(
    max_seq_len: int, head_dim: int | None, window: int, layers: KindsByLayer, *, rotary_without_windows: bool
) -> Architecture:
    return rotary_row(
        1e4,
        max_seq_len,
        head_dim,
        encoding=nope_in_full_attention(rotary_without_windows=rotary_without_windows),
        layer_types=windowed_kinds,
        kinds_by_layer=layers,
        defaults={"sliding_window": window},
    )


def _step_ropes(config: Config) -> Config:
    """Rewrite Step-3.5 as published: lists of bases and shares by layer, and a scaling for layers of full attention."""
    types, ropes = layer_types_in(config), rope_dictionary(config)
    kinds = dict.fromkeys(types or ("full_attention",))
    if any(isinstance(ropes.get(kind), Mapping) for kind in (*kinds, *WINDOWED)):
        return config
    values = {
        name: value if isinstance(value := config.get(key), (list, tuple)) else [value] * max(len(types), 1)
        for name, key in (("rope_theta", "rope_theta"), (SHARE[0], "partial_rotary_factors"))
    }
    short = [name for name, value in values.items() if len(value) < len(types)]
    if short:
        got = f"got {short[0]} of {len(values[short[0]])} layers, and layer_types of {len(types)}"
        raise InputError(got, "write one number for each layer")
    ropes_by_type: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        place = types.index(kind) if types else 0
        ropes_by_type[kind] = {name: value[place] for name, value in values.items() if value[place] is not None}
    if "full_attention" in ropes_by_type:
        ropes_by_type["full_attention"] |= {**({"rope_type": "default"} if "type" in ropes else {}), **ropes}
    rest = {key: value for key, value in config.items() if key not in STEP_KEYS}
    return {**rest, "rope_parameters": ropes_by_type}


STEP_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factors")


def _keep_attention_layers(config: Config) -> Config:
    """Rewrite Dory as published, whose ``layer_types`` lists attention and MLP alternately."""
    types = layer_types_in(config)
    if "mlp" not in types:
        return config
    return {**config, "layer_types": types[::2], "num_hidden_layers": required(config, "num_hidden_layers") // 2}


def _ultrabert_ropes(config: Config) -> Config:
    """Rewrite a list with a base for each layer as rope parameters per layer type, using the windows of the layers."""
    bases, windows = config.get("rope_theta"), config.get("attention_windows")
    if not isinstance(bases, (list, tuple)) or config.get("rope_parameters"):
        return config
    types = layer_types_in(config) or tuple(WINDOWED[not window] for window in windows or ())
    if len(types) != len(bases):
        got = f"got rope_theta of {len(bases)} layers, and layer_types of {len(types)}"
        raise InputError(got, "write a base for each layer, or 'rope_parameters' per layer type")
    ropes = {kind: {"rope_theta": base} for kind, base in zip(types, bases, strict=True)}
    rest = {key: value for key, value in config.items() if key not in ("rope_theta", "attention_windows")}
    return {**rest, "layer_types": types, "rope_parameters": ropes}


def drop_outer_base(config: Config) -> Config:
    """Remove the base outside ``rope_parameters`` if there is a base inside, which is used (Bailing, Cohere 2 MoE)."""
    rope = config.get("rope_parameters")
    inside = isinstance(rope, Mapping) and rope.get("rope_theta") is not None
    return {key: value for key, value in config.items() if not inside or key != "rope_theta"}


def _reject_rope_scaling(config: Config) -> Config:
    """Raise `InputError` if a Cohere 2 MoE configuration has ``rope_scaling``, which its code does not read."""
    if not config.get("rope_parameters") and rope_dictionary(config):
        got = f"got rope_scaling={short_repr(config['rope_scaling'])}, which cohere2_moe does not read"
        raise InputError(got, "rename it to 'rope_parameters', if the model was trained with it")
    return drop_outer_base(config)


def _bfloat16_root_of_width(config: Config) -> float:
    """Return the square root of the width rounded to bfloat16, which RecurrentGemma uses in any dtype."""
    mantissa, exponent = math.frexp(required(config, *WIDTHS) ** 0.5)
    return math.ldexp(round(mantissa * 2**8), exponent - 8)


COHERE_2_MOE = RotaryKeys(layout="interleaved", respell=_reject_rope_scaling)
GEMMA_TABLES = InputTables(scale="sqrt_d_model_rounded", default_padding=0)
GEMMA_3 = RotaryKeys(
    per_layer=True,
    layer_kinds={
        "full_attention": LayerKind(base_key="rope_theta"),
        "sliding_attention": LayerKind(base_key="rope_local_base_freq", scaled=False),
    },
)
GEMMA_4 = RotaryKeys(full_head_dim_key="global_head_dim", per_layer=True, flat_keys=False)
SIXTH = full_every(6, "sliding_window_pattern")

LAYERS = {"sliding_attention": rope(1e4), "full_attention": rope(1e6)}
PROPORTIONAL = {**LAYERS, "full_attention": rope(1e6, 0.25, "proportional")}
GEMMA_3_4B = {
    "vocab_size": 262208, "hidden_size": 2560, "num_attention_heads": 8, "head_dim": 256, "num_hidden_layers": 34,
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "sliding_window": 1024, "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip


def _gemma_4(max_seq_len: int, rope: Mapping[str, Any], *, keys: RotaryKeys = GEMMA_4, **row: Any) -> Architecture:
    defaults = {"global_head_dim": 512, "rope_parameters": rope}
    layers = {"kinds_by_layer": _full_every_sixth_and_last}
    return rotary_row(None, max_seq_len, 256, keys=keys, defaults=defaults, inputs=GEMMA_TABLES, **layers, **row)


BEFORE_GEMMA_3 = rotary_row(1e4, 8192, 256, inputs=GEMMA_TABLES, vllm=True)

MODERN_BERT = Architecture(
    rotary=RotaryKeys(
        per_layer=True,
        layer_kinds=kinds_from_base_keys(full_attention="global_rope_theta", sliding_attention="local_rope_theta"),
    ),
    defaults={"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0, "max_position_embeddings": 8192},
    kinds_by_layer=full_every(3, "global_attn_every_n_layers", first=True),
    inputs=InputTables(
        tokens="embeddings.tok_embeddings",
        norm="embeddings.norm",
        norm_eps="norm_eps",
        norm_bias_key="norm_bias",
        default_padding=50283,
        dropout_key="embedding_dropout",
    ),
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "afmoe": rotary_row(
        1e4, 16384, 128, encoding=nope_if_full, layer_types=lambda config: WINDOWED,
        kinds_by_layer=full_every(4, "global_attn_every_n_layers"),
    ),
    "dory": rotary_row(
        None, 8192, 256, kinds_by_layer=full_every(4),
        keys=RotaryKeys(per_layer=True, flat_keys=False, respell=_keep_attention_layers),
        defaults={"rope_parameters": {"sliding_attention": rope(1e4), "full_attention": rope(1e7)}},
    ),
    "beam": rotary_row(
        None, 8192, 128, keys=RotaryKeys(per_layer=True, flat_keys=False), kinds_by_layer=_full_every_sixth_and_last,
        defaults={"rope_parameters": {"sliding_attention": rope(1e4), "full_attention": None}},
    ),
    "cohere2_moe": rotary_row(
        1e4, 8192, 128, keys=COHERE_2_MOE, encoding=_cohere_2_moe, layer_types=windowed_kinds,
        defaults={"sliding_window": 4096, DENSE_PATTERN: 1},
        warnings=(DENSE_LAYERS,),
    ),
    "exaone_moe": _windowed_row(2048, None, 4096, full_every(4, "sliding_window_pattern"), rotary_without_windows=True),
    "flint": _windowed_row(262144, 128, 513, _flint_layers, rotary_without_windows=False),
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text"), Architecture(encoding=_inkling_2)),
    "kimi_linear": Architecture(encoding=lambda config, kind: PositionEncoding(), warnings=(BY_RECURRENCE,)),
    "lara_mini": rotary_row(
        1e4, 131072, 128, encoding=nope_unless_sliding, layer_types=lambda config: LARA,
        kinds_by_layer=lambda config: layer_types_in(config) or _repeat_pattern(config, *LARA_PATTERN),
    ),
    "granite_swa": _row_by_base(1e4, 8192),
    "granitemoe_swa": _row_by_base(1e4, 2048),
    "kolibri1": _windowed_row(262144, 128, 513, full_every(5), rotary_without_windows=True),
    "laguna": _row_by_layer_type(
        131072, 128, layers=all_layers("full_attention"), full_attention=rope(5e5, 0.5),
        sliding_attention=rope(1e4, 1.0),
    ),
    "lfm3": _row_by_layer_type(128000, 128, sliding_attention=rope(1e4), full_attention=rope(1e6, 0.5, "proportional")),
    "mellum": _row_by_layer_type(
        131072, 128, layers=all_layers("full_attention"), full_attention=rope(5e5), sliding_attention=rope(1e4)
    ),
    "mimo_v2_flash": _row_by_layer_type(
        131072, 192, True, _mimo_layers, full_attention=rope(5e6, 0.334), sliding_attention=rope(1e4, 0.334)
    ),
    "molmo2_text": rotary_row(
        1e4, 36864, 128, keys=RotaryKeys(other_keys=("rope_scaling_layers",)), warnings=(SCALED_LAYERS,),
    ),
    "muse_glimmer_text": _row_by_base(
        1e4, 131072, 128, inputs=RMS_NORMED, kinds_by_layer=_base_kinds_by_layer(last=True)
    ),
    "muse_spark_text": _row_by_base(
        None, 1048576, 64, inputs=RMS_NORMED, kinds_by_layer=_base_kinds_by_layer(last=True),
        defaults={"rope_parameters": rope(5e5)},
    ),
    "olmo_hybrid": rotary_row(1e4, 65536, encoding=nope_for_olmo),
    "step3p5": rotary_row(
        1e4, 128000, 128,
        keys=RotaryKeys(per_layer=True, share_keys=SHARE, respell=_step_ropes),
        kinds_by_layer=all_layers("full_attention"),
    ),
    "zaya": _row_by_layer_type(
        131072, 128, layers=all_layers("hybrid"), hybrid=rope(5e6, 0.5), hybrid_sliding=rope(1e4, 0.5)
    ),
    "gemma": BEFORE_GEMMA_3,
    "gemma2": replace(BEFORE_GEMMA_3, full_attention_every=2),
    "gemma3_text": rotary_row(
        1e6, 131072, 256, keys=GEMMA_3, full_attention_every=6, defaults={"rope_local_base_freq": 1e4},
        inputs=GEMMA_TABLES, presets={"gemma-3-4b": GEMMA_3_4B}, vllm=True,
    ),
    "gemma3n_text": rotary_row(
        1e6, 32768, 256, keys=GEMMA_3, defaults={"rope_local_base_freq": 1e4},
        inputs=GEMMA_TABLES, kinds_by_layer=full_every(5),
    ),
    "gemma4_text": _gemma_4(131072, PROPORTIONAL, vllm=True),
    "gemma4_unified_text": _gemma_4(262144, PROPORTIONAL),
    "diffusion_gemma_text": _gemma_4(131072, PROPORTIONAL, keys=replace(GEMMA_4, share_keys=SHARE)),
    "embedding_gemma2_text": _gemma_4(262144, LAYERS),
    **dict.fromkeys(
        ("t5gemma2_text", "t5gemma2_decoder"),
        rotary_row(
            1e6, 131072, 256, keys=GEMMA_3, defaults={"rope_local_base_freq": 1e4}, inputs=GEMMA_TABLES,
            kinds_by_layer=SIXTH,
        ),
    ),
    **dict.fromkeys(("t5_gemma_module", "vaultgemma"), rotary_row(1e4, 8192, 256, inputs=GEMMA_TABLES)),
    "recurrent_gemma": rotary_row(1e4, share=0.5, inputs=InputTables(scale=_bfloat16_root_of_width, default_padding=0)),
    "ultrabert": rotary_row(
        None, 32768, keys=RotaryKeys(per_layer=True, respell=_ultrabert_ropes), kinds_by_layer=full_every(3),
        defaults={"rope_parameters": {"sliding_attention": rope(1e4), "full_attention": rope(2.56e6)}},
    ),
    "modernbert-decoder": MODERN_BERT,
    "modernbert": replace(MODERN_BERT, projections={"Wqkv": one_after_another}, vllm=True),
}  # fmt: skip
