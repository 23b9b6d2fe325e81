"""Rotary encodings from Hugging Face configurations, and back.

Reads ``rope_parameters`` (transformers 5), the older ``rope_scaling`` beside ``rope_theta``, dictionaries per layer
type, and the many names of partial rotation. Nothing is assumed in silence: a base that is not there is not 10 000, and
a key that cannot be honoured is refused by name. A configuration object of `transformers` knows the defaults of its
class; a dictionary says only what it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from locant.errors import InputError
from locant.kernels.rotary import Layout
from locant.positions.angles import AngleMode
from locant.positions.encodings.rotary import Rotary
from locant.positions.rope_config.dialects import UNKNOWN, Dialect, dialect_of
from locant.positions.rope_config.layers import rope_of_layers, ropes_by_layer
from locant.positions.rope_config.sizes import (
    TRAINED,
    Config,
    base_of,
    head_dim_of,
    layout_of,
    lengths_of,
    one_of,
    rotary_dim_of,
    sections_of,
)
from locant.positions.rope_config.types import integer, read_scaling, rope_type_of, write_scaling
from locant.positions.scaling import (
    NTK,
    DynamicNTK,
    Llama3,
    LongRoPE,
    Proportional,
    Scaling,
    Unscaled,
    YaRN,
    ntk_exponent,
)

__all__ = [
    "RotaryArguments", "config_dict", "layer_types_of", "rotary_arguments", "rotary_from_config",
    "rotary_to_config",
]  # fmt: skip


class RotaryArguments(TypedDict):
    """The arguments of `Rotary`."""

    head_dim: int
    base: float
    scaling: Scaling
    layout: Layout
    rotary_dim: int
    angles: AngleMode
    sections: tuple[int, ...] | None


def rotary_from_config(
    config: Config | object,
    *,
    layer_type: str | None = None,
    angles: AngleMode = "exact",
    layout: Layout | None = None,
) -> Rotary:
    """The rotary encoding that a Hugging Face configuration describes.

    Args:
        config: a configuration object, or the dictionary of a ``config.json``. The text part of a multimodal one.
        layer_type: which layers, where they differ, such as ``"sliding_attention"``; required then.
        angles: see `Rotary`.
        layout: which dimensions form a pair; needed where the architecture is not known, and wins where it is.

    >>> config = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "rope_theta": 500000.0}
    >>> rotary_from_config(config)
    Rotary(head_dim=128, base=500000, layout='half', angles='exact')
    """
    return Rotary(**rotary_arguments(config, layer_type=layer_type, angles=angles, layout=layout))


def rotary_arguments(
    config: Config | object,
    *,
    layer_type: str | None = None,
    angles: AngleMode = "exact",
    layout: Layout | None = None,
) -> RotaryArguments:
    """The same as arguments of `Rotary`, without building its tables."""
    facts = config_dict(config)
    dialect = dialect_of(facts)
    _require_rotary(facts, dialect)
    rope = rope_of_layers(facts, dialect, layer_type)
    rope_type = rope_type_of(rope, {"su": "longrope", **dialect.rope_types}, weighted=dialect.weighted_longrope)
    proportional = rope_type.scaling is Proportional
    head_dim = head_dim_of(facts, dialect, layer_type)
    return RotaryArguments(
        head_dim=head_dim,
        base=base_of(facts, rope, dialect, layer_type),
        scaling=read_scaling(
            {**rope, **_rotated_share(facts, rope)} if proportional else rope, rope_type, lengths_of(facts)
        ),
        layout=layout_of(facts, dialect, layout),
        rotary_dim=head_dim if proportional else rotary_dim_of(facts, rope, dialect, head_dim),
        angles=angles,
        sections=sections_of(facts, rope, dialect),
    )


def rotary_to_config(
    rotary: Rotary, *, max_seq_len: int | None = None, form: str = "rope_parameters"
) -> dict[str, Any]:
    """What a configuration has to say for `transformers` and vLLM to turn as this encoding does.

    Reading it back gives an encoding that turns alike. It is equal, but for `NTK`, which is written as the larger base
    that it is, and for fields without an effect, which are not written: a lone ``mscale`` of `YaRN`, or both beside an
    ``attention_factor``, and the ``factor`` of `LongRoPE` where an ``attention_factor`` stands beside it and
    `max_seq_len` says another. The length of `for_length` is not part of it, and neither is `angles`.

    An architecture has one layout, and turns whole heads or parts of them, which its configuration cannot change.
    ``rope_interleave`` and ``partial_rotary_factor`` are written so that a configuration of an architecture that does
    otherwise is refused when it is read, instead of turning wrongly.

    Args:
        rotary: any, but for sections with ladders of their own, and `Proportional` over a part of the head.
        max_seq_len: the longest sequence; default: what the scaling implies, if it does.
        form: ``"rope_parameters"`` (transformers 5), or the older ``"rope_scaling"`` beside ``rope_theta``, which
            earlier releases of both programs read.

    >>> rotary_to_config(Rotary(64, 500_000.0))["rope_parameters"]
    {'rope_type': 'default', 'rope_theta': 500000.0}
    """
    if rotary.axial:
        raise InputError("got axial=True, which no text model's configuration can express", "sections alone")
    if isinstance(rotary.scaling, Proportional) and rotary.rotary_dim != rotary.head_dim:
        raise InputError(
            f"got Proportional scaling of {rotary.rotary_dim} of {rotary.head_dim} dimensions, where a configuration "
            "has one share for both",
            "rotary_dim=head_dim, or another scaling",
        )
    scaling, base = _with_base(rotary)
    lengths = _written_lengths(scaling, None if max_seq_len is None else integer("max_seq_len", max_seq_len))
    rope = write_scaling(scaling)
    if _is_idle_factor(scaling, lengths):
        del rope["factor"]
    if rotary.sections is not None:
        rope["mrope_section"] = list(rotary.sections)
    share = {} if rotary.rotary_dim == rotary.head_dim else {"partial_rotary_factor": _share_of(rotary)}
    sizes: dict[str, Any] = {"head_dim": rotary.head_dim, "rope_interleave": rotary.layout == "interleaved"}
    sizes |= lengths
    if form == "rope_parameters":
        return {"rope_parameters": {**rope, "rope_theta": base, **share}, **sizes}
    if form != "rope_scaling":
        raise InputError(f"got form={form!r}, expected 'rope_parameters' or 'rope_scaling'", "form='rope_parameters'")
    return {"rope_scaling": None if rope == {"rope_type": "default"} else rope, "rope_theta": base, **share, **sizes}


NULL_SAYS = ("sliding_window",)
"""Keys whose null is not their absence: there is no window, whatever the class has for a default."""


def config_dict(config: Config | object) -> dict[str, Any]:
    """A configuration as a dictionary, without the nulls that say nothing; the text part of a multimodal one."""
    to_dict = getattr(config, "to_dict", None)
    facts = to_dict() if callable(to_dict) else config
    if not isinstance(facts, Mapping):
        raise InputError(
            f"got {type(config).__name__}, expected a Hugging Face configuration or a dictionary",
            "the content of config.json",
        )
    text = facts.get("text_config")
    if text is not None:
        return config_dict(text)
    return {key: value for key, value in facts.items() if value is not None or key in NULL_SAYS}


def layer_types_of(config: Config | object) -> tuple[str, ...]:
    """The layer types that have rotary parameters of their own; empty where all layers share them."""
    facts = config_dict(config)
    return tuple(ropes_by_layer(facts, dialect_of(facts)) or ())


def _require_rotary(facts: Config, dialect: Dialect) -> None:
    """Refuse a model that turns nothing, and keys about rotary positions that are not understood."""
    if facts.get("alibi"):
        raise InputError("got alibi=true, a model without rotary positions", "locant.encoding_from_config(config)")
    strange = [key for key in facts if ("rope" in str(key) or "rotary" in str(key)) and key not in dialect.keys]
    strange = [key for key in strange if key != "qk_rope_head_dim" or dialect is UNKNOWN]
    if strange:
        name = facts.get("model_type", "a configuration of this kind")
        raise InputError(
            f"got {', '.join(map(repr, strange))}, which {name} is not known to read", "the configuration without it"
        )


def _rotated_share(facts: Config, rope: Config) -> dict[str, Any]:
    """The share of the pairs that turn, in or beside the dictionary; it has no other name there."""
    others = [key for key in ("rotary_pct", "rotary_dim") if key in facts]
    if others:
        raise InputError(
            f"got {others[0]!r} beside rope_type 'proportional', which reads partial_rotary_factor", "that"
        )
    key = "partial_rotary_factor"
    said = {"in the rope parameters": rope.get(key), "beside them": facts.get(key)}
    share = one_of(said, *said)
    return {} if share is None else {key: share}


def _with_base(rotary: Rotary) -> tuple[Scaling, float]:
    """NTK scaling is nothing but a larger base."""
    if not isinstance(rotary.scaling, NTK):
        return rotary.scaling, float(rotary.base)
    exponent = ntk_exponent(rotary.rotary_dim) if rotary.scaling.form == "aware" else 1.0
    return Unscaled(), rotary.base * rotary.scaling.factor**exponent


def _share_of(rotary: Rotary) -> float:
    """A factor from which ``int(head_dim * factor)`` gives the rotary dimension back, however it rounds."""
    share = rotary.rotary_dim / rotary.head_dim
    return share if int(rotary.head_dim * share) == rotary.rotary_dim else (rotary.rotary_dim + 0.5) / rotary.head_dim


def _is_idle_factor(scaling: Scaling, lengths: Mapping[str, Any]) -> bool:
    """Whether the factor of LongRoPE says another longest sequence than is written, and decides nothing."""
    if not isinstance(scaling, LongRoPE) or scaling.attention_factor is None:
        return False
    return round(scaling.factor * scaling.original_max_seq_len) != lengths["max_position_embeddings"]


def _written_lengths(scaling: Scaling, max_seq_len: int | None) -> dict[str, Any]:
    """The longest sequence as far as it is known, and the trained one where an architecture reads it outside."""
    if isinstance(scaling, DynamicNTK):  # the reference takes max_position_embeddings for the trained length
        if max_seq_len not in (None, scaling.original_max_seq_len):
            trained = scaling.original_max_seq_len
            raise InputError(
                f"got max_seq_len={max_seq_len}, but dynamic scaling needs {trained} there", "no max_seq_len"
            )
        return {"max_position_embeddings": scaling.original_max_seq_len}
    if isinstance(scaling, (YaRN, LongRoPE, Llama3)) and max_seq_len is None:
        max_seq_len = round(scaling.factor * scaling.original_max_seq_len)
    longest = {} if max_seq_len is None else {"max_position_embeddings": max_seq_len}
    return {**longest, TRAINED: scaling.original_max_seq_len} if isinstance(scaling, LongRoPE) else longest
