"""Image encoders: rotation by row and column, biases for rows and columns, or a learned grid.

In models with rotation, each axis has a ladder of frequencies, and the order of the pairs differs from model to model.
A position is ``(row, column)`` or ``(frame, row, column)``, from 0, unless a row states otherwise. SAM, ViTDet and BEiT
have biases. Swin and similar models have biases and stages. Layers of Swin attend within windows
(`locant.positions.GridWindows`), as do most layers of SAM and ViTDet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from locant.arguments import short_repr
from locant.errors import InputError
from locant.models.architecture import Architecture, PairsFactory, RotaryKeys, rotary_row, warn_if
from locant.models.config_values import (
    HEADS,
    WIDTHS,
    Config,
    flag_at,
    integer,
    number,
    patches,
    required,
    required_value,
    width_per_head,
)
from locant.positions.base import PositionEncoding
from locant.positions.encodings.grid_bias import ContinuousGridBias, DecomposedBias, GridBias
from locant.positions.encodings.learned import LearnedGrid
from locant.positions.pair_table import Pairs

ROW, COLUMN = 0, 1


def _ladders(*axes: int, interleaved: bool = False, in_turns: bool = False) -> PairsFactory:
    """Return a function that gives each axis a ladder. Pairs are sorted by axis, or by rung if `in_turns` (Kimi)."""

    def pairs(config: Config, rope: Config, head_dim: int) -> Pairs:
        count = head_dim // 2 // len(axes)
        places = [(axis, rung) for axis in axes for rung in range(count)]
        return _table(
            Pairs.of(2 * count * len(axes), layout="interleaved" if interleaved else "half").dims,
            sorted(places, key=lambda place: place[1]) if in_turns else places,
            2 * count,
        )

    return pairs


def _table(dims: Any, places: Sequence[tuple[int, int]], ladder: int) -> Pairs:
    """Return pairs, each with an axis and a rung. `ladder` is the number of dimensions that the rungs cover."""
    return Pairs(dims=dims, axes=[axis for axis, _ in places], rungs=[(ladder, rung) for _, rung in places])


def _half_by_half(config: Config, rope: Config, head_dim: int) -> Pairs:
    """Return pairs that give each axis one half of the head. Each half has the layout "half" (Gemma 4)."""
    count = head_dim // 4
    dims = [(start + i, start + i + count) for start in (0, 2 * count) for i in range(count)]
    return _table(dims, [(axis, rung) for axis in (ROW, COLUMN) for rung in range(count)], 2 * count)


def _every_other_rung(config: Config, rope: Config, head_dim: int) -> Pairs:
    """Return pairs with one ladder over the head.

    Rows have the even rungs, and columns have the odd rungs (Pixtral).
    """
    places = [(axis, 2 * rung + axis) for axis in (ROW, COLUMN) for rung in range(head_dim // 4)]
    return _table(Pairs.of(head_dim).dims, places, head_dim)


def _every_other_angle(member: int) -> PairsFactory:
    """Give each axis one third of the head. The members of a pair have neighbouring rungs (V-JEPA 2)."""

    def pairs(config: Config, rope: Config, head_dim: int) -> Pairs:
        count = head_dim // 3 // 2
        places = [(axis, (2 * rung + member) % count) for axis in range(3) for rung in range(count)]
        return _table([(2 * pair, 2 * pair + 1) for pair in range(3 * count)], places, 2 * count)

    return pairs


def _over_the_width(config: Config, rope: Config, head_dim: int) -> Pairs:
    """Return pairs over the whole width as if it were one head. EfficientLoFTR rotates before it splits the width."""
    share = number("partial_rotary_factor", rope.get("partial_rotary_factor", 4.0), above=0)
    ladder = int(required(config, *WIDTHS) // required(config, *HEADS) * share)
    if 2 * ladder != head_dim:
        got = f"got partial_rotary_factor={share:g}, which gives {ladder} pairs for a width of {head_dim}"
        raise InputError(got, f"'partial_rotary_factor': {required(config, *HEADS) / 2:g}")
    places = [(axis, rung) for rung in range(ladder // 2) for axis in (ROW, COLUMN)]
    return _table(Pairs.of(head_dim, layout="interleaved").dims, places, ladder)


def _from_the_centre(config: Config, rope: Config, head_dim: int) -> Pairs:
    """Return pairs for places from -1 to 1: half patches from the centre, divided by their number (DINOv3)."""
    base = number("rope_theta", rope.get("rope_theta", config.get("rope_theta", 100.0)), above=0)
    steps = [2 * math.pi / count for count in patches(config)]
    return Pairs(
        dims=Pairs.of(head_dim).dims,
        axes=[axis for axis in (ROW, COLUMN) for _ in range(head_dim // 4)],
        inv_freq=[step * base ** (-4 * rung / head_dim) for step in steps for rung in range(head_dim // 4)],
    )


def _size_of_image(config: Config, encoding: PositionEncoding) -> str:
    down, across = patches(config)
    return (
        f"positions are counted in half patches from the centre, as 2 i + 1 - {down} down and 2 j + 1 - {across} "
        "across; for images of another size, set image_size, which changes the frequencies"
    )


def _memory_head(config: Config) -> int:
    """Return the width of a head in the memory attention of SAM 2, the only attention that is rotated."""
    width, heads = (required(config, f"memory_attention_{key}") for key in ("hidden_size", "num_attention_heads"))
    return width // (required(config, "memory_attention_downsample_rate") * heads)


def _axial_row(
    pairs: PairsFactory,
    base: float = 1e4,
    head_dim: int | None = None,
    *,
    row: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Architecture:
    """Return a row with two or three axes.

    `row` has other fields of the row, and `keys` has other fields of `RotaryKeys`.
    """
    keys = {"rope_types": {"axial": "default"}, "pairs": pairs, **keys}
    return rotary_row(base, None, head_dim, keys=RotaryKeys(**keys), **(row or {}))


FIRST_IS_ONE = "positions are (row + 1, column + 1), and (0, 0) for the class token"
BEFORE_HEADS = (
    "it rotates the whole width before it is split into heads: pass q as one head; rows and columns count from 1"
)
INTERLEAVED = _ladders(ROW, COLUMN, interleaved=True)
MEMORY = _axial_row(
    INTERLEAVED,
    head_dim_of=_memory_head,
    other_keys=tuple(f"memory_attention_rope_{key}" for key in ("feat_sizes", "k_sizes", "dropout")),
)
CENTRED = rotary_row(100.0, keys=RotaryKeys(pairs=_from_the_centre), warnings=(_size_of_image,))


# ---------------------------------------------------------------------- without rotation


def _stages(config: Config) -> tuple[str, ...]:
    """Return ``stage1``, ``stage2``, ..., which differ in their number of heads."""
    return tuple(f"stage{number + 1}" for number in range(len(_by_stage(config, "num_heads"))))


def _by_stage(config: Config, key: str) -> tuple[Any, ...]:
    values = required_value(config, key, f"{key!r}: a number for each stage")
    if not isinstance(values, (list, tuple)) or not values:
        raise InputError(
            f"got {key}={short_repr(values)}, expected a number for each stage", f"{key!r}: [3, 6, 12, 24]"
        )
    return tuple(values)


def _stage_value(config: Config, key: str, layer_type: str | None, low: int = 1) -> int:
    values, stage = _by_stage(config, key), _stages(config).index(layer_type or "stage1")
    if stage >= len(values):
        got = f"got {key} of {len(values)} stages for {len(_stages(config))}"
        raise InputError(got, f"{key!r}: one number for each stage")
    return integer(key, values[stage], low)


def _swin(config: Config, layer_type: str | None) -> PositionEncoding:
    window = required(config, "window_size")
    return GridBias(_stage_value(config, "num_heads", layer_type), window, window)


def _swin_v2(config: Config, layer_type: str | None) -> PositionEncoding:
    """Return the bias of Swin v2, whose windows are not larger than the image at their stage."""
    heads, stage = _stage_value(config, "num_heads", layer_type), _stages(config).index(layer_type or "stage1")
    window = min(required(config, "window_size"), *(max(side >> stage, 1) for side in patches(config)))
    sizes = config.get("pretrained_window_sizes")
    trained = 0 if sizes is None else _stage_value(config, "pretrained_window_sizes", layer_type, low=0)
    encoding = ContinuousGridBias(heads, trained or window, trained or window)
    return encoding.at(window, window)


def _beit(config: Config, layer_type: str | None) -> PositionEncoding:
    keys = ("use_relative_position_bias", "use_shared_relative_position_bias")
    if not any(flag_at(config, key) for key in keys):
        got = f"got a {config['model_type']} configuration without {' or '.join(keys)}, so without a bias"
        grid = "locant.LearnedGrid(height, width, d_model, prefix=1)"
        raise InputError(got, f"{grid} for use_absolute_position_embeddings")
    return GridBias(required(config, *HEADS), *patches(config), prefix=True)


def _window_kinds(config: Config) -> tuple[str, ...]:
    """Return ``global`` (layers that attend to the whole image) and ``window``, or an empty tuple without windows."""
    return ("global", "window") if integer("window_size", config.get("window_size", 0), 0) else ()


def _decomposed_bias(key: str) -> Any:
    """Return the bias of SAM and ViTDet. Raise `InputError` if this key is false."""

    def encoding(config: Config, layer_type: str | None) -> PositionEncoding:
        if not flag_at(config, key):
            got = f"got a {config['model_type']} configuration without {key}, so without a bias"
            raise InputError(got, "locant.LearnedGrid(height, width, d_model) for its positions")
        window = integer("window_size", config.get("window_size", 0), 0)
        sides = (window, window) if layer_type == "window" else patches(config)
        return DecomposedBias(width_per_head(config), *sides)

    return encoding


def learned_grid(prefix: int, **how: Any) -> Callable[[Config, str | None], PositionEncoding]:
    """Return a table with one cell for each patch of an image of the trained size."""

    def encoding(config: Config, layer_type: str | None) -> PositionEncoding:
        return LearnedGrid(*patches(config), required(config, *WIDTHS), prefix=prefix, **how)

    return encoding


def _siglip2(config: Config, layer_type: str | None) -> PositionEncoding:
    """Return a square table with a cell for each of `num_patches`, for images of any size."""
    side = math.isqrt(required(config, "num_patches"))
    return LearnedGrid(side, side, required(config, *WIDTHS), mode="bilinear", antialias=True)


IMAGE = {"image_size": 224, "patch_size": 16}
TABLES = ("use_absolute_embeddings", "use_absolute_position_embeddings", "use_abs_pos")
AT_THE_INPUT = warn_if(
    lambda config, encoding: any(flag_at(config, key) for key in TABLES),
    "its input also has learned positions: locant.LearnedGrid",
)
COSINES = (
    "Swin v2 attends to normalised queries and keys, and each head has a learned factor: attend with scale=1.0 to "
    "F.normalize(q, dim=-1) * factor and F.normalize(k, dim=-1)"
)
SWIN = Architecture(
    encoding=_swin, layer_types=_stages, default_layer_type="stage1", defaults={"window_size": 7},
    warnings=(AT_THE_INPUT,),
)  # fmt: skip
BEIT = Architecture(encoding=_beit, defaults=IMAGE, warnings=(AT_THE_INPUT,))
SAM = Architecture(
    encoding=_decomposed_bias("use_rel_pos"), layer_types=_window_kinds, default_layer_type="global",
    defaults={"image_size": 1024, "patch_size": 16, "window_size": 14, "use_rel_pos": True}, warnings=(AT_THE_INPUT,),
)  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    **dict.fromkeys(
        (
            "cohere_compass_vision", "dots3_note_vision_encoder", "ernie4_5_vl_moe_vision", "exaone4_5_vision",
            "glm4v_moe_vision", "glm4v_vision", "glm5_next_vision", "glm_ocr_vision", "mlcd_vision_model",
            "muse_glimmer_vision", "muse_spark_vision", "paddleocr_vl_vision", "qwen2_5_omni_vision_encoder",
            "qwen2_5_vl_vision", "qwen3_5_moe_vision", "qwen3_5_vision", "qwen3_omni_moe_vision_encoder",
            "qwen3_vl_moe_vision", "qwen3_vl_vision", "qwen4_exp_vision", "video_llama_3_vision",
        ),
        _axial_row(_ladders(ROW, COLUMN)),
    ),
    "lfm3_vl_vision": _axial_row(_ladders(ROW, COLUMN), 1e6),
    "qwen2_vl_vision": _axial_row(
        _ladders(ROW, COLUMN), head_dim_of=lambda config: required(config, "embed_dim") // required(config, *HEADS)
    ),
    "sam3_vit_model": _axial_row(INTERLEAVED),
    **dict.fromkeys(("edgetam_video", "sam2_video", "sam3_tracker_video"), MEMORY),
    "inkling2_vision": _axial_row(_ladders(COLUMN, ROW, interleaved=True)),
    "step3p5_vision": _axial_row(_ladders(COLUMN, ROW)),
    "minimax_m3_vl_vision": _axial_row(_ladders(0, 1, 2)),
    "kimi_k25_vision": _axial_row(_ladders(COLUMN, ROW, in_turns=True)),
    "gemma4_vision": _axial_row(_half_by_half, 100.0, 64, not_converted="which has a layout for each half of a head"),
    "pixtral": _axial_row(_every_other_rung),
    "llama4_vision_model": _axial_row(
        _ladders(COLUMN, ROW, interleaved=True), row={"warnings": (FIRST_IS_ONE,)},
        rope_types=dict.fromkeys(("axial", "linear", "dynamic", "yarn", "llama3", "longrope"), "default"),
    ),
    **dict.fromkeys(("dinov3_vit", "eomt_dinov3", "sapiens2"), CENTRED),
    "vjepa2": Architecture(
        rotary=RotaryKeys(
            fixed_base=10_000.0, pairs=_every_other_angle(0), second_pairs=_every_other_angle(1),
            no_rotation="which turns the two dimensions of a pair by different frequencies: not a rotation, because "
            "it changes their length",
        )
    ),
    "efficientloftr": rotary_row(
        1e4,
        keys=RotaryKeys(
            pairs=_over_the_width, not_converted="which rotates before its width is split into heads",
            other_keys=("partial_rotary_factor",), head_dim_of=lambda config: required(config, *WIDTHS),
        ),
        defaults={"partial_rotary_factor": 4.0}, warnings=(BEFORE_HEADS,),
    ),
    **dict.fromkeys(("sam_vision_model", "sam_hq_vision_model"), SAM),
    **dict.fromkeys(("swin", "donut-swin", "maskformer-swin"), SWIN),
    "swinv2": Architecture(
        encoding=_swin_v2, layer_types=_stages, default_layer_type="stage1",
        defaults={"window_size": 7, **IMAGE, "patch_size": 4}, warnings=(COSINES, AT_THE_INPUT),
    ),
    **dict.fromkeys(("beit", "data2vec-vision"), BEIT),
    "vitdet": Architecture(
        encoding=_decomposed_bias("use_relative_position_embeddings"), layer_types=_window_kinds,
        default_layer_type=None, defaults=IMAGE, warnings=(AT_THE_INPUT,),
    ),
    "vit": Architecture(encoding=learned_grid(1), defaults=IMAGE),
    "deit": Architecture(encoding=learned_grid(2), defaults=IMAGE),
    "clip_vision_model": Architecture(encoding=learned_grid(1), defaults={**IMAGE, "patch_size": 32}),
    "dinov2": Architecture(encoding=learned_grid(1), defaults={**IMAGE, "patch_size": 14}),
    "dinov2_with_registers": Architecture(encoding=learned_grid(1, antialias=True), defaults=IMAGE),
    "siglip_vision_model": Architecture(encoding=learned_grid(0), defaults=IMAGE),
    "siglip2_vision_model": Architecture(encoding=_siglip2, defaults={"num_patches": 256}),
}  # fmt: skip
