"""What a checkpoint holds: the tables of its input, and the order of rows in projections of queries and keys.

Which rows belong to which head, and which of them are rotated; and what the code does with the rows of the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from locant.models.config_values import WIDTHS, Config

RowScale = float | Literal["sqrt_d_model", "sqrt_d_model_rounded"]


@dataclass(frozen=True, kw_only=True)
class InputTables:
    """The input embedding of an architecture; the defaults are Llama's.

    The names of modules are the ends of the names in a file, whatever class of the architecture was saved:
    ``embed_tokens`` is ``model.embed_tokens.weight`` as well as ``embed_tokens.weight``.

    Args:
        tokens: the module of the token table.
        positions: that of the table of positions, which the architecture's encoding adds.
        segments: that of the table of segments, of which ``type_vocab_size`` says how many.
        norm: that of the layer norm of the sum.
        width_keys: the key of the token table's width; the first that is there.
        scale: what token rows are multiplied with, as in `TokenEmbedding`.
        scale_key: the key of that number, where it is one of the configuration.
        padding: whether the row of ``pad_token_id`` has no gradient.
        norm_eps: the key of the norm's epsilon, or the number in the modeling code.
        norm_bias_key: the key that says whether the norm has a bias; without one it has.
        dropout_key: the key of the dropout after the sum.
        why_not: what the modeling code does with the input beside all this, so that an `InputEmbedding` cannot be it.
    """

    tokens: str = "embed_tokens"
    positions: str | None = None
    segments: str | None = None
    norm: str | None = None
    width_keys: tuple[str, ...] = WIDTHS
    scale: RowScale | Callable[[Config], RowScale] | None = None
    scale_key: str = "embedding_multiplier"
    padding: bool = True
    norm_eps: str | float = "layer_norm_eps"
    norm_bias_key: str | None = None
    dropout_key: str | None = None
    why_not: Callable[[Config], str | None] | str | None = None

    def width_key(self, config: Config) -> str:
        return next((key for key in self.width_keys if config.get(key) is not None), self.width_keys[0])


RMS_NORMED = InputTables(why_not="token rows are divided by their root mean square")


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """The heads of one layer.

    Args:
        queries, keys: how many heads.
        width: rows of a head in the projection of queries.
        start: the first row of a head that is rotated; not 0 in multi-head latent attention alone.
        rotated: how many rows of a head are rotated.
        latent: rows before the one key head of multi-head latent attention.
    """

    queries: int
    keys: int
    width: int
    start: int = 0
    rotated: int
    latent: int = 0


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """`count` heads one after the other, of `width` rows each, of which `rotated` rows from `start` on are rotated."""

    count: int
    width: int
    start: int = 0
    rotated: int = 0

    @property
    def rows(self) -> int:
        return self.count * self.width


RowOrder = Callable[[HeadShape], tuple[HeadRows, ...]]
"""What a projection of a layer with these heads holds, from its first row to its last."""


def query_rows(shape: HeadShape, count: int | None = None) -> HeadRows:
    """`count` heads of queries; default: all."""
    count = shape.queries if count is None else count
    return HeadRows(count=count, width=shape.width, start=shape.start, rotated=shape.rotated)


def key_rows(shape: HeadShape, count: int | None = None) -> HeadRows:
    """`count` heads of keys; default: all."""
    return query_rows(shape, shape.keys if count is None else count)


def value_rows(shape: HeadShape, count: int | None = None) -> HeadRows:
    """`count` heads of values; default: all."""
    return replace(key_rows(shape, count), start=0, rotated=0)


def one_after_another(shape: HeadShape) -> tuple[HeadRows, ...]:
    """All queries, all keys, all values (Phi-3)."""
    return query_rows(shape), key_rows(shape), value_rows(shape)


def group_by_group(shape: HeadShape) -> tuple[HeadRows, ...]:
    """The queries that share a key, then that key and its value (GPT-NeoX, Falcon)."""
    group = (query_rows(shape, shape.queries // shape.keys), key_rows(shape, 1), value_rows(shape, 1))
    return group * shape.keys
