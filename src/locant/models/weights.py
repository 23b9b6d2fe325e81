"""The weights of a checkpoint: the tables of its input, and the order of rows in projections of queries and keys.

This module describes which rows belong to which head, which of them are rotated, and how the code uses the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from locant.models.config_values import WIDTHS, Config

RowScale = float | Literal["sqrt_d_model", "sqrt_d_model_rounded"]


@dataclass(frozen=True, kw_only=True)
class InputTables:
    """The input embedding of an architecture, with the defaults of Llama.

    A module name matches the end of a name in a file, because different classes of the architecture add different
    prefixes: ``embed_tokens`` matches ``model.embed_tokens.weight`` and ``embed_tokens.weight``.

    Args:
        tokens: the module of the token table.
        positions: the module of the table of positions, which the encoding of the architecture adds.
        segments: the module of the table of segments. ``type_vocab_size`` is their number.
        norm: the module of the layer norm of the sum.
        width_keys: possible keys of the width of the token table. The first key in the configuration is used.
        scale: the factor of token rows, as in `TokenEmbedding`.
        scale_key: the key of that factor, if the configuration has it.
        padding: whether the row of ``pad_token_id`` has no gradient.
        default_padding: the default of ``pad_token_id`` in the class. It counts if the configuration lacks the key.
        norm_eps: the key of the norm's epsilon, or the number in the modeling code.
        norm_bias_key: the key for whether the norm has a bias. Without it, the norm has a bias.
        dropout_key: the key of the dropout after the sum.
        why_not: what else the modeling code does with the input, so that an `InputEmbedding` cannot represent it.
    """

    tokens: str = "embed_tokens"
    positions: str | None = None
    segments: str | None = None
    norm: str | None = None
    width_keys: tuple[str, ...] = WIDTHS
    scale: RowScale | Callable[[Config], RowScale] | None = None
    scale_key: str = "embedding_multiplier"
    padding: bool = True
    default_padding: int | None = None
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
        queries, keys: the number of heads.
        width: the number of rows of a head in the projection of queries.
        start: the first rotated row of a head. It is 0 except in multi-head latent attention.
        rotated: the number of rotated rows of a head.
        latent: the number of rows before the one key head of multi-head latent attention.
    """

    queries: int
    keys: int
    width: int
    start: int = 0
    rotated: int
    latent: int = 0


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """`count` consecutive heads of `width` rows each. `rotated` rows of each head are rotated, beginning at `start`."""

    count: int
    width: int
    start: int = 0
    rotated: int = 0

    @property
    def rows(self) -> int:
        return self.count * self.width


RowOrder = Callable[[HeadShape], tuple[HeadRows, ...]]
"""A function that returns the contents of a projection for these heads, from the first row to the last."""


def query_rows(shape: HeadShape, count: int | None = None) -> HeadRows:
    """Return the rows of `count` heads of queries. Default: all."""
    count = shape.queries if count is None else count
    return HeadRows(count=count, width=shape.width, start=shape.start, rotated=shape.rotated)


def key_rows(shape: HeadShape, count: int | None = None) -> HeadRows:
    """Return the rows of `count` heads of keys. Default: all."""
    return query_rows(shape, shape.keys if count is None else count)


def value_rows(shape: HeadShape, count: int | None = None) -> HeadRows:
    """Return the rows of `count` heads of values. Default: all."""
    return replace(key_rows(shape, count), start=0, rotated=0)


def one_after_another(shape: HeadShape) -> tuple[HeadRows, ...]:
    """Return the order of Phi-3: all queries, all keys, all values."""
    return query_rows(shape), key_rows(shape), value_rows(shape)


def group_by_group(shape: HeadShape) -> tuple[HeadRows, ...]:
    """Return the order of GPT-NeoX and Falcon: for each key head, the query heads that share it, then key and value."""
    group = (query_rows(shape, shape.queries // shape.keys), key_rows(shape, 1), value_rows(shape, 1))
    return group * shape.keys
