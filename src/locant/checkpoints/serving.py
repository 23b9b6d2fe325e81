"""Whether vLLM turns as a configuration says: what its sources and its open issues told in 2025.

vLLM's ``get_rope`` picks keys out of the dictionary of rope parameters; those it does not pick are dropped without a
word. Which it picks is written down here, and what follows from that is derived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from locant.positions.encodings.rotary import Rotary
from locant.positions.rope_config.dialects import DIALECTS
from locant.positions.scaling import DynamicNTK, LongRoPE, YaRN

__all__ = ["Serving", "serving"]

SERVED = frozenset(
    {
        "apertus", "arcee", "bert", "bloom", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "exaone4",
        "falcon", "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode",
        "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "kimi_k2", "llama", "llama4_text", "mistral", "mixtral",
        "modernbert", "mpt", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3",
        "phimoe", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen3",
        "qwen3_moe", "qwen3_vl_text", "roberta", "seed_oss", "smollm3", "stablelm", "starcoder2",
        "xlm-roberta",
    }
)  # fmt: skip
"""Architectures for which vLLM has a model."""

DEEPSEEK = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2"})
"""For these it has a YaRN that reads DeepSeek's weights."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Whether vLLM gives what the configuration says, and why not."""

    answer: Literal["yes", "differently", "no"]
    reasons: tuple[str, ...] = ()


def serving(facts: Mapping[str, Any], rotaries: Sequence[Rotary]) -> Serving:
    """The verdict for a configuration, and the rotary encodings that its layers have."""
    name = facts["model_type"]
    if name not in SERVED:
        return Serving(answer="no", reasons=(f"it has no model for {name}",))
    if facts.get("position_embedding_type", "absolute") != "absolute":
        return Serving(answer="no", reasons=("its BERT knows absolute positions only",))
    found = [rule(rotary, name) for rotary in rotaries for rule in RULES]
    reasons = tuple(dict.fromkeys(reason for reason in found if reason))
    return Serving(answer="differently" if reasons else "yes", reasons=reasons)


def _attention_factor(rotary: Rotary, name: str) -> str | None:
    given = isinstance(rotary.scaling, YaRN) and rotary.scaling.attention_factor is not None
    return "its YaRN drops attention_factor (vllm#46280)" if given else None


def _weights(rotary: Rotary, name: str) -> str | None:
    given = isinstance(rotary.scaling, YaRN) and rotary.scaling.mscale is not None
    return "its YaRN reads mscale for DeepSeek's models only" if given and name not in DEEPSEEK else None


def _dynamic(rotary: Rotary, name: str) -> str | None:
    if not isinstance(rotary.scaling, DynamicNTK):
        return None
    return "its dynamic scaling is fixed at the longest length, also for short sequences (vllm#3488)"


def _longrope(rotary: Rotary, name: str) -> str | None:
    if not isinstance(rotary.scaling, LongRoPE):
        return None
    return "it takes the long factors for every sequence if it is started with a longer context (vllm#27414)"


def _layout(rotary: Rotary, name: str) -> str | None:
    own = DIALECTS[name].layout if name in DIALECTS else None
    return (
        None if own in (None, rotary.layout) else f"its {name} pairs dimensions as {own}, whatever rope_interleave says"
    )


RULES: tuple[Callable[[Rotary, str], str | None], ...] = (
    _attention_factor,
    _weights,
    _dynamic,
    _longrope,
    _layout,
)
