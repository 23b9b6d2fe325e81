"""`Lookup`: table entries that depend on a difference of two numbers (Shaw, DeBERTa, Inkling, grid biases)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.kernels.exact_dot import exact_dot, exact_entries
from locant.positions.distances import ScoreMod, bias_dtype, distance_mod, distances
from locant.positions.positions import Positions
from locant.positions.score_bias.kinds import ScoreBias
from locant.tensors import host_can_read


class TileEntries(NamedTuple):
    """The table entries of the pairs in a tile."""

    entries: Int[Tensor, "batch query key"]
    """The entry of each pair, counted from the first entry of `used`."""
    used: slice
    """The range of entries in the tile."""


@dataclass(frozen=True, kw_only=True)
class Entries:
    """A table, and the function that returns the entry of a pair.

    Args:
        queries, keys: positions whose index determines the entry: a count of tokens, or a code of row and column.
        entry_of: a function of the difference, query index minus key index.
        ends: two differences. Beyond each of them, all pairs have the same entry. Between them, entries are monotonic.
            ``None`` if there are no such differences.
        of_head: a number for each head and entry.
        of_query, of_key: the row of each entry that multiplies the vector of the query or key. Rows are shared by all
            heads, or each head has its own.
        scale: a factor of these products.
        is_tile: whether this holds only some queries and keys. If so, the host reads their entries, so that products
            are computed only for entries in use.
    """

    queries: Positions
    keys: Positions
    entry_of: Callable[[Tensor], Tensor]
    ends: tuple[int, int] | None = None
    of_head: Float[Tensor, "heads entries"] | None = None
    of_query: Float[Tensor, "*#heads entries dim"] | None = None
    of_key: Float[Tensor, "*#heads entries dim"] | None = None
    scale: float = 1.0
    is_tile: bool = False
    memo: list[TileEntries] = field(default_factory=list)

    def select_heads(self, heads: slice) -> Entries:
        of_query, of_key = (x if x is None or x.ndim == 2 else x[heads] for x in (self.of_query, self.of_key))
        of_head = None if self.of_head is None else self.of_head[heads]
        return replace(self, of_head=of_head, of_query=of_query, of_key=of_key)

    def tile(self, rows: slice, columns: slice) -> Entries:
        queries, keys = self.queries.slice(rows.start, rows.stop), self.keys.slice(columns.start, columns.stop)
        return replace(self, queries=queries, keys=keys, is_tile=True, memo=[])

    def pair_entries(self) -> TileEntries:
        """Return the entries of the pairs, computed once for all heads of a tile."""
        if not self.memo:
            entries = self.entry_of(distances(self.queries, self.keys))
            if self.is_tile and entries.numel() and host_can_read(entries):
                low, high = (int(x) for x in entries.aminmax())
                self.memo.append(TileEntries(entries - low, slice(low, high + 1)))
            else:
                self.memo.append(TileEntries(entries, slice(None)))
        return self.memo[0]

    def between_ends(self, device: torch.device) -> Int[Tensor, " differences"]:
        """Return the entries of the differences from the first end to the last."""
        first, last = self.ends or (0, -1)
        return self.entry_of(torch.arange(first, last + 1, device=device)).int()

    def product(self, vectors: Tensor, rows: Tensor, dtype: torch.dtype) -> Float[Tensor, "batch heads n entries"]:
        return self.scaled(exact_dot(vectors, rows, dtype), dtype)

    def scaled(self, product: Tensor, dtype: torch.dtype) -> Tensor:
        return (product if self.scale == 1.0 else product * self.scale).to(dtype)


@dataclass(frozen=True, kw_only=True)
class Lookup(ScoreBias):
    """The sum of the table entries of a pair.

    Args:
        make: a function that returns the tables. It is called once, when a bias is computed.
        of_query, of_key: the vectors that the rows of the tables multiply.
    """

    make: Callable[[], tuple[Entries, ...]]
    of_query: Float[Tensor, "batch heads query dim"] | None = None
    of_key: Float[Tensor, "batch heads key dim"] | None = None
    memo: list[tuple[Entries, ...]] = field(default_factory=list)

    @property
    def cost_grows_with_heads(self) -> bool:
        """Return whether the cost is proportional to the number of heads, as it is if the bias depends on tokens."""
        return self.of_query is not None or self.of_key is not None

    @property
    def tables(self) -> tuple[Entries, ...]:
        if not self.memo:
            self.memo.append(self.make())
        return self.memo[0]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors from which the bias is computed."""
        return self.of_query, self.of_key, *(x for t in self.tables for x in (t.of_head, t.of_query, t.of_key))

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Lookup:
        """Return the same bias with other `tensors`."""
        of_query, of_key, *rest = tensors
        fields = zip(self.tables, rest[::3], rest[1::3], rest[2::3], strict=True)
        tables = tuple(replace(table, of_head=h, of_query=q, of_key=k) for table, h, q, k in fields)
        return replace(self, memo=[tables], of_query=of_query, of_key=of_key)

    def select_heads(self, heads: slice) -> Lookup:
        """Return the bias of some heads."""
        tables = tuple(table.select_heads(heads) for table in self.tables)
        of_query, of_key = (None if x is None else x[:, heads] for x in (self.of_query, self.of_key))
        return replace(self, q=self.q[:, heads], memo=[tables], of_query=of_query, of_key=of_key)

    def tile(self, rows: slice, columns: slice) -> Lookup:
        """Return the bias of some queries and keys."""
        return replace(
            self,
            q=self.q[:, :, rows],
            memo=[tuple(table.tile(rows, columns) for table in self.tables)],
            of_query=None if self.of_query is None else self.of_query[:, :, rows],
            of_key=None if self.of_key is None else self.of_key[:, :, columns],
        )

    def dense(self) -> Float[Tensor, "#batch heads query key"]:
        terms = [term for table in self.tables for term in self._terms(table)]
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    def _terms(self, table: Entries) -> list[Tensor]:
        dtype, (entries, used) = bias_dtype(self.q), table.pair_entries()
        terms: list[Tensor] = []
        if table.of_head is not None:
            numbers = table.of_head[:, used].index_select(1, entries.flatten())
            terms.append(numbers.unflatten(1, entries.shape).transpose(0, 1))
        if table.of_query is not None and self.of_query is not None:
            terms.append(_gather(table.product(self.of_query, table.of_query[..., used, :], dtype), entries))
        if table.of_key is not None and self.of_key is not None:
            terms.append(self._key_term(table, self.of_key, table.of_key[..., used, :], entries))
        return terms

    def _key_term(self, table: Entries, vectors: Tensor, rows: Tensor, entries: Tensor) -> Tensor:
        """Return the product of every key with the row of its entry for each query.

        A few queries use few of the products of all keys and rows. They are computed one by one, with the same bits.
        """
        dtype = bias_dtype(self.q)
        products = None if dtype == torch.float64 else exact_entries(vectors, rows, entries)
        if products is not None:
            return table.scaled(products, dtype)
        numbers = table.product(vectors, rows, dtype)
        return _gather(numbers, entries.transpose(1, 2)).transpose(2, 3)

    def products(self, table: Entries) -> tuple[Tensor | None, Tensor | None]:
        """Return the products of every query, and of every key, with the row of each entry."""
        dtype, batch = bias_dtype(self.q), self.q.shape[0]
        return tuple(  # type: ignore[return-value]
            None if x is None or rows is None else table.product(x, rows, dtype).expand(batch, -1, -1, -1)
            for x, rows in ((self.of_query, table.of_query), (self.of_key, table.of_key))
        )

    def score_mod(self) -> ScoreMod:
        return sum_of([self.entry_mod(table, *self.products(table)) for table in self.tables])

    def entry_mod(self, table: Entries, of_query: Tensor | None, of_key: Tensor | None) -> Callable[..., Tensor]:
        """Return a function ``(batch, head, query, key)`` that looks up one pair's bias in a table's `products`."""
        distance, entry_of, of_head = distance_mod(self.q, table.queries, table.keys), table.entry_of, table.of_head

        def look_up(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            entry = entry_of(distance(batch, query, key))
            terms = [] if of_head is None else [of_head[head, entry]]
            terms += [] if of_query is None else [of_query[batch, head, query, entry]]
            terms += [] if of_key is None else [of_key[batch, head, key, entry]]
            return terms[0] if len(terms) == 1 else terms[0] + terms[1]

        return look_up

    @property
    def far(self) -> int | None:
        """The distance from which the bias is the sum of one number for the query and one for the key, or ``None``."""
        ends = self.tables[0].ends
        return None if ends is None or len(self.tables) > 1 else ends[1]

    def far_terms(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the two summands of the bias at distances of `far` or more, ``batch heads token``."""
        (table,), dtype = self.tables, bias_dtype(self.q)
        entry = table.between_ends(self.q.device)[-1:]
        query, key = (
            None if x is None or rows is None else table.product(x, rows.index_select(-2, entry), dtype)[..., 0]
            for x, rows in ((self.of_query, table.of_query), (self.of_key, table.of_key))
        )
        return query, key


def sum_of(terms: Sequence[Callable[..., Tensor]]) -> ScoreMod:
    """Return a score function that adds one or two terms."""

    def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        numbers = [term(batch, head, query, key) for term in terms]
        return score + (numbers[0] if len(numbers) == 1 else numbers[0] + numbers[1])

    return add


def _gather(products: Float[Tensor, "batch heads n entries"], entries: Int[Tensor, "#batch n m"]) -> Tensor:
    """Return the product of the first token of every pair with the row of the pair."""
    return products.gather(3, entries[:, None].expand(*products.shape[:3], entries.shape[-1]))
