"""Learned grids, added to the patches of an image: rows for class tokens, then a row for each patch.

Models like ViT have one row before the rows of patches, and models like SigLIP have none. For an image of another size,
the table is resized to the grid of the image, as in `LearnedGrid`. Idefics and MiniCPM use the nearest rows instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from locant.arguments import short_repr
from locant.errors import InputError
from locant.models.architecture import Architecture
from locant.models.config_values import HEADS, WIDTHS, Config, flag_at, integer, patches, required, required_value
from locant.models.learned_tables import NOT_COMPARED, encoding_row
from locant.models.vision import SAM, learned_grid
from locant.positions.base import PositionEncoding
from locant.positions.encodings.grid_bias import GridBias
from locant.positions.encodings.learned import Learned, LearnedGrid
from locant.positions.encodings.sinusoidal import Sinusoidal


def _grid(image: int, patch: int, prefix: int = 0, **row: Any) -> Architecture:
    """Return a row with a table for images and patches of these sizes, which are the defaults of the class."""
    return encoding_row(learned_grid(prefix), {"image_size": image, "patch_size": patch}, **row)


def _spectrogram(config: Config, layer_type: str | None) -> PositionEncoding:
    """Return a grid of overlapping patches of a spectrogram: bands of frequency down, frames across."""
    patch = required(config, "patch_size")
    sizes = {"num_mel_bins": "frequency_stride", "max_length": "time_stride"}
    down, across = ((required(config, size) - patch) // required(config, step) + 1 for size, step in sizes.items())
    return LearnedGrid(down, across, required(config, *WIDTHS), prefix=2)


def _pixio(config: Config, layer_type: str | None) -> PositionEncoding:
    return LearnedGrid(*patches(config), required(config, *WIDTHS), prefix=required(config, "n_cls_tokens"))


def _siglip_navit(config: Config, layer_type: str | None) -> PositionEncoding:
    side = math.isqrt(required(config, "num_patches"))
    return LearnedGrid(side, side, required(config, *WIDTHS), mode="bilinear", antialias=True)


def _aimv2(config: Config, layer_type: str | None) -> PositionEncoding:
    if flag_at(config, "is_native"):
        got = "got is_native=true: sines of rows and columns, which this package does not have"
        raise InputError(got, "'is_native': False, as models with a learned table have it")
    return learned_grid(0)(config, layer_type)


def _internvl(config: Config, layer_type: str | None) -> PositionEncoding:
    if not flag_at(config, "use_absolute_position_embeddings", default=True):
        return PositionEncoding()
    return learned_grid(1)(config, layer_type)


def _yolos(config: Config, layer_type: str | None) -> PositionEncoding:
    """Return a table for a class token, the patches, and detection tokens."""
    down, across = patches(config)
    return Learned(1 + down * across + required(config, "num_detection_tokens"), required(config, *WIDTHS))


def _vivit(config: Config, layer_type: str | None) -> PositionEncoding:
    """Return a table for a class token, and for tubes of frames, rows and columns, one after the other."""
    sides = config.get("tubelet_size")
    if not isinstance(sides, (list, tuple)) or len(sides) != 3:
        raise InputError("got no tubelet_size of three numbers", "'tubelet_size': [2, 16, 16]")
    frames, height, width = (integer("tubelet_size", side) for side in sides)
    image = required(config, "image_size")
    tubes = required(config, "num_frames") // frames * (image // height) * (image // width)
    return Learned(1 + tubes, required(config, *WIDTHS))


def _heads_by_stage(config: Config) -> list[int]:
    heads = required_value(config, HEADS[0], f"{HEADS[0]!r}: [4, 8, 16, 32], a number for each stage")
    if not isinstance(heads, (list, tuple)) or not heads:
        got = f"got {HEADS[0]}={short_repr(heads)}, expected a list with a number of heads for each stage"
        raise InputError(got, "[4, 8, 16, 32]")
    return [integer(HEADS[0], each) for each in heads]


def _clap(config: Config, layer_type: str | None) -> PositionEncoding:
    """Return Swin's bias in windows. Stages differ in their number of heads."""
    stage = int((layer_type or "stage1").removeprefix("stage")) - 1
    window = required(config, "window_size")
    return GridBias(_heads_by_stage(config)[stage], window, window)


def _unsupported_row(
    scheme: str, remedy: str = "write a subclass of locant.PositionEncoding with embed or bias"
) -> Architecture:
    """Return the row of a model whose positions no encoding of this package describes."""

    def encoding(config: Config, layer_type: str | None) -> PositionEncoding:
        raise InputError(f"got {config['model_type']}, which has {scheme}: this package has no encoding for it", remedy)

    return Architecture(encoding=encoding, inputs=NOT_COMPARED)


DETECTOR = _unsupported_row("sines or tables of rows and columns, which every layer adds to its queries and keys")
ROWS_AND_COLUMNS = _unsupported_row("a table of rows and a table of columns, whose vectors are added")

NEAREST = "images of other sizes take the rows nearest to their patches: the table is not resized"
FRAMES = "frames of a video have another table, time_embeddings"
AFTER_CLASS = "the row of the class token is added to every patch: use weight[1:] + weight[:1] of its table"
WITHOUT_PREFIX = "class and register tokens before the patches have no rows"
NOT_RESIZED = "class token, patches and detection tokens share one table; its code resizes the rows of the patches"
TUBES = "a position is a tube of frames, rows and columns, counted after the class token"
FIXED = "a position is a tube of frames, rows and columns, counted one after the other"

BLIP_VISION = _grid(384, 16, 1)
VIT_32 = _grid(224, 32, 1)
VIT_16 = _grid(224, 16, 1)
VIT_14 = _grid(224, 14, 1)
IDEFICS = _grid(224, 32, warnings=(NEAREST,))
MINICPM = _grid(224, 16, warnings=(NEAREST,))
INTERNVL = _grid(448, 14, encoding=_internvl)
EOMT = _grid(640, 16, warnings=(WITHOUT_PREFIX,))

BLIP_BASE = {
    "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "image_size": 384, "patch_size": 16,
}  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    "blip_vision_model": Architecture(
        encoding=learned_grid(1), inputs=NOT_COMPARED, defaults={"image_size": 384, "patch_size": 16},
        presets={"blip-base-vision": BLIP_BASE},
    ),
    "dpt": BLIP_VISION,
    **dict.fromkeys(
        (
            "altclip_vision_model", "chinese_clip_vision_model", "clipseg_vision_model", "metaclip_2_vision_model",
            "xclip_vision_model",
        ),
        VIT_32,
    ),
    "owlvit_vision_model": _grid(768, 32, 1),
    "owlv2_vision_model": _grid(768, 16, 1),
    **dict.fromkeys(("flava_image_model", "git_vision_model", "vit_mae", "vit_msn"), VIT_16),
    **dict.fromkeys(
        (
            "blip_2_vision_model", "instructblip_vision_model", "instructblipvideo_vision_model",
            "kosmos_2_vision_model", "unlimited_ocr_vision_encoder",
        ),
        VIT_14,
    ),
    "bridgetower_vision_model": _grid(288, 16, 1),
    "tipsv2_vision_model": _grid(448, 14, 1),
    "timesformer": _grid(224, 16, 1, warnings=(FRAMES,)),
    **dict.fromkeys(("internvl_vision", "qianfan_ocr_vision"), INTERNVL),
    "mgp-str": Architecture(
        encoding=learned_grid(1), inputs=NOT_COMPARED, defaults={"image_size": (32, 128), "patch_size": 4}
    ),
    "pixio": Architecture(
        encoding=_pixio, inputs=NOT_COMPARED, defaults={"image_size": 256, "patch_size": 16, "n_cls_tokens": 8}
    ),
    "vitpose_backbone": Architecture(
        encoding=learned_grid(0), inputs=NOT_COMPARED, warnings=(AFTER_CLASS,),
        defaults={"image_size": (256, 192), "patch_size": (16, 16)},
    ),
    "aimv2_vision_model": _grid(224, 14, encoding=_aimv2),
    **dict.fromkeys(("groupvit_vision_model", "ijepa"), _grid(224, 16)),
    "janus_vision_model": _grid(384, 16),
    "ovis2_vision": _grid(224, 14),
    "granite_docling_vision": _grid(512, 16),
    "glm_image_vision": _grid(2048, 16),
    **dict.fromkeys(("idefics2_vision", "idefics3_vision", "smolvlm_vision"), IDEFICS),
    "phi4_multimodal_vision": _grid(448, 14, warnings=(NEAREST,)),
    **dict.fromkeys(("minicpm_ocr_vision", "minicpmv4_6_vision", "minicpmv4_7_vision"), MINICPM),
    **dict.fromkeys(("eomt", "videomt"), EOMT),
    "cosmos3_edge_vision": Architecture(encoding=_siglip_navit, inputs=NOT_COMPARED, defaults={"num_patches": 256}),
    "audio-spectrogram-transformer": Architecture(
        encoding=_spectrogram, inputs=NOT_COMPARED,
        defaults={
            "patch_size": 16, "num_mel_bins": 128, "max_length": 1024, "frequency_stride": 10, "time_stride": 10,
        },
    ),
    "yolos": Architecture(
        encoding=_yolos, inputs=NOT_COMPARED, warnings=(NOT_RESIZED,),
        defaults={"image_size": (512, 864), "patch_size": 16, "num_detection_tokens": 100},
    ),
    "vivit": Architecture(
        encoding=_vivit, inputs=NOT_COMPARED, warnings=(TUBES,),
        defaults={"image_size": 224, "num_frames": 32, "tubelet_size": (2, 16, 16)},
    ),
    "videomae": Architecture(
        encoding=lambda config, _: Sinusoidal(required(config, *WIDTHS)), inputs=NOT_COMPARED, warnings=(FIXED,)
    ),
    "clap_audio_model": Architecture(
        encoding=_clap, inputs=NOT_COMPARED, default_layer_type="stage1", defaults={"window_size": 8},
        layer_types=lambda config: tuple(f"stage{number + 1}" for number in range(len(_heads_by_stage(config)))),
    ),
    **dict.fromkeys(
        (
            "conditional_detr", "d_fine", "dab-detr", "deformable_detr", "deimv2", "detr", "lw_detr", "pp_doclayout_v2",
            "pp_doclayout_v3", "pp_doclayout_v4", "rf_detr", "rt_detr", "rt_detr_v2", "table-transformer",
        ),
        DETECTOR,
    ),
    **dict.fromkeys(("pix2struct_vision_model", "tvp"), ROWS_AND_COLUMNS),
    "levit": _unsupported_row("a bias for every pair of offsets between grids, which differ from layer to layer"),
    "mllama_vision_model": _unsupported_row("gated tables of patches and of the tiles of an image"),
    "pvt": _unsupported_row("another grid in every stage"),
    "radio": _unsupported_row("a table that is cut out of a larger one by the size of an image"),
    "sam2_hiera_det_model": _unsupported_row(
        "a small table that is resized, and a table that is repeated in every window"
    ),
    "videoprism_vision_model": _unsupported_row("a table of the places in a frame, and a later table of the frames"),
    **dict.fromkeys(
        (
            "deepseek_ocr2_sam_vision_model", "got_ocr2_vision", "pp_chart2table_vision",
            "unlimited_ocr_sam_vision_model",
        ),
        SAM,
    ),
    **dict.fromkeys(
        ("pp_formulanet_vision", "slanext_vision"),
        Architecture(
            encoding=SAM.encoding, layer_types=SAM.layer_types, default_layer_type=SAM.default_layer_type,
            defaults={**SAM.defaults, "image_size": 512}, warnings=SAM.warnings,
        ),
    ),
}  # fmt: skip
