"""Where kernels read: ids without a row, rows that lie far apart, and nothing beside the tables."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from locant.errors import RangeError
from locant.kernels.input_embedding import NO_FAULT, Operands, cpu
from tests.kernels.input_embedding.embedded import Kernel, operands
from tests.kernels.interpreted import Place, watched
from tests.refusal import refuses

BAD = [-1, 23, 2**31, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(("name", "table"), [("ids", "token"), ("segments", "segment"), ("position_index", "position")])
def test_a_cpu_raises(name: str, table: str, bad: int) -> None:
    """Compiled code has no other check than this one."""
    o = operands()
    ids = getattr(o, name).clone()
    ids[1, 2] = bad if bad != 23 else getattr(o, table).shape[0]
    with refuses(RangeError, f"{table} id {int(ids[1, 2])}", f"{getattr(o, table).shape[0]} rows"):
        cpu.forward(dataclasses.replace(o, **{name: ids}))


@pytest.mark.parametrize("bad", BAD)
def test_a_gpu_gives_nan_and_says_where(gpu_kernel: Kernel, bad: int) -> None:
    o = operands()
    ids, segments, index = o.ids.clone(), o.segments.clone(), o.position_index.clone()  # type: ignore[union-attr]
    ids[1, 2] = ids[2, 0] = bad
    segments[2, 4] = bad
    index[0, 1] = bad if bad != 23 else 37
    wrong = dataclasses.replace(o, ids=ids, segments=segments, position_index=index)
    y, _, _, first = gpu_kernel.forward(wrong)
    expected = gpu_kernel.forward(o)[0]
    for place in ((1, 2), (2, 0), (2, 4), (0, 1)):
        assert y[place].isnan().all()
        expected[place] = float("nan")
    assert torch.equal(y.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0)), "another token is not what it was"
    assert first.tolist() == [7, 1, 14]
    assert gpu_kernel.forward(o)[3].tolist() == [NO_FAULT] * 3


def test_an_id_without_a_row_has_no_gradient(gpu_kernel: Kernel) -> None:
    without = ("eps", "gamma", "beta", "padding_idx", "position", "position_index", "segment", "segments")
    o = operands((1, 6), 3, ids=torch.tensor([[-1, 23, 4, 2**40, 4, -1]]), without=without)
    found = gpu_kernel.backward(torch.ones(1, 6, 3), o)["token"]
    assert found.any(1).nonzero().flatten().tolist() == [4]
    assert found[4].tolist() == [torch.tensor(1.7 * 2).item()] * 3


def span(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.data_ptr() + x.untyped_storage().nbytes()


@pytest.mark.parametrize("width", [1, 5, 16, 63])
def test_no_lane_reads_beside_the_tables(width: int) -> None:
    """Reads past the end are invisible to tests of the output: what is read there is not used."""
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    kernel = Kernel("triton", Place("cpu"))
    o = operands((2, 3), width, ids=torch.tensor([[22, -1, 0], [23, 2**62, 22]]), seed=torch.tensor([1]), p=0.1)
    tensors = [getattr(o, field.name) for field in dataclasses.fields(o)]
    rooms = [span(x) for x in tensors if isinstance(x, Tensor)]
    first, last = (np.array(ends, dtype=np.uint64) for ends in zip(*rooms, strict=True))
    with watched() as seen:
        kernel.module.forward(o)
    reads = [access.addresses for access in seen if not access.stores and access.addresses.size]
    assert reads
    for addresses in reads:
        inside = (addresses[:, None] >= first) & (addresses[:, None] < last)
        assert inside.any(1).all()


def test_rows_that_lie_more_than_four_gigabytes_apart(kernel: Kernel) -> None:
    """Of the memory between them nothing is touched, so it costs nothing."""
    step = 2**31 + 7
    try:
        room = torch.empty(2 * step + 5, dtype=torch.bfloat16, device=kernel.place.device)
    except RuntimeError:
        pytest.skip("no address space for 8 GiB")
    far = room.as_strided((3, 5), (step, 1))
    far.copy_(torch.randn(3, 5))
    near = far.clone()
    ids = torch.tensor([[0, 1, 2], [2, 2, 1]])
    o = operands((2, 3), 5, dtype=torch.bfloat16, ids=ids, padding_idx=None)
    with torch.no_grad():
        there = kernel.there(dataclasses.replace(o, token=near))
        expected = kernel.module.forward(there)[0]
        assert torch.equal(kernel.module.forward(dataclasses.replace(there, token=far))[0], expected)


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
