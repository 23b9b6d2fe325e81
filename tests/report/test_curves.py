"""The curves are drawn through the means, the bands from the lowest to the highest seed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from locant.figures.canvas import DARK, LIGHT, Theme
from locant.lab.summary import summarise
from locant.report.page import draw_loss_by_length, draw_loss_by_position
from tests.lab.fabricated import LENGTHS, THE_FIELD, results
from tests.tolerances import FORMULA

pytest.importorskip("matplotlib", reason="pictures need the extra `lab`")


def test_loss_by_length_goes_through_the_means_within_the_seeds() -> None:
    (axes,) = draw_loss_by_length(summarise(results())).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["64\n1×", "128\n2×", "256\n4×", "512\n8×"]
    curves = {line.get_label(): line for line in axes.lines if line.get_label() in THE_FIELD}
    assert set(curves) == set(THE_FIELD)
    for name, line in curves.items():
        np.testing.assert_array_equal(line.get_xdata(), LENGTHS)
        np.testing.assert_allclose(line.get_ydata(), np.mean(THE_FIELD[name], axis=0), rtol=FORMULA)
    bands = [band.get_paths()[0].vertices[:, 1] for band in axes.collections]
    reach = sorted((band.min(), band.max()) for band in bands)
    assert reach == sorted((np.min(seeds), np.max(seeds)) for seeds in THE_FIELD.values())


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
