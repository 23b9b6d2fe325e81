"""Positions as a tree of tensors: how `torch.compile`, `torch.export`, checkpointing and FSDP take them apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree

from locant.positions.grids import Grid

if TYPE_CHECKING:
    from locant.positions.positions import Positions

__all__ = ["NOT_READ", "Known", "Read", "flat", "register_pytree", "unflat"]

LEAVES = ("index", "document_or_none", "order_or_none", "of_query", "of_key", "place_or_none")
"""The tensors, in the order in which a program is given them, and under which names."""


class Read(NamedTuple):
    """What an encoding has read of the hidden states of every token: as a query, and as a key; or nothing."""

    of_query: Float[Tensor, "batch query heads *features"] | None = None
    of_key: Float[Tensor, "batch key heads *features"] | None = None


NOT_READ = Read()


class Known(NamedTuple):
    """The fields that are no tensors: what the host knows."""

    min_index: int | None
    max_index: int | None
    start: int | None
    denominator: int
    grids: tuple[Grid, ...]


def flat(positions: Positions) -> tuple[list[Any], Known]:
    """The tensors, and what the host knows."""
    p = positions
    known = Known(p.min_index, p.max_index, p.start, p.denominator, p.grids)
    return [p.index, p.document_or_none, p.order_or_none, *p.read, p.place_or_none], known


def unflat(leaves: Iterable[Any], known: Known) -> dict[str, Any]:
    """The fields of `Positions` again."""
    index, document, order, of_query, of_key, place = leaves
    tensors = {"index": index, "document_or_none": document, "order_or_none": order, "place_or_none": place}
    return {**tensors, "read": Read(of_query, of_key), **known._asdict()}


def register_pytree(cls: type[Positions]) -> None:
    """Make torch know the class, under the name that exported programs have it by."""

    def with_keys(positions: Positions) -> tuple[list[Any], Known]:
        leaves, known = flat(positions)
        return list(zip(map(pytree.GetAttrKey, LEAVES), leaves, strict=True)), known

    def from_file(known: list[Any]) -> Known:
        """What comes back from a file is lists."""
        low, high, start, denominator, grids = known
        return Known(low, high, start, denominator, tuple(Grid(tuple(sizes), prefix) for sizes, prefix in grids))

    pytree.register_pytree_node(
        cls,
        flat,
        lambda leaves, known: cls(**unflat(leaves, known)),
        flatten_with_keys_fn=with_keys,
        serialized_type_name="locant.Positions",
        to_dumpable_context=list,
        from_dumpable_context=from_file,
    )
