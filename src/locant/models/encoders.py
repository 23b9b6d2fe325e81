"""Encoders without rotation: images with biases of rows and columns, or a learned grid; speech with convolutions.

Biases have SAM and ViTDet, Swin and its kin by stages, and BEiT; the others' positions enter with their input. Swin's
layers attend within windows (`locant.positions.GridWindows`), and so do most of SAM's and ViTDet's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from locant.arguments import shown
from locant.errors import InputError
from locant.models.architecture import Architecture
from locant.models.config_values import HEADS, WIDTHS, Config, flag, integer, missing, patches, required, width_per_head
from locant.positions.base import PositionEncoding
from locant.positions.encodings.convolutional import Convolutional
from locant.positions.encodings.grid_bias import ContinuousGridBias, DecomposedBias, GridBias
from locant.positions.encodings.learned import LearnedGrid

__all__ = ["ARCHITECTURES"]


def _stages(config: Config) -> tuple[str, ...]:
    """``stage1``, ``stage2``, ...: each has a number of heads of its own."""
    return tuple(f"stage{number + 1}" for number in range(len(_by_stage(config, "num_heads"))))


def _by_stage(config: Config, key: str) -> tuple[Any, ...]:
    if key not in config:
        raise missing(config, key, f"{key!r}: a number for each stage")
    if not isinstance(config[key], (list, tuple)) or not config[key]:
        raise InputError(
            f"got {key}={shown(config[key])}, expected a number for each stage", f"{key!r}: [3, 6, 12, 24]"
        )
    return tuple(config[key])


def _of_stage(config: Config, key: str, layer_type: str | None, low: int = 1) -> int:
    values, stage = _by_stage(config, key), _stages(config).index(layer_type or "stage1")
    if stage >= len(values):
        raise InputError(f"got {key} of {len(values)} stages for {len(_stages(config))}", f"{key!r}: one for each")
    return integer(key, values[stage], low)


def _swin(config: Config, layer_type: str | None) -> PositionEncoding:
    window = required(config, "window_size")
    return GridBias(_of_stage(config, "num_heads", layer_type), window, window)


def _swin_v2(config: Config, layer_type: str | None) -> PositionEncoding:
    """Windows are no larger than what is left of the image at a stage."""
    heads, stage = _of_stage(config, "num_heads", layer_type), _stages(config).index(layer_type or "stage1")
    window = min(required(config, "window_size"), *(max(side >> stage, 1) for side in patches(config)))
    sizes = config.get("pretrained_window_sizes")
    trained = 0 if sizes is None else _of_stage(config, "pretrained_window_sizes", layer_type, low=0)
    encoding = ContinuousGridBias(heads, trained or window, trained or window)
    return encoding.at(window, window)


def _beit(config: Config, layer_type: str | None) -> PositionEncoding:
    keys = ("use_relative_position_bias", "use_shared_relative_position_bias")
    if not any(flag(key, config.get(key, False)) for key in keys):
        got = f"got a {config['model_type']} configuration without {' or '.join(keys)}, so without a bias"
        raise InputError(
            got, "locant.LearnedGrid(height, width, d_model, prefix=1) for use_absolute_position_embeddings"
        )
    return GridBias(required(config, *HEADS), *patches(config), prefix=True)


def _kinds(config: Config) -> tuple[str, ...]:
    """Layers that attend to the whole image, and those that attend within windows, where there are some."""
    return ("global", "window") if integer("window_size", config.get("window_size", 0), 0) else ()


def _decomposed(key: str) -> Any:
    """SAM's and ViTDet's, where this key says that they have it."""

    def encoding(config: Config, layer_type: str | None) -> PositionEncoding:
        if not flag(key, config.get(key, False)):
            got = f"got a {config['model_type']} configuration without {key}, so without a bias"
            raise InputError(got, "locant.LearnedGrid(height, width, d_model) for its positions")
        window = integer("window_size", config.get("window_size", 0), 0)
        return DecomposedBias(
            width_per_head(config), *((window, window) if layer_type == "window" else patches(config))
        )

    return encoding


def _at_the_input(config: Config, encoding: PositionEncoding) -> str | None:
    keys = ("use_absolute_embeddings", "use_absolute_position_embeddings", "use_abs_pos")
    if not any(flag(key, config.get(key, False)) for key in keys):
        return None
    return "its input has learned positions besides: locant.LearnedGrid"


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


COSINES = (
    "Swin v2 attends to normalised queries and keys, and each head has a learned factor: attend with scale=1.0 to "
    "F.normalize(q, dim=-1) * factor and F.normalize(k, dim=-1)"
)
SWIN = Architecture(
    encoding=_swin, layer_types=_stages, default_layer_type="stage1", defaults={"window_size": 7},
    warnings=(_at_the_input,),
)  # fmt: skip
SIZES = {"image_size": 224, "patch_size": 4}
BEIT = Architecture(encoding=_beit, defaults={"image_size": 224, "patch_size": 16}, warnings=(_at_the_input,))
SAM = Architecture(
    encoding=_decomposed("use_rel_pos"), layer_types=_kinds, default_layer_type="global",
    defaults={"image_size": 1024, "patch_size": 16, "window_size": 14, "use_rel_pos": True}, warnings=(_at_the_input,),
)  # fmt: skip

IMAGE = {"image_size": 224, "patch_size": 16}
KERNEL = {"num_conv_pos_embeddings": 128, "num_conv_pos_embedding_groups": 16, "feat_extract_activation": "gelu"}

ARCHITECTURES: Mapping[str, Architecture] = {
    **dict.fromkeys(("sam_vision_model", "sam_hq_vision_model"), SAM),
    **dict.fromkeys(("swin", "donut-swin", "maskformer-swin"), SWIN),
    "swinv2": Architecture(
        encoding=_swin_v2, layer_types=_stages, default_layer_type="stage1", defaults={"window_size": 7, **SIZES},
        warnings=(COSINES, _at_the_input),
    ),
    **dict.fromkeys(("beit", "data2vec-vision"), BEIT),
    "vitdet": Architecture(
        encoding=_decomposed("use_relative_position_embeddings"), layer_types=_kinds, default_layer_type=None,
        defaults={"image_size": 224, "patch_size": 16}, warnings=(_at_the_input,),
    ),
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
}  # fmt: skip
