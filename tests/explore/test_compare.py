"""Scores by distance are what the formulas of the papers say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from locant.errors import RangeError
from locant.explore.screens import encodings_of_text
from locant.figures import SIZES
from locant.figures.plot import encoding_to_draw
from locant.figures.scores import score_by_distance, score_map
from locant.positions import ALiBi, PoPE, PositionEncoding, Rotary, Sinusoidal
from locant.positions.registry import encodings
from tests.explore.screens import executed, numbers_of
from tests.tolerances import SHORT_SUM

WIDTH = 22
DISTANCES = np.array([0, 1, 2, 5, 13, 101])


def contents(draws: int, alike: float) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of length sqrt(WIDTH) with this cosine between those of a pair, and their opposites, anew in NumPy."""
    generator = torch.Generator().manual_seed(0)
    q, other = torch.randn(2, draws, 1, WIDTH, generator=generator, dtype=torch.float64).numpy()[:, :, 0]
    q = q / np.linalg.norm(q, axis=1, keepdims=True)
    other = other - (other * q).sum(1, keepdims=True) * q
    other = other / np.linalg.norm(other, axis=1, keepdims=True)
    q, k = q * WIDTH**0.5, (alike * q + (1 - alike**2) ** 0.5 * other) * WIDTH**0.5
    return np.concatenate([q, -q]), np.concatenate([k, -k])


def test_rotation_gives_the_sum_over_pairs_of_the_papers_formula() -> None:
    q, k = contents(7, 0.6)
    half = WIDTH // 2
    first, second = (each[:, :half] + 1j * each[:, half:] for each in (q, k))
    frequency = 100.0 ** (-2 * np.arange(half) / WIDTH)
    turned = first[:, None] * second[:, None].conj() * np.exp(1j * DISTANCES[:, None] * frequency)
    expected = turned.real.sum(-1) / WIDTH**0.5
    scores = score_by_distance(Rotary(WIDTH, base=100.0), DISTANCES, alike=0.6, draws=7)
    np.testing.assert_allclose(scores.mean, expected.mean(0), **SHORT_SUM)
    np.testing.assert_allclose(scores.low, np.quantile(expected, 0.1, axis=0), **SHORT_SUM)
    np.testing.assert_allclose(scores.high, np.quantile(expected, 0.9, axis=0), **SHORT_SUM)


def test_pope_gives_lengths_times_cosines_of_the_head_that_is_asked_for() -> None:
    q, k = (np.log1p(np.exp(each)) for each in contents(3, 0.6))
    shift = -np.arange(2 * WIDTH).reshape(2, WIDTH) / 8
    frequency = 50.0 ** (-np.arange(WIDTH) / WIDTH)
    cosines = np.cos(DISTANCES[:, None] * frequency - shift[1])
    expected = ((q * k)[:, None] * cosines).sum(-1) / WIDTH**0.5
    pope = PoPE(WIDTH, 2, base=50.0)
    pope.shift.data = torch.from_numpy(shift).float()
    scores = score_by_distance(pope, DISTANCES, alike=0.6, head=1, draws=3)
    np.testing.assert_allclose(scores.mean, expected.mean(0), **SHORT_SUM)


def test_a_bias_is_added_to_the_product_of_the_contents() -> None:
    bias = ALiBi(4)
    bias.head_dim = WIDTH
    scores = score_by_distance(bias, DISTANCES, alike=0.5, head=2, draws=5)
    np.testing.assert_allclose(scores.mean, 0.5 * WIDTH**0.5 - 2.0**-6 * DISTANCES, **SHORT_SUM)


def test_an_added_embedding_is_part_of_query_and_key() -> None:
    q, k = contents(3, 0.0)
    frequency = 10_000.0 ** (-2 * np.arange(WIDTH // 2) / WIDTH)
    angle = np.arange(102)[:, None] * frequency
    table = np.stack([np.sin(angle), np.cos(angle)], -1).reshape(102, WIDTH)
    expected = ((q + table[101])[:, None] * (k[:, None] + table[101 - DISTANCES])).sum(-1) / WIDTH**0.5
    scores = score_by_distance(Sinusoidal(WIDTH), DISTANCES, alike=0.0, draws=3)
    np.testing.assert_allclose(scores.mean, expected.mean(0), **SHORT_SUM)


def test_no_position_of_the_query_is_above_another_by_chance() -> None:
    """Sinusoidal products of two positions depend on their distance alone, so the mean over all contents does too."""
    for length in (2, 33, 128, 4096):
        (shown,) = compared("sinusoidal", length=length)
        product = np.cos(shown_distances(length) * 10_000.0 ** (-np.arange(32)[:, None] / 32)).sum(0)
        np.testing.assert_allclose(shown["mean"], 0.75 * 8 + product / 8, **SHORT_SUM)


@pytest.mark.parametrize("name", encodings_of_text())
def test_every_encoding_is_compared_at_one_head_dim(name: str) -> None:
    """Else the scores of one would be larger than those of another: they grow with its square root."""
    encoding = encoding_to_draw(name)
    (shown,) = numbers_of("compare", **{"1": name, "2": "none", "3": "none"}, length="33")["encodings"]
    assert getattr(encoding, "head_dim", SIZES["head_dim"]) == SIZES["head_dim"]
    assert len(shown["mean"]) == 33
    assert np.isfinite(shown["mean"]).all()
    assert np.isfinite(shown["map"][-1]).all()
    if {*encoding.methods()} <= {"rotate", "unrotate"} and not [*encoding.parameters()]:
        np.testing.assert_allclose(shown["mean"][0], 0.75 * 64**0.5, **SHORT_SUM)


def shown_distances(length: int) -> np.ndarray:
    return numbers_of("compare", length=str(length))["distances"]


def compared(name: str, **settings: object) -> list[dict[str, np.ndarray]]:
    asked = {"1": name, "2": "none", "3": "none"} | {name: str(value) for name, value in settings.items()}
    return numbers_of("compare", **asked)["encodings"]


def test_the_map_holds_the_curve_in_its_last_row() -> None:
    index = np.arange(40)
    for encoding in (Rotary(WIDTH), Sinusoidal(WIDTH), PositionEncoding()):
        curve = score_by_distance(encoding, index, alike=0.3, draws=6)
        matrix = score_map(encoding, index, alike=0.3, draws=6)
        np.testing.assert_allclose(matrix[-1, ::-1], curve.mean, **SHORT_SUM)


def test_far_distances_are_sampled() -> None:
    numbers = numbers_of("compare", length="131072")
    assert len(numbers["distances"]) == 256
    assert numbers["distances"][-1] == 131_071
    assert numbers["encodings"][0]["map"].shape == (128, 128)


def test_a_stretched_rotary_is_that_of_its_length() -> None:
    settings = {"1": "rotary", "2": "rotary", "3": "none", "2.scaling": "linear", "2.factor": "4", "length": "64"}
    plain, stretched = numbers_of("compare", **settings)["encodings"]
    np.testing.assert_allclose(stretched["mean"][::4][:16], plain["mean"][:16], **SHORT_SUM)


def test_the_python_of_the_screen_gives_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="pictures need the extra `lab`")
    drawn: list[np.ndarray] = []
    monkeypatch.setattr(pyplot, "plot", lambda _, values, **options: drawn.append(values))
    for name in ("fill_between", "xlabel", "ylabel", "legend", "show"):
        monkeypatch.setattr(pyplot, name, lambda *args, **options: None)
    monkeypatch.setattr(pyplot, "imshow", lambda scores: drawn.append(scores))
    settings = {"1.scaling": "dynamic", "1.factor": "2", "1.trained": "20", "2.slope": "0.3", "3": "fope", "4": "t5"}
    settings |= {"head": "2", "length": "40"}
    numbers = numbers_of("compare", **settings)
    executed(numbers, "score-by-distance")
    for values, shown in zip(drawn, numbers["encodings"], strict=True):
        np.testing.assert_array_equal(values, shown["mean"])
    drawn.clear()
    for slot in (1, 2, 3, 4):
        executed(numbers, f"map-{slot}")
    for values, shown in zip(drawn, numbers["encodings"], strict=True):
        np.testing.assert_array_equal(np.where(np.isnan(shown["map"]), np.nan, values), shown["map"])


def test_what_means_nothing_for_a_text_is_left_out() -> None:
    offered = encodings_of_text()
    left_out = {
        "continuous_grid_bias",
        "convolutional",
        "decomposed",
        "grid_bias",
        "learned_grid",
        "path",
        "rope_mixed",
    }
    assert {*encodings()} - {*offered} == left_out
    with pytest.raises(RangeError, match="grid_bias"):
        numbers_of("compare", **{"1": "grid_bias"})
