"""The row of an architecture: the form in which every family of this package describes its models.

The layout of a model and the defaults of missing keys are in its code, not in its configuration. Rows were
written from the code of `transformers`, and ``tests/models/`` compares them with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from locant.arguments import Real, short_repr
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
        base_key: the key of the base of these layers.
        scaled: whether ``rope_scaling`` acts on these layers.
        only_base: the base that `transformers` uses for these layers, even if the key holds another base.
    """

    base_key: str
    scaled: bool = True
    only_base: Real | None = None

    def __post_init__(self) -> None:
        _require_types(self)


@dataclass(frozen=True, kw_only=True)
class RotaryKeys:
    """The layout of the rotary positions of an architecture, and the keys of its configuration that hold the rest.

    Args:
        layout: the dimensions that form a pair, ``"half"`` or ``"interleaved"``. ``None`` if it is unknown.
        base_key: the key of the base outside the rope parameters.
        fixed_base: a base in the modeling code. Such a model has no key for it.
        share_keys: keys outside the rope parameters for the rotated share of a head. If there are none, the modeling
            code rotates the whole head, even if the configuration has such a key.
        share_required: whether one of `share_keys` is required, although the class has no default for it.
        head_dim_key: the key of the width of a head, or of its rotated part in multi-head latent attention, where it is
            ``"qk_rope_head_dim"``.
        full_head_dim_key: the key of the width of a head in layers of full attention, if it differs.
        rope_types: older names of rope types.
        weighted_longrope: whether its LongRoPE reads ``short_mscale`` and ``long_mscale`` for the attention factor.
        per_layer: whether the modeling code takes rope parameters per layer type.
        layer_kinds: the layer types, and their keys in configurations without rope parameters per layer type.
        interleave_key: whether ``rope_interleave`` decides the layout.
        ntk_alpha: whether ``alpha`` with the type ``dynamic`` makes a larger base, once for all lengths.
        pairs: a function that returns the table of pairs, if a layout cannot describe it. Its arguments are the
            configuration, the rope parameters of these layers and the number of rotated dimensions.
        temperature_key: the key in the rope parameters for how fast queries grow with their position. The trained
            length is the step of the growth.
        default_sections: the number of pairs of each position axis if there is no ``mrope_section``. ``None`` if the
            model has one axis.
        head_dim_of: a function that returns the width of a head, if no key has it.
        layout_doubt: why published weights may have another layout than the code of `transformers`, for a warning.
        not_converted: why the rows of its weights cannot be converted to another layout.
        no_rotation: why its code does not rotate. Users then have to set `allow_no_rotation`.
        second_pairs: the table of the second members of pairs in a model without rotation. `pairs` is the table of the
            first members.
        other_keys: keys in or outside the rope parameters that do not affect the rotation.
        layer_keys: keys that decide which layers are rotated.
        flat_keys: whether the base, the share and ``rope_scaling`` are read outside the rope parameters. If not, they
            may only repeat the values inside.
        trained_beside: the trained length that its class has outside the rope parameters. It overrides the one inside.
        respell: a function that rewrites a configuration with an older spelling into ``rope_parameters``, as its class
            does.
        rounds_down: whether its default width is not a multiple of its number of heads, and the code rounds the width
            of a head down.
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
        """Return whether it has multi-head latent attention, in which a part of each head has no positions."""
        return self.head_dim_key == "qk_rope_head_dim"

    @property
    def base_keys(self) -> tuple[str, ...]:
        """Every key outside the rope parameters that holds a base."""
        if self.fixed_base is not None or not self.flat_keys:
            return ()
        kinds = tuple(kind.base_key for kind in self.layer_kinds.values())
        return tuple(dict.fromkeys(kinds or (self.base_key,)))

    def base_keys_of(self, layer_type: str | None) -> tuple[str, ...]:
        """Return the `base_keys` of these layers."""
        kind = self.layer_kinds.get(layer_type or "")
        return self.base_keys if kind is None or not self.flat_keys else (kind.base_key,)

    @property
    def keys(self) -> tuple[str, ...]:
        """Every rotary key that this architecture reads, or that does not affect the rotation."""
        others = (self.head_dim_key, "rope_interleave", *self.layer_keys, *self.other_keys)
        if not self.flat_keys:
            return ("rope_parameters", *others)
        dictionaries = () if self.fixed_base is not None else ("rope_parameters", "rope_scaling")
        shares = self.share_keys or ("partial_rotary_factor",)  # a share of 1 is a whole head
        return (*dictionaries, *self.base_keys, *shares, *others)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture: how to read its configurations, and the order of its weights.

    Args:
        rotary: its rotary positions, or ``None`` if it has none.
        encoding: a function of the configuration and the layer type that returns the encoding of these layers, or
            ``None`` if they have the rotary positions of `rotary`. Without it, all layers have rotary positions.
        layer_types: a function of the configuration that returns the kinds of layers whose encodings differ. Without
            it, these are the kinds that have their own rope parameters.
        default_layer_type: the kind to use if the caller does not name one.
        kinds_by_layer: a function of the configuration that returns the kind of each layer in order, for models whose
            ``layer_types`` have other names, or may be missing.
        full_attention_every: a number n. If a configuration with a window has no ``layer_types``, the last of every n
            layers has full attention. ``None``: all layers have the window.
        attribute_map: standard keys that have another name in its configuration, as in `transformers`:
            ``{"num_attention_heads": "n_attn"}``.
        defaults: the values that `transformers` uses for missing keys. See `with_defaults`.
        inputs: the tables of its input embedding, and how its code uses their rows.
        projections: weights other than ``q_proj`` and ``k_proj`` that hold queries or keys, and the order of their
            rows: ``{"qkv_proj": one_after_another}``.
        key_heads: a function of the configuration and the number of query heads that returns the number of key/value
            heads. Without it, or if it returns ``None``, ``num_key_value_heads`` is read.
        warnings: sentences on what is easily missed, or functions of the configuration and the encoding that return
            such a sentence.
        presets: configurations of published models by name, without ``model_type``, and with only the keys that matter
            here.
        extend_methods: the methods of `extend` that its code supports. ``None``: all.
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
        """`rotary`, or the keys of an unknown architecture if it has no rotary positions."""
        return self.rotary or UNKNOWN

    @property
    def head_dim_required(self) -> bool:
        """Return whether the width of a head is required, because the class does not derive it from other sizes."""
        key = self.rotary_keys.head_dim_key
        return key in self.defaults or key != "head_dim"

    @property
    def share_required(self) -> bool:
        """Return whether the rotated share of a head is required, because the default of the class is not 1."""
        keys = self.rotary_keys
        return keys.share_required or any(key in self.defaults for key in keys.share_keys)

    @property
    def scaling_required(self) -> bool:
        """Return whether rope parameters are required, because the class has a scaling for all layers by default."""
        return "rope_parameters" in self.defaults and not self.rotary_keys.per_layer

    def lacks(self, key: str, config: Config, meaning: str = "") -> InputError:
        """Return the error for a configuration without this key. Its remedy is the default of the class, if any."""
        default = self.defaults.get(key)
        value = f"{default!r}, the default of {config.get('model_type')}"
        remedy = "..., as the model was trained with" if default is None else value
        return missing_key_error(config, f"{key}, {meaning}" if meaning else key, f"{key!r}: {remedy}")


def _require_types(row: Any) -> None:
    """Raise `RangeError` if a field of a row has a wrong type. The contents of a mapping or a tuple are not checked."""
    for each in fields(row):
        value, kinds = getattr(row, each.name), _kinds(type(row), each.name)
        choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
        classes = tuple(get_origin(kind) or kind for kind in kinds if get_origin(kind) is not Literal)
        if value not in choices and not isinstance(value, classes):
            expected = " or ".join(map(repr, choices)) or each.type
            got = f"got {short_repr(value)} for {each.name} of {type(row).__name__}, expected {expected}"
            raise RangeError(got, f"help(locant.models.{type(row).__name__})")


@cache
def _kinds(row: type, name: str) -> tuple[Any, ...]:
    hint = get_type_hints(row)[name]
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


LLAMA_KEYS = RotaryKeys()
"""The keys of Llama."""

SHARE = ("partial_rotary_factor",)


def rotary_row(
    base: Real | None = None,
    max_seq_len: int | None = None,
    head_dim: int | None = None,
    share: float | None = None,
    *,
    keys: RotaryKeys = LLAMA_KEYS,
    **row: Any,
) -> Architecture:
    """Return the row of an architecture with rotary positions, from the defaults of its class.

    With a `share`, only that share of a head is rotated, and ``partial_rotary_factor`` is read. `row` has other fields
    of `Architecture`. Its ``defaults`` are added to the first arguments.
    """
    sizes = {"rope_theta": base, "max_position_embeddings": max_seq_len, "head_dim": head_dim, SHARE[0]: share}
    defaults = {key: value for key, value in sizes.items() if value is not None} | row.pop("defaults", {})
    keys = keys if share is None or keys.share_keys else replace(keys, share_keys=SHARE)
    return Architecture(rotary=keys, defaults=defaults, **row)


def warn_if(test: Callable[[Config, PositionEncoding], bool], text: str) -> Remark:
    """Return a warning for configurations and encodings that pass this test. Braces in `text` may refer to both."""
    return lambda config, encoding: text.format(config=config, encoding=encoding) if test(config, encoding) else None


UNKNOWN = RotaryKeys(layout=None, share_keys=("partial_rotary_factor", "rotary_pct", "rotary_dim"), per_layer=True)
"""The keys that are read for an unknown architecture, whose layout the caller has to pass."""
