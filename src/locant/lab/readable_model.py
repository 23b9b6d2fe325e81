"""A common interface for measuring trained language models in two kinds of folders.

A folder contains a decoder of `locant train` or a causal language model of `transformers`, which may also be a GGUF
file. Both kinds of model can read a text with their own positions or with another encoding. Nothing is trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from locant.errors import InputError, Remedy
from locant.lab.decoder import Decoder
from locant.lab.generation import is_lab_folder, load
from locant.lab.language_model import TransformersDecoder, load_model, require_positions, trained_length
from locant.lab.position_overrides import PositionOverride, Replacement, swap_positions
from locant.positions.base import PositionEncoding
from locant.swapping.rotary_point import rotary_points
from locant.tensors import as_dtype
from locant.text.tokenizer import Tokenizer


class ReadableModel(ABC):
    """A language model that can read texts with other encodings.

    Args:
        module: the model.
        trained: the length that the model was trained at, if known.
        vocab_size: the number of rows in the token table.
    """

    def __init__(self, module: nn.Module, trained: int | None, vocab_size: int) -> None:
        self.module, self.trained, self.vocab_size = module, trained, vocab_size

    @abstractmethod
    def decoder(self, tokenizer: Tokenizer) -> nn.Module:
        """Return a module with a method `losses` like `Decoder.losses`."""

    @abstractmethod
    def require_positions(self, longest: int) -> None:
        """Raise `InputError` if the model's table of positions has fewer rows than `longest`."""

    @abstractmethod
    def encoding(self, way: PositionOverride, longest: int) -> Replacement:
        """Return the encoding that replaces the model's encoding for texts of this length, or ``None`` to keep it."""

    @abstractmethod
    def use_encoding(self, encoding: Replacement) -> AbstractContextManager[object]:
        """Use this encoding, or the model's encoding with exact angles, until the block ends."""


class _TransformersModel(ReadableModel):
    def __init__(self, model: Any) -> None:
        text = model.config.get_text_config()
        is_stated = getattr(text, "max_position_embeddings", None) is not None  # Bloom has ALiBi and does not state it
        super().__init__(model, trained_length(model.config) if is_stated else None, text.vocab_size)

    def decoder(self, tokenizer: Tokenizer) -> nn.Module:
        return TransformersDecoder(self.module, tokenizer)

    def require_positions(self, longest: int) -> None:
        require_positions(self.module, longest)

    def encoding(self, way: PositionOverride, longest: int) -> Replacement:
        encoding = way.replacement(self.module, self.trained or longest, longest)
        if way.name == "exact" and not rotary_points(self.module, angles="exact"):
            got = f"got exact for {type(self.module).__name__}, which has no rotary positions"
            raise InputError(got, Remedy(ways=("own", "nope")))
        return encoding

    def use_encoding(self, encoding: Replacement) -> AbstractContextManager[object]:
        return swap_positions(self.module, encoding)


class _LabModel(ReadableModel):
    def __init__(self, model: Decoder) -> None:
        super().__init__(model, model.train_length, model.embedding.token.vocab_size)
        self.model = model

    def decoder(self, tokenizer: Tokenizer) -> nn.Module:
        return self.model

    def require_positions(self, longest: int) -> None:
        rows = getattr(self.model.encoding, "max_seq_len", None)
        if rows is not None and longest > rows:
            got = f"got windows of {longest:,} tokens for a model whose table has {rows:,} positions"
            raise InputError(got, Remedy("use {}, or a model without such a table", lengths=(rows,)))

    def encoding(self, way: PositionOverride, longest: int) -> PositionEncoding | None:
        return way.for_decoder(self.model, longest)

    def use_encoding(self, encoding: Replacement) -> AbstractContextManager[object]:
        return self.model.use_encoding(encoding if isinstance(encoding, PositionEncoding) else self.model.encoding)


def read_language_model(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: str | torch.dtype = "auto"
) -> ReadableModel:
    """Read a decoder of `locant train` or a causal language model of `transformers` from a local folder or a GGUF file.

    Args:
        dtype: the dtype to load the model in, ``float32``, ``bfloat16`` or ``float16``. ``auto`` is the saved dtype.

    Raises:
        InputError: the folder does not contain such a model, or the model is damaged.
    """
    if not is_lab_folder(folder):
        return _TransformersModel(load_model(folder, device=device, dtype=dtype))
    model, _ = load(folder)
    model = model.to(device)
    return _LabModel(model if dtype == "auto" else model.to(as_dtype(dtype)))
