"""`HiddenBias`: the base class of encodings whose bias depends on the hidden states of the tokens.

`read` computes the features of each token once and stores them with its position. They move with the position into a
cache, into a slice and to another rank. So no ``query x key`` matrix is stored.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from locant.arguments import MAX_WIDTH, whole
from locant.deprecation import Renamed
from locant.errors import LocantError
from locant.kernels.exact_dot import exact_dot
from locant.kernels.transforms import is_transforming
from locant.positions.base import Embeddings, Keys, PositionEncoding, Queries, require_embeddings, require_tokens
from locant.positions.distances import bias_dtype
from locant.positions.documents import PADDING
from locant.positions.fields import TokenFeatures
from locant.positions.heads import Heads
from locant.positions.positions import Positions, require_positions
from locant.positions.score_bias import Pairwise, ScoreBias

CHUNK_ELEMENTS = 2**17
"""The number of elements of the hidden states that are converted to float64 at a time."""

QueryAndKeyFeatures = tuple[Float[Tensor, "_ query heads *_"] | None, Float[Tensor, "_ key heads *_"] | None]
"""The features of the query and the key of every token, for every head, or ``None``."""

REMEDY = "positions = encoding.read(x, positions), and cache.append(k, v, positions) after it"


class HiddenBias(PositionEncoding):
    """A bias that depends on token content, through features that a subclass computes from the hidden states.

    A model calls `read` in every layer, with the hidden states from which queries and keys are projected, and uses the
    returned positions::

        positions = encoding.read(x, positions, None if cache is None else cache.positions)
        q, k = encoding.rotate(q, k, positions)
        k, v, k_positions = cache.append(k, v, positions)
        y = attend(q, k, v, encoding=encoding, positions=positions, k_positions=k_positions)

    Args:
        num_heads: the number of query heads.
        d_model: the width of the hidden states.
        head_slice: the heads of this rank under tensor parallelism. Default: all.

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
        self.d_model = whole("d_model", d_model, 1, MAX_WIDTH, remedy="pass the width of the hidden states")

    def of_hidden(
        self, x: Float[Tensor, "batch seq d_model"], positions: Positions, past: Positions | None
    ) -> QueryAndKeyFeatures:
        """Return the features of every token, as a query and as a key. Subclasses implement this.

        `past` holds the cached tokens with the features of their keys, or is ``None``. The cache stores no other
        features. `x` is zero at padding and has the same number of rows as `positions`.
        """
        raise LocantError(f"{type(self).__name__} does not define of_hidden", "def of_hidden(self, x, positions, past)")

    def of_pair(self, queries: Tensor | None, keys: Tensor | None, head: Tensor) -> Tensor:
        """Return the bias of every query and key. Subclasses implement this with plain torch operations.

        Attention calls it for some heads, queries and keys at a time. The features of queries have the shape ``#batch
        heads query 1 *``, and the features of keys have the shape ``#batch heads 1 key *``. `head` has the shape
        ``heads 1 1`` and indexes the held heads.
        """
        raise LocantError(f"{type(self).__name__} does not define of_pair", "def of_pair(self, queries, keys, head)")

    def far_terms(self, queries: Tensor | None, keys: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return a number for each query and each key, ``#batch heads token``.

        If distance >= `far`, their sum is the bias.
        """
        return None, None

    of_far = Renamed("far_terms")
    far: int | None = None
    is_traceable_per_pair: ClassVar[bool] = True

    def read(self, x: Embeddings, positions: Positions, past: Positions | None = None) -> Positions:
        """Return the positions with the features of `x`."""
        require_positions(positions)
        require_embeddings(self, x, positions, self.d_model)
        rows = positions.expand(x.shape[0])
        if rows.document_or_none is not None:
            x = x.masked_fill((rows.document_or_none == PADDING)[..., None], 0.0)
        read = self.of_hidden(x, rows, past if past is not None and past.seq_len else None)
        return dataclasses.replace(rows, read=TokenFeatures(*read))

    def score_bias(
        self, q: Queries, k: Keys, queries: Positions, keys: Positions, heads: slice | None = None
    ) -> ScoreBias:
        """Return `of_pair` of the features as a `Pairwise` value."""
        of_query, of_key = self.features_of_heads(q, k, queries, keys, heads)
        return Pairwise(
            q=q, queries=queries, keys=keys, sources=(of_query, of_key), of_query=of_query, of_key=of_key,
            of_pair=self.of_pair, heads=range(len(self.heads))[heads or slice(None)], far=self.far,
            separate=self.far_terms, is_traceable_per_pair=self.is_traceable_per_pair,
        )  # fmt: skip

    def features_of_heads(
        self, q: Queries, k: Keys, queries: Positions, keys: Positions, heads: slice | None
    ) -> tuple[Float[Tensor, "_ heads query *_"] | None, Float[Tensor, "_ heads key *_"] | None]:
        """Return the features of queries and of keys for these heads.

        Raise an error if they were read for other heads.
        """
        self.heads.subset(heads).require(self, q)
        require_tokens(self, q, k, queries, keys)
        read = queries.read.of_query, keys.read.of_key
        for x in read:
            if x is not None and x.shape[2] != len(self.heads):
                expected = f"{type(self).__name__} has {len(self.heads)}"
                raise LocantError(f"got positions with features of {x.shape[2]} heads, {expected}", REMEDY)
        of_query, of_key = (None if x is None else x.transpose(1, 2)[:, heads or slice(None)] for x in read)
        return of_query, of_key

    def require_features(self, name: str, read: Tensor | None) -> Tensor:
        """Return the features of queries or of keys. Raise `LocantError` if they are missing."""
        if read is None:
            got = f"got {name} without the features that {type(self).__name__} reads from hidden states"
            raise LocantError(got, REMEDY)
        return read

    def extra_repr(self) -> str:
        return f"{self.heads}, d_model={self.d_model}"


def project(
    x: Float[Tensor, "batch seq d_model"], weight: Float[Tensor, "out d_model"], dtype: torch.dtype
) -> Float[Tensor, "batch seq out"]:
    """Return `exact_dot` of every token with every row.

    It works on some tokens at a time and recomputes them in the backward pass, so it needs little memory compared with
    the hidden states.
    """
    if torch.compiler.is_compiling() or is_transforming() or x.numel() <= CHUNK_ELEMENTS:
        return _product(x, weight, dtype)
    parts = x.split(max(1, CHUNK_ELEMENTS // x[:, :1].numel()), dim=1)
    if not torch.is_grad_enabled():
        return torch.cat([_product(part, weight, dtype) for part in parts], dim=1)
    return torch.cat([checkpoint(_product, part, weight, dtype, use_reentrant=False) for part in parts], dim=1)


def _product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return exact_dot(x, weight, bias_dtype(x)).to(dtype)
