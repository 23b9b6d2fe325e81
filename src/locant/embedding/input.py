"""The input of a transformer: token + segment + position, in this order, then optionally a norm and dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from locant.arguments import MAX_WIDTH, one_of, real, shape_error, shown, whole
from locant.embedding.fused import EmbeddingModules, embed, why_plain
from locant.embedding.token import Scale, SegmentEmbedding, TokenEmbedding, require_segments
from locant.errors import LocantError, RangeError
from locant.positions import PositionEncoding, Positions
from locant.positions.positions import require_positions
from locant.tensors import require_tensor

__all__ = ["InputEmbedding"]


class InputEmbedding(EmbeddingModules):
    """Turns ids into the vectors that enter the first layer.

    GPT-2 is ``InputEmbedding(50_257, 768, encoding=Learned(1024, 768), dropout=0.1)``; BERT adds
    ``num_segments=2, norm=nn.LayerNorm(768, eps=1e-12)``; the original Transformer is
    ``InputEmbedding(37_000, 512, encoding=Sinusoidal(512), scale="sqrt_d_model", dropout=0.1)``.

    Args:
        vocab_size: rows of the token table.
        d_model: the width of everything.
        encoding: its `embed` door is used here; encodings without one change nothing.
        combine: ``"add"`` the position vectors to the token rows, or ``"concat"`` them: tokens then get the first
            ``d_model - encoding.d_model`` dimensions, and position the others.
        num_segments: rows of the segment table, which are added; 0 for none.
        scale, init_std, padding_idx: of the token rows alone, see `TokenEmbedding`.
        norm: ``"layer_norm"`` (eps 1e-5), or any module applied to the sum.
        dropout: probability, after the norm.
        backend: ``"plain"`` calls one module after another; ``"fused"`` does everything in one pass and raises where
            that is not possible, as on a GPU, where ``torch.compile`` makes one kernel of the modules; ``"auto"`` is
            fused where possible, see `why_plain`. The fused one rounds less often. On a GPU nothing waits to check the
            ids: an id without a row gives NaN, and a `RangeError` at a later call or in `raise_deferred_errors`.

    >>> from locant.positions import Learned
    >>> embedding = InputEmbedding(10_000, 256, encoding=Learned(512, 256))
    >>> embedding(torch.zeros(8, 4, dtype=torch.long)).shape
    torch.Size([8, 4, 256])
    >>> InputEmbedding(10_000, 256, encoding=Learned(512, 32), combine="concat").token.d_model
    224
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        encoding: PositionEncoding | None = None,
        combine: Literal["add", "concat"] = "add",
        num_segments: int = 0,
        scale: Scale | None = None,
        init_std: float | None = None,
        norm: nn.Module | Literal["layer_norm"] | None = None,
        dropout: float = 0.0,
        padding_idx: int | None = None,
        backend: Literal["auto", "fused", "plain"] = "auto",
    ) -> None:
        super().__init__()
        one_of("backend", backend, ("auto", "fused", "plain"))
        dropout = real("dropout", dropout, low=0, below=1, remedy="dropout=0.1, a probability")
        num_segments = whole("num_segments", num_segments, 0, remedy="num_segments=2, or 0 for none")
        if not (norm is None or isinstance(norm, nn.Module) or (isinstance(norm, str) and norm == "layer_norm")):
            got = f"got {shown(norm)} for norm, expected 'layer_norm', a module or None"
            raise RangeError(got, "norm='layer_norm'")
        encoding = PositionEncoding() if encoding is None else encoding
        if not isinstance(encoding, PositionEncoding):
            got = f"got an encoding of type {type(encoding).__name__}, expected a PositionEncoding"
            raise RangeError(got, "locant.encoding('sinusoidal', d_model=...)")
        one_of("combine", combine, ("add", "concat"))
        self.combine_by = combine
        width = d_model if combine == "add" else _token_width(d_model, encoding)
        self.token = TokenEmbedding(vocab_size, width, scale=scale, init_std=init_std, padding_idx=padding_idx)
        self.encoding = encoding
        self.segment = SegmentEmbedding(num_segments, d_model) if num_segments else None
        self.norm = nn.LayerNorm(int(d_model)) if isinstance(norm, str) else norm
        self.dropout = nn.Dropout(dropout)
        self.backend: Literal["auto", "fused", "plain"] = backend

    @classmethod
    def from_pretrained(cls, folder: Path | str, *, dtype: torch.dtype | None = None) -> InputEmbedding:
        """What a published model does before its first layer, with its tables: of GPT-2, BERT, Llama, T5 and others.

        Positions that act in the layers are no part of it: see `encoding_from_config`. As `transformers` gives a
        model, it does not drop anything until `train` is called. Arguments, errors and memory: those of
        `TokenEmbedding.from_pretrained`.

        >>> InputEmbedding.from_pretrained("MiniLM-L6")(torch.tensor([[101, 2332, 102]]))  # doctest: +SKIP
        """
        from locant.checkpoints.pretrained import read_pretrained_input

        found = read_pretrained_input(folder, dtype)
        with torch.device("meta"):
            embedding = cls(**found.options)
        embedding.load_state_dict(found.tensors, assign=True)
        return embedding.eval()

    def forward(
        self,
        ids: Integer[Tensor, "batch seq"],
        positions: Positions | None = None,
        segments: Integer[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "batch seq d_model"]:
        """Without `positions` every row counts from 0; without `segments` all tokens are in segment 0."""
        require_tensor("ids", ids)
        if ids.ndim != 2:
            raise shape_error("ids", ids, "(batch, seq)", "ids[None] for a single row")
        if self.backend != "plain":
            why = why_plain(self)
            if why is None:
                return embed(self, ids, positions, segments)
            if self.backend == "fused":
                raise LocantError(f"got backend='fused', but {why}", "backend='auto'")
        return self.combine(self.token(ids), positions, segments)

    def combine(
        self,
        x: Float[Tensor, "batch seq token_width"],
        positions: Positions | None = None,
        segments: Integer[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "batch seq d_model"]:
        """The same for vectors that are embedded already, such as image patches: they are not scaled."""
        require_tensor("x", x)
        if x.ndim != 3:
            raise shape_error("x", x, "(batch, seq, d_model)", "x.view(1, *x.shape)")
        batch, seq_len, _ = x.shape
        positions = Positions.arange(seq_len, device=x.device) if positions is None else positions
        require_positions(positions)
        positions.require_fits(batch, seq_len, x.device, "the input")
        require_segments(self.segment, segments, x.shape[:2])
        if self.combine_by == "concat":
            nothing = x.new_zeros(batch, seq_len, _position_width(self.encoding))
            x = self._with_segments(torch.cat([x, self.encoding.embed(nothing, positions)], -1), segments)
        else:
            x = self.encoding.embed(self._with_segments(x, segments), positions)
        return self.dropout(x if self.norm is None else self.norm(x))

    def _with_segments(self, x: Tensor, segments: Tensor | None) -> Tensor:
        if self.segment is None:
            return x
        width = self.segment.weight.shape[1]
        if x.shape[-1] != width:
            raise shape_error("x", x, f"a last dimension of {width}", "the model's d_model")
        return x + (self.segment.weight[0] if segments is None else self.segment(segments))


def _token_width(d_model: int, encoding: PositionEncoding) -> int:
    """The dimensions that concatenated position vectors leave for the token rows."""
    positions_take = _position_width(encoding)
    d_model = whole("d_model", d_model, 1, MAX_WIDTH, remedy="the width of the model")
    if d_model <= positions_take:
        got = f"got combine='concat' with d_model={d_model} and position vectors of width {positions_take}"
        remedy = f"an encoding with d_model={max(d_model // 4, 1)}"
        raise RangeError(f"{got}, expected room for the tokens", remedy)
    return d_model - positions_take


def _position_width(encoding: PositionEncoding) -> int:
    width = getattr(encoding, "d_model", None)
    if "embed" not in encoding.doors() or not isinstance(width, int):
        got = f"got combine='concat' with {type(encoding).__name__}, expected an encoding that adds vectors"
        raise RangeError(got, "encoding=Sinusoidal(64)")
    return width
