"""A picture has a place of its own that scrolls, unless it stands in a text, a card or a live figure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from docutils import nodes
from docutils.utils import new_document

from docs.generator.pictures import give_places


def shown(parent: nodes.Element, kind: str = "html", classes: tuple[str, ...] = ()) -> list[str]:
    tree = new_document("page")
    tree += parent
    parent += nodes.image("", uri="a.svg", classes=[*classes])
    give_places(cast("Any", SimpleNamespace(builder=SimpleNamespace(format=kind))), tree, "page")
    return [child.astext() if isinstance(child, nodes.raw) else type(child).__name__ for child in parent.children]


@pytest.mark.parametrize("parent", [nodes.section(), nodes.figure(), nodes.container(classes=["cell_output"])])
def test_a_picture_by_itself_has_a_place_that_keys_reach(parent: nodes.Element) -> None:
    assert shown(parent) == ['<div class="picture" tabindex="0">', "image", "</div>"]


@pytest.mark.parametrize(
    "parent",
    [
        nodes.paragraph(),
        nodes.reference(),
        nodes.container(classes=["sd-card", "sd-shadow"]),
        nodes.figure(classes=["live"]),
        nodes.figure(ids=["live-screens"]),
    ],
)
def test_another_picture_stays(parent: nodes.Element) -> None:
    assert shown(parent) == ["image"]


def test_a_picture_for_one_theme_has_the_place_of_the_theme() -> None:
    assert shown(nodes.section(), classes=("only-dark",)) == ["image"]


def test_only_html_has_places() -> None:
    assert shown(nodes.section(), kind="text") == ["image"]
