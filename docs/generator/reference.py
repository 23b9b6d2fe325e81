"""Writes ``docs/reference/``: a page for each encoding, scaling, family of models and module, and the gallery.

Every fact comes from its one home: the classes' `info` and docstrings, and the rows of `locant.models`. Pictures are
those of `locant.plot`, for light and for dark paper, drawn anew when the source has changed.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sphinx.application import Sphinx
from sphinx.util import logging

import locant
from docs.generator import explorer, known_bugs, losses, speed
from docs.generator.api import api_pages
from docs.generator.citation import citation
from docs.generator.colours import in_each_theme
from docs.generator.command_line import command_line
from docs.generator.encodings import encoding_page, plot_scaling, question, scaling_page, scalings, title
from docs.generator.markdown import card, index, summary
from docs.generator.models import families, family_page, plot_family
from docs.generator.models import title as family_title
from docs.generator.models_table import models_table
from docs.generator.reach import how_far, reused_keys
from docs.generator.real_models import position_bugs
from docs.generator.records import benchmarks, engines, recorded
from docs.generator.trained import page as trained_models
from docs.generator.trained import pictures as pictures_of_trained_models
from locant.figures.canvas import THEMES
from locant.positions.registry import encodings

__all__ = ["pages", "pictures", "setup"]

MEASURED = {"models/all.md": models_table}
"""Pages that take seconds, since they build what `transformers` has."""

SCALINGS_WORDS = """\
Scalings extend the context of [Rotary](#encoding-rotary) by changing its frequencies. Each is a pure function of its
fields. If the frequencies depend on the length of the sequence, pass the length to `rotary.for_length(n)`.
`rotary.rerotate` converts cached keys to another length. `locant extend` writes the configuration for a longer
context."""

FAMILIES_WORDS = """\
How published models encode positions. [One table](#models-table) lists all models. `Rotary.from_config` reads the
configuration of a model with rotary positions, and `encoding_from_config` that of any of these models. Every key about
rotary positions is either used or raises an error. If a standard key is missing, `locant explain` uses the default of
the architecture and prints it. To add [another architecture](../../extending.md), write one row."""


def setup(app: Sphinx) -> dict[str, bool]:
    """Write the pages before Sphinx looks for them."""
    app.connect("config-inited", lambda app, config: write(Path(app.srcdir) / "reference", app.parallel))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def pages() -> dict[str, str]:
    """Every generated page by its path; what ends in .txt is a part of a page that is written by hand."""
    own = {kind: f"encoding-{name}" for name, kind in encodings().items()}
    own |= {kind: f"scaling-{name}" for name, kind in scalings().items()}
    return {
        **{f"encodings/{name}.md": encoding_page(name, kind) for name, kind in encodings().items()},
        **{f"scalings/{name}.md": scaling_page(name, kind) for name, kind in scalings().items()},
        **{f"models/{name}.md": family_page(name, module) for name, module in families().items()},
        **api_pages(own),
        **_indexes(),
        "command-line.md": command_line(),
        "recorded.txt": recorded(),
        "known_bugs.txt": known_bugs.entries(),
        "famous_bugs.txt": known_bugs.famous(),
        "benchmarks.txt": benchmarks(),
        "engines.txt": engines(),
        **speed.parts(),
        **explorer.parts(),
        "how_far.txt": how_far(),
        "reused_keys.txt": reused_keys(),
        "position_bugs.txt": position_bugs(),
        "trained_models.txt": trained_models(),
        "citation.txt": citation(),
    }


def pictures() -> dict[str, Callable[..., Any]]:
    """What draws each picture, by its path without theme and suffix; it takes `theme`."""
    return {
        **{f"encodings/{name}": partial(locant.plot, name) for name in encodings()},
        **{f"scalings/{name}": partial(plot_scaling, name) for name in scalings()},
        **{f"models/{name}": partial(plot_family, module) for name, module in families().items()},
        **pictures_of_trained_models(),
        **known_bugs.pictures(),
        **losses.pictures(),
    }


def write(folder: Path, workers: int = 1) -> None:
    """Write the pages and pictures that have changed, and remove pages that are no more."""
    written = pages() | {path: page() for path, page in MEASURED.items()}
    for path, text in written.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
    for file in folder.rglob("*.md"):
        if file.relative_to(folder).as_posix() not in written:
            file.unlink()
    changed = max(file.stat().st_mtime for file in Path(locant.__file__).parent.rglob("*.py"))
    stems = {path: folder / "pictures" / path for path in pictures()}
    stale = {path: stem for path, stem in stems.items() if _drawn_at(stem) <= changed}
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        list(pool.map(_draw, stale, stale.values()))


def _files(stem: Path) -> dict[str, Path]:
    """Return the file of a picture in each theme."""
    return {theme: stem.with_name(f"{stem.name}-{theme}.svg") for theme in THEMES}


def _drawn_at(stem: Path) -> float:
    return min(file.stat().st_mtime if file.is_file() else 0.0 for file in _files(stem).values())


def _draw(path: str, stem: Path) -> None:
    logging.getLogger(__name__).info("drawing %s", path)
    stem.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)  # tables of a family's encoding are drawn as they are made
    drawn = in_each_theme(pictures()[path])
    for theme, file in _files(stem).items():
        file.write_text(drawn[theme], encoding="utf-8")


def _indexes() -> dict[str, str]:
    own = {
        "encoding": _cards("encoding", encodings(), title),
        "scaling": _cards("scaling", scalings(), lambda kind: kind.__name__),
        "model": _cards("model", families(), family_title),
    }
    asked = [
        *_cards("encoding", encodings(), question),
        *_cards("scaling", scalings(), lambda kind: f"{kind.__name__}: which wavelengths change?"),
        *_cards("model", families(), lambda family: f"{family_title(family)}: where do positions enter?"),
    ]
    encodings_words = f"One page for each of {len(encodings())} encodings."
    scalings_words = f"One page for each of {len(scalings())} scalings. {SCALINGS_WORDS}"
    return {
        "encodings/index.md": index("encodings", "Encodings", encodings_words, own["encoding"], [*encodings()]),
        "scalings/index.md": index("scalings", "Scalings", scalings_words, own["scaling"], [*scalings()]),
        "models/index.md": index("models", "Model families", FAMILIES_WORDS, own["model"], ["all", *families()]),
        "gallery.md": index(
            "gallery", "Gallery", "Pictures by `locant plot`: all encodings, scalings by 8, published models.", asked,
        ),
    }  # fmt: skip


def _cards(kind: str, members: Mapping[str, Any], titled: Callable[[Any], str]) -> list[str]:
    """A card for each page of a kind, which leads to it."""
    return [
        card(f"{kind}s/{name}", f"{kind}-{name}", titled(member), summary(member)) for name, member in members.items()
    ]
