"""The row of an architecture: the one form in which every family of this package describes its models.

The layout of a model is in its code and not in its configuration, and so is what holds where a key is missing. Rows
were read off the code of `transformers`, which ``tests/models/`` runs to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from locant.arguments import Real, shown
from locant.errors import InputError, RangeError
from locant.kernels.rotary import Layout
from locant.models.config_values import Config, missing_key_error
from locant.models.weights import InputTables, RowOrder
from locant.positions.base import PositionEncoding
from locant.positions.pair_table import Pairs

PairsFactory = Callable[[Config, Config, int], Pairs]
Remark = Callable[[Config, PositionEncoding], str | None]


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """The layers of one type, in configurations older than a dictionary of rope parameters per layer type.

    Args:
        base_key: the key of their base.
        scaled: whether ``rope_scaling`` acts on them.
        only_base: the base that `transformers` gives them whatever the key holds.
    """

    base_key: str
    scaled: bool = True
    only_base: Real | None = None

    def __post_init__(self) -> None:
        _require_types(self)


@dataclass(frozen=True, kw_only=True)
class RotaryKeys:
    """The layout of an architecture's rotary positions, and which keys of its configuration hold the rest.

    Args:
        layout: which dimensions form a pair, ``"half"`` or ``"interleaved"``; ``None`` where it is not known.
        base_key: the base, where it stands outside the dictionary of rope parameters.
        fixed_base: a base that is written into the modeling code; such a model has no key for it.
        share_keys: keys outside the dictionary of rope parameters for how much of a head is rotated; none: the
            modeling code rotates the whole head, whatever the configuration holds.
        share_required: whether one of them has to be there though the class has no default for it.
        head_dim_key: the width of a head; ``"qk_rope_head_dim"`` in multi-head latent attention: of its rotated part.
        full_head_dim_key: the width of a head in layers of full attention, where it differs.
        rope_types: older names of rope types.
        weighted_longrope: whether its LongRoPE reads ``short_mscale`` and ``long_mscale`` for the attention factor.
        per_layer: whether the modeling code takes a dictionary of rope parameters per layer type.
        layer_kinds: the layer types, and the keys of configurations without such dictionaries.
        interleave_key: whether ``rope_interleave`` decides the layout.
        ntk_alpha: whether ``alpha`` beside the type ``dynamic`` makes a larger base, once for all lengths.
        pairs: makes the table of pairs, where they are more than a layout: from the configuration, the rope
            parameters of these layers and how many dimensions are rotated.
        temperature_key: how fast queries grow with their position, in the rope parameters, where the trained length is
            their step.
        default_sections: pairs per position axis that the modeling code takes without ``mrope_section``; ``None``: it
            has one axis.
        head_dim_of: makes the width of a head, where no key has it.
        layout_doubt: why published weights may have another layout than the code of `transformers`; a warning says it.
        not_converted: why the rows of its weights cannot be brought into another layout.
        no_rotation: why what its code does is no rotation, which has to be asked for.
        second_pairs: the table of the second members of pairs where that is so, and `pairs` that of the first.
        other_keys: keys in or beside the dictionary of rope parameters that say nothing about the rotation.
        layer_keys: keys that decide which layers are rotated.
        flat_keys: whether the base, the share and ``rope_scaling`` are read beside the dictionary of rope parameters;
            if not, they may only repeat what is in it.
        trained_beside: the trained length that its class takes beside the dictionary of rope parameters; it counts more
            than one inside.
        respell: rewrites a configuration with an older spelling into ``rope_parameters``, as its class does.
        rounds_down: whether its own default width is no multiple of its heads, and the code rounds a head down.
    """

    layout: Layout | None = "half"
    base_key: str = "rope_theta"
    fixed_base: Real | None = None
    share_keys: tuple[str, ...] = ()
    share_required: bool = False
    head_dim_key: str = "head_dim"
    full_head_dim_key: str | None = None
    rope_types: Mapping[str, str] = field(default_factory=dict[str, str])
    weighted_longrope: bool = False
    per_layer: bool = False
    layer_kinds: Mapping[str, LayerKind] = field(default_factory=dict[str, LayerKind])
    interleave_key: bool = False
    ntk_alpha: bool = False
    pairs: PairsFactory | None = None
    temperature_key: str | None = None
    default_sections: tuple[int, ...] | None = None
    head_dim_of: Callable[[Config], int] | None = None
    layout_doubt: str | None = None
    not_converted: str | None = None
    no_rotation: str | None = None
    second_pairs: PairsFactory | None = None
    other_keys: tuple[str, ...] = ()
    layer_keys: tuple[str, ...] = ()
    flat_keys: bool = True
    trained_beside: int | None = None
    respell: Callable[[Config], Config] | None = None
    rounds_down: bool = False

    def __post_init__(self) -> None:
        _require_types(self)

    @property
    def latent(self) -> bool:
        """Whether attention is multi-head latent attention, where a part of each head has no positions."""
        return self.head_dim_key == "qk_rope_head_dim"

    @property
    def base_keys(self) -> tuple[str, ...]:
        """Every key outside the dictionary of rope parameters that holds a base."""
        if self.fixed_base is not None or not self.flat_keys:
            return ()
        kinds = tuple(kind.base_key for kind in self.layer_kinds.values())
        return tuple(dict.fromkeys(kinds or (self.base_key,)))

    def base_keys_of(self, layer_type: str | None) -> tuple[str, ...]:
        """Those that hold the base of these layers."""
        kind = self.layer_kinds.get(layer_type or "")
        return self.base_keys if kind is None or not self.flat_keys else (kind.base_key,)

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key about rotary positions that this architecture reads, or that says nothing about the rotation."""
        others = (self.head_dim_key, "rope_interleave", *self.layer_keys, *self.other_keys)
        if not self.flat_keys:
            return ("rope_parameters", *others)
        dictionaries = () if self.fixed_base is not None else ("rope_parameters", "rope_scaling")
        shares = self.share_keys or ("partial_rotary_factor",)  # a whole head may be called a share of 1
        return (*dictionaries, *self.base_keys, *shares, *others)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture: how its configurations are read, and how its weights are ordered.

    Args:
        rotary: its rotary positions; ``None``: it has none.
        encoding: makes the encoding of the layers of a type, from the configuration and the layer type; where it
            gives ``None``, these layers have the rotary positions of `rotary`. Left out: all layers have them.
        layer_types: the kinds of layers whose encodings differ, by the configuration; left out: those that have rope
            parameters of their own.
        default_layer_type: the kind that is meant unless one is named.
        kinds_by_layer: the kind of each layer in order, by the configuration, where ``layer_types`` in it has other
            names, or may be missing.
        full_attention_every: of how many layers the last attends to everything, where a configuration with a window
            does not say; ``None``: all have the window.
        attribute_map: standard keys that its configuration has under another name, as in `transformers`:
            ``{"num_attention_heads": "n_attn"}``.
        defaults: what `transformers` takes where a key is missing; see `with_defaults`.
        inputs: where the tables of its input are, and what is done with their rows.
        projections: weights that hold queries or keys beside ``q_proj`` and ``k_proj``, and the order of their rows:
            ``{"qkv_proj": one_after_another}``.
        key_heads: the number of key/value heads, from the configuration and the number of query heads; where it gives
            ``None`` or is left out, ``num_key_value_heads`` has it.
        warnings: sentences on what is easily missed, or functions of the configuration and the encoding that give one.
        presets: configurations of published models by name, without their ``model_type``: the keys that matter here.
        extend_methods: the only methods of `extend` that its code takes; ``None``: all.
        vllm: whether vLLM has a model for it.
    """

    rotary: RotaryKeys | None = None
    encoding: Callable[[Config, str | None], PositionEncoding | None] | None = None
    layer_types: Callable[[Config], tuple[str, ...]] | None = None
    default_layer_type: str | None = None
    kinds_by_layer: Callable[[Config], tuple[str, ...]] | None = None
    full_attention_every: int | None = None
    attribute_map: Mapping[str, str] = field(default_factory=dict[str, str])
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    inputs: InputTables = field(default_factory=InputTables)
    projections: Mapping[str, RowOrder] = field(default_factory=dict[str, RowOrder])
    key_heads: Callable[[Config, int], int | None] | None = None
    warnings: tuple[str | Remark, ...] = ()
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    extend_methods: tuple[str, ...] | None = None
    vllm: bool = False

    def __post_init__(self) -> None:
        _require_types(self)
        if self.rotary is None and self.encoding is None:
            raise RangeError("got an architecture without rotary and without encoding", "rotary=RotaryKeys()")

    @property
    def rotary_keys(self) -> RotaryKeys:
        """Those of `rotary`; for an architecture without rotary positions, those of one that is not known."""
        return self.rotary or UNKNOWN

    @property
    def head_dim_required(self) -> bool:
        """Whether the width of a head has to be there: that of the class is no share of the model's width."""
        key = self.rotary_keys.head_dim_key
        return key in self.defaults or key != "head_dim"

    @property
    def share_required(self) -> bool:
        """Whether the rotated share of a head has to be there: that of the class is not the whole head."""
        keys = self.rotary_keys
        return keys.share_required or any(key in self.defaults for key in keys.share_keys)

    @property
    def scaling_required(self) -> bool:
        """Whether rope parameters have to be there: those of the class, for all layers, are a scaling."""
        return "rope_parameters" in self.defaults and not self.rotary_keys.per_layer

    def lacks(self, key: str, config: Config, meaning: str = "") -> InputError:
        """The error for a configuration without this key; its remedy is the default of the class, where it has one."""
        default = self.defaults.get(key)
        known = f"{default!r}, the default of {config.get('model_type')}"
        remedy = "..., as the model was trained with" if default is None else known
        return missing_key_error(config, f"{key}, {meaning}" if meaning else key, f"{key!r}: {remedy}")


def _require_types(row: Any) -> None:
    """Raise where a field of a row is of another type; what a mapping or a tuple holds is not looked at."""
    for each in fields(row):
        value, kinds = getattr(row, each.name), _kinds(type(row), each.name)
        choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
        classes = tuple(get_origin(kind) or kind for kind in kinds if get_origin(kind) is not Literal)
        if value not in choices and not isinstance(value, classes):
            expected = " or ".join(map(repr, choices)) or each.type
            got = f"got {shown(value)} for {each.name} of {type(row).__name__}, expected {expected}"
            raise RangeError(got, f"help(locant.models.{type(row).__name__})")


@cache
def _kinds(row: type, name: str) -> tuple[Any, ...]:
    hint = get_type_hints(row)[name]
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


WHOLE = RotaryKeys()
"""Llama's."""

SHARE = ("partial_rotary_factor",)


def rotary_row(
    base: Real | None = None,
    max_seq_len: int | None = None,
    head_dim: int | None = None,
    share: float | None = None,
    *,
    keys: RotaryKeys = WHOLE,
    **row: Any,
) -> Architecture:
    """An architecture with rotary positions, by what its class takes where a key is missing.

    With a `share`, that much of a head is rotated, and ``partial_rotary_factor`` is read. `row` are other fields of
    `Architecture`; its ``defaults`` are added to these.
    """
    sizes = {"rope_theta": base, "max_position_embeddings": max_seq_len, "head_dim": head_dim, SHARE[0]: share}
    defaults = {key: value for key, value in sizes.items() if value is not None} | row.pop("defaults", {})
    keys = keys if share is None or keys.share_keys else replace(keys, share_keys=SHARE)
    return Architecture(rotary=keys, defaults=defaults, **row)


def warn_if(test: Callable[[Config, PositionEncoding], bool], text: str) -> Remark:
    """A warning for the configurations and encodings for which this holds, with what of them it names in braces."""
    return lambda config, encoding: text.format(config=config, encoding=encoding) if test(config, encoding) else None


UNKNOWN = RotaryKeys(layout=None, share_keys=("partial_rotary_factor", "rotary_pct", "rotary_dim"), per_layer=True)
"""What is read of an architecture that is not known; its layout has to be given."""
