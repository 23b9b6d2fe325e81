"""The figure of each lesson, in a real Chromium: it draws, a slider changes it, and its numbers are locant's."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from docs.generator.live import LESSONS as SCRIPT
from docs.generator.stills import FOLDER, IMAGES, LESSONS
from locant import ALiBi, Positions, Rotary, Sinusoidal
from locant.positions.scaling import scaling_by_name
from locant.scaling import Linear
from tests.docs.test_essay import cosine, strange, word
from tests.explore.test_live import Site, site, values  # noqa: F401  # the same
from tests.tolerances import PHASE, SEVEN_DIGITS

if TYPE_CHECKING:
    from playwright.sync_api import Locator

COURSE = Path(__file__).parents[2] / "docs" / "course"
FIGURE = re.compile(r"```\{figure\} \.\./images/(\w+)/(\w+)\.svg\n:figclass: live\n:name: lesson-(\w+)\n:alt: (.+)\n\n")

Rows = list[list[float]]


def likeness(given: dict[str, Any]) -> Rows:
    return [[cosine(position)] for position in range(101)]


def mask(given: dict[str, Any]) -> Rows:
    """The distance of every pair that attends, and nothing for the others."""
    lengths = [int(each) for each in given["lengths"].split(",")]
    positions = Positions.packed(lengths, length=sum(lengths) + given["padding"])
    allowed = positions.mask(causal=given["causal"] == "yes", window=given["window"] or None)[0, 0]
    index = positions.index[0].double()
    return (index[:, None] - index).masked_fill(~allowed, math.nan).tolist()


def moved_scores(given: dict[str, Any]) -> Rows:
    """Two words at one distance, with added sines and rotated, by the position of the query."""
    query, key = (torch.from_numpy(word(name)) for name in ("dog", "bit"))
    here = Positions.arange(193)
    codes = Sinusoidal(64).vectors(here)[0].double()
    rotary = Rotary(64)
    turned = [rotary.rotate_one(each.expand(1, 1, 193, 64).contiguous(), here)[0, 0] for each in (query, key)]
    rows = []
    for at in range(32, 193):
        before = at - given["distance"]
        sums = (query + codes[at]) @ (key + codes[before])
        rows.append([float(sums) / 8, float(turned[0][at] @ turned[1][before]) / 8])
    return rows


def turned_arrows(given: dict[str, Any]) -> Rows:
    """Where the arrows of a query and a key point: their cosines, sines and lengths."""
    rotary = Rotary(2, scaling=Linear(factor=1 / given["frequency"]))
    rows = []
    for at, angle, length in ((given["position"] + given["distance"], 0.9, 0.65), (given["position"], 0.5, 0.85)):
        arrow = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64) * length
        rows.append([*rotary.rotate_one(arrow[None, None, None], Positions.of([[at]]))[0, 0, 0].tolist(), length])
    return rows


def arrows(rows: Rows) -> Rows:
    return [[length * math.cos(angle), length * math.sin(angle), length] for angle, length in rows]


def alibi(given: dict[str, Any]) -> Rows:
    count = given["tokens"]
    bias = ALiBi(given["heads"]).matrix(count)[given["head"]].double()
    return bias.masked_fill(torch.ones(count, count).triu(1).bool(), math.nan).tolist()


def mean_cosines(given: dict[str, Any]) -> Rows:
    frequencies = Rotary(given["head_dim"], base=given["base"]).inv_freq
    return torch.cos(torch.arange(given["length"] + 1)[:, None] * frequencies).mean(-1, keepdim=True).tolist()


def hands(given: dict[str, Any]) -> Rows:
    frequencies = Rotary(64).inv_freq.numpy() if given["scaling"] == "none" else scaled(given["scaling"])
    return [
        [given["position"] * each, 4096 * plain] for each, plain in zip(frequencies, Rotary(64).inv_freq, strict=True)
    ]


def slowed(given: dict[str, Any]) -> Rows:
    sizes = (given["trained"], given["head_dim"], given["base"])
    plain = Rotary(given["head_dim"], base=given["base"]).inv_freq
    rows = []
    for name in ("linear", "ntk", "dynamic", "yarn", "longrope", "llama3"):
        scaling = scaling_by_name(f"{name}:{given['factor']}", *sizes)
        longer = Rotary(given["head_dim"], base=given["base"], scaling=scaling)
        rows.append((plain / longer.for_length(round(given["trained"] * given["factor"])).inv_freq).tolist())
    return rows


def sines(given: dict[str, Any]) -> Rows:
    return Sinusoidal(16, base=given["base"]).vectors(Positions.arange(64))[0].T.tolist()


@dataclass(frozen=True)
class Lesson:
    """A slider of a lesson's figure, a picture of it, what its table holds by locant, and how it is read for that."""

    slider: str
    picture: str
    numbers: Callable[[dict[str, Any]], Rows]
    read: Callable[[Rows], Rows] | None = None


FIGURES = {
    "embeddings": Lesson("position", "alike", likeness),
    "windows": Lesson("window", "mask", mask),
    "addition": Lesson("distance", "scores", moved_scores),
    "rotation": Lesson("distance", "plane", turned_arrows, arrows),
    "biases": Lesson("head", "alibi", alibi),
    "segments": Lesson("padding", "mask", mask),
    "gpt": Lesson("head_dim", "score", mean_cosines),
    "extrapolation": Lesson("position", "faces", hands),
    "stretching": Lesson("factor", "methods", slowed),
    "meaning": Lesson("base", "codes", sines),
}


def test_every_lesson_has_one_figure_with_a_still_picture_and_says_what_to_try() -> None:
    named = {*re.findall(r"^  (\w+): ", SCRIPT.read_text(encoding="utf-8"), flags=re.MULTILINE)}
    pages = {file.stem: file.read_text(encoding="utf-8") for file in COURSE.glob("*.md") if file.stem != "index"}
    assert set(pages) == named == set(FIGURES)
    for name, page in pages.items():
        [(folder, still, lesson, words)] = FIGURE.findall(page)
        assert (lesson, folder) == (name, "course" if name in LESSONS else "essay")
        assert (IMAGES / folder / f"{still}.svg").is_file()
        assert len(words) > 40
        caption = page[FIGURE.search(page).end() :].split("```")[0]  # type: ignore[union-attr]
        assert re.search(r"\bTry\b|\bPress\b|\bMove\b", caption)
    assert {file.stem for file in (IMAGES / "course").glob("*.svg")} == {*LESSONS}


def numbers(picture: Locator) -> Rows:
    """The table of a picture, without the names or places of its first column."""
    with picture.page.expect_download() as download:
        picture.locator("button[aria-label^=CSV]").evaluate("each => each.click()")
    rows = [*csv.reader(Path(download.value.path()).read_text("utf-8").splitlines())][1:]
    return [[float(each) if each else math.nan for each in row[1:]] for row in rows]


DRAWN = "each => each.innerHTML + (each.querySelector('canvas')?.toDataURL() ?? '')"
"""Lines, and the dots of a map."""


@pytest.mark.browser
@pytest.mark.parametrize("name", FIGURES)
def test_the_figure_of_a_lesson_draws_changes_with_its_slider_and_has_the_numbers_of_locant(
    site: Site,  # noqa: F811
    name: str,
) -> None:
    lesson = FIGURES[name]
    page = site.open(f"lesson-{name}")
    picture = page.locator(f"[data-picture={lesson.picture}]")
    folder = IMAGES / "course" if name in LESSONS else FOLDER
    [(_, still, _, _)] = FIGURE.findall((COURSE / f"{name}.md").read_text(encoding="utf-8"))
    for title in page.locator("figcaption h2").all_inner_texts():
        assert f">{title}</text>" in (folder / f"{still}.svg").read_text(encoding="utf-8")
    seen = []
    for _ in range(2):
        settings = values(page)
        table = numbers(picture)
        shown = lesson.read(table) if lesson.read else table
        true = lesson.numbers(settings)
        assert np.shape(shown) == np.shape(true)
        np.testing.assert_allclose(shown, true, rtol=SEVEN_DIGITS, atol=PHASE, equal_nan=True)
        seen.append((settings[lesson.slider], picture.locator(".plot").evaluate(DRAWN)))
        page.locator(f"[data-setting={lesson.slider}]").press("ArrowRight")
    assert seen[0][0] < seen[1][0]
    assert seen[0][1] != seen[1][1]


@pytest.mark.browser
def test_the_lesson_on_extrapolation_counts_the_hands_outside_as_the_essay_does(site: Site) -> None:  # noqa: F811
    page = site.open("lesson-extrapolation")
    count = strange(Rotary(64).inv_freq.numpy(), 16_000)
    assert f"{count} of 32 hands point where none pointed in training." in page.locator("#screen").inner_text()
