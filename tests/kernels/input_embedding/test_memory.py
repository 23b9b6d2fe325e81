"""Where kernels read: ids without a row, rows that lie far apart, and nothing beside the tables."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from locant.errors import RangeError
from locant.kernels.input_embedding import NO_FAULT, Operands
from tests.kernels.input_embedding.embedded import Kernel, operands
from tests.kernels.interpreted import Place, sparse, watched, without_copying_back
from tests.refusal import refuses
from tests.tolerances import assert_close

BAD = [-1, 23, 2**31, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(("name", "table"), [("ids", "token"), ("segments", "segment"), ("position_index", "position")])
def test_a_cpu_raises(cpu_kernel: Kernel, name: str, table: str, bad: int) -> None:
    """Compiled code has no other check than this one."""
    o = operands()
    ids = getattr(o, name).clone()
    ids[1, 2] = bad if bad != 23 else getattr(o, table).shape[0]
    wrong = dataclasses.replace(o, **{name: ids})
    with refuses(RangeError, f"{table} id {int(ids[1, 2])}", f"{getattr(o, table).shape[0]} rows"):
        cpu_kernel.forward(wrong)
    with refuses(RangeError, f"{table} id {int(ids[1, 2])}", f"{getattr(o, table).shape[0]} rows"):
        cpu_kernel.module.backward(torch.zeros(3, 5, 13), torch.zeros(15), torch.ones(15), wrong, [True] * 5)


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


FAR, WIDE = 2**20, 2**12
"""Number FAR of rows as wide as WIDE begins at element 2**32, which 32 bits take for element 0."""


@contextlib.contextmanager
def only_program(number: int) -> Iterator[None]:
    """Programs say that they are this one: the ones before it do not have to run."""
    from triton.runtime.interpreter import InterpreterBuilder

    asked = InterpreterBuilder.create_get_program_id

    def ask(builder: Any, axis: int) -> Any:
        handle = asked(builder, axis)
        handle.data = handle.data + np.array(number if axis == 0 else 0, dtype=handle.data.dtype)
        return handle

    with mock.patch.object(InterpreterBuilder, "create_get_program_id", ask), without_copying_back():
        yield


def test_far_programs_of_the_backward_pass_write_where_they_should() -> None:
    """A norm's gradients come in one row for every program. Memory that is never touched costs nothing."""
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    module = Place("cpu").load("locant.kernels.input_embedding.triton")
    o = operands((1, 1), WIDE, without=("beta", "gamma", "segment", "segments", "position", "position_index"))
    grad, dx, partial = sparse((FAR + 1) * WIDE), sparse((FAR + 1) * WIDE), sparse((FAR + 3) * WIDE)
    cotangent = torch.randn(WIDE).half()
    grad[FAR * WIDE :] = cotangent
    mean, rstd = torch.zeros(FAR + 1), torch.ones(FAR + 1)
    far = dataclasses.replace(o, ids=torch.zeros(1, FAR + 1, dtype=torch.long))
    given = (grad, dx, partial, mean, rstd, *module._tables(far), *module._of_norm(far), *module._sizes(far), 1)
    with only_program(FAR):
        module._backward[(1,)](*given, **module._constants(far) | {"ROWS": 1})
    x = o.token[0] * 1.7
    assert_close(partial[FAR * WIDE :][:WIDE], cotangent * x)
    assert_close(partial[(FAR + 1) * WIDE :][:WIDE], cotangent)
    assert not partial[:WIDE].any()
    assert dx[FAR * WIDE :].any()


def test_far_runs_of_sorted_ids_are_found() -> None:
    """What is left of a run goes to a row of its number, and is fetched from there."""
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    module = Place("cpu").load("locant.kernels.input_embedding.triton")
    ids, order = torch.zeros(FAR + 3, dtype=torch.long), torch.zeros(FAR + 3, dtype=torch.long)
    ids[FAR:], order[FAR:] = torch.tensor([5, 5, 5]), torch.tensor([1, 2, 3])
    rows = torch.randn(4, WIDE).half()
    head, tail, grad = sparse((FAR + 3) * WIDE), sparse((FAR + 3) * WIDE), torch.zeros(7, WIDE).half()
    constants = {"WIDTH": WIDE, "SCALE": 1.0, "RUN": 1, "BLOCK": WIDE}
    for number in (FAR, FAR + 1, FAR + 2):
        with only_program(number):
            module._add_runs[(1, 1)](rows, order, ids, head, tail, grad, FAR + 3, 7, -1, **constants)
    assert torch.equal(tail[FAR * WIDE :][:WIDE], rows[1])
    assert torch.equal(head[(FAR + 1) * WIDE :].view(2, WIDE), rows[2:])
    assert not head[:WIDE].any()
    assert not tail[:WIDE].any()
    last_run = torch.zeros(FAR + 3, dtype=torch.long)
    last_run[FAR:] = FAR + 2
    with only_program(FAR):
        module._join_runs[(1, 1)](ids, last_run, head, tail, grad, 7, -1, TOGETHER=2, **constants)
    assert_close(grad[5], rows[1:].double().sum(0), torch.float16)
    assert not grad[:5].any()


class Float32(TorchDispatchMode):
    """Notes how many float32 numbers the largest tensor has that is made meanwhile."""

    largest = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = operator(*args, **kwargs or {})
        if isinstance(made, Tensor) and made.dtype == torch.float32:
            self.largest = max(self.largest, made.numel())
        return made


def test_narrow_rows_alone_are_neither_widened_nor_copied(gpu_kernel: Kernel) -> None:
    """A look-up moves each row once and its gradient once; sums are float32 where they are formed."""
    without = ("eps", "gamma", "beta", "position", "position_index", "segment", "segments")
    o = operands((4, 64), dtype=torch.bfloat16, without=without)
    cotangent = torch.randn(4, 64, o.width).bfloat16()
    with Float32() as seen:
        gpu_kernel.backward(cotangent, o)
    assert 0 < seen.largest < o.num_tokens * o.width


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


@pytest.mark.gpu
def test_a_result_of_2_31_elements_is_written_to_its_end() -> None:
    """131 072 ids of width 16 384, and one id less and more."""
    from locant.kernels.input_embedding import triton

    table = torch.randn(5, 16_384, dtype=torch.bfloat16, device="cuda")
    for tokens in (131_071, 131_072, 131_073):
        ids = torch.arange(tokens, device="cuda")[None] % 5
        y = triton.forward(Operands(ids=ids, token=table))[0][0]
        for first in range(0, tokens, 4_096):
            assert torch.equal(y[first : first + 4_096], table[ids[0, first : first + 4_096]])
