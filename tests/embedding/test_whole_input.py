"""`InputEmbedding` compiled whole, with dropout, and with arguments that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from locant import InputEmbedding, Learned, LocantError, Positions, RangeError, ShapeError, Sinusoidal
from tests.refusal import refuses
from tests.tolerances import assert_close

VOCAB, WIDTH, BATCH, LENGTH = 29, 14, 3, 7


def test_dropout_is_that_of_the_generator_and_only_in_training() -> None:
    embedding = InputEmbedding(VOCAB, WIDTH, encoding=Sinusoidal(WIDTH), norm="layer_norm", dropout=0.25)
    ids = torch.randint(VOCAB, (50, LENGTH))
    whole = embedding.eval()(ids)
    embedding.train()
    torch.manual_seed(1)
    first = embedding(ids)
    second = embedding(ids)
    torch.manual_seed(1)
    assert torch.equal(embedding(ids), first)
    assert not torch.equal(second, first)
    dropped = first == 0
    assert abs(float(dropped.double().mean()) - 0.25) < 5 * (0.25 * 0.75 / first.numel()) ** 0.5
    assert_close(first[~dropped], (whole / 0.75)[~dropped])


def test_a_backend_is_taken_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="no effect"):
        embedding = InputEmbedding(VOCAB, WIDTH, backend="fused")
    assert embedding([[1, 2]]).shape == (1, 2, WIDTH)


ASKED: list[tuple[type[LocantError], tuple[Any, ...]]] = [
    (RangeError, (torch.tensor([[0, VOCAB]]),)),
    (RangeError, (torch.tensor([[0, -1]]),)),
    (ShapeError, (torch.zeros(1, 2),)),
    (ShapeError, (torch.zeros(2, 1, 3, dtype=torch.long),)),
    (LocantError, (torch.zeros(2, 1, dtype=torch.long),)),
    (RangeError, (torch.zeros(1, 10, dtype=torch.long),)),
    (RangeError, (torch.zeros(1, 2, dtype=torch.long), Positions.of([[0, -1]]))),
    (ShapeError, (torch.zeros(1, 2, dtype=torch.long), Positions.arange(3))),
    (ShapeError, (torch.zeros(1, 4, dtype=torch.long), Positions.grid(2, 2))),
    (LocantError, (torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2))),
    (RangeError, (torch.zeros(1, 2, dtype=torch.long), None, torch.tensor([[0, 2]]))),
    (ShapeError, (torch.zeros(1, 2, dtype=torch.long), None, torch.tensor([[0]]))),
]


@pytest.mark.parametrize(("kind", "arguments"), ASKED)
def test_mistakes_are_refused(kind: type[LocantError], arguments: tuple[Any, ...]) -> None:
    embedding = InputEmbedding(VOCAB, WIDTH, encoding=Learned(9, WIDTH, offset=2), num_segments=2, norm="layer_norm")
    with refuses(kind):
        embedding(*arguments)


@pytest.mark.unchecked
def test_it_compiles_whole_for_every_length() -> None:
    embedding = InputEmbedding(
        VOCAB, WIDTH, encoding=Learned(41, WIDTH), num_segments=2, norm="layer_norm", padding_idx=4
    )
    compiled = torch.compile(embedding, fullgraph=True, backend="aot_eager")
    for length in (3, 7, 11):
        ids, cotangent = torch.randint(VOCAB, (BATCH, length)), torch.randn(BATCH, length, WIDTH)
        found = torch.autograd.grad(compiled(ids), list(embedding.parameters()), cotangent)
        expected = torch.autograd.grad(embedding(ids), list(embedding.parameters()), cotangent)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.unchecked
def test_compiled_code_takes_no_row_before_the_offset_for_a_position() -> None:
    """In a graph nobody knows the positions beforehand; -1 would read the second of the rows that are no places."""
    embedding = InputEmbedding(VOCAB, WIDTH, encoding=Learned(9, WIDTH, offset=2))
    ids = torch.zeros(1, 3, dtype=torch.long)

    def use(index: Tensor) -> Tensor:
        return embedding(ids, Positions(index))

    compiled = torch.compile(use, fullgraph=True, backend="aot_eager")
    good = torch.tensor([[0, 8, 1]])
    assert torch.equal(compiled(good), use(good))
    for bad in (-1, -2, -3, 9):
        with pytest.raises((RangeError, IndexError), match=r"position id|out of range"):
            compiled(torch.tensor([[0, bad, 1]]))
