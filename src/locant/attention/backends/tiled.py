"""Attention without a matrix for bias and mask, forward or backward, in one of four ways.

* ``"table"``: where the bias follows from the distance and both sides count one by one, one number per head and
  distance is all that is held: see `locant.kernels.distance_attention`.
* ``"documents"``: in packed and padded rows of a few documents, each of these is such attention, with one table.
* ``"blocks"``: where the bias is a function of two tokens, or made of products of them with rows of a table, a block
  of queries and keys is written out at a time: see `locant.attention.backends.blocks`.
* ``"tiles"``: otherwise a tile of queries at a time asks the encoding for the bias of its queries and of the keys that
  one of them attends to, goes through torch's fused attention, and is computed once more in the backward pass:
  ``tile x keys`` memory, gradients for everything the bias is made of, and a second forward pass as the price. Dropout
  drops the same weights both times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from locant.attention.backends.blocks import attention_by_blocks
from locant.attention.backends.dense import as_wide_as_bias, eager_attention, sdpa_attention, sdpa_obstacle
from locant.attention.inputs import Attended, AttentionInputs, concatenate
from locant.attention.mask import Segment, distance_bounds
from locant.kernels.distance_attention import distance_attention
from locant.kernels.transforms import is_mapping, wants_result_alone
from locant.positions.pairs import bias_dtype
from locant.positions.score_bias import ByDistance, Lookup, Pairwise

TILE_BYTES = 2**24
"""Of a tile's bias over all keys: queries are taken a power of two at a time, and no fewer than FEWEST_ROWS."""
DEVICE_TILE_BYTES = 2**29
"""The same on accelerators, whose kernels are only busy with many rows: 128 up to 32 768 keys of 32 heads."""
FEWEST_ROWS = 16


@dataclass(frozen=True)
class Method:
    """One of the four, and why."""

    name: Literal["table", "documents", "blocks", "tiles"]
    reason: str
    rows: list[list[Segment]] | None = None
    """What the rows consist of, where they are taken by documents."""


def obstacle(inputs: AttentionInputs) -> str | None:
    """Why it cannot run, or ``None``."""
    if inputs.return_weights:
        return "which never holds the weights of return_weights=True"
    if inputs.is_transformed:
        return "which has no derivative in forward mode or inside torch.func.grad and the like"
    if torch.compiler.is_exporting():
        return "whose tiles would fix the length of an exported program"
    return None


def choose_method(inputs: AttentionInputs) -> Method:
    """Which of the four ways these inputs allow."""
    on_cpu = inputs.q.device.type == "cpu" and inputs.dropout_p == 0.0
    if on_cpu and isinstance(inputs.bias, ByDistance | None):
        held = "one number per head and distance is enough"
        if inputs.mask.offset is not None:
            return Method("table", held)
        if (rows := inputs.mask.packed_documents()) is not None:
            return Method("documents", f"for each document, {held}", rows)
    is_one = inputs.q.shape[0] == 1 and inputs.q.shape[2] == 1
    if on_cpu and is_one and inputs.mask.offset is not None and isinstance(inputs.bias, Lookup | Pairwise):
        return Method("table", "of one query each distance has a number of its own")
    in_parts = isinstance(inputs.bias, Lookup | Pairwise) and inputs.bias.heads_differ
    if on_cpu and in_parts and inputs.q.shape[2] >= FEWEST_ROWS and not (torch.compiler.is_compiling() or is_mapping()):
        return Method("blocks", "mask and bias are held for a block of queries and keys at a time")
    return Method("tiles", "mask and bias are held for a tile of queries at a time")


def tiled_attention(inputs: AttentionInputs, method: Method) -> Attended:
    """The output and, where it is needed, the log-sum-exp."""
    if method.rows is not None:
        return _by_documents(inputs, method.rows)
    if method.name == "tiles":
        return _by_tiles(inputs)
    return (_by_table if method.name == "table" else attention_by_blocks)(inputs.without_padding())


def _by_table(inputs: AttentionInputs) -> Attended:
    cuts = inputs.mask.window is not None and inputs.is_decoding
    if cuts and not torch.compiler.is_compiling():  # there a cut would fix the length; the kernel skips hidden keys
        inputs = inputs.tile(0, inputs.q.shape[2])
    q, k, v, offset = inputs.q, inputs.k, inputs.v, inputs.mask.offset or 0
    table = _table(inputs, offset - k.shape[2] + 1, offset + q.shape[2] - 1)
    bounds, numbers = inputs.mask.distance_bounds(offset), (inputs.scale, inputs.softcap)
    return Attended(*distance_attention(q, k, v, table, *bounds, *numbers))


def _table(inputs: AttentionInputs, first: int, last: int) -> Float[Tensor, "#heads distances"]:
    """The bias of every distance there is, from that of the first query and the last key on."""
    if isinstance(inputs.bias, ByDistance):
        return inputs.bias.table(first, last)
    if isinstance(inputs.bias, Lookup | Pairwise):  # of one query
        return inputs.bias.dense()[0, :, 0].flip(-1)
    return torch.zeros(1, last - first + 1, dtype=bias_dtype(inputs.q), device=inputs.q.device)


def _by_documents(inputs: AttentionInputs, rows: list[list[Segment]]) -> Attended:
    """Attention within every document; `rows` holds one row where all are the same."""
    longest = max(part.length for row in rows for part in row if part.is_document)
    table = _table(inputs, 1 - longest, longest - 1)
    whole = _nothing(inputs.q, inputs.v, table, inputs.q.shape[2]) if wants_result_alone() else ()
    tensors = (inputs.q, inputs.k, inputs.v, *whole)
    if len(rows) == 1:
        return _row(inputs, table, rows[0], *tensors)
    of_rows = zip(rows, *(x.split(1) for x in tensors), strict=True)
    parts = [_row(inputs, table, *each) for each in of_rows]
    return Attended(*whole) if whole else concatenate(parts, dim=0)


def _row(
    inputs: AttentionInputs, table: Tensor, row: list[Segment], q: Tensor, k: Tensor, v: Tensor, *onto: Tensor
) -> Attended:
    """`table` has an entry for each distance within the longest document.

    Documents are written to `onto`, output and log-sum-exp of no query yet, if given, and joined otherwise.
    """
    middle, parts, lengths = table.shape[1] // 2, list[Attended](), [part.length for part in row]
    split = (_Split.apply(x, lengths) for x in (q, k, v))
    places = (None,) * len(row) if not onto else zip(*(x.split(lengths, dim=2) for x in onto), strict=True)
    for (length, is_document), q_part, k_part, v_part, place in zip(row, *split, places, strict=True):
        if is_document:
            entries = table[:, middle - length + 1 : middle + length]
            first, last = distance_bounds(0, length, length, inputs.mask.causal, inputs.mask.window)
            numbers = (first, last, inputs.scale, inputs.softcap)
            parts.append(Attended(*distance_attention(q_part, k_part, v_part, entries, *numbers, onto=place)))
        elif place is None:
            parts.append(Attended(*_nothing(q, v, table, length)))
    return Attended(*onto) if onto else concatenate(parts, dim=2)


def _nothing(q: Tensor, v: Tensor, table: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of so many queries that attend to nothing."""
    return q.new_zeros(*q.shape[:2], queries, v.shape[-1]), table.new_full((*q.shape[:2], queries), float("-inf"))


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


def _by_tiles(inputs: AttentionInputs) -> Attended:
    alone, dtype, queries = wants_result_alone(), inputs.q.dtype, inputs.q.shape[2]
    inputs = _as_wide_as_tiles(inputs if alone else inputs.without_padding())
    rows = _rows_of_tile(inputs)
    if alone:
        return _written((_one_tile(tile) for tile in _without_padding(inputs, rows)), queries, dtype)
    tiles = (inputs.tile(start, start + rows) for start in range(0, queries, rows))
    if inputs.needs_gradient and not is_mapping():  # vmap's samples are taken apart before the backward pass comes
        draws = inputs.dropout_p > 0
        parts = [checkpoint(_one_tile, tile, use_reentrant=False, preserve_rng_state=draws) for tile in tiles]
    else:
        parts = [_one_tile(tile) for tile in tiles]
    result = concatenate(parts, dim=2)
    return result._replace(y=result.y.to(dtype))


def _without_padding(inputs: AttentionInputs, rows: int) -> Iterator[AttentionInputs]:
    """Tiles with zeros at padding: those of a tile are copied, until as many keys have been as there are."""
    is_decoding, copied, is_clean = inputs.is_decoding, 0, False
    inputs = inputs.in_order(is_decoding)
    for start in range(0, inputs.q.shape[2], rows):
        if not is_clean and copied >= inputs.k.shape[2]:
            inputs, is_clean = inputs.cleared(is_decoding), True
        tile = inputs.tile(start, start + rows)
        cleared = tile if is_clean else tile.cleared(is_decoding)
        copied += 0 if cleared.k is tile.k else tile.k.shape[2]
        yield cleared


def _written(parts: Iterator[Attended], queries: int, dtype: torch.dtype) -> Attended:
    """Outputs and log-sum-exps of some queries after the other, each written to its place before the next is made."""
    whole, start = list[Tensor](), 0
    for part in parts:
        stop, tensors = start + part.y.shape[2], [x for x in (part.y, part.lse) if x is not None]
        if not whole:
            whole = [x.new_empty(*x.shape[:2], queries, *x.shape[3:]) for x in (part.y.to(dtype), *tensors[1:])]
        for place, x in zip(whole, tensors, strict=True):
            place[:, :, start:stop] = x
        start = stop
    return Attended(*whole)


def _as_wide_as_tiles(inputs: AttentionInputs) -> AttentionInputs:
    """In the dtype that tiles are computed in: keys and values are converted once, and not in every tile."""
    if _fused(inputs):
        return as_wide_as_bias(inputs)
    q, k, v = (x.to(bias_dtype(x)) for x in (inputs.q, inputs.k, inputs.v))
    return dataclasses.replace(inputs, q=q, k=k, v=v)


def _one_tile(tile: AttentionInputs) -> Attended:
    tile = dataclasses.replace(tile)  # what the first pass has asked for is not what a checkpoint may find
    return Attended(sdpa_attention(tile)) if _fused(tile) else eager_attention(tile)


def _fused(inputs: AttentionInputs) -> bool:
    """Whether tiles go through torch's fused attention, or are written out for what that lacks."""
    return sdpa_obstacle(inputs) is None


def _rows_of_tile(inputs: AttentionInputs) -> int:
    row = inputs.q.shape[0] * inputs.q.shape[1] * inputs.k.shape[2] * 4
    limit = TILE_BYTES if inputs.q.device.type == "cpu" else DEVICE_TILE_BYTES
    limit = limit if _fused(inputs) else limit // 4  # scores, weights and both gradients
    rows = FEWEST_ROWS
    while 2 * rows * row <= limit:
        rows *= 2
    return rows
