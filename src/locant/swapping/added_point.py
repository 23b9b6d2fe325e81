"""Positions that a model adds to its token embeddings (a table of learned positions) or to its scores (T5's bias).

A hook before the model records the positions of its tokens. A hook after the input embeddings adds the new encoding. A
module that accepts any position replaces the table. The first layer of a T5 stack makes a matrix from its bias, and
passes it to the other layers as `position_bias`. A hook makes the bias table return its rows in order, so that the
model's own code passes the table instead of a matrix. Parameters that are trained, sharded or recomputed stay where
they are.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locant.errors import InputError
from locant.models.config_values import attribute
from locant.positions.encodings.t5 import T5Bias
from locant.positions.positions import Positions
from locant.swapping.forward_arguments import ForwardArguments, named_argument
from locant.swapping.new_encoding import NewEncoding
from locant.swapping.rotary_point import owner_around

TABLE_NAMES = ("wpe", "embed_positions", "position_embeddings", "position_embedding")
"""The names of tables of learned positions in models."""
ROTATING_MODEL = "RoFormer"
"""A model that rotates by a table with such a name, which holds sines and cosines.

Zeros would make queries and keys 0.
"""


def learned_tables(owner: nn.Module) -> list[tuple[str, nn.Embedding]]:
    """Return the path and the module of each table of learned positions in a model."""
    return [
        (path, module)
        for path, module in owner.named_modules()
        if path.rpartition(".")[2] in TABLE_NAMES and isinstance(module, nn.Embedding)
        if not type(module).__name__.startswith(ROTATING_MODEL)
    ]


class EmbeddingPoint:
    """Hooks that add an encoding to the token embeddings of a model.

    Args:
        stack: the part of the model that has token embeddings: its encoder, its decoder, or the whole model.
        arguments: the arguments of the stack's forward.
    """

    def __init__(self, new_encoding: NewEncoding, stack: Any, arguments: ForwardArguments) -> None:
        self.new_encoding = new_encoding
        self.stack = stack
        self.arguments = arguments
        self.positions: Positions | None = None

    def attach(self, undo: ExitStack) -> None:
        """Register the hooks."""
        undo.callback(self.stack.register_forward_pre_hook(self.before_model, with_kwargs=True).remove)
        undo.callback(self.stack.get_input_embeddings().register_forward_hook(self.after_embeddings).remove)
        undo.callback(self.stack.register_forward_hook(self.after_model, always_call=True).remove)

    def before_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the positions of the tokens, and add the encoding to embeddings that the caller passes."""
        arguments = self.arguments.read(args, kwargs)
        embedded, ids = arguments.get("inputs_embeds"), arguments.get("input_ids")
        tokens = ids if embedded is None else embedded
        if tokens is None:
            return None
        cache = self.arguments.cache_of(arguments)
        positions = _positions(tokens, arguments.get("position_ids"), cache, arguments.get("attention_mask"))
        if embedded is None:
            self.positions = positions
            return None
        arguments["inputs_embeds"] = self.new_encoding.current.embed(embedded, positions)
        return (), arguments

    def after_embeddings(self, module: nn.Module, args: tuple[Any, ...], embedded: Tensor) -> Tensor:
        """Add the encoding to the token embeddings, if the model computes them."""
        return embedded if self.positions is None else self.new_encoding.current.embed(embedded, self.positions)

    def after_model(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        """Forget the positions, because other code may call the embeddings."""
        self.positions = None


def _positions(tokens: Tensor, position_ids: Tensor | None, cache: Any, mask: Any) -> Positions:
    """Return positions from the position ids, else from the padding mask, else from the slots in the cache."""
    if position_ids is not None:
        return Positions.of(position_ids)
    seen = 0 if cache is None else cache.get_seq_length()
    slots = torch.arange(tokens.shape[1], device=tokens.device) + seen  # a static cache counts on its device
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return Positions.of((mask.long().cumsum(1) - 1).clamp(min=0)[:, slots.to(mask.device)].to(tokens.device))
    if isinstance(seen, Tensor):
        return Positions.of(slots[None])
    return Positions.after(seen, tokens.shape[1], device=tokens.device)


class ZeroPositions(nn.Module):
    """A replacement for a table of positions that returns zeros at any position.

    The rows of the table stay in a buffer of the same name, so they are saved but not trained.
    """

    weight: Tensor

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.register_buffer("weight", table.weight.detach())

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.weight.new_zeros(1, 1, self.weight.shape[1])


def remove_table(owner: nn.Module, path: str, undo: ExitStack) -> None:
    """Remove a table of positions from the model."""
    parent_path, _, name = path.rpartition(".")
    parent = owner.get_submodule(parent_path)
    table: Any = getattr(parent, name)
    zeros = ZeroPositions(table)
    setattr(parent, name, zeros)

    def restore() -> None:
        table.weight.data = zeros.weight  # the model may have moved, cast or loaded the rows
        setattr(parent, name, table)

    undo.callback(restore)


# ---------------------------------------------------------------------- biases

TABLE = "relative_attention_bias"
"""The name of the bias table in models."""
CROSS = "EncDecAttention"
"""The name of cross-attention in models."""
SIZES = ("relative_attention_num_buckets", "relative_attention_max_distance", "is_decoder")
"""The attributes of attention modules that determine the buckets."""
SLOT_OF_QUERY = "past_seen_tokens"
"""The argument of T5's code that holds the slot of the first query."""

Table = Float[Tensor, "1 heads 1 buckets"]


class T5BiasWithoutTable(T5Bias):
    """T5's bias without its own table. Each call passes the model's table."""

    def __init__(self, num_heads: int, **options: Any) -> None:
        super().__init__(num_heads, **options)
        del self.weight

    def with_table(self, table: Table) -> T5BiasWithoutTable:
        """Return a copy with this table, for attention without a matrix."""
        bias = copy.copy(self)
        object.__setattr__(bias, "weight", table[0, :, 0].T)
        return bias

    def make_matrix(
        self, table: Table, positions: Positions, k_positions: Positions
    ) -> Float[Tensor, "1 heads query key"]:
        """Return the same matrix as the model's own code, in the dtype of the table."""
        distance = positions.index[0, :, None] - k_positions.index[0]
        return table[:, :, 0, self.buckets(distance)]

    def reset_parameters(self) -> None:
        """Do nothing, because there are no parameters."""


@dataclass(frozen=True)
class BiasPoint:
    """The encoder or the decoder of a model, and the bias that its layers add to their scores.

    Args:
        tables: the attention modules that have a table (only the first one, or all).
        layers: the self-attention modules of each layer.
        cross: the cross-attention modules, which have no positions.
    """

    stack: Any
    own: T5BiasWithoutTable
    tables: Sequence[nn.Module]
    layers: Sequence[Sequence[nn.Module]]
    cross: Sequence[nn.Module]

    @property
    def kind(self) -> str:
        return "encoder" if self.own.bidirectional else "decoder"

    def pass_table(self, undo: ExitStack) -> None:
        """Let the first layer pass the table to the other layers, instead of a matrix."""
        for each in self.tables:
            undo.callback(getattr(each, TABLE).register_forward_pre_hook(_all_rows).remove)


def _all_rows(table: nn.Embedding, args: tuple[Tensor]) -> tuple[Tensor]:
    return (torch.arange(table.num_embeddings, device=args[0].device)[None],)


def bias_points(model: Any) -> list[BiasPoint]:
    """Return the stacks of a model whose layers add T5's bias.

    Raises:
        InputError: the code of a stack computes another bias.
    """
    stacks: dict[int, tuple[Any, list[nn.Module]]] = {}
    for path, module in model.named_modules():
        if isinstance(getattr(module, TABLE, None), nn.Embedding) and all(hasattr(module, name) for name in SIZES):
            stack = owner_around(model, path)
            stacks.setdefault(id(stack), (stack, []))[1].append(module)
    return [_bias_point(stack, tables) for stack, tables in stacks.values()]


def _bias_point(stack: Any, tables: Sequence[nn.Module]) -> BiasPoint:
    classes = {type(each) for each in tables}
    layers: dict[int, list[nn.Module]] = {}
    cross = list[nn.Module]()
    for path, module in stack.named_modules():
        if type(module) in classes and path.rpartition(".")[2] == CROSS:
            cross.append(module)
        elif type(module) in classes:
            layers.setdefault(getattr(module, "layer_idx", None) or 0, []).append(module)
    return BiasPoint(stack, _own_bias(tables[0]), tables, [layers[each] for each in sorted(layers)], cross)


def _own_bias(attention: Any) -> T5BiasWithoutTable:
    """Return the bias of the configuration.

    Raises:
        InputError: the attention does not compute a bias from distances, or looks up other buckets.
    """
    num_buckets, max_distance, is_decoder = (getattr(attention, name) for name in SIZES)
    table: nn.Embedding = getattr(attention, TABLE)
    own_bias = T5BiasWithoutTable(
        table.embedding_dim, num_buckets=num_buckets, max_distance=max_distance, bidirectional=not is_decoder
    )
    buckets = list[Tensor]()
    reach = max_distance + 2

    def record(module: nn.Module, args: tuple[Tensor]) -> None:
        buckets.append(args[0])

    device = torch.device("cpu") if table.weight.is_meta else None
    hook = table.register_forward_pre_hook(record)
    try:
        named_argument(attention.compute_bias, "the slot of its query", SLOT_OF_QUERY)
        attention.compute_bias(1, 2 * reach, device=device, **{SLOT_OF_QUERY: reach})
    except Exception as error:  # a module that replaces T5's attention may fail in any way
        name = type(attention).__name__
        got = f"got {name}, whose bias is not computed from query-key distances ({type(error).__name__}: {error})"
        raise InputError(got, "use a model with T5's attention") from error
    finally:
        hook.remove()
    distance = reach - torch.arange(2 * reach)
    if not torch.equal(buckets[0].cpu().flatten(), own_bias.buckets(distance)):
        got = f"got {type(attention).__name__}, which does not compute the buckets of its configuration, {own_bias}"
        raise InputError(got, "use a model with T5's attention")
    return own_bias


def layer_types(points: Sequence[BiasPoint], config: Any) -> list[str | None]:
    """Return the type of every layer.

    For T5 the type is ``"encoder"`` or ``"decoder"``, and the encoder's layers come first. For other models the
    configuration states the types.
    """
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
    """Return the self-attention modules of every layer, with consecutive numbers over all stacks."""
    return dict(enumerate(modules for point in points for modules in point.layers))
