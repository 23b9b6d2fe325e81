"""Docstrings as they are written in this package, for autodoc."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.inspect import signature, stringify_signature

from locant.positions import PositionEncoding

__all__ = ["setup"]

BEFORE_NAPOLEON = 400


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect before `sphinx.ext.napoleon`, which would take the words before a colon for the type of an attribute."""
    app.connect("autodoc-process-docstring", _attributes_are_described_in_words, priority=BEFORE_NAPOLEON)
    app.connect("autodoc-process-signature", _show_one_signature)
    app.connect("autodoc-process-signature", _show_the_constructor)
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


def _show_the_constructor(
    app: object, what: str, name: str, value: Any, options: object, shown: str | None, returned: str | None
) -> tuple[str, str | None] | None:
    """Return what the constructor of an encoding takes. Otherwise autodoc shows `__new__`, which takes anything.

    A default that a dataclass makes is written so that Sphinx can read the signature.
    """
    if what != "class" or not issubclass(value, PositionEncoding):
        return (shown.replace("<factory>", "..."), returned) if shown and "<factory>" in shown else None
    given = signature(value.__init__, bound_method=True)
    return stringify_signature(given, show_return_annotation=False, unqualified_typehints=True), None
