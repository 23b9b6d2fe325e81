"""The Known bugs screen: right and wrong differ, all bugs are those of the tests, and its Python draws the same."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest

from locant.explore.screens.known_bugs import BUGS, ENTRIES
from tests.explore.screens import executed, numbers_of
from tests.known_bugs.catalog import as_json, count

numbers = partial(numbers_of, "known_bugs")


def test_all_bugs_are_there_with_what_their_tests_say() -> None:
    assert json.loads(ENTRIES.read_text(encoding="utf-8")) == as_json(), "run: python -m tests.known_bugs.catalog"
    assert len(numbers()["entries"]) == numbers()["total"] == count()


def test_bugs_are_found_by_words_in_any_order() -> None:
    found = numbers(find="maximal mistral")["entries"]
    assert [each["entry"] for each in found] == ["4"]
    assert numbers(find="bfloat16 no such words")["entries"] == []
    assert [each["drawn"] for each in numbers(find="Modalities")["entries"]] == ["rounded-angles"]


@pytest.mark.parametrize("name", BUGS)
def test_the_mistake_can_be_seen_and_its_python_draws_it(name: str) -> None:
    shown = numbers(bug=name)
    assert not np.array_equal(shown["right"], shown["wrong"], equal_nan=True)
    made = executed(shown)
    for each in ("places", "right", "wrong"):
        np.testing.assert_array_equal(np.asarray(made[each], np.float64), shown[each])


def test_what_is_right_is_what_the_definitions_say() -> None:
    angles = numbers(bug="rounded-angles", position="4000")
    expected = np.cos(angles["places"] * 10_000.0 ** (-16 / 64))
    np.testing.assert_array_equal(angles["right"].astype(np.float32), expected.astype(np.float32))
    np.testing.assert_array_equal(numbers(bug="padding-counted")["right"], [np.nan] * 5 + [*range(11)])
    np.testing.assert_array_equal(numbers(bug="cache-forgotten")["right"], -0.25 * np.arange(23, -1, -1))
    assert numbers(bug="ids-wrapped")["wrong"][32] == 0
