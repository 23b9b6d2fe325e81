"""What has gone wrong with configurations like this one: one function per trap, each saying nothing or one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from locant.checkpoints.rotary_facts import RotaryFacts
from locant.positions.base import PositionEncoding
from locant.positions.encodings.deberta import Deberta
from locant.positions.encodings.learned import Learned
from locant.positions.encodings.rotary import Rotary
from locant.positions.encodings.shaw import Shaw
from locant.positions.encodings.t5 import T5Bias
from locant.positions.encodings.tempered import Tempered
from locant.positions.rope_config.dialects import DIALECTS, UNKNOWN
from locant.positions.rope_config.types import integer
from locant.positions.scaling import DynamicNTK, Linear, LongRoPE, YaRN

__all__ = ["Case", "traps"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One encoding of a configuration, and what was measured of it."""

    facts: Mapping[str, Any]
    longest: int | None
    encoding: PositionEncoding
    rotary: RotaryFacts | None = None


def traps(case: Case) -> list[str]:
    """All that apply."""
    return [sentence for rule in RULES if (sentence := rule(case)) is not None]


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


def _scale_of_latent_attention(case: Case) -> str | None:
    scaling = getattr(case.encoding, "scaling", None)
    if case.rotary is None or not isinstance(scaling, YaRN) or not scaling.mscale_all_dim:
        return None
    if "qk_nope_head_dim" not in case.facts:
        return None
    width = integer("qk_nope_head_dim", case.facts["qk_nope_head_dim"]) + case.rotary.head_dim
    weight = 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1
    return (
        f"the attention factor is {scaling.magnitude:g}, because mscale_all_dim acts on all scores instead: attend "
        f"with scale={weight**2 / math.sqrt(width):.6g}, which is {weight**2:.4g} / sqrt({width})"
    )


def _latent_attention(case: Case) -> str | None:
    if case.rotary is None or "qk_nope_head_dim" not in case.facts:
        return None
    more = integer("qk_nope_head_dim", case.facts["qk_nope_head_dim"])
    return (
        f"each head has {more} more dimensions without positions beside these "
        f"{case.rotary.head_dim}, and all heads share one rotated key"
    )


def _switch_with_a_cache(case: Case) -> str | None:
    scaling = getattr(case.encoding, "scaling", None)
    if not isinstance(scaling, (LongRoPE, DynamicNTK)):
        return None
    return (
        f"past {scaling.original_max_seq_len:,} tokens the frequencies change: keys cached before that are turned "
        "wrongly, unless the final length is said first (for_length) or they are moved (rerotate)"
    )


def _partial(case: Case) -> str | None:
    facts = case.rotary
    if facts is None or facts.rotary_dim == facts.head_dim:
        return None
    return (
        f"only {facts.rotary_dim} of {facts.head_dim} dimensions turn, and exponents, ramps and factors count those "
        f"{facts.rotary_dim}: code that counts {facts.head_dim} is wrong everywhere but at position 0"
    )


def _rounded_share(case: Case) -> str | None:
    facts = case.rotary
    share = _share(case.facts)
    if facts is None or share is None or (facts.head_dim * share).is_integer() or facts.scaling == "Proportional":
        return None
    return f"{share:g} x {facts.head_dim} is {facts.head_dim * share:g} dimensions, rounded down to {facts.rotary_dim}"


def _odd_head(case: Case) -> str | None:
    facts = case.rotary
    if facts is None or facts.head_dim % 2 == 0:
        return None
    return f"head_dim {facts.head_dim} is odd: kernels that work on pairs read past the head"


def _truncate_of_gpt_oss(case: Case) -> str | None:
    scaling = getattr(case.encoding, "scaling", None)
    if case.facts["model_type"] != "gpt_oss" or not isinstance(scaling, YaRN) or not scaling.truncate:
        return None
    return "truncate is not false, as it is for released gpt-oss models: their ramp is not rounded to whole pairs"


def _linear_says_no_original(case: Case) -> str | None:
    scaling = getattr(case.encoding, "scaling", None)
    if not isinstance(scaling, Linear) or case.longest is None:
        return None
    return (
        f"linear scaling says no trained length: max_position_embeddings {case.longest:,} may be before or after the "
        f"factor {scaling.factor:g}, and published models have both"
    )


def _float32_at_the_end(case: Case) -> str | None:
    facts = case.rotary
    if facts is None or facts.precision.at_longest <= VISIBLE_IN_BFLOAT16:
        return None
    return (
        f"float32 angles miss cosines by up to {facts.precision.at_longest:.1g} near position {facts.length:,}, more "
        "than a rounding of bfloat16; the model learned with these errors, so compare both with your own data"
    )


def _end_of_the_table(case: Case) -> str | None:
    if not isinstance(case.encoding, Learned):
        return None
    rows = case.encoding.max_seq_len
    behind = f" behind {case.encoding.offset} rows that are none" if case.encoding.offset else ""
    return f"the table ends with position {rows - 1:,}{behind}: the next one is an error, and no scaling helps"


def _scale_of_t5(case: Case) -> str | None:
    if not isinstance(case.encoding, T5Bias):
        return None
    return "T5 does not divide scores by sqrt(head_dim): attend with scale=1.0; and it has no bias in cross-attention"


def _scale_of_deberta(case: Case) -> str | None:
    if not isinstance(case.encoding, Deberta):
        return None
    return f"content and positions share one scale: attend with scale={case.encoding.scale:.6g}, and causal=False"


def _flipped_table(case: Case) -> str | None:
    if not isinstance(case.encoding, Shaw):
        return None
    return "BERT counts the rows of its table from the other end: weight.flip(0) of distance_embedding fits"


def _falcon_rounds(case: Case) -> str | None:
    if case.facts["model_type"] != "falcon" or isinstance(case.encoding, Rotary):
        return None
    return (
        "the slopes are the paper's divided by sqrt(head_dim), as Falcon adds them before it scales; transformers "
        "rounds them to bfloat16, and long prompts show the difference"
    )


def _converted(case: Case) -> str | None:
    dialect = DIALECTS.get(case.facts["model_type"], UNKNOWN)
    if case.rotary is None or dialect.interleave_key or dialect.layout in (None, case.rotary.layout):
        return None
    return (
        f"rope_interleave says that these weights were converted, but the code of {case.facts['model_type']} in "
        f"transformers and vLLM pairs dimensions as {dialect.layout} whatever is said: convert them back for those; "
        f"here, say layout={case.rotary.layout!r}"
    )


def _growing_queries(case: Case) -> str | None:
    if not isinstance(case.encoding, Tempered):
        return None
    step, weight = case.encoding.step, case.encoding.weight
    return (
        f"attn_temperature_tuning: queries are multiplied by 1 + {weight:g} log(1 + floor((n + 1) / {step:,})) at "
        "position n, which changes nothing in the first ones; keys stay as they are, and nothing turns"
    )


def _short_factors_of_phimoe(case: Case) -> str | None:
    if case.facts["model_type"] != "phimoe" or not isinstance(getattr(case.encoding, "scaling", None), LongRoPE):
        return None
    return "transformers turns phimoe with the short factors at every length, and never takes the long ones"


VISIBLE_IN_BFLOAT16 = 2**-8

RULES: tuple[Callable[[Case], str | None], ...] = (
    _lengths_disagree,
    _linear_says_no_original,
    _latent_attention,
    _scale_of_latent_attention,
    _switch_with_a_cache,
    _partial,
    _rounded_share,
    _odd_head,
    _truncate_of_gpt_oss,
    _float32_at_the_end,
    _end_of_the_table,
    _scale_of_t5,
    _scale_of_deberta,
    _flipped_table,
    _falcon_rounds,
    _converted,
    _growing_queries,
    _short_factors_of_phimoe,
)


def _share(facts: Mapping[str, Any]) -> float | None:
    rope = facts.get("rope_parameters") or facts.get("rope_scaling") or {}
    share = rope.get("partial_rotary_factor", facts.get("partial_rotary_factor", facts.get("rotary_pct")))
    return None if share is None else float(share)
