"""What a reader of the pages sees: code that is not cut off, and pages that are no wider than the screen."""

from __future__ import annotations

import pydoc
import re
import tomllib
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


def test_captions_have_one_or_two_short_sentences() -> None:
    """The captions of generated reports are tested in `tests/report/test_page.py`."""
    written = [
        (name, " ".join(body.split()))
        for name, page in PAGES.items()
        for body in re.findall(r"^```\{figure\}.*\n(?::.*\n)*\n([^`]+)^```", page, flags=re.MULTILINE)
    ]
    assert len(written) >= 20
    ends = re.compile(r"[.!?](?= |$)")
    assert [each for each in written if len(ends.findall(each[1])) > 2 or len(each[1].split()) > 40] == []


IMAGE = re.compile(r"^```\{(image|figure)\} (\S+)\n((?::.*\n)*)", re.MULTILINE)
LIVE = re.compile(r"^:(figclass: live|name: live-screens)$", re.MULTILINE)


def unpaired(page: str, folder: Path) -> list[str]:
    """The pictures of a page that look the same in both themes, or whose twin does not exist.

    The site draws live figures anew, in its theme, and shows their files only without JavaScript.
    """
    found = re.findall(r"!\[[^\]]*\]\((?!https:)(\S+)\)", page)
    dark = {*re.findall(r'<source media="\(prefers-color-scheme: dark\)" srcset="(.+?)"', page)}
    in_html = re.findall(r'<img src="(.+?)"', page)
    found += [one for one in in_html if "-light." not in one or one.replace("-light.", "-dark.") not in dark]
    shown: dict[str, set[str]] = {}
    for kind, path, options in IMAGE.findall(page):
        theme = re.search(r"-(light|dark)\.\w+$", path)
        if theme is None:
            found += [path] * (kind == "image" or not LIVE.search(options))
            continue
        if not re.search(rf"^:class: .*\bonly-{theme[1]}$", options, re.MULTILINE):
            found.append(path)
        if not path.startswith("/reference/") and not (folder / path).is_file():
            found.append(path)
        shown.setdefault(path.removesuffix(theme[0]), set()).add(theme[1])
    return found + [path for path, themes in shown.items() if len(themes) < 2]


def test_every_picture_follows_the_theme() -> None:
    pages = {**PAGES, "../README": (DOCS.parent / "README.md").read_text(encoding="utf-8")}
    alone = {name: some for name, page in pages.items() if (some := unpaired(page, (DOCS / name).parent))}
    assert alone == {}
    one = "```{image} a-light.svg\n:class: only-light\n:alt: A\n```\n"
    html = '<img src="a.png" alt="A">'
    for wrong in ("![A](a.png)", html, one, one.replace("only-", ""), one.replace("-light.svg", ".svg")):
        assert unpaired(wrong, DOCS), wrong


def test_every_name_that_a_page_links_to_exists() -> None:
    named = [(page, name) for page, text in PAGES.items() for name in re.findall(r"\{py:obj\}`~?([\w.]+)`", text)]
    assert len(named) > 50
    assert [(page, name) for page, name in named if pydoc.locate(name) is None] == []


def test_every_extra_is_on_the_page_of_the_installation() -> None:
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = re.findall(r"^\| (`.*?) \|", PAGES["guides/installation"], flags=re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {*project["optional-dependencies"]}
    torch = next(each for each in project["dependencies"] if each.startswith("torch>="))
    lowest = (project["requires-python"].partition(">=")[2], torch.partition(">=")[2])
    assert "Python {} or newer and PyTorch {} or newer".format(*lowest) in " ".join(
        PAGES["guides/installation"].split()
    )


TERMS = (
    "theta", "rope_theta", "base", "inv_freq", "inverse frequency", "segment", "token_type_ids", "rotate_half",
    "GPT-NeoX style", "GPT-J style", "NTK", "YaRN", "original_max_position_embeddings", "sinks", "window", "mrope",
    "QK-norm", "finetune",
)  # fmt: skip


def test_the_glossary_has_the_words_of_other_programs_with_a_link_each() -> None:
    glossaries = re.findall(r"```\{glossary\}\n(.*?)```", PAGES["glossary"], flags=re.DOTALL)
    entries = [entry for glossary in glossaries for entry in re.split(r"\n\n", glossary.strip())]
    terms = [line for entry in entries for line in entry.splitlines() if not line.startswith("  ")]
    assert {*TERMS} - {*terms} == set()
    assert len(terms) == len(set(terms))
    assert [entry for entry in entries if not re.search(r"\]\(|\{py:obj\}", entry)] == []


CLIPPED = """() => [...document.querySelectorAll('article pre, article .pst-scrollable-table-container')]
    .filter((each) => each.scrollWidth > each.clientWidth + 1).map((each) => each.textContent.slice(0, 60))"""
WIDE = """() => [document.documentElement, ...document.querySelectorAll('.bd-article-container')]
    .filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.scrollWidth)"""
WITHOUT_KEYS = """() => [...document.querySelectorAll("article *")]
    .filter((each) => each.scrollWidth > each.clientWidth + 1
    && /auto|scroll/.test(getComputedStyle(each).overflowX) && each.tabIndex < 0).map((each) => each.className)"""
TOO_WIDE = {"guides/swapped-models.html"}
"""Ten columns, with the names of classes."""
HIDDEN = "() => document.querySelectorAll('details').forEach((each) => { each.open = true; })"


def opened(page: Page, name: str) -> Page:
    page.goto((SITE / name).as_uri())
    page.evaluate(HIDDEN)
    return page


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(not (SITE / "index.html").is_file(), reason="the site is not built; try: make docs")
def test_the_built_pages_clip_nothing_at_a_desk_and_are_no_wider_than_a_phone(browser: Browser) -> None:
    """Code and tables fit at a desk. On a phone they scroll by themselves, and keys reach what scrolls."""
    desk, phone = (browser.new_page(viewport={"width": width, "height": 900}) for width in (1280, 390))
    built = [page.relative_to(SITE).as_posix() for page in sorted(SITE.rglob("*.html"))]
    read = [name for name in built if not name.startswith(("_static/", "_sources/"))]
    assert len(read) > 100
    clipped = {name: found for name in read if (found := opened(desk, name).evaluate(CLIPPED))}
    assert {name: found for name, found in clipped.items() if name not in TOO_WIDE} == {}
    wide, without_keys = {}, {}
    for name in read:
        wide[name] = opened(phone, name).evaluate(WIDE)
        without_keys[name] = phone.evaluate(WITHOUT_KEYS)
    assert {name: found for name, found in wide.items() if found} == {}
    assert {name: found for name, found in without_keys.items() if found} == {}
    desk.close()
    phone.close()
