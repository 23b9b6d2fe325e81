"""What `tests/conftest.py` promises the other tests."""

from __future__ import annotations

import ast
import os
import socket
import warnings
from pathlib import Path

import pytest
import torch
from beartype import beartype
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from tests.refusal import shapes_unchecked
from tests.shape_checks import checked

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"


def test_a_connection_to_another_machine_fails_the_test() -> None:
    with socket.socket() as out, pytest.raises(pytest.fail.Exception, match="reached for the network"):
        out.connect(("192.0.2.1", 80))


def test_a_look_up_of_another_machine_fails_the_test() -> None:
    with pytest.raises(pytest.fail.Exception, match="reached for the network"):
        socket.create_connection(("example.invalid", 80))


def test_this_machine_may_be_spoken_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(("localhost", server.getsockname()[1])).close()


def test_a_warning_is_an_error() -> None:
    with pytest.raises(UserWarning, match="look out"):
        warnings.warn("look out", UserWarning, stacklevel=1)


def test_every_test_begins_with_the_same_seed() -> None:
    drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(0)))


def test_every_example_of_a_property_begins_with_the_same_seed() -> None:
    drawn: list[torch.Tensor] = []

    @given(st.integers())
    def draw(_: int) -> None:
        drawn.append(torch.rand(3))

    draw()
    assert len(drawn) > 1
    assert all(torch.equal(drawn[0], other) for other in drawn)


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process may use every core")
def test_a_worker_uses_one_thread() -> None:
    assert torch.get_num_threads() == 1


def test_conftest_leaves_locant_to_the_import_hook_of_the_shape_checks() -> None:
    tree = ast.parse(CONFTEST.read_text(encoding="utf-8"))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "torch" in modules
    assert {module for module in modules if module.split(".")[0] == "locant"} == set()


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
