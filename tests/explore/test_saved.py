"""A saved page, opened from disk: what it computes by itself is what locant computes for the same settings."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from locant.explore.document import render_saved_page
from locant.explore.screens import answer
from locant.explore.session import Session
from tests.explore.conftest import SHOWN, Opens
from tests.explore.screens import SCREENS
from tests.tolerances import SIX_DIGITS

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser

Saves = Callable[[str, dict[str, str]], "Page"]
CURVES = "svg[role=img] path.curve:not(.faint)"

CLOCKS = ("clock", "clocks", "wavelengths", "methods", "cached-keys")
SCORES = ("score-by-distance", "map-1", "map-2")
MOVED = [
    ("rotary", {"scaling": "none"}, {"position": "123456", "pair": "3"}, CLOCKS),
    ("rotary", {"pair": "31"}, {"head_dim": "32", "base": "500000", "trained": "2048"}, CLOCKS),
    ("rotary", {"factor": "4"}, {"scaling": "dynamic", "position": "20000"}, CLOCKS),
    ("rotary", {}, {"scaling": "longrope", "factor": "16"}, CLOCKS),
    ("rotary", {"scaling": "ntk"}, {"scaling": "llama3", "pair": "20"}, CLOCKS),
    ("compare", {"2": "alibi", "3": "none"}, {"alike": "0.25", "length": "300"}, SCORES),
    ("compare", {"2": "t5", "3": "nope"}, {"head": "6", "1.base": "500", "length": "200"}, (*SCORES, "map-3")),
    ("compare", {"1": "sinusoidal", "2": "alibi"}, {"1.base": "100", "2.slope": "0.5", "alike": "0.1"}, SCORES),
    ("compare", {"3": "cope", "length": "32"}, {"1.scaling": "yarn", "1.factor": "2", "1.trained": "64"}, SCORES),
    ("rows", {}, {"documents": "4, 6, 1", "padding": "3", "window": "3"}, ("row", "mask")),
    ("rows", {"cache": "3", "documents": "4, 4"}, {"window": "2", "direction": "both directions"}, ("row", "mask")),
    ("rows", {"ranks": "2", "side": "left"}, {"window": "4"}, ("row", "mask")),
]  # fmt: skip
"""A screen, the settings that it is saved with, those that are changed on the saved page, and pictures that follow."""


@pytest.fixture
def saved(opened: Opens, tmp_path: Path) -> Saves:
    """Opens from disk, without any network, what was saved of these settings."""
    opened("", at="about:blank", shown=False).context.set_offline(True)

    def open_saved(screen: str, settings: dict[str, str]) -> Page:
        file = tmp_path / f"{len([*tmp_path.iterdir()])}.html"
        file.write_text(render_saved_page(answer(screen, settings, Session(is_shared=True))), "utf-8")
        return opened("", at=file.as_uri())

    return open_saved


def set_to(page: Page, name: str, value: str) -> None:
    control = page.locator(f"[data-setting='{name}']")
    kind = control.evaluate("each => each.type")
    if kind == "select-one":
        control.select_option(value)
    elif kind == "range":
        exact = control.locator("..").locator(".exact")
        exact.fill(value)
        exact.press("Enter")
        exact.blur()
    else:
        control.fill(value)
        control.blur()
    page.wait_for_selector(f'#screen[data-shown*=\'"{name}":"{value}"\']:not([aria-busy])')


def table(picture: Locator) -> tuple[list[str], list[list[str]]]:
    with picture.page.expect_download() as download:
        picture.get_by_role("button", name="CSV").click()
    columns, *rows = csv.reader(Path(download.value.path()).read_text("utf-8").splitlines())
    return columns, rows


def place(circle: Locator) -> list[float]:
    return [float(circle.get_attribute(name) or "nan") for name in ("cx", "cy")]


def is_same(mine: str, true: str) -> bool:
    try:
        return math.isclose(float(mine), float(true), rel_tol=SIX_DIGITS, abs_tol=SIX_DIGITS)
    except ValueError:
        return mine == true


@pytest.mark.parametrize(("screen", "before", "changes", "pictures"), MOVED)
def test_pictures_of_closed_forms_follow_their_controls(
    saved: Saves, screen: str, before: dict[str, str], changes: dict[str, str], pictures: tuple[str, ...]
) -> None:
    page, true = saved(screen, before), saved(screen, {**before, **changes})
    for name, value in changes.items():
        set_to(page, name, value)
    for name in pictures:
        mine, theirs = (each.locator(f"[data-picture='{name}']") for each in (page, true))
        assert mine.locator("h2").inner_text() == theirs.locator("h2").inner_text()
        assert mine.locator(CURVES).count() == theirs.locator(CURVES).count()
        (columns, rows), (their_columns, their_rows) = table(mine), table(theirs)
        assert columns == their_columns
        assert len(rows) == len(their_rows)
        for row, their_row in zip(rows, their_rows, strict=True):
            assert all(map(is_same, row, their_row)), (name, row[:8], their_row[:8])


def test_a_slider_moves_the_drawing_itself_and_the_address_which_shows_the_same(saved: Saves) -> None:
    page = saved("rotary", {"position": "0", "pair": "0"})
    tip = page.locator("[data-picture=clock] .tip")
    right = place(tip)[0]
    page.locator("[data-setting=position]").fill("300")  # of the 1,000 places of a slider
    page.wait_for_selector(f'{SHOWN}:not([data-shown*=\'"position":"0"\'])')
    after = page.locator(SHOWN).evaluate("each => JSON.parse(each.dataset.shown).position")
    assert int(after) > 0
    x, y = place(page.locator("[data-picture=clock] .face"))
    angle, radius = int(after), right - x  # pair 0 turns by a radian a token; at position 0 it points to the right
    assert place(tip) == pytest.approx([x + radius * math.cos(angle), y - radius * math.sin(angle)], abs=SIX_DIGITS)
    page.locator("[data-setting=pair]").press("ArrowRight")
    page.wait_for_selector('#screen[data-shown*=\'"pair":"1"\']')
    again = page.context.new_page()
    again.goto(page.url)
    again.wait_for_selector(SHOWN)
    assert again.inner_text("[data-picture=clock]") == page.inner_text("[data-picture=clock]")
    page.go_back()
    page.wait_for_selector('#screen[data-shown*=\'"pair":"0"\']')


@pytest.mark.parametrize("screen", SCREENS)
def test_no_control_of_a_saved_page_is_dead(saved: Saves, screen: str) -> None:
    """What can be moved changes what is shown; the rest are words."""
    page = saved(screen, {})
    assert page.locator(":disabled").count() == 0
    controls = page.locator("#screen :is(input:not(.exact), select, textarea)")
    assert (controls.count() > 0) == (screen in ("rotary", "compare", "rows"))
    for control in controls.all():
        if control.get_attribute("type") != "range":
            continue
        before = page.locator(SHOWN).get_attribute("data-shown")
        control.press("Home" if control.input_value() == "1000" else "End")
        assert page.locator(SHOWN).get_attribute("data-shown") != before, control.get_attribute("data-setting")


def test_what_cannot_be_is_said_and_changes_nothing(saved: Saves) -> None:
    page = saved("rows", {})
    before = page.inner_html("[data-picture=mask] .plot")
    page.locator("[data-setting=documents]").fill("5, x")
    page.wait_for_selector("#notice[data-kind=problem]")
    assert "5, 3, 8" in page.inner_text("#notice")
    assert page.inner_html("[data-picture=mask] .plot") == before


def test_a_scaling_without_a_closed_form_stays_as_it_was_saved(saved: Saves) -> None:
    page = saved("rotary", {"scaling": "proportional", "position": "77"})
    assert page.locator("#screen :is(input, select, textarea)").count() == 0
    assert "position 77" in page.inner_text("[data-picture=clock] h2")
