"""From a configuration to the position encoding of its model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from locant.arguments import flag, short_repr
from locant.errors import ConfigWarning, InputError, LocantError, Remedy
from locant.kernels.rotary import Layout
from locant.models.architecture import UNKNOWN, Architecture
from locant.models.config_values import NUM_LAYERS, Config, layer_types_in, required
from locant.models.mixed_layers import full_every
from locant.models.registry import class_sizes, flat_part, read_config, read_known_config, with_defaults
from locant.models.rope_parameters import ropes_by_layer
from locant.models.rotary_config import Reading, read_rotary, second_members
from locant.models.unread_keys import CONTRADICTION
from locant.positions.angles import AngleMode
from locant.positions.base import PositionEncoding
from locant.positions.encodings.learned import Learned
from locant.positions.encodings.rotary import Rotary
from locant.positions.positions import Positions

E = TypeVar("E")


def encoding_from_config(
    config: Config | object,
    *,
    layer_type: str | None = None,
    angles: AngleMode = "exact",
    layout: Layout | None = None,
    allow_no_rotation: bool = False,
) -> PositionEncoding:
    """Return the position encoding of a published model, from its Hugging Face configuration.

    Tables are untrained. The rows of a checkpoint fit into them as they are. If a key that matters is missing, the
    default of `transformers` for this architecture is used (`locant.models.with_defaults`), and a warning names the
    key and the value.

    Args:
        config: a configuration object, or the dictionary of a ``config.json``. If it describes several models, the
            part that writes or reads text is used: ``text_config``, or the decoder of an encoder-decoder.
        layer_type: the layers to read, if the layers of the model differ: one of `layer_types`, or a name in the
            ``layer_types`` of the configuration. T5 has ``"encoder"`` (the default) and ``"decoder"``. In a
            configuration of several models, it can also be the key of a part, such as ``"encoder"`` or
            ``"vision_config"``. See `encodings_by_layer` for one encoding per layer.
        angles: the precision of rotary angles. See `Rotary`.
        layout: the layout of rotary positions, for converted weights. Default: the layout of the architecture.
        allow_no_rotation: whether to accept the two models whose code uses a different angle for each member of a pair
            (HunYuan-VL, V-JEPA 2). A warning then states by how much lengths change.

    Raises:
        InputError: the architecture is unknown, or a key is wrong, or a key without a default is missing. The error
            names it.

    >>> encoding_from_config({"model_type": "bloom", "n_head": 32})
    ALiBi(num_heads=32)
    >>> encoding_from_config({"model_type": "gpt2", "n_positions": 1024, "n_embd": 768})
    Learned(max_seq_len=1024, d_model=768)
    """
    allowed = flag("allow_no_rotation", allow_no_rotation)
    config, layer_type = _select_part(config, layer_type)
    _warn_of_form(config, layout, depth=3)
    return _make_with_defaults(config, lambda stated: _encoding(stated, layer_type, angles, layout, allowed), depth=3)


def _select_part(config: Config | object, layer_type: str | None) -> tuple[Config | object, str | None]:
    """Return the part of the configuration that `layer_type` names, or both arguments if there is no such part."""
    values = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    part = values.get(layer_type) if isinstance(layer_type, str) else None
    is_model = (isinstance(part, Mapping) and "model_type" in part) or hasattr(part, "model_type")
    return (part, None) if is_model else (config, layer_type)


def _encoding(
    config: Config | object, layer_type: str | None, angles: AngleMode, layout: Layout | None, allow_no_rotation: bool
) -> PositionEncoding:
    values, architecture = read_measurable(config)
    has_kinds = architecture.layer_types is None or architecture.layer_types(values)
    chosen = architecture.default_layer_type if layer_type is None and has_kinds else layer_type
    named = () if chosen is not None else tuple(architecture.rotary_keys.layer_kinds)  # even if other keys are missing
    kinds = named or _layer_types(values, architecture)
    if chosen is not None and chosen not in kinds and chosen in layer_types_in(values):
        if chosen in WITHOUT_ATTENTION:
            return PositionEncoding()
        chosen = _kind_of_type(values, architecture, chosen) if kinds else chosen
    shared = () if kinds else (None, *layer_types_in(values))
    if chosen not in (*kinds, *shared):
        got = f"got layer_type={short_repr(layer_type)} for {values['model_type']}, expected "
        if not kinds:
            raise InputError(f"{got}none: its layers share one encoding", "leave layer_type out")
        raise InputError(f"{got}one of {', '.join(kinds)}: their encodings differ", Remedy(layer_type=kinds[0]))
    other = _non_rotary_encoding(values, architecture, chosen)
    if other is not None:
        return other
    if architecture.rotary is UNKNOWN and layout is None:
        from locant.probing.probe import measured_rotary

        return measured_rotary(config, layer_type).replace(angles=angles)
    rope_type = (
        chosen if architecture.layer_types is None else None
    )  # other kinds share one dictionary of rope parameters
    options: dict[str, Any] = {"layer_type": rope_type, "layout": layout}
    options["allow_no_rotation"] = allow_no_rotation
    reading = read_rotary(values, architecture, **options)
    _warn(reading, depth=6)
    rotary = Rotary(**reading.arguments, angles=angles)
    unequal = second_members(rotary, values, architecture)
    if unequal is None:
        return rotary
    low, high = unequal.stretch(Positions.grid(*(4 for _ in range(rotary.pairs.num_axes or 1))))
    warnings.warn(
        f"{values['model_type']} does not rotate: among 4 positions on each axis it multiplies the length of a pair of "
        f"dimensions by {low:.3f} to {high:.3f}, and scores depend on more than distances",
        stacklevel=5,
    )
    return unequal


WITHOUT_ATTENTION = ("linear_attention", "mamba", "conv", "recurrent", "moe", "mlp")
"""The names in ``layer_types`` for layers without queries and keys to rotate."""


def _kind_of_type(config: Config, architecture: Architecture, layer_type: str) -> str | None:
    """Return the kind of the layers with this name in ``layer_types``. Prefer a rotated kind, and warn of several."""
    types, kinds = layer_types_in(config), _kinds_by_layer(config, architecture)
    candidates = [*dict.fromkeys(kind for one, kind in zip(types, kinds, strict=False) if one == layer_type)]
    rotated = [kind for kind in candidates if _non_rotary_encoding(config, architecture, kind) is None]
    if len(candidates) > 1 and rotated:
        warnings.warn(
            f"{config['model_type']}: some layers of type {layer_type!r} have rotary positions, and some do not: "
            "this is the encoding of the layers that do. Use locant.models.encodings_by_layer(config) for each layer",
            stacklevel=6,
        )
    return next(iter(rotated or candidates), layer_type)


def encodings_by_layer(
    config: Config | object, *, angles: AngleMode = "exact", layout: Layout | None = None
) -> list[PositionEncoding]:
    """Return the position encoding of each layer of a published model, in order.

    Layers of one kind share one encoding. A layer without positions, or without attention, has `PositionEncoding`
    itself, which does nothing.

    Args:
        config, angles, layout: as in `encoding_from_config`.

    Raises:
        InputError: as in `encoding_from_config`, or if the configuration does not state the kinds of its layers, or
            its parts are not layers of one stack (T5).

    >>> sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 4, "rope_theta": 1e4}
    >>> config = {"model_type": "smollm3", **sizes, "no_rope_layers": [1, 1, 1, 0]}
    >>> [type(each).__name__ for each in encodings_by_layer(config)]
    ['Rotary', 'Rotary', 'Rotary', 'PositionEncoding']
    """
    values, architecture = _read_with_kinds(config)
    kinds = _kinds_by_layer(values, architecture)

    def make(stated: Config | object) -> dict[str | None, PositionEncoding]:
        encodings: dict[str | None, PositionEncoding] = {}
        for kind in dict.fromkeys(kinds):  # no comprehension: its extra frame would move the place of warnings
            is_attention = kind not in WITHOUT_ATTENTION
            encodings[kind] = _encoding(stated, kind, angles, layout, False) if is_attention else PositionEncoding()
        return encodings

    _warn_of_form(config, layout, depth=3)
    encodings = _make_with_defaults(config, make, depth=3)
    return [encodings[kind] for kind in kinds]


def _kinds_by_layer(config: Config, architecture: Architecture) -> tuple[str | None, ...]:
    """Return the kind of each layer, in order."""
    kinds, types = _layer_types(config, architecture), layer_types_in(config)
    if architecture.kinds_by_layer is not None and kinds:
        return architecture.kinds_by_layer(config)
    if not kinds:
        count = required(config, *NUM_LAYERS)
        return tuple(one if one in WITHOUT_ATTENTION else None for one in types) or (None,) * count
    if not types and architecture.full_attention_every is not None:
        types = full_every(architecture.full_attention_every, "sliding_window_pattern")(config)
    if not types or not {*types} <= {*kinds, *WITHOUT_ATTENTION}:
        got = f"got a {config.get('model_type')} configuration without the kind of each layer: {', '.join(kinds)}"
        raise InputError(
            got, "call encoding_from_config with a layer_type, or add layer_types with a name for each layer"
        )
    return types


def rotary_from_config(
    cls: type[Rotary],
    config: Config | object,
    *,
    layer_type: str | None,
    angles: AngleMode,
    layout: Layout | None,
    for_all_layers: bool = True,
) -> Rotary:
    """Return the result of `Rotary.from_config`: by the row of the architecture, else by measurement, else by `layout`.

    With `for_all_layers`, warn of layers that have no rotary positions.
    """
    from locant.probing.probe import is_measurable, measured_rotary

    def make(stated: Config | object) -> Rotary:
        values, architecture = read_config(stated)
        if architecture.rotary is UNKNOWN and layout is None and is_measurable(stated):
            return measured_rotary(stated, layer_type).replace(angles=angles)
        rope_type = layer_type
        if layer_type is not None and architecture.layer_types is not None:
            kinds = architecture.layer_types(values)
            rotated = [kind for kind in kinds if _non_rotary_encoding(values, architecture, kind) is None]
            if layer_type in kinds and layer_type not in rotated and rotated:
                remedy = Remedy("{}, or use PositionEncoding() for these layers", layer_type=rotated[0])
                raise InputError(f"got layer_type={short_repr(layer_type)}, which has no rotary positions", remedy)
            rope_type = None if layer_type in kinds else layer_type
        reading = read_rotary(values, architecture, layer_type=rope_type, layout=layout)
        _warn(reading, depth=6)
        if for_all_layers and layer_type is None and (others := _unrotated_kinds(values, architecture)):
            warnings.warn(
                f"{values['model_type']}: this is not the encoding of all layers. Those of kind "
                f"{' and '.join(map(repr, others))} have no rotary positions. Use encoding_from_config(config, "
                "layer_type=...) for each kind, or locant.models.encodings_by_layer(config) for each layer",
                stacklevel=5,
            )
        return cls(**reading.arguments, angles=angles)

    _warn_of_form(config, layout, depth=4)
    return _make_with_defaults(config, make, depth=4)


def _warn_of_form(config: Config | object, layout: Layout | None, *, depth: int) -> None:
    """Warn if the layout is in doubt, or if keys of the text part are where its class may not read them."""
    if isinstance(config, Mapping) and (part := flat_part(config)) is not None:
        warnings.warn(
            f"got a {config['model_type']} configuration without text_config: its keys are read as those of its text "
            f"part, {part}. Its class in transformers may use defaults instead",
            stacklevel=depth,
        )
    doubt = read_config(config)[1].rotary_keys.layout_doubt
    if layout is None and doubt is not None:
        warnings.warn(doubt, stacklevel=depth)


def _warn(reading: Reading, *, depth: int) -> None:
    for note in reading.notes:
        warnings.warn(note, ConfigWarning, stacklevel=depth)


def _make_with_defaults(config: Config | object, make: Callable[[Config | object], E], *, depth: int) -> E:
    """Return `make(config)`. If keys are missing, use their defaults, and name them in a warning.

    Without the warning, a lost base would be replaced silently. If an error remains with all defaults, a default may be
    the cause, because it does not fit the other keys. Therefore the first error is raised, unless the other one is
    about the layer type or a contradiction.
    """
    try:
        return make(config)
    except InputError as first_error:
        stated, full = read_config(config)[0], {**class_sizes(config), **with_defaults(config)}
        missing = {key: value for key, value in full.items() if key not in stated}
        error = _find_error(make, full) if missing else first_error
        if error is not None:
            is_about_layers = isinstance(error.remedy, Remedy) and "layer_type" in error.remedy.arguments
            raise (error if is_about_layers or CONTRADICTION in error.cause else first_error) from None
    for key in tuple(missing):  # leave out the defaults that are not needed
        fewer = {each: value for each, value in missing.items() if each != key}
        missing = missing if _find_error(make, {**stated, **fewer}) else fewer
    warnings.warn(
        f"got a {full['model_type']} configuration without {', '.join(missing)}: using the defaults of its class in "
        f"transformers, {short_repr(missing)}. Add what the model was trained with to the configuration, if it differs",
        stacklevel=depth,
    )
    return make({**stated, **missing})


def _find_error(make: Callable[[Config | object], object], config: Config) -> LocantError | None:
    """Return the error that `make(config)` raises, or ``None``. A default may not fit the other keys."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            make(config)
        except LocantError as error:
            return error
    return None


def read_measurable(config: Config | object) -> tuple[dict[str, Any], Architecture]:
    """Return a configuration and its row. The row may be unknown if an installed `transformers` can be measured."""
    from locant.probing.probe import is_measurable

    values, architecture = read_config(config)
    return (
        (values, architecture)
        if architecture.rotary is UNKNOWN and is_measurable(config)
        else read_known_config(config)
    )


def layer_types(config: Config | object) -> tuple[str, ...]:
    """Return the kinds of layers whose encodings differ, or an empty tuple if all are equal.

    >>> layer_types({"model_type": "t5"})
    ('encoder', 'decoder')
    """
    return _layer_types(*_read_with_kinds(config))


def _read_with_kinds(config: Config | object) -> tuple[dict[str, Any], Architecture]:
    """Return a configuration and its row, with the defaults of its class if the kinds of layers depend on them."""
    values, architecture = read_measurable(config)
    try:
        _layer_types(values, architecture)
    except InputError:
        full = with_defaults(config)
        if full == values or architecture.rotary is UNKNOWN:
            raise
        _layer_types(full, architecture)
        return full, architecture
    return values, architecture


def table_length(encodings: Iterable[PositionEncoding]) -> int | None:
    """Return the number of positions of the learned table among the encodings of a model.

    It is smaller than the length in the configuration if that length counts rows that are not positions (RoBERTa). The
    result is ``None`` if the model has no table, or tables of several lengths.
    """
    lengths = {each.max_seq_len for each in encodings if isinstance(each, Learned)}
    return lengths.pop() if len(lengths) == 1 else None


def rotary_layer_types(config: Config | object) -> tuple[str | None, ...]:
    """Return the `layer_types` with rotary positions.

    ``(None,)`` means all layers, and an empty tuple means no layer.
    """
    values, architecture = _read_with_kinds(config)
    kinds = _layer_types(values, architecture) or (None,)
    return tuple(kind for kind in kinds if _non_rotary_encoding(values, architecture, kind) is None)


def _unrotated_kinds(config: Config, architecture: Architecture) -> tuple[str, ...]:
    """Return the kinds of layers without rotary positions, if they are known and other layers have them."""
    try:
        kinds = _layer_types(config, architecture)
        others = tuple(kind for kind in kinds if _non_rotary_encoding(config, architecture, kind) is not None)
    except InputError:  # a key that distinguishes the kinds is missing
        return ()
    return others if len(others) < len(kinds) else ()


def _layer_types(config: Config, architecture: Architecture) -> tuple[str, ...]:
    if architecture.layer_types is not None:
        return architecture.layer_types(config)
    return () if architecture.rotary is None else tuple(ropes_by_layer(config, architecture.rotary) or ())


def _non_rotary_encoding(config: Config, architecture: Architecture, layer_type: str | None) -> PositionEncoding | None:
    """Return the encoding of these layers, or ``None`` if they have rotary positions."""
    if architecture.encoding is not None:
        return architecture.encoding(config, layer_type)
    ropes = None if layer_type is None else ropes_by_layer(config, architecture.rotary_keys)
    has_no_rotation = ropes is not None and layer_type in ropes and ropes[layer_type or ""] is None
    return PositionEncoding() if has_no_rotation else None
