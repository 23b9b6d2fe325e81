"""Learned positions: rows of a table, where there are any."""

from __future__ import annotations

import pytest
import torch
from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding

from locant import Learned, Positions, RangeError, ShapeError
from tests.refusal import refuses
from tests.tolerances import DRAWN, assert_close


def test_each_token_gets_the_row_of_its_position() -> None:
    learned = Learned(11, 7)
    x, positions = torch.randn(2, 5, 7), Positions.of([[0, 10, 3, 3, 1], [9, 8, 7, 6, 5]])
    embedded = learned.embed(x, positions)
    for b in range(2):
        for s in range(5):
            assert torch.equal(embedded[b, s], x[b, s] + learned.weight[int(positions.index[b, s])])


def test_parameters_are_the_table() -> None:
    assert sum(p.numel() for p in Learned(512, 256).parameters()) == 131_072
    learned = Learned(2048, 64)
    assert float(learned.weight.detach().std()) == pytest.approx(0.02, rel=DRAWN, abs=0)
    assert (learned.max_seq_len, learned.d_model) == (2048, 64)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_an_offset_of_two_is_opts(padding: str) -> None:
    theirs = OPTLearnedPositionalEmbedding(11, 7)
    learned = Learned(11, 7, offset=2)
    learned.load_state_dict(theirs.state_dict(), strict=True)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    mask = mask if padding == "left" else mask.flip(1)
    x, real = torch.randn(2, 5, 7), mask.bool()
    embedded, expected = learned.embed(x, Positions.from_mask(mask)), x + theirs(mask)
    assert torch.equal(embedded[real], expected[real])
    assert torch.equal(learned.embed(x[:1], Positions.after(6, 5)), x[:1] + theirs(torch.ones(1, 11), 6))
    cotangent = torch.randn(2, 5, 7) * real[..., None]
    embedded.backward(cotangent)
    expected.backward(cotangent)
    assert torch.equal(learned.weight.grad, theirs.weight.grad)


def test_gradients_are_right_where_a_row_is_used_twice() -> None:
    learned = Learned(4, 3).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    positions = Positions.of([[0, 1, 1, 3, 0], [2, 2, 2, 1, 0]])

    def embed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(_Door(learned), {"learned.weight": weight}, (x, positions))

    assert torch.autograd.gradcheck(embed, (x, learned.weight))
    cotangent = torch.randn(2, 5, 3, dtype=torch.float64)
    learned.embed(x, positions).backward(cotangent)
    expected = torch.zeros(4, 3, dtype=torch.float64)
    for b in range(2):
        for s in range(5):
            expected[positions.index[b, s]] += cotangent[b, s]
    assert_close(learned.weight.grad, expected)


class _Door(torch.nn.Module):
    def __init__(self, learned: Learned) -> None:
        super().__init__()
        self.learned = learned

    def forward(self, x: torch.Tensor, positions: Positions) -> torch.Tensor:
        return self.learned.embed(x, positions)


@pytest.mark.parametrize("offset", [0, 2])
def test_the_end_of_the_table_is_an_error_with_a_name(offset: int) -> None:
    """Inside, at the edge, one past; and the next call still works."""
    learned = Learned(8, 3, offset=offset)
    x = torch.zeros(1, 3, 3)
    learned.embed(x, Positions.of([0, 6, 7]))
    with refuses(RangeError, "position 8", "(0, 1)", "max_seq_len=8", "0..7"):
        learned.embed(x, Positions.of([7, 8, 9]))
    learned.embed(x, Positions.of([7, 7, 7]))
    with refuses(RangeError, "position 8"):
        learned.embed(x, Positions.after(torch.tensor([6]), 3, max_index=100))
    with refuses(RangeError, "position 8"):
        learned.embed(torch.zeros(1, 9, 3), Positions.arange(9))


@pytest.mark.parametrize("offset", [0, 2])
def test_a_negative_position_is_refused(offset: int) -> None:
    """Not read from the end of the table, and not from the rows before position 0."""
    with refuses(RangeError, "position -1", "(0, 2)"):
        Learned(8, 3, offset=offset).embed(torch.zeros(1, 3, 3), Positions.of([0, 1, -1]))


def test_padding_of_any_width_has_a_row() -> None:
    learned = Learned(3, 2)
    mask = torch.zeros(1, 9).index_fill(1, torch.tensor([3, 5, 8]), 1)
    assert torch.isfinite(learned.embed(torch.zeros(1, 9, 2), Positions.from_mask(mask))).all()


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (-1, 3)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int]) -> None:
    name, number = ("max_seq_len", sizes[0]) if sizes[0] < 1 else ("d_model", sizes[1])
    with refuses(RangeError, f"got {number} for {name}"):
        Learned(*sizes)


def test_a_negative_offset_is_refused() -> None:
    with refuses(RangeError, "got -2 for offset"):
        Learned(3, 3, offset=-2)


def test_tokens_of_another_shape_are_refused() -> None:
    learned = Learned(9, 6)
    with refuses(ShapeError, "7)", "d_model=6"):
        learned.embed(torch.zeros(1, 5, 7), Positions.arange(5))
    with refuses(ShapeError, "1 x 4", "2 x 5"):
        learned.embed(torch.zeros(2, 5, 6), Positions.arange(4))
    with refuses(ShapeError, "meta", "cpu"):
        learned.embed(torch.zeros(2, 5, 6), Positions.arange(5, device="meta"))
    with refuses(ShapeError, "2 axes"):
        learned.embed(torch.zeros(1, 6, 6), Positions.grid(2, 3))


@pytest.mark.parametrize("shape", [(6,), (6, 6), (2, 3, 6, 6)])
def test_tokens_without_batch_or_sequence_are_refused(shape: tuple[int, ...]) -> None:
    with refuses(ShapeError, "x"):
        Learned(9, 6).embed(torch.zeros(shape), Positions.arange(6))
