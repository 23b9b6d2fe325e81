"""Every tolerance is an entry of `tests/tolerances.py`: read off the syntax of every test."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

COMPARED = {"allclose": 2, "approx": 1, "assert_allclose": 2, "assert_close": 2, "isclose": 2}
"""What compares up to a tolerance, and how many arguments it has before the first tolerance."""

DEFAULTS = {"approx": "abs", "testing.assert_allclose": "rtol", "testing.assert_close": "rtol"}
"""What is larger than 0 where it is not given; for `approx` even where `rel` is."""

TOLERANCES = {"abs", "abs_tol", "atol", "rel", "rel_tol", "rtol"}
SMALL = 1e-3
"""A number up to this, which something has to be smaller than, is a tolerance; larger ones have other meanings."""


def faults(code: str) -> list[str]:
    """The tolerances of a test that are no entries of the table, one entry per place."""
    tree = ast.parse(code)
    return [fault for node in ast.walk(tree) for fault in (_called(node), _bounded(node)) if fault]


def _called(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    function = ast.unparse(node.func)
    places = COMPARED.get(function.split(".")[-1])
    if places is None:
        return None
    given = [*node.args[places:], *(keyword.value for keyword in node.keywords if keyword.arg in TOLERANCES)]
    for tolerance in given:
        if _is_written_out(tolerance):
            return _fault(node, f"{function} has the tolerance {ast.unparse(tolerance)}")
    if any(keyword.arg is None for keyword in node.keywords):
        return None
    unsaid = {DEFAULTS[name] for name in DEFAULTS if f".{function}".endswith(f".{name}")}
    if unsaid - {keyword.arg for keyword in node.keywords}:
        return _fault(node, f"{function} has its own {unsaid.pop()}, since none is given")
    return None


def _bounded(node: ast.AST) -> str | None:
    """`error < 1e-6`; what something has to be larger than is no tolerance."""
    if not isinstance(node, ast.Compare):
        return None
    for operator, pair in zip(node.ops, itertools.pairwise([node.left, *node.comparators]), strict=True):
        if isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
            larger = pair[isinstance(operator, ast.Lt | ast.LtE)]
            if any(0 < abs(number) <= SMALL for number in _floats(larger)):
                return _fault(node, f"{ast.unparse(node)} has a tolerance")
    return None


def _is_written_out(tolerance: ast.expr) -> bool:
    """0 is none; an entry may be multiplied by a whole number, and have a number or a dtype for its key."""
    named = any(isinstance(part, ast.Name | ast.Attribute) for part in ast.walk(tolerance))
    numbers = [part.value for part in ast.walk(tolerance) if isinstance(part, ast.Constant)]
    return any(_floats(tolerance)) or (not named and any(numbers))


def _floats(expression: ast.expr) -> list[float]:
    parts = [part.value for part in ast.walk(expression) if isinstance(part, ast.Constant)]
    return [number for number in parts if isinstance(number, float)]


def _fault(node: ast.expr, what: str) -> str:
    return (
        f"line {node.lineno}: {what}; try: an entry of tests/tolerances.py, with what it bounds and why it is so large"
    )


def test_no_test_has_a_tolerance_of_its_own() -> None:
    modules = [path for path in sorted(TESTS.rglob("*.py")) if path != TESTS / "tolerances.py"]
    assert TESTS / "house" / "test_tolerances.py" in modules, "the proof looks in the wrong place"
    found = {path.relative_to(TESTS).as_posix(): faults(path.read_text(encoding="utf-8")) for path in modules}
    assert {path: list_ for path, list_ in found.items() if list_} == {}


@pytest.mark.parametrize(
    "code",
    [
        "torch.testing.assert_close(a, b, rtol=1e-5, atol=0)",
        "torch.testing.assert_close(a, b, rtol=0, atol=2**-7 * 3)",
        "torch.testing.assert_close(a, b)",
        "np.testing.assert_allclose(a, b, atol=1e-6)",
        "np.testing.assert_allclose(a, b)",
        "torch.allclose(a, b, 1e-5)",
        "not torch.allclose(a, b, atol=0.01)",
        "math.isclose(a, b, rel_tol=1e-9)",
        "a == pytest.approx(b, abs=1e-12)",
        "a == pytest.approx(b, rel=1e-6 if wide else BOUND)",
        "a == pytest.approx(b, 1e-3)",
        "a == pytest.approx(b)",
        "a == pytest.approx(b, rel=BOUND)",
        "np.testing.assert_allclose(a, b, atol=BOUND)",
        "a == approx(b, rel=0.5 * BOUND)",
        "assert (a - b).abs().max() < 1e-6",
        "assert error <= 1e-9 * size",
        "assert 0 <= error < 1e-9",
        "assert 1e-6 > error",
    ],
)
def test_a_tolerance_in_a_test_is_seen(code: str) -> None:
    (fault,) = faults(code)
    assert fault.startswith("line 1: ")


@pytest.mark.parametrize(
    "code",
    [
        "assert_close(a, b)",
        "assert_close(a, b, torch.float32)",
        "torch.testing.assert_close(a, b, rtol=0, atol=4 * ANGLE)",
        "torch.testing.assert_close(a, b, rtol=rtol, atol=atol * size)",
        "torch.testing.assert_close(a, b, **SHORT_SUM)",
        "a == pytest.approx(b, abs=PRINTED[6])",
        "a == pytest.approx(b, rel=float(torch.finfo(dtype).eps), abs=0)",
        "not torch.allclose(a, b)",
        "assert difference > 1e-4",
        "assert 1e-4 < difference",
        "assert share < 0.05",
        "assert minutes == 0.0005",
    ],
)
def test_what_is_no_tolerance_or_an_entry_is_let_through(code: str) -> None:
    assert faults(code) == []
