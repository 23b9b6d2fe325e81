"""The fields of `Positions`: as a tree that torch takes apart and puts together, and of parts that are joined."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from locant.errors import ShapeError
from locant.positions.grids import Grid, joined_places

if TYPE_CHECKING:
    from locant.positions.positions import Positions

LEAVES = ("index", "document_or_none", "order_or_none", "of_query", "of_key", "place_or_none")
"""The tensors, in the order in which a program is given them, and under which names."""


class Read(NamedTuple):
    """What an encoding has read of the hidden states of every token: as a query, and as a key; or nothing."""

    of_query: Float[Tensor, "batch query heads *features"] | None = None
    of_key: Float[Tensor, "batch key heads *features"] | None = None


NOT_READ = Read()


class OfHost(NamedTuple):
    """The fields that are no tensors."""

    min_index: int | None
    max_index: int | None
    start: int | None
    denominator: int
    grids: tuple[Grid, ...]


def flat(positions: Positions) -> tuple[list[Any], OfHost]:
    """The tensors, and what the host knows."""
    p = positions
    of_host = OfHost(p.min_index, p.max_index, p.start, p.denominator, p.grids)
    return [p.index, p.document_or_none, p.order_or_none, *p.read, p.place_or_none], of_host


def unflat(leaves: Iterable[Any], of_host: OfHost) -> dict[str, Any]:
    """The fields again."""
    index, document, order, of_query, of_key, place = leaves
    tensors = {"index": index, "document_or_none": document, "order_or_none": order, "place_or_none": place}
    return {**tensors, "read": Read(of_query, of_key), **of_host._asdict()}


def equal(a: Positions, b: Positions) -> bool:
    """Whether every token has the same index, document, order and place in grids of the same sizes."""
    if (a.denominator, a.device, a.grids) != (b.denominator, b.device, b.grids) or not torch.equal(a.index, b.index):
        return False
    place, other = a.place_or_none, b.place_or_none
    if place is not None and other is not None and not torch.equal(place, other):
        return False
    same_order = a.order_or_none is b.order_or_none or torch.equal(a.order, b.order)
    return same_order and torch.equal(a.document, b.document)


def register_pytree(cls: type[Positions]) -> None:
    """Make torch know the class, under the name that exported programs have it by."""

    def with_keys(positions: Positions) -> tuple[list[Any], OfHost]:
        leaves, of_host = flat(positions)
        return list(zip(map(pytree.GetAttrKey, LEAVES), leaves, strict=True)), of_host

    def put_together(leaves: Iterable[Any], of_host: OfHost) -> Positions:
        positions = object.__new__(cls)  # unchecked: what is mapped over a tree may hold anything
        vars(positions).update(unflat(leaves, of_host))
        return positions

    def from_file(fields: list[Any]) -> OfHost:
        of_host = OfHost(*fields)
        return of_host._replace(grids=tuple(Grid(tuple(sizes), prefix) for sizes, prefix in of_host.grids))  # of lists

    pytree.register_pytree_node(
        cls,
        flat,
        put_together,
        flatten_with_keys_fn=with_keys,
        serialized_type_name="locant.Positions",
        to_dumpable_context=list,
        from_dumpable_context=from_file,
    )


def joined(parts: Sequence[Positions]) -> dict[str, Any]:
    """The fields of these parts, one after another along the sequence."""
    if not parts:
        raise ShapeError("got no positions to join, expected at least one", "Positions.arange(0) for no tokens")
    if len(axes := {part.axes for part in parts}) > 1:
        got = f"got positions with {sorted(axes)} axes, expected the same number"
        raise ShapeError(got, "Positions.of(index[..., None].expand(-1, -1, axes)) for text")
    if len(denominators := {part.denominator for part in parts}) > 1:
        got = f"got positions over the denominators {sorted(denominators)}, expected the same"
        raise ShapeError(got, "Positions.of(index * factor, denominator=...) for some")
    batch = max(part.batch for part in parts)
    wide = [part.expand(batch) for part in parts]
    filled = [part for part in wide if part.seq_len]
    lows, highs = ([getattr(part, name) for part in filled] for name in ("min_index", "max_index"))
    of_keys = [part.read.of_key for part in wide if part.read.of_key is not None]
    on_grids = filled or wide
    grids, place = joined_places([part.grids for part in on_grids], [part.place_or_none for part in on_grids])
    counting = all(a.start is not None and b.start == a.start + a.seq_len for a, b in itertools.pairwise(wide))
    one_document = all(part.document_or_none is None for part in wide)
    by_index = all(part.order_or_none is None for part in wide)
    return {
        "index": torch.cat([part.index for part in wide], dim=1),
        "document_or_none": None if one_document else torch.cat([part.document for part in wide], dim=1),
        "order_or_none": None if by_index else _joined_orders([part.order for part in wide]),
        "min_index": None if None in lows else min(lows) if lows else 0,
        "max_index": None if None in highs else max(highs) if highs else 0,
        "start": wide[0].start if counting else None,
        "denominator": denominators.pop(),
        "read": Read(None, torch.cat(of_keys, dim=1)) if len(of_keys) == len(wide) else NOT_READ,
        "place_or_none": place,
        "grids": grids,
    }


def _joined_orders(parts: Sequence[Int[Tensor, "batch _"]]) -> Int[Tensor, "batch seq"]:
    """The orders of several parts as one: a part whose order begins at 0 goes on where the parts before it ended."""
    whole = parts[0]
    for order in parts[1:]:
        if whole.shape[1] and order.shape[1]:
            order = order + torch.where(order.amin(1) == 0, whole.amax(1) + 1, 0)[:, None]
        whole = torch.cat([whole, order], dim=1)
    return whole
