"""Formulas as MathML, which browsers draw by themselves: no script, no font and no network."""

from __future__ import annotations

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

__all__ = ["mathml", "setup"]


def mathml(formula: str, *, display: bool) -> str:
    """The formula as a ``<math>`` element.

    >>> mathml("a^2", display=False).startswith("<math")
    True
    """
    return tex2mathml(formula, as_block=display)


def _inline(writer: HTML5Translator, node: nodes.math) -> None:
    _write(writer, node, display=False)


def _block(writer: HTML5Translator, node: nodes.math_block) -> None:
    writer.body.append('<div class="formula" tabindex="0">')  # wide ones scroll, and keys have to reach them
    try:
        _write(writer, node, display=True)
    finally:
        writer.body.append("</div>")


def _write(writer: HTML5Translator, node: nodes.Element, *, display: bool) -> None:
    try:
        writer.body.append(mathml(node.astext(), display=display))
    except MathError as error:
        logging.getLogger(__name__).warning("%s in the formula %s", error, node.astext(), location=node)
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Make ``mathml`` a value of ``html_math_renderer``."""
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
