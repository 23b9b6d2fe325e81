"""Packed and padded rows as runs of tokens that count plainly: the same attention, and what is no such row."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from locant import Positions, attend
from locant.attention import mask
from locant.attention.backends import tiled
from locant.attention.inputs import AttentionInputs
from locant.attention.mask import AttentionMask, Segment
from locant.kernels import distance_attention as kernel
from tests.attention.arrangements import HEAD_DIM, HEADS, Arrangement, Inputs, shaken
from tests.tolerances import assert_close

BY_DISTANCE = ["none", "alibi", "alibi, learned", "t5, both ways", "kerple", "sandwich"]

ROWS: dict[str, Positions] = {
    "packed": Positions.packed([[5, 0, 1, 9, 3], [2, 13]], length=19),
    "packed alike": Positions.packed([[5, 9, 3]], length=19),
    "left padding": Positions.from_mask(torch.tensor([[0] * 6 + [1] * 13, [0] * 2 + [1] * 17])),
    "left padding of one width": Positions.from_mask(torch.tensor([[0] * 6 + [1] * 13])),
    "right padding": Positions.from_mask(torch.tensor([[1] * 12 + [0] * 7, [1] * 18 + [0]])),
    "a row of padding": Positions.from_mask(torch.tensor([[0] * 9, [1] * 9])),
    "documents that begin anywhere": Positions.of(
        [[7, 8, 9, 0, 1], [3, 4, -2, -1, 0]], [[4, 4, 4, 0, 0], [4, 4, 1, 1, 1]]
    ),
}


@pytest.fixture(autouse=True)
def _runs_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask, "MIN_DOCUMENT_LENGTH", 0)
    monkeypatch.setattr(kernel, "NARROW_TILE", 4)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs there were, by call."""
    calls: list[int] = []

    by_documents = tiled._attend_by_document

    def listening(inputs: AttentionInputs, rows: list[list[Segment]]) -> Tensor:
        calls.append(sum(map(len, rows)))
        return by_documents(inputs, rows)

    monkeypatch.setattr(tiled, "_attend_by_document", listening)
    return calls


OPTIONS: list[dict[str, Any]] = [{}, {"window": 4}, {"causal": False}, {"window": 3, "causal": False}]


@pytest.mark.parametrize("encoding_name", BY_DISTANCE)
@pytest.mark.parametrize("kind", ROWS)
def test_outputs_and_all_gradients_are_those_of_numpy(kind: str, encoding_name: str, taken: list[int]) -> None:
    """Masks take turns, and few and many heads of keys: each meets every kind of rows and every encoding."""
    row, bias = [*ROWS].index(kind), BY_DISTANCE.index(encoding_name)
    options, kv_heads = OPTIONS[(row + bias) % 4], (2, HEADS)[(row + bias // 2) % 2]
    arrangement, encoding = dataclasses.replace(Arrangement(ROWS[kind]), **options), shaken(encoding_name)
    Inputs.draw(arrangement, kv_heads=kv_heads).require_numpys(arrangement, encoding, "tiled")
    assert len(taken) == 1


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=2, max_size=2), st.integers(0, 3))
def test_what_is_packed_comes_apart_as_it_went_in(lengths: list[list[int]], more: int) -> None:
    width = max(map(sum, lengths)) + more
    positions = Positions.packed(lengths, length=width)
    found = AttentionMask(positions).packed_documents()
    if not any(map(sum, lengths)):
        assert found is None
        return
    assert found is not None
    documents = [[n for n in row if n] for row in lengths]
    rows = [[*((n, True) for n in row), *([(width - sum(row), False)] * (sum(row) < width))] for row in documents]
    assert found in (rows, rows[:1])
    assert len(found) == 2 or rows[0] == rows[1]


@pytest.mark.parametrize(
    "positions",
    [
        Positions.of([0, 1, 3, 4]),
        Positions.of([3, 2, 1, 0]),
        Positions.of([0, 1, 0, 1]),
        Positions.of([0, 1, 2, 3], [0, 1, 0, 1]),
        Positions.of([0, 1, 2, 3], order=[0, 1, 2, 3]),
        Positions.from_mask(torch.tensor([[1, 0, 1, 1]])),
        Positions.from_mask(torch.zeros(2, 4)),
        Positions.grid(2, 2),
        Positions.packed([2, 2]).to("meta"),
        Positions.packed([]),
    ],
    ids=["a gap", "backwards", "anew", "in turns", "an order", "a hole", "padding", "a grid", "no values", "nothing"],
)
def test_what_is_no_row_of_runs(positions: Positions, taken: list[int]) -> None:
    assert AttentionMask(positions).packed_documents() is None
    if positions.axes == 1 and positions.device.type == "cpu":
        x = torch.randn(positions.batch, HEADS, positions.seq_len, HEAD_DIM, requires_grad=True)
        y = attend(x, x, x, encoding=shaken("alibi"), positions=positions, backend="tiled")
        assert_close(y, attend(x, x, x, encoding=shaken("alibi"), positions=positions, backend="eager"))
        y.sum().backward()
    assert not taken


def test_short_runs_and_what_has_no_table_go_in_tiles(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    x, positions = torch.randn(1, HEADS, 10, HEAD_DIM), Positions.packed([4, 6])
    attend(x, x, x, encoding=shaken("cope", torch.float32), positions=positions, backend="tiled")
    attend(x, x, x, positions=positions, backend="tiled", dropout_p=0.5)
    attend(x, x, x, positions=positions, k_positions=positions, backend="tiled")
    monkeypatch.setattr(mask, "MIN_DOCUMENT_LENGTH", 6)
    attend(x, x, x, positions=positions, backend="tiled")
    assert not taken
    monkeypatch.setattr(mask, "MIN_DOCUMENT_LENGTH", 5)
    attend(x, x, x, positions=positions, backend="tiled")
    assert taken == [2]


@pytest.mark.parametrize("make", [torch.ones, lambda *shape: torch.ones(*shape, dtype=torch.bool)])
def test_a_mask_of_ones_is_a_row_that_counts(make: object) -> None:
    positions = Positions.from_mask(make(2, 5))  # type: ignore[operator]
    assert positions.start == 0
    assert positions == Positions.arange(5, batch=2)
    assert Positions.from_mask(torch.tensor([[1, 1], [1, 0]])).start is None


@pytest.mark.parametrize(("lengths", "calls"), [([[5, 9, 3]], 3), ([[5, 9], [9, 5]], 4)])
def test_rows_that_are_alike_are_cut_once(
    lengths: list[list[int]], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    compute = tiled.distance_attention

    def counted(q: Tensor, *rest: object, **onto: object) -> object:
        made.append(len(q))
        return compute(q, *rest, **onto)

    monkeypatch.setattr(tiled, "distance_attention", counted)
    positions = Positions.packed(lengths).expand(2)
    x = torch.randn(2, HEADS, positions.seq_len, HEAD_DIM)
    attend(x, x, x, encoding=shaken("alibi", torch.float32), positions=positions, backend="tiled")
    assert len(made) == calls
    assert sum(made) == (6 if len(lengths) == 1 else 4)
