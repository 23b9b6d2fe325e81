"""The page: as it is served, with its modules beside it, or as one file that opens from disk and holds its numbers."""

from __future__ import annotations

import base64
import posixpath
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from locant.explore.answers import as_json
from locant.explore.screen import screens
from locant.figures.canvas import DARK, LIGHT, Theme

__all__ = ["exported", "modules", "served", "stylesheet"]

PAGE = Path(__file__).parent / "page"
IMPORT = re.compile(r'(?<=from ")(\.[^"]+)(?=";)')

EXPORTED_POLICY = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data: blob:"
"""No network at all: everything is in the file."""


@cache
def modules() -> dict[str, str]:
    """The page's JavaScript, by path."""
    return {path.relative_to(PAGE).as_posix(): path.read_text("utf-8") for path in sorted(PAGE.rglob("*.js"))}


@cache
def stylesheet() -> str:
    """The rules of the page, after the colours, which are those of every picture of this package."""
    dark = _colors(DARK, "#1d2126", "#6cb2ea", "#22303d")
    return (
        f":root {{ color-scheme: light; {_colors(LIGHT, '#f6f7f9', '#0b62a8', '#e8f1fa')} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ color-scheme: dark; {dark} }} }}\n"
        f":root[data-theme=dark] {{ color-scheme: dark; {dark} }}\n" + (PAGE / "style.css").read_text("utf-8")
    )


def _colors(theme: Theme, card: str, accent: str, mark: str) -> str:
    values = {name: getattr(theme, name) for name in ("paper", "ink", "muted", "grid")}
    values |= {f"curve-{number}": color for number, color in enumerate(theme.curves, 1)}
    values |= {"card": card, "accent": accent, "mark": mark}
    return " ".join(f"--{name}: {value};" for name, value in values.items())


def served() -> str:
    """The page that asks a server for its numbers."""
    head = '<link rel="stylesheet" href="page/style.css">\n<script type="module" src="page/start.js"></script>'
    return _filled(head, _data("./screens/", None))


def exported(answer: Mapping[str, Any]) -> str:
    """The page of one answer, in one file: modules are imported by names, which a map in the file leads to."""
    named = {f"locant/{path}": _as_address(_with_names(path, code)) for path, code in modules().items()}
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{EXPORTED_POLICY}">\n<style>\n{stylesheet()}</style>\n'
        f'<script type="importmap">{as_json({"imports": named})}</script>\n'
        '<script type="module">import "locant/start.js";</script>'
    )
    return _filled(head, _data("locant/screens/", answer))


def _data(folder: str, answer: Mapping[str, Any] | None) -> str:
    """What the page reads first; no ``<`` in it can end the element that it stands in."""
    listed = [
        {"name": name, "title": screen.title, "about": screen.about, "module": f"{folder}{name}.js"}
        for name, screen in screens().items()
    ]
    return as_json({"screens": listed, "exported": answer}).replace("<", "\\u003c")


def _filled(head: str, data: str) -> str:
    page = (PAGE / "index.html").read_text("utf-8")
    before, _, rest = page.partition("<!-- head -->")
    between, _, after = rest.partition("<!-- data -->")
    return f'{before}{head}{between}<script type="application/json" id="data">{data}</script>{after}'


def _with_names(path: str, code: str) -> str:
    folder = posixpath.dirname(path)
    return IMPORT.sub(lambda found: "locant/" + posixpath.normpath(posixpath.join(folder, found[0])), code)


def _as_address(code: str) -> str:
    return "data:text/javascript;base64," + base64.b64encode(code.encode()).decode()
