"""`Positions` handed to a program made by `torch.export`, before and after it has been on disk."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from locant import InputEmbedding, Learned, Positions, Rotary, attend

SEQ, HEADS, HEAD_DIM = 6, 2, 8

PLACES: dict[str, Callable[[], Positions]] = {
    "counting": lambda: Positions.arange(SEQ),
    "after a cache": lambda: Positions.after(3, SEQ),
    "packed": lambda: Positions.packed([2, 3], length=SEQ),
    "padded": lambda: Positions.from_mask(torch.tensor([[0, 0, 1, 1, 1, 1]])),
}


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = InputEmbedding(7, HEADS * HEAD_DIM, encoding=Learned(16, HEADS * HEAD_DIM))
        self.rotary = Rotary(HEAD_DIM)

    def forward(self, ids: Tensor, positions: Positions) -> Tensor:
        x = self.embedding(ids, positions).view(1, SEQ, HEADS, HEAD_DIM).transpose(1, 2)
        q, k = self.rotary.rotate(x, x, positions)
        return attend(q, k, x, positions=positions)


class OnAGrid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary(HEAD_DIM, sections=(2, 2))

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        return attend(*self.rotary.rotate(x, x, positions), x, positions=positions)


def require_exportable(module: nn.Module, x: Tensor, positions: Positions, strict: bool) -> None:
    """The program gives the same, and takes no other kind of positions for these."""
    program = torch.export.export(module, (x, positions), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for one in (program, torch.export.load(file)):
        assert torch.equal(one.module()(x, positions), module(x, positions))
        with pytest.raises((ValueError, AssertionError, RuntimeError)):  # torch's own
            one.module()(x, Positions.of(torch.full((1, SEQ), 5)))


@pytest.mark.unchecked
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", PLACES)
def test_a_layer_is_exported_with_its_positions(place: str, strict: bool) -> None:
    require_exportable(OneLayer(), torch.randint(7, (1, SEQ)), PLACES[place](), strict)


@pytest.mark.unchecked
@pytest.mark.parametrize("strict", [False, True])
def test_so_is_one_on_a_grid(strict: bool) -> None:
    require_exportable(OnAGrid(), torch.randn(1, HEADS, SEQ, HEAD_DIM), Positions.grid(2, 3), strict)


def test_the_leaves_have_the_names_of_the_fields() -> None:
    positions = Positions.packed_grids([(1, 2), (3, 1)], prefix=1)
    leaves, spec = pytree.tree_flatten_with_path({"positions": positions})
    names = {pytree.keystr(path): leaf for path, leaf in leaves}
    assert names["['positions'].index"] is positions.index
    assert names["['positions'].document_or_none"] is positions.document_or_none
    assert names["['positions'].place_or_none"] is positions.place_or_none
    assert [leaf for _, leaf in leaves] == pytree.tree_leaves({"positions": positions})
    assert pytree.tree_unflatten([leaf for _, leaf in leaves], spec)["positions"] == positions
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
