"""Results: the report of a comparison, from a folder, or of one that runs here."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from locant.errors import InputError
from locant.explore.comparison import Comparison
from locant.explore.screen import Screen
from locant.explore.session import Session
from locant.explore.state import State
from locant.lab.results import RESULTS
from locant.lab.settings import Settings
from locant.lab.summary import Cell, Summary, summarise
from locant.positions.registry import encodings
from locant.report.comparison.sentences import sentences

__all__ = ["SCREEN", "start"]

NOTHING = "none yet"
SAMPLE = "sample text"
POINTS = 200
"""Of a training curve: more would be below the width of a screen."""
NEIGHBOURS = 16
"""Positions whose losses are averaged: single ones differ by what stands there in the text."""


def numbers(state: State, session: Session) -> Mapping[str, Any]:
    """Losses by length and by position of one report, what they say, and how far a comparison is that runs here."""
    folders = session.reports
    runs = {key: run.folder for key, run in session.comparisons.items()}
    titles = {key: str(folder) for key, folder in runs.items()}
    known = {**folders, **runs}
    name = state.one_of("report", next(iter(known), NOTHING), [*known, *([] if known else [NOTHING])], titles)
    options(state, session)
    run = session.comparisons.get(name)
    summary = None if name == NOTHING else _summary(known[name], required=run is None)
    return {
        "folder": str(known.get(name, "")),
        "state": None if run is None else run.state,
        "done": 0 if run is None else run.done,
        "total": 0 if run is None else run.total,
        "training": {} if run is None else {label: _thinned(losses) for label, losses in run.losses.items()},
        "said": [] if summary is None else sentences(summary),
        **_curves(summary),
        "python": _code(known.get(name)),
    }


def options(state: State, session: Session) -> dict[str, Any]:
    """What a new comparison would be of; all of it are settings of this screen."""
    names = tuple(filter(None, map(str.strip, state.text("encodings", "nope, rotary, alibi", 400).split(","))))
    texts = [SAMPLE, *(str(file) for file in session.files if file.is_file())]
    return {
        "text": state.one_of("text", texts[-1], texts),
        "encodings": names,
        "num_steps": state.whole("steps", 100, 1, 2000, log=True),
        "train_length": state.whole("train", 64, 8, 256, log=True),
        "seeds": tuple(range(state.whole("seeds", 1, 1, 5))),
    }


def start(state: State, session: Session) -> str:
    """Begin a comparison with the settings of an address; returns the key by which the screen shows it."""
    chosen = options(state, session)
    text = chosen.pop("text")
    Settings(**chosen)  # what is wrong is said now, and not by a process
    numbered = (Path(f"explore-report-{number}") for number in itertools.count(1))
    folder = next(folder for folder in numbered if not folder.exists())
    return session.compare(lambda: Comparison([] if text == SAMPLE else [text], chosen, folder))


def _summary(folder: Path, *, required: bool) -> Summary | None:
    """Of what a folder holds; of a comparison that runs there may be nothing yet."""
    try:
        results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        return summarise(results)
    except FileNotFoundError:
        if not required:
            return None
        raise InputError(f"got {folder}, which holds no {RESULTS}", "a folder that `locant compare` wrote") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        cause = f"got {folder / RESULTS}, which is not what a comparison writes"
        raise InputError(cause, "locant compare -o, into another folder") from None


def _curves(summary: Summary | None) -> dict[str, Any]:
    if summary is None:
        return {"lengths": np.zeros(0), "trained": 0, "rows": []}
    rows = [
        {
            "name": row.encoding,
            "by_length": _cells([row.by_length.get(length) for length in summary.lengths]),
            "by_position": _smooth(_cells(row.by_position)),
            "train_loss": None if row.train_loss is None else row.train_loss.mean,
        }
        for row in summary.rows
    ]
    return {"lengths": np.array(summary.lengths), "trained": summary.train_length, "rows": rows}


def _cells(cells: Sequence[Cell | None]) -> np.ndarray:
    return np.array([np.nan if cell is None else cell.mean for cell in cells])


def _smooth(values: np.ndarray) -> np.ndarray:
    """Means over `NEIGHBOURS`, fewer at the ends."""
    counts = np.convolve(np.ones(len(values)), np.ones(NEIGHBOURS), "same")
    return np.convolve(values, np.ones(NEIGHBOURS), "same") / counts if len(values) >= NEIGHBOURS else values


def _thinned(losses: list[float]) -> dict[str, np.ndarray]:
    steps = np.unique(np.linspace(0, len(losses) - 1, min(len(losses), POINTS)).round().astype(np.int64))
    return {"steps": steps + 1, "losses": np.array(losses)[steps]}


def _code(folder: Path | None) -> str:
    return (
        "import json\nfrom pathlib import Path\n\nfrom locant.lab.summary import summarise\n\n"
        f"results = json.loads((Path({str(folder or 'report')!r}) / 'results.json').read_text())\n"
        "for row in summarise(results).rows:\n"
        "    print(row.encoding, {length: cell.mean for length, cell in row.by_length.items() if cell})\n"
    )


SCREEN = Screen(
    title="Results",
    place=7,
    about=f"Which encoding works at lengths that it was not trained at? Of {len(encodings())}, measured on your text.",
    numbers=numbers,
)
