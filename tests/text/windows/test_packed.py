"""Packed rows: every target once, nothing across documents, and no more rows than best fit needs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from locant.errors import InputError
from locant.positions import Positions
from locant.text import Batch, Windows
from locant.text.windows import layouts
from locant.text.windows.layouts import best_fit
from tests.refusal import refuses
from tests.text.windows.definition import best_fit_fills, pieces

PAD = 10**6

documents_of = st.lists(st.integers(0, 14), min_size=1, max_size=30)
lengths_of = st.integers(1, 9)


def offsets(lengths: list[int]) -> list[int]:
    return [0, *np.cumsum(lengths).tolist()]


def packed(lengths: list[int], length: int) -> Windows:
    """Over places instead of ids, so that every input says where it came from."""
    n = sum(lengths)
    return Windows(np.arange(n), length, mode="packed", documents=offsets(lengths), pad_id=PAD)


def pieces_of_row(batch: Batch, row: int) -> list[list[tuple[int, int]]]:
    """The inputs and targets of a row, by the document ids of its positions."""
    document = batch["positions"].document[row].tolist()
    slots = list(zip(document, batch["ids"][row].tolist(), batch["targets"][row].tolist(), strict=True))
    numbers = sorted(set(document) - {-1})
    assert numbers == list(range(len(numbers)))
    assert document == [number for number in numbers for _ in range(document.count(number))] + [-1] * document.count(-1)
    return [[(place, target) for number, place, target in slots if number == wanted] for wanted in numbers]


def everything(windows: Windows) -> Batch:
    return windows.__getitems__(range(len(windows)))


@given(lengths=documents_of, length=lengths_of)
def test_rows_hold_each_piece_of_the_definition_once(lengths: list[int], length: int) -> None:
    wanted = pieces(offsets(lengths), length)
    if not wanted:
        with pytest.raises(InputError, match="expected 2 or more"):
            packed(lengths, length)
        return
    batch = everything(packed(lengths, length))
    rows = [pieces_of_row(batch, row) for row in range(len(batch["ids"]))]
    assert sorted(piece for row in rows for piece in row) == wanted
    firsts = [row[0][0] for row in rows]
    assert firsts == sorted(firsts), "rows stand in the order of their first pieces"
    assert all(row == sorted(row) for row in rows), "and the pieces of a row in that of the text"


@given(lengths=documents_of, length=lengths_of)
def test_every_piece_counts_from_0_and_the_rest_is_padding(lengths: list[int], length: int) -> None:
    if not pieces(offsets(lengths), length):
        return
    batch = everything(packed(lengths, length))
    rows = [pieces_of_row(batch, row) for row in range(len(batch["ids"]))]
    assert batch["positions"] == Positions.packed([[len(piece) for piece in row] for row in rows], length=length)
    assert batch["positions"].max_index == max(len(piece) for row in rows for piece in row) - 1
    padding = batch["positions"].document == -1
    assert torch.equal(batch["targets"] == -100, padding)
    assert torch.equal(batch["ids"] == PAD, padding)


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=80), capacity=st.integers(30, 40))
def test_rows_are_as_full_as_best_fit_makes_them(sizes: list[int], capacity: int) -> None:
    row = best_fit(np.array(sizes), capacity)
    fills = np.bincount(row, weights=sizes).astype(int).tolist()
    assert sorted(fills) == best_fit_fills(sizes, capacity)
    firsts = [row.tolist().index(number) for number in range(len(fills))]
    assert firsts == sorted(firsts)


def test_sizes_beyond_16_bits_are_packed_as_well() -> None:
    sizes = np.random.default_rng(0).integers(1, 2**18, 300)
    fills = np.bincount(best_fit(sizes, 2**18), weights=sizes).astype(int).tolist()
    assert sorted(fills) == best_fit_fills(sizes.tolist(), 2**18)


@given(lengths=documents_of, length=lengths_of)
def test_blocks_change_which_rows_there_are_and_nothing_else(lengths: list[int], length: int) -> None:
    wanted = pieces(offsets(lengths), length)
    if not wanted:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "BLOCK", 4)
        batch = everything(packed(lengths, length))
    found = [piece for row in range(len(batch["ids"])) for piece in pieces_of_row(batch, row)]
    assert sorted(found) == wanted
    in_blocks = [best_fit_fills([len(p) for p in wanted[i : i + 4]], length) for i in range(0, len(wanted), 4)]
    assert len(batch["ids"]) == sum(map(len, in_blocks))


@given(lengths=documents_of, length=lengths_of, choice=st.lists(st.integers(0, 1000), max_size=5))
def test_a_batch_is_its_rows_stacked(lengths: list[int], length: int, choice: list[int]) -> None:
    if not pieces(offsets(lengths), length):
        return
    windows = packed(lengths, length)
    indices = [number % len(windows) for number in choice]
    batch = windows.__getitems__(indices)
    assert batch["ids"].shape == batch["targets"].shape == (len(indices), length)
    if indices:
        stacked = windows.collate([windows[index] for index in indices])
        assert torch.equal(stacked["ids"], batch["ids"])
        assert torch.equal(stacked["targets"], batch["targets"])
        assert stacked["positions"].expand(len(indices)) == batch["positions"]


def test_fill_is_the_share_of_slots_that_hold_a_target() -> None:
    windows = packed([3, 4, 1, 0, 9], 8)
    assert windows.fill == float((everything(windows)["targets"] != -100).double().mean())
    for mode in ("flat", "document"):
        for stride in (1, 3, 4, 7):
            other = Windows(np.arange(23), 4, stride, mode, documents=[0, 2, 9, 23] if mode == "document" else None)
            assert other.fill == float((everything(other)["targets"] != -100).double().mean()), (mode, stride)


def test_what_makes_no_sense_for_rows_is_refused() -> None:
    ids, documents = np.arange(9), [0, 4, 9]
    with refuses(InputError, "got stride=2 for packed rows", "mode='document'"):
        Windows(ids, 4, 2, "packed", documents=documents)
    with refuses(InputError, "got drop_last for packed rows"):
        Windows(ids, 4, mode="packed", documents=documents, drop_last=True)
    with refuses(InputError, "got mode='packed' without documents"):
        Windows(ids, 4, mode="packed")
    assert Windows(ids, 4, 4, "packed", documents=documents).stride == 4
