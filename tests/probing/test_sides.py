"""`probe` looks at keys as at queries, and states no number that was not measured."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import locant
from locant import Rotary, scaling
from locant.kernels.rotary import rotate_pairs
from locant.probing.report import RotationReport
from tests.tolerances import SEVEN_DIGITS

WIDTH = 32
INV_FREQ = 10_000.0 ** -(torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
OWN = torch.rand(WIDTH // 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

Both = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def turned(
    x: Tensor, positions: Tensor, inv_freq: Tensor = INV_FREQ, layout: str = "half", phase: float = 0.0
) -> Tensor:
    angle = positions[..., None].double() * inv_freq + phase
    return rotate_pairs(x, angle.cos().float(), angle.sin().float(), layout)  # type: ignore[arg-type]


def keys(of_k: Callable[[Tensor, Tensor], Tensor]) -> Both:
    return lambda q, k, positions: (turned(q, positions), of_k(k, positions))


def probed(target: object, **options: object) -> RotationReport:
    report = locant.probe(target, head_dim=WIDTH, **options)  # type: ignore[arg-type]
    assert isinstance(report, RotationReport)
    return report


KEYS: dict[str, tuple[Both, str]] = {
    "one on": (
        keys(lambda k, positions: turned(k, positions + 1)),
        "position 0 is rotated as position 0 in queries and 1 in keys, so every distance is off by -1",
    ),
    "both on, by as many as go round": (
        lambda q, k, positions: (turned(q, positions + 3), turned(k, positions + 50)),
        "position 0 is rotated as position 3 in queries and 50 in keys, so every distance is off by -47",
    ),
    "a phase": (keys(lambda k, positions: turned(k, positions, phase=0.3)),
        "not rotated alike at position 0"),
    "flipped": (keys(lambda k, positions: turned(k, positions.flip(1))), "For keys only: The rotation of a token"),
    "scaled": (keys(lambda k, positions: 1.2 * turned(k, positions)),
        "not scaled alike: queries are multiplied by 1 and keys by 1.2, so scores by 1.2"),
    "queries scaled": (lambda q, k, positions: (1.2 * turned(q, positions), turned(k, positions)),
        "not scaled alike: queries are multiplied by 1.2 and keys by 1"),
    "another base": (keys(lambda k, positions: turned(k, positions, INV_FREQ**1.1)),
        "15 of 16 pairs have other frequencies in keys, the first of them (1, 17) with 0.5309 for 0.5623"),
    "the other direction": (keys(lambda k, positions: turned(k, -positions)), "keys in the opposite direction"),
    "another layout": (keys(lambda k, positions: turned(k, positions, layout="interleaved")),
        "pairs of queries are (0, 16), (1, 17), (2, 18), ..., (15, 31), pairs of keys (0, 1), (2, 3)"),
    "another order": (keys(lambda k, positions: turned(k, positions).flip(-1)), "their dimensions in one order"),
    "counted": (keys(lambda k, positions: turned(k, torch.arange(k.shape[2])[None])),
        "Of keys: Angles do not grow evenly with the position"),
    "queries counted": (
        lambda q, k, positions: (turned(q, torch.arange(q.shape[2])[None]), turned(k, positions)),
        "Of queries: Angles do not grow evenly with the position",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", KEYS)
def test_a_bug_of_one_side_is_named_and_no_encoding_is(bug: str) -> None:
    target, named = KEYS[bug]
    report = probed(target)
    assert any(named in warning for warning in report.warnings), report.warnings
    assert report.encoding is None
    assert "The same as" not in str(report)


def test_what_is_wrong_far_away_or_in_other_rows_is_said_of_its_side() -> None:
    coarse = keys(lambda k, positions: turned(k, positions.to(torch.bfloat16)))
    assert any("Angles of keys are wrong" in warning for warning in probed(coarse).warnings)

    def beside_float32(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries are off by as much at positions past any text."""
        angles = positions[..., None].float() * INV_FREQ.float(), positions[..., None].bfloat16() * INV_FREQ.float()
        q, k = (rotate_pairs(x, at.cos(), at.sin(), "half") for x, at in zip((q, k), angles, strict=True))
        return q, k

    assert any("Angles of keys are wrong" in warning for warning in probed(beside_float32).warnings)
    rows = keys(lambda k, positions: turned(k, positions[:1]))
    assert any("For keys only: Rows of a batch" in warning for warning in probed(rows).warnings)


def test_an_expected_encoding_is_held_against_both_sides() -> None:
    def differences(target: Both) -> tuple[str, ...]:
        return probed(target, expected=Rotary(WIDTH)).differences

    assert differences(keys(turned)) == ()
    assert differences(KEYS["one on"][0]) == ("of its keys, position 0 is rotated as position 1",)
    assert differences(KEYS["flipped"][0]) == ("of its keys, angles do not grow evenly with the position",)
    assert differences(KEYS["queries scaled"][0]) == ("of its queries, tokens are multiplied by 1.2, not by 1",)
    assert differences(lambda q, k, positions: (turned(q, -positions), turned(k, -positions))) == (
        "16 of 16 pairs are rotated in the other direction",
    )


def test_keys_of_another_arithmetic_are_the_same() -> None:
    def rounded(k: Tensor, positions: Tensor) -> Tensor:
        angle = positions[..., None].float() * INV_FREQ.float()
        return rotate_pairs(k, angle.cos(), angle.sin(), "half")

    report = probed(keys(rounded))
    assert report.warnings == ()
    assert isinstance(report.encoding, Rotary)


def test_an_offset_of_both_sides_is_said_to_be_invisible() -> None:
    (warning,) = probed(lambda x, positions: turned(x, positions + 50)).warnings
    assert "as far as position 50 should be" in warning
    assert "for queries and keys alike, which attention does not see" in warning


def test_numbers_that_were_fitted_are_no_truth() -> None:
    report = probed(lambda x, positions: turned(x, positions, INV_FREQ * math.pi / 180))
    assert report.warnings == ()
    assert report.errors == {}
    assert isinstance(report.encoding, Rotary)
    assert isinstance(report.encoding.scaling, scaling.Linear)
    assert report.encoding.scaling.factor == pytest.approx(180 / math.pi, rel=SEVEN_DIGITS, abs=0)
    assert "up to position 2,147,483,647 angles continue evenly" in str(report)
    stretched = probed(lambda x, positions: turned(x, positions, INV_FREQ ** (32 / 30)))
    assert (stretched.warnings, stretched.errors) == ((), {})


def test_what_a_float32_makes_of_positions_is_no_mistake() -> None:
    assert probed(lambda x, positions: turned(x, positions * math.pi / 180)).warnings == ()
    assert probed(lambda x, positions: turned(x, positions.float() / 3)).warnings == ()


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_products_that_are_no_worse_than_those_of_float32_are_no_mistake(dtypes: tuple[torch.dtype, ...]) -> None:
    def better(x: Tensor, positions: Tensor) -> Tensor:
        angle = positions[..., None].to(dtypes[0]).double() * INV_FREQ.to(dtypes[1]).double()
        return rotate_pairs(x, angle.cos().float(), angle.sin().float(), "half")

    report = probed(better)
    assert report.warnings == ()
    assert isinstance(report.encoding, Rotary)


def test_learned_frequencies_have_no_errors_but_go_on_evenly_or_not() -> None:
    learned = probed(lambda x, positions: turned(x, positions, OWN))
    assert (learned.warnings, learned.errors, learned.rounding) == ((), {}, "exact")
    wraps = probed(lambda x, positions: turned(x, positions % 4096, OWN))
    assert wraps.errors == {}
    assert any("do not continue evenly" in warning and "position 4,097" in warning for warning in wraps.warnings)
    coarse = probed(lambda x, positions: turned(x, positions.to(torch.bfloat16), OWN))
    assert any("do not continue evenly" in warning and "position 257" in warning for warning in coarse.warnings)


def test_positions_that_begin_again_are_wrong() -> None:
    (warning,) = probed(lambda x, positions: turned(x, positions % 2048)).warnings
    assert "Angles are wrong" in warning
    assert "at position 4,097" in warning


def test_a_configuration_with_odd_numbers_is_held_against_what_it_says() -> None:
    from transformers import LlamaConfig

    rope = {"rope_type": "yarn", "rope_theta": 12_345.678, "factor": 3.7, "original_max_position_embeddings": 4096}
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, rope_parameters=rope)
    report = locant.probe(config)
    assert isinstance(report, RotationReport)
    assert report.differences == ()
    assert report.errors
    assert report.warnings == tuple(each for each in report.warnings if "bfloat16" in each or "float16" in each)
