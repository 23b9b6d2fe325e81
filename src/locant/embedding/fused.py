"""The input embedding in one pass, on a CPU: when it can be, and what the kernel is given.

The plain path, module after module, is the definition; the fused one agrees with it (in float32 without norm and
dropout bit for bit; a norm's sums are added in another order) and rounds once where the tables are narrower. Which of
the two is taken depends on the modules, their hooks and dtypes and never on how many tokens there are: a token alone
gets the bits it gets in a batch.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from locant.embedding.deferred_errors import RaisesLater
from locant.embedding.table import WholeTable, require_ids
from locant.embedding.token import SegmentEmbedding, TokenEmbedding, require_segments
from locant.kernels.input_embedding import input_embedding
from locant.kernels.transforms import in_forward_mode, is_exporting, is_graph_transformed, is_transforming
from locant.positions import Learned, PositionEncoding, Positions, Sinusoidal
from locant.positions.positions import require_positions

__all__ = ["EmbeddingModules", "embed", "why_plain"]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # no public API
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
MAX_DROPOUT = 1 - 2.0**-16  # of 16 random bits, one value at least has to be kept


class EmbeddingModules(RaisesLater):
    """What an `InputEmbedding` is made of."""

    token: TokenEmbedding
    encoding: PositionEncoding
    segment: SegmentEmbedding | None
    norm: nn.Module | None
    dropout: nn.Dropout
    combine_by: Literal["add", "concat"]


# ---------------------------------------------------------------------- whether


def why_plain(embedding: EmbeddingModules) -> str | None:
    """Why this embedding cannot be computed in one pass, or ``None`` where it can.

    >>> from locant.embedding import InputEmbedding
    >>> why_plain(InputEmbedding(11, 6, norm=nn.RMSNorm(6)))
    'the norm is a RMSNorm'
    >>> why_plain(InputEmbedding(11, 6, norm="layer_norm")) is None
    True
    """
    return _why_these_modules(embedding) or _why_these_tensors(embedding) or _why_now(embedding)


def _why_these_modules(embedding: EmbeddingModules) -> str | None:
    norm, encoding = embedding.norm, embedding.encoding
    if embedding.combine_by != "add":
        return "position is concatenated"
    if type(embedding.token) is not TokenEmbedding or type(embedding.token.table) is not WholeTable:
        return "the token table is split or of another kind"
    if embedding.segment is not None and type(embedding.segment) is not SegmentEmbedding:
        return f"the segments are a {type(embedding.segment).__name__}"
    if not _is_known(encoding):
        return f"the encoding is a {type(encoding).__name__}"
    if norm is not None and (type(norm) is not nn.LayerNorm or norm.normalized_shape != (embedding.token.d_model,)):
        return f"the norm is a {type(norm).__name__}"
    if type(embedding.dropout) is not nn.Dropout or embedding.dropout.p >= MAX_DROPOUT:
        return f"the dropout is {embedding.dropout}"
    if isinstance(encoding, (Learned, Sinusoidal)) and encoding.d_model != embedding.token.d_model:
        return "the encoding is of another width"
    if type(encoding).embed is PositionEncoding.embed and embedding.segment is None and norm is None:
        return "there is nothing to add to the token rows"
    return next((why for part in embedding.children() if (why := _why_called(part))), None)


def _is_known(encoding: PositionEncoding) -> bool:
    """Whether it adds rows that are known here, or nothing."""
    return type(encoding) in (Learned, Sinusoidal) or type(encoding).embed is PositionEncoding.embed


def _why_called(part: nn.Module) -> str | None:
    """Hooks run when a module is called, and so does a `forward` that was put into it."""
    if any(part.__dict__.get(name) for name in HOOKS) or "forward" in part.__dict__ or "embed" in part.__dict__:
        return f"the {type(part).__name__} has hooks or a forward of its own"
    return None


def _why_these_tensors(embedding: EmbeddingModules) -> str | None:
    weight = embedding.token.weight
    for table in embedding.parameters():
        if type(table) not in (Tensor, nn.Parameter):
            return f"a table is a {type(table).__name__}"
        if table.dtype != weight.dtype or table.device != weight.device:
            return "the tables differ in dtype or device"
    if weight.dtype not in DTYPES:
        return f"the tables are of dtype {weight.dtype}"
    if weight.device.type != "cpu":
        return f"there is no kernel for {weight.device.type}"
    return None


def _why_now(embedding: EmbeddingModules) -> str | None:
    weight = embedding.token.weight
    if weight.dtype.itemsize < 4 and torch.is_autocast_enabled(weight.device.type):
        return "autocast chooses dtypes between the modules"
    if is_exporting():
        return "the graph leaves this package"
    if is_graph_transformed():
        return "a transform of functions is at work"
    if torch.compiler.is_compiling():
        return None
    if hooks._has_any_global_hook():  # pyright: ignore[reportPrivateUsage]  # it has no public API
        return "there are hooks on every module"
    if in_forward_mode() or is_transforming():
        return "a transform of functions is at work"
    return None


# ---------------------------------------------------------------------- how


def embed(
    embedding: EmbeddingModules,
    ids: Integer[Tensor, "batch seq"],
    positions: Positions | None,
    segments: Integer[Tensor, "batch seq"] | None,
) -> Float[Tensor, "batch seq d_model"]:
    """The result of the plain path; `why_plain` has to be ``None``."""
    token, norm, segment = embedding.token, embedding.norm, embedding.segment
    weight = token.weight
    ids = require_ids(ids, token.vocab_size, "TokenEmbedding", "vocab_size", weight.device)
    positions = Positions.arange(ids.shape[1], device=ids.device) if positions is None else positions
    index, rows = _position_rows(embedding.encoding, positions, ids, weight.dtype)
    require_segments(segment, segments, ids.shape)
    if segment is not None and segments is not None:
        num_segments = segment.weight.shape[0]
        segments = require_ids(segments, num_segments, "SegmentEmbedding", "num_segments", weight.device)
    p = embedding.dropout.p if embedding.dropout.training else 0.0
    y, _, _ = input_embedding(
        ids, weight, index, rows, segments, None if segment is None else segment.weight,
        norm.weight if isinstance(norm, nn.LayerNorm) else None,
        norm.bias if isinstance(norm, nn.LayerNorm) else None,
        torch.randint(2**63 - 1, (1,), device=ids.device) if p else None,
        token.factor(), token.padding_idx, norm.eps if isinstance(norm, nn.LayerNorm) else None, p,
    )  # fmt: skip
    return y


def _position_rows(
    encoding: PositionEncoding, positions: Positions, ids: Int[Tensor, "batch seq"], dtype: torch.dtype
) -> tuple[Int[Tensor, "#batch seq"] | None, Float[Tensor, "num_positions d_model"] | None]:
    """Which row of which table is added to each token."""
    require_positions(positions)
    positions.require_fits(ids.shape[0], ids.shape[1], ids.device, "the input")
    if positions.start is not None and positions.batch > 1:
        positions = Positions.after(positions.start, positions.seq_len, device=ids.device)  # one row for all
    if isinstance(encoding, Learned):
        positions.require_single_axis("Learned")
        encoding.require_rows(positions)
        return encoding.row_of(positions), encoding.weight
    if isinstance(encoding, Sinusoidal):
        return _sinusoidal_rows(encoding, positions, ids.numel(), torch.promote_types(dtype, torch.float32))
    return None, None


def _sinusoidal_rows(
    encoding: Sinusoidal, positions: Positions, num_tokens: int, dtype: torch.dtype
) -> tuple[Int[Tensor, "#batch seq"], Float[Tensor, "num_positions d_model"]]:
    """A row for every slot if all rows of the batch have the same positions, else one for every position or token."""
    low, high = positions.min_index, positions.max_index
    if positions.batch > 1 and low is not None and high is not None and low >= 0 and high < num_tokens:
        every = Positions.arange(high + 1, device=positions.device)
        return positions.index, encoding.vectors(every, dtype)[0]
    rows = encoding.vectors(positions, dtype).flatten(0, 1)
    return torch.arange(rows.shape[0], device=rows.device).view(positions.index.shape), rows
