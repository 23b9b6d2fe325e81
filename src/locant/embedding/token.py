"""Token embeddings: one trained row per token, optionally scaled, and the same table as the output head.

And segment embeddings: which of a few parts a token belongs to (Devlin et al. 2018, https://arxiv.org/abs/1810.04805).
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import MAX_WIDTH, entries, one_of, real, shape_error, shown, whole
from locant.embedding.table import Ids, RaisesLater, Table, ids_of, require_ids, rows_of
from locant.errors import InputError, LocantError, RangeError, Remedy, ShapeError
from locant.spelling import dtype_name
from locant.tensors import require_tensor

Scale = float | Literal["sqrt_d_model", "sqrt_d_model_rounded"]
Init = Literal["normal", "xavier"]

MEASURES = ("cosine", "dot")
QUERIES = 1024
"""Vectors that are compared at once."""

ENTRIES = 2**22
"""Scores, and numbers of the table, that are in memory at once: 16 MiB of float32 each."""

SEGMENT_STD = 0.02  # BERT


class Nearest(NamedTuple):
    """Ids of the rows, the nearest first, and how near each is by the measure that was asked for."""

    ids: Int[Tensor, "*batch k"]
    scores: Float[Tensor, "*batch k"]


class TokenEmbedding(RaisesLater):
    """Looks up a row for every id.

    By default rows start as N(0, 1 / d_model), so that a row has length about 1. The gradient of a 16-bit table is
    summed in float32 and rounded once, unless the look-up has been exported.

    Args:
        vocab_size: rows of the table.
        d_model: its width.
        scale: what rows are multiplied with: a number, ``"sqrt_d_model"`` (Vaswani 2017: multiplied in float32 and
            rounded once), or ``"sqrt_d_model_rounded"`` (Gemma: the factor itself is first rounded to the dtype of
            the table, 55.5 instead of 55.4256 in bfloat16 at width 3072).
        init: how fresh rows are drawn: ``"normal"``, or ``"xavier"``, uniformly within
            ``sqrt(6 / (vocab_size + d_model))`` (Glorot 2010, `torch.nn.init.xavier_uniform_`).
        init_std: the standard deviation of normal ones; default ``d_model ** -0.5``. GPT-2 and BERT have 0.02,
            `torch.nn.Embedding` has 1.
        padding_idx: a row that starts as zeros and gets no gradient.

    >>> TokenEmbedding(50_257, 256)(torch.tensor([[1, 2, 3, 4]])).shape
    torch.Size([1, 4, 256])
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        scale: Scale | None = None,
        init: Init = "normal",
        init_std: float | None = None,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        rows = whole("vocab_size", vocab_size, 1, remedy="the vocab_size of the tokenizer")
        width = whole("d_model", d_model, 1, MAX_WIDTH, remedy="the width of the model")
        self.scale: Scale | None = to_scale("scale", scale)
        one_of("init", init, get_args(Init))
        self.init: Init = init
        if init == "xavier" and init_std is not None:
            raise RangeError("got init_std beside init='xavier', which follows from the sizes", "pass one of them")
        std = init_std if init_std is not None else width**-0.5 if init == "normal" else (2 / (rows + width)) ** 0.5
        self.init_std = real("init_std", std, low=0, remedy="init_std=0.02, or None for d_model ** -0.5")
        remedy = f"None, or a row of the {rows}"
        row = None if padding_idx is None else whole("padding_idx", padding_idx, -rows, rows - 1, remedy=remedy)
        self.padding_idx = None if row is None else row % rows
        self.table = Table()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.reset_parameters()

    @classmethod
    def from_pretrained(cls, folder: Path | str, *, dtype: torch.dtype | str | None = None) -> TokenEmbedding:
        """The token table of a published model, with the scale that its code gives the rows.

        The table is mapped into memory: a row is read from the disk when it is used, and writing to the table does
        not change the file.

        Args:
            folder: holds ``config.json`` and the weights in safetensors, whole or in shards.
            dtype: that of the table, which is then converted and in memory; default: the one in the file.

        Raises:
            InputError: no such model, weights that are no safetensors, tensors that are not those of the
                configuration, or code of the folder's own, which is never run.

        >>> TokenEmbedding.from_pretrained("MiniLM-L6")  # doctest: +SKIP
        TokenEmbedding(vocab_size=30522, d_model=384, padding_idx=0)
        """
        from locant.checkpoints.pretrained import read_pretrained_token

        if hasattr(folder, "shape"):  # as `torch.nn.Embedding` takes one; there the rows are not trained
            got = f"got {shown(folder)}, expected the folder of a model"
            raise InputError(got, "TokenEmbedding(*table.shape).load_state_dict({'weight': table})")
        pretrained = read_pretrained_token(folder, dtype)
        with torch.device("meta"):
            embedding = cls(**pretrained.options)
        embedding.load_state_dict(pretrained.tensors, assign=True)
        return embedding.eval()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.table.draw(self.weight, self._fill, self.padding_idx)

    def _fill(self, rows: Tensor) -> Tensor:
        if self.init == "normal":
            return rows.normal_(std=self.init_std)
        bound = 3**0.5 * self.init_std
        return rows.uniform_(-bound, bound)

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    @property
    def d_model(self) -> int:
        return self.weight.shape[1]

    def forward(self, ids: Ids) -> Float[Tensor, "*batch d_model"]:
        """The (scaled) row of every id; a `RangeError` names the first that has none, on a GPU at a later call.

        Ids may be a list or an array, as `Tokenizer.encode` gives them. On a GPU nothing waits for an id without a row:
        it gives NaN, and the error comes then, or by `raise_deferred_errors`.
        """
        rows = self.table.rows(self.weight, ids_of(ids, self), self.padding_idx, self._deferred_errors)
        return rows if self.scale is None else rows * self.factor()

    def factor(self) -> float:
        """The number that rows are multiplied with."""
        return factor_of(self.scale, self.d_model, self.weight.dtype)

    def logits(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch vocab_size"]:
        """Scores of all tokens from the same table (tied head, Press and Wolf 2017); the scale is not applied."""
        require_tensor("x", x)
        if not x.ndim or x.shape[-1] != self.d_model:
            raise shape_error("x", x, f"a last dimension of d_model={self.d_model}", "the model's last hidden state")
        dtype = self.weight.dtype
        if x.dtype != dtype and not (x.is_floating_point() and torch.is_autocast_enabled(x.device.type)):
            got = f"got x of dtype {dtype_name(x.dtype)}, the table is {dtype_name(dtype)}"
            raise ShapeError(got, f"x.to({dtype}), or torch.autocast")
        return self.table.logits(self.weight, x)

    @torch.no_grad()
    def nearest(
        self,
        ids_or_vector: int | Tensor,
        k: int = 10,
        *,
        measure: Literal["cosine", "dot"] = "cosine",
        exclude: Sequence[int] = (),
    ) -> Nearest:
        """The rows nearest to a token, or to a vector: every row is compared, and few are in memory at once.

        Args:
            ids_or_vector: ids, of which none is its own neighbour, or vectors of width d_model; any number of either.
            k: how many.
            measure: ``"cosine"`` of the angle between rows, or their ``"dot"`` product.
            exclude: ids that are no neighbours of any.

        Returns:
            Their ids and scores, each ``[*batch, k]``, the nearest first.

        >>> table = TokenEmbedding(4, 2)
        >>> _ = table.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.5], [-1.0, 0.0]]))
        >>> table.nearest(0, 2).ids.tolist(), table.nearest(torch.tensor([0.0, 3.0]), 1).ids.tolist()
        ([2, 1], [1])
        """
        one_of("measure", measure, MEASURES)
        try:
            given = torch.as_tensor(ids_or_vector, device=self.weight.device)
        except (TypeError, ValueError, RuntimeError):
            got = f"got {shown(ids_or_vector)} for ids_or_vector, expected ids or vectors"
            raise ShapeError(got, "tokenizer.id_of(word), or locant.embedding.Words, which takes words") from None
        remedy, last = "exclude=[0]", self.vocab_size - 1
        ids = [whole("an id in exclude", x, 0, last, remedy=remedy) for x in entries("exclude", exclude, remedy)]
        outside = torch.tensor(ids, dtype=torch.long, device=self.weight.device)
        if given.is_floating_point():
            if not given.ndim or given.shape[-1] != self.d_model:
                expected = f"a last dimension of d_model={self.d_model}"
                raise shape_error("a vector", given, expected, "a row of the table")
            batch, vectors = given.shape[:-1], given.reshape(-1, self.d_model)
            left_out = outside.expand(len(vectors), -1)
        else:
            ids = require_ids(given, self.vocab_size, "TokenEmbedding", "vocab_size", self.weight.device)
            batch, vectors = ids.shape, self.weight[ids.reshape(-1)]
            left_out = torch.cat([outside.expand(len(vectors), -1), ids.reshape(-1, 1)], 1)
        most = self.vocab_size - left_out.shape[1]
        k = whole("k", k, 1, most, remedy=f"k={max(min(10, most), 1)}")
        vectors = vectors.to(torch.promote_types(self.weight.dtype, torch.float32))
        if not bool(vectors.isfinite().all()):
            raise RangeError("got a vector, or a row, with numbers that are not finite", "finite numbers")
        queries = zip(vectors.split(QUERIES), left_out.split(QUERIES), strict=True)
        parts = [_nearest(self.weight, some, k, measure, out) for some, out in queries]
        rows, scores = (torch.cat(each) for each in zip(*parts, strict=True))
        return Nearest(rows.view(*batch, k), scores.view(*batch, k))

    def resize(self, vocab_size: int) -> None:
        """Grow the table in place: every old row is kept byte for byte, new rows start like fresh ones.

        It never shrinks (a table padded to a round size keeps its padding). The weight is a new parameter
        afterwards: build the optimizer after resizing. Another module that shares the weight, as a tied head does,
        keeps the old one, of which a warning names the class: tie it again.
        """
        has = self.vocab_size
        vocab_size = whole("vocab_size", vocab_size, has, remedy=f"resize({has}) or more; rows are never dropped")
        if vocab_size == has:
            return
        if others := [type(module).__name__ for module in _sharing(self)]:
            cause = f"{', '.join(others)} shares this weight, and keeps the old one of {has} rows"
            warnings.warn(f"{cause}; try: give it the new weight after resize", stacklevel=2)
        with torch.no_grad():
            grown = self.table.longer(self.weight, vocab_size)
            self._fill(grown[has:])
            self.weight = nn.Parameter(grown, requires_grad=self.weight.requires_grad)

    def extra_repr(self) -> str:
        scale = "" if self.scale is None else f", scale={self.scale!r}"
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"vocab_size={self.vocab_size}, d_model={self.d_model}{scale}{padding}"


def _sharing(module: TokenEmbedding) -> list[nn.Module]:
    """The other modules that have this weight as a parameter of theirs."""
    found: list[nn.Module] = []
    for parameters in (each for each in gc.get_referrers(module.weight) if each.__class__ is dict):
        for holder in gc.get_referrers(parameters):
            # The attributes of an object are in the object itself, or in a dict of it that was asked for.
            for owner in (holder, *(gc.get_referrers(holder) if holder.__class__ is dict else ())):
                if isinstance(owner, nn.Module) and owner is not module and owner not in found:
                    found += [owner] if any(each is module.weight for each in owner.parameters(recurse=False)) else []
    return found


def to_scale(name: str, scale: Any) -> Scale | None:
    """A number, or one of the names of one."""
    if isinstance(scale, str):
        return cast(
            Scale,
            one_of(name, scale, get_args(get_args(Scale)[1]), Remedy("{}, or a number", **{name: "sqrt_d_model"})),
        )
    return None if scale is None else real(name, scale, remedy=Remedy("{}, or 'sqrt_d_model'", **{name: None}))


def factor_of(scale: Scale | None, d_model: int, dtype: torch.dtype) -> float:
    """The number that a scale stands for, in a model of this width and dtype."""
    if not isinstance(scale, str):
        return 1.0 if scale is None else float(scale)
    factor = d_model**0.5
    if scale == "sqrt_d_model":
        return factor
    mantissa, exponent = math.frexp(factor)  # rounded without a tensor, which compilers could not look into
    steps = 2 / torch.finfo(dtype).eps
    return math.ldexp(round(mantissa * steps) / steps, exponent)


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
        nn.init.normal_(self.weight, std=SEGMENT_STD)

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


def unit(vectors: Float[Tensor, "count width"]) -> Float[Tensor, "count width"]:
    """The vectors with length 1, whatever their length; zeros stay."""
    exponent = vectors.abs().amax(1, keepdim=True).frexp().exponent  # squares of huge and tiny numbers have no float
    return F.normalize(vectors * torch.exp2(-exponent.clamp(-126, 126).to(vectors.dtype)), dim=1)


def _nearest(weight: Tensor, vectors: Tensor, k: int, measure: str, left_out: Tensor) -> Nearest:
    """The `k` best rows for each vector but those in `left_out`; rows that are not finite come last, scored NaN."""
    vectors = unit(vectors) if measure == "cosine" else vectors
    last = torch.finfo(vectors.dtype).min
    best = vectors.new_empty(len(vectors), 0)
    ids = left_out.new_empty(len(vectors), 0)
    block = max(1, ENTRIES // max(len(vectors), weight.shape[1]))
    for start in range(0, len(weight), block):
        rows = weight[start : start + block].to(vectors.dtype)
        scores = vectors @ (unit(rows) if measure == "cosine" else rows).T
        scores = scores.where(rows.isfinite().all(1), last)
        numbers = torch.arange(start, start + len(rows), device=weight.device)
        scores = scores.masked_fill((numbers == left_out[..., None]).any(1), -torch.inf)
        best, ids = torch.cat([best, scores], 1), torch.cat([ids, numbers.expand(scores.shape)], 1)
        best, place = best.topk(min(k, best.shape[1]))
        ids = ids.gather(1, place)
    return Nearest(ids, best.masked_fill(best == last, torch.nan))
