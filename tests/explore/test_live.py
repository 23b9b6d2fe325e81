"""The page without Python and the figures of the essay, opened from disk in a real Chromium."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from docs.generator.live import NAME, bare, script
from docs.generator.stills import FIGURES, FOLDER
from tests.tolerances import PHASE, SEVEN_DIGITS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.browser

SHOWN = "#screen[data-shown]"
LONGEST = 60_000
WIDTHS = (390, 1280)
THEMES = ("light", "dark")


@dataclass(frozen=True)
class Visit:
    """A visit to one screen: settings that are not the defaults, its pictures, and a control that is then moved."""

    address: str
    pictures: tuple[str, ...]
    control: str
    text: str
    more: tuple[str, ...] = field(default=())
    """Other settings at which each picture's Python is run."""


SCREENS = {
    "clocks": Visit(
        address="position=123&pair=9&head_dim=32&base=500000&scaling=yarn&trained=2048&factor=4",
        pictures=("clock", "clocks", "wavelengths"),
        control="position",
        text="Pair 9 at position 123",
        more=("scaling=none", "scaling=longrope&factor=2"),
    ),
    "distance": Visit(
        address="length=100&head_dim=32&base=500&scaling=ntk&trained=2048&factor=4",
        pictures=("score",),
        control="length",
        text="NTK-aware, factor 4",
        more=("length=5000&scaling=none", "scaling=llama3&base=500000&trained=8192&factor=32"),
    ),
    "biases": Visit(
        address="tokens=32&both=yes&heads=12&head=10&buckets=16&most=40",
        pictures=("alibi", "t5"),
        control="heads",
        text="ALiBi, head 10 of 12",
        more=("tokens=20",),
    ),
    "scalings": Visit(
        address="head_dim=32&base=500000&trained=8192&factor=4",
        pictures=("methods", "curves"),
        control="factor",
        text="of 16 pairs turn less than once",
    ),
    "packing": Visit(
        address="lengths=4%2C+6&padding=1&causal=no&window=3",
        pictures=("row", "mask"),
        control="padding",
        text="2 documents in a row of 11 tokens",
        more=("lengths=3,0,5&padding=0&causal=yes&window=2", "lengths=7"),
    ),
}


class Site:
    """Pages from disk, none of which may complain, or ask for anything but what lies beside it."""

    def __init__(self, browser: Browser, folder: Path, **context: Any) -> None:
        self.folder = folder
        (folder / NAME).write_text(script(), encoding="utf-8")
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce", **context)
        self.context.set_default_timeout(LONGEST)
        self.context.set_offline(True)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.context.on("request", lambda request: self.asked.append(request.url))
        self.context.on("weberror", lambda error: self.said.append(str(error.error)))
        self.context.on("console", lambda message: self.said.append(message.text))

    def open(self, *names: str, part: str = "") -> Page:
        file = self.folder / "page.html"
        file.write_text(bare(*names), encoding="utf-8")
        page = self.context.new_page()
        page.goto(f"{file.as_uri()}{part}")
        page.wait_for_selector(SHOWN)
        return page

    def close(self) -> None:
        self.context.close()
        assert self.said == []
        assert [url for url in self.asked if not url.startswith(("file:", "data:", "blob:"))] == []


@pytest.fixture
def site(browser: Browser, tmp_path: Path) -> Iterator[Site]:
    opened = Site(browser, tmp_path, accept_downloads=True)
    yield opened
    opened.close()


def values(page: Page) -> dict[str, Any]:
    return page.locator(SHOWN).evaluate("each => JSON.parse(each.dataset.shown)")


def numbers(picture: Locator) -> list[list[float]]:
    """The table of a picture without its names."""
    page = picture.page
    with page.expect_download() as download:
        picture.get_by_role("button", name="CSV").click()
    rows = [*csv.reader(Path(download.value.path()).read_text("utf-8").splitlines())][1:]
    first = 0 if picture.get_attribute("data-picture") in ("clock", "clocks", "wavelengths", "score") else 1
    return [[float(each) if each else math.nan for each in row[first:]] for row in rows]


@pytest.mark.parametrize("name", SCREENS)
def test_the_python_of_every_picture_gives_its_numbers(site: Site, name: str) -> None:
    for settings in (SCREENS[name].address, *SCREENS[name].more):
        page = site.open(part=f"#{name}?{settings}")
        for each in SCREENS[name].pictures:
            picture = page.locator(f"[data-picture={each}]")
            code = picture.locator("pre").text_content()
            assert code is not None
            names: dict[str, Any] = {}
            exec(code, names)  # noqa: S102  # what the page offers to copy
            ours = names["values"]
            rows = ours.tolist() if isinstance(ours, torch.Tensor) else [[float(one) for one in row] for row in ours]
            shown = numbers(picture)
            assert len(shown) == len(rows), (each, settings)
            for mine, true in zip(shown, rows, strict=True):
                assert mine == pytest.approx(true, rel=SEVEN_DIGITS, abs=PHASE, nan_ok=True), (each, settings)
        page.close()


@pytest.mark.parametrize("name", SCREENS)
def test_a_link_restores_a_screen_and_a_key_on_a_slider_changes_it(site: Site, name: str) -> None:
    visit = SCREENS[name]
    page = site.open(part=f"#{name}?{visit.address}")
    assert visit.text in page.locator("#screen").inner_text()
    before = values(page)
    slider = page.locator(f"[data-setting={visit.control}]")
    slider.focus()
    page.keyboard.press("ArrowRight")
    after = values(page)
    assert after[visit.control] > before[visit.control]
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector(SHOWN)
    assert values(other) == after
    page.go_back()
    page.wait_for_function("part => location.href.includes(part)", arg=visit.address)
    assert values(page) == before


def test_screens_are_links_and_an_anchor_of_the_page_around_changes_nothing(site: Site) -> None:
    page = site.open()
    for name in SCREENS:
        page.locator(f"nav a[href='#{name}']").click()
        page.wait_for_selector(f"nav a[aria-current][href='#{name}']")
        for each in SCREENS[name].pictures:
            assert page.locator(f"[data-picture={each}] svg[role=img]").count() == 1
    page.locator("[data-setting=window]").press("ArrowRight")
    page.evaluate("location.hash = 'somewhere'")
    page.wait_for_timeout(50)
    assert page.locator("nav a[aria-current]").get_attribute("href") == "#packing"
    page.locator("[data-setting=padding]").press("ArrowRight")
    assert page.url.partition("#")[2].startswith("packing?")
    assert (values(page)["window"], values(page)["padding"]) == (1, 3)


def test_the_link_that_is_copied_holds_every_setting(browser: Browser, tmp_path: Path) -> None:
    site = Site(browser, tmp_path, permissions=["clipboard-read", "clipboard-write"])
    page = site.open(part="#distance")
    page.get_by_role("button", name="Copy link").click()
    page.wait_for_selector("text=Copied")
    address = page.evaluate("navigator.clipboard.readText()")
    assert address.startswith(f"{(tmp_path / 'page.html').as_uri()}#distance?length=512&")
    assert set(values(page)) == set(re.findall(r"[?&](\w+)=", address))
    site.close()


IMPOSSIBLE = {
    "#clocks?position=-5&pair=99999&head_dim=33&base=x&scaling=<b>": {
        "position": 0, "pair": 16, "head_dim": 34, "base": 10_000, "scaling": "none",
    },
    "#biases?head=70&buckets=9e9&most=1": {"head": 7, "buckets": 64, "most": 64},
    "#packing?window=2.4&padding=": {"window": 2, "padding": 2},
    "#nowhere?x=1": {"position": 100},
}  # fmt: skip


@pytest.mark.parametrize(("part", "settings"), IMPOSSIBLE.items())
def test_what_cannot_be_is_the_default_or_the_limit(site: Site, part: str, settings: dict[str, Any]) -> None:
    shown = values(site.open(part=part))
    assert {name: shown[name] for name in settings} == settings


def test_axe_finds_nothing_in_either_theme_and_nothing_is_wider_than_the_screen(site: Site) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    pages = [site.open(part=f"#{name}") for name in SCREENS]
    pages.append(site.open(*FIGURES))
    for page in pages:
        for theme in THEMES:
            paper, ink = ("#14181e", "#ffffff") if theme == "dark" else ("#ffffff", "#000000")
            page.evaluate("theme => { document.documentElement.dataset.theme = theme; }", theme)
            page.evaluate(
                "([background, color]) => Object.assign(document.body.style, { background, color })", [paper, ink]
            )
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": 900})
                page.wait_for_function("width => document.documentElement.scrollWidth <= width", arg=width)
            found = axe.Axe().run(page).response["violations"]
            assert [(each["id"], [node["target"] for node in each["nodes"]]) for each in found] == []


def test_pictures_follow_the_theme_of_the_page(site: Site) -> None:
    page = site.open(part="#scalings")
    line = page.locator("[data-picture=curves] .curve").first
    colors = []
    for theme in THEMES:
        page.evaluate("theme => { document.documentElement.dataset.theme = theme; }", theme)
        colors.append(line.evaluate("each => getComputedStyle(each).stroke"))
    assert colors[0] != colors[1]


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_of_the_essay_begins_as_its_still_picture(site: Site, name: str) -> None:
    page = site.open(name)
    still = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    titles = page.locator("figcaption h2").all_inner_texts()
    assert titles
    for title in titles:
        assert f">{title}</text>" in still
    curves = page.locator("path.curve").evaluate_all("all => all.length")
    assert still.count('class="curve slot') >= curves
    for each in page.locator("input[type=range]").all():  # all of them can be moved
        before = page.locator(SHOWN).get_attribute("data-shown")
        each.press("End" if each.input_value() != "1000" else "Home")
        assert page.locator(SHOWN).get_attribute("data-shown") != before


def test_an_animation_plays_until_it_is_stopped_and_a_slider_stops_it(site: Site) -> None:
    page = site.open("turn")
    page.get_by_role("button", name="Play").click()
    page.wait_for_selector("#screen[data-shown*='\"position\":3']")
    page.get_by_role("button", name="Pause").click()
    at = values(page)["position"]
    page.wait_for_timeout(400)
    assert values(page)["position"] == at
    page.get_by_role("button", name="Play").click()
    page.locator("[data-setting=distance]").press("ArrowRight")
    page.get_by_role("button", name="Play").wait_for()
    assert values(page)["distance"] == 5
