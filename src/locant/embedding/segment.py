"""Segment embeddings: which of a few parts a token belongs to (Devlin et al. 2018, https://arxiv.org/abs/1810.04805)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from locant.arguments import MAX_WIDTH, shape_error, whole
from locant.embedding.deferred_errors import RaisesLater
from locant.embedding.table import rows_of
from locant.errors import LocantError
from locant.tensors import require_tensor

__all__ = ["SegmentEmbedding", "require_segments"]

INIT_STD = 0.02  # BERT


class SegmentEmbedding(RaisesLater):
    """Looks up a row for every segment id: sentence A or B in BERT, a speaker, a modality.

    >>> SegmentEmbedding(2, 8)(torch.tensor([[0, 0, 1]])).shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, num_segments: int, d_model: int) -> None:
        super().__init__()
        rows = whole("num_segments", num_segments, 1, remedy="SegmentEmbedding(2, 768)")
        width = whole("d_model", d_model, 1, MAX_WIDTH, remedy="the width of the token embeddings")
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)

    def forward(self, segments: Integer[Tensor, "*batch"]) -> Float[Tensor, "*batch d_model"]:
        """The row of every segment id; a `RangeError` names the first that has none, on a GPU at a later call."""
        return rows_of(segments, self.weight, "SegmentEmbedding", "num_segments", self._deferred_errors)

    def extra_repr(self) -> str:
        return f"num_segments={self.weight.shape[0]}, d_model={self.weight.shape[1]}"


def require_segments(
    table: SegmentEmbedding | None, segments: Integer[Tensor, "batch seq"] | None, shape: torch.Size
) -> None:
    """Raise unless there is a segment per token, or none at all; and none without a table."""
    if segments is None:
        return
    if table is None:
        raise LocantError("got segments for an InputEmbedding that has none", "num_segments=2 when building it")
    require_tensor("segments", segments)
    if segments.shape != shape:
        raise shape_error("segments", segments, str(tuple(shape)), "torch.zeros_like(ids)")
