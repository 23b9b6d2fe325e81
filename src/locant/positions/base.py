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

from locant.positions.positions import Positions

__all__ = ["PositionEncoding", "ScoreMod", "bias_dtype", "follows_distance", "has_bias", "has_score_mod"]

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's ``(score, batch, head, query, key) -> score``."""


class PositionEncoding(nn.Module):
    """A way to tell a model where its tokens stand; this one says nothing (NoPE).

    A model written against the three doors runs with every encoding::

        x = encoding.embed(x, positions)                     # once, after the token embedding
        q, k = encoding.rotate(q, k, positions)              # in every layer, before the KV cache
        y = attend(q, k, v, encoding=encoding, positions=positions)

    Parameters are sharded with the block that uses them. The doors are no ``forward``: for FSDP to gather those of an
    encoding that is sharded by itself, torch has to be told: ``register_fsdp_forward_method(encoding, "bias")``.

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
        """The same bias as a function for FlexAttention, which never holds it as a tensor; or ``None``.

        It is believed only of the class that defines `bias`, or of one below it: whoever overrides `bias` says it
        again, or is computed without.
        """
        return None


def has_bias(encoding: PositionEncoding | None) -> bool:
    """Whether the encoding uses the third door."""
    return encoding is not None and _owner(encoding, "bias") is not PositionEncoding


def has_score_mod(encoding: PositionEncoding) -> bool:
    """Whether `score_mod` says what `bias` says: whoever overrides `bias` says it again, or has none."""
    bias, score_mod = _owner(encoding, "bias"), _owner(encoding, "score_mod")
    if isinstance(bias, type) and isinstance(score_mod, type):
        return score_mod is not PositionEncoding and issubclass(score_mod, bias)
    return score_mod is encoding


def follows_distance(encoding: PositionEncoding) -> bool:
    """Whether the class whose `bias` this is says that it follows from the distance alone."""
    return bool(vars(_owner(encoding, "bias")).get("by_distance", False))


def _owner(encoding: PositionEncoding, door: str) -> type | PositionEncoding:
    """Whose method it is: that of a class, or of this one object."""
    places = (encoding, *type(encoding).__mro__)
    return next(place for place in places if door in vars(place))


def bias_dtype(q: Tensor) -> torch.dtype:
    """float32, or float64 where the queries are."""
    return torch.promote_types(q.dtype, torch.float32)
