"""The nearest rows are those of the whole table, however it is cut, and the whole matrix is never there."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from locant import RangeError, ShapeError, TokenEmbedding
from locant.embedding import token
from locant.embedding.token import unit
from tests.largest import Largest
from tests.refusal import refuses
from tests.tolerances import LENGTH, assert_close


def scores_of_all(weight: Tensor, vectors: Tensor, measure: str) -> np.ndarray:
    """Every vector with every row, in float64."""
    rows, queries = weight.detach().double().numpy(), vectors.detach().double().numpy()
    if measure == "cosine":
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        queries = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    return queries @ rows.T


@pytest.mark.parametrize("measure", ["cosine", "dot"])
@pytest.mark.parametrize("entries", [64, 501, 2**22])
def test_all_rows_are_compared(measure: str, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token, "ENTRIES", entries)
    monkeypatch.setattr(token, "QUERIES", 4)
    table = TokenEmbedding(97, 5)
    vectors = torch.randn(2, 3, 5)
    found = table.nearest(vectors, 7, measure=measure, exclude=[3, 50])  # type: ignore[arg-type]
    expected = scores_of_all(table.weight, vectors.view(6, 5), measure)
    expected[:, [3, 50]] = -np.inf
    order = np.argsort(-expected, axis=1)[:, :7]
    assert found.ids.view(6, 7).tolist() == order.tolist()
    assert_close(found.scores.view(6, 7), torch.from_numpy(np.take_along_axis(expected, order, 1)))


def test_a_token_is_not_its_own_neighbour() -> None:
    table = TokenEmbedding(31, 5)
    ids = torch.randint(31, (4, 2))
    found = table.nearest(ids, 30)
    assert not (found.ids == ids[..., None]).any()
    assert (found.ids.sort(-1).values.diff() > 0).all(), "all others, once each"
    assert torch.equal(table.nearest(int(ids[0, 0]), 30).ids, found.ids[0, 0])


def test_a_row_of_zeros_is_near_to_nothing() -> None:
    table = TokenEmbedding(5, 3, padding_idx=0)
    found = table.nearest(0, 4)
    assert found.scores.eq(0).all()


def test_the_matrix_of_all_with_all_is_never_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token, "ENTRIES", 2**12)
    monkeypatch.setattr(token, "QUERIES", 64)
    table = TokenEmbedding(400, 4)
    with Largest() as largest:
        table.nearest(torch.arange(400), 3)
    assert 2**11 < largest.numbers <= 2**12 + 3 * 64 < 400**2


@pytest.mark.parametrize("size", [1e-44, 1e-20, 1e38])
def test_the_angle_does_not_depend_on_the_length(size: float) -> None:
    """Of rows and vectors: the squares of these have no float32."""
    table = TokenEmbedding(31, 3)
    table.weight.data = (table.weight * 8).round().clamp(-3, 3)
    table.weight.data[:, 0] = 3
    vector = torch.tensor([1.0, 2.0, -3.0])
    scores = table.nearest(vector, 31).scores
    for rows, query in ((table.weight.data, vector * size), (table.weight.data * size, vector)):
        table.weight.data = rows
        found = table.nearest(query, 31)
        assert_close(found.scores, scores)
        assert_close(found.scores, found.scores.new_tensor(scores_of_all(rows, query[None], "cosine")[0])[found.ids])
    assert_close(unit(vector[None] * size), unit(vector[None]))


@pytest.mark.parametrize("measure", ["cosine", "dot"])
def test_rows_that_are_not_finite_come_last(measure: Literal["cosine", "dot"]) -> None:
    table = TokenEmbedding(6, 3)
    table.weight.data[1], table.weight.data[4, 2] = torch.nan, torch.inf
    found = table.nearest(torch.tensor([1.0, 2.0, 3.0]), 5, measure=measure, exclude=[2])
    assert {*found.ids[:3].tolist()} == {0, 3, 5}
    assert {*found.ids[3:].tolist()} == {1, 4}
    assert found.scores.isnan().tolist() == [False] * 3 + [True] * 2
    for wrong in (1, torch.tensor([1.0, torch.nan, 0.0]), torch.tensor([[1.0, 2.0, torch.inf]])):
        with refuses(RangeError, "not finite"):
            table.nearest(wrong, 3)


def test_bfloat16_rows_are_compared_in_float32() -> None:
    table = TokenEmbedding(97, 64).bfloat16()
    vector = torch.randn(64)
    expected = scores_of_all(table.weight, vector[None], "cosine")[0]
    found = table.nearest(vector, 5)
    assert found.scores.dtype == torch.float32
    assert np.abs(found.scores.numpy() - np.sort(expected)[::-1][:5]).max() < LENGTH


def test_what_cannot_be_compared_is_refused() -> None:
    table = TokenEmbedding(7, 3)
    with refuses(RangeError, "k", "at most 6"):
        table.nearest(2, 7)
    with refuses(RangeError, "'cosine' or 'dot'"):
        table.nearest(2, 1, measure="euclid")  # type: ignore[arg-type]
    with refuses(ShapeError, "d_model=3"):
        table.nearest(torch.randn(4), 1)
    with refuses(RangeError, "got id 7"):
        table.nearest(torch.tensor([1, 7]), 1)
    for wrong in (9, 1.5, -1):
        with refuses(RangeError, f"got {wrong} for an id in exclude"):
            table.nearest(1, 1, exclude=[wrong])  # type: ignore[list-item]
    for word in ("king", ["king"], None):
        with refuses(ShapeError, "for ids_or_vector", "Words"):
            table.nearest(word, 1)  # type: ignore[arg-type]
