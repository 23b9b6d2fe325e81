"""The flags with which a server extends a model's context, and the keys of a scaling that the server ignores."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from locant.arguments import one_of
from locant.checkpoints.extension import METHODS, Extension, extend
from locant.engines.gguf import ALWAYS_ROUNDED, NO_DYNAMIC
from locant.errors import InputError, Remedy
from locant.models.config_values import LENGTHS, TRAINED, part_key
from locant.models.registry import read_known_config
from locant.models.rope_parameters import ropes_by_layer
from locant.models.rotary_to_config import rotary_to_config
from locant.positions.scaling import Linear, YaRN

FACTORS_IN_FILE = "its factors are in the GGUF file, where no flag can change them"
UNSUPPORTED: Mapping[str, Mapping[str, str]] = {
    "vllm": {"dynamic": "its table of angles ends at the trained length"},
    "sglang": {},
    "llama.cpp": {"dynamic": NO_DYNAMIC, "longrope": FACTORS_IN_FILE, "llama3": FACTORS_IN_FILE},
    "transformers": {},
}
"""Scalings that an engine does not support, and why."""

ENGINES = tuple(UNSUPPORTED)
WITH_AXES = ("yarn", "ntk")
"""The scalings that vLLM and SGLang support with several axes."""

FLAT_CONFIGS = ("qwen2_vl", "qwen2_5_vl")
"""Models whose configuration files are flat. Their classes in `transformers` move the values into a text part."""

IGNORED: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("vllm", "longrope"): {"short_factor": "all texts get the long factors, unless --max-model-len is {trained}"},
    ("sglang", "longrope"): {
        "short_factor": "all texts of a batch get the long factors if one has more than {trained}"
    },
    ("sglang", "dynamic"): {"factor": "all texts get the base of {to} tokens"},
    ("sglang", "yarn"): {"attention_factor": "it is not read; attn_factor is, which multiplies the factor of YaRN"},
    ("llama.cpp", "yarn"): {
        "truncate": ALWAYS_ROUNDED,
        "beta_fast, beta_slow": "for most architectures they are not read from a file: use --yarn-beta-fast and -slow",
        "attention_factor": "it is not read: use --yarn-attn-factor, which multiplies the factor of YaRN",
    },
}
"""The keys that an engine ignores or reads differently from `transformers`, with an explanation."""


@dataclass(frozen=True, kw_only=True)
class ServeArguments:
    """The arguments that start an engine with a longer context.

    Args:
        arguments: the words of its command line, unquoted. Empty for `transformers`.
        override: the keys that change in the configuration. Empty for llama.cpp, which has no configuration.
        ignored: keys of this scaling that the engine ignores or reads differently from `transformers`, and how.
        extension: the same extension as a configuration.
    """

    engine: str
    arguments: tuple[str, ...]
    override: Mapping[str, Any]
    ignored: Mapping[str, str]
    extension: Extension


def serve_arguments(
    config: Mapping[str, Any] | object, *, to: int, engine: str, scaling: str = "yarn"
) -> ServeArguments:
    """Return the flags or overrides with which `engine` serves a model with sequences of `to` tokens.

    Args:
        config: a Hugging Face configuration of a model with rotary positions and without a scaling.
        to: the number of tokens, which must exceed the trained length.
        engine: one of `ENGINES`.
        scaling: one of `locant.checkpoints.extension.METHODS`.

    Raises:
        InputError: the model cannot be extended, or the engine does not support the scaling.
        RangeError: the engine or the scaling is unknown, or `to` does not exceed the trained length.

    >>> config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "rope_theta": 10000.0}
    >>> config["max_position_embeddings"] = 4096
    >>> " ".join(serve_arguments(config, to=16384, engine="llama.cpp").arguments)
    '--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 4096 -c 16384'
    """
    one_of("engine", engine, ENGINES)
    one_of("scaling", scaling, METHODS)
    if reason := UNSUPPORTED[engine].get(scaling):
        supported = [name for name in METHODS if name not in UNSUPPORTED[engine]]
        raise InputError(f"got {scaling} for {engine}: {reason}", _remedy(supported))
    extension = extend(config, to=to, method=scaling)
    if engine in ("vllm", "sglang") and extension.rotary[1].sections and scaling not in WITH_AXES:
        got = f"got {scaling} for a model with positions in time, rows and columns, which {engine} cannot combine"
        raise InputError(got, _remedy(WITH_AXES))
    override: Mapping[str, Any] = {} if engine == "llama.cpp" else _override(extension, engine)
    reasons = IGNORED.get((engine, scaling), {})
    return ServeArguments(
        engine=engine,
        arguments=tuple(_llama_cpp_flags(extension) if engine == "llama.cpp" else _flags(engine, override, to)),
        override=override,
        ignored={key: why.format(trained=extension.trained, to=to) for key, why in reasons.items()},
        extension=extension,
    )


def _remedy(supported: Sequence[str]) -> Remedy:
    first, *others = supported
    return Remedy(" or ".join(["{}", *others]), scaling=first)


def _flags(engine: str, override: Mapping[str, Any], to: int) -> tuple[str, ...]:
    names = {
        "vllm": ("--hf-overrides", "--max-model-len"),
        "sglang": ("--json-model-override-args", "--context-length"),
    }
    if engine not in names:
        return ()
    config_flag, length_flag = names[engine]
    return config_flag, json.dumps(override), length_flag, str(to)


def _override(extension: Extension, engine: str) -> Mapping[str, Any]:
    """Return the changed keys, nested as in the configuration.

    They include all rope parameters, because servers replace all of them.
    """
    override = {key: new for key, (_, new) in extension.changed.items()}
    rotary = extension.rotary[1]
    if engine != "transformers":
        values, architecture = read_known_config(extension.config)
        lengths = {key: value for key, value in override.items() if key in (*LENGTHS, TRAINED)}
        if _multiplies_length(extension, engine, values["model_type"]):
            lengths = {}  # the server multiplies the length itself
        rope: Any = override.get("rope_parameters")
        if rope is None and (layers := ropes_by_layer(values, architecture.rotary_keys)) is not None:
            rope = {name: {"rope_type": "default", **(each or {})} for name, each in layers.items()}
        override = {"rope_parameters": rope or rotary_to_config(rotary)["rope_parameters"], **lengths}
    part: Any = extension.config
    if engine != "transformers" and part.get("model_type") in FLAT_CONFIGS and part.get("text_config") is None:
        override = {"text_config": override}
    keys: list[str] = []
    while (key := part_key(part)) is not None:
        part = part[key]
        keys.append(key)
    for key in reversed(keys):
        override = {key: override}
    return override


def _multiplies_length(extension: Extension, engine: str, model_type: str) -> bool:
    """Return whether a server multiplies the stated length by the factor of linear scaling."""
    scaling = extension.rotary[1].scaling
    if not isinstance(scaling, Linear) or extension.trained * scaling.factor < extension.to:
        return False
    return extension.layer_type is None if engine == "sglang" else "gemma3" not in model_type


def _llama_cpp_flags(extension: Extension) -> Iterator[str]:
    rotary = extension.rotary[1]
    scaling = rotary.scaling
    if extension.layer_type is not None or getattr(scaling, "mscale", None) is not None:
        got = "got a model whose layers or temperature llama.cpp scales in the code of the architecture"
        raise InputError(got, "make a GGUF file from the configuration that locant extend writes")
    if isinstance(scaling, (Linear, YaRN)):
        yield from ("--rope-scaling", scaling.info.rope_type, "--rope-scale", _number(scaling.factor))
    else:
        yield from ("--rope-scaling", "none", "--rope-freq-base", _number(rotary.base))
    if isinstance(scaling, YaRN):
        yield from ("--yarn-orig-ctx", str(extension.trained))
    yield from ("-c", str(extension.to))


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
