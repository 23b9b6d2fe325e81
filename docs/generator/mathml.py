"""Formulas as MathML, which browsers draw by themselves: no script, no font and no network."""

from __future__ import annotations

import re

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

__all__ = ["mathml", "setup"]

FUNCTION = re.compile(r"\\(?:sin|cos|log|ln|exp)(?:_\w|\^\w)?(?=\s*(?:[A-Za-z0-9]|\\(?!left|,)[A-Za-z]))")
"""The name of a function that a letter, a number or a command follows."""


def mathml(formula: str, *, display: bool) -> str:
    r"""The formula as a ``<math>`` element; a thin space stands between the name of a function and what has no bracket.

    >>> mathml("a^2", display=False).startswith("<math")
    True
    >>> mathml(r"\cos p", display=False) == mathml(r"\cos \, p", display=False) != mathml(r"\cos(p)", display=False)
    True
    """
    return tex2mathml(FUNCTION.sub(r"\g<0>\\,", formula), as_block=display)


def _inline(writer: HTML5Translator, node: nodes.math) -> None:
    _write(writer, node, node.astext(), display=False)
    raise nodes.SkipNode


def _block(writer: HTML5Translator, node: nodes.math_block) -> None:
    writer.body.append('<div class="formula" tabindex="0">')  # wide ones scroll, and keys have to reach them
    for part in node.astext().split(r"\qquad"):  # beside each other, or below each other where there is no room
        _write(writer, node, part, display=True)
    writer.body.append("</div>")
    raise nodes.SkipNode


def _write(writer: HTML5Translator, node: nodes.Element, formula: str, *, display: bool) -> None:
    try:
        writer.body.append(mathml(formula, display=display))
    except MathError as error:
        logging.getLogger(__name__).warning("%s in the formula %s", error, formula, location=node)


def setup(app: Sphinx) -> dict[str, bool]:
    """Make ``mathml`` a value of ``html_math_renderer``."""
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
