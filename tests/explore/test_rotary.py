"""The clocks, wavelengths, caches and roundings of the Rotary screen, beside their formulas in many digits."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch

from locant.errors import RangeError
from locant.explore.screens import answer
from locant.explore.session import Session
from tests.refusal import refuses
from tests.tolerances import ANGLE_IN_DOUBLE, DOUBLE, FEW_ROUNDINGS, PHASE

mpmath.mp.dps = 40


def numbers(**settings: str) -> dict:
    return answer("rotary", settings, Session())["numbers"]


@pytest.mark.parametrize("position", [0, 1, 4095, 2**31 - 1])
def test_a_hand_stands_at_position_times_frequency(position: int) -> None:
    shown = numbers(head_dim="12", base="500", scaling="none", position=str(position))
    for pair in range(6):
        angle = position * mpmath.mpf(500) ** (mpmath.mpf(-pair) / 6)
        assert abs(shown["cos"][pair] - float(mpmath.cos(angle))) <= ANGLE_IN_DOUBLE
        assert abs(shown["sin"][pair] - float(mpmath.sin(angle))) <= ANGLE_IN_DOUBLE


def test_wavelengths_are_two_pi_over_the_frequency_and_linear_stretches_them_by_its_factor() -> None:
    shown = numbers(head_dim="10", base="100", scaling="linear", factor="3", position="50")
    expected = 2 * math.pi * 100.0 ** (2 * np.arange(5) / 10)
    np.testing.assert_allclose(shown["plain"], expected, rtol=FEW_ROUNDINGS)
    np.testing.assert_allclose(shown["wavelengths"], 3 * expected, rtol=FEW_ROUNDINGS)
    np.testing.assert_allclose(shown["rotations"], 50 / (3 * expected), rtol=FEW_ROUNDINGS)
    assert shown["bands"] == ["stretched"] * 5


def test_yarn_keeps_fast_pairs_and_slows_the_slowest_by_its_factor() -> None:
    shown = numbers(head_dim="64", scaling="yarn", factor="8")
    stretch = np.array(shown["wavelengths"]) / np.array(shown["plain"])
    for band, members in (("kept", 1.0), ("stretched", 8.0)):
        np.testing.assert_allclose(stretch[np.array(shown["bands"]) == band], members, rtol=FEW_ROUNDINGS)
    assert shown["bands"][0] == "kept"
    assert shown["bands"][-1] == "stretched"
    assert shown["methods"]["names"].index("yarn") == 3
    np.testing.assert_allclose(shown["methods"]["stretch"][3], stretch, rtol=FEW_ROUNDINGS)


def test_a_cached_key_fits_by_the_cosine_of_what_its_angles_moved() -> None:
    cache = numbers(head_dim="8", base="100", trained="64", factor="4", scaling="none")["cache"]
    base = 100 * (4 * 256 / 64 - 3) ** (8 / 6)
    then, now = (each ** (-2 * np.arange(4) / 8) for each in (100.0, base))
    expected = np.cos(np.arange(64)[:, None] * (now - then)).mean(-1)
    np.testing.assert_allclose(cache["curves"]["dynamic"], expected, rtol=0, atol=DOUBLE)
    assert cache["kept"] == ["linear", "ntk", "yarn", "llama3"]


def test_rounded_angles_miss_what_the_usual_code_misses() -> None:
    position = 12_345
    pairs = numbers(head_dim="16", scaling="none", position=str(position))["precision"]["pairs"]
    exact = [mpmath.cos(position * mpmath.mpf(10_000) ** (mpmath.mpf(-pair) / 8)) for pair in range(8)]
    frequency = 1.0 / (10_000.0 ** (torch.arange(0, 16, 2, dtype=torch.int64).float() / 16))  # as transformers has it
    product = torch.tensor(12_352.0) * frequency.bfloat16().double()  # 12 345 in units of 64
    cosines = {
        "float32": (torch.tensor(float(position)) * frequency).cos(),
        "bfloat16": product.bfloat16().double().cos(),
    }
    for name, rounded in cosines.items():
        expected = [abs(float(cosine) - float(true)) for cosine, true in zip(rounded, exact, strict=True)]
        np.testing.assert_allclose(pairs[name], expected, rtol=0, atol=DOUBLE)


def test_a_position_past_the_sequence_makes_it_longer() -> None:
    assert numbers(scaling="dynamic", position="100000")["length"] == 100_001
    assert numbers(scaling="dynamic", position="1000")["length"] == 32_768


def test_settings_that_no_encoding_has_are_refused() -> None:
    with refuses(RangeError, "head_dim", "even"):
        numbers(head_dim="7")
    with refuses(RangeError, "position"):
        numbers(position=str(2**31))


def test_the_python_of_the_screen_gives_its_clocks() -> None:
    shown = numbers(scaling="longrope", position="77", factor="2", trained="50")
    values: dict = {}
    exec(shown["python"].replace("plot(rotary).savefig", "(lambda name: None)"), values)  # noqa: S102
    factor = shown["attention_factor"]
    np.testing.assert_allclose(values["cos"][0, 0].double() / factor, shown["cos"], rtol=0, atol=PHASE)
