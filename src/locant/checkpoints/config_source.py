"""Configurations from where people have them: a ``config.json``, the folder of a model, or the name of a preset."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from locant.arguments import shown
from locant.errors import InputError
from locant.models.registry import presets

CONFIG = "config.json"
LARGEST = 2**28
ATTENTION = ("attn_implementation", "_attn_implementation")


def read_source(source: str | Path) -> dict[str, Any]:
    """The configuration at a path, or of a preset; a path that exists wins.

    >>> read_source("gpt2")["n_positions"]
    1024
    """
    path = Path(source)
    if str(source) and path.is_dir():
        path /= CONFIG
        if not path.is_file():
            raise InputError(f"got the folder {source}, which holds no {CONFIG}", "the folder of a model, or a file")
    return read_json(path) if path.is_file() else _preset(str(source))


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
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    got = f"got {name!r}, which is no file, no folder, and none of the presets {', '.join(known)}"
    raise InputError(got, f"{close[0]!r}, did you mean that?" if close else f"the path of a {CONFIG}")
