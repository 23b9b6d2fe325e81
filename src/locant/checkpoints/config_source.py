"""Configurations from where people have them: a file, the folder of a model, or a name.

A file is a ``config.json`` or Mistral's ``params.json``. A name is that of a preset, or of an architecture or a class
of an installed `transformers`, whose default configuration is then taken.
"""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from locant.arguments import shown
from locant.checkpoints.mistral_params import PARAMS, config_of_params, is_params
from locant.errors import InputError
from locant.extras import is_installed, require
from locant.models.registry import presets

CONFIG = "config.json"
LARGEST = 2**28
ATTENTION = ("attn_implementation", "_attn_implementation")


class Source(NamedTuple):
    """A configuration, and what it is if it is not that of a published model."""

    config: Mapping[str, Any] | object
    note: str | None = None


def find_source(source: str) -> Source:
    """The configuration that a path or a name stands for: a path wins, then a preset, then a class of `transformers`.

    >>> find_source("gpt2").config["n_positions"]
    1024
    """
    if Path(source).exists() or source in presets():
        return Source(read_source(source))
    transformers = require("transformers", f"reading {shown(source)}, which is no file, no folder and no preset,")
    config = default_config(source)
    if config is None:
        return Source(_preset(source))  # which says what is known
    name = type(config).__name__
    return Source(config, f"the defaults of {name} in transformers {transformers.__version__}, no published model")


def default_config(name: str) -> object | None:
    """The default configuration of a ``model_type`` or a class of an installed `transformers`; ``None``: it has none.

    Raises:
        InputError: a class that has no default configuration.
    """
    if not is_installed("transformers"):
        return None
    import transformers

    cls = getattr(transformers, name, None) if name.isidentifier() else None
    made_from: Any = getattr(cls, "config_class", cls)
    if name in transformers.CONFIG_MAPPING:
        made_from = transformers.CONFIG_MAPPING[name]
    if not inspect.isclass(made_from) or not issubclass(made_from, transformers.PreTrainedConfig):
        return None
    try:
        return made_from()
    except Exception as error:  # a configuration can make transformers fail in any way
        got = f"got {name}, whose class {made_from.__name__} has no default configuration: {shown(str(error))}"
        raise InputError(got, f"the path of a {CONFIG}") from error


def read_source(source: str | Path) -> dict[str, Any]:
    """The configuration at a path, or of a preset; a path that exists wins.

    >>> read_source("gpt2")["n_positions"]
    1024
    """
    path = Path(source)
    if str(source) and path.is_dir():
        path = next((path / name for name in (CONFIG, PARAMS) if (path / name).is_file()), path / CONFIG)
        if not path.is_file():
            raise InputError(f"got the folder {source}, which holds no {CONFIG}", "the folder of a model, or a file")
    if not path.is_file():
        return _preset(str(source))
    config = read_json(path)
    return config_of_params(config) if is_params(config) else config


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    if not path.is_file():
        raise InputError(f"got no file {path}", "the folder of a checkpoint, with its configuration")
    if path.stat().st_size > LARGEST:
        raise InputError(f"got {path} of {path.stat().st_size} bytes", f"one of at most {LARGEST}")
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", "a file that you may read") from None
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise InputError(f"got {path}, which is not JSON that can be read: {error}", "a fresh copy of it") from None
    if not isinstance(value, dict):
        raise InputError(f"got {path}, which holds a {type(value).__name__}", "a fresh copy of it, a JSON object")
    return value


def as_json(config: Mapping[str, Any]) -> str:
    """The text of a configuration."""
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def require_no_code(source: object, config: Mapping[str, Any]) -> None:
    """Raise where a configuration names code: files beside it, or attention of a repository of the Hub.

    `transformers` fetches such a repository and runs it where the package `kernels` is installed.
    """
    if "auto_map" in config:
        raise InputError(
            f"got {source}, whose model has code of its own", "a model whose class is part of transformers"
        )
    for part in _parts(config):
        for key in ATTENTION:
            names = part.get(key)
            for name in names.values() if isinstance(names, Mapping) else (names,):
                if isinstance(name, str) and "/" in name:
                    got = f"got {source}, whose attention is code of its own: {key} is {shown(name)}"
                    raise InputError(got, f"{CONFIG} without {key}")


def _parts(config: Mapping[str, Any]) -> list[Mapping[Any, Any]]:
    """The configuration, those of the models in it, and what else they hold, at any depth."""
    parts: list[Mapping[Any, Any]] = [config]
    for part in parts:
        parts += [each for each in part.values() if isinstance(each, Mapping)]
    return parts


def _preset(name: str) -> dict[str, Any]:
    known = presets()
    if name in known:
        return known[name]
    architectures: list[str] = []
    if is_installed("transformers"):
        from transformers import CONFIG_MAPPING

        architectures = [*CONFIG_MAPPING]
    close = [one for names in (known, architectures) for one in difflib.get_close_matches(name.lower(), names, 1, 0.6)]
    other = "no architecture of transformers" if architectures else "no name of an architecture, without transformers"
    got = f"got {name!r}, which is no file, no folder, {other}, and none of the presets {', '.join(known)}"
    raise InputError(got, f"{close[0]!r}, did you mean that?" if close else f"the path of a {CONFIG}")
