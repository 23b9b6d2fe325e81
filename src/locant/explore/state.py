"""The settings in an address, read with their defaults and limits: these become the controls of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from locant.arguments import MAX_INT32, Real, one_of, real, whole
from locant.errors import RangeError

__all__ = ["SCALING_TITLES", "State", "read_address"]

LONGEST = 100_000
"""Characters of one setting."""

SCALING_TITLES = {
    "linear": "linear (position interpolation)", "ntk": "NTK-aware", "dynamic": "dynamic NTK", "yarn": "YaRN",
    "longrope": "LongRoPE", "llama3": "Llama 3", "proportional": "proportional (Gemma 4)",
}  # fmt: skip
"""What a page calls scalings in words."""


def read_address(address: str) -> tuple[str, dict[str, str]]:
    """The screen and the settings of the part of an address after its ``#``.

    >>> read_address("compare?1=rotary&1.base=500000")
    ('compare', {'1': 'rotary', '1.base': '500000'})
    """
    screen, _, settings = address.removeprefix("#").partition("?")
    return screen, dict(parse_qsl(settings))


class State:
    """Settings by name, as texts. Whatever is read is a control of the page, with its limits and its value.

    >>> state = State({"length": "64"})
    >>> state.whole("length", 128, 2, 4096), state.one_of("layout", "half", ["half", "interleaved"])
    (64, 'half')
    >>> state.settled
    {'length': '64', 'layout': 'half'}
    """

    def __init__(self, given: Mapping[str, str], prefix: str = "", controls: dict[str, Any] | None = None) -> None:
        self._given = given
        self._prefix = prefix
        self.controls: dict[str, Any] = {} if controls is None else controls

    @property
    def settled(self) -> dict[str, str]:
        """Every setting that was read, defaults included."""
        return {name: control["text"] for name, control in self.controls.items()}

    def part(self, prefix: str) -> State:
        """The settings whose names begin with this, by the rest of their names."""
        return State(self._given, f"{self._prefix}{prefix}.", self.controls)

    def whole(
        self, name: str, default: int, low: int, high: int = MAX_INT32, *, log: bool = False, even: bool = False,
        follows: bool = False,
    ) -> int:  # fmt: skip
        """An integer, an even one where that is asked for; `log`: the slider moves by factors.

        `follows`: the limits depend on other settings, so a number that was within them may lie beyond when these
        change, and is then the nearest limit.
        """
        text = self._text(name, default)
        remedy = f"{name}={default}"
        try:
            value = int(text) if len(text) < 20 else text
        except ValueError:
            value = text
        if follows and isinstance(value, int):
            value = min(max(value, low), high)
        number = whole(name, value, low, high, even=even, remedy=remedy)
        return self._settle(name, "whole", number, low=low, high=high, log=log, step=2 if even else 1)

    def real(self, name: str, default: float, low: Real, high: Real, *, log: bool = False) -> float:
        """A number; `log` as in `whole`."""
        text = self._text(name, default)
        try:
            value: Any = float(text)
        except ValueError:
            value = text
        number = float(real(name, value, low=low, high=high, remedy=f"{name}={default:g}"))
        return self._settle(name, "real", number, low=low, high=high, log=log)

    def one_of(self, name: str, default: str, names: Sequence[str], titles: Mapping[str, str] | None = None) -> str:
        """One of these, shown by their `titles` where these have some."""
        value = one_of(name, self._text(name, default), names)
        return self._settle(name, "choice", value, choices=list(names), titles=dict(titles or {}))

    def text(self, name: str, default: str = "", longest: int = LONGEST) -> str:
        """Any text of at most so many characters."""
        value = self._text(name, default)
        if len(value) > longest:
            raise RangeError(f"got {len(value):,} characters for {name}, expected at most {longest:,}", "a shorter one")
        return self._settle(name, "text", value, longest=longest)

    def _text(self, name: str, default: object) -> str:
        return self._given.get(self._prefix + name, str(default))

    def _settle(self, name: str, kind: str, value: Any, **limits: Any) -> Any:
        text = f"{value:.12g}" if kind == "real" else str(value)
        full = self._prefix + name
        self.controls[full] = {"name": full, "kind": kind, "value": value, "text": text, **limits}
        return value
