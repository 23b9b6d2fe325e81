"""Which architecture says where tokens stand in which way: one row per architecture, and the door to all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from locant.arguments import shown
from locant.checkpoints.readers import (
    Request,
    read_alibi,
    read_bert,
    read_deberta,
    read_falcon,
    read_learned,
    read_mpt,
    read_opt,
    read_roberta,
    read_rotary,
    read_t5,
)
from locant.checkpoints.turning_layers import (
    read_rotary_in_some_layers,
    read_rotary_in_windows,
    some_layers,
    window_layers,
)
from locant.errors import InputError
from locant.kernels.rotary import Layout
from locant.positions.angles import AngleMode
from locant.positions.base import PositionEncoding
from locant.positions.rope_config.config import config_dict, layer_types_of
from locant.positions.rope_config.dialects import DIALECTS
from locant.positions.rope_config.sizes import layer_types_in

__all__ = ["ARCHITECTURES", "Architecture", "architecture_of", "encoding_from_config", "layer_types"]


def _no_types(facts: Mapping[str, Any]) -> tuple[str, ...]:
    return ()


def _two_stacks(facts: Mapping[str, Any]) -> tuple[str, ...]:
    return ("encoder", "decoder")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How one architecture speaks of position.

    Args:
        read: makes the encoding.
        layer_types: the kinds of layers whose encodings differ; none: one for all.
        default: the kind that is meant unless one is named; ``None``: one has to be named.
    """

    read: Callable[[Request], PositionEncoding]
    layer_types: Callable[[Mapping[str, Any]], tuple[str, ...]] = _no_types
    default: str | None = None


_ROTARY = Architecture(read=read_rotary, layer_types=layer_types_of)
_ROTARY_IN_WINDOWS = Architecture(read=read_rotary_in_windows, layer_types=window_layers)
_ROTARY_IN_SOME = Architecture(read=read_rotary_in_some_layers, layer_types=some_layers)
_LEARNED = Architecture(read=read_learned)
_BERT = Architecture(read=read_bert)
_ROBERTA = Architecture(read=read_roberta)
_T5 = Architecture(read=read_t5, layer_types=_two_stacks, default="encoder")

ARCHITECTURES: Mapping[str, Architecture] = {
    **dict.fromkeys(DIALECTS, _ROTARY),
    **dict.fromkeys(("cohere2", "exaone4"), _ROTARY_IN_WINDOWS),
    **dict.fromkeys(("smollm3", "llama4_text"), _ROTARY_IN_SOME),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gpt_neo", "distilbert"), _LEARNED),
    **dict.fromkeys(("bert", "albert", "electra"), _BERT),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), _ROBERTA),
    **dict.fromkeys(("t5", "mt5"), _T5),
    "opt": Architecture(read=read_opt),
    "falcon": Architecture(read=read_falcon),
    "bloom": Architecture(read=read_alibi),
    "mpt": Architecture(read=read_mpt),
    "deberta-v2": Architecture(read=read_deberta),
}
"""By ``model_type``."""


def architecture_of(config: Mapping[str, Any] | object) -> Architecture:
    """The row of a configuration; an unknown one gets a list of the known."""
    name = config_dict(config).get("model_type")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise InputError(
            f"got model_type={shown(name)}, expected one of {', '.join(sorted(ARCHITECTURES))}",
            "Rotary.from_config(config, layout=...), if it has rotary positions",
        )
    return ARCHITECTURES[name]


def layer_types(config: Mapping[str, Any] | object) -> tuple[str, ...]:
    """The kinds of layers whose encodings differ, as `encoding_from_config` wants them named; empty: one for all.

    >>> layer_types({"model_type": "t5"})
    ('encoder', 'decoder')
    """
    return architecture_of(config).layer_types(config_dict(config))


def encoding_from_config(
    config: Mapping[str, Any] | object,
    *,
    layer_type: str | None = None,
    angles: AngleMode = "exact",
    layout: Layout | None = None,
) -> PositionEncoding:
    """The position encoding of a published model, from its Hugging Face configuration.

    Tables come out untrained; a checkpoint's rows fit into them as they are.

    Args:
        config: a configuration object, or the dictionary of a ``config.json``. The text part of a multimodal one.
        layer_type: which layers, for models whose layers differ; `layer_types` names them. T5 has ``"encoder"`` (the
            default) and ``"decoder"``.
        angles: for rotary positions, see `Rotary`.
        layout: for rotary positions of converted weights; default: the architecture's.

    >>> encoding_from_config({"model_type": "bloom", "n_head": 32})
    ALiBi(num_heads=32)
    >>> encoding_from_config({"model_type": "gpt2", "n_positions": 1024, "n_embd": 768})
    Learned(max_seq_len=1024, d_model=768)
    """
    facts = config_dict(config)
    architecture = architecture_of(facts)
    kinds = architecture.layer_types(facts)
    chosen = architecture.default if layer_type is None else layer_type
    shared = () if kinds else (None, *layer_types_in(facts))
    if chosen not in (*kinds, *shared):
        expected = (
            f"one of {', '.join(kinds)}: their encodings differ" if kinds else "none: its layers share one encoding"
        )
        raise InputError(
            f"got layer_type={shown(layer_type)} for {facts['model_type']}, expected {expected}",
            f"layer_type={kinds[0]!r}" if kinds else "no layer_type",
        )
    return architecture.read(Request(facts=facts, layer_type=chosen, angles=angles, layout=layout))
