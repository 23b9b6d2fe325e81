"""`ScoreBias`, what all four kinds have in common, and `Written`, the one that is a matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from locant.errors import ShapeError
from locant.positions.pairs import ScoreMod
from locant.positions.positions import Positions

__all__ = ["ScoreBias", "Written"]


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
