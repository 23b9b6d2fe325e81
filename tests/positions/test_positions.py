"""`Positions` as an object: compared, moved, shown, saved and never changed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from locant import Positions, Rotary


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


def test_showing_positions_says_where_they_are() -> None:
    assert repr(Positions.after(7, 2)) == "Positions(1x2, 7..8)"
    assert "with documents" in repr(Positions.packed([1, 2]))
    assert "grid 1x2 behind 3, grid 4x1 behind 3" in repr(Positions.packed_grids([(1, 2), (4, 1)], prefix=3))
    assert "2x2x2" in repr(Positions.of(torch.zeros(2, 2, 2, dtype=torch.long)))


@pytest.mark.parametrize("positions", everything(), ids=repr)
def test_bounds_known_on_the_host_hold(positions: Positions) -> None:
    for part in (positions, positions.slice(1, 2), positions.select(torch.tensor([1]))):
        assert part.min_index is not None
        assert part.max_index is not None
        assert part.min_index <= int(part.index.min())
        assert int(part.index.max()) <= part.max_index


def test_moving_to_another_device_moves_everything() -> None:
    moved = Positions.of([1, 2], [0, 0], order=[0, 1]).to("meta")
    assert {moved.device.type, moved.document.device.type, moved.order.device.type} == {"meta"}
    assert moved.max_index == 2
    assert Positions.arange(2, device="meta").device.type == "meta"
