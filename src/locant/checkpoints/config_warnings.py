"""What is easily missed in a configuration, in a sentence each.

These concern any architecture; those of a single one stand in its row.
"""

from __future__ import annotations

from collections.abc import Iterator

from locant.checkpoints.rotary_settings import RotarySettings
from locant.models.architecture import Architecture
from locant.models.config_values import Config
from locant.positions.base import PositionEncoding
from locant.positions.encodings.learned import Learned
from locant.positions.encodings.rotary import Rotary
from locant.positions.scaling import DynamicNTK, Linear, LongRoPE, Scaling, YaRN

__all__ = ["config_warnings"]

VISIBLE_IN_BFLOAT16 = 2**-8


def config_warnings(
    config: Config,
    architecture: Architecture,
    encoding: PositionEncoding,
    rotary: RotarySettings | None,
    longest: int | None,
) -> Iterator[str]:
    """All that apply to one encoding of a configuration, and to what was measured of it."""
    if isinstance(encoding, Rotary):
        yield from _of_scaling(encoding.scaling, longest)
    if rotary is not None:
        yield from _of_rotary(rotary, config, architecture)
    if isinstance(encoding, Learned):
        rows = encoding.max_seq_len
        behind = f" behind {encoding.offset} rows that are none" if encoding.offset else ""
        yield f"the table ends with position {rows - 1:,}{behind}: the next one is an error, and no scaling helps"
    for rule in architecture.warnings:
        sentence = rule(config, encoding)
        if sentence is not None:
            yield sentence


def _of_scaling(scaling: Scaling, longest: int | None) -> Iterator[str]:
    if isinstance(scaling, (YaRN, LongRoPE)) and longest is not None:
        reached = scaling.factor * scaling.original_max_seq_len
        if round(reached) != longest:
            yield (
                f"factor {scaling.factor:g} x original {scaling.original_max_seq_len:,} = {reached:,.0f}, but "
                f"max_position_embeddings is {longest:,}: programs that derive one from the others disagree"
            )
    if isinstance(scaling, Linear) and longest is not None:
        yield (
            f"linear scaling names no trained length: max_position_embeddings {longest:,} may be before or after the "
            f"factor {scaling.factor:g}, and published models have both"
        )
    if isinstance(scaling, (LongRoPE, DynamicNTK)):
        yield (
            f"past {scaling.original_max_seq_len:,} tokens the frequencies change: keys cached before that are rotated "
            "wrongly, unless the final length is given first (for_length) or they are moved (rerotate)"
        )


def _of_rotary(rotary: RotarySettings, config: Config, architecture: Architecture) -> Iterator[str]:
    width, rotated = rotary.head_dim, rotary.rotary_dim
    if rotated != width:
        yield (
            f"only {rotated} of {width} dimensions are rotated, and exponents, ramps and factors count "
            f"those {rotated}: code that counts {width} is wrong everywhere but at position 0"
        )
    share = _share(config)
    if share is not None and not (width * share).is_integer() and rotary.scaling != "Proportional":
        yield f"{share:g} x {width} is {width * share:g} dimensions, rounded down to {rotated}"
    if width % 2:
        yield f"head_dim {width} is odd: kernels that work on pairs read past the head"
    if rotary.precision.at_longest > VISIBLE_IN_BFLOAT16:
        yield (
            f"float32 angles miss cosines by up to {rotary.precision.at_longest:.1g} near position {rotary.length:,}, "
            "more than a rounding of bfloat16; the model was trained with these errors, so compare both on your own "
            "data"
        )
    keys = architecture.rotary
    if keys is not None and not keys.interleave_key and keys.layout != rotary.layout:
        yield (
            f"according to rope_interleave these weights were converted, but the code of {config['model_type']} in "
            f"transformers and vLLM pairs dimensions as {keys.layout} whatever it is: convert them back for those; "
            f"here, pass layout={rotary.layout!r}"
        )


def _share(config: Config) -> float | None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct")))
    return None if share is None else float(share)
