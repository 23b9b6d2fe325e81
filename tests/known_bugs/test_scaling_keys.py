"""Entries about what a configuration says of a scaling: keys dropped, taken for others, defaulted or applied twice."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from locant import LocantError, Positions, Rotary, attend
from locant.checkpoints.explanation import explain
from locant.positions.scaling import Llama3, YaRN
from tests.known_bugs.exhibit import exhibit
from tests.known_bugs.oracle import by_wavelength, on_a_ramp, plain, temperature
from tests.positions.published import PUBLISHED
from tests.tolerances import DOUBLE, FORMULA, FREQUENCY, SIX_DIGITS

Config = Mapping[str, Any]


def ours(config: Config) -> tuple[Tensor, float]:
    """Radians per position of each pair, and the factor on cosines and sines."""
    rotary = Rotary.from_config(config)
    scaling = rotary.scaling
    frequencies = torch.tensor([float(f) for f in rotary.angles.frequencies], dtype=torch.float64)
    return frequencies, scaling.effective_attention_factor


def frequencies_of(config: Config) -> Tensor:
    return ours(config)[0]


def with_rope(name: str, **changes: Any) -> dict[str, Any]:
    """A published configuration with some rope parameters changed; ``None`` takes one away."""
    config = dict(PUBLISHED[name])
    rope = {**config["rope_scaling"], **changes}
    return {**config, "rope_scaling": {key: value for key, value in rope.items() if value is not None}}


FACTORS = {"Llama-2-7b": 1.0, "Qwen2.5-7B-Instruct, 128k": 1.138629436111989, "DeepSeek-V3": 1.0}
"""By which cosines and sines of published models are multiplied; DeepSeek's temperature is in its scores, entry 44."""


def test_41_every_published_configuration_has_its_attention_factor() -> None:
    """YaRN's attention factor becomes 1.

    turboderp-org/exllamav3#259: The model wrote fluent text that ignored the prompt, since YaRN's factor had become 1.
    The code divided two weights by each other, which is right only in models that put the temperature into the scale of
    their scores.

    Check: `locant explain FOLDER` prints the attention factor; your cosines at position 0 must be equal to it.

    Test: factors of three published configurations; of ten in `tests/positions`.
    """

    def check(factor_of: Callable[[Config], float]) -> None:
        for name, golden in FACTORS.items():
            factor = factor_of(PUBLISHED[name])
            assert factor == pytest.approx(golden, abs=FORMULA), f"{name}: factor {factor:.6f}, not {golden:.6f}"

    def related_to_each_other(config: Config) -> float:
        scaling = Rotary.from_config(config).scaling
        if not isinstance(scaling, YaRN):
            return scaling.effective_attention_factor
        weights = (1.0 if weight is None else weight for weight in (scaling.mscale, scaling.mscale_all_dim))
        above, below = (temperature(scaling.factor, weight) for weight in weights)
        return above / below

    def without_weights(config: Config) -> float:
        scaling = Rotary.from_config(config).scaling
        return temperature(scaling.factor) if isinstance(scaling, YaRN) else scaling.effective_attention_factor

    because = re.escape("Qwen2.5-7B-Instruct, 128k: factor 1.000000, not 1.138629")
    exhibit(check, lambda config: ours(config)[1], twin=related_to_each_other, because=because)
    because = "DeepSeek-V3: factor 1.368888, not 1.000000"
    exhibit(check, lambda config: ours(config)[1], twin=without_weights, because=because)


def unless_refused(read: Callable[[Config], Any], config: Config) -> Any:
    """What a reader makes of it, or the reason why it makes nothing of it."""
    try:
        return read(config)
    except LocantError as error:
        return str(error)


CHANGES: list[dict[str, Any]] = [
    {"attention_factor": 1.4159}, {"factor": 16.0}, {"beta_fast": 20}, {"truncate": False}, {"atention_factor": 1.4159},
]  # fmt: skip
"""Keys of YaRN, one of them misspelt. `tests/models/test_rotary_config.py` changes every key of every scaling."""


def test_42_every_key_has_an_effect_or_is_named() -> None:
    """A key of the configuration is dropped.

    vllm-project/vllm#46280 and #48351, ml-explore/mlx-lm#1507: An engine used the factor 1.4159 where the configuration
    had 1.0. Its list of keys to pass on was older than `attention_factor`, and dropped it.

    Check: `locant.encoding_from_config(config)` warns about every key that has no effect.

    Test: five keys of YaRN, a misspelt one among them; every key of every scaling in `tests/models`.
    """

    def effects(config: Config) -> tuple[Any, ...]:
        with warnings.catch_warnings(record=True) as said:  # a key that nobody knows is named
            warnings.simplefilter("always")
            rotary = Rotary.from_config(config)
        tables = [rotary.for_length(length).angles.frequencies for length in (1, 10**6)]
        factor = rotary.scaling.effective_attention_factor
        return *tables, factor, rotary.rotary_dim, rotary.sections, [str(each.message) for each in said]

    def with_a_list_of_keys(config: Config) -> tuple[Any, ...]:
        listed = {
            "type", "rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
            "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim",
        }  # fmt: skip
        rope = {key: value for key, value in config["rope_scaling"].items() if key in listed}
        return effects({**config, "rope_scaling": rope})

    def check(read: Callable[[Config], tuple[Any, ...]]) -> None:
        before = read(PUBLISHED["Yarn-Llama-2-7b-128k"])
        for change in CHANGES:
            after = unless_refused(read, with_rope("Yarn-Llama-2-7b-128k", **change))
            assert after != before, f"{change} was dropped in silence"

    because = re.escape("{'attention_factor': 1.4159} was dropped in silence")
    exhibit(check, effects, twin=with_a_list_of_keys, because=because)


def test_43_the_factor_is_applied_once_to_each_side() -> None:
    """An attention factor is applied twice.

    sgl-project/sglang#33558: Twenty points on GSM8K were lost. The factor 1.4852 belongs to cosines and sines, so
    scores are multiplied by its square, and a backend multiplied its scale by the square once more.

    Check: With q = k at one position, the score must be `scale * factor**2` times q . q.

    Test: scores at distance 0, read off the weights of attention.
    """
    q, k = torch.randn(2, 1, 4, 1, 64, dtype=torch.float64).unbind()
    v = torch.eye(2, dtype=torch.float64).expand(1, 4, 2, 2)
    here = Positions.after(777, 1)

    def scores(rotary: Rotary, scale: float | None = None) -> Tensor:
        """The score of a key at the same place, from its weight against a key of zeros."""
        rotated_q, rotated_k = rotary.rotate(q, k, here)
        keys = torch.cat([rotated_k, torch.zeros_like(rotated_k)], dim=2)
        both = Positions.of([777, 777])
        weights = attend(
            rotated_q, keys, v, encoding=rotary, positions=here, k_positions=both, scale=scale, backend="eager"
        )
        return (weights[..., 0] / weights[..., 1]).log()

    def twice(rotary: Rotary) -> Tensor:
        return scores(rotary, rotary.scaling.effective_attention_factor**2 / 8)

    def check(score: Callable[[Rotary], Tensor]) -> None:
        for factor in (1.4852, 1.0, 0.5):
            scaling = YaRN(factor=32.0, original_max_seq_len=4096, attention_factor=factor)
            ratio = score(Rotary(64, scaling=scaling)) / ((q * k).sum(-1) / 8)
            found, expected = float(ratio.mean()), factor**2
            assert torch.allclose(ratio, torch.full_like(ratio, expected), rtol=DOUBLE, atol=DOUBLE), (
                f"scores x {found:.4f}, not {expected:.4f}"
            )

    exhibit(check, scores, twin=twice, because=re.escape("scores x 4.8656, not 2.2058"))


def test_44_scores_of_latent_attention_take_the_weight_of_all_dimensions() -> None:
    """The scale of latent attention reads the wrong `mscale`.

    NVIDIA/Megatron-LM#1429: The scale of DeepSeek's scores was computed from `mscale` instead of `mscale_all_dim`. Both
    are 1 in DeepSeek V3, so nobody saw it.

    Check: `locant explain FOLDER` prints the scale of the scores.

    Test: the scale that `explain` prints, which `tests/checkpoints/test_explanation.py` compares with the attention of
    transformers; we do not build that attention.
    """
    shape = {"model_type": "deepseek_v3", "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_theta": 10_000.0}
    sizes = {"max_position_embeddings": 163_840, "vocab_size": 8, "hidden_size": 8}
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}

    def said(mscale: float, all_dim: float) -> float:
        rope = {**yarn, "mscale": mscale, "mscale_all_dim": all_dim}
        warnings = " ".join(explain({**shape, **sizes, "rope_scaling": rope}).layers[0].warnings)
        return float(re.findall(r"scale=([\d.]+)", warnings)[0])

    def with_mscale(mscale: float, all_dim: float) -> float:
        return temperature(40.0, mscale) ** 2 / math.sqrt(192)

    def check(scale: Callable[[float, float], float]) -> None:
        for weights in [(1.0, 1.0), (1.0, 0.707), (0.707, 1.0)]:
            found, truth = scale(*weights), temperature(40.0, weights[1]) ** 2 / math.sqrt(192)
            assert found == pytest.approx(truth, rel=SIX_DIGITS, abs=0), (
                f"weights {weights}: scale {found:.4f}, not {truth:.4f}"
            )

    because = re.escape("weights (1.0, 0.707): scale 0.1352, not 0.1147")
    exhibit(check, said, twin=with_mscale, because=because)


RAMPS: dict[tuple[float, int, bool | None], tuple[float, float]] = {
    (150_000.0, 4096, None): (8, 18),
    (150_000.0, 4096, False): (8.0927791, 17.3980245),
    (10_000.0, 131_072, None): (22, 35),
}
"""Where YaRN's ramp over the 32 pairs of gpt-oss begins and ends: by base, trained length and ``truncate``."""


def test_45_the_ramp_ends_where_truncate_says() -> None:
    """YaRN's ramp is rounded although `truncate` is false.

    vllm-project/vllm#28244, keras-team/keras-hub#2981: gpt-oss was off by up to 0.27. Its ramp is not rounded to whole
    pairs, which is the default, and its end may lie behind the last pair, where the code held it.

    Check: `locant.probe(rotary, expected=locant.encoding_from_config(config))` lists the pairs that differ.

    Test: three ramps: two bases, two trained lengths, `truncate` given and not.
    """

    def never_truncates(config: Config) -> Tensor:
        return frequencies_of({**config, "rope_scaling": {"truncate": False, **config["rope_scaling"]}})

    def ends_at_the_last_pair(config: Config) -> Tensor:
        said = config["rope_scaling"]
        low, high = RAMPS[config["rope_theta"], said["original_max_position_embeddings"], said.get("truncate")]
        return on_a_ramp(64, config["rope_theta"], 32.0, low, min(high, 31))

    def check(frequencies: Callable[[Config], Tensor]) -> None:
        for (base, original, truncate), ends in RAMPS.items():
            config = with_rope("gpt-oss-20b", truncate=truncate, original_max_position_embeddings=original)
            config |= {"rope_theta": base, "max_position_embeddings": 32 * original}
            off = float((frequencies(config) / on_a_ramp(64, base, 32.0, *ends) - 1).abs().max())
            assert off <= FREQUENCY, f"base {base:g}, {original} tokens, truncate {truncate}: off by {off:.2g}"

    exhibit(check, frequencies_of, twin=never_truncates, because="base 150000, 4096 tokens, truncate None: off by 0.")
    exhibit(
        check, frequencies_of, twin=ends_at_the_last_pair, because="base 10000, 131072 tokens, truncate None: off by"
    )


LLAMA_3 = {"Llama-3.1-8B": (128, 8.0), "Llama-3.3-70B": (128, 8.0), "Llama-3.2-1B": (64, 32.0)}


def llama_3(name: str, factor: float | None = None) -> Tensor:
    dim, own = LLAMA_3[name]
    return by_wavelength(dim, 500_000.0, factor or own, 1.0, 4.0, 8192)


def test_49_scaled_frequencies_are_what_comes_out() -> None:
    """Llama 3.1's scaled frequencies are computed and thrown away.

    huggingface/transformers#32330: Llama 3.1's scaling was computed. Then the code returned the unscaled frequencies.

    Check: `locant.probe(rotary, expected=locant.encoding_from_config(config))` lists the pairs that differ.

    Test: which of 64 frequencies move, and to where.
    """
    scaling = Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)

    def check(frequencies: Callable[[int, float], Tensor]) -> None:
        off = (frequencies(128, 500_000.0) / llama_3("Llama-3.1-8B") - 1).abs() > FREQUENCY
        assert not off.any(), f"{int(off.sum())} of 64 frequencies are not scaled"

    def scaled(dim: int, base: float) -> Tensor:
        return scaling.rounded(dim, base).double()

    exhibit(check, scaled, twin=plain, because="35 of 64 frequencies are not scaled")


def test_50_the_scaling_of_every_llama_3_is_its_own() -> None:
    """Llama 3's scaling is missing or has the factor of another size.

    TransformerLensOrg/TransformerLens#764 and #910, unslothai/unsloth#6197, felafax/felafax#59: The scaling was left
    out, or it was copied from another size: the factor is 8 in Llama 3.1 and 32 in the small models of 3.2. Past some
    29,000 tokens the text became gibberish.

    Check: `locant explain FOLDER`; and `locant explain FOLDER --against llama-3.1-8b`.

    Test: three Llamas, read from their configurations.
    """

    def without(config: Config) -> Tensor:
        return frequencies_of({key: value for key, value in config.items() if key != "rope_scaling"})

    def factor_of_another(config: Config) -> Tensor:
        return frequencies_of({**config, "rope_scaling": {**config["rope_scaling"], "factor": 8.0}})

    def check(frequencies: Callable[[Config], Tensor]) -> None:
        for name in LLAMA_3:
            truth = llama_3(name)
            off = float((frequencies(PUBLISHED[name]) * 29_000 - truth * 29_000).abs().max())
            assert off <= DOUBLE * 29_000, f"{name}: {off:.2g} radians off at position 29 000"

    exhibit(check, frequencies_of, twin=without, because="Llama-3.1-8B: [0-9.e+]+ radians off at position 29 000")
    exhibit(
        check, frequencies_of, twin=factor_of_another, because="Llama-3.2-1B: [0-9.]+ radians off at position 29 000"
    )


def test_51_a_base_that_is_not_there_is_missed() -> None:
    """A missing base becomes 10,000.

    deepspeedai/DeepSpeed#8345, THUDM/slime#1720, lyogavin/airllm#369, vllm-project/vllm#9503: The base was 10,000
    whatever the model had. `rope_theta` had moved into the rope parameters, and a lookup with a default hid that it was
    not found.

    Check: `locant explain FOLDER` prints the base; search your code for `get("rope_theta", 10000`.

    Test: bases in either place, in neither (the default of the class, with a warning), and in two that differ.
    """
    sizes = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8}
    there = [
        {"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 5e5},
    ]  # fmt: skip
    missing = [
        {}, {"rope_parameters": {"rope_type": "default"}}, {"rope_theta": None}, {"rope_scaling": {"type": "default"}},
        {"theta": 5e5}, {"model_type": "gpt_neox", "rotary_pct": 0.25},
    ]  # fmt: skip
    contradictory = {"rope_theta": 10_000.0, "rope_parameters": {"rope_theta": 5e5}}

    def read(config: Config) -> float | str:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            base = Rotary.from_config(config).base
        return str(told[0].message) if told else base

    def with_a_default(config: Config) -> float:
        return config.get("rope_theta", 10_000.0)

    def where_it_is_missed(config: Config) -> float:
        base = unless_refused(read, config)
        return base if isinstance(base, float) else 10_000.0

    def check(base: Callable[[Config], float | str]) -> None:
        """What is said of a configuration without a base, in a warning or an error, names the key."""
        for config in there:
            found = unless_refused(base, {**sizes, **config})
            assert found == 5e5, f"{config}: base {found}, not 500 000"
        for config in (*missing, contradictory):
            found = unless_refused(base, {**sizes, **config})
            assert isinstance(found, str), f"{config}: base {found} was made up"
            assert "rope_theta" in found or "rotary_emb_base" in found, f"{config}: {found} does not name the base"

    because = re.escape("'rope_theta': 500000.0}}: base 10000.0, not 500 000")
    exhibit(check, read, twin=with_a_default, because=because)
    exhibit(check, read, twin=where_it_is_missed, because=re.escape("{}: base 10000.0 was made up"))


SPELLINGS: dict[str, dict[str, Any]] = {
    "beside": {"rope_theta": 5e5},
    "beside a scaling": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "beside a leftover key": {"rope_theta": 5e5, "rope_interleaved": False},
    "inside": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "inside a scaling": {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
}


def test_118_one_base_is_read_in_every_spelling_and_beside_leftover_keys() -> None:
    """A base in a dictionary is not found.

    deepspeedai/DeepSpeed#8345: The base had moved into a dictionary, and the default was used in silence. The kernels
    of nine models rotated with base 10,000 regardless of the file.

    Check: `locant explain FOLDER` prints the base; compare it with the base of your kernel.

    Test: five spellings of one base, and a key that no code reads beside it; published files in
    `tests/models/test_spellings.py`.
    """

    def check(base_of: Callable[[Config], float]) -> None:
        for name, spelling in SPELLINGS.items():
            config = {key: value for key, value in PUBLISHED["Llama-2-7b"].items() if key != "rope_theta"}
            base = base_of({**config, **spelling})
            assert base == 5e5, f"{name}: a base of 500000 is read as {base:g}"

    def at_the_top(config: Config) -> float:
        return float(config.get("rope_theta", 10_000.0))

    exhibit(check, lambda config: Rotary.from_config(config).base, twin=at_the_top, because="inside: .* read as 10000")
