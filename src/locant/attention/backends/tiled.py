"""Attention without a matrix for bias and mask, forward or backward, in one of three ways.

* ``"table"``: where the bias follows from the distance and both sides count one by one, one number per head and
  distance is all that is held: see `locant.kernels.distance_attention`.
* ``"documents"``: in packed and padded rows of a few documents, each of these is such attention, with one table.
* ``"tiles"``: otherwise a tile of queries at a time asks the encoding for the bias of its queries and of the keys that
  one of them attends to, goes through torch's fused attention, and is computed once more in the backward pass:
  ``tile x keys`` memory, gradients for everything the bias is made of, and a second forward pass as the price. Dropout
  drops the same weights both times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from locant.attention.backends.sdpa import as_wide_as_bias, sdpa_attention
from locant.attention.inputs import AttentionInputs
from locant.attention.mask import Segment, distance_bounds
from locant.kernels.distance_attention import distance_attention
from locant.kernels.transforms import is_mapping
from locant.positions.base import bias_dtype, has_bias
from locant.positions.distance_bias import DistanceBias, follows_distance

__all__ = ["Way", "obstacle", "tiled_attention", "way_of"]

TILE_BYTES = 2**24
"""Of a tile's bias over all keys: queries are taken a power of two at a time, and no fewer than FEWEST_ROWS."""
FEWEST_ROWS = 16


@dataclass(frozen=True)
class Way:
    """One of the three, and why."""

    name: Literal["table", "documents", "tiles"]
    reason: str
    rows: list[list[Segment]] | None = None
    """What the rows consist of, where they are taken by documents."""


def obstacle(inputs: AttentionInputs) -> str | None:
    """Why it cannot run, or ``None``."""
    if inputs.return_weights:
        return "which never holds the weights of return_weights=True"
    if inputs.softcap is not None or inputs.needs_lse:
        return "which does not know softcap, sinks and return_lse=True yet"
    if inputs.is_transformed:
        return "which has no derivative in forward mode or inside torch.func.grad and the like"
    return None


def way_of(inputs: AttentionInputs) -> Way:
    """Which of the three ways these inputs allow."""
    encoding = inputs.encoding
    follows = encoding is None or not has_bias(encoding) or follows_distance(encoding)
    if follows and inputs.q.device.type == "cpu" and inputs.dropout_p == 0.0:
        if inputs.mask.offset is not None:
            return Way("table", "one number per head and distance is enough")
        if (rows := inputs.mask.packed_documents()) is not None:
            return Way("documents", "for each document, one number per head and distance is enough", rows)
    return Way("tiles", "mask and bias are held for a tile of queries at a time")


def tiled_attention(inputs: AttentionInputs, way: Way) -> Float[Tensor, "batch heads query value_dim"]:
    """The output in the dtype of `q`."""
    if way.rows is not None:
        return _by_documents(inputs, way.rows)
    return _by_table(inputs) if way.name == "table" else _by_tiles(inputs)


# ---------------------------------------------------------------------- one number per head and distance


def _by_table(inputs: AttentionInputs) -> Tensor:
    q, k, v, offset = inputs.q, inputs.k, inputs.v, inputs.mask.offset or 0
    table = _table(inputs, q.shape[2], k.shape[2], offset)
    return distance_attention(q, k, v, table, *inputs.mask.distance_bounds(offset), inputs.scale)


def _table(inputs: AttentionInputs, queries: int, keys: int, offset: int) -> Float[Tensor, "#heads distances"]:
    """The bias of every distance there is, from that of the first query and the last key on."""
    first, last, encoding = offset - keys + 1, offset + queries - 1, inputs.encoding
    if isinstance(encoding, DistanceBias):
        return encoding.distance_table(inputs.q, first, last)
    return torch.zeros(1, last - first + 1, dtype=bias_dtype(inputs.q), device=inputs.q.device)


# ---------------------------------------------------------------------- packed documents


def _by_documents(inputs: AttentionInputs, rows: list[list[Segment]]) -> Tensor:
    """Attention within every document; `rows` holds one row where all are the same."""
    longest = max(part.length for row in rows for part in row if part.is_document)
    table = _table(inputs, longest, longest, 0)
    if len(rows) == 1:
        return _row(inputs, inputs.q, inputs.k, inputs.v, table, rows[0])
    by_row = zip(inputs.q.split(1), inputs.k.split(1), inputs.v.split(1), rows, strict=True)
    return torch.cat([_row(inputs, q, k, v, table, row) for q, k, v, row in by_row])


def _row(inputs: AttentionInputs, q: Tensor, k: Tensor, v: Tensor, table: Tensor, row: list[Segment]) -> Tensor:
    """`table` has an entry for each distance within the longest document."""
    middle, outputs = table.shape[1] // 2, list[Tensor]()
    split = (_Split.apply(x, [part.length for part in row]) for x in (q, k, v))
    for (length, is_document), q_part, k_part, v_part in zip(row, *split, strict=True):
        if is_document:
            entries = table[:, middle - length + 1 : middle + length]
            first, last = distance_bounds(0, length, length, inputs.mask.causal, inputs.mask.window)
            outputs.append(distance_attention(q_part, k_part, v_part, entries, first, last, inputs.scale))
        else:
            outputs.append(q.new_zeros(*q.shape[:2], length, v.shape[-1]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


class _Split(torch.autograd.Function):
    """``x.split(lengths, dim=2)``, with a gradient that autocast leaves alone: on a CPU it cannot join float16."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
        return x.split(lengths, dim=2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        with torch.autocast("cpu", enabled=False):
            return torch.cat(grads, dim=2), None


# ---------------------------------------------------------------------- tiles of queries


def _by_tiles(inputs: AttentionInputs) -> Tensor:
    parts: list[Tensor] = []
    dtype, inputs = inputs.q.dtype, as_wide_as_bias(inputs)  # once, and not the keys of every tile
    rows = _rows(inputs)
    again = inputs.needs_gradient and not is_mapping()  # vmap's samples are taken apart before the backward pass comes
    for start in range(0, inputs.q.shape[2], rows):
        tile = inputs.tile(start, start + rows)
        if again:
            parts.append(checkpoint(sdpa_attention, tile, use_reentrant=False, preserve_rng_state=tile.dropout_p > 0))
        else:
            parts.append(sdpa_attention(tile))
    return torch.cat(parts, dim=2).to(dtype)


def _rows(inputs: AttentionInputs) -> int:
    """Queries of a tile."""
    row = inputs.q.shape[0] * inputs.q.shape[1] * inputs.k.shape[2] * 4
    rows = FEWEST_ROWS
    while 2 * rows * row <= TILE_BYTES:
        rows *= 2
    return rows
