"""`ScoreBias`, what all four kinds have in common; `Written`, a matrix, and `Pairwise`, a function of two tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locant.errors import ShapeError
from locant.positions.pairs import ScoreMod, bias_dtype
from locant.positions.positions import Positions


@dataclass(frozen=True, kw_only=True)
class ScoreBias:
    """What is added to the scaled scores of queries and keys.

    Args:
        q: the queries; says batch, heads, device and dtype.
        queries, keys: where they stand.
        sources: what the bias is made from beside `q` and `k`, and may need a gradient: parameters, buffers, and what
            was read of hidden states.
    """

    q: Tensor
    queries: Positions
    keys: Positions
    sources: tuple[Tensor | None, ...] = ()

    def dense(self) -> Float[Tensor, "#batch heads query key"] | None:
        """The matrix, in float32 at least."""
        raise NotImplementedError

    @property
    def has_score_mod(self) -> bool:
        """Whether FlexAttention can have it as a function; nothing is computed to find out."""
        return True

    def score_mod(self) -> ScoreMod | None:
        """The function for FlexAttention, or ``None`` where it would look a pair up in a matrix."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Written(ScoreBias):
    """A matrix that an encoding writes: for all heads, some queries, and all keys that these attend to.

    Args:
        write: ``(q, k, queries, keys)`` to the matrix, or to ``None`` for no bias.
        mod: the same to a function for FlexAttention, if there is one.
    """

    k: Tensor
    write: Callable[[Tensor, Tensor, Positions, Positions], Tensor | None]
    mod: Callable[[Tensor, Tensor, Positions, Positions], ScoreMod | None] | None = None

    def dense(self) -> Float[Tensor, "#batch heads query key"] | None:
        bias = self.write(self.q, self.k, self.queries, self.keys)
        if bias is not None and bias.ndim == 4 and bias.shape[1] not in (1, self.q.shape[1]):
            got = f"got a bias of {bias.shape[1]} heads for queries of {self.q.shape[1]}"
            raise ShapeError(got, "as many as the queries have; over ranks method='gather'")
        return bias

    @property
    def has_score_mod(self) -> bool:
        return self.mod is not None

    def score_mod(self) -> ScoreMod | None:
        return None if self.mod is None else self.mod(self.q, self.k, self.queries, self.keys)


@dataclass(frozen=True, kw_only=True)
class Pairwise(ScoreBias):
    """A function of what is known of a query and of a key (FIRE, FoX, any `HiddenBias`).

    Args:
        of_query, of_key: what is known of them, ``#batch #heads token``, and then whatever else it has.
        of_pair: ``(of_query, of_key, head, **operands)`` to the numbers, broadcast; of one pair in a score function.
        operands: what `of_pair` gets by name, asked for once, where a number is wanted.
        heads: which heads of the operands those of `q` are.
        is_for_pairs: whether `of_pair` is made of what a score function may do with one pair. It is given numbers:
            of tokens of which there are vectors, compiled, it would read others.
        far, separate: from the distance `far` on the number is a sum of one of the query and one of the key, which
            ``separate(of_query, of_key)`` returns; ``None``: it never is.
        shared: ``(of_query, of_key, **operands)`` to what all heads have in common, which `of_pair` gets in place of
            the two.
        of_one_pair: `of_pair` for a score function, where that needs another.
    """

    of_query: Tensor | None
    of_key: Tensor | None
    of_pair: Callable[..., Tensor]
    operands: Callable[[], dict[str, Tensor]] = dict
    heads: range
    is_for_pairs: bool = True
    far: int | None = None
    separate: Callable[..., tuple[Tensor | None, Tensor | None]] | None = None
    shared: Callable[..., Tensor] | None = None
    of_one_pair: Callable[..., Tensor] | None = None
    memo: list[Tensor] = field(default_factory=list)

    @property
    def heads_differ(self) -> bool:
        """Whether some heads alone cost their share of all; else it is best had for all heads at once."""
        return self.shared is None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What any part of it is computed from."""
        return self.of_query, self.of_key, *self.operands().values()

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Pairwise:
        """The same of other `tensors`."""
        of_query, of_key, *rest = tensors
        operands: dict[str, Any] = dict(zip(self.operands(), rest, strict=True))
        return replace(self, of_query=of_query, of_key=of_key, operands=lambda: operands, memo=[])

    def of_heads(self, heads: slice) -> Pairwise:
        """That of some heads."""
        of_query, of_key = (x if x is None or x.shape[1] == 1 else x[:, heads] for x in (self.of_query, self.of_key))
        return replace(self, q=self.q[:, heads], of_query=of_query, of_key=of_key, heads=self.heads[heads])

    def tile(self, rows: slice, columns: slice) -> Pairwise:
        """That of some queries and keys."""
        of_query = None if self.of_query is None else self.of_query[:, :, rows]
        of_key = None if self.of_key is None else self.of_key[:, :, columns]
        return replace(self, q=self.q[:, :, rows], of_query=of_query, of_key=of_key, memo=[])

    def dense(self) -> Float[Tensor, "#batch heads query key"]:
        of_query = None if self.of_query is None else self.of_query[:, :, :, None]
        of_key = None if self.of_key is None else self.of_key[:, :, None]
        first, step, operands = self.heads.start, self.heads.step, self.operands()
        head = torch.arange(first, first + len(self.heads) * step, step, device=self.q.device)[:, None, None]
        pair: tuple[Any, ...] = (of_query, of_key)
        if self.shared is not None:
            pair = (self._in_common(self.shared, pair, operands),)
        bias = self.of_pair(*pair, head, **operands).to(bias_dtype(self.q))
        return bias if bias.shape[-2] == self.q.shape[2] else bias.expand(*bias.shape[:-2], self.q.shape[2], -1)

    def _in_common(self, shared: Callable[..., Tensor], pair: tuple[Any, ...], operands: dict[str, Tensor]) -> Tensor:
        """Once for all heads of a tile; anew where it is differentiated or compiled."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return shared(*pair, **operands)
        if not self.memo:
            self.memo.append(shared(*pair, **operands))
        return self.memo[0]

    @property
    def has_score_mod(self) -> bool:
        return self.is_for_pairs and all(x is None or x.ndim == 3 for x in (self.of_query, self.of_key))

    def score_mod(self) -> ScoreMod | None:
        if not self.has_score_mod:
            return None
        of_query, of_key = _token_mod(self.of_query), _token_mod(self.of_key)
        operands, dtype, shared = self.operands(), bias_dtype(self.q), self.shared
        of_pair, first = self.of_one_pair or self.of_pair, self.heads.start

        def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            pair = of_query(batch, head, query), of_key(batch, head, key)
            pair = pair if shared is None else (shared(*pair, **operands),)
            return score + of_pair(*pair, head + first if first else head, **operands).to(dtype)

        return add

    def of_far(self) -> tuple[Tensor | None, Tensor | None]:
        """The two numbers of the distance `far` and beyond, ``#batch heads token``."""
        return (None, None) if self.separate is None else self.separate(self.of_query, self.of_key)


def _token_mod(x: Tensor | None) -> Callable[[Tensor, Tensor, Tensor], Any]:
    if x is None:
        return lambda batch, head, token: None
    rows, heads = x.shape[0] > 1, x.shape[1] > 1
    return lambda batch, head, token: x[batch if rows else batch * 0, head if heads else head * 0, token]
