"""Every scaling on the shapes of published models, held against mpmath: frequencies, attention factors, angles."""

from __future__ import annotations

import decimal
import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import mpmath
import numpy as np
import pytest
import torch

from locant import Positions, RangeError, Rotary, figures
from locant.positions.scaling import (
    NTK,
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    MixedNTK,
    Proportional,
    Resonance,
    Scaling,
    Unscaled,
    YaRN,
    scaling_by_name,
)
from locant.positions.scaling import TRAINED as TRAINED_BY_NAME
from tests.oracles import edge_positions
from tests.positions.published import PUBLISHED, layer_type_of
from tests.refusal import refuses
from tests.tolerances import ANGLE, FORMULA, FREQUENCY

mpf = mpmath.mpf
TRAINED = 4096
LONG = 3 * TRAINED + 7
LONGEST = 2**31
DIGITS = 50

# Transcribed from the papers and from the words of `transformers`' documentation, with one function per method.


def plain(dim: int, base: float) -> list[mpf]:
    return [mpmath.power(mpf(base), mpf(-2 * i) / dim) for i in range((dim + 1) // 2)]


def linear(dim: int, base: float) -> list[mpf]:
    return [f / mpf(4) for f in plain(dim, base)]


def ntk(dim: int, base: float) -> list[mpf]:
    return plain(dim, mpf(base) * mpmath.power(mpf(4), mpf(dim) / (dim - 2)))


def ntk_base(dim: int, base: float) -> list[mpf]:
    return plain(dim, mpf(base) * 4)


def dynamic(dim: int, base: float, length: int = LONG) -> list[mpf]:
    stretch = mpf(4) * length / TRAINED - 3
    return plain(dim, mpf(base) * mpmath.power(stretch, mpf(dim) / (dim - 2)))


def yarn(dim: int, base: float, truncate: bool = True) -> list[mpf]:
    # The ends of the ramp are float64 in every implementation: what they round to is their definition.
    def pair(turns: float) -> float:
        return dim * math.log(TRAINED / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(32), pair(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    scaled = []
    for i, f in enumerate(plain(dim, base)):
        ramp = min(max((mpf(i) - mpf(low)) / (mpf(high) - mpf(low)), mpf(0)), mpf(1))
        scaled.append(f / 4 * ramp + f * (1 - ramp))
    return scaled


def gpt_oss(dim: int, base: float) -> list[mpf]:
    return yarn(dim, base, truncate=False)


def own_factors(dim: int) -> list[float]:
    return [1 + 0.37 * i for i in range((dim + 1) // 2)]


def longrope(dim: int, base: float) -> list[mpf]:
    return [f / mpf(own) for f, own in zip(plain(dim, base), own_factors(dim), strict=True)]


def llama3(dim: int, base: float) -> list[mpf]:
    scaled = []
    for f in plain(dim, base):
        wavelength = 2 * mpmath.pi / f
        if wavelength < mpf(TRAINED) / 4:
            scaled.append(f)
        elif wavelength > mpf(TRAINED) / 1:
            scaled.append(f / 8)
        else:
            smooth = (TRAINED / wavelength - 1) / (4 - 1)
            scaled.append((1 - smooth) * f / 8 + smooth * f)
    return scaled


def proportional(dim: int, base: float) -> list[mpf]:
    turning = int(0.25 * dim // 2)
    return [f if i < turning else mpf(0) for i, f in enumerate(plain(dim, base))]


def mixed(dim: int, base: float) -> list[mpf]:
    rate = mpmath.log(4) / mpmath.power((dim + 1) // 2, mpf("0.625"))
    return [f / mpmath.exp(rate * mpmath.power(m, mpf("0.625"))) for m, f in enumerate(plain(dim, base), 1)]


def resonance(dim: int, base: float) -> list[mpf]:
    return [2 * mpmath.pi / mpmath.nint(2 * mpmath.pi / f) for f in yarn(dim, base)]


def _longrope(dim: int) -> Scaling:
    short, long = (1.0,) * ((dim + 1) // 2), tuple(own_factors(dim))
    return LongRoPE(short_factor=short, long_factor=long, original_max_seq_len=TRAINED, factor=32.0)


Build = Callable[[int], Scaling]
"""From a number of dimensions."""
Formula = Callable[[int, float], list[mpf]]
"""From these and a base to the frequency of every pair."""
CASES: dict[str, tuple[Build, Formula]] = {
    "unscaled": (lambda dim: Unscaled(), plain),
    "linear": (lambda dim: Linear(factor=4.0), linear),
    "ntk": (lambda dim: NTK(factor=4.0), ntk),
    "ntk-base": (lambda dim: NTK(factor=4.0, form="base"), ntk_base),
    "dynamic": (lambda dim: DynamicNTK(factor=4.0, original_max_seq_len=TRAINED), dynamic),
    "yarn": (lambda dim: YaRN(factor=4.0, original_max_seq_len=TRAINED), yarn),
    "yarn-untruncated": (lambda dim: YaRN(factor=4.0, original_max_seq_len=TRAINED, truncate=False), gpt_oss),
    "longrope": (_longrope, longrope),
    "llama3": (
        lambda dim: Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=TRAINED),
        llama3,
    ),
    "proportional": (lambda dim: Proportional(rotated_share=0.25), proportional),
    "mixed": (lambda dim: MixedNTK(factor=4.0), mixed),
    "resonance": (lambda dim: Resonance(scaling=YaRN(factor=4.0, original_max_seq_len=TRAINED)), resonance),
}


def shape_of(config: dict[str, Any]) -> tuple[int, float]:
    rotary = Rotary.from_config(config, layer_type=layer_type_of(config))
    return rotary.rotary_dim, rotary.base


SHAPES = [*sorted({shape_of(config) for config in PUBLISHED.values()}), (5, 10_000.0), (21, 10_000.0)]
"""And ladders whose last pair is half empty."""


def frequencies_are_the_formulas(scaling_for: Build, formula: Formula) -> None:
    """On every shape to 45 digits, whatever the process set decimals to; those in float32 to a few roundings."""
    with mpmath.workdps(DIGITS), decimal.localcontext(prec=7):
        for dim, base in SHAPES:
            scaling = scaling_for(dim)
            ours = zip(scaling.frequencies(dim, base, LONG), scaling.rounded(dim, base, LONG).tolist(), strict=True)
            for (exact, rounded), true in zip(ours, formula(dim, base), strict=True):
                assert abs(mpf(str(exact)) - true) <= true * mpf(10) ** -45, (dim, base)
                assert abs(mpf(rounded) - true) <= true * FREQUENCY, (dim, base)


def cosines_are_exact(scaling_for: Build, formula: Formula) -> None:
    """To the last position; frequencies that depend on the length are those of `LONGEST`."""
    positions = [*edge_positions()[::4], LONGEST - 1, 1_000_003, TRAINED, TRAINED + 1]
    for dim, base in [(128, 500_000.0), (32, 10_000.0)]:
        rotary = Rotary(dim, base=base, scaling=scaling_for(dim))
        if rotary.scaling.length_threshold is not None:
            rotary = rotary.for_length(LONGEST)
        with mpmath.workdps(DIGITS):
            true = formula(dim, base)
            attention_factor = mpf(rotary.scaling.effective_attention_factor)
            cos = np.array([[float(attention_factor * mpmath.cos(p * f)) for f in true] for p in positions])
            sin = np.array([[float(attention_factor * mpmath.sin(p * f)) for f in true] for p in positions])
        got_cos, got_sin = rotary.cos_sin(Positions.of(torch.tensor(positions)))
        bound = ANGLE * float(attention_factor)
        assert np.abs(got_cos[0].double().numpy() - cos).max() <= bound
        assert np.abs(got_sin[0].double().numpy() - sin).max() <= bound


@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_the_formulas_and_cosines_are_exact(name: str) -> None:
    scaling_for, formula = CASES[name]
    frequencies_are_the_formulas(scaling_for, formula)
    cosines_are_exact(scaling_for, partial(dynamic, length=LONGEST) if name == "dynamic" else formula)


# Attention factors as their papers and model cards define them, computed here in full.
GOLDEN_FACTORS = {
    "Llama-3.1-8B": mpf(1),
    "vicuna-7b-v1.5-16k": mpf(1),
    "internlm2-chat-7b-llama": mpf(1),
    "Yarn-Llama-2-7b-128k": 1 + mpmath.log(32) / 10,
    "Qwen2.5-7B-Instruct, 128k": 1 + mpmath.log(4) / 10,
    "gpt-oss-20b": 1 + mpmath.log(32) / 10,
    "DeepSeek-V3": mpf(1),
    "DeepSeek-V2-Lite": mpf(1),
    "Phi-3-mini-4k": mpf(1),
    "Phi-3-mini-128k": mpmath.sqrt(1 + mpmath.log(32) / mpmath.log(4096)),
}


@pytest.mark.parametrize("name", GOLDEN_FACTORS)
def test_attention_factors_are_exact(name: str) -> None:
    """Each is applied once to queries and once to keys: entry 43 of the known bugs."""
    got = Rotary.from_config(PUBLISHED[name]).scaling.effective_attention_factor
    assert abs(mpf(got) - GOLDEN_FACTORS[name]) <= FORMULA


def test_an_attention_factor_is_read_as_it_is() -> None:
    config = {**PUBLISHED["Yarn-Llama-2-7b-128k"]}
    config["rope_scaling"] = {**config["rope_scaling"], "attention_factor": 1.4159}
    assert Rotary.from_config(config).scaling.effective_attention_factor == 1.4159


@pytest.mark.parametrize(
    "name", ["linear", "ntk", "dynamic", "yarn", "longrope", "llama3", "mixed_ntk", "proportional"]
)
def test_a_name_and_a_factor_are_the_usual_scaling(name: str) -> None:
    """From 4 096 positions, or from as many as stand behind the factor; of the dimensions that are rotated."""
    scaling = scaling_by_name(f"{name}:8", 4096, 32, 5e5)
    by_name = Rotary(64, base=5e5, rotary_dim=32, scaling=f"{name}:8")
    assert by_name.scaling == scaling
    assert torch.equal(by_name.inv_freq, Rotary(64, base=5e5, rotary_dim=32, scaling=scaling).inv_freq)
    if hasattr(scaling, "original_max_seq_len"):
        longer = Rotary(64, base=5e5, rotary_dim=32, scaling=f"{name}:8:8192").scaling
        assert longer == scaling_by_name(f"{name}:8", 8192, 32, 5e5) != scaling
    else:
        with refuses(RangeError, f"{name}:8:8192", "no trained length", f"try: {name}:8"):
            Rotary(64, scaling=f"{name}:8:8192")


@pytest.mark.parametrize("name", ["YaRN:8:64", "Yarn:8:64", "dynamic-ntk:8:64", "Long RoPE:8:64", "interpolation:8"])
def test_a_scaling_is_found_in_any_case_and_by_its_aliases(name: str) -> None:
    plain = {"Y": "yarn:8:64", "d": "dynamic:8:64", "L": "longrope:8:64", "i": "linear:8"}[name[0]]
    assert Rotary(32, scaling=name).scaling == Rotary(32, scaling=plain).scaling


@pytest.mark.parametrize("text", ["yarn", "yarn:", "NTK"])
def test_a_scaling_without_a_factor_is_not_given_one(text: str) -> None:
    with refuses(RangeError, f"got {text!r} for scaling, expected a factor", f"try: '{text.rstrip(':')}:4'"):
        Rotary(32, scaling=text)


def test_a_trained_length_without_a_factor_is_refused() -> None:
    with refuses(RangeError, "'yarn::64'", "numbers after the colons"):
        Rotary(32, scaling="yarn::64")


def test_a_rope_scaling_entry_suggests_from_config() -> None:
    with refuses(RangeError, "Rotary.from_config(config)"):
        Rotary(32, scaling={"rope_type": "yarn", "factor": 8.0})  # type: ignore[arg-type]


def test_yarn_by_name_has_the_frequencies_of_its_paper() -> None:
    found = Rotary(64, scaling="yarn:8").inv_freq
    low = 64 * math.log(4096 / (32 * 2 * math.pi)) / (2 * math.log(10_000))
    high = 64 * math.log(4096 / (2 * math.pi)) / (2 * math.log(10_000))
    ramp = [min(max((i - math.floor(low)) / (math.ceil(high) - math.floor(low)), 0), 1) for i in range(32)]
    plain_ = [10_000 ** (-i / 32) for i in range(32)]
    expected = [f * (1 - share) + f / 8 * share for f, share in zip(plain_, ramp, strict=True)]
    assert found.tolist() == pytest.approx(expected, rel=FORMULA, abs=0)


@pytest.mark.parametrize(
    "wrong", ["", "yarm:8", "yarn:x", "yarn:8:x", "yarn:8:4096:2", "yarn:0", "yarn:8:0", "yarn:8:1.5"]
)
def test_a_text_that_names_no_scaling_is_refused(wrong: str) -> None:
    with refuses(RangeError, "yarn"):
        Rotary(64, scaling=wrong)


def test_the_factor_may_stand_first() -> None:
    assert NTK(8) == NTK(factor=8)
    assert Linear(2.0) == Linear(factor=2.0)
    assert MixedNTK(8, b=0.5) == MixedNTK(factor=8, b=0.5)
    for kind in (YaRN, DynamicNTK):
        assert kind(8, original_max_seq_len=64) == kind(factor=8, original_max_seq_len=64)
        with pytest.raises(TypeError, match="original_max_seq_len"):
            kind(8)
    with pytest.raises(TypeError):
        YaRN(8, 4096)
    assert next(iter(inspect.signature(LongRoPE).parameters)) == "factor"


def test_the_trained_length_of_a_picture_is_that_of_an_encoding() -> None:
    assert figures.TRAINED == TRAINED_BY_NAME
