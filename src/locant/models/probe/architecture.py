"""The rotary module of a published model, built by the classes of an installed `transformers` from a configuration.

Nothing is fetched and no code is run but that of the installed package: an ``auto_map`` of a configuration, which names
code of others, is not looked at. Only the rotary module is built, not the model.
"""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from locant.arguments import shown
from locant.errors import InputError
from locant.models.probe.measurement import probe_rotation
from locant.models.probe.report import RotationReport
from locant.models.probe.subject import subject_of
from locant.models.probe.trial import FAILED
from locant.positions.base import PositionEncoding
from locant.positions.encodings.rotary import Rotary

__all__ = [
    "config_by_name",
    "is_measurable",
    "measured_layer_types",
    "measured_rotary",
    "probe_config",
    "rotary_module_of",
]

CALLED_SO = re.compile(r"Rotary|Rope(?=[A-Z])|RoPE(?=[A-Z])")
AGREES = 1e-4
"""How far a measured encoding may be from what it was measured on to be taken for it: float32 angles up to 61."""


def is_measurable(config: object) -> bool:
    """Whether the class of this configuration in `transformers` has a rotary module that can be built."""
    return next(_modules(config), None) is not None


def config_by_name(name: str) -> object | None:
    """The default configuration of a ``model_type`` or a class of an installed `transformers`; ``None``: no such name.

    >>> type(config_by_name("LlamaForCausalLM")).__name__, config_by_name("no_such_model")
    ('LlamaConfig', None)
    """
    if find_spec("transformers") is None:
        return None
    import transformers

    if name in transformers.CONFIG_MAPPING:
        return transformers.CONFIG_MAPPING[name]()
    cls = getattr(transformers, name, None) if name.isidentifier() else None
    made_from = getattr(cls, "config_class", cls)
    return made_from() if inspect.isclass(made_from) and issubclass(made_from, transformers.PreTrainedConfig) else None


def measured_layer_types(config: object) -> tuple[str, ...]:
    """The kinds of layers that have rope parameters of their own."""
    config = _configuration(config)
    rope = getattr(config, "rope_parameters", None)
    nested = isinstance(rope, dict) and rope and all(isinstance(one, dict) for one in rope.values() if one is not None)
    return tuple(kind for kind, one in rope.items() if one is not None) if nested and rope else ()


def rotary_module_of(model: object) -> nn.Module | None:
    """The first rotary module inside of a model of `transformers`."""
    if not isinstance(model, nn.Module) or getattr(getattr(model, "config", None), "model_type", None) is None:
        return None
    inside = (module for module in model.modules() if module is not model)
    return next((module for module in inside if _is_rotary(type(module))), None)


def probe_config(
    config: object,
    *,
    layer_type: str | None = None,
    expected: PositionEncoding | None = None,
    module: nn.Module | None = None,
) -> RotationReport:
    """What the rotary module of a configuration does, as `probe` tells it; `module` is the one to take, if it is built.

    >>> config = {"model_type": "olmo2", "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 5e5}
    >>> probe_config(config).encoding
    Rotary(head_dim=16, base=500000, layout='half', angles='float32')
    """
    built, kinds = _configuration(config), measured_layer_types(config)
    if layer_type is None and kinds:
        layer_type = kinds[0]
    for each in _modules(config) if module is None else (module,):
        with torch.no_grad(), torch.device("cpu"):
            subject = subject_of(each, config=built, layer_type=layer_type)
            if subject is not None:
                return probe_rotation(subject, expected)
    name = shown(getattr(built, "model_type", config))
    got = f"got {name}, whose class in transformers has no rotary module that can be built of its configuration"
    raise InputError(got, "locant.probe(lambda x, positions: ..., head_dim=64), with a function of that model")


def measured_rotary(config: object, layer_type: str | None) -> Rotary:
    """The encoding of an architecture without a row, by measurement; a warning says so.

    Raises:
        InputError: what was measured is no encoding of this package.
    """
    report = probe_config(config, layer_type=layer_type)
    name = getattr(_configuration(config), "model_type", "")
    encoding, grows_at = report.encoding, report.arrangement.grows_at
    remedy = "layout='half' or 'interleaved', as its weights were trained with"
    if not isinstance(encoding, Rotary) or report.agrees is None or report.agrees > AGREES:
        raise InputError(f"got {name}, whose {report.subject} is no rotation that has a name: {report}", remedy)
    if grows_at is not None:
        got = f"got {name}, whose frequencies depend on the length from position {grows_at} on"
        raise InputError(f"{got}, which a measurement cannot name", remedy)
    warnings.warn(
        f"{name} has no row in locant.models: its encoding was measured on {report.subject} of transformers, "
        f"{encoding!r}, which agrees to {report.agrees:.0e}",
        stacklevel=3,
    )
    return encoding


def _configuration(config: object) -> Any:
    """The object of `transformers`, of several models in one that of the text; ``None``: it has no class for it."""
    if find_spec("transformers") is None:
        return None
    if not isinstance(config, Mapping):
        return _of_text(config) if type(config).__module__.startswith("transformers.models.") else None
    from transformers import CONFIG_MAPPING

    name = config.get("model_type")
    if not isinstance(name, str) or name not in CONFIG_MAPPING:
        return None
    try:
        built = CONFIG_MAPPING[name](**{key: value for key, value in config.items() if key != "model_type"})
        built.to_dict()  # which fails for some values that are taken
        return _of_text(built)
    except Exception as error:  # a configuration can make transformers fail in any way
        got = f"got a {name} configuration that transformers refuses: {error}"
        raise InputError(got, "transformers.AutoConfig.from_pretrained, which says what it expects") from error


def _of_text(config: Any) -> Any:
    try:
        return config.get_text_config()
    except ValueError:  # it has several
        return config


def _modules(config: object) -> Iterator[nn.Module]:
    """Its rotary modules, those first whose constructor names the class of the configuration."""
    built = _configuration(config)
    if built is None:
        return
    place = type(built).__module__.replace(".configuration_", ".modeling_")
    if find_spec(place) is None:
        return
    code = importlib.import_module(place)
    found: list[Any] = [each for each in vars(code).values() if inspect.isclass(each) and each.__module__ == place]
    found = [cls for cls in found if _is_rotary(cls)]
    for cls in sorted(found, key=lambda cls: not _names(cls, type(built).__name__)):
        try:
            with torch.device("cpu"):
                yield cls(built)
        except FAILED:
            continue


def _is_rotary(cls: type) -> bool:
    name = cls.__name__
    return issubclass(cls, nn.Module) and CALLED_SO.search(name) is not None and "Attention" not in name


def _names(cls: type, name: str) -> bool:
    return any(name in str(one.annotation) for one in inspect.signature(cls).parameters.values())
