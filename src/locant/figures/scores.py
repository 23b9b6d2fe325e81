"""Compute how an encoding changes attention scores. Pictures in matplotlib and in the browser show these numbers.

Contents are random vectors of the same length, without the projections of a model. After `embed` and `rotate`, a score
is ``q.k / sqrt(head_dim)`` plus the result of `bias`. So the scores of all encodings have the same scale.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sized
from typing import NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.errors import LocantError
from locant.figures import SIZES
from locant.positions import PositionEncoding, Positions
from locant.positions.base import has_pair_sets, reads_hidden_states
from locant.positions.rotary_by_class import products

FREE_HEADS = 4
"""The number of heads to use for an encoding that works with any number of heads."""

TAILS = (0.1, 0.9)


class Scores(NamedTuple):
    """The mean score over random contents by distance, and the limits of the middle 80 % of scores."""

    mean: Float[np.ndarray, " distances"]
    low: Float[np.ndarray, " distances"]
    high: Float[np.ndarray, " distances"]


def num_heads_of(encoding: PositionEncoding) -> int:
    """Return the number of heads of the bias, or the number of heads with different rotations."""
    for heads in (getattr(encoding, name, None) for name in ("groups", "heads")):
        if isinstance(heads, Sized):
            return len(heads)
    return getattr(encoding, "num_heads", FREE_HEADS)


def with_random_tables(encoding: PositionEncoding) -> PositionEncoding:
    """Return a copy in which tables that begin as zeros contain random numbers, as after training.

    An encoding that only rotates is copied without changes.
    """
    encoding, generator = copy.deepcopy(encoding), torch.Generator().manual_seed(0)
    if {*encoding.methods()} <= {"rotate", "unrotate"}:
        return encoding
    for parameter in encoding.parameters():
        if not parameter.any():
            parameter.data.normal_(generator=generator)
    return encoding


def bias_map(
    encoding: PositionEncoding, length: int, seed: int = 0, positions: Positions | None = None
) -> Float[np.ndarray, "heads query key"]:
    """Return the bias for random queries, keys and hidden states. Most encodings only use their shapes.

    `positions` are the positions of `length` tokens. Default: 0, 1, 2, ...
    """
    count = num_heads_of(encoding)
    positions = Positions.arange(length) if positions is None else positions
    shape = (1, count, length, getattr(encoding, "head_dim", 1))
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, *shape, generator=generator)
    hidden = torch.randn(1, length, getattr(encoding, "d_model", 1), generator=generator)
    with torch.no_grad():
        bias = encoding.bias(q, k, encoding.read(hidden, positions))
    return cast("Tensor", bias).expand(1, count, length, length)[0].float().numpy()


def score_by_distance(
    encoding: PositionEncoding,
    distances: Int[np.ndarray, " distances"],
    *,
    alike: float = 1.0,
    head: int = 0,
    draws: int = 32,
    seed: int = 0,
) -> Scores:
    """Return the scores of one query with keys that differ only in their distance to the query.

    Args:
        distances: the distances of the keys before the query, ascending.
        alike: the cosine between the contents of query and key, from 0 to 1. At 1, the contents are equal.
        head: the head of the encoding whose bias is used.
        draws: the number of pairs of contents. The opposite of each pair is used, too.
    """
    q, k = random_contents(_width(encoding), draws, alike, seed)
    last = int(distances[-1])
    query, keys = Positions.of(torch.tensor([[last]])), Positions.of(torch.from_numpy(last - distances)[None])
    q, k, bias = _apply_methods(encoding, q, k.expand(-1, len(distances), -1), query, keys, head)
    scores = (_products(encoding, q, k, query, keys) / math.sqrt(q.shape[-1]) + bias)[:, 0]
    low, high = torch.quantile(scores, torch.tensor(TAILS, dtype=scores.dtype), dim=0)
    return Scores(scores.mean(0).numpy(), low.numpy(), high.numpy())


def score_map(
    encoding: PositionEncoding,
    index: Int[np.ndarray, " positions"],
    *,
    alike: float = 1.0,
    head: int = 0,
    draws: int = 32,
    seed: int = 0,
) -> Float[np.ndarray, "query key"]:
    """Return the mean score of every query with every key at these positions."""
    q, k = (each.expand(-1, len(index), -1) for each in random_contents(_width(encoding), draws, alike, seed))
    positions = Positions.of(torch.from_numpy(index)[None])
    q, k, bias = _apply_methods(encoding, q, k, positions, positions, head)
    if encoding.pair_classes(positions) is not None:
        products = _products(encoding, q, k, positions, positions)
        return (products.mean(0) / math.sqrt(q.shape[-1]) + bias.mean(0)).numpy()
    q, k = (each.transpose(0, 1).reshape(len(index), -1) for each in (q, k))  # one product sums over all draws
    num_scores = 2 * draws
    return (q @ k.T / (num_scores * math.sqrt(q.shape[-1] // num_scores)) + bias.mean(0)).numpy()


def _width(encoding: PositionEncoding) -> int:
    return getattr(encoding, "head_dim", getattr(encoding, "d_model", SIZES["head_dim"]))


def random_contents(width: int, draws: int, alike: float, seed: int = 0) -> Float[Tensor, "2 scores 1 width"]:
    """Return pairs of vectors of length sqrt(width) in random directions with this cosine, and their opposites.

    With opposites, the mean product of a content and a position is 0, so that no position is higher by chance.
    """
    q, other = torch.randn(2, draws, 1, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q = q / q.norm(dim=-1, keepdim=True)
    other = other - (other * q).sum(-1, keepdim=True) * q
    k = alike * q + math.sqrt(1 - alike**2) * other / other.norm(dim=-1, keepdim=True)
    contents = torch.stack([q, k]) * math.sqrt(width)
    return torch.cat([contents, -contents], dim=1).float()


@torch.no_grad()
def _apply_methods(
    encoding: PositionEncoding, q: Tensor, k: Tensor, positions: Positions, k_positions: Positions, head: int
) -> tuple[Float[Tensor, "draws query width"], Float[Tensor, "draws key width"], Float[Tensor, "#draws #query #key"]]:
    """Return queries and keys after `embed` and `rotate`, and the bias of a head, in the order of a model's calls."""
    if has_pair_sets(encoding):
        got = f"got {type(encoding).__name__}, whose scores depend on every token between a query and a key"
        raise LocantError(got, f"locant.plot({encoding.info.name!r}) for random tokens")
    if reads_hidden_states(encoding):  # all tokens have the same content, including tokens that are not shown
        length = 1 + int(max(positions.index.max(), k_positions.index.max()))
        hidden, width = q[:1, :1], getattr(encoding, "d_model", q.shape[-1])
        if hidden.shape[-1] != width:  # one head is narrower than the hidden states
            hidden = random_contents(width, 1, 1.0)[0, :1]
        tokens = encoding.read(hidden.expand(-1, length, -1), Positions.arange(length))
        positions, k_positions = tokens.select(positions.index[0]), tokens.select(k_positions.index[0])
    q, k = encoding.embed(q, positions)[:, None], encoding.embed(k, k_positions)[:, None]
    heads = num_heads_of(encoding)
    head = min(head, heads - 1)
    all_q, all_k = q.expand(-1, heads, -1, -1), k.expand(-1, heads, -1, -1)
    bias = encoding.bias(all_q, all_k, positions, k_positions)
    if hasattr(encoding, "num_heads") or hasattr(encoding, "groups"):  # heads may have different rotations
        q, k = (each[:, [head]] for each in encoding.rotate(all_q, all_k, positions, k_positions))
    else:
        q, k = encoding.rotate(q, k, positions, k_positions)
    head_bias = torch.zeros(1, 1, 1) if bias is None else bias[:, head].to(q.dtype)
    return q[:, 0], k[:, 0], head_bias


def _products(
    encoding: PositionEncoding, q: Tensor, k: Tensor, positions: Positions, k_positions: Positions
) -> Float[Tensor, "draws query key"]:
    """Return ``q . k``. If pairs are rotated by class, the product is 0 for later keys."""
    if (classes := encoding.pair_classes(positions, k_positions)) is not None:
        return products(classes, q[:, None], k[:, None])[:, 0]
    return q @ k.mT
