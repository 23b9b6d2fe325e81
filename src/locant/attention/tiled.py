"""Attention in tiles of queries: the bias of one tile is all that is held of it, in the backward pass too.

Where the bias follows from the distance and both sides count plainly, not even that: see `distance.py`; nor in packed
and padded rows that consist of a few runs: see `runs.py`. Otherwise each tile asks the encoding for the bias of its
queries and of the keys that one of them may see, goes through torch's fused attention, and is computed once more in the
backward pass: ``tile x keys`` memory, gradients for everything the bias is made of, and a second forward pass as the
price. Dropout drops the same weights both times.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from locant.attention.distance import distance_attention
from locant.attention.gradients import needs_gradient
from locant.attention.padding import all_blanked
from locant.attention.runs import attend_by_runs, longest_run, runs_of
from locant.attention.sdpa import sdpa_attention
from locant.attention.visibility import seen_distances, seen_keys, steps_ahead, visibility
from locant.kernels.transforms import is_mapping
from locant.positions import PositionEncoding, Positions
from locant.positions.base import bias_dtype, follows_distance, has_bias

__all__ = ["takes_a_table", "tiled_attention"]

TILE_BYTES = 2**24
"""Of a tile's bias over all keys: queries are taken a power of two at a time, and no fewer than FEWEST_ROWS."""
FEWEST_ROWS = 16


def takes_a_table(
    q: Tensor, encoding: PositionEncoding | None, positions: Positions, keys: Positions, dropout_p: float
) -> bool:
    """Whether one number per head and distance says all there is to say."""
    return steps_ahead(positions, keys) is not None and _by_distance(q, encoding, dropout_p)


def _by_distance(q: Tensor, encoding: PositionEncoding | None, dropout_p: float) -> bool:
    follows = encoding is None or not has_bias(encoding) or follows_distance(encoding)
    return follows and q.device.type == "cpu" and dropout_p == 0.0


def tiled_attention(
    q: Float[Tensor, "batch heads query head_dim"],
    k: Float[Tensor, "batch kv_heads key head_dim"],
    v: Float[Tensor, "batch kv_heads key value_dim"],
    encoding: PositionEncoding | None,
    positions: Positions,
    k_positions: Positions | None,
    causal: bool,
    window: int | None,
    scale: float,
    dropout_p: float,
) -> Float[Tensor, "batch heads query value_dim"]:
    """The output in the dtype of `q`; the bias is asked of the encoding, tile by tile."""
    keys = positions if k_positions is None else k_positions

    def attend(q: Tensor, k: Tensor, v: Tensor, where: Positions, keys: Positions) -> Tensor:
        bias = None if encoding is None else encoding.bias(q, k, where, keys)
        return sdpa_attention(q, k, v, bias, visibility(where, keys, causal, window), scale, dropout_p)

    if not q.numel() or not k.numel() or not v.numel():
        return attend(q, k, v, positions, keys)
    ahead = steps_ahead(positions, keys)
    if ahead is not None and takes_a_table(q, encoding, positions, keys, dropout_p):
        first, last = seen_distances(ahead, q.shape[2], k.shape[2], causal, window)
        return distance_attention(q, k, v, _table(q, k, encoding, ahead), first, last, scale)
    if k_positions is None and _by_distance(q, encoding, dropout_p) and (runs := runs_of(positions)):
        longest = longest_run(runs)
        table = _table(q[:, :, :longest], k[:, :, :longest], encoding, 0)
        return attend_by_runs(q, k, v, table, runs, causal, window, scale)
    q, k, v = all_blanked(q, k, v, encoding, positions, keys)
    parts: list[Tensor] = []
    rows = _rows(q.shape, keys.seq_len)
    wanted = torch.is_grad_enabled() and needs_gradient(q, k, v, encoding)
    again = wanted and not is_mapping()  # the backward pass comes when the samples of vmap are taken apart
    for start in range(0, q.shape[2], rows):
        where = positions.slice(start, start + rows)
        low, high = seen_keys(where, keys, causal, window)
        tile = (q[:, :, start : start + rows], k[:, :, low:high], v[:, :, low:high], where, keys.slice(low, high))
        if again:
            parts.append(checkpoint(attend, *tile, use_reentrant=False, preserve_rng_state=dropout_p > 0))
        else:
            parts.append(attend(*tile))
    return torch.cat(parts, dim=2)


def _rows(shape: torch.Size, keys: int) -> int:
    row = shape[0] * shape[1] * keys * 4
    rows = FEWEST_ROWS
    while 2 * rows * row <= TILE_BYTES:
        rows *= 2
    return rows


def _table(q: Tensor, k: Tensor, encoding: PositionEncoding | None, ahead: int) -> Float[Tensor, "#heads distances"]:
    """The bias of every distance there is, that of the first query and the last key first.

    Asked for as the bias of one query, which stands as far behind its first key as the last query behind the first key.
    """
    count = q.shape[2] + k.shape[2] - 1
    farthest = ahead + q.shape[2] - 1
    place = max(farthest, 0)
    query = Positions.after(place, 1, device=q.device)
    row = Positions.after(place - farthest, count, device=q.device)
    asked = (q[:1, :, :1], k[:1, :, :1].expand(-1, -1, count, -1), query, row)
    bias = None if encoding is None else encoding.bias(*asked)
    return torch.zeros(1, count, dtype=bias_dtype(q), device=q.device) if bias is None else bias[0, :, 0].flip(-1)
