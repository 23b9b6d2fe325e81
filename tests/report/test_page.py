"""The page shows the results, and loads nothing from outside; its curves go through the means, within the seeds."""

from __future__ import annotations

import base64
import itertools
import re
import shlex
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from locant.figures.canvas import DARK, LIGHT, Theme
from locant.lab.results import BY_LENGTH, BY_POSITION, PAGE, read_recorded
from locant.lab.summary import summarise
from locant.report.commands import command
from locant.report.comparison import page, write_report
from locant.report.evaluation import write_evaluation
from locant.report.page import Picture, draw_loss_by_length, draw_loss_by_position, picture, themed
from tests.lab.fabricated import LENGTHS, THE_FIELD, evaluation_results, results, task_results
from tests.tolerances import FORMULA

if TYPE_CHECKING:
    from matplotlib.figure import Figure

pytest.importorskip("matplotlib", reason="pictures need the extra `lab`")

VOID = {"meta", "img", "source"}
COPY = {("copy", "rotary"): [{"6": 1.0, "12": 1.0, "24": 0.5, "48": 0.2}] * 2}


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
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(results(), tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def text(report: Path) -> str:
    return report.read_text(encoding="utf-8")


@pytest.fixture
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the curves, which take most of the time."""
    for module in ("comparison", "evaluation"):
        monkeypatch.setattr(f"locant.report.{module}.curves", lambda *captions: [])
    monkeypatch.setattr("locant.report.comparison.picture", lambda draw, caption: Picture(caption=caption))
    monkeypatch.setattr("locant.report.page.write_picture", lambda draw, path: None)


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
    assert rows["sinusoidal"][4].split() == ["6.800", "±0.141", "±0.000", "·", "×1.937"]
    assert rows["alibi"][4].split() == ["3.520", "±0.014", "±0.000", "·", "×0.989", "·", "best"]
    marked = [(name, place) for name, cells in rows.items() for place, cell in enumerate(cells) if "best" in cell]
    assert marked == [(name, place) for name in ("alibi", "nope") for place in (2, 3, 4)]


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
    assert "Bold: the lowest value in a column and all values not clearly different from it" in alike


@pytest.mark.usefixtures("_undrawn")
def test_the_table_shows_what_counting_alone_knows() -> None:
    text = page(results(unigram_loss=5.3912))
    assert ["unigram", "", *["5.391"] * 4] in [[cell.strip() for cell in row] for row in Page(text).cells]
    assert "The losses of counts: how often each token is in the training text" in text
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


@pytest.mark.usefixtures("_undrawn")
def test_a_loss_that_is_missing_is_a_dash() -> None:
    shown = Page(page(results({"a": [(2.0, None)], "b": [(2.5, 2.5)]}, (8, 16))))
    rows = {row[0].strip(): row[1:] for row in shown.cells if len(row) == 4 and row[0].strip() in "ab"}
    assert rows["a"][2].strip() == "–"
    assert rows["b"][1].split()[:2] == ["2.500", "±0.000"]  # of windows, none of seeds


@pytest.mark.parametrize("kind", ["text", "many", "one seed", "tasks", "evaluation", "recorded"])
def test_captions_and_conclusions_have_two_sentences_at_most(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in ("comparison", "page"):  # the captions without the drawings, which take most of the time
        monkeypatch.setattr(f"locant.report.{module}.picture", lambda draw, caption: Picture(caption=caption))
    monkeypatch.setattr("locant.report.page.write_picture", lambda draw, path: None)
    stretches = {name: [{64: [3.0] * 16, 512: [2.9] * 16}] * 2 for name in THE_FIELD}
    counts: dict[str, Any] = {"unigram_loss": 5.4, "bigram_loss": 4.1, "stretches": stretches}
    found = {
        "text": lambda: results(**counts),
        "many": lambda: results({f"e{number}": [(4.0 - number / 8,) * 4] * 2 for number in range(9)}),
        "one seed": lambda: results({"a": [(2.0, 2.0)], "b": [(3.0, 3.0)]}, (8, 16)),
        "tasks": lambda: task_results(COPY),
        "evaluation": evaluation_results,
        "recorded": lambda: read_recorded("v1-tiny"),
    }[kind]()
    html = page(found) if kind != "evaluation" else write_evaluation(found, tmp_path).read_text("utf-8")
    captions = re.findall(r'<(?:figcaption|p class="note"|dd)>(.+?)</', html)
    conclusions = re.findall(r"<li>(.+?)</li>", html)
    assert captions
    assert conclusions
    long = [
        *(words for words in [*captions, *conclusions] if len(re.findall(r"[.!?](?= |$)", words)) > 2),
        *(words for words in captions if len(words.split()) > 40),
    ]
    assert not long, "use one or two short sentences, and explain words below the caption"


def hostile(value: Any, say: str) -> Any:
    """The same with these words at the end of every text; keys and what settings choose from stay."""
    if isinstance(value, dict):
        return {key: each if key in ("task", "tasks") else hostile(each, say) for key, each in value.items()}
    if isinstance(value, list):
        return [hostile(each, say) for each in value]
    return value + say if isinstance(value, str) else value


@pytest.mark.usefixtures("_undrawn")
@pytest.mark.parametrize("kind", ["comparison", "tasks", "evaluation"])
def test_text_of_others_is_never_taken_for_tags(kind: str, tmp_path: Path) -> None:
    say = """<script>alert('1')</script><b title="&">"""
    found = {"comparison": results, "tasks": lambda: task_results(COPY), "evaluation": evaluation_results}[kind]()
    wild = hostile(found, say)
    wild["environment"][f"key{say}"] = "1"
    if kind == "tasks":
        failed = {"task": "copy", "encoding": "fire", "seed": 0, "rate": 1.0, "failed": f"ValueError: {say}"}
        wild["records"].append(failed)
    html = page(wild) if kind != "evaluation" else write_evaluation(wild, tmp_path).read_text("utf-8")
    shown = Page(html)
    assert not {"script", "b"} & {tag for tag, _ in shown.tags}
    assert "".join(shown.text).count(say) >= 5
    if kind == "tasks":
        assert f"ValueError: {say}" in [attributes.get("title") for _, attributes in shown.tags]


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


def test_the_report_is_the_page_and_two_pictures(report: Path) -> None:
    assert sorted(path.name for path in report.parent.iterdir()) == sorted([PAGE, BY_LENGTH, BY_POSITION])


def test_loss_by_length_goes_through_the_means_within_the_seeds() -> None:
    (axes,) = draw_loss_by_length(summarise(results())).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["64\n1×", "128\n2×", "256\n4×", "512\n8×"]
    curves = {line.get_label(): line for line in axes.lines if line.get_label() in THE_FIELD}
    assert set(curves) == set(THE_FIELD)
    for name, line in curves.items():
        np.testing.assert_allclose(line.get_ydata(), np.mean(THE_FIELD[name], axis=0), rtol=FORMULA)
        assert [*line.get_xdata()] == [*LENGTHS]
    drawn = sorted(tuple(ends[:, 1]) for lines in axes.collections for ends in lines.get_segments())
    seeds = sorted((min(losses), max(losses)) for rows in THE_FIELD.values() for losses in zip(*rows, strict=True))
    np.testing.assert_allclose(drawn, seeds, rtol=FORMULA)


def test_of_many_positions_every_encoding_has_whiskers_beside_those_of_the_others() -> None:
    names = [chr(ord("a") + number) for number in range(6)]
    (axes,) = draw_loss_by_position(summarise(results({name: [(2.0,) * 4, (3.0,) * 4] for name in names}))).axes
    places = [{float(ends[0, 0]) for ends in lines.get_segments()} for lines in axes.collections]
    assert len(places) == 6
    assert all(len(some) >= 5 for some in places)
    assert not any(one & other for one, other in itertools.combinations(places, 2))


@pytest.mark.parametrize("draw", [draw_loss_by_length, draw_loss_by_position])
def test_many_encodings_get_a_picture_each_with_the_others_in_grey(draw: Callable[..., Figure]) -> None:
    losses = {f"e{number}": [(4.0 - number / 8,) * 4, (4.1 - number / 8,) * 4] for number in range(9)}
    figure = draw(summarise(results(losses)))
    assert [axes.get_title(loc="left") for axes in figure.axes] == [*losses][::-1]  # the lowest loss first
    for axes in figure.axes:
        name = axes.get_title(loc="left")
        (own,) = (line for line in axes.lines if line.get_label() == name)
        others = [line for line in axes.lines if line.get_color() == LIGHT.muted and line.get_alpha() is not None]
        assert len(others) == len(losses) - 1
        assert own.get_color() != LIGHT.muted
        np.testing.assert_allclose(own.get_ydata(), np.mean(losses[name]), rtol=FORMULA)
        means = sorted(float(np.mean(other.get_ydata())) for other in others)
        np.testing.assert_allclose(
            means, sorted(float(np.mean(each)) for other, each in losses.items() if other != name), rtol=FORMULA
        )
        heights = [ends[:, 1] for lines in axes.collections for ends in lines.get_segments()]
        assert heights
        np.testing.assert_allclose(sorted(heights[0]), sorted(each[0] for each in losses[name]), rtol=FORMULA)
    low, high = figure.axes[0].get_ylim()
    assert all(axes.get_ylim() == (low, high) for axes in figure.axes)


def test_loss_by_position_keeps_the_mean_of_what_it_joins() -> None:
    curve = np.linspace(2, 5, 512) + np.sin(np.arange(512))
    drawn = draw_loss_by_position(summarise(results(by_position={"alibi": curve.tolist()})))
    line = next(line for line in drawn.axes[0].lines if line.get_label() == "alibi")
    np.testing.assert_allclose(line.get_ydata(), curve.reshape(-1, 16).mean(1), rtol=FORMULA)
    np.testing.assert_allclose(line.get_xdata(), np.arange(512).reshape(-1, 16).mean(1), rtol=FORMULA)


def test_a_position_without_a_loss_is_a_gap() -> None:
    holes: list[float | None] = [2.0] * 256 + [None] * 256
    drawn = draw_loss_by_position(summarise(results({"a": [(2.0,) * 4]}, by_position={"a": holes})))
    heights = drawn.axes[0].lines[0].get_ydata()
    assert np.isfinite(heights[:16]).all()
    assert np.isnan(heights[16:]).all()


def test_an_encoding_looks_the_same_in_both_pictures() -> None:
    summary = summarise(results())
    looks = [
        {
            line.get_label(): (line.get_color(), line.get_linestyle())
            for line in draw(summary).axes[0].lines
            if line.get_label() in THE_FIELD
        }
        for draw in (draw_loss_by_length, draw_loss_by_position)
    ]
    assert looks[0] == looks[1]


def test_one_length_and_one_seed_can_be_drawn() -> None:
    summary = summarise(results({"a": [(2.0,)]}, (8,)))
    for draw in (draw_loss_by_length, draw_loss_by_position):
        draw(summary).canvas.draw()


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_eight_curves_differ_in_colour_and_in_dash_and_stand_out_from_the_paper(theme: Theme) -> None:
    looks = [theme.stroke(number) for number in range(8)]
    for one, other in itertools.combinations(looks, 2):
        assert all(mine != theirs for mine, theirs in zip(one, other, strict=True))
    for color, _, _ in looks:
        assert contrast(color, theme.paper) > 1.9
    assert contrast(theme.ink, theme.paper) > 12
    assert contrast(theme.muted, theme.paper) > 4.5


def contrast(one: str, other: str) -> float:
    """The ratio of luminances of WCAG 2 (https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio)."""
    values = []
    for color in (one, other):
        parts = np.array([int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        values.append(float(linear @ [0.2126, 0.7152, 0.0722]))
    return (max(values) + 0.05) / (min(values) + 0.05)


def test_training_losses_are_hollow_marks_at_the_training_length() -> None:
    (axes,) = draw_loss_by_length(summarise(results(train_loss=1.5))).axes
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "none"]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in hollow] == [([64], [1.5])] * len(THE_FIELD)


def test_the_picture_says_where_there_is_not_enough_text() -> None:
    few = {name: [0.0] * 9 for name in THE_FIELD}
    for windows, words in (({}, []), (few, ["from 64 tokens on, not enough text to tell: fewer than 10 windows"])):
        (axes,) = draw_loss_by_length(summarise(results(windows=windows))).axes
        assert [text.get_text() for text in axes.texts] == words


def test_a_picture_for_pages_with_a_button_for_the_theme_is_there_for_both() -> None:
    html = themed(picture(lambda theme: draw_loss_by_length(summarise(results()), theme), "A & B"))
    assert re.search(r"</span>\s*<figcaption>", html), "the theme hides a caption whose sibling it hides"
    found = Page(html)
    images = [attrs for tag, attrs in found.tags if tag == "img"]
    assert [each["class"] for each in images] == ["only-light", "only-dark"]
    assert [each["alt"] for each in images] == ["A & B"] * 2
    for image, theme, other in zip(images, (LIGHT, DARK), (DARK, LIGHT), strict=True):
        drawn = base64.b64decode((image["src"] or "").partition("base64,")[2]).decode()
        assert theme.muted in drawn
        assert other.muted not in drawn
    assert "A & B" in "".join(found.text)


def test_wide_tables_scroll_in_a_region_that_the_keyboard_reaches(report: Path) -> None:
    regions = [attrs for tag, attrs in Page(report.read_text(encoding="utf-8")).tags if attrs.get("class") == "scroll"]
    assert regions
    for region in regions:
        assert region["tabindex"] == "0"
        assert region["role"] == "region"
        assert region["aria-label"]
