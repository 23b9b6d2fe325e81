"""From a configuration to the position encoding of its model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from locant.arguments import flag, shown
from locant.errors import InputError, LocantError, Remedy
from locant.kernels.rotary import Layout
from locant.models.architecture import UNKNOWN, Architecture
from locant.models.config_values import Config, layer_types_in
from locant.models.registry import read, read_known, with_defaults
from locant.models.rope_parameters import ropes_by_layer
from locant.models.rotary_config import read_rotary, second_members
from locant.positions.angles import AngleMode
from locant.positions.base import PositionEncoding
from locant.positions.encodings.rotary import Rotary
from locant.positions.positions import Positions

E = TypeVar("E", bound=PositionEncoding)


def encoding_from_config(
    config: Config | object,
    *,
    layer_type: str | None = None,
    angles: AngleMode = "exact",
    layout: Layout | None = None,
    allow_no_rotation: bool = False,
) -> PositionEncoding:
    """The position encoding of a published model, from its Hugging Face configuration.

    Tables come out untrained; a checkpoint's rows fit into them as they are. Where a key is missing that decides
    something, what `transformers` takes for the architecture is taken (`locant.models.with_defaults`), and a warning
    says which and what.

    Args:
        config: a configuration object, or the dictionary of a ``config.json``. A configuration of several models is
            read by the part that writes or reads text: ``text_config``, or the decoder of an encoder-decoder.
        layer_type: which layers, for models whose layers differ; `layer_types` names them. T5 has ``"encoder"`` (the
            default) and ``"decoder"``. In a configuration of several models, the key of a part, such as ``"encoder"``
            or ``"vision_config"``.
        angles: for rotary positions, see `Rotary`.
        layout: for rotary positions of converted weights; default: the architecture's.
        allow_no_rotation: whether the two models whose code turns the members of a pair by different angles
            (HunYuan-VL, V-JEPA 2) are read as they are, with a warning that tells how much lengths change.

    Raises:
        InputError: an architecture that is not known, or a key that is wrong, or missing without a default; it is
            named.

    >>> encoding_from_config({"model_type": "bloom", "n_head": 32})
    ALiBi(num_heads=32)
    >>> encoding_from_config({"model_type": "gpt2", "n_positions": 1024, "n_embd": 768})
    Learned(max_seq_len=1024, d_model=768)
    """
    asked = flag("allow_no_rotation", allow_no_rotation)
    config, layer_type = _named_part(config, layer_type)
    _warn_of_layout(config, layout, depth=3)
    return _of_what_is_stated(config, lambda stated: _encoding(stated, layer_type, angles, layout, asked), depth=3)


def _named_part(config: Config | object, layer_type: str | None) -> tuple[Config | object, str | None]:
    """The part of a configuration of several models that `layer_type` names, or else what was given."""
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
    named = () if chosen is not None else tuple(architecture.rotary_keys.layer_kinds)  # whatever else is missing
    kinds = named or _layer_types(values, architecture)
    shared = () if kinds else (None, *layer_types_in(values))
    if chosen not in (*kinds, *shared):
        got = f"got layer_type={shown(layer_type)} for {values['model_type']}, expected "
        if not kinds:
            raise InputError(f"{got}none: its layers share one encoding", "no layer_type")
        raise InputError(f"{got}one of {', '.join(kinds)}: their encodings differ", Remedy(layer_type=kinds[0]))
    other = _other_than_rotary(values, architecture, chosen)
    if other is not None:
        return other
    if architecture.rotary is UNKNOWN and layout is None:
        from locant.probing.probe import measured_rotary

        return measured_rotary(config, layer_type).alike(angles=angles)
    of_ropes = chosen if architecture.layer_types is None else None  # others share one dictionary of rope parameters
    options: dict[str, Any] = {"layer_type": of_ropes, "layout": layout}
    options["allow_no_rotation"] = allow_no_rotation
    rotary = Rotary(**read_rotary(values, architecture, **options), angles=angles)
    unequal = second_members(rotary, values, architecture)
    if unequal is None:
        return rotary
    low, high = unequal.stretch(Positions.grid(*(4 for _ in range(rotary.pairs.num_axes or 1))))
    warnings.warn(
        f"{values['model_type']} is no rotation: among 4 positions on each axis it changes the length of a pair of "
        f"dimensions by {low:.3f} to {high:.3f}, and scores depend on more than distances",
        stacklevel=5,
    )
    return unequal


def rotary_from_config(
    cls: type[Rotary], config: Config | object, *, layer_type: str | None, angles: AngleMode, layout: Layout | None
) -> Rotary:
    """What `Rotary.from_config` gives: by the row of the architecture, else by measurement, else by its layout."""
    from locant.probing.probe import is_measurable, measured_rotary

    def made(stated: Config | object) -> Rotary:
        values, architecture = read(stated)
        if architecture.rotary is UNKNOWN and layout is None and is_measurable(stated):
            return measured_rotary(stated, layer_type).alike(angles=angles)
        return cls(**read_rotary(values, architecture, layer_type=layer_type, layout=layout), angles=angles)

    _warn_of_layout(config, layout, depth=4)
    return _of_what_is_stated(config, made, depth=4)


def _warn_of_layout(config: Config | object, layout: Layout | None, *, depth: int) -> None:
    doubt = read(config)[1].rotary_keys.layout_doubt
    if layout is None and doubt is not None:
        warnings.warn(doubt, stacklevel=depth)


def _of_what_is_stated(config: Config | object, make: Callable[[Config | object], E], *, depth: int) -> E:
    """What is made of a configuration; where that lacks keys, with their defaults, which a warning names.

    A base that was lost on the way would otherwise be replaced by another one in silence.
    """
    try:
        return make(config)
    except InputError:
        stated, full = read(config)[0], with_defaults(config)
        taken = {key: value for key, value in full.items() if key not in stated}
        if not taken or not _reads(make, full):
            raise
    for key in tuple(taken):  # what it reads as well without has no part in it
        fewer = {each: value for each, value in taken.items() if each != key}
        taken = fewer if _reads(make, {**stated, **fewer}) else taken
    warnings.warn(
        f"got a {full['model_type']} configuration without {', '.join(taken)}: taken is what its class in transformers "
        f"takes, {shown(taken)}; a model that was trained with anything else needs it in the configuration",
        stacklevel=depth,
    )
    return make({**stated, **taken})


def _reads(make: Callable[[Config | object], object], config: Config) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            make(config)
        except LocantError:  # a default may also be a number that does not fit the others
            return False
    return True


def read_measurable(config: Config | object) -> tuple[dict[str, Any], Architecture]:
    """A configuration and its row, which may be none where an installed `transformers` has what can be measured."""
    from locant.probing.probe import is_measurable

    values, architecture = read(config)
    return (values, architecture) if architecture.rotary is UNKNOWN and is_measurable(config) else read_known(config)


def layer_types(config: Config | object) -> tuple[str, ...]:
    """The kinds of layers whose encodings differ, as `encoding_from_config` takes them; empty: one for all.

    >>> layer_types({"model_type": "t5"})
    ('encoder', 'decoder')
    """
    return _layer_types(*read_measurable(config))


def rotary_layer_types(config: Config | object) -> tuple[str | None, ...]:
    """Those of `layer_types` that have rotary positions; ``(None,)`` where all layers have the same."""
    values, architecture = read_measurable(config)
    kinds = _layer_types(values, architecture) or (None,)
    return tuple(kind for kind in kinds if _other_than_rotary(values, architecture, kind) is None)


def _layer_types(config: Config, architecture: Architecture) -> tuple[str, ...]:
    if architecture.layer_types is not None:
        return architecture.layer_types(config)
    return () if architecture.rotary is None else tuple(ropes_by_layer(config, architecture.rotary) or ())


def _other_than_rotary(config: Config, architecture: Architecture, layer_type: str | None) -> PositionEncoding | None:
    """The encoding of layers without rotary positions."""
    return None if architecture.encoding is None else architecture.encoding(config, layer_type)
