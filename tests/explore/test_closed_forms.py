"""What the page computes by itself, in a real Chromium, is what locant computes."""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from locant import ALiBi, Positions, Rotary, Sinusoidal, T5Bias
from locant.checkpoints.rotary_settings import pair_settings
from locant.explore.document import modules
from locant.positions.scaling import scaling_by_name
from tests.tolerances import ANGLE, DOUBLE, FAR_DOUBLE, FEW_ROUNDINGS, FORMULA, POWER_IN_DOUBLE, assert_close

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

METHODS = ("none", "linear", "ntk", "dynamic", "yarn", "longrope", "llama3")
SHAPES = [(64, 10_000.0, 4096), (128, 500_000.0, 8192), (80, 10_000.0, 2048), (6, 25.0, 100), (64, 10_000.0, 6)]
FACTORS = (1.0, 1.5, 8.0, 32.0)


class Page:
    """The functions of the module, called by name."""

    def __init__(self, page: Any) -> None:
        self._page = page
        code = base64.b64encode(modules()["closed_forms.js"].encode()).decode()
        page.evaluate(
            "async (code) => { globalThis.forms = await import('data:text/javascript;base64,' + code); }", code
        )

    def __call__(self, name: str, *arguments: Any) -> Any:
        return self._page.evaluate("([name, given]) => forms[name](...given)", [name, arguments])

    def each(self, name: str, calls: list[tuple[Any, ...]]) -> list[Any]:
        """The answers to many calls."""
        return self._page.evaluate("([name, calls]) => calls.map((given) => forms[name](...given))", [name, calls])

    def constant(self, name: str) -> Any:
        return self._page.evaluate("(name) => forms[name]", name)

    def run(self, code: str) -> Any:
        return self._page.evaluate(f"() => {{ {code} }}")


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    opened = browser.new_page()
    yield Page(opened)
    opened.close()


def at(position: int) -> Positions:
    return Positions.of(torch.tensor([[position]]))


def rotary(method: str, dim: int, base: float, trained: int, factor: float, length: int) -> Rotary:
    scaling = None if method == "none" else scaling_by_name(f"{method}:{factor!r}", trained, dim, base)
    made = Rotary(dim, base=base, scaling=scaling)
    return made if made.scaling.length_threshold is None else made.for_length(length)


def test_every_function_has_a_test_here() -> None:
    exported = set(re.findall(r"^export (?:function|const) (\w+)", modules()["closed_forms.js"], re.MULTILINE))
    called = set(re.findall(r"page(?:\.each)?\(\s*\"(\w+)\"", Path(__file__).read_text("utf-8")))
    assert exported - {"METHODS", "matrix"} == called


@pytest.mark.parametrize("method", METHODS)
def test_frequencies_and_attention_factors_of_scalings(page: Page, method: str) -> None:
    assert page.constant("METHODS") == list(METHODS)
    for (dim, base, trained), factor in itertools.product(SHAPES, FACTORS):
        usual = round(trained * factor)
        for length in (usual, trained, trained + 1, 2 * usual):
            sizes = {"dim": dim, "base": base, "factor": factor, "trained": trained}
            answer = page("scaled", method, {**sizes, **({} if length == usual else {"length": length})})
            ours = rotary(method, dim, base, trained, factor, length)
            assert_close(torch.tensor(answer["frequencies"], dtype=torch.float64), ours.inv_freq)
            assert answer["attention"] == pytest.approx(
                ours.scaling.effective_attention_factor, rel=FEW_ROUNDINGS, abs=0
            )


@pytest.mark.parametrize(("dim", "base"), [(dim, base) for dim, base, _ in SHAPES])
def test_plain_frequencies_wavelengths_and_angles(page: Page, dim: int, base: float) -> None:
    ours = Rotary(dim, base=base)
    frequencies = page("inverseFrequencies", dim, base)
    assert_close(torch.tensor(frequencies, dtype=torch.float64), ours.inv_freq)
    waves = [pair.wavelength for pair in pair_settings(ours)]
    assert page("wavelengths", frequencies) == pytest.approx(waves, rel=POWER_IN_DOUBLE, abs=0)
    for position, near in ((0, FORMULA), (1, FORMULA), (77, DOUBLE), (4095, FAR_DOUBLE), (2**20, ANGLE)):
        answer = page("angles", frequencies, position)
        for shown, true in zip((answer["cos"], answer["sin"]), ours.cos_sin(at(position), torch.float64), strict=True):
            assert shown == pytest.approx(true[0, 0].tolist(), abs=near)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("method", ["none", "linear", "llama3"])
def test_a_rotated_vector(page: Page, layout: str, method: str) -> None:
    x = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ours = rotary(method, 64, 10_000.0, 4096, 4.0, 16_384).replace(layout=layout)
    frequencies = page("scaled", method, {"dim": 64, "base": 10_000.0, "factor": 4, "trained": 4096})["frequencies"]
    for position in (0, 1, 63, 100):
        answer = page("rotated", x.tolist(), frequencies, position, layout)
        assert answer == pytest.approx(
            ours.rotate_one(x[None, None, None], at(position)).flatten().tolist(), abs=DOUBLE
        )


@pytest.mark.parametrize("method", METHODS)
def test_the_score_by_distance_of_vectors_that_are_all_ones(page: Page, method: str) -> None:
    """Without the attention factor, by which `scaled` tells separately that scores grow."""
    made = rotary(method, 64, 10_000.0, 1024, 4.0, 4096)
    ones = torch.ones(1, 1, 200, 64, dtype=torch.float64)
    q, k = made.rotate(ones, ones, Positions.arange(200))
    scores = (q[0, 0, -1] @ k[0, 0].T).flip(0) / 64 / made.scaling.effective_attention_factor**2
    frequencies = page("scaled", method, {"dim": 64, "base": 10_000.0, "factor": 4, "trained": 1024})["frequencies"]
    assert page("scoreByDistance", frequencies, list(range(200))) == pytest.approx(scores.tolist(), abs=DOUBLE)


@pytest.mark.parametrize(("dim", "base"), [(64, 10_000.0), (6, 100.0)])
def test_sinusoidal_vectors(page: Page, dim: int, base: float) -> None:
    ours = Sinusoidal(dim, base=base).vectors(Positions.arange(300), torch.float64)[0]
    answer = page.each("sinusoidal", [(dim, base, position) for position in range(300)])
    assert torch.tensor(answer, dtype=torch.float64).flatten().tolist() == pytest.approx(
        ours.flatten().tolist(), abs=DOUBLE
    )


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 20, 32, 71])
def test_slopes_and_matrices_of_alibi(page: Page, heads: int) -> None:
    slopes = page("alibiSlopes", heads)
    assert slopes == pytest.approx(ALiBi(heads).slopes.tolist(), rel=FEW_ROUNDINGS, abs=0)
    ours = ALiBi(heads).matrix(9, 14)
    queries = range(5, 14)  # the last nine of fourteen
    answer = page.each("alibi", [(slope, q - k) for slope in slopes for q in queries for k in range(14)])
    assert_close(torch.tensor(answer).view(heads, 9, 14), ours.double(), torch.float32)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_buckets_of_t5(page: Page, bidirectional: bool) -> None:
    """Every distance, also at sizes where one bucket begins a distance earlier or later than in float64."""
    rounded = [(9, 128), (18, 128), (16, 72), (32, 72), (36, 392), (51, 441), (32, 939), (64, 939)]
    for buckets, most in [*itertools.product((4, 5, 8, 31, 32, 33, 64), (40, 64, 100, 128, 512, 1000)), *rounded]:
        distances = list(range(-most - 3, most + 4))
        settings = {"buckets": buckets, "most": most, "bidirectional": bidirectional}
        ours = T5Bias(1, num_buckets=buckets, max_distance=most, bidirectional=bidirectional)
        answer = page.each("t5Bucket", [(distance, settings) for distance in distances])
        assert answer == ours.buckets(torch.tensor(distances)).tolist(), settings


@pytest.mark.parametrize("lengths", [[5], [5, 1, 12], [3, 0, 4], [0], [1, 1, 1]])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_packed_rows_and_who_attends_to_whom(page: Page, lengths: list[int], causal: bool, window: int | None) -> None:
    width = sum(lengths) + 2
    row = page("packed", lengths, width)
    ours = Positions.packed(lengths, length=width)
    assert row == {"index": ours.index[0].tolist(), "document": ours.document[0].tolist()}
    assert page("packed", lengths)["index"] == row["index"][:-2]
    options = {"causal": causal, "window": window or 0}
    answer = page.each("attends", [(row, q, k, options) for q in range(width) for k in range(width)])
    allowed = ours.mask(causal=causal, window=window)
    assert answer == allowed.expand(1, 1, width, width).flatten().tolist()


def test_a_matrix_has_its_rows_in_order(page: Page) -> None:
    filled = page.run(
        "const one = forms.matrix(2, 3, (row, column) => 10 * row + column); return [[...one], one.shape];"
    )
    assert filled == [[0, 1, 2, 10, 11, 12], [2, 3]]
