"""Compute attention weights for a row of tokens in the small decoder, a random decoder, or a model in a folder.

This package's small decoder was trained on the documentation that ships with CPython. The training steps alternated
between the encodings, which share all other weights. It has 350 kB of float16 weights. ``benchmarks/small_model.py``
trains it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor

from locant.attention import attend
from locant.checkpoints.loading import silence_transformers
from locant.figures.plot import fixed_seed
from locant.figures.scores import with_random_tables
from locant.lab.candidate import Candidate
from locant.lab.decoder import Block, Decoder
from locant.lab.language_model import load_config, stated_length, trained_length
from locant.lab.position_overrides import PositionOverride, swap_positions
from locant.positions import PositionEncoding, Positions
from locant.positions.base import ModelShape

FOLDER = Path(__file__).parent / "small_model"
WEIGHTS = "model.safetensors"
ENCODINGS = ("rotary", "alibi", "sinusoidal", "t5", "learned", "nope")
OVERRIDES = ("own", "nope", "alibi", "sinusoidal", "linear:4", "ntk:4", "yarn:4")
"""The encodings to choose from for a model in a folder. None of them needs training."""
ENCODING_PREFIX = "encodings."
"""The prefix of the names of the encodings' weights."""
VOCAB_SIZE, LENGTH = 1024, 128
D_MODEL, NUM_LAYERS, NUM_HEADS = 64, 2, 4


class Layer(NamedTuple):
    """The attention weights of one layer, and for a decoder also the effect of its encoding."""

    weights: Float[Tensor, "heads query key"]
    keys: Float[Tensor, "heads token head_dim"] | None = None
    """The keys before rotation."""
    rotated: Float[Tensor, "heads token width"] | None = None
    added: Float[Tensor, "heads query key"] | None = None
    """The bias added to the scores."""


def build_encoding(name: str) -> PositionEncoding:
    """Return the encoding with this name, for the sizes of this decoder."""
    return Candidate.of(name).build(ModelShape(d_model=D_MODEL, num_heads=NUM_HEADS, max_seq_len=LENGTH))


@lru_cache(maxsize=8)
def untrained_model(name: str, vocab_size: int) -> Decoder:
    """Return a decoder with any encoding and the same random weights each time."""
    with fixed_seed(0):
        encoding = with_random_tables(build_encoding(name))
        return Decoder(vocab_size, encoding, d_model=D_MODEL, num_layers=NUM_LAYERS, num_heads=NUM_HEADS).eval()


@lru_cache(maxsize=8)
def small_model(name: str) -> Decoder:
    """Return the trained decoder, with one of `ENCODINGS`.

    >>> weights = layers_of(small_model("rotary"), [5, 6, 7])[0].weights
    >>> weights.shape, bool(weights[0, 0, 1:].any())
    (torch.Size([4, 3, 3]), False)
    """
    weights, prefix = load_file(FOLDER / WEIGHTS), f"{ENCODING_PREFIX}{name}."
    shared = {key: weight for key, weight in weights.items() if not key.startswith(ENCODING_PREFIX)}
    encoding_weights = {key.removeprefix(prefix): weight for key, weight in weights.items() if key.startswith(prefix)}
    model = untrained_model.__wrapped__(name, VOCAB_SIZE)
    model.load_state_dict({**shared, **{f"embedding.encoding.{key}": each for key, each in encoding_weights.items()}})
    return model


@torch.no_grad()
def layers_of(model: Decoder, ids: Sequence[int] | np.ndarray) -> list[Layer]:
    """Return the attention weights, keys and biases of every layer of a decoder for these tokens."""
    encoding, positions = model.encoding, Positions.arange(len(ids))
    x, layers = model.embedding(torch.tensor([*map(int, ids)])[None], positions), list[Layer]()
    for block in cast("list[Block]", [*model.blocks]):
        hidden = block.attention_norm(x)
        tokens = encoding.read(hidden, positions)
        q, k, v = block.qkv(hidden).unflatten(-1, (3, block.num_heads, -1)).permute(2, 0, 3, 1, 4)
        rotated_q, rotated_k = encoding.norm_and_rotate(q, k, tokens, block.head_norm)
        _, weights = attend(rotated_q, rotated_k, v, encoding=encoding, positions=tokens, return_weights=True)
        added = encoding.bias(rotated_q, rotated_k, tokens)
        layers.append(Layer(weights[0], k[0], rotated_k[0], None if added is None else added[0]))
        x = block(x, encoding, positions, None)
    return layers


@torch.no_grad()
def layers_in_folder(folder: str | Path, ids: Sequence[int] | np.ndarray, way: str = "own") -> list[Layer]:
    """Return the attention weights of every layer of a model of `transformers`.

    `way` is a name that `PositionOverride` reads.

    Raises:
        InputError: the folder has no such model, or the model does not accept these positions.
    """
    model, chosen = _model(str(folder)), PositionOverride.of(way)
    sizes = trained_length(model.config), stated_length(model.config)
    with nullcontext() if way == "own" else swap_positions(model, chosen.replacement(model, *sizes)):
        attentions = model(input_ids=torch.tensor([[*map(int, ids)]]), output_attentions=True).attentions
    return [Layer(weights[0].float()) for weights in attentions or () if weights is not None]


@lru_cache(maxsize=1)
def _model(folder: str) -> Any:
    config = load_config(folder)
    with silence_transformers():
        from transformers import AutoModel

        options: Any = {"attn_implementation": "eager", "local_files_only": True, "use_safetensors": True}
        return AutoModel.from_pretrained(folder, config=config, **options).eval()
