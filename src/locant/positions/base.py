"""`PositionEncoding`: the four methods through which word order enters a transformer.

``embed`` adds to the token embeddings, ``rotate`` rotates queries and keys, ``bias`` adds to the attention scores, and
``unrotate`` rotates the output of attention back if values were rotated. A method does nothing unless an encoding
overrides it. So the base class itself is NoPE, an encoding without positions (Kazemnejad et al. 2023,
https://arxiv.org/abs/2305.19466).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from locant.arguments import shape_error, short_repr, whole
from locant.deprecation import Renamed, adopt_old_names
from locant.errors import LocantError, ShapeError
from locant.kernels.norm_rotary import HeadNorm, require_norm
from locant.positions.construction import constructor_options, require_arguments, require_sizes, required_options
from locant.positions.distances import ScoreMod
from locant.positions.positions import OptionalPositions, Positions, positions_or_default, require_positions
from locant.positions.score_bias import ScoreBias, Written
from locant.spelling import dtype_name
from locant.tensors import require_arithmetic

if TYPE_CHECKING:
    from locant.positions.pair_sets import PairSets
    from locant.positions.rotary_by_class import PairClass

EXAMPLE_CALLS = {
    "embed": "encoding.embed(x, positions)",
    "rotate": "encoding.rotate(q, k, positions)",
    "bias": "attend(q, k, v, encoding=encoding, positions=positions), or encoding.bias(q, k, positions)",
    "unrotate": "encoding.unrotate(y, positions)",
}
"""An example call of each method, for the remedies of errors."""

E = TypeVar("E", bound="PositionEncoding")

Embeddings = Float[Tensor, "batch seq d_model"]
Queries = Float[Tensor, "batch heads query head_dim"]
Keys = Float[Tensor, "batch kv_heads key head_dim"]
Output = Float[Tensor, "batch heads query head_dim"]
RotationIntoMemory = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of memory for rotated keys, of values, and of memory for values. It returns the rotated queries."""
Bias = Float[Tensor, "#batch heads query key"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model. Each encoding takes the sizes that it needs."""

    d_model: int
    num_heads: int
    max_seq_len: int
    num_kv_heads: int | None = None
    """The number of key/value heads. Set it if keys and values have fewer heads than queries."""
    head_dim: int = 0
    """The width of a head. Default: ``d_model // num_heads``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim", self.head_dim or self.d_model // self.num_heads)


@dataclass(frozen=True, kw_only=True)
class EncodingInfo:
    """The facts about an encoding that `locant list` shows. Every field is optional.

    Args:
        name: the name by which `locant.encoding` finds an encoding of this package. Other encodings are registered
            under a name.
        kind: whether a model can find a token's position, or only its distance from another token.
        parameters: the number of learned parameters.
        cost_of_tokens: work and memory for every token.
        cost_of_pairs: work and memory for every pair of a query and a key, in each head.
        extrapolation: how the encoding behaves beyond the trained length.
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
    """The base class of position encodings. By itself it encodes no positions (NoPE).

    A model that calls these methods runs with every encoding::

        x = encoding.embed(x, positions)                     # once, after the token embedding
        q, k = encoding.rotate(q, k, positions)              # in every layer, before the KV cache
        y = attend(q, k, v, encoding=encoding, positions=positions)
        y = encoding.unrotate(y, positions)                  # if values are rotated like keys

    Positions are optional if they can only be 0, 1, 2, ...: with two tokens or more and equal numbers of queries and
    keys.

    .. math:: b_{ij} = 0

    With FSDP, parameters are sharded with the block that uses them. If an encoding is sharded by itself, FSDP gathers
    its parameters only for ``forward``. For other methods call ``register_fsdp_forward_method(encoding, "bias")``.

    Limits:
        Without a causal mask, reordered tokens give the same outputs in the new order. The model cannot know which
        token came first.

    Tested against:
        Attention in NumPy, with a causal mask and without.

    >>> import locant
    >>> locant.encoding("nope").methods()
    ()
    """

    info: ClassVar[EncodingInfo] = EncodingInfo(
        name="nope",
        aliases=("none", "no_position"),
        kind="none",
        parameters="none",
        cost_of_tokens="nothing",
        cost_of_pairs="nothing",
        extrapolation="a causal mask alone gives order; some models work beyond the trained length",
        used_by="some layers of Llama 4, SmolLM3, Cohere Command",
        paper="Kazemnejad 2023, arXiv 2305.19466",
    )
    """The facts about this encoding.

    Subclasses do not inherit them. If a subclass does not define `info`, it is empty.
    """
    needs_all_keys: ClassVar[bool] = False
    """True if the bias of a query and a key depends on the keys between them.

    Such a bias needs all keys at once. It does not work with the parts that `locant.attention.merge` joins, or with the
    shards of ring attention.
    """

    _score_bias: ClassVar[Callable[..., ScoreBias | None] | None] = None
    """The last override of `score_bias`. ``super().bias()`` uses it inside an override of `bias`."""

    num_axes: int = 1
    """The number of indices that the encoding uses for each token.

    If there are several, callers must pass positions.
    """

    def __new__(cls, *arguments: Any, **options: Any):  # no return type: beartype does not support Self
        """Check the arguments of every constructor. Copying calls this without arguments."""
        if arguments or options:
            require_arguments(cls, arguments, options)
            require_sizes(cls, {*[*(constructor_options(cls) or ())][: len(arguments)], *options})
        return super().__new__(cls)

    def __init__(self) -> None:
        super().__init__()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        adopt_old_names(cls)
        written = vars(cls).keys() & {"info", "score_bias", "bias", "score_mod"}
        if "info" not in written:
            cls.info = EncodingInfo()
        if {"score_bias", "bias"} <= written:
            raise LocantError(f"got {cls.__name__} with both score_bias and bias", "define one: the other follows")
        if cls.score_bias is not PositionEncoding.score_bias:
            cls._score_bias = cls.score_bias
        # The other methods follow from this bias. Inherited overrides belong to the bias of a parent class.
        if "score_bias" in written:
            cls.bias, cls.score_mod = PositionEncoding.bias, PositionEncoding.score_mod
        elif written & {"bias", "score_mod"}:
            cls.score_bias = PositionEncoding.score_bias

    def score_bias(
        self, q: Queries, k: Keys, queries: Positions, keys: Positions, heads: slice | None = None
    ) -> ScoreBias | None:
        """Return the bias that attention adds to the scaled scores, or ``None``, as a value that every backend can use.

        A subclass overrides either this method or `bias`. If it overrides this method, `bias` and `score_mod` follow
        from it. If it overrides `bias`, this method wraps that `bias` in a `Written` value. An override calls the same
        method of its parent: ``super().score_bias(...)`` in `score_bias`, and ``super().bias(...)`` in `bias`.

        Args:
            q, k: queries and keys.
            queries, keys: their positions.
            heads: the heads of this encoding that `q` has. Default: all.
        """
        if not _overrides_bias(self) and (not has_bias(self) or _ends_overrides(type(self))):
            return None
        if heads is not None:
            got = f"got some of the heads for {type(self).__name__}, whose method bias returns all heads"
            raise LocantError(got, "use method='gather', or override score_bias(q, k, queries, keys, heads) instead")
        mod = self.score_mod if _overrides_score_mod(self) else None
        return Written(
            q=q,
            k=k,
            queries=queries,
            keys=keys,
            write=self._call_bias,
            mod=mod,
            sources=self._tensors(),
            reads_only_arguments=True,
        )

    def _tensors(self) -> tuple[Tensor | None, ...]:
        """Return the parameters and buffers. torch's own iterators of them take microseconds."""
        if torch.compiler.is_compiling():
            return *self.parameters(), *self.buffers()
        modules = self.modules() if self._modules else (self,)
        return (*(x for each in modules for x in (*each._parameters.values(), *each._buffers.values())),)

    def _call_bias(self, q: Queries, k: Keys, queries: Positions, keys: Positions) -> Bias | None:
        try:
            return self.bias(q, k, queries, keys)
        except RecursionError as error:
            raise _circular(self, "bias", "score_bias") from error

    def pair_classes(self, positions: Positions, k_positions: Positions | None = None) -> Sequence[PairClass] | None:
        """Return the classes of pairs that share a rotation, or ``None`` if `rotate` applies the only rotation."""
        return None

    def pair_sets(
        self, q: Queries, k: Keys, v: Float[Tensor, "batch kv_heads key value_dim"], queries: Positions, keys: Positions
    ) -> PairSets | None:
        """Return sets of pairs with vectors of their own, or ``None`` if the vectors of `rotate` serve all pairs.

        `attend` calls it with the arguments that it received. An encoding overrides it if the score of a pair is a
        product of vectors that depend on both tokens, as in `PaTH`.
        """
        return None

    def settle_keys(self, keys: Keys, cached: Positions, new: Positions) -> Tensor | None:
        """Change cached keys in place, if later tokens change them. Return the features of the last keys, or ``None``.

        ``KVCache(encoding=encoding)`` calls it before it adds new tokens. ``cached.read.recent`` has the features of
        the last keys, and the result has the features of those that still have to change earlier keys.
        """
        return None

    def truncate_recent(self, cached: Positions, kept: Int[Tensor, " batch"]) -> Tensor | None:
        """Return the features of the last keys of a cache if each row keeps this many of them.

        Raise `LocantError` if older keys can no longer be computed.
        """
        return None

    @classmethod
    def methods(cls) -> tuple[str, ...]:
        """Return the names of the methods that this class overrides: ``embed``, ``rotate``, ``bias``, ``unrotate``."""
        return tuple(
            method
            for method in EXAMPLE_CALLS
            if getattr(cls, method) is not getattr(PositionEncoding, method)
            or (method == "bias" and cls._score_bias is not None)
        )

    doors = Renamed("methods")

    @classmethod
    def sizes(cls) -> tuple[str, ...]:
        """Return the sizes of a model that the constructor requires."""
        return required_options(cls)

    @classmethod
    def for_model(cls, shape: ModelShape, **options: object) -> PositionEncoding:
        """Build this encoding for a model of these sizes. `options` are passed to the constructor.

        Override this method if the constructor requires anything that is not a size in `ModelShape`.
        """
        sizes: dict[str, Any] = {size: getattr(shape, size) for size in cls.sizes() if hasattr(shape, size)}
        if "num_heads" in sizes and "bias" not in cls.methods():  # a rotation counts the heads of the keys
            sizes["num_heads"] = shape.num_kv_heads or shape.num_heads
        sizes |= options
        if unknown := [size for size in cls.sizes() if size not in sizes]:
            got = f"got {cls.__name__}, which requires {' and '.join(unknown)}: not a size of a model"
            raise LocantError(got, "give it a default, or write a classmethod for_model(cls, shape, **options)")
        return build(cls, sizes)

    def forward(self, x: Embeddings, positions: OptionalPositions = None) -> Embeddings:
        """Call `embed` with these positions (default: 0, 1, 2, ...). The encoding must not override other methods.

        >>> from locant import Sinusoidal
        >>> Sinusoidal(4)(torch.zeros(1, 2, 4))[0, 1]
        tensor([0.8415, 0.5403, 0.0100, 0.9999])
        """
        for method in self.methods():
            if method != "embed":
                got = f"got {type(self).__name__} called like a function, expected a call of its method {method}"
                raise LocantError(got, _matrix_call(self, x) or self._example_call(method))
        if isinstance(x, Tensor) and not x.is_floating_point():
            got = f"got a tensor of {dtype_name(x.dtype)}, expected token embeddings, of shape (batch, seq, d_model)"
            raise ShapeError(got, "use TokenEmbedding for ids; x=torch.zeros(1, n, d_model) gives position vectors")
        require_arithmetic("x", x)
        return self.embed(x, positions_or_default(positions, x.shape[1], x.device))

    def embed(self, x: Embeddings, positions: OptionalPositions = None) -> Embeddings:
        """Add the positions to the token embeddings."""
        return x

    def rotate(
        self,
        q: Queries,
        k: Keys,
        positions: OptionalPositions = None,
        k_positions: OptionalPositions = None,
        *,
        inplace: bool = False,
    ) -> tuple[Queries, Keys]:
        """Rotate queries and keys by their positions. Pass `k_positions` if the keys have other positions.

        With `inplace` the result is written into the memory of `q` and `k`.
        """
        return q, k

    def norm_and_rotate(
        self, q: Queries, k: Keys, positions: Positions, norm: HeadNorm | None
    ) -> tuple[Float[Tensor, "batch rotated_heads query rotated_dim"], Float[Tensor, "batch kv_heads key rotated_dim"]]:
        """Norm the heads of queries and keys, if there is a norm, and `rotate` them."""
        require_norm(norm)
        return self.rotate(*((q, k) if norm is None else norm.apply(q, k)), positions)

    def rotation_into_memory(
        self, q: Queries, k: Keys, positions: Positions, norm: HeadNorm | None = None, *, inplace: bool = False
    ) -> RotationIntoMemory | None:
        """Return the rotation as a function that writes the keys into the memory of a cache, for `rotate_and_append`.

        Return ``None`` if only `rotate` can rotate these tensors. Otherwise raise the errors that `rotate` raises, so
        that the returned function raises none. It does what `rotate` does, with the same bits. With `inplace` it
        overwrites `q`.
        """
        return None

    def bias(
        self,
        q: Queries,
        k: Keys | None = None,
        positions: OptionalPositions = None,
        k_positions: OptionalPositions = None,
    ) -> Bias | None:
        """Return the matrix that attention adds to the scaled scores, or ``None``. It follows from `score_bias`.

        It works for any slice of queries, because entry (i, j) depends only on query i and key j. It also works for
        any slice of keys, unless the class sets `needs_all_keys`. The dtype is float32 or wider for every dtype of `q`,
        because bfloat16 rounds large distances to the same number.
        """
        value = self._bias_value("bias", q, k, positions, k_positions)
        return None if value is None else value.dense()

    def unrotate(self, y: Output, positions: OptionalPositions = None) -> Output:
        """Undo the rotation of values in the output of attention, by the positions of the queries.

        Rotated values are the rotated keys themselves (DeepSeek-V4), or values with the same rotation as the keys (GTA,
        Miyato et al. 2023, arXiv 2310.10375). After `unrotate`, a key's contribution depends on its distance from the
        query. Do not call it if values are not rotated.
        """
        return y

    def read(self, x: Embeddings, positions: Positions, past: Positions | None = None) -> Positions:
        """Return the positions with the features of hidden states that `bias` or `rotate` needs.

        See `HiddenBias` and `RePo`. Call it in every layer with the hidden states from which queries and keys are
        projected, and pass the returned positions to `rotate`, the cache and `attend`. `past` holds the positions of
        the cached tokens.
        """
        return positions

    def read_shard(self, x: Embeddings, positions: Positions) -> Positions:
        """Return what `of_row` needs of this rank's tokens: by default, what `read` returns.

        A subclass overrides this if `read` needs the tokens of other ranks.
        """
        return self.read(x, positions)

    def of_row(
        self, queries: Tensor | None, keys: Tensor, row: Positions, rank: int, ranks: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Merge the features that several ranks have read into the features of a whole row.

        Return the features of this rank's queries and of all keys. A subclass overrides this if a token's features
        depend on earlier tokens, which other ranks hold.

        Args:
            queries: the features of this rank's tokens, as queries.
            keys: the features of all ranks' tokens, as keys: equal parts in the order of ranks.
            row: the positions of these keys.
            rank, ranks: the index of this rank and the number of ranks.
        """
        return queries, keys

    def score_mod(
        self,
        q: Queries,
        k: Keys | None = None,
        positions: OptionalPositions = None,
        k_positions: OptionalPositions = None,
    ) -> ScoreMod | None:
        """Return the bias as a function for FlexAttention, or ``None`` if that function would need the matrix.

        It follows from `score_bias`. A class that overrides `bias` may also override this method.
        """
        if _overrides_bias(self) and not _overrides_score_mod(self):
            return None
        value = self._bias_value("score_mod", q, k, positions, k_positions)
        return None if value is None else value.score_mod()

    def _bias_value(
        self, caller: str, q: Queries, k: Keys | None, positions: OptionalPositions, k_positions: OptionalPositions
    ) -> ScoreBias | None:
        """Return the value of the last override of `score_bias`, or ``None`` if no class overrides it."""
        if k is None:
            remedy = _matrix_call(self, q) or f"encoding.{caller}(q, k, positions)"
            raise LocantError(f"got {caller}({short_repr(q)}) without keys, expected queries and keys", remedy)
        if self._score_bias is None:
            return None
        try:
            return self._score_bias(q, k, *resolve_positions(self, q, k, positions, k_positions))
        except RecursionError as error:
            raise _circular(self, "score_bias", caller) from error

    def matrix(self, query_len: int, key_len: int | None = None) -> Float[Tensor, "heads query key"]:
        """Return the matrix that `bias` adds to the scores, for encodings whose bias does not depend on the tokens.

        The keys count from position 0, and the queries are the last of the keys. Default: `query_len` keys.

        >>> from locant import ALiBi
        >>> ALiBi(2).matrix(2, 3)[0]
        tensor([[-0.0625, -0.0000, -0.0625],
                [-0.1250, -0.0625, -0.0000]])
        """
        got = f"got matrix() of {type(self).__name__}"
        if has_bias(self):
            raise LocantError(f"{got}, whose bias depends on the tokens", "encoding.bias(q, k, positions)")
        method = next(iter(self.methods()), "embed")
        raise LocantError(f"{got}, which adds nothing to attention scores", self._example_call(method))

    def _example_call(self, method: str) -> str:
        return EXAMPLE_CALLS[method]


def _circular(encoding: PositionEncoding, method: str, called: str) -> LocantError:
    """Return the error for an override of `method` that calls `called`, which follows from it."""
    got = f"got {type(encoding).__name__}, whose {method} calls its own {called}, which follows from {method}"
    return LocantError(got, f"call super().{method}(...) in {method}")


def _matrix_call(encoding: PositionEncoding, size: object) -> str | None:
    """Return the `matrix` call to suggest if a user passed a number instead of queries, or ``None``."""
    has_matrix = type(encoding).matrix is not PositionEncoding.matrix
    return f"encoding.matrix({size})" if has_matrix and isinstance(size, int) else None


def has_bias(encoding: PositionEncoding | None) -> bool:
    """Return whether the encoding adds to attention scores."""
    return encoding is not None and "bias" in encoding.methods()


def reads_hidden_states(encoding: PositionEncoding) -> bool:
    """Return whether a model has to call `PositionEncoding.read`."""
    return type(encoding).read is not PositionEncoding.read


def changes_cached_keys(encoding: PositionEncoding) -> bool:
    """Return whether later tokens change cached keys."""
    return type(encoding).settle_keys is not PositionEncoding.settle_keys


def has_pair_sets(encoding: PositionEncoding | type[PositionEncoding]) -> bool:
    """Return whether attention needs `PositionEncoding.pair_sets`."""
    kind = encoding if isinstance(encoding, type) else type(encoding)
    return kind.pair_sets is not PositionEncoding.pair_sets


def effective_score_bias(
    encoding: PositionEncoding, q: Queries, k: Keys, queries: Positions, keys: Positions, heads: slice | None = None
) -> ScoreBias | None:
    """Return the score bias. A `bias` that was set on the class or on this object later is wrapped.

    ``register_fsdp_forward_method`` of FSDP replaces `bias` on the object, to gather parameters.
    """
    if _overrides_bias(encoding):
        return PositionEncoding.score_bias(encoding, q, k, queries, keys, heads)
    return encoding.score_bias(q, k, queries, keys, heads)


def _ends_overrides(kind: type[PositionEncoding]) -> bool:
    """Return whether `PositionEncoding.score_bias` is only reached by an override of it, as its parent's value."""
    defined = [vars(each)["score_bias"] for each in kind.__mro__ if "score_bias" in vars(each)]
    return len(defined) > 1 and defined.count(PositionEncoding.score_bias) == 1


def _overrides_bias(encoding: PositionEncoding) -> bool:
    """Return whether this object or its class overrides `bias`, after any override of `score_bias`."""
    return "bias" in vars(encoding) or type(encoding).bias is not PositionEncoding.bias


def _overrides_score_mod(encoding: PositionEncoding) -> bool:
    """Return whether `score_mod` is overridden for the `bias` of this object, in the same class or a subclass."""
    attributes = vars(encoding)
    return "score_mod" in attributes if "bias" in attributes else class_overrides_score_mod(type(encoding))


def class_overrides_score_mod(kind: type[PositionEncoding]) -> bool:
    """Return whether the class overrides `score_mod`. Parent classes count up to the one that defines `bias`."""
    default = PositionEncoding.score_mod
    for each in kind.__mro__:
        if vars(each).get("score_mod", default) is not default:
            return True
        if "bias" in vars(each):
            return False
    return False


class_overrides_score_mod._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in `locant.kernels.transforms`


def resolve_positions(
    owner: PositionEncoding | None, q: Tensor, k: Tensor, positions: OptionalPositions, k_positions: OptionalPositions
) -> tuple[Positions, Positions]:
    """Return the positions of queries and keys. By default, keys have the positions of the queries."""
    if positions is None:
        if k_positions is not None:
            got = "got k_positions without positions, so the positions of the queries are unknown"
            raise LocantError(got, "positions=Positions.after(cache_len, n)")
        for name, x in (("q", q), ("k", k)):
            _require_shape(name, x)
        axes = 1 if owner is None else owner.num_axes
        positions = positions_or_default(None, q.shape[2], q.device, num_keys=k.shape[2], axes=axes)
    return positions, positions if k_positions is None else k_positions


def require_tokens(
    owner: object, q: Tensor, k: Tensor, positions: Positions, keys: Positions, head_dim: int | None = None
) -> None:
    """Raise unless the shapes of queries, keys and positions match. If `head_dim` is given, it must be the width."""
    for name, x, tokens in (("q", q, positions), ("k", k, keys)):
        require_heads(name, x, tokens, head_dim)
        tokens.require_single_axis(type(owner).__name__)


def require_embeddings(
    owner: PositionEncoding, x: Tensor, positions: OptionalPositions, d_model: int, *, single_axis: bool = True
) -> Positions:
    """Return the positions of embeddings. Raise unless the shapes match and the width is `d_model`."""
    if positions is not None:
        require_positions(positions)
    require_arithmetic("x", x)
    if x.ndim != 3 or x.shape[-1] != d_model:
        remedy = "x.view(1, *x.shape)" if x.ndim == 2 else width_remedy(owner, x.shape[-1] if x.ndim else 1)
        raise shape_error("x", x, f"(batch, seq, d_model={d_model})", remedy)
    positions = positions_or_default(positions, x.shape[1], x.device)
    positions.require_fits(x.shape[0], x.shape[1], x.device, "x")
    if single_axis:
        positions.require_single_axis(type(owner).__name__)
    return positions


def width_remedy(owner: PositionEncoding, d_model: int) -> str:
    """Return the constructor call for this width. If the user swapped the two sizes, put them in the right order."""
    if getattr(owner, "max_seq_len", None) != d_model:
        return f"{type(owner).__name__}(d_model={d_model})"
    return f"{type(owner).__name__}(max_seq_len={getattr(owner, 'd_model', '...')}, d_model={d_model}), in this order"


def require_heads(
    name: str, x: Any, positions: OptionalPositions, head_dim: int | None = None, axes: int = 1
) -> Positions:
    """Return the positions of queries or keys. Raise unless the shapes match and `head_dim`, if given, is the width."""
    _require_shape(name, x, head_dim)
    if positions is None:
        positions = positions_or_default(None, x.shape[2], x.device, axes=axes)
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
    """Return the matrix of a bias that depends on positions alone, for `PositionEncoding.matrix`."""
    query_len = whole("query_len", query_len, 0, remedy="pass a number of queries")
    key_len = query_len if key_len is None else whole("key_len", key_len, query_len, remedy="pass query_len or more")
    device = next(encoding.parameters(), torch.empty(0)).device
    keys = Positions.arange(key_len, device=device)
    q, k = (torch.empty(1, num_heads, length, 0, device=device) for length in (query_len, key_len))
    bias = encoding.bias(q, k, keys.slice(key_len - query_len, key_len), keys)
    return bias[0]  # type: ignore[index]  # only encodings with a bias call this


def build(kind: type[E], options: Mapping[str, Any]) -> E:
    """Return an encoding of this class. Raise `RangeError` if a size is missing or an option is unknown."""
    require_arguments(kind, (), options)
    require_sizes(kind, options, kind.info.name)
    return kind(**options)
