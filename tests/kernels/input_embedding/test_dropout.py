"""What dropout takes away: the right share, independently, and the same again from the same seed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.kernels.input_embedding.embedded import Kernel, operands

SIZE, WIDTH = (6, 17), 96


def kept(kernel: Kernel, p: float, seed: int, shape: tuple[int, int] = SIZE, width: int = WIDTH) -> Tensor:
    return kernel.kept(operands(shape, width, seed=torch.tensor([seed]), p=p))


@pytest.mark.parametrize("p", [2.0**-17, 0.1, 0.9])
def test_the_share_that_is_dropped(kernel: Kernel, p: float) -> None:
    keep = kept(kernel, p, 1)
    count = keep.numel()
    off = abs(float((~keep).double().mean()) - p)
    assert off <= 5 * (p * (1 - p) / count) ** 0.5 + (1 / count if p else 0)


def test_rows_columns_and_neighbours_are_independent(kernel: Kernel) -> None:
    """Every row and column has its share, and an entry says nothing of the next in its row, column or word of bits."""
    keep = kept(kernel, 0.5, 3).view(-1, WIDTH).double() - 0.5
    for axis in (0, 1):
        count = keep.shape[axis]
        assert float(keep.mean(axis).abs().max()) < 5 * 0.5 / count**0.5
    for rows, columns in ((0, 1), (1, 0), (0, 2), (0, 4), (0, 8), (1, 1), (17, 0)):
        here = keep[: keep.shape[0] - rows, : WIDTH - columns]
        there = keep[rows:, columns:]
        assert abs(float((here * there).mean())) < 5 * 0.25 / here.numel() ** 0.5, (rows, columns)


def test_a_seed_drops_the_same_and_another_seed_does_not(kernel: Kernel) -> None:
    first, again, other = kept(kernel, 0.5, 1), kept(kernel, 0.5, 1), kept(kernel, 0.5, 2)
    assert torch.equal(first, again)
    assert abs(float((first == other).double().mean()) - 0.5) < 5 * 0.5 / first.numel() ** 0.5


def test_what_is_kept_is_what_the_result_and_its_gradient_have(kernel: Kernel) -> None:
    """Table rows of ones show which entries are left, and so does a cotangent of ones."""
    size = (2, 5)
    without = ("position", "position_index", "segment", "segments", "eps", "gamma", "beta", "scale", "padding_idx")
    ones = operands(size, WIDTH, token=torch.ones(23, WIDTH), seed=torch.tensor([4]), p=0.25, without=without)
    keep = kernel.kept(ones)
    assert torch.equal(kernel.forward(ones)[0], keep / (1 - 0.25))
    every_id_once = dataclasses.replace(ones, ids=torch.arange(10).view(size), token=torch.ones(10, WIDTH))
    found = kernel.backward(torch.ones(*size, WIDTH), every_id_once)["token"]
    assert torch.equal(found.view(*size, WIDTH), keep / (1 - 0.25))
