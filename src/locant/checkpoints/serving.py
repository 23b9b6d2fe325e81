"""Whether vLLM rotates as a configuration prescribes, by its sources and its open issues in 2025.

vLLM's ``get_rope`` picks keys out of the dictionary of rope parameters; those it does not pick are dropped in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from locant.models.architecture import Architecture
from locant.models.config_values import Config
from locant.positions.encodings.rotary import Rotary
from locant.positions.scaling import DynamicNTK, LongRoPE, YaRN

__all__ = ["Serving", "serving"]


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Whether vLLM honours the configuration, and why not."""

    answer: Literal["yes", "differently", "no"]
    reasons: tuple[str, ...] = ()


def serving(config: Config, architecture: Architecture, rotaries: Sequence[Rotary]) -> Serving:
    """The verdict for a configuration, and the rotary encodings that its layers have."""
    if not architecture.vllm:
        return Serving(answer="no", reasons=(f"it has no model for {config['model_type']}",))
    if config.get("position_embedding_type", "absolute") != "absolute":
        return Serving(answer="no", reasons=("its BERT knows absolute positions only",))
    found = [rule(rotary, architecture) for rotary in rotaries for rule in RULES]
    reasons = tuple(dict.fromkeys(reason for reason in found if reason))
    return Serving(answer="differently" if reasons else "yes", reasons=reasons)


def _attention_factor(rotary: Rotary, architecture: Architecture) -> str | None:
    given = isinstance(rotary.scaling, YaRN) and rotary.scaling.attention_factor is not None
    return "its YaRN drops attention_factor (vllm#46280)" if given else None


def _weights(rotary: Rotary, architecture: Architecture) -> str | None:
    given = isinstance(rotary.scaling, YaRN) and rotary.scaling.mscale is not None
    return "its YaRN reads mscale for DeepSeek's models only" if given and not architecture.rotary_keys.latent else None


def _dynamic(rotary: Rotary, architecture: Architecture) -> str | None:
    if not isinstance(rotary.scaling, DynamicNTK):
        return None
    return "its dynamic scaling is fixed at the longest length, also for short sequences (vllm#3488)"


def _longrope(rotary: Rotary, architecture: Architecture) -> str | None:
    if not isinstance(rotary.scaling, LongRoPE):
        return None
    return "it takes the long factors for every sequence if it is started with a longer context (vllm#27414)"


def _layout(rotary: Rotary, architecture: Architecture) -> str | None:
    of_code = architecture.rotary_keys.layout
    if of_code in (None, rotary.layout):
        return None
    return f"it pairs dimensions as {of_code} for this architecture, whatever rope_interleave is"


RULES: tuple[Callable[[Rotary, Architecture], str | None], ...] = (
    _attention_factor,
    _weights,
    _dynamic,
    _longrope,
    _layout,
)
