"""A model of `transformers` of which there is a configuration alone: to be looked at, and swapped, without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locant.arguments import shown
from locant.checkpoints.swap.weightless import Weightless
from locant.errors import InputError
from locant.lab.language_model import one_line
from locant.models.config_values import HEADS, WIDTHS, integer_at
from locant.models.registry import with_defaults

__all__ = ["without_weights"]

MOST = {
    "layers": (("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 1_000),
    "width": (WIDTHS, 2**20),
    "heads": (HEADS, 2**16),
    "head_dim": (("head_dim",), 2**16),
}
"""No published model comes near; larger ones would be built module by module."""

KINDS = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText")


def without_weights(config: Mapping[str, Any]) -> Any:
    """The language model that a configuration describes. Its parameters have shapes and no numbers.

    Its rotary module is as it would be, so `locant.swap` finds it, measures it, and says what it would do.

    Raises:
        InputError: a configuration that `transformers` makes no language model of, or with code of its own.
    """
    kind = config.get("model_type")
    if "auto_map" in config:
        got = f"got a configuration of {shown(kind)} with code of its own"
        raise InputError(got, "a model whose class is part of transformers")
    if "locant" in config:
        raise InputError("got the configuration of a model that is swapped already", "that of the model as it was")
    full = with_defaults(config)
    for what, (keys, most) in MOST.items():
        if (value := integer_at(full, *keys) or 1) > most:
            raise InputError(f"got {value:,} for the {what} of a model, expected at most {most:,}", "its config.json")
    with one_line(f"a configuration of {shown(kind)}", "a config.json as save_pretrained writes it") as transformers:
        made = transformers.AutoConfig.for_model(**config)
        for auto in (getattr(transformers, each) for each in KINDS):
            if type(made) in auto._model_mapping:
                with Weightless():
                    return auto.from_config(made).eval()
    got = f"got a configuration of {shown(kind)}, of which transformers makes no language model"
    raise InputError(got, "one of a causal or masked language model")
