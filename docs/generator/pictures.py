"""A place for each picture, which scrolls where the picture is wider than the screen, also with the keys.

On a telephone a picture that is made as narrow as the screen has words that nobody can read.
"""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx

__all__ = ["give_places"]


def give_places(app: Sphinx, tree: nodes.document, page: str) -> None:
    """Put every picture that stands by itself, in a figure or in an output, into its place.

    Pictures in a text, in a link and in a card keep the width that they have there. Live figures are drawn to measure.
    The theme of the site gives a place to each picture of a pair for light and dark paper.
    """
    if app.builder.format != "html":
        return
    for image in [*tree.findall(nodes.image)]:
        if not isinstance(image.parent, nodes.TextElement) and not _has_its_width(image):
            image.replace_self([_html('<div class="picture" tabindex="0">'), image.deepcopy(), _html("</div>")])


def _has_its_width(node: nodes.Node) -> bool:
    parent = node
    while isinstance(parent, nodes.Element):
        if {"sd-card", "live", "only-light", "only-dark"} & {*parent["classes"]} or "live-screens" in parent["ids"]:
            return True
        parent = parent.parent
    return False


def _html(text: str) -> nodes.raw:
    return nodes.raw("", text, format="html")
