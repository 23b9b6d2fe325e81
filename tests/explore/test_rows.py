"""The Rows screen: who attends to whom is what the definition says, and its Python makes the same."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

from locant.errors import RangeError
from tests.explore.screens import executed, numbers_of

CASES = [
    {},
    {"documents": "9", "padding": "0"},
    {"documents": "9", "padding": "0", "cache": "6", "window": "4"},
    {"documents": "4 4", "padding": "3", "side": "left", "direction": "both directions"},
    {"documents": "4,1", "padding": "2", "cache": "3", "window": "2"},
    {"documents": "8, 16", "padding": "0", "ranks": "2", "split": "contiguous", "window": "5"},
    {"documents": "3", "padding": "1", "ranks": "4"},
    {"indices": "randomized", "documents": "6, 3", "below": "50", "seed": "3", "ranks": "2", "window": "4"},
    {"indices": "coupled", "sum": "653+49=207"},
    {"indices": "abacus", "sum": "12 and 345"},
]


numbers = partial(numbers_of, "rows")


@pytest.mark.parametrize("given", CASES, ids=range(len(CASES)))
def test_the_pairs_are_those_of_the_definition(given: dict[str, str]) -> None:
    shown = numbers(**given)
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
    shown = numbers(**given)
    for rank in range(len(shown["work"])):
        made = executed(shown, "mask", rank=rank)
        np.testing.assert_array_equal(made["positions"].index[0], shown["queries"]["index"])
        np.testing.assert_array_equal(made["positions"].document[0], shown["queries"]["document"])
        np.testing.assert_array_equal(made["mask"][0, 0], np.isfinite(shown["pairs"]))
        np.testing.assert_array_equal(made["distance"], shown["pairs"])
        if "shard" in made:
            of_rank = shown["queries"]["rank"] == rank
            np.testing.assert_array_equal(
                made["shard"].index[0].sort().values, np.sort(shown["queries"]["index"][of_rank])
            )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"indices": "coupled", "sum": "653+49=207"}, [2, 3, 4, 5, 3, 4, 5, 4, 3, 2]),
        ({"indices": "abacus", "sum": "12 a 345"}, [1, 2, 0, 0, 0, 1, 2, 3]),
    ],
)
def test_digits_have_the_indices_of_the_papers(given: dict[str, str], expected: list[int]) -> None:
    assert numbers(**given)["queries"]["index"].tolist() == expected


def test_random_indices_ascend_below_the_limit() -> None:
    shown = numbers(indices="randomized", documents="12", padding="0", below="20", seed="5")
    index = shown["queries"]["index"]
    assert (np.diff(index) > 0).all()
    assert index.max() < 20
    assert shown["queries"]["order"].tolist() == [*range(12)]


def test_a_long_row_has_the_backend_of_long_rows() -> None:
    assert numbers(encoding="alibi")["backend"]["name"] == "sdpa"
    long = numbers(encoding="alibi", times="512")["backend"]
    assert (long["name"], long["queries"]) == ("tiled", 18 * 512)


def test_lengths_and_equations_that_are_none_are_refused() -> None:
    for documents in ("", "0", "-3", "5, x", "9" * 40, "100 100", "<script>"):
        with pytest.raises(RangeError, match="documents"):
            numbers(documents=documents)
    for given in ({"indices": "coupled", "sum": "1++2"}, {"indices": "abacus", "sum": "none"}):
        with pytest.raises(RangeError, match="sum"):
            numbers(**given)
