"""The bias that a model learned in its attention, as T5's: what it is, and a hook that leaves its matrix out.

The first layer of a stack makes a matrix of its bias, and hands it on to the others as `position_bias`. A hook asks the
table for its rows in their order, and so the table itself is handed on, through the model's own code: parameters that
are trained, sharded or computed again stay where they are.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locant.errors import InputError
from locant.positions.encodings.t5 import T5Bias
from locant.positions.positions import Positions
from locant.swapping.rotary_point import owner_around

__all__ = ["BiasPoint", "GivenBias", "bias_points", "layer_types", "self_attention"]

TABLE = "relative_attention_bias"
CROSS = "EncDecAttention"
SIZES = ("relative_attention_num_buckets", "relative_attention_max_distance", "is_decoder")
"""What models call their table of buckets, their cross-attention, and what the buckets follow from."""

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

    def note(module: nn.Module, args: tuple[Tensor]) -> None:
        asked.append(args[0])

    reach = max_distance + 2
    device = torch.device("cpu") if table.weight.is_meta else None
    hook = table.register_forward_pre_hook(note)
    try:
        attention.compute_bias(1, 2 * reach, device=device, past_seen_tokens=reach)
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
    return kinds or list(getattr(config, "layer_types", None) or [None] * config.num_hidden_layers)


def self_attention(points: Sequence[BiasPoint]) -> Mapping[int, Sequence[nn.Module]]:
    """The modules of every layer, counted through."""
    return dict(enumerate(modules for point in points for modules in point.layers))
