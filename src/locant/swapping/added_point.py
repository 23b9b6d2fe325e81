"""What a model adds: a table of learned positions to its token embeddings, or a bias to its scores, as T5 does.

A hook before the model notes where its tokens are, and one behind the input embeddings adds to what they return. In the
place of a table stands a module without a longest row. The first layer of a stack of T5's makes a matrix of its bias,
and hands it on to the others as `position_bias`. A hook asks that table for its rows in their order, and so the table
itself is handed on, through the model's own code: parameters that are trained, sharded or computed again stay where
they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locant.errors import InputError
from locant.models.config_values import attribute
from locant.positions.base import PositionEncoding
from locant.positions.encodings.t5 import T5Bias
from locant.positions.positions import Positions
from locant.swapping.forward_arguments import ForwardArguments, named_argument
from locant.swapping.rotary_point import owner_around

CALLED_SO = ("wpe", "embed_positions", "position_embeddings", "position_embedding")
"""What models call their table of learned positions."""
ROTATES = "RoFormer"
"""Whose table of that name holds sines and cosines, and is not added: zeros would leave no queries and keys."""


def own_tables(owner: nn.Module) -> list[tuple[str, nn.Embedding]]:
    """The tables of learned positions of a model, by their paths."""
    return [
        (path, module)
        for path, module in owner.named_modules()
        if path.rpartition(".")[2] in CALLED_SO and isinstance(module, nn.Embedding)
        if not type(module).__name__.startswith(ROTATES)
    ]


class EmbeddingPoint:
    """Adds the encoding of a model to its token embeddings.

    Args:
        owner: the model that holds the encodings, as `locant`.
        place: which of them.
        stack: the part of it that has token embeddings: its encoder, its decoder, or all of it.
        generates: whether the model generates text.
    """

    def __init__(self, owner: Any, place: int, stack: Any, *, generates: bool = False) -> None:
        self.owner = owner
        self.place = place
        self.stack = stack
        self.positions: Positions | None = None
        self.arguments = ForwardArguments(stack, generates=generates)

    @property
    def encoding(self) -> PositionEncoding:
        return getattr(self.owner.locant, str(self.place))

    def attach(self) -> list[Any]:
        """The handles of the hooks."""
        return [
            self.stack.register_forward_pre_hook(self.before, with_kwargs=True),
            self.stack.get_input_embeddings().register_forward_hook(self.behind),
            self.stack.register_forward_hook(self.after, always_call=True),
        ]

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note where the tokens are; embeddings that the caller made are added to here."""
        given = self.arguments.read(args, kwargs)
        embedded, ids = given.get("inputs_embeds"), given.get("input_ids")
        tokens = ids if embedded is None else embedded
        if tokens is None:
            return None
        past = self.arguments.cache_of(given)
        positions = _positions(tokens, given.get("position_ids"), past, given.get("attention_mask"))
        if embedded is None:
            self.positions = positions
            return None
        given["inputs_embeds"] = self.encoding.embed(embedded, positions)
        return (), given

    def behind(self, module: nn.Module, args: tuple[Any, ...], embedded: Tensor) -> Tensor:
        """Add to the token embeddings of this call of the model."""
        return embedded if self.positions is None else self.encoding.embed(embedded, self.positions)

    def after(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        """Forget where the tokens were: the embeddings may be called by others."""
        self.positions = None


def _positions(tokens: Tensor, position_ids: Tensor | None, past: Any, mask: Any) -> Positions:
    """By the position ids, else by what the mask of padding lets count, else by slots."""
    if position_ids is not None:
        return Positions.of(position_ids)
    seen = 0 if past is None else past.get_seq_length()
    slots = torch.arange(tokens.shape[1], device=tokens.device) + seen  # a cache of one shape counts on its device
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return Positions.of((mask.long().cumsum(1) - 1).clamp(min=0)[:, slots.to(mask.device)].to(tokens.device))
    if isinstance(seen, Tensor):
        return Positions.of(slots[None])
    return Positions.after(seen, tokens.shape[1], device=tokens.device)


class TakenOut(nn.Module):
    """In the place of a table of positions: zeros, at any position.

    The rows stay, as a buffer of the same name: files keep them, and nothing trains them.
    """

    weight: Tensor

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.register_buffer("weight", table.weight.detach())

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.weight.new_zeros(1, 1, self.weight.shape[1])


def take_out(owner: nn.Module, path: str) -> Callable[[], None]:
    """Take a table of positions out of the model; what is returned puts it back, wherever the model has gone."""
    around, _, name = path.rpartition(".")
    parent = owner.get_submodule(around)
    table: Any = getattr(parent, name)
    taken = TakenOut(table)
    setattr(parent, name, taken)

    def put_back() -> None:
        table.weight.data = taken.weight  # moved and cast with the model, or loaded, since
        setattr(parent, name, table)

    return put_back


# ---------------------------------------------------------------------- biases

TABLE = "relative_attention_bias"
CROSS = "EncDecAttention"
SIZES = ("relative_attention_num_buckets", "relative_attention_max_distance", "is_decoder")
"""What models call their table of buckets, their cross-attention, and what the buckets follow from."""
SLOT_OF_QUERY = ("past_seen_tokens", "cache_position")
"""What the code of T5 calls the slot of its first query, as a number; before `transformers` 5.4, as a tensor of all."""

Table = Float[Tensor, "1 heads 1 buckets"]


class GivenBias(T5Bias):
    """T5's bias, whose table each call gives: it stays the model's."""

    def __init__(self, num_heads: int, **options: Any) -> None:
        super().__init__(num_heads, **options)
        del self.weight

    def of_table(self, table: Table) -> GivenBias:
        """The same with this table, for attention that needs no matrix."""
        given = copy.copy(self)
        object.__setattr__(given, "weight", table[0, :, 0].T)
        return given

    def matrix_of(
        self, table: Table, positions: Positions, k_positions: Positions
    ) -> Float[Tensor, "1 heads query key"]:
        """As the model's own code makes it: the numbers of the table, in its dtype."""
        distance = positions.index[0, :, None] - k_positions.index[0]
        return table[:, :, 0, self.buckets(distance)]

    def reset_parameters(self) -> None:
        """There are none."""


@dataclass(frozen=True)
class BiasPoint:
    """The encoder or the decoder of a model, and what its layers add to their scores.

    Args:
        tables: the attention modules that have a table: the first, or all of them.
        layers: the modules of self-attention, layer by layer.
        cross: those of cross-attention, which have no positions.
    """

    stack: Any
    own: GivenBias
    tables: Sequence[nn.Module]
    layers: Sequence[Sequence[nn.Module]]
    cross: Sequence[nn.Module]

    @property
    def kind(self) -> str:
        return "encoder" if self.own.bidirectional else "decoder"

    def leave_matrix_out(self) -> list[Any]:
        """The handles of hooks, by which the layers are handed the table in the place of a matrix."""
        return [getattr(each, TABLE).register_forward_pre_hook(_all_rows) for each in self.tables]


def _all_rows(table: nn.Embedding, args: tuple[Tensor]) -> tuple[Tensor]:
    return (torch.arange(table.num_embeddings, device=args[0].device)[None],)


def bias_points(model: Any) -> list[BiasPoint]:
    """The stacks of a model whose layers add T5's bias; of one whose code computes another, a refusal."""
    with_table: dict[int, tuple[Any, list[nn.Module]]] = {}
    for path, module in model.named_modules():
        if isinstance(getattr(module, TABLE, None), nn.Embedding) and all(hasattr(module, name) for name in SIZES):
            stack = owner_around(model, path)
            with_table.setdefault(id(stack), (stack, []))[1].append(module)
    return [_point(stack, tables) for stack, tables in with_table.values()]


def _point(stack: Any, tables: Sequence[nn.Module]) -> BiasPoint:
    kinds = {type(each) for each in tables}
    layers: dict[int, list[nn.Module]] = {}
    cross = list[nn.Module]()
    for path, module in stack.named_modules():
        if type(module) in kinds and path.rpartition(".")[2] == CROSS:
            cross.append(module)
        elif type(module) in kinds:
            layers.setdefault(getattr(module, "layer_idx", None) or 0, []).append(module)
    return BiasPoint(stack, _measured(tables[0]), tables, [layers[each] for each in sorted(layers)], cross)


def _measured(attention: Any) -> GivenBias:
    """The buckets that its configuration says, where its code looks up the same ones."""
    num_buckets, max_distance, is_decoder = (getattr(attention, name) for name in SIZES)
    table: nn.Embedding = getattr(attention, TABLE)
    own = GivenBias(
        table.embedding_dim, num_buckets=num_buckets, max_distance=max_distance, bidirectional=not is_decoder
    )
    asked = list[Tensor]()
    reach = max_distance + 2

    def note(module: nn.Module, args: tuple[Tensor]) -> None:
        asked.append(args[0])

    device = torch.device("cpu") if table.weight.is_meta else None
    hook = table.register_forward_pre_hook(note)
    try:
        name = named_argument(attention.compute_bias, "the slot of its query", *SLOT_OF_QUERY)
        slot = {name: reach if name == SLOT_OF_QUERY[0] else torch.tensor([reach])}
        attention.compute_bias(1, 2 * reach, device=device, **slot)
    except Exception as error:  # what stands in the place of T5's attention may fail in any way
        name = type(attention).__name__
        got = f"got {name}, whose bias is for no query and key by their distance ({type(error).__name__}: {error})"
        raise InputError(got, "a model whose attention is T5's") from error
    finally:
        hook.remove()
    distance = reach - torch.arange(2 * reach)
    if not torch.equal(asked[0].cpu().flatten(), own.buckets(distance)):
        got = f"got {type(attention).__name__}, which does not compute the buckets of its configuration, {own}"
        raise InputError(got, "a model whose attention is T5's")
    return own


def layer_types(points: Sequence[BiasPoint], config: Any) -> list[str | None]:
    """The type of every layer: of T5's, the encoder's first, in which of the two it is; else what a model's own is."""
    kinds: list[str | None] = [point.kind for point in points for _ in point.layers]
    if kinds:
        return kinds
    if types := attribute(config, "layer_types"):
        return [*types]
    if (count := attribute(config, "num_hidden_layers")) is None:
        got = f"got a model whose {type(config).__name__} has no num_hidden_layers"
        raise InputError(got, "use a model with one stack of layers, such as a Llama")
    return [None] * count


def self_attention(points: Sequence[BiasPoint]) -> Mapping[int, Sequence[nn.Module]]:
    """The modules of every layer, counted through."""
    return dict(enumerate(modules for point in points for modules in point.layers))
