"""The page shows the results, and loads nothing from outside."""

from __future__ import annotations

import base64
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import pytest

from locant.figures.canvas import DARK, LIGHT
from locant.lab.results import BY_LENGTH, BY_POSITION, PAGE, command
from locant.report.comparison import page, write_report
from tests.lab.fabricated import THE_FIELD, results

pytest.importorskip("matplotlib", reason="pictures need the extra `lab`")

VOID = {"meta", "img", "source"}


class Page(HTMLParser):
    """Reads a page into its tags, and raises where one is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[list[str]] = []
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)
        if {"td", "th"} & {*self.open}:
            self.cells[-1][-1] += " " + data.strip()


@pytest.fixture(scope="module")
def text() -> str:
    return page(results())


@pytest.fixture
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the curves, which take most of the time."""
    monkeypatch.setattr("locant.report.comparison.curves", lambda *captions: "")


@pytest.fixture(scope="module")
def the_page(text: str) -> Page:
    return Page(text)


def test_it_loads_nothing(the_page: Page, text: str) -> None:
    for _, attributes in the_page.tags:
        for name in ("src", "srcset", "href"):
            assert (attributes.get(name) or "data:").startswith("data:")
    assert not {"script", "link", "iframe"} & {tag for tag, _ in the_page.tags}
    without_pictures = re.sub(r"base64,[A-Za-z0-9+/=]+", "", text)
    assert not re.search(r"https?://|url\(|@import", without_pictures)


def test_its_pictures_are_whole_and_there_for_light_and_dark(the_page: Page) -> None:
    images = [attributes["src"] for tag, attributes in the_page.tags if tag == "img"]
    sources = [attributes["srcset"] for tag, attributes in the_page.tags if tag == "source"]
    assert (len(images), len(sources)) == (2, 2)
    for light, dark in zip(images, sources, strict=True):
        drawings = [base64.b64decode(str(data).partition("base64,")[2]).decode() for data in (light, dark)]
        assert all(drawing.rstrip().endswith("</svg>") for drawing in drawings)
        assert LIGHT.ink in drawings[0]
        assert DARK.ink in drawings[1]
    assert all(len(attributes["alt"] or "") > 30 for tag, attributes in the_page.tags if tag == "img")


def test_the_table_has_every_mean_spread_and_ratio_and_marks_the_best(the_page: Page) -> None:
    rows = {row[0].strip(): row[1:] for row in the_page.cells if row[0].strip() in THE_FIELD and len(row) == 6}
    assert list(rows) == ["alibi", "nope", "sinusoidal"]
    assert rows["sinusoidal"][4].split() == ["6.800", "±", "0.141", "±0.000", "·", "×1.937"]
    assert rows["alibi"][4].split() == ["3.520", "±", "0.014", "±0.000", "·", "×0.989", "·", "best"]
    marked = [(name, place) for name, cells in rows.items() for place, cell in enumerate(cells) if "best" in cell]
    assert marked == [("alibi", 2), ("alibi", 3), ("alibi", 4), ("sinusoidal", 1)]


@pytest.mark.usefixtures("_undrawn")
def test_nothing_is_marked_where_the_sentences_see_no_difference() -> None:
    """Nine windows, and all within the spread: the lowest may be so by chance."""
    few, close = {name: [0.0] * 9 for name in "ab"}, {"a": [(2.0, 2.0), (2.2, 2.2)], "b": [(2.15, 2.15), (2.1, 2.1)]}
    for unclear in (results({"a": [(2.0, 2.0)], "b": [(3.0, 3.0)]}, (8, 16), windows=few), results(close, (8, 16))):
        text = page(unclear)
        assert 'class="best"' not in text
        assert "best" not in "".join(Page(text).text).lower()
    alike = page(results({**close, "c": [(4.0, 4.0)] * 2}, (8, 16)))
    assert alike.count('class="best"') == 4, "a and b, of which neither is clearly better"
    assert "Best, and bold, are the lowest of a column and what is not clearly different from it" in alike


@pytest.mark.usefixtures("_undrawn")
def test_the_table_shows_what_counting_alone_knows() -> None:
    text = page(results(unigram_loss=5.3912))
    assert ["unigram", "", *["5.391"] * 4] in [[cell.strip() for cell in row] for row in Page(text).cells]
    assert "Unigram and bigram are losses of counts" in text
    assert "nigram" not in page(results())


@pytest.mark.usefixtures("_undrawn")
def test_losses_with_full_context_have_a_section_where_they_were_measured() -> None:
    losses = {"a": [(3.0,) * 4] * 2}
    text = page(results(losses, stretches={"a": [{64: [3.0] * 16, 512: [2.9] * 16}] * 2}))
    assert ["a", "3.000", "2.900", "-0.100"] in [[cell.strip() for cell in row] for row in Page(text).cells]
    assert "<h2>Loss with full context</h2>" in text
    assert "<h2>Loss with full context</h2>" not in page(results())


def test_every_setting_version_and_run_is_told(the_page: Page) -> None:
    facts = {row[0].strip(): row[1].strip() for row in the_page.cells if len(row) == 2}
    assert facts["learning rate"] == "0.0025"
    assert facts["num steps"] == "301"
    assert facts["multiples"] == "1, 2, 4, 8"
    assert facts["text: tokens"] == "1,234"
    assert facts["text: tokenizer fingerprint"] == "cd" * 32
    assert facts["torch"] == "9.8.7"
    runs = [row for row in the_page.cells if len(row) == 7 and row[1].strip().isdigit()]
    assert len(runs) == 6


def test_a_loss_that_is_missing_is_a_dash() -> None:
    shown = Page(page(results({"a": [(2.0, None)], "b": [(2.5, 2.5)]}, (8, 16))))
    rows = {row[0].strip(): row[1:] for row in shown.cells if len(row) == 4 and row[0].strip() in "ab"}
    assert rows["a"][2].strip() == "–"
    assert rows["b"][1].split()[:2] == ["2.500", "±0.000"]  # of windows, none of seeds


def test_text_of_others_is_never_taken_for_tags() -> None:
    wild = results({"<b>&x": [(2.0, 2.1)]}, (8, 16))
    wild["settings"]["text"]["source"] = wild["settings"]["text"]["files"][0] = "<script>alert('1')</script>.txt"
    shown = Page(page(wild))
    assert "script" not in {tag for tag, _ in shown.tags}
    assert any("<script>" in text for text in shown.text)


def test_the_command_holds_every_setting_and_the_text(the_page: Page) -> None:
    line = command(results()["settings"])
    assert line in "".join(the_page.text)
    words = shlex.split(line)
    assert words[:5] == ["locant", "compare", "a.txt", "--vocab-size", "300"]
    given = dict(zip(words[5::2], words[6::2], strict=True))
    assert [*given] == [
        "--encodings", "--train-length", "--multiples", "--seeds", "--steps", "--batch", "--learning-rate", "--d-model",
        "--num-layers", "--num-heads",
    ]  # fmt: skip
    assert (given["--steps"], given["--seeds"], given["--learning-rate"]) == ("301", "0,1", "0.0025")


def test_the_report_is_the_page_and_two_pictures(text: str, tmp_path: Path) -> None:
    assert write_report(results(), tmp_path).read_text(encoding="utf-8") == text
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([PAGE, BY_LENGTH, BY_POSITION])
