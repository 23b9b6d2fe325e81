"""Where a checkpoint has the tables of its input, and what its code does with their rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from locant.models.config_values import WIDTHS, Config

__all__ = ["RMS_NORMED", "InputTables", "RowScale"]

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
        dropout_key: the key of the dropout behind the sum.
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
