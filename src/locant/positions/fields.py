"""Flatten the fields of `Positions` for torch's pytrees, compare them, and join them along the sequence."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from locant.errors import ShapeError
from locant.positions.grids import Grid, join_places

if TYPE_CHECKING:
    from locant.positions.positions import Positions

LEAVES = ("index", "document_or_none", "order_or_none", "of_query", "of_key", "place_or_none")
"""The names of the tensors, in the order in which an exported program receives them."""


class TokenFeatures(NamedTuple):
    """The features that an encoding has read from hidden states, for each token's query and key, or ``None``."""

    of_query: Float[Tensor, "batch query heads *features"] | None = None
    of_key: Float[Tensor, "batch key heads *features"] | None = None
    recent: Float[Tensor, "batch recent heads *features"] | None = None
    """The features of only the last keys, in a cache whose older keys have moved (`PositionEncoding.settle_keys`). A
    slice or another selection of tokens does not have them."""


NO_FEATURES = TokenFeatures()


class HostFields(NamedTuple):
    """The fields that are not tensors."""

    min_index: int | None
    max_index: int | None
    start: int | None
    denominator: int
    grids: tuple[Grid, ...]
    is_shard: bool = False


def flatten(positions: Positions) -> tuple[list[Any], HostFields]:
    """Split positions into tensors and host fields."""
    p = positions
    host_fields = HostFields(p.min_index, p.max_index, p.start, p.denominator, p.grids, p.is_shard)
    return [p.index, p.document_or_none, p.order_or_none, p.read.of_query, p.read.of_key, p.place_or_none], host_fields


def unflatten(leaves: Iterable[Any], host_fields: HostFields) -> dict[str, Any]:
    """Return the fields of positions from tensors and host fields: the inverse of `flatten`."""
    index, document, order, of_query, of_key, place = leaves
    tensors = {"index": index, "document_or_none": document, "order_or_none": order, "place_or_none": place}
    return {**tensors, "read": TokenFeatures(of_query, of_key), **host_fields._asdict()}


def are_equal(a: Positions, b: Positions) -> bool:
    """Return whether every token has the same index, document, order and place in grids of the same sizes."""
    if (a.denominator, a.device, a.grids) != (b.denominator, b.device, b.grids) or not torch.equal(a.index, b.index):
        return False
    place, other = a.place_or_none, b.place_or_none
    if place is not None and other is not None and not torch.equal(place, other):
        return False
    same_order = a.order_or_none is b.order_or_none or torch.equal(a.order, b.order)
    return same_order and torch.equal(a.document, b.document)


def register_pytree(cls: type[Positions]) -> None:
    """Register the class with torch's pytrees, under the name that exported programs store."""

    def with_keys(positions: Positions) -> tuple[list[Any], HostFields]:
        leaves, host_fields = flatten(positions)
        return list(zip(map(pytree.GetAttrKey, LEAVES), leaves, strict=True)), host_fields

    def from_leaves(leaves: Iterable[Any], host_fields: HostFields) -> Positions:
        positions = object.__new__(cls)  # no checks: torch maps functions that return arbitrary leaves
        vars(positions).update(unflatten(leaves, host_fields))
        return positions

    def from_file(fields: list[Any]) -> HostFields:
        host_fields = HostFields(*fields)
        grids = tuple(Grid(tuple(sizes), prefix) for sizes, prefix in host_fields.grids)  # JSON holds lists
        return host_fields._replace(grids=grids)

    pytree.register_pytree_node(
        cls,
        flatten,
        from_leaves,
        flatten_with_keys_fn=with_keys,
        serialized_type_name="locant.Positions",
        to_dumpable_context=list,
        from_dumpable_context=from_file,
    )


def join_fields(parts: Sequence[Positions]) -> dict[str, Any]:
    """Return the fields of these parts, joined along the sequence."""
    if not parts:
        raise ShapeError("got no positions to join, expected at least one", "use Positions.arange(0) for no tokens")
    if (fields := _join_counting(parts)) is not None:
        return fields
    if len(axes := {part.axes for part in parts}) > 1:
        got = f"got positions with {sorted(axes)} axes, expected the same number"
        raise ShapeError(got, "use Positions.of(index[..., None].expand(-1, -1, axes)) for text")
    if len(denominators := {part.denominator for part in parts}) > 1:
        got = f"got positions over the denominators {sorted(denominators)}, expected the same"
        raise ShapeError(got, "use the same denominator, with Positions.of(index * factor, denominator=...)")
    batch = max(part.batch for part in parts)
    rows = [part.expand(batch) for part in parts]
    nonempty = [part for part in rows if part.seq_len]
    lows, highs = ([getattr(part, name) for part in nonempty] for name in ("min_index", "max_index"))
    key_features = [part.read.of_key for part in rows if part.read.of_key is not None]
    parts_on_grids = nonempty or rows
    grids, place = join_places([part.grids for part in parts_on_grids], [part.place_or_none for part in parts_on_grids])
    is_counting = all(a.start is not None and b.start == a.start + a.seq_len for a, b in itertools.pairwise(rows))
    is_one_document = all(part.document_or_none is None for part in rows)
    is_ordered_by_index = all(part.order_or_none is None for part in rows)
    return {
        "index": torch.cat([part.index for part in rows], dim=1),
        "document_or_none": None if is_one_document else torch.cat([part.document for part in rows], dim=1),
        "order_or_none": None if is_ordered_by_index else _join_orders([part.order for part in rows]),
        "min_index": None if None in lows else min(lows) if lows else 0,
        "max_index": None if None in highs else max(highs) if highs else 0,
        "start": rows[0].start if is_counting else None,
        "denominator": denominators.pop(),
        "read": TokenFeatures(None, torch.cat(key_features, dim=1)) if len(key_features) == len(rows) else NO_FEATURES,
        "place_or_none": place,
        "grids": grids,
    }


def _join_counting(parts: Sequence[Positions]) -> dict[str, Any] | None:
    """Return the joined fields if the start and the number of tokens determine them all, and otherwise ``None``.

    The index is counted again and not copied, because in decoding one token joins all earlier tokens.
    """
    start, device, batch = parts[0].start, parts[0].index.device, 1
    if start is None:
        return None
    stop = start
    for part in parts:
        has_tensors = part.document_or_none is not None or part.order_or_none is not None or part.grids
        has_features = part.read.of_query is not None or part.read.of_key is not None
        if part.start != stop or part.denominator != 1 or has_tensors or has_features or part.index.device != device:
            return None
        rows, seq_len = part.index.shape
        if not seq_len or (rows != batch and rows != 1 and batch != 1):
            return None
        batch, stop = max(batch, rows), stop + seq_len
    index = torch.arange(start, stop, device=device).unsqueeze(0)
    index = index if batch == 1 else index.expand(batch, -1)
    return {"index": index, "min_index": start, "max_index": stop - 1, "start": start}


def _join_orders(parts: Sequence[Int[Tensor, "batch _"]]) -> Int[Tensor, "batch seq"]:
    """Join the orders of several parts. A part whose order begins at 0 continues after the previous parts."""
    orders = parts[0]
    for order in parts[1:]:
        if orders.shape[1] and order.shape[1]:
            order = order + torch.where(order.amin(1) == 0, orders.amax(1) + 1, 0)[:, None]
        orders = torch.cat([orders, order], dim=1)
    return orders
