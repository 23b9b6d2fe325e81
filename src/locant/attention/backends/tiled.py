"""Attention without a matrix for bias and mask, forward and backward, by one of four methods.

* ``"table"``: if the bias depends only on the distance and both sides count one by one, one number per head and
  distance is enough. See `locant.kernels.distance_attention`.
* ``"documents"``: in packed and padded rows of a few documents, each document uses the method ``"table"``. All
  documents share a table.
* ``"blocks"``: if the bias is a function of two tokens, or of products of tokens with rows of a table, a block of
  queries and keys is computed at a time. See `locant.attention.backends.blocks`.
* ``"tiles"``: otherwise a tile of queries is computed at a time, with the keys to which it attends. The encoding
  computes the bias of the tile, torch's fused attention computes the output, and the backward pass computes both again.
  This needs ``tile x keys`` memory and gives gradients for all inputs of the bias, at the cost of a second forward
  pass. Dropout drops the same weights in both forward passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from locant.attention.backends.blocks import attention_by_blocks
from locant.attention.backends.dense import eager_attention, sdpa_attention, sdpa_obstacle, to_bias_dtype
from locant.attention.inputs import AttentionInputs, AttentionResult, concatenate
from locant.attention.mask import Segment, distance_bounds
from locant.kernels.distance_attention import distance_attention
from locant.kernels.transforms import is_mapping, is_plain_eager
from locant.positions.distances import bias_dtype
from locant.positions.score_bias import ByDistance, Lookup, Pairwise, Written

TILE_BYTES = 2**24
"""The size of a tile's bias over all keys. It determines the number of queries, a power of two, at least MIN_ROWS."""
DEVICE_TILE_BYTES = 2**29
"""The size on accelerators, which need many rows to be efficient: 128 rows for up to 32,768 keys of 32 heads."""
MIN_ROWS = 16


class Method(NamedTuple):
    """One of the four methods, and the reason for it."""

    name: Literal["table", "documents", "blocks", "tiles"]
    reason: str
    rows: list[list[Segment]] | None = None
    """The segments of each row, for the method ``"documents"``."""


def obstacle(inputs: AttentionInputs) -> str | None:
    """Return the reason why the tiled backend does not support these inputs, or ``None``."""
    if inputs.return_weights:
        return "which never stores the weights for return_weights=True"
    if inputs.is_transformed:
        return "which has no derivative in forward mode or inside torch.func.grad and similar transforms"
    if torch.compiler.is_exporting():
        return "whose tiles would fix the length of an exported program"
    return None


def choose_method(inputs: AttentionInputs) -> Method:
    """Choose one of the four methods for these inputs."""
    on_cpu, bias = inputs.q.is_cpu and inputs.dropout_p == 0.0, inputs.bias
    if on_cpu and (bias is None or isinstance(bias, ByDistance)):
        reason = "one number per head and distance is enough"
        if inputs.mask.offset is not None:
            return Method("table", reason)
        if (rows := inputs.mask.packed_documents()) is not None:
            return Method("documents", f"for each document, {reason}", rows)
    is_one = inputs.q.shape[0] == 1 and inputs.q.shape[2] == 1
    if on_cpu and is_one and inputs.mask.offset is not None and isinstance(bias, Lookup | Pairwise | Written):
        return Method("table", "there is one query, so each distance occurs once")
    has_blocks = isinstance(bias, Lookup | Pairwise) and bias.cost_grows_with_heads
    can_use_blocks = on_cpu and has_blocks and inputs.q.shape[2] >= MIN_ROWS
    if can_use_blocks and not (torch.compiler.is_compiling() or is_mapping()):
        return Method("blocks", "mask and bias are computed for a block of queries and keys at a time")
    return Method("tiles", "mask and bias are computed for a tile of queries at a time")


def tiled_attention(inputs: AttentionInputs, method: Method) -> AttentionResult:
    """Return the output and, if needed, the log-sum-exp."""
    if method.rows is not None:
        return _attend_by_document(inputs, method.rows)
    if method.name == "tiles":
        return _attend_by_tile(inputs)
    return (_attend_with_table if method.name == "table" else attention_by_blocks)(inputs.without_padding())


def _attend_with_table(inputs: AttentionInputs) -> AttentionResult:
    has_hidden_keys = inputs.mask.window is not None and inputs.is_decoding
    # Removing keys would fix the length of compiled code. There the kernel skips hidden keys.
    if has_hidden_keys and not torch.compiler.is_compiling():
        inputs = inputs.tile(0, inputs.q.shape[2])
    q, k, v, offset = inputs.q, inputs.k, inputs.v, inputs.mask.offset or 0
    table = _table(inputs, offset - k.shape[2] + 1, offset + q.shape[2] - 1)
    bounds = inputs.mask.distance_bounds(offset)
    return AttentionResult(*distance_attention(q, k, v, table, *bounds, inputs.scale, inputs.softcap))


def _table(inputs: AttentionInputs, first: int, last: int) -> Float[Tensor, "#heads distances"]:
    """Return the bias of the distances `first` to `last`."""
    bias = inputs.bias
    if isinstance(bias, ByDistance):
        return bias.table(first, last)
    if bias is not None and (matrix := bias.dense()) is not None:
        return matrix[0, :, 0].flip(-1)  # there is one query
    return torch.zeros(1, last - first + 1, dtype=bias_dtype(inputs.q), device=inputs.q.device)


def _attend_by_document(inputs: AttentionInputs, rows: list[list[Segment]]) -> AttentionResult:
    """Attend within every document. `rows` is a single row if all rows are the same."""
    longest = max(part.length for row in rows for part in row if part.is_document)
    table = _table(inputs, 1 - longest, longest - 1)
    result = _empty_result(inputs.q, inputs.v, table, inputs.q.shape[2]) if is_plain_eager() else ()
    tensors = (inputs.q, inputs.k, inputs.v, *result)
    if len(rows) == 1:
        return _attend_to_row(inputs, table, rows[0], *tensors)
    row_tensors = zip(rows, *(x.split(1) for x in tensors), strict=True)
    parts = [_attend_to_row(inputs, table, *each) for each in row_tensors]
    return AttentionResult(*result) if result else concatenate(parts, dim=0)


def _attend_to_row(
    inputs: AttentionInputs, table: Tensor, row: list[Segment], q: Tensor, k: Tensor, v: Tensor, *onto: Tensor
) -> AttentionResult:
    """Attend within every document of a row. `table` has an entry for each distance within the longest document.

    If `onto` is an empty output and log-sum-exp, the results are written to it. Otherwise they are concatenated.
    """
    middle, parts, lengths = table.shape[1] // 2, list[AttentionResult](), [part.length for part in row]
    split = (_Split.apply(x, lengths) for x in (q, k, v))
    outputs = (None,) * len(row) if not onto else zip(*(x.split(lengths, dim=2) for x in onto), strict=True)
    for (length, is_document), q_part, k_part, v_part, output in zip(row, *split, outputs, strict=True):
        if is_document:
            entries = table[:, middle - length + 1 : middle + length]
            first, last = distance_bounds(0, length, length, inputs.mask.causal, inputs.mask.window)
            options = (first, last, inputs.scale, inputs.softcap)
            parts.append(AttentionResult(*distance_attention(q_part, k_part, v_part, entries, *options, onto=output)))
        elif output is None:
            parts.append(AttentionResult(*_empty_result(q, v, table, length)))
    return AttentionResult(*onto) if onto else concatenate(parts, dim=2)


def _empty_result(q: Tensor, v: Tensor, table: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp for this number of queries without a key."""
    return q.new_zeros(*q.shape[:2], queries, v.shape[-1]), table.new_full((*q.shape[:2], queries), float("-inf"))


class _Split(torch.autograd.Function):
    """``x.split(lengths, dim=2)``. Its backward disables autocast, which cannot concatenate float16 on a CPU."""

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


def _attend_by_tile(inputs: AttentionInputs) -> AttentionResult:
    is_plain, dtype, queries = is_plain_eager(), inputs.q.dtype, inputs.q.shape[2]
    inputs = _to_tile_dtype(inputs if is_plain else inputs.without_padding())
    rows = _rows_per_tile(inputs)
    if is_plain:
        return _write_parts((_attend_to_tile(tile) for tile in _clear_tiles(inputs, rows)), queries, dtype)
    tiles = (inputs.tile(start, start + rows) for start in range(0, queries, rows))
    if inputs.needs_gradient and not is_mapping():  # vmap separates its samples before the backward pass begins
        dropout = inputs.dropout_p > 0
        parts = [checkpoint(_attend_to_tile, tile, use_reentrant=False, preserve_rng_state=dropout) for tile in tiles]
    else:
        parts = [_attend_to_tile(tile) for tile in tiles]
    result = concatenate(parts, dim=2)
    return result._replace(y=result.y.to(dtype))


def _clear_tiles(inputs: AttentionInputs, rows: int) -> Iterator[AttentionInputs]:
    """Yield tiles with zeros at padding.

    Each tile copies its own keys. When the copies are as large as all keys, all keys are copied once.
    """
    is_decoding, copied, is_clean = inputs.is_decoding, 0, False
    inputs = inputs.with_padding_order(is_decoding)
    for start in range(0, inputs.q.shape[2], rows):
        if not is_clean and copied >= inputs.k.shape[2]:
            inputs, is_clean = inputs.with_zero_padding(is_decoding), True
        tile = inputs.tile(start, start + rows)
        cleared = tile if is_clean else tile.with_zero_padding(is_decoding)
        copied += 0 if cleared.k is tile.k else tile.k.shape[2]
        yield cleared


def _write_parts(parts: Iterator[AttentionResult], queries: int, dtype: torch.dtype) -> AttentionResult:
    """Write the outputs and log-sum-exps of consecutive tiles into one result, one tile at a time."""
    results, start = list[Tensor](), 0
    for part in parts:
        stop, tensors = start + part.y.shape[2], [x for x in (part.y, part.lse) if x is not None]
        if not results:
            results = [x.new_empty(*x.shape[:2], queries, *x.shape[3:]) for x in (part.y.to(dtype), *tensors[1:])]
        for result, x in zip(results, tensors, strict=True):
            result[:, :, start:stop] = x
        start = stop
    return AttentionResult(*results)


def _to_tile_dtype(inputs: AttentionInputs) -> AttentionInputs:
    """Convert inputs to the dtype of the tiles, so that keys and values are converted once and not in every tile."""
    if _is_fused(inputs):
        return to_bias_dtype(inputs)
    return inputs.with_tensors(*(x.to(bias_dtype(x)) for x in (inputs.q, inputs.k, inputs.v)))


def _attend_to_tile(tile: AttentionInputs) -> AttentionResult:
    tile = dataclasses.replace(tile)  # a checkpoint must not find the bias that the first pass stored
    return AttentionResult(sdpa_attention(tile)) if _is_fused(tile) else eager_attention(tile)


def _is_fused(inputs: AttentionInputs) -> bool:
    """Return whether torch's fused attention can compute the tiles. Otherwise plain operations do."""
    return sdpa_obstacle(inputs) is None


def _rows_per_tile(inputs: AttentionInputs) -> int:
    row = inputs.q.shape[0] * inputs.q.shape[1] * inputs.k.shape[2] * 4
    limit = TILE_BYTES if inputs.q.device.type == "cpu" else DEVICE_TILE_BYTES
    limit = limit if _is_fused(inputs) else limit // 4  # scores, weights and both gradients
    rows = MIN_ROWS
    while 2 * rows * row <= limit:
        rows *= 2
    return rows
