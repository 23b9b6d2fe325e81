"""Docstrings as they are written in this package, for autodoc."""

from __future__ import annotations

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

__all__ = ["setup"]

BEFORE_NAPOLEON = 400


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect before `sphinx.ext.napoleon`, which would take the words before a colon for the type of an attribute."""
    app.connect("autodoc-process-docstring", _attributes_are_described_in_words, priority=BEFORE_NAPOLEON)
    app.connect("autodoc-process-signature", _show_one_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _attributes_are_described_in_words(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # a type would stand in the first line that is not empty: a comment is in its place


def _show_one_signature(app: object, what: str, name: str, value: object, *others: object) -> None:
    """Forget the overloads of a function. Otherwise autodoc lists them instead of the function's own signature."""
    if what == "function":
        analyzer = ModuleAnalyzer.for_module(value.__module__)
        analyzer.analyze()
        analyzer.overloads.clear()
