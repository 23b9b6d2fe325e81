"""The Rows screen: who attends to whom is what the definition says, and its Python makes the same."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from locant.errors import RangeError
from locant.explore.answers import answer
from locant.explore.session import Session

CASES = [
    {},
    {"documents": "9", "padding": "0"},
    {"documents": "9", "padding": "0", "cache": "6", "window": "4"},
    {"documents": "4 4", "padding": "3", "side": "left", "direction": "both directions"},
    {"documents": "4,1", "padding": "2", "cache": "3", "window": "2"},
    {"documents": "8, 16", "padding": "0", "ranks": "2", "split": "contiguous", "window": "5"},
    {"documents": "3", "padding": "1", "ranks": "4"},
]


def numbers(given: dict[str, str]) -> dict[str, Any]:
    return answer("rows", given, Session())["numbers"]


@pytest.mark.parametrize("given", CASES, ids=range(len(CASES)))
def test_the_pairs_are_those_of_the_definition(given: dict[str, str]) -> None:
    shown = numbers(given)
    queries, keys, window = shown["queries"], shown["keys"], int(given.get("window", 0))
    for q, k in itertools.product(range(len(queries["index"])), range(len(keys["index"]))):
        distance = queries["order"][q] - keys["order"][k]
        sees = queries["document"][q] == keys["document"][k] >= 0
        sees &= distance >= 0 or given.get("direction") == "both directions"
        sees &= not window or abs(distance) < window
        assert np.isnan(shown["pairs"][q, k]) != sees
        assert not sees or shown["pairs"][q, k] == distance
    assert sum(shown["work"]) == np.isfinite(shown["pairs"]).sum()


@pytest.mark.parametrize("given", CASES, ids=range(len(CASES)))
def test_its_python_makes_the_same(given: dict[str, str]) -> None:
    shown = numbers(given)
    for rank in range(len(shown["work"])):
        made: dict[str, Any] = {"rank": rank}
        exec(shown["python"], made)  # noqa: S102  # what the page offers to copy
        np.testing.assert_array_equal(made["positions"].index[0], shown["queries"]["index"])
        np.testing.assert_array_equal(made["positions"].document[0], shown["queries"]["document"])
        np.testing.assert_array_equal(made["mask"][0, 0], np.isfinite(shown["pairs"]))
        if "mine" in made:
            of_rank = shown["queries"]["rank"] == rank
            np.testing.assert_array_equal(
                made["mine"].index[0].sort().values, np.sort(shown["queries"]["index"][of_rank])
            )


def test_a_long_row_has_the_backend_of_long_rows() -> None:
    assert numbers({"encoding": "alibi"})["backend"]["name"] == "sdpa"
    long = numbers({"encoding": "alibi", "times": "512"})["backend"]
    assert (long["name"], long["queries"]) == ("tiled", 18 * 512)


@pytest.mark.parametrize("documents", ["", "0", "-3", "5, x", "9" * 40, "100 100", "<script>"])
def test_lengths_that_are_none_are_refused(documents: str) -> None:
    with pytest.raises(RangeError, match="documents"):
        numbers({"documents": documents})
