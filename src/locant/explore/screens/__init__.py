"""The screens of the explorer, and their answers in JSON, in which an array is stored as bytes.

Each file here registers its screens in ``SCREENS``.
"""

from __future__ import annotations

import base64
import importlib
import inspect
import json
import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from locant.arguments import one_of
from locant.errors import InputError, LocantError
from locant.explore.session import Session, State
from locant.positions.base import has_pair_sets
from locant.positions.encodings.convolutional import Convolutional
from locant.positions.registry import encodings

__all__ = [
    "Screen", "answer", "answer_for_one_screen", "answer_link", "as_json", "call_with_code", "encodings_of_text",
    "evenly_spaced_numbers", "find_screen", "screens", "sentence",
]  # fmt: skip


@dataclass(frozen=True)
class Screen:
    """A screen of the explorer, whose page is ``page/screens/NAME.js``.

    Args:
        title: its title in the list of screens.
        place: its number in that list.
        about: one sentence below the title.
        numbers: a function that computes the contents of the screen for the settings of an address.
    """

    title: str
    place: int
    about: str
    numbers: Callable[[State, Session], Mapping[str, Any]]


def encodings_of_text() -> list[str]:
    """Return the names of encodings whose scores of two text tokens depend on these tokens alone.

    Encodings of images, convolutions and encodings of the tokens between two others (PaTH) are left out.
    """
    of_images = {"height", "num_axes"}
    return [
        name for name, kind in encodings().items()
        if not (of_images & {*inspect.signature(kind).parameters} or kind is Convolutional or has_pair_sets(kind))
    ]  # fmt: skip


@cache
def screens() -> dict[str, Screen]:
    """Return every screen by its name, in the order of the list."""
    modules = [importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
    named = [item for module in modules for item in module.SCREENS.items()]
    return dict(sorted(named, key=lambda item: item[1].place))


def find_screen(name: str) -> Screen:
    """Return the screen of this name."""
    return screens()[one_of("screen", name, screens())]


def call_with_code(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, str]:
    """Call a function, and return its result and the text of the call.

    >>> call_with_code(math.gcd, 12, 18)
    (6, 'math.gcd(12, 18)')
    """
    name = function.__qualname__
    name = name if "." in name else f"{function.__module__.rpartition('.')[2]}.{name}"
    words = [*map(repr, arguments), *(f"{option}={value!r}" for option, value in options.items())]
    return function(*arguments, **options), f"{name}({', '.join(words)})"


def evenly_spaced_numbers(count: int, most: int) -> np.ndarray:
    """Return at most `most` evenly spaced whole numbers from 0 to `count` - 1."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def answer(name: str, given: Mapping[str, str], session: Session) -> dict[str, Any]:
    """Return the contents of a screen, which are the settings as read, their controls, and the numbers."""
    return _answer(name, State(given), session)


def _answer(name: str, state: State, session: Session) -> dict[str, Any]:
    try:
        numbers = find_screen(name).numbers(state, session)
    except RecursionError:
        raise InputError("got values nested too deeply", "use a configuration as transformers writes it") from None
    return {"screen": name, "state": state.settings, "controls": state.controls, "numbers": numbers}


def answer_link(name: str, given: Mapping[str, str], session: Session) -> dict[str, Any]:
    """Return the contents of a screen for an address from elsewhere, without the settings that cannot be shown.

    ``refused`` holds the errors, and ``left_out`` the names of these settings. An error belongs to the setting that was
    read last.
    """
    settings, refused = dict(given), list[str]()
    while True:
        state = State(settings)
        try:
            shown = _answer(name, state, session)
        except LocantError as error:
            last = next((read for read in reversed(state.controls) if read in settings), None)
            if last is None:
                raise
            refused.append(sentence(error))
            del settings[last]
        else:
            left_out = [setting for setting in given if setting not in settings]
            return {**shown, "refused": [*dict.fromkeys(refused)], "left_out": left_out}


def sentence(error: LocantError) -> str:
    """Return the sentence that a page shows for an error."""
    return f"{error.cause}. Try: {error.remedy}" if error.remedy else error.cause


def answer_for_one_screen(name: str, given: Mapping[str, str], session: Session) -> dict[str, Any]:
    """Return the contents of the only screen of a page. It must show every file and every configuration."""
    alone = answer(name, given, session)
    offered = {choice for control in alone["controls"].values() for choice in control.get("choices", ())}
    unseen = [name for name in dict.fromkeys([*session.names, *session.configs]) if name not in offered]
    if unseen:
        remedy = "use the screen text for texts and models, model for configurations, results for reports"
        raise InputError(f"the screen {name} shows nothing of {', '.join(unseen)}", remedy)
    return alone


def as_json(value: Any) -> str:
    """Return JSON for a browser. Numbers that are not finite become ``null``, except in arrays."""
    return json.dumps(_to_plain(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        number = np.ascontiguousarray(value, dtype=np.int32 if value.dtype.kind in "iub" else np.float32)
        data = base64.b64encode(number.astype(number.dtype.newbyteorder("<")).tobytes()).decode()
        return {"array": number.dtype.name, "shape": list(number.shape), "data": data}
    if isinstance(value, Mapping):
        return {str(key): _to_plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
