"""`Positions` as an object: compared, moved, shown, saved, exported and never changed."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from locant import ALiBi, DecomposedBias, InputEmbedding, Learned, Positions, Rotary, attend


def everything() -> list[Positions]:
    return [Positions.arange(3), Positions.after([1, 2], 3), Positions.packed([1, 2]), Positions.grid(2, 2),
            Positions.from_mask(torch.tensor([[0, 1, 1]])), Positions.of([-4, 2], order=[1, 0]),
            Positions.packed_grids([[(2, 1), (1, 3)], [(2, 1)]], prefix=1, centred=True)]  # fmt: skip


def test_a_round_trip_through_pytree_changes_nothing() -> None:
    for positions in everything():
        leaves, spec = pytree.tree_flatten(positions)
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves if leaf is not None)
        again = pytree.tree_unflatten(leaves, spec)
        assert again == positions
        for field in ("min_index", "max_index", "start", "grids"):
            assert getattr(again, field) == getattr(positions, field)


def test_positions_pass_through_checkpointing() -> None:
    q = torch.randn(1, 2, 5, 6, requires_grad=True)
    rotary, positions, cotangent = Rotary(6), Positions.packed([2, 3]), torch.randn(1, 2, 5, 6)
    plain = torch.autograd.grad(rotary.rotate(q, q, positions)[0], q, cotangent)[0]
    saved = torch.autograd.grad(
        checkpoint(lambda q, p: rotary.rotate(q, q, p)[0], q, positions, use_reentrant=False), q, cotangent
    )[0]
    assert torch.equal(plain, saved)


def test_equal_is_index_document_order_and_place() -> None:
    assert Positions.arange(3) == Positions.of([0, 1, 2]) == Positions.of([0, 1, 2], [0, 0, 0], order=[0, 1, 2])
    assert Positions.from_mask(torch.tensor([[1, 1]])) == Positions.arange(2)
    assert Positions.arange(3) != Positions.arange(3, batch=2)
    assert Positions.arange(3) != Positions.after(1, 3)
    assert Positions.packed([2, 1]) != Positions.of([0, 1, 0])
    assert Positions.of([0, 1]) != Positions.of([0, 1], order=[1, 0])
    assert Positions.grid(1, 2) != Positions.of([[[0, 0], [0, 1]]]), "which is no grid"
    assert Positions.grid(1, 2).select(torch.tensor([0])) != Positions.grid(1, 1)
    assert Positions.grid(1, 1, prefix=1).slice(0, 1) != Positions.grid(1, 1, prefix=1).slice(1, 2)
    assert Positions.arange(3) != "0..2"


@pytest.mark.parametrize("field", ["index", "document_or_none", "order_or_none", "max_index", "start"])
def test_positions_cannot_be_changed(field: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(Positions.arange(3), field, None)
    with pytest.raises(TypeError, match="unhashable"):
        hash(Positions.arange(3))


def test_an_index_of_one_axis_is_the_same_however_it_is_written() -> None:
    """``batch seq 1`` is ``batch seq`` from the start: as many rows as tokens would fit, and be wrong."""
    index, q = torch.arange(9).view(3, 3), torch.randn(3, 2, 3, 8)
    for with_axis, without in [
        (Positions.grid(3), Positions.arange(3)),
        (Positions.of(index[:1, :, None]), Positions.of(index[:1])),
        (Positions.of(index[:, :, None]), Positions.of(index)),
        (Positions.cat([Positions.grid(2), Positions.grid(1)]), Positions.of([0, 1, 0], order=[0, 1, 2])),
    ]:
        assert torch.equal(with_axis.index, without.index)
        assert torch.equal(with_axis.order, without.order)
        for encoding in (None, ALiBi(2), DecomposedBias(8, 1, 9)):
            y, other = (attend(q, q, q, encoding=encoding, positions=where) for where in (with_axis, without))
            assert torch.equal(y, other)
        for one, other in zip(Rotary(8, sections=(4,)).cos_sin(with_axis), Rotary(8).cos_sin(without), strict=True):
            assert torch.equal(one, other)
        for learned in (Learned(9, 8), Learned(9, 8, offset=2)):
            assert torch.equal(learned.embed(q[:, 0], with_axis), learned.embed(q[:, 0], without))


def test_showing_positions_says_where_they_are() -> None:
    assert repr(Positions.after(7, 2)) == "Positions(1x2, 7..8)"
    assert "with documents" in repr(Positions.packed([1, 2]))
    assert "grid 1x2 after 3, grid 4x1 after 3" in repr(Positions.packed_grids([(1, 2), (4, 1)], prefix=3))
    assert "2x2x2" in repr(Positions.of(torch.zeros(2, 2, 2, dtype=torch.long)))


@pytest.mark.parametrize("positions", everything(), ids=repr)
def test_bounds_known_on_the_host_hold(positions: Positions) -> None:
    for part in (positions, positions.slice(1, 2), positions.select(torch.tensor([1]))):
        assert part.min_index <= int(part.index.min())
        assert int(part.index.max()) <= part.max_index


def test_moving_to_another_device_moves_everything() -> None:
    moved = Positions.of([1, 2], [0, 0], order=[0, 1]).to("meta")
    assert {moved.device.type, moved.document.device.type, moved.order.device.type} == {"meta"}
    assert moved.max_index == 2
    assert Positions.arange(2, device="meta").device.type == "meta"


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
def test_a_layer_on_a_grid_is_exported_with_its_positions(strict: bool) -> None:
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
