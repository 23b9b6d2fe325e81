"""Registries that tests add to."""

from __future__ import annotations

from typing import Any

import pytest

from locant.registry import LOADED, Registry

__all__ = ["restore"]


def restore(registry: Registry[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered from here on is forgotten with the test."""
    dict(registry.items())  # this package's own are filled in when they are first asked for, and what is installed
    monkeypatch.setattr("locant.registry.LOADED", [*LOADED])
    for table in ("_values", "_aliases", "_offers", "broken"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
