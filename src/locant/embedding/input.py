"""The input of a transformer: token + position + segment, then optionally a norm and dropout."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float, Integer
from torch import Tensor, nn

from locant.embedding.segment import SegmentEmbedding
from locant.embedding.token import Scale, TokenEmbedding
from locant.errors import LocantError, RangeError, ShapeError
from locant.positions import PositionEncoding, Positions
from locant.positions.where import require_positions

__all__ = ["InputEmbedding"]


class InputEmbedding(nn.Module):
    """Turns ids into the vectors that enter the first layer.

    GPT-2 is ``InputEmbedding(50_257, 768, encoding=Learned(1024, 768), dropout=0.1)``; BERT adds
    ``num_segments=2, norm=nn.LayerNorm(768, eps=1e-12)``; the original Transformer is
    ``InputEmbedding(37_000, 512, encoding=Sinusoidal(512), scale="sqrt_d_model", dropout=0.1)``.

    Args:
        vocab_size: rows of the token table.
        d_model: the width of everything.
        encoding: its `embed` door is used here; encodings without one change nothing.
        num_segments: rows of the segment table; 0 for none.
        scale: factor on the token rows alone, see `TokenEmbedding`.
        norm: ``"layer_norm"`` (eps 1e-5), or any module applied to the sum.
        dropout: probability, after the norm.

    >>> from locant.positions import Learned
    >>> embedding = InputEmbedding(10_000, 256, encoding=Learned(512, 256))
    >>> sum(p.numel() for p in embedding.parameters())
    2691072
    >>> import torch
    >>> embedding(torch.zeros(8, 4, dtype=torch.long)).shape
    torch.Size([8, 4, 256])
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        encoding: PositionEncoding | None = None,
        num_segments: int = 0,
        scale: Scale | None = None,
        norm: nn.Module | Literal["layer_norm"] | None = None,
        dropout: float = 0.0,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise RangeError(f"got dropout={dropout}, expected a probability from 0 to less than 1", "dropout=0.1")
        if isinstance(norm, str) and norm != "layer_norm":
            raise LocantError(f"got norm={norm!r}, expected 'layer_norm', a module or None", "norm='layer_norm'")
        if encoding is not None and not isinstance(encoding, PositionEncoding):
            raise LocantError(
                f"got an encoding of type {type(encoding).__name__}, expected a PositionEncoding",
                "locant.encoding('sinusoidal', d_model=...)",
            )
        self.token = TokenEmbedding(vocab_size, d_model, scale=scale, padding_idx=padding_idx)
        self.encoding = PositionEncoding() if encoding is None else encoding
        self.segment = SegmentEmbedding(num_segments, d_model) if num_segments else None
        self.norm = nn.LayerNorm(d_model) if isinstance(norm, str) else norm
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        ids: Integer[Tensor, "batch seq"],
        positions: Positions | None = None,
        segments: Integer[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "batch seq d_model"]:
        """Without `positions` every row counts from 0; without `segments` all tokens are in segment 0."""
        if ids.ndim != 2:
            raise ShapeError(
                f"got ids of shape {tuple(ids.shape)}, expected (batch, seq)", "ids[None] for a single row"
            )
        return self.combine(self.token(ids), positions, segments)

    def combine(
        self,
        x: Float[Tensor, "batch seq d_model"],
        positions: Positions | None = None,
        segments: Integer[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "batch seq d_model"]:
        """The same for vectors that are embedded already, such as image patches: they are not scaled."""
        if x.ndim != 3:
            raise ShapeError(f"got x of shape {tuple(x.shape)}, expected (batch, seq, d_model)", "x.view(1, *x.shape)")
        batch, seq_len, _ = x.shape
        positions = Positions.arange(seq_len, device=x.device) if positions is None else positions
        require_positions(positions)
        positions.require_fits(batch, seq_len, x.device, "the input")
        x = self.encoding.embed(x, positions)
        x = self._with_segments(x, segments)
        if self.norm is not None:
            x = self.norm(x)
        return self.dropout(x)

    def _with_segments(self, x: Tensor, segments: Tensor | None) -> Tensor:
        if self.segment is None:
            if segments is not None:
                raise LocantError("got segments for an InputEmbedding that has none", "num_segments=2 when building it")
            return x
        if segments is None:
            return x + self.segment.weight[0]
        if segments.shape != x.shape[:2]:
            raise ShapeError(
                f"got segments of shape {tuple(segments.shape)}, expected {tuple(x.shape[:2])}", "one segment per token"
            )
        return x + self.segment(segments)
