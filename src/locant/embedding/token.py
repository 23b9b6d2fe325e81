"""Token embeddings: one trained row per token, optionally scaled, and the same table as the output head.

Segment embeddings: one row for each part of a sequence (Devlin et al. 2018, https://arxiv.org/abs/1810.04805).
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

from locant.arguments import MAX_WIDTH, Real, entries, one_of, real, shape_error, short_repr, whole
from locant.embedding.deferred_errors import DeferredErrorModule
from locant.embedding.table import Ids, Table, ids_on_device, require_ids, rows_of
from locant.errors import InputError, LocantError, RangeError, Remedy, ShapeError
from locant.spelling import dtype_name
from locant.tensors import require_tensor

Scale = float | Literal["sqrt_d_model", "sqrt_d_model_rounded"]
Init = Literal["normal", "xavier"]

MEASURES = ("cosine", "dot")
QUERIES = 1024
"""The number of vectors that are compared at once."""

ENTRIES = 2**22
"""The number of scores, and of entries of the table, in memory at once: 16 MiB of float32 each."""

SEGMENT_STD = 0.02  # BERT


class Nearest(NamedTuple):
    """Ids of the nearest rows, nearest first, and their scores by the requested measure."""

    ids: Int[Tensor, "*batch k"]
    scores: Float[Tensor, "*batch k"]


class TokenEmbedding(DeferredErrorModule):
    """Look up a row for every id.

    By default rows are initialized from N(0, 1 / d_model), so a row has length about 1. The gradient of a 16-bit table
    is summed in float32 and rounded once, unless the look-up was exported.

    Args:
        vocab_size: number of rows of the table.
        d_model: width of the table.
        scale: factor of the rows: a number, ``"sqrt_d_model"`` (Vaswani 2017: multiplied in float32 and rounded once),
            or ``"sqrt_d_model_rounded"`` (Gemma: the factor itself is first rounded to the dtype of the table, 55.5
            instead of 55.4256 in bfloat16 at width 3072).
        init: distribution of new rows: ``"normal"``, or ``"xavier"``, which is uniform within
            ``sqrt(6 / (vocab_size + d_model))`` (Glorot 2010, `torch.nn.init.xavier_uniform_`).
        init_std: standard deviation of normal rows. Default: ``d_model ** -0.5``. GPT-2 and BERT use 0.02, and
            `torch.nn.Embedding` uses 1.
        padding_idx: a row that is initialized with zeros and does not get a gradient.

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
        init_std: Real | None = None,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        rows = whole("vocab_size", vocab_size, 1, remedy="pass the vocab_size of the tokenizer")
        width = whole("d_model", d_model, 1, MAX_WIDTH, remedy="pass the width of the model")
        self.scale: Scale | None = to_scale("scale", scale)
        one_of("init", init, get_args(Init))
        self.init: Init = init
        if init == "xavier" and init_std is not None:
            cause = "got both init_std and init='xavier', whose deviation follows from the sizes"
            raise RangeError(cause, "pass one of them")
        std = init_std if init_std is not None else width**-0.5 if init == "normal" else (2 / (rows + width)) ** 0.5
        self.init_std = real("init_std", std, low=0, remedy="init_std=0.02, or None for d_model ** -0.5")
        remedy = f"pass None, or one of the {rows} rows"
        row = None if padding_idx is None else whole("padding_idx", padding_idx, -rows, rows - 1, remedy=remedy)
        self.padding_idx = None if row is None else row % rows
        self.table = Table()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.reset_parameters()

    @classmethod
    def from_pretrained(cls, folder: Path | str, *, dtype: torch.dtype | str | None = None) -> TokenEmbedding:
        """Load the token table of a published model, with the scale that the model's code applies to the rows.

        The table is mapped into memory: a row is read from disk when it is used, and writing to the table does not
        change the file. If the configuration lacks ``vocab_size``, the table has the rows of the file. If it lacks
        ``pad_token_id``, the default of the model's class in `transformers` counts (BERT, RoBERTa, OPT, Gemma and their
        relatives).

        Args:
            folder: a folder with ``config.json`` and the weights in safetensors, whole or in shards.
            dtype: dtype of the table, which is then converted and held in memory. Default: the dtype in the file.

        Raises:
            InputError: there is no such model, the weights are not safetensors, the tensors do not match the
                configuration, or the folder has its own code, which is never run.

        >>> TokenEmbedding.from_pretrained("MiniLM-L6")  # doctest: +SKIP
        TokenEmbedding(vocab_size=30522, d_model=384, padding_idx=0)
        """
        from locant.checkpoints.pretrained import read_pretrained_token

        if hasattr(folder, "shape"):  # an argument of `torch.nn.Embedding.from_pretrained`, whose rows are not trained
            got = f"got {short_repr(folder)}, expected the folder of a model"
            raise InputError(got, "TokenEmbedding(*table.shape).load_state_dict({'weight': table})")
        pretrained = read_pretrained_token(folder, dtype)
        with torch.device("meta"):
            embedding = cls(**pretrained.options)
        embedding.load_state_dict(pretrained.tensors, assign=True)
        return embedding.eval()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.table.initialize(self.weight, self._fill, self.padding_idx)

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
        """Return the (scaled) row of every id. Raise `RangeError` for the first id without a row.

        Ids may be a list or an array, as `Tokenizer.encode` returns. On a GPU the call does not wait for the check: an
        id without a row gives NaN, and a later call or `raise_deferred_errors` raises the error.
        """
        rows = self.table.rows(self.weight, ids_on_device(ids, self), self.padding_idx, self._deferred_errors)
        return rows if self.scale is None else rows * self.factor()

    def factor(self) -> float:
        """Return the factor of the rows."""
        return factor_of(self.scale, self.d_model, self.weight.dtype)

    def logits(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch vocab_size"]:
        """Return the scores of all tokens from the same table (tied head, Press and Wolf 2017), without the scale."""
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
        """Find the rows nearest to tokens or vectors. All rows are compared, one block at a time.

        Args:
            ids_or_vector: any number of ids, or of vectors of width d_model. An id is not its own neighbour.
            k: number of neighbours.
            measure: ``"cosine"`` of the angle between rows, or their ``"dot"`` product.
            exclude: ids that are not returned.

        Returns:
            Ids and scores of the neighbours, each ``[*batch, k]``, nearest first.

        >>> table = TokenEmbedding(4, 2)
        >>> _ = table.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.5], [-1.0, 0.0]]))
        >>> table.nearest(0, 2).ids.tolist(), table.nearest(torch.tensor([0.0, 3.0]), 1).ids.tolist()
        ([2, 1], [1])
        """
        one_of("measure", measure, MEASURES)
        try:
            query = torch.as_tensor(ids_or_vector, device=self.weight.device)
        except (TypeError, ValueError, RuntimeError):
            got = f"got {short_repr(ids_or_vector)} for ids_or_vector, expected ids or vectors"
            raise ShapeError(got, "pass tokenizer.id_of(word), or use locant.embedding.Words for words") from None
        remedy, last = "exclude=[0]", self.vocab_size - 1
        ids = [whole("an id in exclude", x, 0, last, remedy=remedy) for x in entries("exclude", exclude, remedy)]
        excluded = torch.tensor(ids, dtype=torch.long, device=self.weight.device)
        if query.is_floating_point():
            if not query.ndim or query.shape[-1] != self.d_model:
                expected = f"a last dimension of d_model={self.d_model}"
                raise shape_error("a vector", query, expected, "pass a row of the table")
            batch, vectors = query.shape[:-1], query.reshape(-1, self.d_model)
            left_out = excluded.expand(len(vectors), -1)
        else:
            ids = require_ids(query, self.vocab_size, "TokenEmbedding", "vocab_size", self.weight.device)
            batch, vectors = ids.shape, self.weight[ids.reshape(-1)]
            left_out = torch.cat([excluded.expand(len(vectors), -1), ids.reshape(-1, 1)], 1)
        most = self.vocab_size - left_out.shape[1]
        k = whole("k", k, 1, most, remedy=f"k={max(min(10, most), 1)}")
        vectors = vectors.to(torch.promote_types(self.weight.dtype, torch.float32))
        if not bool(vectors.isfinite().all()):
            raise RangeError("got a vector, or a row, with numbers that are not finite", "use finite numbers")
        queries = zip(vectors.split(QUERIES), left_out.split(QUERIES), strict=True)
        parts = [_nearest(self.weight, some, k, measure, out) for some, out in queries]
        rows, scores = (torch.cat(each) for each in zip(*parts, strict=True))
        return Nearest(rows.view(*batch, k), scores.view(*batch, k))

    def resize(self, vocab_size: int) -> None:
        """Append rows to the table. Old rows are kept byte for byte, and new rows are initialized as usual.

        The table never shrinks (a table padded to a round size keeps its padding). Afterwards the weight is a new
        parameter, so build the optimizer after resizing. Another module that shares the weight, such as a tied head,
        keeps the old weight, and a warning names its class. Tie it again. `InputEmbedding.resize` resizes a token table
        together with the other tables of its input.
        """
        has = self.vocab_size
        vocab_size = whole("vocab_size", vocab_size, has, remedy=f"resize({has}) or more; rows are never dropped")
        if vocab_size == has:
            return
        if others := [type(module).__name__ for module in _sharing(self)]:
            cause = f"{', '.join(others)} shares this weight, and keeps the old weight of {has} rows"
            warnings.warn(f"{cause}; try: give it the new weight after resize", stacklevel=2)
        with torch.no_grad():
            weight = self.table.extended_copy(self.weight, vocab_size)
            self._fill(weight[has:])
            self.weight = nn.Parameter(weight, requires_grad=self.weight.requires_grad)

    def extra_repr(self) -> str:
        scale = "" if self.scale is None else f", scale={self.scale!r}"
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"vocab_size={self.vocab_size}, d_model={self.d_model}{scale}{padding}"


def _sharing(module: TokenEmbedding) -> list[nn.Module]:
    """Return the other modules that have this weight as a parameter."""
    modules: list[nn.Module] = []
    for parameters in (each for each in gc.get_referrers(module.weight) if each.__class__ is dict):
        for holder in gc.get_referrers(parameters):
            # The attributes of an object are in the object itself, or in its `__dict__` after it was requested.
            for owner in (holder, *(gc.get_referrers(holder) if holder.__class__ is dict else ())):
                if isinstance(owner, nn.Module) and owner is not module and owner not in modules:
                    modules += [owner] if any(each is module.weight for each in owner.parameters(recurse=False)) else []
    return modules


def to_scale(name: str, scale: Any) -> Scale | None:
    """Check a scale, which is a number, the name of a number or ``None``, and return it."""
    if isinstance(scale, str):
        return cast(
            Scale,
            one_of(name, scale, get_args(get_args(Scale)[1]), Remedy("{}, or a number", **{name: "sqrt_d_model"})),
        )
    return None if scale is None else real(name, scale, remedy=Remedy("{}, or 'sqrt_d_model'", **{name: None}))


def factor_of(scale: Scale | None, d_model: int, dtype: torch.dtype) -> float:
    """Return the factor that a scale means in a model of this width and dtype."""
    if not isinstance(scale, str):
        return 1.0 if scale is None else float(scale)
    return d_model**0.5 if scale == "sqrt_d_model" else round_factor(d_model**0.5, dtype)


def round_factor(factor: float, dtype: torch.dtype) -> float:
    """Return a factor rounded to a dtype, without a tensor, whose value compilers cannot read."""
    mantissa, exponent = math.frexp(factor)
    steps = 2 / torch.finfo(dtype).eps
    return math.ldexp(round(mantissa * steps) / steps, exponent)


class SegmentEmbedding(DeferredErrorModule):
    """Look up a row for every segment id, such as sentence A or B in BERT, a speaker, or a modality.

    >>> SegmentEmbedding(2, 8)(torch.tensor([[0, 0, 1]])).shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, num_segments: int, d_model: int) -> None:
        super().__init__()
        rows = whole("num_segments", num_segments, 1, remedy="SegmentEmbedding(2, 768)")
        width = whole("d_model", d_model, 1, MAX_WIDTH, remedy="pass the width of the token embeddings")
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=SEGMENT_STD)

    def forward(self, segments: Integer[Tensor, "*batch"]) -> Float[Tensor, "*batch d_model"]:
        """Return the row of every segment id. An id without a row raises `RangeError`, on a GPU at a later call."""
        return rows_of(segments, self.weight, "SegmentEmbedding", "num_segments", self._deferred_errors)

    def extra_repr(self) -> str:
        return f"num_segments={self.weight.shape[0]}, d_model={self.weight.shape[1]}"


def require_segments(
    table: SegmentEmbedding | None, segments: Integer[Tensor, "batch seq"] | None, shape: torch.Size
) -> None:
    """Raise an error unless segments are None, or there is a table and one segment per token."""
    if segments is None:
        return
    if table is None:
        raise LocantError("got segments for an InputEmbedding that has none", "pass num_segments=2 when building it")
    require_tensor("segments", segments)
    if segments.shape != shape:
        raise shape_error("segments", segments, str(tuple(shape)), "torch.zeros_like(ids)")


def unit(vectors: Float[Tensor, "count width"]) -> Float[Tensor, "count width"]:
    """Scale vectors of any length to length 1. Zeros stay zeros."""
    exponent = vectors.abs().amax(1, keepdim=True).frexp().exponent  # squares of huge or tiny numbers would overflow
    return F.normalize(vectors * torch.exp2(-exponent.clamp(-126, 126).to(vectors.dtype)), dim=1)


def _nearest(weight: Tensor, vectors: Tensor, k: int, measure: str, left_out: Tensor) -> Nearest:
    """Return the `k` best rows for each vector, without the rows in `left_out`.

    Rows that are not finite come last (NaN).
    """
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
