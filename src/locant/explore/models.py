"""The configurations that a visitor chooses from, on every screen that is about one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locant.errors import InputError
from locant.explore.session import Session
from locant.explore.state import State
from locant.files import FaultError, strict_json
from locant.models.registry import presets

__all__ = ["chosen_model"]

FIRST = "qwen2.5-7b"


def chosen_model(state: State, session: Session) -> tuple[str, str, Mapping[str, Any]]:
    """By the name of a preset, as the command line named it, or by the key of a dropped file; and what it is called."""
    known: dict[str, Any] = {**session.configs, **presets(), **session.configs}  # first, and before one of a preset
    dropped = session.dropped_files(state.text("model"))
    titles = {key: file.name for key, file in dropped.items()}
    first = next(iter(session.configs), FIRST)
    name = state.one_of("model", first, [*known, *titles], titles)
    if name in known:
        return name, name, known[name]
    try:
        return name, titles[name], strict_json(dropped[name].content, titles[name])
    except FaultError as error:
        raise InputError(str(error), "the config.json of a model") from None
