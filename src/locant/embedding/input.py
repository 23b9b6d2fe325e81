"""The input of a transformer: token + n-gram + segment + position in this order, then a norm and dropout."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from locant.arguments import MAX_WIDTH, Real, one_of, real, shape_error, short_repr, whole
from locant.embedding.deferred_errors import DeferredErrorModule
from locant.embedding.look_back import TokenHistory
from locant.embedding.ngram import NGramEmbedding
from locant.embedding.per_layer import PerLayerEmbedding
from locant.embedding.table import Ids, ids_on_device
from locant.embedding.token import Init, Scale, SegmentEmbedding, TokenEmbedding, factor_of, require_segments, to_scale
from locant.errors import InputError, LocantError, RangeError, ShapeError
from locant.positions import PositionEncoding, Positions
from locant.positions.base import build, width_remedy
from locant.positions.positions import OptionalPositions, positions_or_default, require_positions
from locant.positions.registry import find
from locant.tensors import require_tensor


class InputEmbedding(DeferredErrorModule):
    """Embed ids as the vectors that enter the first layer.

    GPT-2 is ``InputEmbedding(50_257, 768, encoding=Learned(1024, 768), dropout=0.1)``. BERT adds
    ``num_segments=2, norm=nn.LayerNorm(768, eps=1e-12)``. The original Transformer is
    ``InputEmbedding(37_000, 512, encoding=Sinusoidal(512), scale="sqrt_d_model", dropout=0.1)``.

    Args:
        vocab_size: number of rows of the token table.
        d_model: width of the token, segment and output vectors.
        encoding: an encoding that adds vectors to the tokens (`embed`), or its name, if it requires only `d_model` and
            `max_seq_len`. An encoding that acts only in attention is an error. Pass it to `attend`. NoPE, the base
            class, has no effect here or in attention.
        max_seq_len: the length of an encoding that is given by its name, such as ``"learned"``.
        combine: ``"add"`` adds the position vectors to the token rows. ``"concat"`` appends them, so tokens have the
            first ``d_model - encoding.d_model`` dimensions, and positions have the others.
        num_segments: number of rows of the segment table, whose rows are added. 0 means no table.
        ngrams: an n-gram table whose rows are added to the token rows, as in BLT.
        per_layer: the second table of Gemma 3n and Gemma 4. It does not change the output: after
            ``x = embedding(ids)``, the parts of the layers are ``embedding.per_layer(ids, x)``.
        scale, init, init_std, padding_idx: options of the token rows, as in `TokenEmbedding`.
        scale_sum: factor of the sum of tokens, segments and positions, with the same values as `scale`.
        norm: ``"layer_norm"`` (eps 1e-5), or any module, which is applied to the sum.
        dropout: dropout probability after the norm.
        backend: has no effect, because the modules are always called one after another. The next release removes it.

    On a GPU the call does not wait until the ids are checked. An id without a row gives NaN, and a later call or
    `raise_deferred_errors` raises a `RangeError`.

    >>> from locant.positions import Learned
    >>> embedding = InputEmbedding(10_000, 256, encoding=Learned(512, 256))
    >>> embedding(torch.zeros(8, 4, dtype=torch.long)).shape
    torch.Size([8, 4, 256])
    >>> InputEmbedding(10_000, 256, encoding="learned", max_seq_len=512)([1, 2, 3, 4]).shape
    torch.Size([1, 4, 256])
    >>> InputEmbedding(10_000, 256, encoding=Learned(512, 32), combine="concat").token.d_model
    224
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        encoding: PositionEncoding | str | None = None,
        max_seq_len: int | None = None,
        combine: Literal["add", "concat"] = "add",
        num_segments: int = 0,
        ngrams: NGramEmbedding | None = None,
        per_layer: PerLayerEmbedding | None = None,
        scale: Scale | None = None,
        scale_sum: Scale | None = None,
        init: Init = "normal",
        init_std: Real | None = None,
        norm: nn.Module | Literal["layer_norm"] | None = None,
        dropout: Real = 0.0,
        padding_idx: int | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        if backend is not None:
            one_of("backend", backend, ("auto", "fused", "plain"))
            warnings.warn(
                "locant.InputEmbedding(backend=...) has no effect and goes with the next release; leave it out",
                DeprecationWarning,
                stacklevel=2,
            )
        dropout = real("dropout", dropout, low=0, below=1, remedy="pass a probability such as dropout=0.1")
        num_segments = whole("num_segments", num_segments, 0, remedy="num_segments=2, or 0 for none")
        if not (norm is None or isinstance(norm, nn.Module) or (isinstance(norm, str) and norm == "layer_norm")):
            got = f"got {short_repr(norm)} for norm, expected 'layer_norm', a module or None"
            raise RangeError(got, "norm='layer_norm'")
        encoding = _encoding(encoding, d_model, max_seq_len)
        one_of("combine", combine, ("add", "concat"))
        self.combine_by = combine
        width = d_model if combine == "add" else _token_width(d_model, encoding)
        self.token = TokenEmbedding(
            vocab_size, width, scale=scale, init=init, init_std=init_std, padding_idx=padding_idx
        )
        if ngrams is not None and not isinstance(ngrams, NGramEmbedding):
            got = f"got {short_repr(ngrams)} for ngrams, expected an NGramEmbedding or None"
            raise RangeError(got, "NGramEmbedding.from_config(config)")
        if ngrams is not None and ngrams.output_width != self.token.d_model:
            got = f"got n-grams of width {ngrams.output_width} for an embedding of d_model={self.token.d_model}"
            raise ShapeError(got, f"NGramEmbedding(hashing, {self.token.d_model}, combine='sum')")
        self.ngrams = ngrams
        if per_layer is not None and not isinstance(per_layer, PerLayerEmbedding):
            got = f"got {short_repr(per_layer)} for per_layer, expected a PerLayerEmbedding or None"
            raise RangeError(got, "PerLayerEmbedding.from_config(config)")
        if per_layer is not None and per_layer.d_model != d_model:
            got = f"got a per-layer embedding of d_model={per_layer.d_model} for an embedding of d_model={d_model}"
            raise ShapeError(got, "use one width for both")
        self.per_layer = per_layer
        added = getattr(encoding, "d_model", None) if combine == "add" and "embed" in encoding.methods() else None
        if isinstance(added, int) and added != self.token.d_model:
            got = f"got an encoding of d_model={added} for an embedding of d_model={self.token.d_model}"
            raise ShapeError(got, width_remedy(encoding, self.token.d_model))
        self.scale_sum: Scale | None = to_scale("scale_sum", scale_sum)
        self.encoding = encoding
        self.segment = SegmentEmbedding(num_segments, d_model) if num_segments else None
        self.norm = nn.LayerNorm(int(d_model)) if isinstance(norm, str) else norm
        self.dropout = nn.Dropout(dropout)

    @classmethod
    def from_pretrained(cls, folder: Path | str, *, dtype: torch.dtype | str | None = None) -> InputEmbedding:
        """Load the input embedding of a published model (GPT-2, BERT, Llama, T5 and others) with its tables.

        It has all steps before the first layer. For position encodings that act in the layers, use
        `encoding_from_config`. Gemma 3n and Gemma 4 also have a `per_layer` embedding. The output for Gemma 3n is the
        first of its four streams (AltUp), from which the model projects the others. The module is in evaluation mode,
        as `transformers` loads a model, so dropout is off until `train` is called. Arguments, errors and memory are the
        same as for `TokenEmbedding.from_pretrained`.

        >>> InputEmbedding.from_pretrained("MiniLM-L6")(torch.tensor([[101, 2332, 102]]))  # doctest: +SKIP
        """
        from locant.checkpoints.pretrained import read_pretrained_input

        pretrained = read_pretrained_input(folder, dtype)
        with torch.device("meta"):
            embedding = cls(**pretrained.options)
        embedding.load_state_dict(pretrained.tensors, assign=True)
        return embedding.eval()

    def forward(
        self,
        ids: Ids,
        positions: OptionalPositions = None,
        segments: Ids | None = None,
        *,
        token_type_ids: Ids | None = None,
        history: TokenHistory | None = None,
    ) -> Float[Tensor, "batch seq d_model"]:
        """Embed ids of shape ``batch seq``, or ``seq`` for one row, as a tensor, an array or a list.

        Without `positions` every row counts from 0. A single token without positions is an error if its position is
        added. `segments` have the shape of the ids. Without them all tokens are in segment 0. `token_type_ids` is the
        name for segments in `transformers`. `history` holds the tokens before these ones, for n-grams in decoding.
        """
        if token_type_ids is not None:
            if segments is not None:
                raise LocantError("got both segments and token_type_ids, which are the same", "pass one of them")
            segments = token_type_ids
        ids = ids_on_device(ids, self)
        ids = ids[None] if ids.ndim == 1 else ids
        if segments is not None:
            segments = ids_on_device(segments, self, "segments")
            segments = segments[None] if segments.ndim == 1 else segments
        if ids.ndim != 2:
            raise shape_error("ids", ids, "(batch, seq), or (seq,) for one row", "ids.flatten(1)")
        x = self.token(ids)
        if self.ngrams is not None:
            x = self.ngrams.add_to(x, ids, positions, history=history)
        return self.combine(x, positions, segments)

    def combine(
        self,
        x: Float[Tensor, "batch seq token_width"],
        positions: OptionalPositions = None,
        segments: Integer[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "batch seq d_model"]:
        """Apply the steps after the look-up to embedded vectors, such as image patches. `scale` has no effect."""
        require_tensor("x", x)
        if x.ndim != 3:
            raise shape_error("x", x, "(batch, seq, d_model)", "x.view(1, *x.shape)")
        positions = _resolve_positions(self.encoding, x, positions)
        require_segments(self.segment, segments, x.shape[:2])
        if self.combine_by == "concat":
            zeros = x.new_zeros(*x.shape[:2], _position_width(self.encoding))
            x = self._with_segments(torch.cat([x, self.encoding.embed(zeros, positions)], -1), segments)
        else:
            x = self.encoding.embed(self._with_segments(x, segments), positions)
        x = x if self.scale_sum is None else x * factor_of(self.scale_sum, x.shape[-1], x.dtype)
        return self.dropout(x if self.norm is None else self.norm(x))

    def resize(self, vocab_size: int) -> None:
        """Append rows to the token table and to the per-layer table, as `TokenEmbedding.resize` does.

        N-grams have no row for each token. The hash then accepts the new ids, and the rows of old n-grams stay.

        Raises:
            InputError: the n-gram table has a `token_map`, which has no entries for the new ids.

        >>> embedding = InputEmbedding(100, 16, per_layer=PerLayerEmbedding(100, num_layers=2, width=4, d_model=16))
        >>> embedding.resize(104)
        >>> embedding.token.vocab_size, tuple(embedding.per_layer.weight.shape)
        (104, (104, 8))
        """
        if self.ngrams is not None and self.ngrams.token_map is not None and vocab_size != self.token.vocab_size:
            got = "got an n-gram table with a token_map, which has no entries for new ids"
            raise InputError(got, "build the NGramEmbedding with the token_map of the new tokenizer")
        self.token.resize(vocab_size)
        if self.ngrams is not None:
            self.ngrams.accept_ids(vocab_size)
        if self.per_layer is not None:
            self.per_layer.resize(vocab_size)

    def _with_segments(self, x: Tensor, segments: Tensor | None) -> Tensor:
        if self.segment is None:
            return x
        width = self.segment.weight.shape[1]
        if x.shape[-1] != width:
            raise shape_error("x", x, f"a last dimension of {width}", "use the model's d_model")
        return x + (self.segment.weight[0] if segments is None else self.segment(segments))


def _encoding(encoding: Any, d_model: int, max_seq_len: int | None) -> PositionEncoding:
    """Return the encoding, or build the encoding with this name from the known sizes."""
    if isinstance(encoding, str):
        kind, known_sizes = find(encoding), {"d_model": d_model, "max_seq_len": max_seq_len}
        _require_adds(kind)
        if missing := [size for size in kind.sizes() if known_sizes.get(size) is None]:
            sizes = ", ".join(f"{size}=..." for size in kind.sizes())
            remedy = f"encoding=locant.encoding({encoding!r}, {sizes})"
            remedy = f"max_seq_len=1024, or {remedy}" if missing == ["max_seq_len"] else remedy
            raise RangeError(f"got encoding={encoding!r}, which requires {' and '.join(missing)}", f"pass {remedy}")
        return build(kind, {size: known_sizes[size] for size in kind.sizes()})
    if max_seq_len is not None:
        cause = f"got {short_repr(max_seq_len)} for max_seq_len, expected it only with the name of an encoding"
        raise RangeError(cause, "pass encoding='learned'")
    if not (encoding is None or isinstance(encoding, PositionEncoding)):
        got = f"got an encoding of type {type(encoding).__name__}, expected a PositionEncoding"
        raise RangeError(got, "pass locant.encoding('sinusoidal', d_model=...)")
    if encoding is not None:
        _require_adds(type(encoding))
    return PositionEncoding() if encoding is None else encoding


def _require_adds(kind: type[PositionEncoding]) -> None:
    """Raise `RangeError` for an encoding that acts only in attention, because it would silently do nothing here."""
    methods = kind.methods()
    acts = bool(methods) or kind.score_bias is not PositionEncoding.score_bias
    if acts and "embed" not in methods:
        got = f"got encoding={kind.__name__}, which adds nothing to embeddings, but acts in attention"
        rotate = ", rotate=True" if "rotate" in methods else ""
        raise RangeError(got, f"pass it to attend(q, k, v, encoding=encoding{rotate}) in each layer instead")


def _resolve_positions(encoding: PositionEncoding, tokens: Tensor, positions: OptionalPositions) -> Positions:
    """Return the positions of tokens, by default from 0. One token needs positions only if vectors are added."""
    batch, seq_len = tokens.shape[:2]
    matter = positions is None and "embed" in encoding.methods()
    positions = positions_or_default(positions, seq_len, tokens.device, matter=matter)
    require_positions(positions)
    positions.require_fits(batch, seq_len, tokens.device, "the input")
    return positions


def _token_width(d_model: int, encoding: PositionEncoding) -> int:
    """Return the number of dimensions that concatenated position vectors leave for the token rows."""
    position_width = _position_width(encoding)
    d_model = whole("d_model", d_model, 1, MAX_WIDTH, remedy="pass the width of the model")
    if d_model <= position_width:
        got = f"got combine='concat' with d_model={d_model} and position vectors of width {position_width}"
        remedy = f"use an encoding with d_model={max(d_model // 4, 1)}"
        raise RangeError(f"{got}, expected room for the tokens", remedy)
    return d_model - position_width


def _position_width(encoding: PositionEncoding) -> int:
    width = getattr(encoding, "d_model", None)
    if "embed" not in encoding.methods() or not isinstance(width, int):
        got = f"got combine='concat' with {type(encoding).__name__}, expected an encoding that adds vectors"
        raise RangeError(got, "encoding=Sinusoidal(64)")
    return width
