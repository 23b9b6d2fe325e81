"""`HiddenBias`: the base of encodings whose bias follows from the hidden states of the tokens.

What such an encoding has to know of a token is read once, by `read`, and goes with its position: into the cache, into
a slice, to another rank. So nothing the size of ``query x key`` is kept.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from locant.arguments import MAX_WIDTH, whole
from locant.errors import LocantError
from locant.kernels.transforms import is_transforming
from locant.positions.base import Embeddings, Keys, PositionEncoding, Queries, require_embeddings, require_tokens
from locant.positions.documents import PADDING
from locant.positions.fields import Read
from locant.positions.heads import Heads
from locant.positions.pairs import bias_dtype, exact_dot
from locant.positions.positions import Positions
from locant.positions.score_bias import Pairwise, ScoreBias

AT_ONCE = 2**17
"""Numbers of the hidden states that are held in float64 at a time."""

OfTokens = tuple[Float[Tensor, "_ query heads *_"] | None, Float[Tensor, "_ key heads *_"] | None]
"""Of every token, for every head: what a query has to know of itself, and what keys are known by; or ``None``."""

REMEDY = "positions = encoding.read(x, positions), and cache.append(k, v, positions) after it"


class HiddenBias(PositionEncoding):
    """A bias that depends on what tokens are, by numbers that a subclass reads of their hidden states.

    A model calls `read` in every layer, with what queries and keys are made from, and then goes on with the positions
    that come back::

        positions = encoding.read(x, positions, None if cache is None else cache.positions)
        q, k = encoding.rotate(q, k, positions)
        k, v, k_positions = cache.append(k, v, positions)
        y = attend(q, k, v, encoding=encoding, positions=positions, k_positions=k_positions)

    Args:
        num_heads: the number of query heads.
        d_model: the width of the hidden states.
        head_slice: the heads of this rank under tensor parallelism; default: all.

    >>> class Loud(HiddenBias):
    ...     '''Every head attends more to tokens whose hidden states have a large mean.'''
    ...     def of_hidden(self, x, positions, past):
    ...         return None, x.mean(-1, keepdim=True).expand(-1, -1, len(self.heads))
    ...     def of_pair(self, queries, keys, head):
    ...         return keys
    >>> loud, x, q = Loud(2, 8), torch.ones(1, 3, 8), torch.zeros(1, 2, 3, 4)
    >>> loud.bias(q, q, loud.read(x, Positions.arange(3)))[0, 1, 2]
    tensor([1., 1., 1.])
    """

    def __init__(self, num_heads: int, d_model: int, *, head_slice: slice | None = None) -> None:
        super().__init__()
        self.heads = Heads.of(num_heads, head_slice)
        self.num_heads = self.heads.num_heads
        self.d_model = whole("d_model", d_model, 1, MAX_WIDTH, remedy="the width of the hidden states")

    def of_hidden(
        self, x: Float[Tensor, "batch seq d_model"], positions: Positions, past: Positions | None
    ) -> OfTokens:
        """What is read of every token, as a query and as a key: a subclass writes this.

        What is read for keys is kept in the cache beside them, and has to be all that `past` is asked for: the cached
        tokens, with what was read of them, or ``None``. `x` is zero at padding, and has as many rows as `positions`.
        """
        raise LocantError(f"{type(self).__name__} does not define of_hidden", "def of_hidden(self, x, positions, past)")

    def of_pair(self, queries: Tensor | None, keys: Tensor | None, head: Tensor) -> Tensor:
        """What is added to the score of every query and key: a subclass writes this, with plain operations of torch.

        Attention asks for some heads, of some queries and keys, at a time: what was read of queries is ``#batch heads
        query 1 *``, of keys ``#batch heads 1 key *``, and `head`, which of those that are here, ``heads 1 1``.
        """
        raise LocantError(f"{type(self).__name__} does not define of_pair", "def of_pair(self, queries, keys, head)")

    def of_far(self, queries: Tensor | None, keys: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Of the distance `far` on: a number of every query and one of every key, ``#batch heads token``."""
        return None, None

    far: int | None = None
    is_for_pairs: ClassVar[bool] = True

    def read(self, x: Embeddings, positions: Positions, past: Positions | None = None) -> Positions:
        """The positions of `x`, with what is read of it."""
        require_embeddings(self, x, positions, self.d_model)
        rows = positions.expand(x.shape[0])
        if rows.document_or_none is not None:
            x = x.masked_fill((rows.document_or_none == PADDING)[..., None], 0.0)
        read = self.of_hidden(x, rows, past if past is not None and past.seq_len else None)
        return dataclasses.replace(rows, read=Read(*read))

    def score_bias(
        self, q: Queries, k: Keys, queries: Positions, keys: Positions, heads: slice | None = None
    ) -> ScoreBias:
        """`of_pair` of what was read."""
        of_query, of_key = self.read_of(q, k, queries, keys, heads)
        return Pairwise(
            q=q, queries=queries, keys=keys, sources=(of_query, of_key), of_query=of_query, of_key=of_key,
            of_pair=self.of_pair, heads=range(len(self.heads))[heads or slice(None)], far=self.far,
            separate=self.of_far, is_for_pairs=self.is_for_pairs,
        )  # fmt: skip

    def read_of(
        self, q: Queries, k: Keys, queries: Positions, keys: Positions, heads: slice | None
    ) -> tuple[Float[Tensor, "_ heads query *_"] | None, Float[Tensor, "_ heads key *_"] | None]:
        """What was read of queries, and of keys, of these heads; raises where that was for other heads."""
        self.heads.some(heads).require(self, q)
        require_tokens(self, q, k, queries, keys)
        read = queries.read.of_query, keys.read.of_key
        for x in read:
            if x is not None and x.shape[2] != len(self.heads):
                had = f"{type(self).__name__} has {len(self.heads)}"
                raise LocantError(f"got positions of which {x.shape[2]} heads were read, {had}", REMEDY)
        of_query, of_key = (None if x is None else x.transpose(1, 2)[:, heads or slice(None)] for x in read)
        return of_query, of_key

    def require_read(self, name: str, read: Tensor | None) -> Tensor:
        """What was read of queries, or of keys; raises where nothing was."""
        if read is None:
            got = f"got {name} without what {type(self).__name__} reads of hidden states"
            raise LocantError(got, REMEDY)
        return read

    def extra_repr(self) -> str:
        return f"{self.heads}, d_model={self.d_model}"


def projected(
    x: Float[Tensor, "batch seq d_model"], weight: Float[Tensor, "out d_model"], dtype: torch.dtype
) -> Float[Tensor, "batch seq out"]:
    """`exact_dot` of every token with every row: for some tokens at a time, and anew in the backward pass.

    What is held is small beside the hidden states.
    """
    if torch.compiler.is_compiling() or is_transforming() or x.numel() <= AT_ONCE:
        return _product(x, weight, dtype)
    parts = x.split(max(1, AT_ONCE // x[:, :1].numel()), dim=1)
    if not torch.is_grad_enabled():
        return torch.cat([_product(part, weight, dtype) for part in parts], dim=1)
    return torch.cat([checkpoint(_product, part, weight, dtype, use_reentrant=False) for part in parts], dim=1)


def _product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return exact_dot(x, weight, bias_dtype(x)).to(dtype)
