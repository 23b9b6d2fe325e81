"""Ways to stretch rotary frequencies over contexts longer than those a model was trained on.

Every scaling gives its frequencies twice: ``frequencies`` in 50-digit decimals, the formula itself, and ``rounded``
step by step in float32 as `transformers` computes them, for models that were trained with those roundings. A new
scaling is a class in a file here, and needs no entry in a list: those below are what type checkers know by short names.
"""

from locant.positions.scaling.base import Scaling, Unscaled
from locant.positions.scaling.longrope import LongRoPE
from locant.positions.scaling.names import KINDS, SCALING_ALIASES, SCALINGS, scaling_by_name
from locant.positions.scaling.ntk import NTK, DynamicNTK, MixedNTK, ntk_exponent
from locant.positions.scaling.uniform import Linear, Proportional
from locant.positions.scaling.wavelengths import Llama3, Resonance
from locant.positions.scaling.yarn import YaRN

__all__ = [
    "KINDS", "NTK", "SCALINGS", "SCALING_ALIASES", "DynamicNTK", "Linear", "Llama3", "LongRoPE", "MixedNTK",
    "Proportional", "Resonance", "Scaling", "Unscaled", "YaRN", "ntk_exponent", "scaling_by_name",
]  # fmt: skip
