"""What screens show, and what tests in the browser do with each: a new screen has an entry here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from locant.explore.screens import answer
from locant.explore.session import Session

__all__ = ["EVALUATED", "SCREENS", "Visit", "executed", "numbers_of"]


def numbers_of(screen: str, session: Session | None = None, /, **given: str) -> dict[str, Any]:
    """The numbers of a screen for these settings."""
    return answer(screen, given, session or Session())["numbers"]


def executed(numbers: dict[str, Any], picture: str = "", /, **names: Any) -> dict[str, Any]:
    """The names that the Python of a picture leaves, which the page offers to copy; or of all."""
    exec(numbers["python"][picture] if picture else numbers["python"], names)  # noqa: S102
    return names


@dataclass(frozen=True)
class Visit:
    """A visit to one screen.

    Args:
        address: settings that are not the defaults, as a permalink holds them.
        pictures: the names of its pictures there.
        setting, value: a control, and what it is set to; it must then stand in the address.
        text: what has to be read somewhere on the screen.
    """

    address: str
    pictures: tuple[str, ...]
    setting: str
    value: str
    text: str


SCREENS = {
    "compare": Visit(
        address="1=rotary&1.base=500000&2=t5&3=none&length=96&at=5",
        pictures=("score-by-distance", "map-1", "map-2"),
        setting="2",
        value="alibi",
        text="rotary, base 500,000",
    ),
    "rotary": Visit(
        address="head_dim=32&base=500000&scaling=yarn&factor=4&position=123456&pair=9",
        pictures=("clock", "clocks", "wavelengths", "methods", "cached-keys", "precision"),
        setting="scaling",
        value="dynamic",
        text="Pair 9 at position 123,456",
    ),
    "model": Visit(
        address="model=mistral-7b&to=65536&method=ntk&pair=3",
        pictures=("layers", "pairs"),
        setting="method",
        value="linear",
        text="what changes for 65,536 tokens",
    ),
    "swap": Visit(
        address="model=mistral-7b&with=yarn&factor=8&layers=every&every=8&pair=3",
        pictures=("layers", "pairs"),
        setting="with",
        value="nope",
        text="yarn:8 in 4 of 32 layers",
    ),
    "images": Visit(
        address="frames=3&rows=4&columns=5&before=2&after=3&pairs=16&frame_pairs=4&row_pairs=6&at=30",
        pictures=("frame-0", "frame-2", "index", "pairs", "wavelengths"),
        setting="scheme",
        value="contiguous",
        text="The 60 tokens of the image take up 5 indices, from 2 on, and text continues at 7.",
    ),
    "rows": Visit(
        address="documents=4%2C+4&padding=0&cache=3&window=3&at=5",
        pictures=("row", "mask"),
        setting="documents",
        value="6",
        text="attends to 2 of 11 keys",
    ),
    "known_bugs": Visit(
        address="bug=bfloat16-positions&position=700",
        pictures=("curves",),
        setting="bug",
        value="documents-run-on",
        text="Positions from 2,049 on merged",
    ),
    "text": Visit(
        address="typed=The+cat+sat+%5BSEP%5D+here&count=20&length=4&stride=2&at=2&layer=1&head=3",
        pictures=("tokens", "vectors", "keys", "rotated", "attended", "weights", "far"),
        setting="encoding",
        value="alibi",
        text="bytes 61 74, at position 2.",
    ),
    "results": Visit(
        address="encodings=nope%2C+alibi&steps=20&train=16",
        pictures=(),
        setting="encodings",
        value="nope, rotary",
        text="The spread is over 3 seeds",
    ),
}

EVALUATED = {
    "settings": {"ways": ["own", "yarn:4"], "lengths": [16, 64], "text": {"source": "a text"}},
    "environment": {},
    "records": [
        {
            "encoding": name, "seed": 0, "train_length": 32, "train_loss": None,
            "loss_by_length": {"16": 2.0 + at, "64": None if at else 3.0},
            "loss_by_position": [2.0, 3.0], "loss_by_window": {"16": [2.0] * 12, "64": [3.0] * 3},
            "interval_by_length": {"16": [1.5 + at, 2.5 + at], "64": None if at else [2.5, 3.5]},
            "pass_keys": [{"length": length, "depth": depth, "recalled": at * (length > 16), "asked": 2 * (length > 16)}
                          for length in (16, 64) for depth in (0.0, 1.0)],
        }
        for at, name in enumerate(("own", "yarn:4"))
    ],
}  # fmt: skip
"""As `locant evaluate` writes it."""
