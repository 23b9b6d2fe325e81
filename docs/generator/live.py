"""The pages that draw by themselves: the explorer's drawing, `docs/live/` and the lessons' figures as one script.

It is no module of JavaScript, so a page that is opened from disk runs it too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from locant.explore.document import bundle_modules, modules, stylesheet

__all__ = ["bare", "script", "setup"]

LIVE = Path(__file__).parents[1] / "live"
LESSONS = Path(__file__).parents[1] / "course" / "figures.js"
NAME = "live.js"


def script() -> str:
    """All of it, which finds the places on a page that it draws in.

    >>> "joined['live/start.js']" in script().replace('"', "'")
    True
    """
    style = stylesheet() + (LIVE / "live.css").read_text("utf-8")
    sources = {
        **modules(),
        **{f"live/{file.name}": file.read_text("utf-8") for file in sorted(LIVE.glob("*.js"))},
        "live/style.js": f"export const STYLE = {json.dumps(style)};\n",
        "course/figures.js": LESSONS.read_text("utf-8"),
    }
    return f"(() => {{\n{bundle_modules(['course/figures.js', 'live/start.js'], sources)}}})();\n"


def bare(*names: str) -> str:
    """A page of these figures alone, or of the screens where none is named, beside the script."""
    figures = [f'<figure class="live" id="essay-{name}"><img alt="{name}"></figure>' for name in names]
    body = "".join(figures) or '<figure id="live-screens"></figure>'
    style = "<style>body { margin: 0 auto; max-width: 1150px; } figure { margin: 0; }</style>"
    wide = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{wide}<title>Live</title>{style}<script src="{NAME}" defer></script>'
    main = f"<main><h1>Live</h1>{body}</main>"
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>{main}</body>\n</html>\n'


def setup(app: Sphinx) -> dict[str, bool]:
    """Write the script, and name it in the pages that have a place for it."""
    app.connect("builder-inited", _write)
    app.connect("html-page-context", _name)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _write(app: Sphinx) -> None:
    if app.builder.format == "html":
        folder = Path(app.outdir) / "_static"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / NAME).write_text(script(), encoding="utf-8")


def _name(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: nodes.document | None) -> None:
    figures = tree.findall(nodes.figure) if tree else ()
    if any("live" in figure["classes"] or "live-screens" in figure["ids"] for figure in figures):
        app.add_js_file(NAME, loading_method="defer")
