"""What a reader of the pages sees: code that is not cut off, and pages that are no wider than the screen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DOCS = Path(__file__).parents[2] / "docs"
SITE = DOCS / "_build" / "html"
WIDEST = 96
"""Characters of code between two sidebars, in a window of 1,280 pixels."""

GENERATED = {"_build", "reference"}
PAGES = {
    page.relative_to(DOCS).with_suffix("").as_posix(): page.read_text(encoding="utf-8")
    for page in sorted(DOCS.rglob("*.md"))
    if not GENERATED & {*page.relative_to(DOCS).parts}
}
BLOCK = re.compile(r"^```(?:\{code-cell\}[^\n]*|python|py|toml|bash|sh|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[str]:
    """Code that is shown, and what it prints."""
    return [block for block in BLOCK.findall(page) if ":tags: [remove-input]" not in block]


def test_no_line_of_code_is_cut_off() -> None:
    assert sum(len(blocks(page)) for page in PAGES.values()) > 200
    lines = [(name, line) for name, page in PAGES.items() for block in blocks(page) for line in block.splitlines()]
    assert [(name, line) for name, line in lines if len(line) > WIDEST] == []


CLIPPED = """() => [...document.querySelectorAll('article pre')].filter((each) => each.scrollWidth > each.clientWidth)
    .map((each) => each.textContent.slice(0, 60))"""
WIDE = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
HIDDEN = "() => document.querySelectorAll('details').forEach((each) => { each.open = true; })"


def opened(page: Page, name: str) -> Page:
    page.goto((SITE / f"{name}.html").as_uri())
    page.evaluate(HIDDEN)
    return page


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(not (SITE / "index.html").is_file(), reason="the site is not built; try: make docs")
def test_the_built_pages_clip_no_code_at_a_desk_and_are_no_wider_than_a_phone(browser: Browser) -> None:
    desk, phone = (browser.new_page(viewport={"width": width, "height": 900}) for width in (1280, 390))
    read = [name for name in PAGES if (SITE / f"{name}.html").is_file()]
    assert [(name, found) for name in read if (found := opened(desk, name).evaluate(CLIPPED))] == []
    assert [(name, found) for name in read if (found := opened(phone, name).evaluate(WIDE))] == []
    desk.close()
    phone.close()
