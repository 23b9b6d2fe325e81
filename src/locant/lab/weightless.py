"""A model of `transformers` of which there is a configuration alone: to be looked at, and swapped, without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locant.arguments import shown
from locant.checkpoints.config_source import require_no_code
from locant.checkpoints.swap.weightless import Weightless
from locant.errors import InputError
from locant.lab.language_model import one_line, require_likely
from locant.models.registry import with_defaults

__all__ = ["CAUSAL", "auto_class", "without_weights"]

CAUSAL = "AutoModelForCausalLM"
KINDS = (CAUSAL, "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText")


def without_weights(config: Mapping[str, Any]) -> Any:
    """The language model that a configuration describes. Its parameters have shapes and no numbers.

    Its rotary module is as it would be, so `locant.swap` finds it, measures it, and says what it would do.

    Raises:
        InputError: a configuration that `transformers` makes no language model of, or with code of its own.
    """
    kind = config.get("model_type")
    require_no_code(f"a configuration of {shown(kind)}", config)
    if "locant" in config:
        raise InputError("got the configuration of a model that is swapped already", "that of the model as it was")
    require_likely(with_defaults(config))
    with one_line(f"a configuration of {shown(kind)}", "a config.json as save_pretrained writes it") as transformers:
        made = transformers.AutoConfig.for_model(**config)
        if (auto := auto_class(made)) is not None:
            with Weightless():
                return getattr(transformers, auto).from_config(made).eval()
    got = f"got a configuration of {shown(kind)}, of which transformers makes no language model"
    raise InputError(got, "one of a causal or masked language model")


def auto_class(config: Any) -> str | None:
    """What `transformers` calls the class that makes a language model of such a configuration: a causal one, if any."""
    import transformers

    return next((each for each in KINDS if type(config) in getattr(transformers, each)._model_mapping), None)
