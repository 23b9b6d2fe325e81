"""Configurations from where people have them: a ``config.json``, a model's folder, or the name of a preset."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from locant.errors import InputError
from locant.models.registry import presets

__all__ = ["Source", "read_source"]

NAME = "config.json"

Source = str | Path


def read_source(source: Source) -> dict[str, Any]:
    """The configuration at a path, or of a preset; a path that exists wins.

    >>> read_source("gpt2")["n_positions"]
    1024
    """
    path = Path(source)
    if str(source) and path.is_dir():
        path = path / NAME
        if not path.is_file():
            raise InputError(f"got the folder {source}, which holds no {NAME}", "the folder of a model, or a file")
    if not path.is_file():
        return _preset(str(source))
    return _parsed(path)


def _parsed(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", "a file that you may read") from None
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise InputError(f"got {path}, which is not JSON that can be read: {error}", f"the {NAME} of a model") from None
    if not isinstance(config, dict):
        raise InputError(f"got {path}, which holds a {type(config).__name__}", f"the {NAME} of a model, an object")
    return config


def _preset(name: str) -> dict[str, Any]:
    known = presets()
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    raise InputError(
        f"got {name!r}, which is no file, no folder, and none of the presets {', '.join(known)}",
        f"{close[0]!r}, did you mean that?" if close else f"the path of a {NAME}",
    )
