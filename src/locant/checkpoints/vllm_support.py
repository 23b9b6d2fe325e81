"""Decide whether vLLM rotates as a configuration prescribes, by its sources and open issues in 2025."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from locant.checkpoints.mistral_params import ORIGIN, PARAMS
from locant.models.architecture import Architecture
from locant.models.config_values import Config
from locant.models.lab_decoder import is_lab_decoder
from locant.positions.encodings.rotary import Rotary
from locant.positions.scaling import DynamicNTK, LongRoPE, YaRN


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The answer to whether vLLM follows the configuration, and the reasons if it does not."""

    answer: Literal["yes", "differently", "no"]
    reasons: tuple[str, ...] = ()


SWAPPED = Serving(answer="no", reasons=("layers have encodings from locant.swap, which vLLM does not know",))


def vllm_support(config: Config, architecture: Architecture, rotaries: Sequence[Rotary]) -> Serving:
    """Return whether vLLM follows a configuration, which has these rotary encodings."""
    if is_lab_decoder(config):
        return Serving(answer="no", reasons=("only locant reads a model of locant train",))
    if not architecture.vllm:
        return Serving(answer="no", reasons=(f"locant knows of no vLLM implementation of {config['model_type']}",))
    if config.get("position_embedding_type", "absolute") != "absolute":
        return Serving(answer="no", reasons=("its BERT has only absolute positions",))
    if config.get(ORIGIN) == PARAMS:  # vLLM reorders these weights when it loads them
        rotaries = [rotary.replace(layout=architecture.rotary_keys.layout) for rotary in rotaries]
    reasons = tuple(dict.fromkeys(reason for rotary in rotaries for reason in _reasons(rotary, architecture)))
    return Serving(answer="differently" if reasons else "yes", reasons=reasons)


def _reasons(rotary: Rotary, architecture: Architecture) -> Iterator[str]:
    scaling, keys = rotary.scaling, architecture.rotary_keys
    if isinstance(scaling, YaRN) and scaling.attention_factor is not None:
        yield "its YaRN ignores attention_factor (vllm#46280)"
    if isinstance(scaling, YaRN) and scaling.mscale is not None and not keys.latent:
        yield "its YaRN reads mscale only for DeepSeek's models"
    if isinstance(scaling, DynamicNTK):
        yield "its dynamic scaling is fixed at the longest length, also for short sequences (vllm#3488)"
    if isinstance(scaling, LongRoPE):
        yield "it uses the long factors for every sequence if it is started with a longer context (vllm#27414)"
    if keys.layout not in (None, rotary.layout):
        yield f"it pairs dimensions as {keys.layout} for this architecture and ignores rope_interleave"
