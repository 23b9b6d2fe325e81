"""Load a configuration from a file, the folder of a model, or a name.

A file is a ``config.json`` or Mistral's ``params.json``. A name is a preset, or an architecture or a class of an
installed `transformers`, whose default configuration is used.
"""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from locant.arguments import short_repr
from locant.checkpoints.mistral_params import PARAMS, config_of_params, is_params
from locant.errors import InputError
from locant.extras import is_installed, require
from locant.gguf_file import find_gguf
from locant.models.registry import presets

CONFIG = "config.json"
MAX_BYTES = 2**28
MAX_MISSING = 3
"""The largest number of missing files that are named."""
ATTENTION = ("attn_implementation", "_attn_implementation")


class Source(NamedTuple):
    """A configuration, with a note on its origin if it does not belong to a published model."""

    config: Mapping[str, Any] | object
    note: str | None = None


def find_source(source: str) -> Source:
    """Return the configuration for a path or a name. Paths take precedence over presets, and presets over classes.

    >>> find_source("gpt2").config["n_positions"]
    1024
    """
    if Path(source).exists() or source in presets() or (source and find_gguf(source) is not None):
        return Source(read_source(source))
    transformers = require("transformers", f"reading {short_repr(source)}, which is not a file, folder or preset,")
    config = default_config(source)
    if config is None:
        return Source(_preset(source))  # which raises an error with the known names
    name = type(config).__name__
    return Source(config, f"the defaults of {name} in transformers {transformers.__version__}, not a published model")


def default_config(name: str) -> object | None:
    """Return the default configuration of a ``model_type`` or a class of an installed `transformers`, or ``None``.

    The result is ``None`` if `transformers` is not installed or does not have this name.

    Raises:
        InputError: the class has no default configuration.
    """
    if not is_installed("transformers"):
        return None
    import transformers

    cls = getattr(transformers, name, None) if name.isidentifier() else None
    config_class: Any = getattr(cls, "config_class", cls)
    if name in transformers.CONFIG_MAPPING:
        config_class = transformers.CONFIG_MAPPING[name]
    if not inspect.isclass(config_class) or not issubclass(config_class, transformers.PreTrainedConfig):
        return None
    try:
        return config_class()
    except Exception as error:  # a configuration can make transformers fail in any way
        got = f"got {name}, whose class {config_class.__name__} has no default configuration: {short_repr(str(error))}"
        raise InputError(got, f"pass the path of a {CONFIG}") from error


def read_source(source: str | Path) -> dict[str, Any]:
    """Return the configuration at a path, or of a preset. An existing path takes precedence.

    The configuration of a GGUF file is the one that `transformers` makes from its metadata.

    >>> read_source("gpt2")["n_positions"]
    1024
    """
    path = Path(source)
    if str(source) and path.is_dir():
        path = next((path / name for name in (CONFIG, PARAMS) if (path / name).is_file()), path)
    if str(source) and (gguf := find_gguf(path)) is not None:
        from locant.checkpoints.gguf_model import load_gguf_config  # which needs torch

        return json.loads(load_gguf_config(gguf).to_json_string())  # as save_pretrained would write it
    if str(source) and path.is_dir():
        raise InputError(f"got the folder {source}, which holds no {CONFIG}", "pass the folder of a model, or a file")
    if not path.is_file():
        return _preset(str(source))
    config = read_json(path)
    return config_of_params(config) if is_params(config) else config


def missing_weights(source: str) -> str | None:
    """Return a sentence about the files that an index in this folder names and that are not there, or ``None``.

    A configuration can be explained without them, but the model cannot be loaded. The same holds for an index that
    cannot be read.
    """
    folder = Path(source)
    if not (source and folder.is_dir()):
        return None
    named: set[object] = set()
    for index in folder.glob("*.safetensors.index.json"):
        try:
            weights = read_json(index).get("weight_map")
        except InputError as error:
            return error.cause
        named |= {*weights.values()} if isinstance(weights, dict) else set()
    present = {path.name for path in folder.iterdir() if path.exists()}
    if not (missing := sorted(map(str, named - present))):
        return None
    more = f" and {len(missing) - MAX_MISSING:,} more" if len(missing) > MAX_MISSING else ""
    return f"the folder lacks weights that its index names: {', '.join(missing[:MAX_MISSING])}{more}"


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raise `InputError` if it is missing, too large, unreadable or not an object."""
    if not path.is_file():
        raise InputError(f"got no file {path}", "use the folder of a checkpoint, with its configuration")
    if path.stat().st_size > MAX_BYTES:
        raise InputError(f"got {path} of {path.stat().st_size} bytes", f"use a file of at most {MAX_BYTES} bytes")
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", "use a file that you can read") from None
    except (ValueError, RecursionError) as error:  # a number with thousands of digits also raises ValueError
        raise InputError(f"got {path}, which is not valid JSON: {error}", "copy the file again") from None
    if not isinstance(value, dict):
        raise InputError(f"got {path}, which holds a {type(value).__name__}", "use a file that holds a JSON object")
    return value


def as_json(config: Mapping[str, Any]) -> str:
    """Return the text of a configuration."""
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def require_no_code(source: object, config: Mapping[str, Any]) -> None:
    """Raise `InputError` if a configuration refers to code: files in its folder, or attention from a Hub repository.

    `transformers` downloads such a repository and runs it if the package `kernels` is installed.
    """
    if "auto_map" in config:
        raise InputError(
            f"got {source}, whose model has code of its own", "use a model whose class is part of transformers"
        )
    for part in _parts(config):
        for key in ATTENTION:
            names = part.get(key)
            for name in names.values() if isinstance(names, Mapping) else (names,):
                if isinstance(name, str) and "/" in name:
                    got = f"got {source}, whose attention is code of its own: {key} is {short_repr(name)}"
                    raise InputError(got, f"remove {key} from {CONFIG}")


def _parts(config: Mapping[str, Any]) -> list[Mapping[Any, Any]]:
    """Return the configuration and all mappings in it, at any depth."""
    parts: list[Mapping[Any, Any]] = [config]
    for part in parts:
        parts += [each for each in part.values() if isinstance(each, Mapping)]
    return parts


def _preset(name: str) -> dict[str, Any]:
    all_presets = presets()
    if name in all_presets:
        return all_presets[name]
    architectures: list[str] = []
    if is_installed("transformers"):
        from transformers import CONFIG_MAPPING

        architectures = [*CONFIG_MAPPING]
    is_path = Path(name).is_absolute() or name.startswith((".", "~"))
    close = [
        one
        for names in (all_presets, architectures)
        for one in difflib.get_close_matches(name.lower(), names, 1, 0.6)
        if not is_path
    ]
    other = ", an architecture of transformers" if architectures else ""
    got = f"got {name!r}, which is not a file, a folder{other} or one of the presets {', '.join(all_presets)}"
    raise InputError(got, f"{close[0]!r}, did you mean that?" if close else f"pass the path of a {CONFIG}")
