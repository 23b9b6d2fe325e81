"""The row of this package's own small decoder, as `locant train` writes it. No published model has it.

Its configuration holds the sizes of the decoder and the name and the options of its encoding.
"""

from __future__ import annotations

from typing import Any

from locant.arguments import short_repr
from locant.errors import InputError, LocantError, RangeError
from locant.models.architecture import Architecture
from locant.models.config_values import Config, missing_key_error
from locant.models.weights import InputTables
from locant.positions.base import PositionEncoding
from locant.positions.description import from_config
from locant.positions.registry import find

MODEL_TYPE = "locant_decoder"
SIZES = ("vocab_size", "d_model", "num_layers", "num_heads")
FLAGS = ("keys_are_values", "qk_norm")
"""The arguments of `locant.lab.Decoder`, as a configuration has them. A flag that is missing is false."""
TRAIN_LENGTH = "train_length"
REMEDY = "copy the folder again, or train it again with locant train"


def is_lab_decoder(config: object) -> bool:
    """Return whether a configuration describes a decoder of `locant train`."""
    return isinstance(config, dict) and config.get("model_type") == MODEL_TYPE


def encoding_from_lab_config(config: Config, layer_type: str | None = None) -> PositionEncoding:
    """Return the untrained encoding of such a configuration, which all layers share.

    Raises:
        InputError: there is no encoding, no installed package registers it, or it does not take the options.
    """
    description: Any = config.get("encoding")
    if description is None:
        raise missing_key_error(config, "encoding", REMEDY)
    name = description.get("name") if isinstance(description, dict) else None
    if not isinstance(name, str):
        got = f"got a model of locant train with the encoding {short_repr(description)}, expected a name and options"
        raise InputError(got, REMEDY)
    try:
        find(name)
    except RangeError as error:
        got = f"got a model of locant train with the encoding {short_repr(name)}, which no installed package registers"
        raise InputError(got, f"install the package that registers {short_repr(name)}, or import it first") from error
    try:
        return from_config(description)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        why = error.cause if isinstance(error, LocantError) else f"{type(error).__name__}: {error}"
        raise InputError(f"got a model of locant train whose encoding cannot be built: {why}", REMEDY) from error


ROW = Architecture(
    encoding=encoding_from_lab_config,
    attribute_map={
        "hidden_size": "d_model", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
        "max_position_embeddings": TRAIN_LENGTH,
    },
    inputs=InputTables(
        tokens="embedding.token", positions="encoding", norm="embedding.norm", norm_eps=1e-5, scale="sqrt_d_model",
    ),
)  # fmt: skip
