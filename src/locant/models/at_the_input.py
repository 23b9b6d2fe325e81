"""Encoders whose positions enter with their input: a learned grid for images, convolutions for speech."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from locant.arguments import shown
from locant.errors import InputError
from locant.models.architecture import Architecture
from locant.models.config_values import WIDTHS, Config, flag, patches, required
from locant.positions.base import PositionEncoding
from locant.positions.encodings.convolutional import Convolutional
from locant.positions.encodings.learned_grid import LearnedGrid

__all__ = ["ARCHITECTURES"]


def _grid(prefix: int, **how: Any) -> Callable[[Config, str | None], PositionEncoding]:
    """A table of as many cells as an image of the trained size has patches."""

    def encoding(config: Config, layer_type: str | None) -> PositionEncoding:
        return LearnedGrid(*patches(config), required(config, *WIDTHS), prefix=prefix, **how)

    return encoding


def _siglip2(config: Config, layer_type: str | None) -> PositionEncoding:
    """A square table of so many patches, for images of any size."""
    side = math.isqrt(required(config, "num_patches"))
    return LearnedGrid(side, side, required(config, *WIDTHS), mode="bilinear", antialias=True)


def _speech(config: Config, layer_type: str | None) -> PositionEncoding:
    if flag("conv_pos_batch_norm", config.get("conv_pos_batch_norm", False)):
        got = "got conv_pos_batch_norm=True, a norm over batches, in which rows depend on each other"
        raise InputError(got, "'conv_pos_batch_norm': False, as most have it")
    return _convolutional(config, kernel_size=required(config, "num_conv_pos_embeddings"))


def _data2vec(config: Config, layer_type: str | None) -> PositionEncoding:
    kernel_size, depth = (required(config, key) for key in ("conv_pos_kernel_size", "num_conv_pos_embeddings"))
    return _convolutional(config, kernel_size=kernel_size, depth=depth, norm="layer")


def _convolutional(config: Config, **options: Any) -> PositionEncoding:
    if (activation := config.get("feat_extract_activation", "gelu")) != "gelu":
        got = f"got feat_extract_activation={shown(activation)}, expected 'gelu'"
        raise InputError(got, "'feat_extract_activation': 'gelu', as released models have it")
    return Convolutional(required(config, *WIDTHS), groups=required(config, "num_conv_pos_embedding_groups"), **options)


IMAGE = {"image_size": 224, "patch_size": 16}
KERNEL = {"num_conv_pos_embeddings": 128, "num_conv_pos_embedding_groups": 16, "feat_extract_activation": "gelu"}

ARCHITECTURES: Mapping[str, Architecture] = {
    "vit": Architecture(encoding=_grid(1), defaults=IMAGE),
    "deit": Architecture(encoding=_grid(2), defaults=IMAGE),
    "clip_vision_model": Architecture(encoding=_grid(1), defaults={**IMAGE, "patch_size": 32}),
    "dinov2": Architecture(encoding=_grid(1), defaults={**IMAGE, "patch_size": 14}),
    "dinov2_with_registers": Architecture(encoding=_grid(1, antialias=True), defaults=IMAGE),
    "siglip_vision_model": Architecture(encoding=_grid(0), defaults=IMAGE),
    "siglip2_vision_model": Architecture(encoding=_siglip2, defaults={"num_patches": 256}),
    **dict.fromkeys(
        ("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat"), Architecture(encoding=_speech, defaults=KERNEL)
    ),
    "data2vec-audio": Architecture(
        encoding=_data2vec, defaults={**KERNEL, "conv_pos_kernel_size": 19, "num_conv_pos_embeddings": 5}
    ),
}
