"""What is easily missed in a configuration: one function per warning, each giving one sentence or nothing.

These concern any architecture; those of a single one stand in its row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from locant.checkpoints.rotary_settings import RotarySettings
from locant.models.architecture import Architecture
from locant.models.config_values import Config
from locant.positions.base import PositionEncoding
from locant.positions.encodings.learned import Learned
from locant.positions.scaling import DynamicNTK, Linear, LongRoPE, YaRN

__all__ = ["Case", "config_warnings"]

VISIBLE_IN_BFLOAT16 = 2**-8


@dataclass(frozen=True, kw_only=True)
class Case:
    """One encoding of a configuration, and what was measured of it."""

    config: Config
    architecture: Architecture
    longest: int | None
    encoding: PositionEncoding
    rotary: RotarySettings | None = None


def config_warnings(case: Case) -> list[str]:
    """All that apply."""
    found = [rule(case) for rule in RULES]
    found += [rule(case.config, case.encoding) for rule in case.architecture.warnings]
    return [sentence for sentence in found if sentence is not None]


def _lengths_disagree(case: Case) -> str | None:
    scaling = getattr(case.encoding, "scaling", None)
    if not isinstance(scaling, (YaRN, LongRoPE)) or case.longest is None:
        return None
    reached = scaling.factor * scaling.original_max_seq_len
    if round(reached) == case.longest:
        return None
    return (
        f"factor {scaling.factor:g} x original {scaling.original_max_seq_len:,} = {reached:,.0f}, but "
        f"max_position_embeddings is {case.longest:,}: programs that derive one from the others disagree"
    )


def _changes_past_trained_length(case: Case) -> str | None:
    scaling = getattr(case.encoding, "scaling", None)
    if not isinstance(scaling, (LongRoPE, DynamicNTK)):
        return None
    return (
        f"past {scaling.original_max_seq_len:,} tokens the frequencies change: keys cached before that are rotated "
        "wrongly, unless the final length is given first (for_length) or they are moved (rerotate)"
    )


def _partial(case: Case) -> str | None:
    rotary = case.rotary
    if rotary is None or rotary.rotary_dim == rotary.head_dim:
        return None
    return (
        f"only {rotary.rotary_dim} of {rotary.head_dim} dimensions are rotated, and exponents, ramps and factors count "
        f"those {rotary.rotary_dim}: code that counts {rotary.head_dim} is wrong everywhere but at position 0"
    )


def _rounded_share(case: Case) -> str | None:
    rotary = case.rotary
    share = _share(case.config)
    if rotary is None or share is None or (rotary.head_dim * share).is_integer() or rotary.scaling == "Proportional":
        return None
    return (
        f"{share:g} x {rotary.head_dim} is {rotary.head_dim * share:g} dimensions, rounded down to {rotary.rotary_dim}"
    )


def _odd_head(case: Case) -> str | None:
    rotary = case.rotary
    if rotary is None or rotary.head_dim % 2 == 0:
        return None
    return f"head_dim {rotary.head_dim} is odd: kernels that work on pairs read past the head"


def _linear_without_trained_length(case: Case) -> str | None:
    scaling = getattr(case.encoding, "scaling", None)
    if not isinstance(scaling, Linear) or case.longest is None:
        return None
    return (
        f"linear scaling names no trained length: max_position_embeddings {case.longest:,} may be before or after the "
        f"factor {scaling.factor:g}, and published models have both"
    )


def _float32_at_the_end(case: Case) -> str | None:
    rotary = case.rotary
    if rotary is None or rotary.precision.at_longest <= VISIBLE_IN_BFLOAT16:
        return None
    return (
        f"float32 angles miss cosines by up to {rotary.precision.at_longest:.1g} near position {rotary.length:,}, more "
        "than a rounding of bfloat16; the model was trained with these errors, so compare both on your own data"
    )


def _end_of_the_table(case: Case) -> str | None:
    if not isinstance(case.encoding, Learned):
        return None
    rows = case.encoding.max_seq_len
    behind = f" behind {case.encoding.offset} rows that are none" if case.encoding.offset else ""
    return f"the table ends with position {rows - 1:,}{behind}: the next one is an error, and no scaling helps"


def _converted(case: Case) -> str | None:
    keys = case.architecture.rotary
    if case.rotary is None or keys is None or keys.interleave_key or keys.layout == case.rotary.layout:
        return None
    return (
        f"according to rope_interleave these weights were converted, but the code of {case.config['model_type']} in "
        f"transformers and vLLM pairs dimensions as {keys.layout} whatever it is: convert them back for those; here, "
        f"pass layout={case.rotary.layout!r}"
    )


RULES: tuple[Callable[[Case], str | None], ...] = (
    _lengths_disagree,
    _linear_without_trained_length,
    _changes_past_trained_length,
    _partial,
    _rounded_share,
    _odd_head,
    _float32_at_the_end,
    _end_of_the_table,
    _converted,
)


def _share(config: Config) -> float | None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct")))
    return None if share is None else float(share)
