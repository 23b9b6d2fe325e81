"""The warnings of `locant explain` about the encoding in a configuration, its scaling and its pairs."""

from __future__ import annotations

from collections.abc import Iterator

from locant.checkpoints.mistral_params import ORIGIN, PARAMS
from locant.checkpoints.rotary_settings import RotarySettings
from locant.checkpoints.score_scale import scale_warnings
from locant.models.architecture import UNKNOWN, Architecture
from locant.models.config_values import Config, sections_in
from locant.positions.base import PositionEncoding
from locant.positions.encodings.learned import Learned
from locant.positions.encodings.rotary import Rotary
from locant.positions.scaling import DynamicNTK, Linear, LongRoPE, Scaling, YaRN
from locant.spelling import spell

AXES = ("time", "rows", "columns")
"""The meaning of each axis of positions of images and video."""


def encoding_warnings(
    config: Config,
    architecture: Architecture,
    encoding: PositionEncoding,
    rotary: RotarySettings | None,
    longest: int | None,
) -> Iterator[str]:
    """Yield warnings about an encoding, its measurements, and its architecture (from the row of that architecture)."""
    if architecture.rotary is UNKNOWN:
        yield "locant has no row for this architecture, so its encoding was measured on its class in transformers"
    if (reason := architecture.rotary_keys.no_rotation) is not None:
        yield f"its code {reason.removeprefix('which ')}"
    if isinstance(encoding, Rotary):
        yield from _scaling_warnings(encoding.scaling, longest)
    if rotary is not None:
        yield from _rotary_warnings(rotary, config, architecture)
        yield from _axis_warnings(config, encoding)
    if not architecture.rotary_keys.latent:  # with latent attention, head_dim is only a part of the width
        yield from scale_warnings(config, encoding.head_dim if isinstance(encoding, Rotary) else None)
    if isinstance(encoding, Learned):
        rows = encoding.max_seq_len
        first = f", after {encoding.offset} rows that are not positions" if encoding.offset else ""
        yield (
            f"the table ends at position {rows - 1:,}{first}: later positions raise an error. Learned.resize "
            "interpolates the table for longer sequences, and the model then needs some training. A scaling does not "
            "apply"
        )
    messages = (each if isinstance(each, str) else each(config, encoding) for each in architecture.warnings)
    yield from filter(None, messages)


def _scaling_warnings(scaling: Scaling, longest: int | None) -> Iterator[str]:
    if isinstance(scaling, (YaRN, LongRoPE)) and longest is not None:
        reached = scaling.factor * scaling.original_max_seq_len
        if round(reached) != longest:
            yield (
                f"factor {spell(scaling.factor)} x original {scaling.original_max_seq_len:,} = {reached:,.0f}, but "
                f"max_position_embeddings is {longest:,}: programs that derive one from the others disagree"
            )
    if isinstance(scaling, Linear) and longest is not None:
        yield (
            f"linear scaling has no trained length: max_position_embeddings {longest:,} may be the length before or "
            f"after the factor {spell(scaling.factor)}, and published models have both"
        )
    if isinstance(scaling, (LongRoPE, DynamicNTK)):
        yield (
            f"the frequencies change after {scaling.original_max_seq_len:,} tokens: keys cached before are rotated "
            "wrongly, unless you set the final length first (for_length) or rotate them again (rerotate)"
        )


def _rotary_warnings(rotary: RotarySettings, config: Config, architecture: Architecture) -> Iterator[str]:
    width, rotated = rotary.head_dim, rotary.rotary_dim
    if rotated != width:
        yield (
            f"only {rotated} of {width} dimensions are rotated, and exponents, ramps and factors count "
            f"those {rotated}: code that counts {width} is wrong everywhere except at position 0"
        )
    share = _share(config)
    if share is not None and not (width * share).is_integer() and rotary.scaling != "Proportional":
        yield f"{spell(share)} x {width} is {spell(width * share)} dimensions, rounded down to {rotated}"
    if width % 2:
        yield f"head_dim {width} is odd: kernels that work on pairs read beyond the head"
    if rotary.precision.at_longest > 2**-8:
        yield (
            f"float32 angles change cosines by up to {spell(rotary.precision.at_longest, 1)} near position "
            f"{rotary.length:,}, more than rounding to bfloat16 does. The model was trained with these errors, so "
            "compare both on your own data"
        )
    keys = architecture.rotary
    if keys is not None and keys.layout_doubt:
        yield keys.layout_doubt
    if config.get(ORIGIN) == PARAMS:
        yield (
            f"a {PARAMS} belongs to Mistral's own weights, in which the dimensions of a pair are neighbours. Pass "
            "layout='half' for the weights of transformers, which are the same weights in another order"
        )
    elif keys is not None and keys.layout and not keys.interleave_key and keys.layout != rotary.layout:
        yield (
            f"according to rope_interleave these weights were converted, but the code of {config['model_type']} in "
            f"transformers and vLLM ignores it and pairs dimensions as {keys.layout}. Convert them back for those, and "
            f"pass layout={rotary.layout!r} here"
        )


def _axis_warnings(config: Config, encoding: PositionEncoding) -> Iterator[str]:
    """Yield a warning with the number of pairs of each axis, if these numbers differ from ``mrope_section``."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (
        not isinstance(encoding, Rotary)
        or encoding.pairs.axes is None
        or encoding.num_axes != len(AXES)
        or rope.get("mrope_section") is None
    ):
        return
    stated, dealt = sections_in(rope), tuple(map(encoding.pairs.axes.count, range(len(AXES))))
    if stated == dealt:
        return
    rest = len(encoding.pairs) - sum(stated)
    more = f". The {rest} pairs that no section covers are rotated by time" if rest > 0 else ""
    got = " and ".join(
        [
            ", ".join(f"{count} to {axis}" for count, axis in zip(dealt[:2], AXES, strict=False)),
            f"{dealt[2]} to {AXES[2]}",
        ]
    )
    yield f"mrope_section is {[*stated]}, but the code of {config['model_type']} deals pairs out in turns: {got}{more}"


def _share(config: Config) -> float | None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct")))
    return None if share is None else float(share)
