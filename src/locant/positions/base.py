"""`PositionEncoding`: the three doors through which word order enters a transformer.

``embed`` adds to the token embeddings, ``rotate`` turns queries and keys, ``bias`` adds to the attention scores. Each
does nothing unless an encoding overrides it, so the base class itself is NoPE: no position encoding at all
(Kazemnejad et al. 2023, https://arxiv.org/abs/2305.19466).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locant.positions.where import Positions

__all__ = ["PositionEncoding", "ScoreMod", "bias_dtype", "follows_distance"]

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's ``(score, batch, head, query, key) -> score``."""


class PositionEncoding(nn.Module):
    """A way to tell a model where its tokens stand; this one says nothing (NoPE).

    A model written against the three doors runs with every encoding::

        x = encoding.embed(x, positions)                     # once, after the token embedding
        q, k = encoding.rotate(q, k, positions)              # in every layer, before the KV cache
        y = attend(q, k, v, encoding=encoding, positions=positions)

    >>> PositionEncoding().embed(torch.ones(1, 2, 3), Positions.arange(2)).shape
    torch.Size([1, 2, 3])
    """

    by_distance: ClassVar[bool] = False
    """Whether `bias` follows from the head and the distance alone (query index minus key index), not from the tokens.

    Attention then asks for one number per head and distance instead of a matrix. It is believed only of the class that
    defines `bias`: whoever overrides `bias` says it again, or not.
    """

    def embed(self, x: Float[Tensor, "batch seq d_model"], positions: Positions) -> Float[Tensor, "batch seq d_model"]:
        """Token embeddings with position added."""
        return x

    def rotate(
        self,
        q: Float[Tensor, "batch heads query head_dim"],
        k: Float[Tensor, "batch kv_heads key head_dim"],
        positions: Positions,
        k_positions: Positions | None = None,
        *,
        inplace: bool = False,
    ) -> tuple[Float[Tensor, "batch heads query head_dim"], Float[Tensor, "batch kv_heads key head_dim"]]:
        """Queries and keys turned by their positions; `k_positions` where the keys stand elsewhere.

        With `inplace` the result is written into the memory of `q` and `k`.
        """
        return q, k

    def bias(
        self,
        q: Float[Tensor, "batch heads query head_dim"],
        k: Float[Tensor, "batch kv_heads key head_dim"],
        positions: Positions,
        k_positions: Positions | None = None,
    ) -> Float[Tensor, "#batch heads query key"] | None:
        """What is added to the attention scores after scaling, or ``None``.

        Works for any slice of queries and keys: entry (i, j) depends on query i and key j alone. float32 at least,
        whatever the dtype of `q`: bfloat16 cannot tell far distances apart.
        """
        return None

    def score_mod(
        self,
        q: Float[Tensor, "batch heads query head_dim"],
        k: Float[Tensor, "batch kv_heads key head_dim"],
        positions: Positions,
        k_positions: Positions | None = None,
    ) -> ScoreMod | None:
        """The same bias as a function for FlexAttention, which never holds it as a tensor; or ``None``."""
        return None


def follows_distance(encoding: PositionEncoding) -> bool:
    """Whether the class whose `bias` this is says that it follows from the distance alone."""
    owner = next(kind for kind in type(encoding).__mro__ if "bias" in vars(kind))
    return bool(vars(owner).get("by_distance", False))


def bias_dtype(q: Tensor) -> torch.dtype:
    """float32, or float64 where the queries are."""
    return torch.promote_types(q.dtype, torch.float32)
