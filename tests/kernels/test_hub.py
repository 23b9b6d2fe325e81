"""The rotary kernel as others take it: built into the layout of the Hub's library `kernels`, and loaded by that."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

from hub.build import build
from tests.kernels.rotary.rotating import BASE, far_positions, truth
from tests.tolerances import assert_close

HEAD_DIM = 14

pytestmark = pytest.mark.slow

kernels = pytest.importorskip("kernels", reason="the Hub's library is not installed: pip install kernels")


@pytest.fixture(scope="module", params=["C", "torch"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kernel's folder, with C code and without."""
    if request.param == "C" and (sys.platform != "linux" or not shutil.which("gcc")):
        pytest.skip("there is no gcc")
    folder = tmp_path_factory.mktemp("hub")
    with mock.patch.dict("os.environ", {"CC": "gcc" if request.param == "C" else "false"}):
        assert len(build(folder)) == (3 if request.param == "C" else 2)
    return folder


@pytest.fixture(scope="module")
def rotary(folder: Path) -> ModuleType:
    """What `kernels` makes of it."""
    return kernels.get_local_kernel(folder, backend="cpu")


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, 6])
def test_it_rotates_forward_and_backward(rotary: ModuleType, layout: str, rotary_dim: int) -> None:
    q = torch.randn(2, 3, 5, HEAD_DIM, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 1, 5, HEAD_DIM, dtype=torch.float64, requires_grad=True)
    index = far_positions(2, 5)
    angles = rotary.angles(rotary.inverse_frequencies(rotary_dim, BASE))
    rotated = rotary.rotate(q, k, index, angles, layout=layout)
    cotangents = [torch.randn_like(x) for x in rotated]
    gradients = torch.autograd.grad(rotated, (q, k), cotangents)
    for x, out, cotangent, gradient in zip((q, k), rotated, cotangents, gradients, strict=True):
        assert_close(out, truth(x, index, layout, rotary_dim))
        assert_close(gradient, truth(cotangent, index, layout, rotary_dim, sign=-1))
    alone, nothing = rotary.rotate(q, None, index, angles, layout=layout)
    assert nothing is None
    assert torch.equal(alone, rotated[0])
    assert torch.equal(torch.autograd.grad(alone, q, cotangents[0])[0], gradients[0])


def test_it_rotates_in_place_and_back(rotary: ModuleType) -> None:
    q, index = torch.randn(1, 2, 5, HEAD_DIM), torch.arange(5)[None]
    angles = rotary.angles(rotary.inverse_frequencies(HEAD_DIM, BASE))
    rotated, _ = rotary.rotate(x := q.clone(), None, index, angles, inplace=True)
    assert rotated is x
    assert_close(rotated, truth(q, index, "half", HEAD_DIM))
    assert_close(rotary.rotate(rotated, None, index, angles, inverse=True)[0], q)


@pytest.mark.parametrize("inplace", [False, True])
def test_it_norms_in_the_same_pass(rotary: ModuleType, inplace: bool) -> None:
    """The norm of a head by its formula, and the gradient of its weight by finite differences."""
    index, angles = far_positions(1, 3), rotary.angles(rotary.inverse_frequencies(HEAD_DIM, BASE))
    q, weight = torch.randn(1, 2, 3, HEAD_DIM, dtype=torch.float64), torch.randn(HEAD_DIM, dtype=torch.float64)
    normed = q / (q.square().mean(-1, keepdim=True) + 0.01).sqrt() * (weight + 1)
    norm = rotary.HeadNorm(weight, None, eps=0.01, plus_one=True)
    found, _ = rotary.rotate(q.clone(), None, index, angles, norm=norm, inplace=inplace)
    assert_close(found, truth(normed, index, "half", HEAD_DIM))

    def of_weight(weight: torch.Tensor) -> torch.Tensor:
        return rotary.rotate(q.clone(), None, index, angles, norm=rotary.HeadNorm(weight, None))[0]

    assert torch.autograd.gradcheck(of_weight, weight.requires_grad_())
    with pytest.raises(ValueError, match="norm=None"):
        rotary.rotate(q, None, index, angles, norm=norm, inverse=True)


@pytest.mark.unchecked
def test_a_compiler_sees_an_operator_of_its_own(rotary: ModuleType) -> None:
    angles = rotary.angles([1.0])
    called = []

    def look(graph: torch.fx.GraphModule, inputs: object) -> object:
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compile(lambda q: rotary.rotate(q, None, torch.arange(3)[None], angles)[0], backend=look, fullgraph=True)(
        torch.randn(1, 1, 3, 2)
    )
    assert any(name.startswith("_locant_rotary_cpu_") for name in called), called


USED_LATE = {"numpy"}
"""Where queries and keys lie within each other in memory, and no earlier."""


def test_it_imports_nothing_but_torch_and_itself(folder: Path) -> None:
    for path in folder.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        for_types = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
        unread = {inner for node in for_types for inner in node.body}
        modules = {
            *(alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names),
            *(node.module or "" for node in set(nodes) - unread if isinstance(node, ast.ImportFrom) and not node.level),
        }
        assert {name.split(".")[0] for name in modules} <= {"torch", "triton", *sys.stdlib_module_names} | USED_LATE, (
            path
        )


def test_each_variant_says_what_it_is(folder: Path) -> None:
    said = {path.parent.name: kernels.Metadata.read_from_file(path) for path in folder.glob("build/*/metadata.json")}
    assert {"torch-cuda", "torch-cpu"} <= said.keys()
    assert all(facts.name.python_name == "locant_rotary" for facts in said.values())
    assert len({json.dumps(facts.id) for facts in said.values()}) == len(said)


def test_a_folder_with_a_build_is_not_touched(folder: Path) -> None:
    with pytest.raises(FileExistsError, match="another folder"):
        build(folder)
