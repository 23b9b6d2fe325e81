"""`PositionEncoding`: the three doors through which word order enters a transformer.

``embed`` adds to the token embeddings, ``rotate`` turns queries and keys, ``bias`` adds to the attention scores. Each
does nothing unless an encoding overrides it, so the base class itself is NoPE: no position encoding at all
(Kazemnejad et al. 2023, https://arxiv.org/abs/2305.19466).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locant.errors import LocantError, RangeError
from locant.positions.positions import Positions

__all__ = [
    "EncodingInfo", "ModelShape", "PositionEncoding", "ScoreMod", "bias_dtype", "build", "follows_distance", "has_bias",
    "has_score_mod",
]  # fmt: skip

DOORS = ("embed", "rotate", "bias")

E = TypeVar("E", bound="PositionEncoding")

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's ``(score, batch, head, query, key) -> score``."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model from which an encoding takes those it needs."""

    d_model: int
    num_heads: int
    max_seq_len: int

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads


@dataclass(frozen=True, kw_only=True)
class EncodingInfo:
    """What people are told of an encoding, by `locant list` for one. All of it may be left out."""

    name: str = ""
    """By which `locant.encoding` finds an encoding of this package; others are registered under a name."""
    aliases: tuple[str, ...] = ()
    kind: Literal["absolute", "relative", "none", ""] = ""
    """Whether a model can tell where a token stands, or only how far it is from another."""
    parameters: str = ""
    """How many numbers it learns."""
    cost_of_tokens: str = ""
    """Work and memory for every token."""
    cost_of_pairs: str = ""
    """Work and memory for every pair of a query and a key, in each head."""
    extrapolation: str = ""
    """What happens beyond the trained length."""
    used_by: str = ""
    paper: str = ""


class PositionEncoding(nn.Module):
    """A way to tell a model where its tokens stand; this one says nothing (NoPE).

    A model written against the three doors runs with every encoding::

        x = encoding.embed(x, positions)                     # once, after the token embedding
        q, k = encoding.rotate(q, k, positions)              # in every layer, before the KV cache
        y = attend(q, k, v, encoding=encoding, positions=positions)

    Parameters are sharded with the block that uses them. The doors are no ``forward``: for FSDP to gather those of an
    encoding that is sharded by itself, torch has to be told: ``register_fsdp_forward_method(encoding, "bias")``.

    >>> PositionEncoding().embed(torch.ones(1, 2, 3), Positions.arange(2)).shape
    torch.Size([1, 2, 3])
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

    by_distance: ClassVar[bool] = False
    """Whether `bias` follows from the head and the distance alone (query index minus key index), not from the tokens.

    Attention then asks for one number per head and distance instead of a matrix. It is believed only of the class that
    defines `bias`: whoever overrides `bias` says it again, or not.
    """

    def __init__(self) -> None:
        super().__init__()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "info" not in vars(cls):
            cls.info = EncodingInfo()

    @classmethod
    def doors(cls) -> tuple[str, ...]:
        """Which of ``embed``, ``rotate`` and ``bias`` this class overrides.

        >>> PositionEncoding.doors()
        ()
        """
        return tuple(door for door in DOORS if getattr(cls, door) is not getattr(PositionEncoding, door))

    @classmethod
    def sizes(cls) -> tuple[str, ...]:
        """The sizes of a model that the constructor requires."""
        return tuple(name for name, required in (_options(cls) or {}).items() if required)

    @classmethod
    def for_model(cls, shape: ModelShape, **options: object) -> Self:
        """This encoding for a model of these sizes; `options` go to the constructor.

        Overridden where the constructor requires something else than sizes of a `ModelShape`.
        """
        foreign = [size for size in cls.sizes() if size not in options and not hasattr(shape, size)]
        if foreign:
            raise LocantError(
                f"got {cls.__name__}, which requires {' and '.join(foreign)}: no size of a model",
                "a default for it, or a classmethod for_model(cls, shape, **options)",
            )
        return build(cls, {**{size: getattr(shape, size) for size in cls.sizes() if hasattr(shape, size)}, **options})

    def embed(self, x: Float[Tensor, "batch seq d_model"], positions: Positions) -> Float[Tensor, "batch seq d_model"]:
        """Token embeddings with position added."""
        return x

    def rotate(
        self,
        q: Float[Tensor, "batch heads query head_dim"],
        k: Float[Tensor, "batch kv_heads key head_dim"],
        positions: Positions,
        k_positions: Positions | None = None,
        *,
        inplace: bool = False,
    ) -> tuple[Float[Tensor, "batch heads query head_dim"], Float[Tensor, "batch kv_heads key head_dim"]]:
        """Queries and keys turned by their positions; `k_positions` where the keys stand elsewhere.

        With `inplace` the result is written into the memory of `q` and `k`.
        """
        return q, k

    def bias(
        self,
        q: Float[Tensor, "batch heads query head_dim"],
        k: Float[Tensor, "batch kv_heads key head_dim"],
        positions: Positions,
        k_positions: Positions | None = None,
    ) -> Float[Tensor, "#batch heads query key"] | None:
        """What is added to the attention scores after scaling, or ``None``.

        Works for any slice of queries and keys: entry (i, j) depends on query i and key j alone. float32 at least,
        whatever the dtype of `q`: bfloat16 cannot tell far distances apart.
        """
        return None

    def score_mod(
        self,
        q: Float[Tensor, "batch heads query head_dim"],
        k: Float[Tensor, "batch kv_heads key head_dim"],
        positions: Positions,
        k_positions: Positions | None = None,
    ) -> ScoreMod | None:
        """The same bias as a function for FlexAttention, which never holds it as a tensor; or ``None``.

        It is believed only of the class that defines `bias`, or of one below it: whoever overrides `bias` says it
        again, or is computed without.
        """
        return None


def has_bias(encoding: PositionEncoding | None) -> bool:
    """Whether the encoding uses the third door."""
    return encoding is not None and _owner(encoding, "bias") is not PositionEncoding


def has_score_mod(encoding: PositionEncoding) -> bool:
    """Whether `score_mod` says what `bias` says: whoever overrides `bias` says it again, or has none."""
    bias, score_mod = _owner(encoding, "bias"), _owner(encoding, "score_mod")
    if isinstance(bias, type) and isinstance(score_mod, type):
        return score_mod is not PositionEncoding and issubclass(score_mod, bias)
    return score_mod is encoding


def follows_distance(encoding: PositionEncoding) -> bool:
    """Whether the class whose `bias` this is says that it follows from the distance alone."""
    return bool(vars(_owner(encoding, "bias")).get("by_distance", False))


def _owner(encoding: PositionEncoding, door: str) -> type | PositionEncoding:
    """Whose method it is: that of a class, or of this one object."""
    places = (encoding, *type(encoding).__mro__)
    return next(place for place in places if door in vars(place))


def bias_dtype(q: Tensor) -> torch.dtype:
    """float32, or float64 where the queries are."""
    return torch.promote_types(q.dtype, torch.float32)


def build(kind: type[E], options: Mapping[str, Any]) -> E:
    """An encoding of this kind; an option that it does not take is refused by name, as is one that is missing."""
    accepted = _options(kind)
    unknown = [option for option in options if accepted is not None and option not in accepted]
    missing = [option for option, required in (accepted or {}).items() if required and option not in options]
    if unknown or missing:
        got = f"unknown options {unknown}" if unknown else f"no {' or '.join(missing)}"
        name = repr(kind.info.name) if kind.info.name else kind.__name__
        raise RangeError(
            f"got {got} for {name}, which takes {', '.join(accepted or {}) or 'no options'}",
            f"{kind.__name__}({', '.join(f'{size}=...' for size in kind.sizes())})",
        )
    return kind(**options)


def _options(kind: type[PositionEncoding]) -> dict[str, bool] | None:
    """What the constructor takes by name, and whether it has to be given; ``None`` where it takes any."""
    parameters = inspect.signature(kind).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name: parameter.default is parameter.empty for parameter in parameters}
