"""The Known bugs screen: right and wrong differ, sources are the museum's, and its Python draws the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from locant.explore.screens.known_bugs import BUGS
from tests.explore.screens import executed, numbers_of

MUSEUM = Path(__file__).parents[1] / "known_bugs" / "README.md"


numbers = partial(numbers_of, "known_bugs")


@pytest.mark.parametrize("name", BUGS)
def test_the_mistake_can_be_seen_and_its_python_draws_it(name: str) -> None:
    shown = numbers(bug=name)
    assert not np.array_equal(shown["right"], shown["wrong"], equal_nan=True)
    made = executed(shown)
    for each in ("places", "right", "wrong"):
        np.testing.assert_array_equal(np.asarray(made[each], np.float64), shown[each])


@pytest.mark.parametrize("name", BUGS)
def test_the_source_is_that_of_its_entry(name: str) -> None:
    assert f"| {BUGS[name].entry} | {BUGS[name].source} |" in MUSEUM.read_text(encoding="utf-8")


def test_what_is_right_is_what_the_definitions_say() -> None:
    angles = numbers(bug="rounded-angles", position="4000")
    expected = np.cos(angles["places"] * 10_000.0 ** (-16 / 64))
    np.testing.assert_array_equal(angles["right"].astype(np.float32), expected.astype(np.float32))
    np.testing.assert_array_equal(numbers(bug="padding-counted")["right"], [np.nan] * 5 + [*range(11)])
    np.testing.assert_array_equal(numbers(bug="cache-forgotten")["right"], -0.25 * np.arange(23, -1, -1))
    assert numbers(bug="ids-wrapped")["wrong"][32] == 0
