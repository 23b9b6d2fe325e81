"""Make the explorer's page, with separate modules from a server or as one file that holds its numbers.

Without a server, the modules are joined into one. Each module follows the modules that it imports, and becomes the body
of a function that returns its exports. Every import must be one line that imports names from a file.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2.utils import htmlsafe_json_dumps

from locant.explore.screens import as_json, screens
from locant.figures.canvas import DARK, LIGHT, Theme
from locant.report.page import colors, templates

PAGE = Path(__file__).parent / "page"
IMPORT = re.compile(r'^import ({.+}) from "(\.[^"]+)";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


@cache
def modules() -> dict[str, str]:
    """Return the page's JavaScript, by path."""
    return {path.relative_to(PAGE).as_posix(): path.read_text("utf-8") for path in sorted(PAGE.rglob("*.js"))}


@cache
def stylesheet() -> str:
    """Return the style sheet of the page or the widget, with the colours of locant's pictures and the rules."""
    light = _colors(LIGHT, card="#f6f7f9", accent="#0b62a8", mark="#e8f1fa")
    dark = _colors(DARK, card="#1d2126", accent="#6cb2ea", mark="#22303d")
    return (
        f":root, :host {{ color-scheme: light; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ color-scheme: dark; {dark} }} }}\n"
        f":root[data-theme=dark], :host([data-theme=dark]) {{ color-scheme: dark; {dark} }}\n"
        + (PAGE / "style.css").read_text("utf-8")
    )


def _colors(theme: Theme, **more: str) -> str:
    return colors(theme, **{f"curve-{number}": color for number, color in enumerate(theme.curves, 1)}, **more)


def render_live_page() -> str:
    """Return the page that requests its numbers from a server."""
    return _page("./screens/", None)


def render_saved_page(answer: Mapping[str, Any]) -> str:
    """Return a page with one answer, as one file."""
    return _page("screens/", answer, style=stylesheet(), script=bundle("start.js"))


@cache
def bundle(entry: str) -> str:
    """Return one module with this file of the page (as ``joined[entry]``), its imports and every screen."""
    return bundle_modules((*(f"screens/{name}.js" for name in screens()), entry), modules())


def bundle_modules(paths: Iterable[str], sources: Mapping[str, str]) -> str:
    """Return one module with these files and their imports, each as ``joined[path]``."""
    parts: dict[str, str] = {}

    def join(path: str) -> str:
        def assign(imported: re.Match[str]) -> str:
            source = posixpath.normpath(posixpath.join(posixpath.dirname(path), imported[2]))
            return f'const {imported[1]} = joined["{join(source)}"];'

        if path not in parts:
            names = ", ".join(EXPORT.findall(sources[path]))
            body = EXPORT.sub("", IMPORT.sub(assign, sources[path])).replace("await import(", "await load(")
            parts[path] = f'joined["{path}"] = (() => {{\n{body}return {{ {names} }};\n}})();\n'
        return path

    for path in paths:
        join(path)
    return f"const joined = {{}};\nconst load = async (path) => joined[path];\n{''.join(parts.values())}"


def _page(folder: str, answer: Mapping[str, Any] | None, **code: str) -> str:
    """Return the page with its initial data, and with its style and script if it has no server."""
    listed = [
        {"name": name, "title": screen.title, "about": screen.about, "module": f"{folder}{name}.js"}
        for name, screen in screens().items()
        if answer is None or answer["screen"] == name
    ]
    data = htmlsafe_json_dumps({"screens": listed, "exported": answer}, dumps=as_json)
    return templates(PAGE).get_template("index.html").render(data=data, in_one_file=answer is not None, **code)
