"""The position schemes of the transformers of `diffusers`, with one row for each class.

A configuration has the sizes of a model. The code of the class decides the pairs of dimensions, their axes (frames,
rows and columns), the start of grids and the positions of text. ``tests/engines/`` compares the rows with that code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from locant.arguments import entries, short_repr
from locant.errors import InputError, RangeError
from locant.models.config_values import Config, integer, required
from locant.positions.scaling import NTK, Linear, LongRoPE, Scaling


class Picture(NamedTuple):
    """The numbers of frames, rows, columns and text tokens, and the frames per second."""

    t: int
    h: int
    w: int
    text: int
    fps: Fraction


Grid = Callable[[Config, Picture], Mapping[str, Callable[[int], Fraction | int]]]


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """The position scheme of a class of `diffusers`.

    Args:
        dims: a function of the configuration that returns the number of dimensions of each axis in a head.
        base: the base, or its key and the default of the class.
        layout: ``interleaved`` or ``half`` for one axis after the other, ``half of each`` for a half layout in each
            axis, ``in turns`` for interleaved pairs with alternating axes, ``mrope`` for the half layout with one
            ladder over the head and alternating axes.
        axes: the index of each axis, from ``t h w l``: frame, row, column, layer.
        scalings: a function of the configuration that returns a scaling for each axis.
        grid: a function that returns, for some axes, a function from the number of a frame, row or column to its
            position. On other axes the number is the position.
        text: the axes on which text tokens are counted. On the other axes they are at 0. ``None`` if the model does not
            rotate text with the image.
        text_from: the index of the first text token, or a function that returns it.
        text_last: whether text comes after the image in the sequence.
        refused: why locant has no encoding for this class.
    """

    dims: Callable[[Config], Sequence[int]]
    base: float | tuple[str, float] = 10_000.0
    layout: str = "interleaved"
    axes: str = "thw"
    scalings: Callable[[Config], Sequence[Scaling | None]] | None = None
    grid: Grid = lambda config, picture: {}
    text: str | None = None
    text_from: int | Callable[[Picture], int] = 0
    text_last: bool = False
    refused: str = ""


def head_dim_of(config: Config, default: int | None = None) -> int:
    """Return the width of a head, or the default if the configuration does not state it."""
    keys, widths = ("attention_head_dim", "head_dim", "linear_head_dim"), ("hidden_size", "dim", "embed_dim", "dit_dim")
    if present := [key for key in keys if key in config]:
        return required(config, *present)
    if any(key in config for key in widths):
        return required(config, *widths) // required(config, "num_attention_heads", "n_heads", "num_heads", "dit_heads")
    return required(config, *keys) if default is None else default


def _read_dims(key: str, *default: int) -> Callable[[Config], Sequence[int]]:
    """Return a function that reads a list of dimensions. If the key holds null, axes have equal shares of a head."""

    def dims(config: Config) -> Sequence[int]:
        value = config.get(key, default)
        if value is None:
            return _shares(len(default))(config)
        return [integer(key, each) for each in entries(key, value, f"{key}: {list(default)}")]

    return dims


def _shares(count: int, of: int = 1) -> Callable[[Config], Sequence[int]]:
    """Return a function that gives axes equal shares of the head, or of ``1 / of`` of the head."""
    return lambda config: [head_dim_of(config) // of // count] * count


def _sixths(config: Config) -> Sequence[int]:
    side = head_dim_of(config) // 6 * 2
    return head_dim_of(config) - 2 * side, side, side


def _eighths(config: Config) -> Sequence[int]:
    return [head_dim_of(config) // 8 * each for each in (2, 3, 3)]


def _mrope(key: str) -> Callable[[Config], Sequence[int]]:
    """Return a function that reads from a list how many pairs rows and columns have. Frames have all other pairs."""

    def dims(config: Config) -> Sequence[int]:
        older = (config.get("rope_scaling") or {}).get("mrope_section") or (24, 20, 20)
        _, rows, columns = entries(key, config.get(key) or older, f"{key}: [24, 20, 20]")
        sides = [2 * integer(key, pairs) for pairs in (rows, columns)]
        return [head_dim_of(config) - sum(sides), *sides]

    return dims


def _omnigen(config: Config) -> list[Scaling]:
    rope, keys = config.get("rope_scaling"), ("original_max_position_embeddings", "max_position_embeddings")
    if not isinstance(rope, Mapping) or not {"short_factor", "long_factor"} <= rope.keys():
        raise InputError(
            f"got rope_scaling={short_repr(rope)}", "'rope_scaling': {'short_factor': ..., 'long_factor': ...}"
        )
    trained, most = (required(config, key) for key in keys)
    short, long = rope["short_factor"], rope["long_factor"]
    return [LongRoPE(short_factor=short, long_factor=long, original_max_seq_len=trained, factor=most / trained)]


def _centre(config: Config, picture: Picture) -> dict[str, Callable[[int], Fraction | int]]:
    """Return grids with rows and columns centred at 0."""
    return {"h": lambda row: row - (picture.h + 1) // 2, "w": lambda column: column - (picture.w + 1) // 2}


def _fixed_size(*sides: int | str) -> Grid:
    """Return grids from 0, only for the trained size. The code scales other sizes (CogVideoX 1.0, Hunyuan-DiT)."""

    def grid(config: Config, picture: Picture) -> Mapping[str, Callable[[int], int]]:
        patch = integer("patch_size", config.get("patch_size"))
        trained = [(integer(side, config.get(side)) if isinstance(side, str) else side) // patch for side in sides]
        if config.get("patch_size_t") is None and trained != [picture.h, picture.w]:
            got = f"got {picture.h} x {picture.w} patches, which {config['_class_name']} scales to another size"
            raise RangeError(got, f"rows={trained[0]}, columns={trained[1]}, or Positions.of(index, denominator=...)")
        return {}

    return grid


def _reject_real(config: Config, picture: Picture) -> Mapping[str, Callable[[int], int]]:
    raise InputError(
        f"got {config['_class_name']}, whose positions are real numbers", "Positions.of(..., denominator=8)"
    )


THETA, THETA_256 = ("rope_theta", 1e4), ("rope_theta", 256.0)
WHOLE_WIDTH = "turns the whole width before it is split into heads, by frequencies that rise"

FLUX = Transformer(dims=_read_dims("axes_dims_rope", 16, 56, 56), base=THETA, text="")
QWEN = replace(FLUX, base=1e4, grid=_centre, text="thw", text_from=lambda picture: max(picture.h, picture.w) // 2)
Z_IMAGE = Transformer(
    dims=_read_dims("axes_dims", 32, 48, 48), base=THETA_256, text="t", text_from=1, text_last=True,
    grid=lambda config, picture: {"t": lambda t: t + picture.text + 1},
)  # fmt: skip
WAN = Transformer(dims=_sixths)
HUNYUAN = Transformer(dims=_read_dims("rope_axes_dim", 16, 56, 56), base=THETA_256)
JOY = Transformer(dims=_read_dims("rope_dim_list", 16, 56, 56), base=("theta", 256.0))
KANDINSKY = Transformer(dims=_read_dims("axes_dims", 16, 24, 24))
KANDINSKY_6 = replace(
    KANDINSKY, scalings=lambda config: [Linear(factor=each) for each in config.get("scale_factor", (1.0, 2.0, 2.0))]
)
COGVIDEO = Transformer(dims=_eighths, grid=_fixed_size("sample_height", "sample_width"))
IMAGE = Transformer(dims=_shares(2), layout="half")
SOUND = Transformer(dims=_shares(1), layout="half", axes="w")

TRANSFORMERS: Mapping[str, Transformer] = {
    # pictures
    "FluxTransformer2DModel": replace(FLUX, base=1e4),
    "ChromaTransformer2DModel": replace(FLUX, base=1e4),
    "BriaTransformer2DModel": FLUX,
    "BriaFiboTransformer2DModel": FLUX,
    "BriaFibo2Transformer2DModel": replace(
        Z_IMAGE, text_last=False,
        grid=lambda config, picture: {"t": lambda t: t + config.get("max_num_gist_tokens", 512) + 1},
    ),
    "CogView4Transformer2DModel": replace(
        IMAGE, grid=lambda config, picture: {
            axis: lambda place, side=side, over=over: place * over // side for axis, side, over in
            zip("hw", picture[1:3], _read_dims("rope_axes_dim", 256, 256)(config), strict=True)
        },
    ),
    "ErnieImageTransformer2DModel": replace(
        HUNYUAN, refused="turns the two dimensions of a pair by different frequencies, which is not a rotation"
    ),
    "Flux2Transformer2DModel": Transformer(
        dims=_read_dims("axes_dims_rope", 32, 32, 32, 32), base=("rope_theta", 2e3), axes="thwl", text="l"
    ),
    "Flux3Transformer2DModel": Transformer(
        dims=_read_dims("axes_dims_rope", 32, 32, 32, 32), base=THETA, axes="thwl", text="l",
        grid=lambda config, picture: dict.fromkeys("hw", lambda side: Fraction(side, 2)),
    ),
    "GlmImageTransformer2DModel": IMAGE,
    "HiDreamImageTransformer2DModel": Transformer(
        dims=_read_dims("axes_dims_rope", 64, 32, 32), text="", text_last=True
    ),
    "HunyuanDiT2DModel": Transformer(dims=_shares(2), axes="wh", grid=_fixed_size(64, 64)),
    "HunyuanImageTransformer2DModel": Transformer(dims=_read_dims("rope_axes_dim", 64, 64), base=THETA_256),
    "Ideogram4Transformer2DModel": Transformer(
        dims=_mrope("mrope_section"), base=("rope_theta", 5e6), layout="mrope", text="thw",
        grid=lambda config, picture: dict.fromkeys("thw", lambda side: side + 65_536),
    ),
    "JoyImageEditTransformer3DModel": JOY,
    "JoyImageEditPlusTransformer3DModel": JOY,
    "Krea2Transformer2DModel": Transformer(
        dims=_read_dims("axes_dims_rope", 32, 48, 48), base=("rope_theta", 1e3), text=""
    ),
    "LongCatImageTransformer2DModel": replace(
        FLUX, base=1e4, text="hw",
        grid=lambda config, picture: {"t": lambda t: t + 1, **dict.fromkeys("hw", lambda side: side + 512)},
    ),
    "Lumina2Transformer2DModel": Transformer(
        dims=_read_dims("axes_dim_rope", 32, 32, 32), text="t",
        grid=lambda config, picture: {"t": lambda t: t + picture.text},
    ),
    "LuminaNextDiT2DModel": Transformer(dims=_shares(2), layout="in turns"),
    "NucleusMoEImageTransformer2DModel": replace(QWEN, text_last=True),
    "OmniGenTransformer2DModel": replace(
        SOUND, base=("rope_base", 1e4), scalings=_omnigen, text="w",
        grid=lambda config, picture: {"w": lambda w: w + picture.text},
    ),
    "OvisImageTransformer2DModel": replace(FLUX, base=1e4, text="hw"),
    "PRXTransformer2DModel": Transformer(dims=_read_dims("axes_dim", 32, 32), base=("theta", 1e4)),
    "QwenImageTransformer2DModel": QWEN,
    "QwenImage21Transformer2DModel": replace(
        QWEN, text_from=0,
        grid=lambda config, picture: {**_centre(config, picture), "t": lambda t: t + picture.text},
    ),
    "ZImageTransformer2DModel": Z_IMAGE,
    # video
    **dict.fromkeys(("AnyFlowTransformer3DModel", "AnyFlowFARTransformer3DModel", "ChronoEditTransformer3DModel"), WAN),
    **dict.fromkeys(("SanaVideoTransformer3DModel", "SanaWMTransformer3DModel", "SkyReelsV2Transformer3DModel"), WAN),
    **dict.fromkeys(("WanTransformer3DModel", "WanVACETransformer3DModel", "WanAnimateTransformer3DModel"), WAN),
    "WanAnimate2Transformer3DModel": WAN,
    "HeliosTransformer3DModel": Transformer(dims=_read_dims("rope_dim", 44, 42, 42), base=THETA),
    **dict.fromkeys(("HunyuanVideoTransformer3DModel", "HunyuanVideo15Transformer3DModel"), HUNYUAN),
    **dict.fromkeys(("HunyuanVideoFramepackTransformer3DModel", "MotifVideoTransformer3DModel"), HUNYUAN),
    "AllegroTransformer3DModel": Transformer(
        dims=_shares(3), layout="half of each", scalings=lambda config: [
            Linear(factor=config.get(f"interpolation_scale_{axis}", usual)) for axis, usual in
            zip("thw", (2.2, 2.0, 2.0), strict=True)
        ],
    ),
    "CogVideoXTransformer3DModel": COGVIDEO,
    "ConsisIDTransformer3DModel": COGVIDEO,
    "CosmosTransformer3DModel": replace(
        WAN, layout="half", grid=lambda config, picture: {"t": lambda t: t * 24 / picture.fps},
        scalings=lambda config: [NTK(factor=each) for each in config.get("rope_scale", (2.0, 1.0, 1.0))],
    ),
    "Cosmos3OmniTransformer": Transformer(
        dims=_mrope("rope_axes_dim"), base=("rope_theta", 5e6), layout="mrope", text="thw",
        grid=lambda config, picture: {"t": lambda t: t * 24 / picture.fps + picture.text + config.get(
            "unified_3d_mrope_temporal_modality_margin", 15_000)},
    ),
    "EasyAnimateTransformer3DModel": replace(COGVIDEO, grid=_fixed_size(60, 90)),
    "Kandinsky5Transformer3DModel": KANDINSKY,
    "Kandinsky6Transformer3DModel": replace(KANDINSKY_6, dims=_read_dims("axes_dims", 32, 48, 48)),
    "Kandinsky6SRTransformer3DModel": KANDINSKY_6,
    "LTXVideoTransformer3DModel": replace(WAN, refused=WHOLE_WIDTH),
    "LTX2VideoTransformer3DModel": replace(WAN, refused=WHOLE_WIDTH),
    "MiniMaxH3Transformer3DModel": Transformer(
        dims=lambda config: [2 * integer("rope_freq_dim", config.get("rope_freq_dim", 16))] * 3, base=THETA,
        layout="half", grid=_reject_real,
    ),
    "MochiTransformer3DModel": replace(WAN, refused="has learned frequencies for each head, like MixedRotary"),
    "SanaWMLTX2RefinerTransformer3DModel": replace(WAN, refused=WHOLE_WIDTH),
    # sound
    "AceStepTransformer1DModel": replace(SOUND, base=("rope_theta", 1e6)),
    "LongCatAudioDiTTransformer": replace(SOUND, base=1e5),
    "MiniMaxMusic3Transformer1DModel": replace(
        SOUND, dims=lambda config: [integer("rotary_dim", config.get("rotary_dim", 32))]
    ),
    "StableAudioDiTModel": replace(SOUND, dims=_shares(1, of=2)),
    "StableAudio3DiTModel": replace(SOUND, dims=_shares(1, of=2)),
}  # fmt: skip
"""The position scheme of each class, by its name."""
