"""Positions that are added to the token embeddings of a `transformers` model, by hooks.

A hook before the model notes where its tokens are; one behind the input embeddings adds to what they return. Where the
model has a table of positions of its own, a module without a longest row stands in its place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from locant.positions.base import PositionEncoding
from locant.positions.positions import Positions

__all__ = ["EmbeddingPoint", "own_tables", "take_out"]

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
        stack: the part of it that has token embeddings: its encoder or its decoder; default: all of it.
    """

    def __init__(self, owner: Any, place: int, stack: Any = None) -> None:
        self.owner = owner
        self.place = place
        self.stack = owner if stack is None else stack
        self.positions: Positions | None = None
        self.parameters = [*inspect.signature(self.stack.forward).parameters]

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
        given = dict(zip(self.parameters, args, strict=False)) | kwargs
        embedded, ids = given.get("inputs_embeds"), given.get("input_ids")
        tokens = ids if embedded is None else embedded
        if tokens is None:
            return None
        positions = _positions(
            tokens, given.get("position_ids"), given.get("past_key_values"), given.get("attention_mask")
        )
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
