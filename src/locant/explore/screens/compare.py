"""The screen Compare: up to four encodings on one axis, by distance and as maps of query and key."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from locant.errors import LocantError
from locant.explore.screens import Screen, encodings_of_text, evenly_spaced_numbers
from locant.explore.session import Session, State
from locant.figures import SIZES, TRAINED
from locant.figures.plot import encoding_to_draw
from locant.figures.scores import random_contents, score_by_distance, score_map, with_random_tables
from locant.positions import PositionEncoding
from locant.positions.encodings.alibi import alibi_slopes
from locant.positions.registry import find
from locant.positions.scaling import SCALINGS
from locant.spelling import spell

SLOTS = ("1", "2", "3", "4")
FIRST = {"1": "rotary", "2": "alibi", "3": "sinusoidal"}
NONE = "none"

MAX_LENGTH = 2**17
POINTS, SIDE = 256, 128
"""The largest number of distances on a curve, and of positions on a map."""
DRAWS, COSTLY_DRAWS = 32, 4
"""Numbers of pairs of contents. The second is for encodings in which each pair needs a matrix: biases that depend on
the contents, and rotations that differ between heads."""

VISIBLE = 16.0
"""The range of scores on maps and curves. A score this far below another gets e^-16 of the other's weight."""


@dataclass(frozen=True)
class Choice:
    """The encoding that is chosen in a slot of the page."""

    slot: str
    name: str
    options: tuple[tuple[str, Any], ...]
    label: str

    @property
    def kind(self) -> type[PositionEncoding]:
        """The class of the encoding."""
        return find(self.name)

    @property
    def draws(self) -> int:
        """The number of pairs of contents for which the encoding is drawn."""
        by_content = "bias" in self.kind.methods() and not hasattr(self.kind, "of_distance")
        by_head = "rotate" in self.kind.methods() and "num_heads" in inspect.signature(self.kind).parameters
        return COSTLY_DRAWS if by_content or by_head else DRAWS

    def build(self, length: int) -> Any:
        """Return the encoding for rows of this length."""
        return _build(self.name, self.options, length)

    def code(self, length: int) -> str:
        """Return the Python code that builds the encoding."""
        arguments = "".join(f", {name}={value!r}" for name, value in self.options)
        grows = ".for_length(length)" if hasattr(self.build(length), "seq_len") and self.build(length).seq_len else ""
        return f"with_random_tables(encoding_to_draw({self.name!r}, length=length{arguments})){grows}"


def numbers(state: State, session: Session) -> Mapping[str, Any]:
    """Return the curve and the map of every slot with an encoding, all for the same contents."""
    length = state.whole("length", 128, 2, MAX_LENGTH, log=True)
    head = state.whole("head", 3, 0, SIZES["num_heads"] - 1)
    alike = state.real("alike", 0.75, 0, 1)
    at = state.whole("at", 0, 0, MAX_LENGTH)
    chosen = [choice for slot in SLOTS if (choice := _read_choice(state, slot, head)) is not None]
    shown: list[dict[str, Any]] = [
        {"slot": int(choice.slot), "name": choice.name, "label": choice.label, "methods": list(choice.kind.methods()),
         **_draw(choice, length, alike, head)}
        for choice in chosen
    ]  # fmt: skip
    curves = [each["mean"] for each in shown if "mean" in each]
    high = max((float(curve.max()) for curve in curves), default=1.0)
    low = max(min((float(curve.min()) for curve in curves), default=0.0), high - VISIBLE)
    return {
        "length": length,
        "distances": evenly_spaced_numbers(length, POINTS),
        "positions": evenly_spaced_numbers(length, SIDE),
        "at": min(at, length - 1),
        "low": low,
        "high": high,
        "encodings": shown,
        "contents": _contents() if session.is_shared else None,
        "python": _codes([one for one, each in zip(chosen, shown, strict=True) if "mean" in each], length, alike, head),
    }


def _read_choice(state: State, slot: str, head: int) -> Choice | None:
    name = state.one_of(slot, FIRST.get(slot, NONE), [NONE, *encodings_of_text()])
    if name == NONE:
        return None
    settings, takes = state.part(slot), inspect.signature(find(name)).parameters
    options: dict[str, Any] = {"d_model": SIZES["head_dim"]} if "d_model" in takes else {}
    words: list[str] = []
    if "original_max_seq_len" in takes:
        options["original_max_seq_len"] = settings.whole("trained", TRAINED, 7, MAX_LENGTH, log=True)
        words.append(f"trained with {options['original_max_seq_len']:,}")
    if "base" in takes:
        options["base"] = settings.real("base", float(takes["base"].default), 2, 1e9, log=True)
        if options["base"] != takes["base"].default:
            words.append(f"base {spell(options['base'])}")
    if "scaling" in takes:
        scaling = settings.one_of("scaling", NONE, [NONE, *SCALINGS])
        if scaling != NONE:
            factor = settings.real("factor", 4.0, 1, 128, log=True)
            trained = settings.whole("trained", TRAINED, 1, MAX_LENGTH, log=True)
            options |= {"scaling": f"{scaling}:{spell(factor)}", "trained": trained}
            words.append(f"{scaling} ×{spell(factor)}")
    if name == "alibi":
        usual = alibi_slopes(SIZES["num_heads"])[head]
        slope = settings.real("slope", usual, 0, 1)
        if slope != usual:
            options["slopes"] = (slope,) * SIZES["num_heads"]
        words.append(f"slope {spell(slope, 4)}")
    return Choice(slot, name, tuple(options.items()), ", ".join([name, *words]))


@lru_cache(maxsize=32)
def _build(name: str, options: tuple[tuple[str, Any], ...], length: int) -> Any:
    encoding: Any = with_random_tables(encoding_to_draw(name, length=length, **dict(options)))
    scaling = getattr(encoding, "scaling", None)
    return encoding if getattr(scaling, "length_threshold", None) is None else encoding.for_length(length)


def _draw(choice: Choice, length: int, alike: float, head: int) -> Mapping[str, Any]:
    """Return the curve and the map of one encoding, or a note if it cannot be drawn, so that others are still drawn."""
    contents: dict[str, Any] = {"alike": alike, "head": head, "draws": choice.draws}
    try:
        encoding = choice.build(length)
        if encoding.needs_all_keys and length > SIDE:
            return {"note": f"counts every token between query and key, so it is drawn only up to {SIDE} tokens"}
        curve = score_by_distance(encoding, evenly_spaced_numbers(length, POINTS), **contents)
        matrix = score_map(encoding, evenly_spaced_numbers(length, SIDE), **contents)
    except LocantError as error:
        return {"note": error.cause}
    if not getattr(encoding, "bidirectional", False):
        matrix[np.triu_indices(len(matrix), 1)] = np.nan
    return {**curve._asdict(), "map": matrix}


def _contents() -> Mapping[str, Any]:
    """Return the data for scores on a saved page: orthogonal unit vectors, a row per draw, and T5's random table."""
    contents = random_contents(SIZES["head_dim"], DRAWS, alike=0.0)[:, :DRAWS, 0] / SIZES["head_dim"] ** 0.5
    q, other = contents.numpy()
    return {"q": q, "other": other, "table": _build("t5", (), 1).weight.detach().numpy()}


def _codes(chosen: list[Choice], length: int, alike: float, head: int) -> dict[str, str]:
    """Return the code of the chart and of the map of each encoding."""

    def begun(function: str, places: str, most: int) -> str:
        return (
            "import matplotlib.pyplot as plt\nimport numpy as np\n\nfrom locant.figures.plot import encoding_to_draw\n"
            f"from locant.figures.scores import {function}, with_random_tables\n\nlength = {length}\n"
            f"{places} = np.unique(np.linspace(0, length - 1, min(length, {most})).round()).astype(int)\n"
        )

    arguments = f"alike={alike!r}, head={head}, draws"
    built = "\n".join(f"    {one.label!r}: ({one.code(length)}, {one.draws})," for one in chosen)
    curves = (
        f"encodings = {{\n{built}\n}}\nfor name, (encoding, draws) in encodings.items():\n"
        f"    scores = score_by_distance(encoding, distances, {arguments}=draws)\n"
        "    plt.plot(distances, scores.mean, label=name)\n"
        "    plt.fill_between(distances, scores.low, scores.high, alpha=0.15)\n"
        'plt.xlabel("distance (tokens)")\nplt.ylabel("score")\nplt.legend()\nplt.show()\n'
    )
    maps = {
        f"map-{one.slot}": begun("score_map", "positions", SIDE)
        + f"encoding = {one.code(length)}\nscores = score_map(encoding, positions, {arguments}={one.draws})\n"
        'plt.imshow(scores)\nplt.xlabel("key")\nplt.ylabel("query")\nplt.show()\n'
        for one in chosen
    }
    return {"score-by-distance": begun("score_by_distance", "distances", POINTS) + curves, **maps}


ABOUT = "How attention scores change with distance, for each encoding, with the contents held fixed."
SCREENS = {"compare": Screen("Compare", 1, ABOUT, numbers)}
