"""What the Triton kernel touches: every element once, wherever it lies, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from locant.kernels.rotary.reference import Tables
from tests.kernels.interpreted import Access, Place, sparse, watched, without_copying_back
from tests.kernels.rotary.rotating import KERNEL, Case, far_positions, rotate_pairs, tables

LAYOUTS = ["half", "interleaved"]
DIM, ROTARY_DIM = 14, 10


def case(layout: str = "half", dtype: torch.dtype = torch.float32) -> Case:
    q, k = torch.randn(2, 5, 7, DIM).to(dtype), torch.randn(2, 3, 7, DIM).to(dtype)
    return Case(q, k, far_positions(1, 7), layout, ROTARY_DIM)


def addresses(x: Tensor) -> np.ndarray:
    """Where each element of `x` lies."""
    offset = np.zeros((1,) * x.ndim, dtype=np.uint64)
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        steps = np.arange(size, dtype=np.uint64) * np.uint64(stride * x.element_size())
        offset = offset + steps.reshape([-1 if d == dim else 1 for d in range(x.ndim)])
    return offset.ravel() + np.uint64(x.data_ptr())


def touched(seen: list[Access], *, stores: bool) -> np.ndarray:
    return np.sort(np.concatenate([access.addresses for access in seen if access.stores is stores]))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("angles", ["exact", "several axes", "float32"])
def test_every_element_is_read_and_written_once_and_nothing_else_is(angles: str, layout: str, inplace: bool) -> None:
    given, index = case(layout), far_positions(2, 7)
    of = tables(ROTARY_DIM)
    if angles == "several axes":
        of, index = of._replace(axis_of_pair=torch.tensor([0, 1, 1, 0, 0])), torch.stack([index, index], dim=-1)
    elif angles == "float32":
        of = Tables(torch.rand(ROTARY_DIM // 2))
    q, k = given.q, given.k
    outs = (q, k) if inplace else (torch.empty_like(q), torch.empty_like(k))
    with watched() as seen:
        rotate_pairs(Place("cpu"), given._replace(index=index), of=of, into=outs, inplace=inplace)
    moved = slice(ROTARY_DIM if inplace else None)
    written = np.sort(np.concatenate([addresses(x[..., moved]) for x in outs]))
    assert np.array_equal(touched(seen, stores=True), written)
    read = touched(seen, stores=False)
    tokens = np.sort(np.concatenate([addresses(x[..., moved]) for x in (q, k)]))
    assert np.array_equal(read[np.isin(read, tokens)], tokens)
    helpers = [x for x in (index, of.table, of.axis_of_pair) if x is not None]
    assert np.isin(read[~np.isin(read, tokens)], np.concatenate([addresses(x) for x in helpers])).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_was_read_before_by_the_same_program(layout: str) -> None:
    """And no other program reads or writes it: so the result may lie where the input lies."""
    given = case(layout)
    with watched() as seen:
        rotate_pairs(Place("cpu"), given, inplace=True)
    owner: dict[int, int] = {}
    tokens = {int(a) for x in (given.q, given.k) for a in addresses(x)}
    for access in seen:
        for address in map(int, access.addresses):
            if address not in tokens:
                continue
            if access.stores:
                assert owner.get(address) == access.program
            else:
                assert address not in owner, "read twice"
                owner[address] = access.program


def test_a_token_reads_two_rows_of_the_tables_below_65536_and_four_above() -> None:
    """However many heads it has, as long as one program has them all; nothing of the size of the angles is stored."""
    given = case()
    for levels, rows in ((2, 2), (4, 4)):
        of = tables(ROTARY_DIM, levels=levels)
        with watched() as seen, mock.patch.object(Place("cpu").load(KERNEL), "PROGRAMS", 1):
            rotate_pairs(Place("cpu"), given._replace(index=given.index % 256**levels), of=of)
        read = touched(seen, stores=False)
        tokens = given.q.shape[0] * given.q.shape[2]
        assert np.isin(read, addresses(of.table)).sum() == tokens * rows * ROTARY_DIM


def gapped(x: Tensor) -> Tensor:
    """The same values with a NaN between any two of them."""
    return torch.stack([x, torch.full_like(x, torch.nan)], dim=-1).flatten(-2)[..., ::2]


MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "tokens before heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "dimensions first": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "every other element": gapped,
    "one of three projections": lambda x: torch.stack([x + 1, x, x + 2], dim=3)[:, :, :, 1],
    "not aligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "rows backwards in memory": lambda x: x.flip(0).contiguous().view(x.shape)[[1, 0]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("memory", MEMORY)
def test_memory_laid_out_otherwise_gives_the_same_bits(memory: str, layout: str, place: Place) -> None:
    given, lay = case(layout), MEMORY[memory]
    expected = rotate_pairs(place, given)
    device = place.device
    other = given._replace(q=lay(given.q.to(device)), k=lay(given.k.to(device)), index=gapped_index(given.index))
    assert all(map(torch.equal, rotate_pairs(place, other), expected))
    into = lay(torch.full_like(given.q, torch.nan).to(device)), lay(torch.full_like(given.k, torch.nan).to(device))
    assert all(map(torch.equal, rotate_pairs(place, given, into=into), expected))
    version = other.q._version
    assert all(map(torch.equal, rotate_pairs(place, other, into=(other.q, other.k)), expected))
    assert other.q._version > version, "torch's graph does not see that q is overwritten"


def gapped_index(index: Tensor) -> Tensor:
    return torch.stack([index, index + 1], dim=-1).flatten(-2)[:, ::2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_repeated_without_a_copy(layout: str, place: Place) -> None:
    """Stride 0, as a sum hands it to a backward pass."""
    given = case(layout)
    repeated = given._replace(q=given.q[:, :1, :1].expand(2, 5, 7, DIM), k=torch.randn(1, 1, 1, 1).expand(2, 3, 7, DIM))
    copied = repeated._replace(q=repeated.q.contiguous(), k=repeated.k.contiguous())
    fresh = torch.empty(2, 5, 7, DIM).to(place.device), torch.empty(2, 3, 7, DIM).to(place.device)
    assert all(map(torch.equal, rotate_pairs(place, repeated, into=fresh), rotate_pairs(place, copied)))


@pytest.mark.parametrize("shape", [(0, 5, 7, DIM), (2, 5, 0, DIM), (2, 0, 7, DIM)])
def test_nothing_is_launched_for_nothing(shape: tuple[int, ...], place: Place) -> None:
    x = torch.empty(shape)
    index = torch.zeros(1, shape[2], dtype=torch.int64)
    module = place.load(KERNEL)
    with (
        mock.patch.object(module, "_rotate_kernel", {}),
        mock.patch.object(module, "_is_interpreted", return_value=True),
    ):
        for inplace in (False, True):
            q, k = rotate_pairs(place, Case(x, x.clone(), index, "half", ROTARY_DIM), inplace=inplace)
            assert q.shape == k.shape == shape
        with pytest.raises(KeyError):  # the patch does see a launch
            rotate_pairs(place, case())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strides", [(2**31 + 8, 2**20, 16, 1), (80, 2**31 + 8, 16, 1), (64, 16, 2**29, 2**25),
                                     (80, 2**30 + 8, 16, 1), (60, 20, 4, 2**30)])  # fmt: skip
def test_elements_more_than_2_31_apart(strides: tuple[int, ...], layout: str) -> None:
    shape = (2, 3, 5, 4)
    furthest = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    assert furthest > 2**31
    given = Case(torch.randn(shape).half(), None, far_positions(1, 5), layout, 4)
    q, out = (sparse(furthest + 1).as_strided(shape, strides) for _ in range(2))
    q.copy_(given.q)
    with without_copying_back():
        rotated, _ = rotate_pairs(Place("cpu"), given._replace(q=q), into=(out, None))
    assert torch.equal(rotated, rotate_pairs(Place("cpu"), given)[0])


@pytest.mark.gpu
def test_more_than_2_31_elements() -> None:
    """4 GB of bfloat16, and its result; the last head is compared with itself alone."""
    from locant.kernels.rotary import triton

    q = torch.randn(1, 1, 2**20, 128, device="cuda").bfloat16().expand(1, 17, 2**20, 128).contiguous()
    out, index = torch.full_like(q, torch.nan), torch.arange(2**20, device="cuda")[None]
    of = tables(128, "cuda")
    triton.rotate_(q, None, out, None, index, of, "half", False)
    alone = torch.empty_like(q[:, :1])
    triton.rotate_(q[:, :1], None, alone, None, index, of, "half", False)
    assert q.numel() > 2**31
    assert all(torch.equal(out[:, head], alone[:, 0]) for head in range(17))


SANITIZED = """
import torch
from tests.kernels.interpreted import Place
from tests.kernels.rotary.rotating import Case, far_positions, rotate_pairs
for layout in ("half", "interleaved"):
    for dim in (2, 40, 72, 80, 96, 128, 192, 256, 512):
        case = Case(torch.randn(2, 3, 63, dim), None, far_positions(1, 63), layout, dim)
        rotate_pairs(Place("cuda"), case)
torch.cuda.synchronize()
"""


@pytest.mark.gpu
def test_the_sanitizer_finds_nothing() -> None:
    """Every access of every head dimension, watched by NVIDIA's own tool."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("there is no compute-sanitizer on the path")
    command = [tool, "--error-exitcode", "3", sys.executable, "-c", SANITIZED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
