"""Where kernels read: ids without a row, rows that lie far apart, and nothing beside the tables."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from locant.errors import RangeError
from locant.kernels.input_embedding import Operands, native
from tests.kernels.input_embedding.embedded import Kernel, operands
from tests.refusal import refuses

BAD = [-1, 23, 2**31, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(("name", "table"), [("ids", "token"), ("segments", "segment"), ("position_index", "position")])
def test_a_cpu_raises(kernel: Kernel, name: str, table: str, bad: int) -> None:
    """Compiled code has no other check than this one."""
    o = operands()
    ids = getattr(o, name).clone()
    ids[1, 2] = bad if bad != 23 else getattr(o, table).shape[0]
    wrong = dataclasses.replace(o, **{name: ids})
    with refuses(RangeError, f"{table} id {int(ids[1, 2])}", f"{getattr(o, table).shape[0]} rows"):
        kernel.forward(wrong)
    with refuses(RangeError, f"{table} id {int(ids[1, 2])}", f"{getattr(o, table).shape[0]} rows"):
        native.backward(torch.zeros(3, 5, 13), torch.zeros(15), torch.ones(15), wrong, [True] * 5)


def test_rows_that_lie_more_than_four_gigabytes_apart(kernel: Kernel) -> None:
    """Of the memory between them nothing is touched, so it costs nothing."""
    step = 2**31 + 7
    try:
        room = torch.empty(2 * step + 5, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("no address space for 8 GiB")
    far = room.as_strided((3, 5), (step, 1))
    far.copy_(torch.randn(3, 5))
    near = far.clone()
    ids = torch.tensor([[0, 1, 2], [2, 2, 1]])
    o = operands((2, 3), 5, dtype=torch.bfloat16, ids=ids, padding_idx=None)
    expected = native.forward(dataclasses.replace(o, token=near))[0]
    assert torch.equal(native.forward(dataclasses.replace(o, token=far))[0], expected)


@pytest.mark.parametrize("without", [(), ("eps", "gamma", "beta")], ids=["with norm", "without"])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_inputs_are_left_as_they_are(kernel: Kernel, p: float, without: tuple[str, ...]) -> None:
    o: Operands = operands((2, 3), seed=torch.tensor([1]), p=p, position_index=torch.arange(3)[None], without=without)
    tensors = {f.name: getattr(o, f.name) for f in dataclasses.fields(o) if isinstance(getattr(o, f.name), Tensor)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    grad = torch.randn(2, 3, 13)
    kept = grad.clone()
    kernel.backward(grad, o)
    assert torch.equal(grad, kept)
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
