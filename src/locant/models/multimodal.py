"""Language models that read images, video or sound: each pair of dimensions belongs to one axis of a position.

A position is ``(time, row, column)``. Text has the same index on every axis, or positions of one axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from locant.arguments import short_repr
from locant.errors import InputError
from locant.kernels.rotary import Layout
from locant.models.architecture import SHARE, Architecture, PairsFactory, RotaryKeys, rotary_row
from locant.models.config_values import HEADS, Config, flag_at, integer, number, required, sections_in
from locant.models.mixed_layers import rope
from locant.models.weights import RMS_NORMED
from locant.positions.base import PositionEncoding
from locant.positions.pair_table import Pairs

TIME, ROW, COLUMN = 0, 1, 2
MROPE = {"mrope": "default"}


def axes_in_turns(pairs: int, rows: int, columns: int) -> list[int]:
    """Return the axis of each pair.

    Rows and columns get every third pair each, as far as their numbers of pairs reach.
    """
    reach = {ROW: 3 * rows, COLUMN: 3 * columns}
    return [pair % 3 if pair < reach.get(pair % 3, 0) else TIME for pair in range(pairs)]


def _by_stride(*default: int, layout: Layout = "half") -> PairsFactory:
    """Give rows and columns every third pair each, as far as their sections reach (Qwen3-VL)."""

    def pairs(config: Config, rope: Config, rotary_dim: int) -> Pairs:
        if rope.get("mrope_interleaved") is False:
            got = f"got mrope_interleaved=false for {config['model_type']}, whose code always interleaves the axes"
            raise InputError(got, "remove it from the configuration")
        _, rows, columns = sections_in(rope, default)
        axes = axes_in_turns((rotary_dim + 1) // 2, rows, columns)
        return replace(Pairs.of(rotary_dim, layout=layout), axes=axes, num_axes=3)

    return pairs


def _alternate_rows_and_columns(config: Config, rope: Config, rotary_dim: int) -> Pairs:
    """Return pairs of alternating rows and columns, and the slowest pairs for time (ERNIE 4.5 VL)."""
    rows, columns, frames = sections_in(rope, (22, 22, 20))
    if rows != columns or 2 * (rows + columns + frames) != rotary_dim:
        got = f"got mrope_section={[rows, columns, frames]} for {rotary_dim // 2} pairs"
        raise InputError(got, "[22, 22, 20]: the same number for rows and columns, and the rest for time")
    return replace(Pairs.of(rotary_dim, layout="interleaved"), axes=[ROW, COLUMN] * rows + [TIME] * frames, num_axes=3)


def _by_sections_of_dimensions(member: int) -> PairsFactory:
    """Give each pair the axis of this member: the sections count dimensions, not pairs (HunYuan-VL)."""

    def pairs(config: Config, rope: Config, head_dim: int) -> Pairs:
        sections = rope.get("mrope_section")
        if not isinstance(sections, (list, tuple)):
            got = f"got mrope_section={short_repr(sections)}, expected half the number of dimensions of each axis"
            raise InputError(got, "[16, 16, 16, 16]")
        counts = [2 * integer("mrope_section", section, 0) for section in sections]
        axes = [axis for axis, count in enumerate(counts) for _ in range(count)]
        if len(axes) != head_dim:
            got = f"got mrope_section={[*sections]}, which is for {len(axes)} dimensions, and heads of {head_dim}"
            raise InputError(got, "[16, 16, 16, 16] for 128")
        half = head_dim // 2
        return replace(Pairs.of(head_dim), axes=axes[member * half :][:half], num_axes=len(counts))

    return pairs


def _atoms(config: Config, rope: Config, head_dim: int) -> Pairs:
    """Return pairs for three coordinates and for the number of the molecule. Each of the four has its own ladder."""
    along, molecule = (required(config, f"num_{key}") for key in ("spatial_rope_pairs_per_axis", "uid_rope_pairs"))
    bases = [number(key, config.get(key)) for key in ("spatial_rope_base_frequency", "uid_rope_base_frequency")]
    spatial, molecular = (
        [base ** -(rung / count) for rung in range(count)] for base, count in zip(bases, (along, molecule), strict=True)
    )
    count = 3 * along + molecule
    return Pairs(
        dims=[(pair, pair + head_dim // 2) for pair in range(count)],
        axes=[axis for axis in range(3) for _ in range(along)] + [3] * molecule,
        inv_freq=[*spatial, *spatial, *spatial, *molecular],
    )


def _clvp(config: Config, layer_type: str | None) -> PositionEncoding | None:
    return None if flag_at(config, "use_rotary_embedding", default=True) else PositionEncoding()


VALUES_TOO = "it also rotates values, in the same way as queries and keys"
BLOCKS = RotaryKeys(rope_types=MROPE, default_sections=(16, 24, 24))
QWEN_3 = RotaryKeys(rope_types=MROPE, pairs=_by_stride(24, 20, 20))
QWEN_3_5 = RotaryKeys(rope_types=MROPE, pairs=_by_stride(11, 11, 10), share_keys=SHARE)
GLM = RotaryKeys(default_sections=(8, 12, 12), share_keys=SHARE, rounds_down=True)
GLM_INTERLEAVED = replace(GLM, layout="interleaved")

ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen2_5_omni_text": rotary_row(1e6, 32768, keys=BLOCKS),
    "qwen2_5_omni_talker": rotary_row(1e6, 32768, 128, keys=BLOCKS),
    "qwen2_5_omni_dit": rotary_row(  # a diffusion transformer
        1e4, 32768, 64,
        keys=RotaryKeys(
            layout="interleaved", not_converted="which rotates one head",
            pairs=lambda config, rope, rotary_dim: replace(Pairs.of(rotary_dim, layout="interleaved"), num_heads=1),
        ),
    ),
    "paddleocr_vl_text": rotary_row(5e5, 131072, 128, keys=BLOCKS),
    "glm4v_text": rotary_row(1e4, 32768, keys=GLM_INTERLEAVED),
    "glm_ocr_text": rotary_row(1e4, 131072, keys=GLM_INTERLEAVED),
    "glm_image_text": rotary_row(1e4, 131072, keys=GLM),
    "glm4v_moe_text": rotary_row(1e4, 65536, None, 0.5, keys=GLM),
    "qwen3_vl_text": rotary_row(5e5, 128000, 128, keys=QWEN_3, vllm=True),
    "qwen3_vl_moe_text": rotary_row(5e5, 128000, keys=QWEN_3),
    "cosmos3_edge_text": rotary_row(
        None, 131072, 128, keys=QWEN_3,
        defaults={"rope_parameters": {**rope(1e8), "mrope_section": [24, 20, 20]}},
    ),
    "hy_v4_vl_text": rotary_row(
        1e4, 262144,
        keys=RotaryKeys(
            layout="interleaved", head_dim_key="qk_rope_head_dim", rope_types=MROPE,
            pairs=_by_stride(12, 10, 10, layout="interleaved"),
        ),
        defaults={"qk_rope_head_dim": 64},
    ),
    "qwen3_omni_moe_text": rotary_row(1e6, 32768, keys=replace(QWEN_3, rounds_down=True)),
    "qwen3_omni_moe_talker_text": rotary_row(1e4, 32768, keys=QWEN_3),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), rotary_row(1e4, 32768, 256, 0.25, keys=QWEN_3_5)),
    "qwen4_exp_text": rotary_row(1e4, 32768, 256, keys=QWEN_3_5),
    "cohere_compass_text": rotary_row(None, 8192, 128, keys=RotaryKeys(per_layer=True, pairs=_by_stride(24, 20, 20))),
    "ernie4_5_vl_moe_text": rotary_row(
        5e5, 131072, keys=RotaryKeys(layout="interleaved", rope_types=MROPE, pairs=_alternate_rows_and_columns),
    ),
    "neomme": rotary_row(
        None, 16384, 64,  # even pairs are rotated by rows, odd pairs by columns, at positions (row, column)
        keys=RotaryKeys(
            per_layer=True, share_keys=SHARE,
            pairs=lambda config, rope, rotary_dim: replace(
                Pairs.of(rotary_dim), axes=[pair % 2 for pair in range(rotary_dim // 2)], num_axes=2
            ),
        ),
        defaults={"rope_parameters": {"sliding_attention": rope(1e4, 1.0), "full_attention": rope(1e6, 0.25)}},
    ),
    "hunyuan_vl_text": Architecture(
        rotary=RotaryKeys(
            pairs=_by_sections_of_dimensions(0), second_pairs=_by_sections_of_dimensions(1), ntk_alpha=True,
            rope_types=MROPE,
            no_rotation="which turns the two dimensions of a pair by different axes: not a rotation, unless a token "
            "has the same index on all axes (then use model_type 'hunyuan_v1_dense')",
        )
    ),
    "nanochat": rotary_row(
        1e4, 2048,
        keys=RotaryKeys(
            not_converted="which rotates in the other direction",
            pairs=lambda config, rope, rotary_dim: Pairs(dims=[(j, i) for i, j in Pairs.of(rotary_dim).dims]),
        ),
        inputs=RMS_NORMED,
    ),
    "clvp_encoder": Architecture(
        rotary=RotaryKeys(
            fixed_base=10_000.0, not_converted="which rotates values too", layer_keys=("use_rotary_embedding",),
            pairs=lambda config, rope, head_dim: Pairs.of(  # from the width that speech and text are projected to
                max(required(config, "projection_dim") // (2 * required(config, *HEADS)), 32)
            ),
        ),
        encoding=_clvp,
        warnings=(VALUES_TOO,),
    ),
    "EsmFold2AtomEncoderConfig": Architecture(
        rotary=RotaryKeys(
            fixed_base=10_000.0, pairs=_atoms, not_converted="whose pairs belong to coordinates",
            other_keys=(
                "spatial_rope_base_frequency", "num_spatial_rope_pairs_per_axis", "num_uid_rope_pairs",
                "uid_rope_base_frequency",
            ),
        ),
    ),
}  # fmt: skip
