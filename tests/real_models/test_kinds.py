"""`probe` knows a bug in a running model: its warning has the id whose cost was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.real_models.bugs import BUGS
from locant import Rotary, probe
from locant.position_costs import costs
from locant.probing.report import RotationReport
from tests.real_models.test_bugs import llama

KNOWN = (
    "frequencies-bfloat16", "frequencies-float16", "positions-bfloat16", "positions-float16", "product-bfloat16",
    "product-float16", "tables-bfloat16", "tables-float16", "base-10000", "base-times-10", "linear-unasked",
    "rotated-twice", "attention-factor", "not-rotated", "half-as-interleaved", "interleaved-as-half",
    "direction-reversed", "pairs-not-rotated", "frequencies-of-twice-the-width",
)  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, RotationReport]:
    """The reports on a model with each bug."""
    reports, model = {}, llama()
    for key in KNOWN:
        with BUGS[key].spoil(model):
            reports[key] = probe(model, expected=Rotary.from_config(model.config))
    return reports  # type: ignore[return-value]


@pytest.mark.slow
def test_the_kind_of_a_warning_is_the_bug(found: dict[str, RotationReport]) -> None:
    kinds = {key: {finding.kind for finding in report._findings()} for key, report in found.items()}
    assert {key: key in kinds[key] for key in KNOWN} == dict.fromkeys(KNOWN, True)


@pytest.mark.slow
def test_rounded_tables_are_no_rounded_product_and_the_cost_is_stated_once(found: dict[str, RotationReport]) -> None:
    for key in ("tables-bfloat16", "product-bfloat16"):
        report = found[key]
        assert {finding.kind for finding in report._findings()} == {key}
        cost = str(costs()[key])
        assert [cost in warning for warning in report.warnings] == [True, *[False] * (len(report.warnings) - 1)]
    far = replace(found["tables-bfloat16"], shifts={1000: 0.5})
    assert {finding.kind for finding in far._findings()} == {"product-bfloat16"}
