"""The input of a transformer: token + position + segment, then optionally a norm and dropout."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float, Integer
from torch import Tensor, nn

from locant.arguments import one_of, real, shown, whole
from locant.embedding.fused import embed, why_plain
from locant.embedding.late import LateErrors
from locant.embedding.segment import SegmentEmbedding, require_segments
from locant.embedding.token import Scale, TokenEmbedding
from locant.errors import LocantError, ShapeError
from locant.positions import PositionEncoding, Positions
from locant.positions.positions import require_positions

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
        backend: ``"plain"`` calls one module after another; ``"fused"`` does everything in one pass and raises where
            that is not possible; ``"auto"`` is fused where possible, see `why_plain`. Both have the same parameters
            and the same meaning, both sum the gradients of 16-bit tables in float32, and the fused one rounds less
            often. On a GPU it does not wait to check the ids: an id without a row gives NaN, and a `RangeError` at a
            later call, or in `raise_late_errors`.

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
        backend: Literal["auto", "fused", "plain"] = "auto",
    ) -> None:
        super().__init__()
        one_of("backend", backend, ("auto", "fused", "plain"), "backend='auto'")
        dropout = real("dropout", dropout, low=0, below=1, remedy="dropout=0.1, a probability")
        num_segments = whole("num_segments", num_segments, 0, remedy="num_segments=2, or 0 for none")
        if not (norm is None or isinstance(norm, nn.Module) or (isinstance(norm, str) and norm == "layer_norm")):
            raise LocantError(
                f"got {shown(norm)} for norm, expected 'layer_norm', a module or None", "norm='layer_norm'"
            )
        if encoding is not None and not isinstance(encoding, PositionEncoding):
            raise LocantError(
                f"got an encoding of type {type(encoding).__name__}, expected a PositionEncoding",
                "locant.encoding('sinusoidal', d_model=...)",
            )
        self.token = TokenEmbedding(vocab_size, d_model, scale=scale, padding_idx=padding_idx)
        self.encoding = PositionEncoding() if encoding is None else encoding
        self.segment = SegmentEmbedding(num_segments, d_model) if num_segments else None
        self.norm = nn.LayerNorm(self.token.d_model) if isinstance(norm, str) else norm
        self.dropout = nn.Dropout(dropout)
        self.backend: Literal["auto", "fused", "plain"] = backend
        self._late = LateErrors()

    def forward(
        self,
        ids: Integer[Tensor, "batch seq"],
        positions: Positions | None = None,
        segments: Integer[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "batch seq d_model"]:
        """Without `positions` every row counts from 0; without `segments` all tokens are in segment 0."""
        if not isinstance(ids, Tensor):
            raise ShapeError(f"got ids of type {type(ids).__name__}, expected a tensor", "torch.tensor(ids)")
        if ids.ndim != 2:
            raise ShapeError(
                f"got ids of shape {tuple(ids.shape)}, expected (batch, seq)", "ids[None] for a single row"
            )
        if self.backend != "plain":
            why = why_plain(self)
            if why is None:
                return embed(self, ids, positions, segments, self._late)
            if self.backend == "fused":
                raise LocantError(f"got backend='fused', but {why}", "backend='auto'")
        return self.combine(self.token(ids), positions, segments)

    def raise_late_errors(self) -> None:
        """Wait for what a GPU has been given so far, and raise if an id, position or segment had no row.

        Without it, such an error is raised by the first later call that knows of it.
        """
        self._late.raise_all()

    def combine(
        self,
        x: Float[Tensor, "batch seq d_model"],
        positions: Positions | None = None,
        segments: Integer[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "batch seq d_model"]:
        """The same for vectors that are embedded already, such as image patches: they are not scaled."""
        if not isinstance(x, Tensor):
            raise ShapeError(f"got x of type {type(x).__name__}, expected a tensor", "torch.tensor(x)")
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
        require_segments(self.segment, segments, x.shape[:2])
        if self.segment is None:
            return x
        if x.shape[-1] != self.segment.weight.shape[1]:
            raise ShapeError(
                f"got x of width {x.shape[-1]}, expected {self.segment.weight.shape[1]}", "vectors of the model's width"
            )
        return x + (self.segment.weight[0] if segments is None else self.segment(segments))
