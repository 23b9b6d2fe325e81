"""What every test is held to: no network, signatures that are true, and tolerances from one table."""

from __future__ import annotations

import ast
import itertools
import socket
from pathlib import Path

import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from tests.refusal import shapes_unchecked
from tests.shape_checks import checked


def test_only_this_machine_may_be_spoken_to() -> None:
    with socket.socket() as out, pytest.raises(pytest.fail.Exception, match="reached for the network"):
        out.connect(("192.0.2.1", 80))
    with pytest.raises(pytest.fail.Exception, match="reached for the network"):
        socket.create_connection(("example.invalid", 80))
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(("localhost", server.getsockname()[1])).close()


def test_what_a_signature_says_is_checked_with_or_without_shapes() -> None:
    def of_shapes(x: Float[Tensor, "n n"]) -> Float[Tensor, "n 2"]:
        return x

    def plain(_: int, answer: object) -> str:
        return answer  # pyright: ignore[reportReturnType] - what beartype is to find

    plain.__qualname__ = "plain"  # as if it stood in a module
    checked_of_shapes, checked_plain = (checked(one, typechecker=beartype) for one in (of_shapes, plain))
    assert checked_of_shapes(torch.ones(2, 2)).shape == (2, 2)
    assert checked_plain(1, "a") == "a"
    for wrong in (
        lambda: checked_of_shapes(torch.ones(2, 3)),
        lambda: checked_of_shapes(torch.ones(3, 3)),
        lambda: checked_plain("1", "a"),
        lambda: checked_plain(1, 2),
    ):
        with pytest.raises(TypeCheckError):
            wrong()
        with shapes_unchecked():
            wrong()


# ---------------------------------------------------------------------- tolerances

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
    assert Path(__file__) in modules, "the proof looks in the wrong place"
    found = {path.relative_to(TESTS).as_posix(): faults(path.read_text(encoding="utf-8")) for path in modules}
    assert {path: list_ for path, list_ in found.items() if list_} == {}


def test_a_tolerance_in_a_test_is_seen_and_an_entry_is_let_through() -> None:
    for code in (
        "torch.testing.assert_close(a, b, rtol=0, atol=2**-7 * 3)", "np.testing.assert_allclose(a, b)",
        "torch.allclose(a, b, 1e-5)", "a == pytest.approx(b, rel=1e-6 if wide else BOUND)",
        "a == pytest.approx(b, rel=BOUND)", "a == approx(b, rel=0.5 * BOUND)", "assert 0 <= error < 1e-9",
    ):  # fmt: skip
        (fault,) = faults(code)
        assert fault.startswith("line 1: ")
    for code in (
        "assert_close(a, b, torch.float32)", "torch.testing.assert_close(a, b, rtol=0, atol=4 * ANGLE)",
        "torch.testing.assert_close(a, b, **SHORT_SUM)", "a == pytest.approx(b, abs=PRINTED[6])",
        "not torch.allclose(a, b)", "assert difference > 1e-4", "assert share < 0.05", "assert minutes == 0.0005",
    ):  # fmt: skip
        assert faults(code) == []
