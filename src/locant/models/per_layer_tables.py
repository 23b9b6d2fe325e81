"""The per-layer embedding of published models, read from their configurations.

Gemma 3n and Gemma 4 have a second table whose rows hold a part for each layer, and a projection of the token embedding.
EmbeddingGemma 2 has only the projection. The largest models of Gemma 4 have neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from locant.arguments import short_repr
from locant.embedding.per_layer import ACTIVATIONS
from locant.embedding.table import TableSize
from locant.errors import InputError
from locant.models.config_values import (
    NUM_LAYERS,
    WIDTHS,
    Config,
    config_dict,
    integer,
    integer_at,
    number,
    part_key,
    required,
    required_name,
)

ROWS, WIDTH = "vocab_size_per_layer_input", "hidden_size_per_layer_input"
DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma3n_text": {ROWS: 262_144, WIDTH: 256},
    "gemma4_text": {ROWS: 262_144, WIDTH: 256},
    "embedding_gemma2_text": {WIDTH: 512},
}
"""The sizes of the class in `transformers`, by the model types whose modeling code has a per-layer embedding."""
PLACEHOLDERS = {"image_token_id": 258_880, "video_token_id": 258_884, "audio_token_id": 258_881}
"""The ids that stand for images, video and sound in Gemma 4. Its code reads the padding row for them."""


@dataclass(frozen=True, kw_only=True)
class PerLayerTable:
    """The per-layer embedding of a model.

    Args:
        num_rows: the number of rows of the table, or ``None`` without one.
        width: the width of a layer's part.
        padding_idx: the row without a gradient, which `placeholder_ids` read.
        outside_row: the row of ids that the table does not have, or ``None`` if they are an error.
        rounded_factors: whether the factors of the projection and the sum are rounded to the dtype of the embeddings.
        activation: the name of the gate's activation.
        block: the name of the module of the gate in a layer, or an empty text if the layer itself has its parameters.
    """

    num_rows: int | None
    num_layers: int
    width: int
    d_model: int
    padding_idx: int | None
    placeholder_ids: tuple[int, ...]
    outside_row: int | None
    rounded_factors: bool
    eps: float
    init_std: float
    activation: str
    block: str

    @property
    def embedding_options(self) -> dict[str, Any]:
        """The arguments of `PerLayerEmbedding`."""
        names = ("num_layers", "width", "d_model", "padding_idx", "placeholder_ids", "outside_row", "rounded_factors",
                 "eps", "init_std")  # fmt: skip
        return {"vocab_size": self.num_rows, **{name: getattr(self, name) for name in names}}

    @property
    def gate_options(self) -> dict[str, Any]:
        """The arguments of `PerLayerGate`."""
        return {name: getattr(self, name) for name in ("d_model", "width", "activation", "eps")}


def per_layer_table(config: Config | object) -> PerLayerTable | None:
    """Return the per-layer embedding of a model, or ``None`` if it has none.

    >>> gemma = {"model_type": "gemma3n_text", "num_hidden_layers": 30, "hidden_size": 2048}
    >>> per_layer_table(gemma).num_rows
    262144
    """
    values = config_dict(config)
    if (sizes := _sizes(values)) is None:
        return None
    is_3n = values["model_type"] == "gemma3n_text"
    num_rows, width = sizes
    # a missing number is 0 in every class with per-layer embeddings, and null is no padding row
    padding = None if _has_null_padding(config) else values.get("pad_token_id", 0)
    placeholders = _placeholders(config) if num_rows is not None else ()
    if padding is None and placeholders:
        got = "got pad_token_id=None, the row that this model reads for images, video and sound"
        raise InputError(got, "'pad_token_id': 0")
    if padding is not None and num_rows is not None:
        padding = integer("pad_token_id", padding, -num_rows)
        if padding >= num_rows:
            got = f"got pad_token_id={padding} for a per-layer table of {num_rows} rows"
            raise InputError(got, f"'pad_token_id': a number below {num_rows}")
    return PerLayerTable(
        num_rows=num_rows,
        num_layers=required(values, *NUM_LAYERS),
        width=width,
        d_model=required(values, *WIDTHS),
        padding_idx=None if num_rows is None else padding,
        placeholder_ids=placeholders,
        outside_row=0 if is_3n else None,
        rounded_factors=is_3n,
        eps=number("rms_norm_eps", values.get("rms_norm_eps", 1e-6), low=0),
        init_std=number("initializer_range", values.get("initializer_range", 0.02), low=0),
        activation=required_name(values, "hidden_activation", [*ACTIVATIONS], "gelu_pytorch_tanh"),
        block="ple_block." if num_rows is None else "",
    )


def require_per_layer_table(config: Config | object) -> PerLayerTable:
    """Return the per-layer embedding of a model. Raise `InputError` if it has none."""
    if (table := per_layer_table(config)) is None:
        kind = short_repr(config_dict(config).get("model_type"))
        got = f"got a configuration of model_type {kind} without per-layer embeddings"
        raise InputError(got, f"use Gemma 3n, a small Gemma 4 (with {WIDTH} above 0) or EmbeddingGemma 2")
    return table


def per_layer_sizes(config: Config | object) -> tuple[TableSize, ...]:
    """Return the sizes of the table and the projection, if the configuration states the sizes that they need."""
    values = config_dict(config)
    if (sizes := _sizes(values)) is None or (layers := integer_at(values, *NUM_LAYERS)) is None:
        return ()
    (num_rows, width), d_model = sizes, integer_at(values, *WIDTHS)
    sides = {"per-layer tokens": (num_rows, layers * width), "per-layer projection": (layers * width, d_model)}
    return tuple(
        TableSize(name=name, shape=(rows, columns))
        for name, (rows, columns) in sides.items()
        if rows is not None and columns is not None
    )


def _sizes(values: Config) -> tuple[int | None, int] | None:
    """Return the number of rows, if there is a table, and the width for each layer."""
    if (defaults := DEFAULTS.get(str(values.get("model_type")))) is None:
        return None
    width = integer(WIDTH, values.get(WIDTH, defaults[WIDTH]), 0)
    if not width:
        return None
    return integer(ROWS, values.get(ROWS, defaults[ROWS])) if ROWS in defaults else None, width


def _placeholders(config: Config | object) -> tuple[int, ...]:
    """Return the ids that a multimodal Gemma 4 replaces by its padding."""
    whole = _plain(config)
    if whole.get("model_type") != "gemma4":
        return ()
    ids = (whole.get(key, default) for key, default in PLACEHOLDERS.items())
    return tuple(
        integer("image_token_id, video_token_id or audio_token_id", each, 0) for each in ids if each is not None
    )


def _has_null_padding(config: Config | object) -> bool:
    """Return whether a configuration, or its text part, states ``"pad_token_id": null``."""
    whole = _plain(config)
    key = part_key(whole)
    return (whole if key is None else _plain(whole[key])).get("pad_token_id", 0) is None


def _plain(config: Config | object) -> Config:
    """Return a configuration as a dictionary, with its nulls."""
    return config if isinstance(config, Mapping) else getattr(config, "to_dict", dict)()
