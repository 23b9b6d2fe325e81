"""`ScoreBias`, the base class of all four kinds, and two of them: `Written` and `Pairwise`.

`Written` is a matrix. `Pairwise` is a function of two tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locant.errors import ShapeError
from locant.positions.distances import ScoreMod, bias_dtype
from locant.positions.positions import Positions


@dataclass(frozen=True, kw_only=True)
class ScoreBias:
    """The bias that is added to the scaled scores of queries and keys.

    Args:
        q: the queries, which determine batch, heads, device and dtype.
        queries, keys: the positions of queries and keys.
        sources: the tensors, other than `q` and `k`, from which the bias is computed and which may need a gradient:
            parameters, buffers, and features of hidden states.
        computed: tensors that were computed without gradients. Biases for other vectors of the same tokens share it.
    """

    q: Tensor
    queries: Positions
    keys: Positions
    sources: tuple[Tensor | None, ...] = ()
    computed: dict[Any, Tensor] = field(default_factory=dict)

    def once(self, key: object, compute: Callable[[], Tensor]) -> Tensor:
        """Return the tensor that was computed under this key. Under autograd or a compiler, compute it every time."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return compute()
        if key not in self.computed:
            self.computed[key] = compute()
        return self.computed[key]

    def is_like(self, q: Tensor) -> bool:
        """Return whether `q` has the shape, dtype and device of the queries."""
        return q.shape == self.q.shape and q.dtype == self.q.dtype and q.device == self.q.device

    def dense(self) -> Float[Tensor, "#batch heads query key"] | None:
        """Return the matrix, in float32 or wider."""
        raise NotImplementedError

    def for_vectors(self, q: Tensor, k: Tensor) -> ScoreBias | None:
        """Return the same bias for other vectors of the same tokens, such as zeros at padding.

        Return ``None`` if it holds tensors made from the vectors, so that the encoding must compute the bias again.
        """
        return None

    @property
    def has_score_mod(self) -> bool:
        """Return whether there is a function for FlexAttention, without computing it."""
        return True

    def score_mod(self) -> ScoreMod | None:
        """Return the function for FlexAttention, or ``None`` if that function would need the matrix."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Written(ScoreBias):
    """A matrix that an encoding computes, for all heads, some queries, and all keys that these attend to.

    Args:
        write: a function ``(q, k, queries, keys)`` that returns the matrix, or ``None`` for no bias.
        mod: a function of the same arguments that returns a function for FlexAttention, or ``None``.
        reads_only_arguments: whether `write` and `mod` read tokens only from their arguments. If so, attention keeps
            this value for copies of the queries and keys. Otherwise it calls the encoding again.
    """

    k: Tensor
    write: Callable[[Tensor, Tensor, Positions, Positions], Tensor | None]
    mod: Callable[[Tensor, Tensor, Positions, Positions], ScoreMod | None] | None = None
    reads_only_arguments: bool = False

    def dense(self) -> Float[Tensor, "#batch heads query key"] | None:
        bias = self.write(self.q, self.k, self.queries, self.keys)
        if bias is not None and bias.ndim == 4 and bias.shape[1] not in (1, self.q.shape[1]):
            got = f"got a bias of {bias.shape[1]} heads for queries of {self.q.shape[1]}"
            raise ShapeError(got, "return a bias for every head of the queries; over ranks use method='gather'")
        return bias

    def for_vectors(self, q: Tensor, k: Tensor) -> Written | None:
        return replace(self, q=q, k=k) if self.reads_only_arguments else None

    @property
    def has_score_mod(self) -> bool:
        return self.mod is not None

    def score_mod(self) -> ScoreMod | None:
        return None if self.mod is None else self.mod(self.q, self.k, self.queries, self.keys)


@dataclass(frozen=True, kw_only=True)
class Pairwise(ScoreBias):
    """A function of the features of a query and of a key (FIRE, FoX, any `HiddenBias`).

    Args:
        of_query, of_key: the features, ``#batch #heads token`` and any further dimensions.
        of_pair: a function ``(of_query, of_key, head, **operands)`` that returns the bias. Its arguments broadcast, or
            belong to one pair in a score function.
        operands: a function that returns the keyword arguments of `of_pair`. It is called only to compute a bias.
        heads: the indices of the heads of `q` among the heads of the operands.
        is_traceable_per_pair: whether `of_pair` uses only operations that a score function supports for one pair.
            Features then have to be numbers, because compiled code reads wrong elements of vectors.
        far, separate: at distances of `far` or more, the bias is the sum of a number for the query and a number for the
            key. ``separate(of_query, of_key)`` returns the two numbers. `far` and `separate` are ``None`` if there is
            no such distance.
        shared: a function ``(of_query, of_key, **operands)`` that returns the part common to all heads, which `of_pair`
            receives instead of the features.
        of_one_pair: a different `of_pair` for score functions, if they need one.
        reads_only_positions: whether features and operands hold nothing of the queries and keys but their positions.
            If so, attention keeps this value for other vectors of the same tokens.
    """

    of_query: Tensor | None
    of_key: Tensor | None
    of_pair: Callable[..., Tensor]
    operands: Callable[[], dict[str, Tensor]] = dict
    heads: range
    is_traceable_per_pair: bool = True
    far: int | None = None
    separate: Callable[..., tuple[Tensor | None, Tensor | None]] | None = None
    shared: Callable[..., Tensor] | None = None
    of_one_pair: Callable[..., Tensor] | None = None
    reads_only_positions: bool = False
    memo: list[Tensor] = field(default_factory=list)

    @property
    def cost_grows_with_heads(self) -> bool:
        """Return whether the cost grows with the number of heads. If not, computing all heads at once is cheaper."""
        return self.shared is None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors from which the bias is computed."""
        return self.of_query, self.of_key, *self.operands().values()

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Pairwise:
        """Return the same bias with other `tensors`."""
        of_query, of_key, *rest = tensors
        operands: dict[str, Any] = dict(zip(self.operands(), rest, strict=True))
        return replace(self, of_query=of_query, of_key=of_key, operands=lambda: operands, memo=[], computed={})

    def for_vectors(self, q: Tensor, k: Tensor) -> Pairwise | None:
        if not self.reads_only_positions:
            return None
        return self if self.is_like(q) else replace(self, q=q)

    def select_heads(self, heads: slice) -> Pairwise:
        """Return the bias of some heads."""
        of_query, of_key = (x if x is None or x.shape[1] == 1 else x[:, heads] for x in (self.of_query, self.of_key))
        return replace(self, q=self.q[:, heads], of_query=of_query, of_key=of_key, heads=self.heads[heads], computed={})

    def tile(self, rows: slice, columns: slice) -> Pairwise:
        """Return the bias of some queries and keys."""
        of_query = None if self.of_query is None else self.of_query[:, :, rows]
        of_key = None if self.of_key is None else self.of_key[:, :, columns]
        return replace(self, q=self.q[:, :, rows], of_query=of_query, of_key=of_key, memo=[], computed={})

    def dense(self) -> Float[Tensor, "#batch heads query key"]:
        return self.once("matrix", self._compute_matrix)

    def _compute_matrix(self) -> Float[Tensor, "#batch heads query key"]:
        of_query = None if self.of_query is None else self.of_query[:, :, :, None]
        of_key = None if self.of_key is None else self.of_key[:, :, None]
        first, step, operands = self.heads.start, self.heads.step, self.operands()
        head = torch.arange(first, first + len(self.heads) * step, step, device=self.q.device)[:, None, None]
        pair: tuple[Any, ...] = (of_query, of_key)
        if self.shared is not None:
            pair = (self._compute_shared(self.shared, pair, operands),)
        bias = self.of_pair(*pair, head, **operands).to(bias_dtype(self.q))
        return bias if bias.shape[-2] == self.q.shape[2] else bias.expand(*bias.shape[:-2], self.q.shape[2], -1)

    def _compute_shared(
        self, shared: Callable[..., Tensor], pair: tuple[Any, ...], operands: dict[str, Tensor]
    ) -> Tensor:
        """Compute the shared part once for all heads of a tile, but every time under autograd or a compiler."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return shared(*pair, **operands)
        if not self.memo:
            self.memo.append(shared(*pair, **operands))
        return self.memo[0]

    @property
    def has_score_mod(self) -> bool:
        return self.is_traceable_per_pair and all(x is None or x.ndim == 3 for x in (self.of_query, self.of_key))

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

    def far_terms(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the two summands of the bias at distances of `far` or more, ``#batch heads token``."""
        return (None, None) if self.separate is None else self.separate(self.of_query, self.of_key)


def _token_mod(x: Tensor | None) -> Callable[[Tensor, Tensor, Tensor], Any]:
    if x is None:
        return lambda batch, head, token: None
    rows, heads = x.shape[0] > 1, x.shape[1] > 1
    return lambda batch, head, token: x[batch if rows else batch * 0, head if heads else head * 0, token]
