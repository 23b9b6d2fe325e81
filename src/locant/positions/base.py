"""`PositionEncoding`: the four doors through which word order enters a transformer.

``embed`` adds to the token embeddings, ``rotate`` rotates queries and keys, ``bias`` adds to the attention scores, and
``unrotate`` turns the output of attention back where values were rotated. Each does nothing unless an encoding
overrides it, so the base class itself is NoPE: no position encoding at all (Kazemnejad et al. 2023,
https://arxiv.org/abs/2305.19466).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locant.arguments import shape_error, shown, whole
from locant.errors import LocantError, ShapeError
from locant.positions.construction import options_of, require_arguments, require_sizes, sizes_of
from locant.positions.pairs import ScoreMod
from locant.positions.positions import Positions, Where, from_zero, require_positions
from locant.positions.score_bias import ScoreBias, Written
from locant.spelling import dtype_name
from locant.tensors import require_arithmetic

if TYPE_CHECKING:
    from locant.positions.rotary_by_class import PairClass

DOORS = {
    "embed": "encoding.embed(x, positions)",
    "rotate": "encoding.rotate(q, k, positions)",
    "bias": "attend(q, k, v, encoding=encoding, positions=positions), or encoding.bias(q, k, positions)",
    "unrotate": "encoding.unrotate(y, positions)",
}
"""How each is called, for the remedy of an error."""

E = TypeVar("E", bound="PositionEncoding")

Embeddings = Float[Tensor, "batch seq d_model"]
Queries = Float[Tensor, "batch heads query head_dim"]
Keys = Float[Tensor, "batch kv_heads key head_dim"]
Output = Float[Tensor, "batch heads query head_dim"]
Bias = Float[Tensor, "#batch heads query key"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model from which an encoding takes those it needs."""

    d_model: int
    num_heads: int
    max_seq_len: int
    num_kv_heads: int | None = None
    """Where there are fewer of keys and values."""
    head_dim: int = 0
    """Default: ``d_model // num_heads``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim", self.head_dim or self.d_model // self.num_heads)


@dataclass(frozen=True, kw_only=True)
class EncodingInfo:
    """What `locant list` shows of an encoding. Every field may be left out.

    Args:
        name: by which `locant.encoding` finds an encoding of this package; others are registered under a name.
        kind: whether a model can tell where a token stands, or only how far it is from another.
        parameters: how many numbers it learns.
        cost_of_tokens: work and memory for every token.
        cost_of_pairs: work and memory for every pair of a query and a key, in each head.
        extrapolation: what happens beyond the trained length.
    """

    name: str = ""
    aliases: tuple[str, ...] = ()
    kind: Literal["absolute", "relative", "none", ""] = ""
    parameters: str = ""
    cost_of_tokens: str = ""
    cost_of_pairs: str = ""
    extrapolation: str = ""
    used_by: str = ""
    paper: str = ""


class PositionEncoding(nn.Module):
    """The base class of position encodings, which by itself encodes no positions (NoPE).

    A model written against these doors runs with every encoding::

        x = encoding.embed(x, positions)                     # once, after the token embedding
        q, k = encoding.rotate(q, k, positions)              # in every layer, before the KV cache
        y = attend(q, k, v, encoding=encoding, positions=positions)
        y = encoding.unrotate(y, positions)                  # where values are rotated, as keys are

    Positions may be left out where they can only be 0, 1, 2, ...: of two tokens or more, with as many keys as queries.

    .. math:: b_{ij} = 0

    Parameters are sharded with the block that uses them. FSDP gathers those of an encoding that is sharded by itself
    only for ``forward``, unless torch is told: ``register_fsdp_forward_method(encoding, "bias")``.

    Limits:
        Without a causal mask, tokens in another order give the same outputs in that order: nothing says what
        came first.

    Tested against:
        Attention written out in NumPy, with a causal mask and without.

    >>> import locant
    >>> locant.encoding("nope").doors()
    ()
    """

    info: ClassVar[EncodingInfo] = EncodingInfo(
        name="nope",
        aliases=("none", "no_position"),
        kind="none",
        parameters="none",
        cost_of_tokens="nothing",
        cost_of_pairs="nothing",
        extrapolation="a causal mask alone gives order; some reach beyond the trained length",
        used_by="some layers of Llama 4, SmolLM3, Cohere Command",
        paper="Kazemnejad 2023, arXiv 2305.19466",
    )
    """Not inherited: a subclass without one has an empty one."""
    needs_all_keys: ClassVar[bool] = False
    """Whether the bias of a query and a key depends on the keys between them.

    Such a bias can be had of all keys at once alone: not of the parts that `locant.attention.merge` joins, nor of the
    shards that go around a ring.
    """

    num_axes: int = 1
    """How many indices of a token it tells apart; where there are several, positions have to be given."""

    def __new__(cls, *arguments: Any, **options: Any):  # without its type, which is inferred: beartype knows no Self
        """Check the arguments of every constructor; a copy is made without any."""
        if arguments or options:
            require_arguments(cls, arguments, options)
            require_sizes(cls, {*[*(options_of(cls) or ())][: len(arguments)], *options})
        return super().__new__(cls)

    def __init__(self) -> None:
        super().__init__()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "info" not in vars(cls):
            cls.info = EncodingInfo()
        own = vars(cls).keys() & {"score_bias", "bias", "score_mod"}
        if {"score_bias", "bias"} <= own:
            raise LocantError(f"got {cls.__name__} with both score_bias and bias, of which one follows", "one of them")
        if "score_bias" in own:
            matrix, function = "`score_bias` of every pair, float32 at least.", "`score_bias`, for FlexAttention."
            cls.bias = _follows(cls.score_bias, "bias", matrix, lambda value: value.dense())
            cls.score_mod = _follows(cls.score_bias, "score_mod", function, lambda value: value.score_mod())
        elif own and "bias" in cls.doors():
            cls.score_bias = _written(writes_score_mod(cls))

    def score_bias(
        self, q: Queries, k: Keys, queries: Positions, keys: Positions, heads: slice | None = None
    ) -> ScoreBias | None:
        """What is added to the attention scores after scaling, as a value that every backend takes; or ``None``.

        A subclass writes this, from which `bias` and `score_mod` follow, or `bias` alone, from which this follows.

        Args:
            q, k: queries and keys.
            queries, keys: where they stand.
            heads: which heads of this encoding those of `q` are; default: all.
        """
        return None

    def pair_classes(self, positions: Positions, k_positions: Positions | None = None) -> Sequence[PairClass] | None:
        """The classes of pairs that are rotated alike, where there are several; ``None``: `rotate` has done it."""
        return None

    @classmethod
    def doors(cls) -> tuple[str, ...]:
        """Which of ``embed``, ``rotate``, ``bias`` and ``unrotate`` this class overrides."""
        return tuple(door for door in DOORS if getattr(cls, door) is not getattr(PositionEncoding, door))

    @classmethod
    def sizes(cls) -> tuple[str, ...]:
        """The sizes of a model that the constructor requires."""
        return sizes_of(cls)

    @classmethod
    def for_model(cls, shape: ModelShape, **options: object) -> PositionEncoding:
        """This encoding for a model of these sizes; `options` go to the constructor.

        Overridden where the constructor requires something else than sizes of a `ModelShape`.
        """
        sizes: dict[str, Any] = {size: getattr(shape, size) for size in cls.sizes() if hasattr(shape, size)}
        if "num_heads" in sizes and "bias" not in cls.doors():  # what turns queries and keys counts the heads of keys
            sizes["num_heads"] = shape.num_kv_heads or shape.num_heads
        sizes |= options
        if foreign := [size for size in cls.sizes() if size not in sizes]:
            got = f"got {cls.__name__}, which requires {' and '.join(foreign)}: no size of a model"
            raise LocantError(got, "a default for it, or a classmethod for_model(cls, shape, **options)")
        return build(cls, sizes)

    def forward(self, x: Embeddings, positions: Where = None) -> Embeddings:
        """`embed`, at the positions 0, 1, 2, ... unless others are given; for encodings that do nothing else.

        >>> from locant import Sinusoidal
        >>> Sinusoidal(4)(torch.zeros(1, 2, 4))[0, 1]
        tensor([0.8415, 0.5403, 0.0100, 0.9999])
        """
        for door in self.doors():
            if door != "embed":
                got = f"got {type(self).__name__} called like a function, expected a call of its method {door}"
                raise LocantError(got, _matrix_of(self, x) or self._call_of(door))
        if isinstance(x, Tensor) and not x.is_floating_point():
            got = f"got a tensor of {dtype_name(x.dtype)}, expected token embeddings, of shape (batch, seq, d_model)"
            raise ShapeError(got, "TokenEmbedding for ids; x=torch.zeros(1, n, d_model) for the vectors of positions")
        require_arithmetic("x", x)
        return self.embed(x, from_zero(x.shape[1], x.device) if positions is None else positions)

    def embed(self, x: Embeddings, positions: Where = None) -> Embeddings:
        """Token embeddings with position added."""
        return x

    def rotate(
        self, q: Queries, k: Keys, positions: Where = None, k_positions: Where = None, *, inplace: bool = False
    ) -> tuple[Queries, Keys]:
        """Queries and keys rotated by their positions; `k_positions` where the keys have others.

        With `inplace` the result is written into the memory of `q` and `k`.
        """
        return q, k

    def bias(self, q: Queries, k: Keys, positions: Where = None, k_positions: Where = None) -> Bias | None:
        """What is added to the attention scores after scaling, or ``None``.

        Works for any slice of queries: entry (i, j) depends on query i and key j alone, and so for any slice of keys,
        too, unless the class has `needs_all_keys`. float32 at least, whatever the dtype of `q`: bfloat16 cannot tell
        far distances apart.
        """
        return None

    def unrotate(self, y: Output, positions: Where = None) -> Output:
        """The output of attention over rotated values, turned back by the positions of its queries.

        Rotated values are the rotated keys themselves (DeepSeek-V4), or values rotated as the keys are (GTA, Miyato
        et al. 2023, arXiv 2310.10375). Turned back, what a key contributes depends on its distance to the query. Where
        values are not rotated, it is not called.
        """
        return y

    def read(self, x: Embeddings, positions: Positions, past: Positions | None = None) -> Positions:
        """The positions, and in them what `bias` or `rotate` has to know of hidden states: see `HiddenBias`, `RePo`.

        Asked in every layer, of what queries and keys are made from; `rotate`, the cache and `attend` are given the
        positions that come back. `past` are those of the cached tokens.
        """
        return positions

    def of_row(
        self, queries: Tensor | None, keys: Tensor, everyone: Positions, rank: int, ranks: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """What is known of the queries of this rank, and of all keys of a row of which each rank has read its part.

        A subclass overrides this where what is read of a token depends on tokens before it, which other ranks have.

        Args:
            queries: what this rank has read of its tokens, as queries.
            keys: what all ranks have read of theirs, as keys, one equal part after another.
            everyone: where these stand.
            rank, ranks: this one, and how many there are.
        """
        return queries, keys

    def score_mod(self, q: Queries, k: Keys, positions: Where = None, k_positions: Where = None) -> ScoreMod | None:
        """The same as a function for FlexAttention; or ``None`` where that would have to look it up in a matrix."""
        return None

    def matrix(self, query_len: int, key_len: int | None = None) -> Float[Tensor, "heads query key"]:
        """What `bias` adds to the scores, to look at: for encodings whose bias does not depend on the tokens.

        The keys count from position 0 (default: as many as queries), and the queries are the last of them.

        >>> from locant import ALiBi
        >>> ALiBi(2).matrix(2, 3)[0]
        tensor([[-0.0625, -0.0000, -0.0625],
                [-0.1250, -0.0625, -0.0000]])
        """
        got = f"got matrix() of {type(self).__name__}"
        if has_bias(self):
            raise LocantError(f"{got}, whose bias depends on the tokens", "encoding.bias(q, k, positions)")
        door = next(iter(self.doors()), "embed")
        raise LocantError(f"{got}, which adds nothing to attention scores", self._call_of(door))

    def _call_of(self, door: str) -> str:
        return DOORS[door]


def _matrix_of(encoding: PositionEncoding, size: object) -> str | None:
    """The call that is meant by a number in the place of queries, if the encoding has a matrix."""
    has_matrix = type(encoding).matrix is not PositionEncoding.matrix
    return f"encoding.matrix({size})" if has_matrix and isinstance(size, int) else None


def has_bias(encoding: PositionEncoding | None) -> bool:
    """Whether the encoding adds to attention scores."""
    return encoding is not None and "bias" in encoding.doors()


def reads_hidden_states(encoding: PositionEncoding) -> bool:
    """Whether a model has to call `PositionEncoding.read`."""
    return type(encoding).read is not PositionEncoding.read


def bias_of(
    encoding: PositionEncoding, q: Queries, k: Keys, queries: Positions, keys: Positions, heads: slice | None = None
) -> ScoreBias | None:
    """`PositionEncoding.score_bias`, or what `bias` writes where that was written last: in a class, or on this object.

    FSDP puts one on the object, which gathers parameters (``register_fsdp_forward_method``).
    """
    own = vars(encoding)
    if "bias" not in own and not writes_bias(type(encoding)):
        return encoding.score_bias(q, k, queries, keys, heads)
    if heads is not None:
        got = f"got {type(encoding).__name__}, whose method bias writes all of its heads, for some of them"
        raise LocantError(got, "method='gather', or a class that writes score_bias(q, k, queries, keys, heads)")
    has_score_mod = "score_mod" in own if "bias" in own else writes_score_mod(type(encoding))
    return _written(has_score_mod)(encoding, q, k, queries, keys)


def writes_bias(kind: type[PositionEncoding]) -> bool:
    """Whether the class has a `bias` that somebody wrote, and not one that follows from `score_bias`."""
    return kind.bias is not PositionEncoding.bias and not hasattr(kind.bias, "follows")


def writes_score_mod(kind: type[PositionEncoding]) -> bool:
    """Whether somebody wrote a function for FlexAttention beside the class's `bias`, or for it later."""
    for each in kind.__mro__:
        if "score_mod" in vars(each) and not hasattr(vars(each)["score_mod"], "follows"):
            return True
        if "bias" in vars(each):
            return False
    return False


for of_class in (writes_bias, writes_score_mod):
    of_class._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in `locant.kernels.transforms`


def _follows(score_bias: Any, name: str, doc: str, of_value: Callable[[ScoreBias], Any]) -> Any:
    def method(
        self: PositionEncoding, q: Queries, k: Keys | None = None, positions: Where = None, k_positions: Where = None
    ) -> Bias | ScoreMod | None:
        if k is None:
            remedy = _matrix_of(self, q) or f"encoding.{name}(q, k, positions)"
            raise LocantError(f"got {name}({shown(q)}) without keys, expected queries and keys", remedy)
        value = score_bias(self, q, k, *standing(self, q, k, positions, k_positions))
        return None if value is None else of_value(value)

    method.__name__, method.__doc__ = name, doc
    method.follows = True  # type: ignore[attr-defined]
    return method


def _written(has_score_mod: bool) -> Any:
    def score_bias(
        self: PositionEncoding, q: Queries, k: Keys, queries: Positions, keys: Positions, heads: slice | None = None
    ) -> ScoreBias:
        """What `bias` writes."""
        sources, mod = (*self.parameters(), *self.buffers()), self.score_mod if has_score_mod else None
        return Written(q=q, k=k, queries=queries, keys=keys, write=self.bias, mod=mod, sources=sources)

    return score_bias


def standing(
    owner: PositionEncoding | None, q: Tensor, k: Tensor, positions: Where, k_positions: Where
) -> tuple[Positions, Positions]:
    """Where queries and keys stand: keys where the queries do, unless `k_positions` says otherwise; see `from_zero`."""
    if positions is None:
        if k_positions is not None:
            got = "got k_positions without positions: where do the queries stand?"
            raise LocantError(got, "positions=Positions.after(cache_len, n)")
        for name, x in (("q", q), ("k", k)):
            _require_shape(name, x)
        positions = from_zero(q.shape[2], q.device, k.shape[2], 1 if owner is None else owner.num_axes)
    return positions, positions if k_positions is None else k_positions


def require_tokens(
    owner: object, q: Tensor, k: Tensor, positions: Positions, keys: Positions, head_dim: int | None = None
) -> None:
    """Raise unless queries, keys and positions fit each other and, if given, `head_dim`."""
    for name, x, where in (("q", q, positions), ("k", k, keys)):
        require_heads(name, x, where, head_dim)
        where.require_single_axis(type(owner).__name__)


def require_embeddings(
    owner: PositionEncoding, x: Tensor, positions: Where, d_model: int, *, single_axis: bool = True
) -> Positions:
    """Raise unless embeddings fit their positions, which come back, and the width of what is added to them."""
    if positions is not None:
        require_positions(positions)
    require_arithmetic("x", x)
    if x.ndim != 3 or x.shape[-1] != d_model:
        remedy = "x.view(1, *x.shape)" if x.ndim == 2 else width_remedy(owner, x.shape[-1] if x.ndim else 1)
        raise shape_error("x", x, f"(batch, seq, d_model={d_model})", remedy)
    positions = from_zero(x.shape[1], x.device) if positions is None else positions
    positions.require_fits(x.shape[0], x.shape[1], x.device, "x")
    if single_axis:
        positions.require_single_axis(type(owner).__name__)
    return positions


def width_remedy(owner: PositionEncoding, d_model: int) -> str:
    """How an encoding of this width is written; of one whose two sizes were swapped, both in their order."""
    if getattr(owner, "max_seq_len", None) != d_model:
        return f"{type(owner).__name__}(d_model={d_model})"
    return f"{type(owner).__name__}(max_seq_len={getattr(owner, 'd_model', '...')}, d_model={d_model}), in this order"


def require_heads(name: str, x: Any, positions: Where, head_dim: int | None = None, axes: int = 1) -> Positions:
    """Raise unless queries or keys fit their positions, which come back, and, if given, a width of heads."""
    _require_shape(name, x, head_dim)
    positions = from_zero(x.shape[2], x.device, None, axes) if positions is None else positions
    require_positions(positions)
    positions.require_fits(x.shape[0], x.shape[2], x.device, name)
    return positions


def _require_shape(name: str, x: Any, head_dim: int | None = None) -> None:
    require_arithmetic(name, x)
    if x.ndim != 4 or head_dim not in (None, x.shape[-1]):
        width = "head_dim" if head_dim is None else f"head_dim={head_dim}"
        remedy = f"{name}.view(batch, seq, heads, head_dim).transpose(1, 2)"
        raise shape_error(name, x, f"(batch, heads, seq, {width})", remedy)


def bias_matrix(
    encoding: PositionEncoding, num_heads: int, query_len: int, key_len: int | None
) -> Float[Tensor, "heads query key"]:
    """`PositionEncoding.matrix` of a bias that depends on positions alone."""
    query_len = whole("query_len", query_len, 0, remedy="a number of queries")
    key_len = query_len if key_len is None else whole("key_len", key_len, query_len, remedy="query_len or more")
    device = next(encoding.parameters(), torch.empty(0)).device
    keys = Positions.arange(key_len, device=device)
    q, k = (torch.empty(1, num_heads, length, 0, device=device) for length in (query_len, key_len))
    bias = encoding.bias(q, k, keys.slice(key_len - query_len, key_len), keys)
    return bias[0]  # type: ignore[index]  # asked only of those that have one


def build(kind: type[E], options: Mapping[str, Any]) -> E:
    """Return an encoding of this kind; raise a `RangeError` if a size is missing or an option is not taken."""
    require_arguments(kind, (), options)
    require_sizes(kind, options, kind.info.name)
    return kind(**options)
