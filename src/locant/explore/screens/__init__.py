"""What a screen is, and which there are: each file here registers one by its ``SCREEN``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from locant.arguments import one_of
from locant.explore.session import Session
from locant.explore.state import State

__all__ = ["Screen", "find_screen", "screens"]

Numbers = Callable[[State, Session], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Screen:
    """A screen of the explorer. Its page is ``page/screens/NAME.js``, and its name that of its file.

    Args:
        title: in the list of screens.
        place: its number in that list.
        about: one sentence under the title.
        numbers: all that the screen shows, computed for the settings of an address.
    """

    title: str
    place: int
    about: str
    numbers: Numbers


@cache
def screens() -> dict[str, Screen]:
    """Every screen by its name, in the order of the list."""
    names = [file.name for file in pkgutil.iter_modules(__path__)]
    found = {name: importlib.import_module(f"{__name__}.{name}").SCREEN for name in names}
    return dict(sorted(found.items(), key=lambda item: item[1].place))


def find_screen(name: str) -> Screen:
    """The screen of this name."""
    return screens()[one_of("screen", name, screens())]
