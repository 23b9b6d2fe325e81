"""What every test is held to: no network, signatures that are true, and tolerances from one table."""

from __future__ import annotations

import ast
import itertools
import socket
import subprocess
import sys
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


TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_tests_of_a_folder_run_alone_with_shapes_checked() -> None:
    """The conftest of a folder may import locant: that of all tests comes first, and makes the checks ready."""
    folders = sorted(path.parent for path in TESTS.rglob("conftest.py") if path.parent != TESTS)
    files = [min(folder.glob("test_*.py"), key=lambda path: path.stat().st_size) for folder in folders]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--jaxtyping-packages=locant,beartype.beartype"]
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout[-2_000:]


COMPARED = {"allclose": 2, "approx": 1, "assert_allclose": 2, "assert_close": 2, "isclose": 2}
"""What compares up to a tolerance, and how many arguments it has before the first tolerance."""

DEFAULTS = {"approx": "abs", "testing.assert_allclose": "rtol", "testing.assert_close": "rtol"}
"""What is larger than 0 where it is not given; for `approx` even where `rel` is."""

TOLERANCES = {"abs", "abs_tol", "atol", "rel", "rel_tol", "rtol"}
SMALL = 1e-3
"""A number up to this, which something has to be smaller than, is a tolerance; larger ones have other meanings."""


def own_tolerances(code: str) -> list[int]:
    """The lines that compare up to what is no entry of the table, or up to the default of who compares."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(code))
        if (isinstance(node, ast.Call) and _is_loose(node)) or (isinstance(node, ast.Compare) and _is_bounded(node))
    ]


def _is_loose(call: ast.Call) -> bool:
    last = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if last not in COMPARED:
        return False
    named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg in TOLERANCES}
    if any(map(_is_written_out, [*call.args[COMPARED[last] :], *named.values()])):
        return True
    function = f".{ast.unparse(call.func)}"
    unsaid = {word for name, word in DEFAULTS.items() if function.endswith(f".{name}")} - named.keys()
    return bool(unsaid) and all(keyword.arg is not None for keyword in call.keywords)


def _is_bounded(node: ast.Compare) -> bool:
    """`error < 1e-6`; what something has to be larger than is no tolerance."""
    for operator, pair in zip(node.ops, itertools.pairwise([node.left, *node.comparators]), strict=True):
        if isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
            numbers = _numbers(pair[isinstance(operator, ast.Lt | ast.LtE)])
            if any(isinstance(number, float) and 0 < abs(number) <= SMALL for number in numbers):
                return True
    return False


def _is_written_out(tolerance: ast.expr) -> bool:
    """0 is none; an entry may be multiplied by a whole number, and have a number or a dtype for its key."""
    named = any(isinstance(part, ast.Name | ast.Attribute) for part in ast.walk(tolerance))
    return any(number and (isinstance(number, float) or not named) for number in _numbers(tolerance))


def _numbers(expression: ast.expr) -> list[object]:
    return [part.value for part in ast.walk(expression) if isinstance(part, ast.Constant)]


def test_no_test_has_a_tolerance_of_its_own() -> None:
    """try: an entry of tests/tolerances.py, with what it bounds and why it is so large."""
    modules = [path for path in sorted(TESTS.rglob("*.py")) if path != TESTS / "tolerances.py"]
    found = {path: own_tolerances(path.read_text(encoding="utf-8")) for path in modules}
    assert Path(__file__) in found
    assert {path.relative_to(TESTS).as_posix(): lines for path, lines in found.items() if lines} == {}
