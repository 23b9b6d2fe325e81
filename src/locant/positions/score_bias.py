"""`ScoreBias`: what an encoding adds to the scores of some queries and keys, as a value of one of four kinds.

An encoding is asked for it once, in `AttentionInputs`. Backends match on the kind, never on the encoding. Nothing of the
size ``query x key`` is computed before `dense` is called.

* `ByDistance`: a number for each head and distance, by a function: there is no largest distance.
* `Lookup`: numbers of a head, a query or a key, at the entry that belongs to a distance, or to an offset on a grid.
* `Pairwise`: a function of two tokens.
* `Written`: a matrix for some queries and all of their keys, as `PositionEncoding.bias` writes it.

The first three are known for any heads, and `Lookup` and `Pairwise` for any tile of queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.positions.heads import Heads
from locant.positions.pairs import ScoreMod, bias_dtype, distance_mod, distances, exact_dot
from locant.positions.positions import Positions
from locant.tensors import readable

__all__ = ["ByDistance", "Entries", "Lookup", "Pairwise", "ScoreBias", "Written", "largest_distance", "look_up"]

FOR_ONE_THREAD = 2**15 - 1
"""Torch shares an operation on more elements out. Beside busy processes, waiting for another thread takes longer than
the table of a decoding step does."""

Tensors = tuple[Tensor | None, ...]


@dataclass(frozen=True, kw_only=True)
class ScoreBias:
    """What is added to the scaled scores of queries and keys; `q` is for batch, heads, device and dtype."""

    q: Tensor
    queries: Positions
    keys: Positions

    sources: Tensors = ()
    """Everything that it is made from beside `q` and `k`: parameters, and what was read."""

    def dense(self) -> Float[Tensor, "#batch heads query key"] | None:
        """A matrix, in float32 at least."""
        raise NotImplementedError

    def score_mod(self) -> ScoreMod | None:
        """A function for FlexAttention, or ``None`` where it would look the number of a pair up in a matrix."""
        return None


# ---------------------------------------------------------------------- what is written out


@dataclass(frozen=True, kw_only=True)
class Written(ScoreBias):
    """A matrix that an encoding writes: for all heads, some queries, and all keys that these attend to."""

    k: Tensor
    write: Callable[[Tensor, Tensor, Positions, Positions], Tensor | None]
    mod: Callable[[Tensor, Tensor, Positions, Positions], ScoreMod | None] | None = None

    def dense(self) -> Tensor | None:
        return self.write(self.q, self.k, self.queries, self.keys)

    def score_mod(self) -> ScoreMod | None:
        return None if self.mod is None else self.mod(self.q, self.k, self.queries, self.keys)


# ---------------------------------------------------------------------- head and distance


@dataclass(frozen=True, kw_only=True)
class ByDistance(ScoreBias):
    """A number for each head and distance."""

    of_distance: Callable[..., Tensor]
    """``(distance, head, **operands)``; see `DistanceBias.of_distance`."""
    operands: Callable[[Tensor, int | None], dict[str, Any]]
    heads: Heads
    number: Callable[[torch.device], Int[Tensor, " heads"]]
    """Of each head, in the model."""
    along: Callable[[Tensor, Tensor], Tensor] | None = None
    """``(q, distances)``, quicker than `of_distance` on one thread."""
    is_arithmetic: bool = False
    is_for_pairs: bool = True

    def of_heads(self, heads: slice) -> Self:
        mine, number = replace(self.heads, mine=self.heads.mine[heads]), self.number
        return replace(self, q=self.q[:, heads], heads=mine, number=lambda device: number(device)[heads], along=None)

    def dense(self) -> Tensor:
        return self._added(distances(self.queries, self.keys)[:, None], largest_distance(self.queries, self.keys))

    def table(self, first: int, last: int) -> Float[Tensor, "heads distances"]:
        """What is added at the distances from `first` to `last`: the bits of `dense`."""
        distance = torch.arange(last, first - 1, -1, device=self.q.device)  # as along the keys of one query
        largest = max(-first, last) if max(-first, last) < len(distance) else None
        if self.q.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._along(distance, largest).flip(-1)
        parts = distance.split(max(FOR_ONE_THREAD // len(self.heads) // 64 * 64, 64))
        along = self.along
        return torch.cat(
            [
                (self._along(part, largest) if along is None else along(self.q, part)).flip(-1)
                for part in reversed(parts)
            ],
            -1,
        )

    def listed(self) -> tuple[Float[Tensor, "heads distances"], int] | None:
        """The table in which `score_mod` looks up, and the distance of its first entry; ``None`` where it does not."""
        bounds = _listed(self.queries, self.keys)
        if bounds is None or (self.is_arithmetic and not _learns(self.sources)):
            return None
        return self.table(*bounds), bounds[0]

    def score_mod(self) -> ScoreMod | None:
        distance, listed = distance_mod(self.q, self.queries, self.keys), self.listed()
        if listed is not None:
            return look_up(*listed, distance)
        if not self.is_for_pairs:
            return None
        operands, dtype = self.operands(self.q, largest_distance(self.queries, self.keys)), bias_dtype(self.q)

        def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            number = self.heads.number(head)
            return score + self.of_distance(distance(batch, query, key), number, **operands).to(dtype)

        return add

    def has_score_mod(self) -> bool:
        return self.is_for_pairs or _listed(self.queries, self.keys) is not None

    def _along(self, distance: Int[Tensor, " distances"], largest: int | None) -> Tensor:
        return self._added(distance[None, None], largest)[:, 0]

    def _added(self, distance: Int[Tensor, "*batch 1 query key"], largest: int | None) -> Tensor:
        number = self.number(self.q.device)[:, None, None]
        return self.of_distance(distance, number, **self.operands(self.q, largest)).to(bias_dtype(self.q))


def look_up(
    table: Float[Tensor, "heads distances"], first: int, distance: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> ScoreMod:
    """A score function that adds the entry of head and distance; `first` is the distance of the first entry."""
    before = torch.full((), first, dtype=torch.int32, device=table.device)  # a number would be compiled into the kernel

    def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + table[head, distance(batch, query, key) - before]

    return add


def _learns(tensors: Tensors) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _listed(positions: Positions, keys: Positions) -> tuple[int, int] | None:
    """The first and the last of the distances that occur, or ``None`` where they are unknown, or too many."""
    if positions.start is not None and keys.start is not None:
        offset = positions.start - keys.start
        return offset - max(keys.seq_len, 1) + 1, offset + max(positions.seq_len, 1) - 1
    largest = largest_distance(positions, keys)
    if largest is None:
        return None
    if not torch.compiler.is_compiling():  # else it may have no value
        largest = 1 << max(largest, positions.seq_len, keys.seq_len).bit_length()  # of few sizes: each is compiled
    return -largest, largest


def largest_distance(positions: Positions, keys: Positions) -> int | None:
    """No pair is farther apart; ``None`` where the host does not know, or where there are more distances than pairs."""
    bounds = (positions.min_index, positions.max_index, keys.min_index, keys.max_index)
    if None in bounds:
        return None
    q_low, q_high, k_low, k_high = bounds
    largest = max(q_high - k_low, k_high - q_low, 0)  # type: ignore[operator]
    return largest if largest < max(positions.batch, keys.batch) * positions.seq_len * keys.seq_len else None


# ---------------------------------------------------------------------- entries of tables


class Found(NamedTuple):
    entries: Int[Tensor, "batch query key"]
    """Counted from the first of `some`."""
    some: slice


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Which entry belongs to a pair, and what it holds: numbers of a head, or rows to be multiplied with a vector."""

    queries: Positions
    keys: Positions
    """The index is what is counted: tokens, or on a grid a number for row and column."""
    entry_of: Callable[[Tensor], Tensor]
    """Of the difference, query minus key."""
    ends: tuple[int, int] | None = None
    """Differences before the first and behind the second have the entry of these; in between it never turns back."""
    of_head: Float[Tensor, "heads entries"] | None = None
    of_query: Float[Tensor, "#heads entries dim"] | Float[Tensor, "entries dim"] | None = None
    of_key: Float[Tensor, "#heads entries dim"] | Float[Tensor, "entries dim"] | None = None
    scale: float = 1.0
    memo: list[Found] = field(default_factory=list)
    """What `found` found, for all heads of a tile."""

    def of_heads(self, heads: slice) -> Self:
        of_head = None if self.of_head is None else self.of_head[heads]
        return replace(self, of_head=of_head, of_query=_of_heads(self.of_query, heads), of_key=_of_heads(self.of_key, heads))

    def tile(self, rows: slice, keys: slice) -> Self:
        queries, keys_there = self.queries.slice(rows.start, rows.stop), self.keys.slice(keys.start, keys.stop)
        return replace(self, queries=queries, keys=keys_there, memo=[])

    def found(self) -> Found:
        """The entries of all pairs, and from which to which one they are, as far as the host may know."""
        if not self.memo:
            entries = self.entry_of(distances(self.queries, self.keys))
            low, high = (int(x) for x in entries.aminmax()) if readable(entries) and entries.numel() else (0, None)
            self.memo.append(Found(entries - low if low else entries, slice(low, None if high is None else high + 1)))
        return self.memo[0]

    def entries(self, device: torch.device) -> Int[Tensor, " differences"]:
        """Of the differences from the first end to the last."""
        assert self.ends is not None
        return self.entry_of(torch.arange(self.ends[0], self.ends[1] + 1, device=device)).int()

    def product(self, vectors: Tensor, rows: Tensor, dtype: torch.dtype) -> Float[Tensor, "batch heads n entries"]:
        product = exact_dot(vectors, rows, dtype)
        return (product if self.scale == 1.0 else product * self.scale).to(dtype)


@dataclass(frozen=True, kw_only=True)
class Lookup(ScoreBias):
    """The sum of what tables hold for a pair: numbers, or products of the query's vector, or the key's, with a row."""

    make: Callable[[], tuple[Entries, ...]]
    """The tables, asked for once, where a number is wanted."""
    of_query: Float[Tensor, "batch heads query dim"] | None = None
    of_key: Float[Tensor, "batch heads key dim"] | None = None
    made: list[tuple[Entries, ...]] = field(default_factory=list)

    @property
    def is_of_heads(self) -> bool:
        """Whether tokens have no part in it."""
        return self.of_query is None and self.of_key is None

    @property
    def tables(self) -> tuple[Entries, ...]:
        if not self.made:
            self.made.append(self.make())
        return self.made[0]

    @property
    def tensors(self) -> Tensors:
        """What any part of it is computed from."""
        return self.of_query, self.of_key, *(x for t in self.tables for x in (t.of_head, t.of_query, t.of_key))

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Self:
        of_query, of_key, *rest = tensors
        tables = tuple(
            replace(t, of_head=rest[3 * i], of_query=rest[3 * i + 1], of_key=rest[3 * i + 2])
            for i, t in enumerate(self.tables)
        )
        return replace(self, made=[tables], of_query=of_query, of_key=of_key)

    def of_heads(self, heads: slice) -> Self:
        tables = tuple(table.of_heads(heads) for table in self.tables)
        of_query, of_key = (None if x is None else x[:, heads] for x in (self.of_query, self.of_key))
        return replace(self, q=self.q[:, heads], made=[tables], of_query=of_query, of_key=of_key)

    def tile(self, rows: slice, keys: slice) -> Self:
        return replace(
            self,
            q=self.q[:, :, rows],
            made=[tuple(table.tile(rows, keys) for table in self.tables)],
            of_query=None if self.of_query is None else self.of_query[:, :, rows],
            of_key=None if self.of_key is None else self.of_key[:, :, keys],
        )

    def dense(self) -> Tensor:
        terms = [term for table in self.tables for term in self._terms(table)]
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    def _terms(self, table: Entries) -> list[Tensor]:
        dtype, (entries, some) = bias_dtype(self.q), table.found()
        terms = []
        if table.of_head is not None:
            picked = table.of_head[:, some].index_select(1, entries.flatten())
            terms.append(picked.unflatten(1, entries.shape).transpose(0, 1))
        if table.of_query is not None and self.of_query is not None:
            terms.append(_pick(table.product(self.of_query, table.of_query[..., some, :], dtype), entries))
        if table.of_key is not None and self.of_key is not None:
            numbers = table.product(self.of_key, table.of_key[..., some, :], dtype)
            terms.append(_pick(numbers, entries.transpose(1, 2)).transpose(2, 3))
        return terms

    def numbers(self, table: Entries) -> tuple[Tensor | None, Tensor | None]:
        """Of every query, and of every key, at each entry."""
        dtype, batch = bias_dtype(self.q), self.q.shape[0]
        return tuple(  # type: ignore[return-value]
            None if x is None or rows is None else table.product(x, rows, dtype).expand(batch, -1, -1, -1)
            for x, rows in ((self.of_query, table.of_query), (self.of_key, table.of_key))
        )

    def score_mod(self) -> ScoreMod:
        return added([self.entry_mod(table, *self.numbers(table)) for table in self.tables])

    def entry_mod(self, table: Entries, of_query: Tensor | None, of_key: Tensor | None) -> Callable[..., Tensor]:
        """What a table has for one pair: ``(batch, head, query, key) -> number``."""
        distance, entry_of, of_head = distance_mod(self.q, table.queries, table.keys), table.entry_of, table.of_head

        def look_up(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            entry = entry_of(distance(batch, query, key))
            found = [] if of_head is None else [of_head[head, entry]]
            found += [] if of_query is None else [of_query[batch, head, query, entry]]
            found += [] if of_key is None else [of_key[batch, head, key, entry]]
            return found[0] if len(found) == 1 else found[0] + found[1]

        return look_up

    @property
    def far(self) -> int | None:
        """From this distance on it is the sum that `of_far` gives; ``None``: it never is one."""
        ends = self.tables[0].ends
        return None if ends is None or len(self.tables) > 1 else ends[1]

    def of_far(self) -> tuple[Tensor | None, Tensor | None]:
        (table,), dtype = self.tables, bias_dtype(self.q)
        assert table.ends is not None
        entry = table.entry_of(torch.tensor([table.ends[1]], device=self.q.device))
        query, key = (
            None if x is None or rows is None else table.product(x, rows.index_select(-2, entry), dtype)[..., 0]
            for x, rows in ((self.of_query, table.of_query), (self.of_key, table.of_key))
        )
        return query, key


def added(terms: Sequence[Callable[..., Tensor]]) -> ScoreMod:
    """A score function that adds these."""

    def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = [term(batch, head, query, key) for term in terms]
        return score + (found[0] if len(found) == 1 else found[0] + found[1])

    return add


def _of_heads(rows: Tensor | None, heads: slice) -> Tensor | None:
    return rows if rows is None or rows.ndim == 2 else rows[heads]


def _pick(products: Float[Tensor, "batch heads n rows"], rows: Int[Tensor, "#batch n m"]) -> Tensor:
    """For every pair of a token and another, the token's product with the row that belongs to the pair."""
    return products.gather(3, rows[:, None].expand(*products.shape[:3], rows.shape[-1]))


# ---------------------------------------------------------------------- two tokens


@dataclass(frozen=True, kw_only=True)
class Pairwise(ScoreBias):
    """A function of what is known of a query and of a key."""

    of_query: Tensor | None
    """``#batch #heads query``, and what else it has."""
    of_key: Tensor | None
    of_pair: Callable[..., Tensor]
    """``(of_query, of_key, head, **operands)``, broadcast over each other; all of one pair in a score function."""
    operands: Callable[[], dict[str, Tensor]]
    """Asked for once, where a number is wanted."""
    heads: range
    """Which heads of the operands these are."""
    is_for_pairs: bool = True
    far: int | None = None
    separate: Callable[..., tuple[Tensor | None, Tensor | None]] | None = None
    """``(of_query, of_key)`` from the distance `far` on: a number of each query and one of each key."""
    shared: Callable[..., Tensor] | None = None
    """``(of_query, of_key, **operands)``: what all heads have in common, and `of_pair` is given in place of the two."""
    memo: list[Tensor] = field(default_factory=list)

    @property
    def tensors(self) -> Tensors:
        return self.of_query, self.of_key, *self.operands().values()

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Self:
        of_query, of_key, *rest = tensors
        operands: dict[str, Any] = dict(zip(self.operands(), rest, strict=True))
        return replace(self, of_query=of_query, of_key=of_key, operands=lambda: operands)

    def of_heads(self, heads: slice) -> Self:
        of_query, of_key = (x if x is None or x.shape[1] == 1 else x[:, heads] for x in (self.of_query, self.of_key))
        return replace(self, q=self.q[:, heads], of_query=of_query, of_key=of_key, heads=self.heads[heads])

    def tile(self, rows: slice, keys: slice) -> Self:
        pairs = (self.of_query, rows), (self.of_key, keys)
        of_query, of_key = (None if x is None else x[:, :, tokens] for x, tokens in pairs)
        return replace(self, q=self.q[:, :, rows], of_query=of_query, of_key=of_key, memo=[])

    def dense(self) -> Tensor:
        of_query = None if self.of_query is None else self.of_query[:, :, :, None]
        of_key = None if self.of_key is None else self.of_key[:, :, None]
        head, operands = torch.tensor([*self.heads], device=self.q.device)[:, None, None], self.operands()
        if self.shared is None:
            return self.of_pair(of_query, of_key, head, **operands).to(bias_dtype(self.q))
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.of_pair(self.shared(of_query, of_key, **operands), head, **operands).to(bias_dtype(self.q))
        if not self.memo:
            self.memo.append(self.shared(of_query, of_key, **operands))
        return self.of_pair(self.memo[0], head, **operands).to(bias_dtype(self.q))

    def score_mod(self) -> ScoreMod | None:
        if not self.is_for_pairs:
            return None
        of_query, of_key = _token_mod(self.of_query), _token_mod(self.of_key)
        operands, dtype, of_pair, shared = self.operands(), bias_dtype(self.q), self.of_pair, self.shared

        def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            pair = of_query(batch, head, query), of_key(batch, head, key)
            known = pair if shared is None else (shared(*pair, **operands),)
            return score + of_pair(*known, head, **operands).to(dtype)

        return add

    def of_far(self) -> tuple[Tensor | None, Tensor | None]:
        assert self.separate is not None
        return self.separate(self.of_query, self.of_key)


def _token_mod(x: Tensor | None) -> Callable[[Tensor, Tensor, Tensor], Any]:
    if x is None:
        return lambda batch, head, token: None
    rows, heads = x.shape[0] > 1, x.shape[1] > 1
    return lambda batch, head, token: x[batch if rows else batch * 0, head if heads else head * 0, token]
