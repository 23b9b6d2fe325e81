"""What is drawn is what the papers say, not what happens to look right."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import locant
from locant.errors import InputError, RangeError
from locant.figures.canvas import DARK, LIGHT, require_figure, save, svg
from locant.figures.embed import draw_flat_map
from locant.figures.plot import default_length, draw, encoding_to_draw, fixed_seed, plot
from locant.figures.scores import bias_map
from locant.positions import ALiBi, Cope, Learned, PoPE, PositionEncoding, Positions, Rotary, Sinusoidal, T5Bias, XPos
from locant.positions.registry import encodings
from locant.positions.scaling import SCALINGS
from tests.refusal import refuses
from tests.tolerances import ANGLE, DOUBLE, FORMULA, LENGTH, PRINTED, RADIANS, SHORT_SUM

colors = pytest.importorskip("matplotlib.colors", reason="pictures need the extra `lab`")


def maps(figure) -> list:
    """The heat maps, in the order of their axes."""
    return [axes.images[0] for axes in figure.axes if axes.images]


def curves(figure) -> dict[str, np.ndarray]:
    return {line.get_label(): np.asarray(line.get_ydata()) for axes in figure.axes for line in axes.lines}


def written(figure) -> list[list[float]]:
    """The numbers that are written into each table."""
    tables = [[float(text.get_text()) for text in axes.texts] for axes in figure.axes if axes.images]
    return [table for table in tables if table]


def sinusoids(length: int, width: int, base: float) -> np.ndarray:
    """Vaswani et al. 2017, section 3.5, dimension by position, in float64."""
    table = np.empty((width, length))
    for dimension in range(width):
        angle = np.arange(length) / base ** (2 * (dimension // 2) / width)
        table[dimension] = np.cos(angle) if dimension % 2 else np.sin(angle)
    return table


def test_sinusoidal_shows_every_dimension_of_every_position() -> None:
    figure = draw(Sinusoidal(10, base=100.0), length=17)
    image, products = maps(figure)
    expected = sinusoids(17, 10, 100.0)
    np.testing.assert_allclose(products.get_array(), expected.T @ expected, rtol=0, atol=2 * 10 * ANGLE)
    np.testing.assert_allclose(image.get_array(), expected, rtol=0, atol=ANGLE)
    assert (image.get_cmap().name, image.norm.vmin, image.norm.vmax) == ("RdBu_r", -1, 1)
    for label, values in curves(figure).items():
        np.testing.assert_allclose(values, expected[int(label.split(":")[0])], rtol=0, atol=ANGLE)


def test_rotary_shows_angles_on_a_cyclic_map_and_their_cosines() -> None:
    figure = draw(Rotary(14, base=50.0), length=23)
    angle = np.arange(23) / 50.0 ** (2 * np.arange(7)[:, None] / 14)
    angles, cosines = maps(figure)
    np.testing.assert_allclose(angles.get_array(), np.angle(np.exp(1j * angle)), rtol=0, atol=RADIANS)
    np.testing.assert_allclose(cosines.get_array(), np.cos(angle), rtol=0, atol=ANGLE)
    assert (angles.get_cmap().name, angles.norm.vmin, angles.norm.vmax) == ("twilight", -np.pi, np.pi)
    drawn = curves(figure)
    np.testing.assert_allclose(drawn.pop("all: mean"), np.cos(angle).mean(0), rtol=0, atol=ANGLE)
    for label, values in drawn.items():
        np.testing.assert_allclose(values, np.cos(angle[int(label.split(":")[0])]), rtol=0, atol=ANGLE)


def test_alibi_falls_by_its_slope_and_hides_later_keys() -> None:
    figure = draw(ALiBi(4), length=9)
    slopes = [0.25, 0.0625, 0.015625, 0.00390625]
    for head, values in enumerate(curves(figure).values()):
        np.testing.assert_array_equal(values, -slopes[head] * np.arange(9))
    assert len(maps(figure)) == 4
    for head, image in enumerate(maps(figure)):
        shown = image.get_array()
        assert shown.mask[np.triu_indices(9, 1)].all()
        assert not shown.mask[np.tril_indices(9)].any()
        assert shown[8, 2] == -6 * slopes[head]
        assert image.get_cmap().name == "cividis"


@pytest.mark.parametrize(
    "encoding",
    [ALiBi(8), ALiBi(3), ALiBi(2), ALiBi(1), locant.encoding("kerple", num_heads=8), T5Bias(1), T5Bias(3), T5Bias(5)],
)
def test_at_most_four_heads_are_drawn_and_have_one_scale(encoding: PositionEncoding) -> None:
    images = maps(draw(encoding, length=40))
    assert len(images) == min(encoding.num_heads, 4)
    norms = {(type(image.norm), image.norm.vmin, image.norm.vmax) for image in images}
    assert len(norms) == 1
    ((_, low, high),) = norms
    for image in images:
        assert low <= image.get_array().min()
        assert image.get_array().max() <= high


def test_t5_shows_the_table_entry_of_every_distance() -> None:
    encoding = T5Bias(2, num_buckets=8, max_distance=11)
    figure = draw(encoding, length=16)
    table = encoding.weight.detach().numpy()
    # Four buckets of one distance, then four over log(distance / 4) / log(11 / 4), and the last for all farther.
    buckets = [0, 1, 2, 3] + [min(7, 4 + int(np.log(d / 4) / np.log(11 / 4) * 4)) for d in range(4, 16)]
    for head in range(2):
        np.testing.assert_array_equal(curves(figure)[f"head {head}"], table[buckets, head])
    for image in maps(figure):
        assert image.get_cmap().name == "RdBu_r"
        assert image.norm.vmin == -image.norm.vmax < 0
    (image,) = maps(draw(T5Bias(1, bidirectional=True), length=6))
    assert not np.ma.getmaskarray(image.get_array()).any(), "both directions are shown where there are both"


@pytest.mark.parametrize(
    ("num_buckets", "max_distance", "bidirectional"),
    [(32, 128, False), (8, 11, True), (4, 40, False), (64, 1000, True)],
)
def test_t5_marks_the_first_distance_of_its_last_bucket(
    num_buckets: int, max_distance: int, bidirectional: bool
) -> None:
    """By the bucket of `transformers`, in the direction that is drawn."""
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distances = torch.arange(2 * max_distance)
    bucket_of = t5.T5Attention._relative_position_bucket
    last = bucket_of(-distances, bidirectional, num_buckets, max_distance)
    first = int((last == last[-1]).nonzero()[0])
    encoding = T5Bias(2, num_buckets=num_buckets, max_distance=max_distance, bidirectional=bidirectional)
    assert default_length(encoding) == max_distance * 3 // 2
    figure = draw(encoding)
    (mark,) = [line for line in figure.axes[0].lines if len({*line.get_xdata()}) == 1]
    assert mark.get_xdata()[0] == first
    assert f"from {first} on" in "".join(text.get_text() for text in figure.axes[0].texts)


@pytest.mark.parametrize("length", [2, 6, 8])
def test_only_a_zero_is_written_as_zero(length: int) -> None:
    figure = draw(ALiBi(4), length=length)
    for table, image in zip(written(figure), maps(figure), strict=True):
        values = image.get_array().compressed()
        np.testing.assert_array_equal(np.array(table) == 0, values == 0)
        decimals = np.where(np.abs(values) < 0.005, 3, 2)  # as many as a small number needs
        np.testing.assert_array_equal(
            np.array(table), [round(float(x), int(n)) for x, n in zip(values, decimals, strict=True)]
        )


@pytest.mark.parametrize("name", ["kerple", "fire", "sandwich", "shaw", "transformer_xl", "deberta"])
def test_any_other_bias_is_drawn_as_its_door_gives_it(name: str) -> None:
    encoding = encoding_to_draw(name, **({"head_dim": 16} if name in ("shaw", "deberta") else {}))
    figure = draw(encoding, length=9)
    heads = getattr(encoding, "num_heads", 4)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, heads, 9, getattr(encoding, "head_dim", 1), generator=generator)
    with torch.no_grad():
        bias = encoding.bias(q, k, Positions.arange(9)).expand(1, heads, 9, 9)[0].numpy()
    drawn = {label: values for label, values in curves(figure).items() if label.startswith("head ")}
    assert len(drawn) == min(heads, 4)
    for label, values in drawn.items():
        np.testing.assert_array_equal(values, bias[int(label.split()[1]), -1, ::-1])
    by_content = name in ("shaw", "transformer_xl", "deberta")
    assert ("for random tokens" in figure.get_suptitle()) == by_content


def test_xpos_shows_what_its_door_leaves_of_a_product() -> None:
    encoding = XPos(8, base=50.0, scale_base=20.0)
    (image,) = maps(draw(encoding, length=12))
    for pair in range(4):
        one = torch.zeros(1, 1, 12, 8, dtype=torch.float64)
        one[..., pair] = 1  # the half layout: pair i is dimensions i and i + 4
        q, k = encoding.rotate(one, one, Positions.arange(12))
        np.testing.assert_allclose(image.get_array()[pair], (q[0, 0] @ k[0, 0, 0]).numpy(), rtol=0, atol=DOUBLE)


def test_a_table_that_begins_as_zeros_is_drawn_with_random_numbers_and_says_so() -> None:
    encoding = Cope(8)
    figure = draw(encoding, length=9)
    assert "random numbers in tables that begin as zeros" in figure.get_suptitle()
    assert np.ptp(maps(figure)[0].get_array()) > 0
    assert not encoding.weight.any()
    with torch.no_grad():
        encoding.weight.fill_(1.0)
    assert "begin as zeros" not in draw(encoding, length=9).get_suptitle()


def test_learned_shows_its_table_without_the_offset_and_how_alike_rows_are() -> None:
    encoding = Learned(19, 6, offset=2)
    table, likeness = maps(draw(encoding, length=50))
    rows = encoding.weight.detach().numpy()[2:]
    np.testing.assert_array_equal(table.get_array(), rows.T)
    assert table.norm.vmin == -table.norm.vmax < 0
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(likeness.get_array(), unit @ unit.T, rtol=0, atol=LENGTH)


@pytest.mark.parametrize(
    "encoding",
    [Sinusoidal(10), Rotary(14), Learned(19, 6), ALiBi(3), T5Bias(3, num_buckets=8, max_distance=11)],
    ids=lambda encoding: type(encoding).__name__,
)
def test_every_axis_of_numbers_says_what_it_counts(encoding: PositionEncoding) -> None:
    figure = draw(encoding, length=12)
    figure.canvas.draw()
    drawn = [axes for axes in figure.axes if axes.images or axes.lines]
    assert all(axes.get_title(loc="left") for axes in drawn)
    lowest = min(axes.get_position().y0 for axes in drawn)
    for axes in drawn:
        if axes.get_position().y0 == lowest:
            assert axes.get_xlabel()
        if axes.get_subplotspec().is_first_col():
            assert axes.get_ylabel()


def test_the_theme_changes_paper_and_ink() -> None:
    for theme in (LIGHT, DARK):
        figure = draw(ALiBi(2), length=8, theme=theme)
        assert figure.get_facecolor()[:3] == tuple(int(theme.paper[place : place + 2], 16) / 255 for place in (1, 3, 5))
        assert figure.axes[0].title.get_color() is not None
        assert figure.axes[0]._left_title.get_color() == theme.ink


def test_an_encoding_that_does_nothing_shows_the_causal_mask() -> None:
    figure = draw(PositionEncoding(), length=6)
    assert figure.get_suptitle() == "NoPE does not embed, rotate or bias"
    np.testing.assert_array_equal(maps(figure)[0].get_array(), np.tri(6, dtype=bool))


@pytest.mark.parametrize("name", encodings())
def test_every_encoding_is_drawn_by_its_name_at_the_shortest_length(name: str) -> None:
    figure = plot(name, length=2)
    assert figure.get_suptitle() or all(part.get_suptitle() for part in figure.subfigs)
    assert maps(figure)
    figure.canvas.draw()


LLAMA = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "rope_theta": 10_000.0}


@pytest.mark.parametrize("given", ["rope", Rotary(64), LLAMA])
def test_a_name_an_encoding_and_a_configuration_are_the_same_picture(given: object) -> None:
    angles, cosines = maps(plot(given, length=20))
    expected = maps(draw(Rotary(64), length=20))
    np.testing.assert_array_equal(angles.get_array(), expected[0].get_array())
    np.testing.assert_array_equal(cosines.get_array(), expected[1].get_array())


def test_sizes_that_are_not_given_are_those_of_a_small_model() -> None:
    assert encoding_to_draw("alibi", num_heads=5).num_heads == 5
    assert encoding_to_draw("learned", length=33).weight.shape == (33, 128)


@pytest.mark.parametrize(
    ("what", "options", "words"),
    [
        ("alibi", {"d_model": 4}, ("d_model", "num_heads")),
        (Rotary(8), {"num_heads": 4}, ("num_heads", "Rotary")),
        ("alibi", {"theme": "blue"}, ("theme", "light")),
        ("alibi", {"scaling": "yarn"}, ("scaling", "alibi")),
        ("rope", {"scaling": "yran:2"}, ("scaling", "yran")),
        ("rope", {"scaling": "yarn:x"}, ("scaling", "yarn:x")),
        *((Sinusoidal(8), {"length": length}, ("length",)) for length in (1, 0, -4, 4097)),
    ],
)
def test_what_cannot_be_drawn_is_refused(what: object, options: dict[str, object], words: tuple[str, ...]) -> None:
    with refuses(RangeError, *words):
        plot(what, **options)


@pytest.mark.parametrize("name", SCALINGS)
def test_every_scaling_shows_wavelengths_before_and_after(name: str) -> None:
    figure = plot("rotary", head_dim=16, scaling=f"{name}:2", trained=100)
    left, right = (axes for axes in figure.axes if axes.get_title(loc="left"))
    before, after = (np.asarray(line.get_ydata()) for line in left.lines[:2])
    np.testing.assert_allclose(before, 2 * np.pi * 10_000 ** (np.arange(8) / 8), rtol=FORMULA, atol=0)
    stretched = np.asarray(right.lines[0].get_ydata())
    np.testing.assert_allclose(after / before, stretched, rtol=FORMULA, atol=0)
    assert np.nanmax(stretched) >= 1.999
    if name == "linear":
        np.testing.assert_allclose(stretched, 2.0, rtol=FORMULA, atol=0)
    assert [text.get_text() for text in left.texts] == ["trained 100", "scaled to 200"]


def test_small_tables_have_their_numbers_written_in() -> None:
    (table, likeness) = written(plot("learned", d_model=4, length=4))
    np.testing.assert_allclose(
        table, encoding_to_draw("learned", d_model=4, length=4).weight.detach().T.flatten(), rtol=0, atol=PRINTED[2]
    )
    assert likeness[::5] == [1.0] * 4
    (first, _) = written(plot("alibi", num_heads=2, length=4))
    np.testing.assert_allclose(first, [0, -0.06, 0, -0.12, -0.06, 0, -0.19, -0.12, -0.06, 0], rtol=0, atol=PRINTED[2])
    assert written(plot("learned", d_model=9, length=9)) == []


class EveryDoor(PositionEncoding):
    """Somebody else's, which uses all three methods."""

    def embed(self, x, positions):
        return x + (positions.index % 2)[..., None]

    def rotate(self, q, k, positions, k_positions=None, *, inplace=False):
        return q * positions.index[:, None, :, None], k

    def bias(self, q, k, positions, k_positions=None):
        return -(positions.index[:, None, :, None] - positions.index[:, None, None, :]).float().abs()


def test_an_encoding_from_outside_is_drawn_method_by_method() -> None:
    figure = plot(EveryDoor(), length=10)
    table, likeness, rotated, *heads = maps(figure)
    np.testing.assert_array_equal(table.get_array(), np.broadcast_to(np.arange(10) % 2, (128, 10)))
    np.testing.assert_allclose(
        likeness.get_array(), np.outer(np.arange(10) % 2, np.arange(10) % 2), rtol=0, atol=LENGTH
    )
    np.testing.assert_array_equal(rotated.get_array(), np.broadcast_to(np.arange(10), (64, 10)))
    assert len(heads) == 4
    np.testing.assert_array_equal(heads[0].get_array()[9, :], np.arange(10) - 9.0)
    for line in curves(figure).values():
        assert len(line) == 10


def test_a_subclass_that_rotates_otherwise_is_not_drawn_as_its_parent() -> None:
    class Backwards(Rotary):
        def rotate(self, q, k, positions, k_positions=None, *, inplace=False):
            return k, q

    assert "A query of ones" in {axes.get_title(loc="left").split(",")[0] for axes in plot(Backwards(8), length=5).axes}


@pytest.mark.parametrize(("suffix", "begin"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".SVG", b"<?xml")])
def test_a_picture_is_of_the_kind_its_name_says_and_the_same_every_time(
    tmp_path: Path, suffix: str, begin: bytes
) -> None:
    for name in ("one", "two"):
        save(draw(ALiBi(1), length=4), tmp_path / (name + suffix))
    one, two = ((tmp_path / (name + suffix)).read_bytes() for name in ("one", "two"))
    assert one.startswith(begin)
    assert one == two
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one" + suffix, "two" + suffix]


def test_of_heads_that_are_rotated_differently_the_first_is_drawn() -> None:
    pope = PoPE(6, num_heads=3)
    with torch.no_grad():
        pope.shift.copy_(torch.tensor([0.0, -1.0, -2.0])[:, None])
    curve = locant.plot(pope, length=5).axes[1].lines[0].get_ydata()
    frequency = 10_000.0 ** (-np.arange(6) / 6)
    lengths = np.log1p(np.e) ** 2 * 2**0.5  # softplus of ones, and the scale of the old width
    expected = lengths * np.cos(np.arange(5)[:, None] * frequency).mean(1)
    np.testing.assert_allclose(curve, expected, **SHORT_SUM)


def test_a_notebook_shows_it_without_pyplot() -> None:
    display = pytest.importorskip("IPython.core.formatters", reason="a notebook needs IPython").DisplayFormatter()
    shown, _ = display.format(locant.plot("alibi", length=4))
    assert shown["image/png"].startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["x.gif", "x", "x.png.bak"])
def test_an_unknown_suffix_is_refused_with_the_known_ones(name: str) -> None:
    with refuses(InputError, name, ".png, .svg, .pdf"):
        require_figure(Path(name))


def test_a_failed_write_leaves_the_earlier_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = draw(ALiBi(1), length=4)
    (tmp_path / "x.png").write_text("earlier")

    written = os.write

    def half(handle: int, content: memoryview) -> int:
        written(handle, content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with refuses(InputError, "x.png", "No space"):
        save(figure, tmp_path / "x.png")
    monkeypatch.undo()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["earlier"]


def test_an_svg_for_a_page_has_no_ground_of_its_own() -> None:
    drawn = svg(draw(ALiBi(1), length=4, theme=DARK))
    assert drawn.startswith(b"<?xml")
    assert DARK.paper.encode() not in drawn.split(b"axes_1")[0]


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'locant\[lab\]'"):
        draw(ALiBi(2))


def test_drawing_leaves_pyplot_out_and_the_random_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it fails
    before = torch.random.get_rng_state()
    for name in ("learned", "alibi"):
        svg(plot(name, length=8))
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_seed_decides_a_random_table() -> None:
    one, same, other = (maps(plot("learned", length=8, seed=seed))[0].get_array() for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


def test_random_tables_are_the_same_in_every_thread_and_leave_no_trace() -> None:
    expected = encoding_to_draw("learned", length=2000).weight.detach()
    before = torch.random.get_rng_state()

    def drawn(seed: int) -> torch.Tensor:
        with fixed_seed(seed):
            return torch.cat([paused() for _ in range(8)])

    def paused() -> torch.Tensor:
        time.sleep(0.001)  # the other threads go on
        return torch.randn(1)

    with ThreadPoolExecutor(4) as threads:
        rows = [*threads.map(drawn, [0, 1] * 4)]
    assert all(row.equal(rows[at % 2]) for at, row in enumerate(rows))
    assert not rows[0].equal(rows[1])
    assert encoding_to_draw("learned", length=2000).weight.equal(expected)
    assert torch.random.get_rng_state().equal(before)


def test_a_rotation_is_drawn_where_there_is_one() -> None:
    """Inkling's has a temperature of queries, or nothing."""
    for floor in (None, 2):
        titles = {axes.get_title(loc="left") for axes in plot("inkling", floor=floor, length=4).axes}
        assert ("A query of ones, rotated" in titles) == (floor is not None)


def test_random_tokens_are_not_the_numbers_of_a_random_table() -> None:
    """With one seed for both, some queries of each head met their own weights, and stood out as bands."""
    sizes = bias_map(encoding_to_draw("inkling"), 128)[:, :, :8].reshape(8, 8, 16 * 8).std(-1)
    assert sizes.max() < 3 * sizes.min()


def test_a_bias_for_keys_that_come_later_is_drawn_where_it_is_asked_for() -> None:
    slopes = np.array([2.0**-4, 2.0**-8])
    apart = np.abs(np.subtract.outer(np.arange(6), np.arange(6)))
    for causal in (None, True, False):
        for image, slope in zip(maps(plot("alibi", num_heads=2, length=6, causal=causal)), slopes, strict=True):
            hidden = np.ma.getmaskarray(image.get_array())
            assert hidden.any() == (causal is not False)
            np.testing.assert_allclose(
                image.get_array(), np.ma.masked_array(-slope * apart, hidden), rtol=0, atol=ANGLE
            )


def light(color: object) -> float:
    """The luminance of WCAG 2 (https://www.w3.org/TR/WCAG22/#dfn-relative-luminance)."""
    parts = np.array(colors.to_rgb(color))
    return float(np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("what", ["alibi", "learned", "t5"])
def test_numbers_stand_out_from_the_darkest_and_from_the_brightest_cell(what: str) -> None:
    sizes = {"num_heads": 2, "length": 8} if what != "learned" else {"d_model": 8, "length": 8}
    for image in maps(plot(what, **sizes)):
        for text in image.axes.texts:
            column, row = text.get_position()
            inks = sorted((light(text.get_color()), light(image.to_rgba(image.get_array()[[row], [column]])[0, :3])))
            assert (inks[1] + 0.05) / (inks[0] + 0.05) > 4.5


def test_a_scale_that_is_part_logarithmic_says_so_and_has_a_number_at_its_dark_end() -> None:
    figure = plot("alibi", length=128)
    (bar,) = [axes for axes in figure.axes if axes.get_ylabel().startswith("added to the score;")]
    assert bar.get_ylabel() == "added to the score; logarithmic below −1"
    assert {label.get_text().replace("−", "-") for label in bar.get_yticklabels()} == {"-63.5", "-10", "-1", "0"}
    labels = {axes.get_ylabel() for axes in plot("alibi", length=16).axes}
    assert "added to the score" in labels
    assert not any("logarithmic" in label for label in labels)


def test_the_distances_of_t5_say_where_they_are_linear() -> None:
    labels = {axes.get_xlabel() for axes in plot("t5", num_buckets=32).axes}
    assert "distance (tokens); linear up to 16, then logarithmic" in labels


@pytest.mark.parametrize(("name", "is_learned"), [("t5", True), ("learned", True), ("rope", False), ("alibi", False)])
def test_what_is_learned_says_that_it_is_untrained_where_it_is_new(name: str, is_learned: bool) -> None:
    assert plot(name, length=8).get_suptitle().endswith(", untrained") == is_learned
    assert "untrained" not in plot(encoding_to_draw(name, length=8), length=8).get_suptitle()


@pytest.mark.parametrize("name", ["alibi", "rope", "sinusoidal", "shaw"])
def test_ticks_of_four_positions_are_whole(name: str) -> None:
    figure = plot(name, length=4)
    figure.canvas.draw()
    curved = [axes for axes in figure.axes if axes.lines]
    assert curved
    for axes in curved:
        assert {float(tick) for tick in axes.get_xticks() if 0 <= tick <= 3} == {0.0, 1.0, 2.0, 3.0}


def test_words_of_a_map_stay_in_its_frame() -> None:
    words = ["internationalization", "a", "incomprehensibility", "extraordinarily", "b"]
    places = torch.tensor([[-1.0, 0.9], [0.0, -1.0], [1.0, 1.0], [0.98, -0.9], [-0.9, -1.0]])
    figure = draw_flat_map(words, places)
    pytest.importorskip("matplotlib.backends.backend_agg").FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    frame = axes.get_window_extent()
    for text in axes.texts:
        box = text.get_window_extent()
        assert frame.x0 <= box.x0
        assert box.x1 <= frame.x1
        assert frame.y0 <= box.y0
        assert box.y1 <= frame.y1
