"""The norm with the rotation on a CPU: against NumPy, and against the reference bit for bit.

Everything here is asked of the native kernel for each instruction set that this machine has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from locant import HeadNorm
from locant.kernels import native
from locant.kernels.norm_rotary import choose_kernel, cpu, reference
from locant.kernels.rotary.reference import Layout
from tests.kernels.norm_rotary.norming import gradients, truth
from tests.kernels.rotary.rotating import far_positions, tables
from tests.threads import threads
from tests.tolerances import assert_close

LAYOUTS = ["half", "interleaved"]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(scope="module", autouse=True, params=["reference", *native.runnable()])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which code norms and rotates, in all that is tested here."""
    of_library = native.function
    if request.param != "reference" and of_library(cpu.FORWARD) is None:
        pytest.skip(f"native kernels are {native.status()}")

    def function(name: str) -> Any:
        return None if request.param == "reference" else of_library(name, request.param)

    with mock.patch.object(native, "function", function):
        yield request.param


def forward(q: Tensor, k: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor | None]:
    """Into fresh memory full of NaN, and again in place: both have to be the same bits."""
    index, of, _, norm, *_ = rest
    is_native = choose_kernel(q, index, of, norm).kernel == "native"
    write = cpu.norm_and_rotate_ if is_native else reference.norm_and_rotate_
    fresh = [None if x is None else torch.full_like(x, torch.nan) for x in (q, k)]
    write(q, k, *fresh, *rest)  # type: ignore[arg-type]
    same = [None if x is None else x.clone() for x in (q, k)]
    write(*same, *same, *rest[:4])  # type: ignore[arg-type]
    for one, other in zip(fresh, same, strict=True):
        assert one is None or torch.equal(one, other)
    assert fresh[0] is not None
    return fresh[0], fresh[1]


def backward(grad_q: Tensor, grad_k: Tensor | None, q: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    _, index, of, _, norm = rest
    is_native = choose_kernel(q, index, of, norm).kernel == "native"
    differentiate = cpu.norm_and_rotate_backward if is_native else reference.norm_and_rotate_backward
    return differentiate(grad_q, grad_k, q, *rest)


def memory(x: Tensor, kind: str) -> Tensor:
    """The same numbers in other memory: heads inside tokens, or part of wider rows."""
    if kind == "tokens":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return torch.cat([x, x], -1)[..., : x.shape[-1]] if kind == "fused" else x


def weights(dim: int, heads: int, kind: str, dtype: torch.dtype) -> Tensor | None:
    width = {"none": 0, "head": dim, "heads": heads * dim}[kind]
    return (1 + torch.randn(width) / 4).to(dtype) if width else None


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("kind", ["none", "head", "heads"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_every_gradient_are_the_formula(dtype: torch.dtype, kind: str, plus_one: bool) -> None:
    head_dim, rotary_dim, index = 10, 6, far_positions(2, 3)
    for layout in LAYOUTS:
        q, k = torch.randn(2, 3, 3, head_dim).to(dtype), torch.randn(2, 2, 3, head_dim).to(dtype)
        q_weight, k_weight = weights(head_dim, 3, kind, torch.float64), weights(head_dim, 2, kind, torch.float64)
        norm, of = HeadNorm(q_weight, k_weight, 1e-3, plus_one, round_before_weight=False), tables(rotary_dim)
        outputs = forward(q, k, index, of, layout, norm)
        grads = [torch.randn_like(x) for x in (q, k)]
        found = backward(*grads, q, k, index, of, layout, norm)
        for i, (x, weight) in enumerate(((q, q_weight), (k, k_weight))):
            one = (weight, 1e-3, plus_one)
            ours, dx, dweight = outputs[i], found[i], found[i + 2]
            assert ours is not None
            assert dx is not None
            assert ours.dtype == dx.dtype == dtype
            assert_close(ours, truth(x, one, index, layout, rotary_dim))
            true_x, true_weight = gradients(grads[i], x, one, index, layout, rotary_dim)
            assert_close(dx, true_x)
            assert (dweight is None) == (true_weight is None) == (kind == "none")
            if dweight is not None and true_weight is not None:
                assert dweight.dtype == torch.float64
                assert_close(dweight, true_weight, torch.promote_types(dtype, torch.float32))


@given(data=st.data())
def test_any_rows_have_the_bits_of_the_reference(data: st.DataObject) -> None:
    """In any memory, with any weights: forward, and the copy of v beside it."""
    draw = data.draw
    dtype, layout = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(LAYOUTS))
    head_dim = draw(st.sampled_from([2, 3, 6, 8, 17, 34, 64, 80, 130, 256]))
    rotary_dim = 2 * draw(st.integers(1, head_dim // 2))
    batch, heads, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(0, 3))
    seq = draw(st.sampled_from([0, 1, 2, 7, 70]))
    places = st.sampled_from(["plain", "tokens", "fused"])
    q, k, v = (
        memory(torch.randn(batch, n, seq, head_dim).to(dtype), draw(places)) for n in (heads, kv_heads, kv_heads)
    )
    kinds = st.tuples(st.sampled_from(["none", "head", "heads"]), st.sampled_from(DTYPES))
    norm = HeadNorm(
        weights(head_dim, heads, *draw(kinds)),
        weights(head_dim, kv_heads, *draw(kinds)) if kv_heads else None,
        draw(st.sampled_from([0.0, 1e-6, 1e-2])),
        draw(st.booleans()),
        round_before_weight=draw(st.sampled_from([None, False, True])),
    )
    index = far_positions(draw(st.sampled_from([1, batch])), seq) if seq else torch.zeros(1, 0, dtype=torch.int64)
    out_v = torch.full_like(v, torch.nan)
    ours = forward(q, k, index, tables(rotary_dim), layout, norm, v, out_v)
    for x, expected in zip(ours, reference.norm_and_rotate(q, k, index, tables(rotary_dim), layout, norm), strict=True):
        assert x is not None
        assert expected is not None
        assert torch.equal(x, expected)
    assert torch.equal(out_v, v)
    grads = [torch.randn_like(x) for x in (q, k)]
    of = tables(rotary_dim)
    for mine, theirs in zip(
        backward(*grads, q, k, index, of, layout, norm),
        reference.norm_and_rotate_backward(*grads, q, k, index, of, layout, norm),
        strict=True,
    ):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine.dtype == theirs.dtype
            assert mine.shape == theirs.shape
            scale = max(1.0, float(theirs.double().abs().max())) if theirs.numel() else 1.0
            assert_close(mine.double() / scale, theirs.double() / scale, min(mine.dtype, dtype, key=_precision))


def _precision(dtype: torch.dtype) -> float:
    return -torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    """Alone, among other rows, in the middle of a sequence, in a fused projection, with other threads."""
    batch, heads, seq, dim = 3, 4, 150, 64
    qkv = torch.randn(batch, seq, 3 * heads * dim).to(dtype)
    q = qkv[..., : heads * dim].unflatten(-1, (heads, dim)).transpose(1, 2)
    for width in (dim, heads * dim):
        norm, index = HeadNorm(torch.randn(width), None), far_positions(batch, seq)
        whole, _ = forward(q, None, index, tables(dim), "half", norm)
        with threads(2):
            assert torch.equal(forward(q.clone(), None, index, tables(dim), "half", norm)[0], whole)
        for row, token in ((0, 0), (1, 77), (2, 149)):
            alone = q[row : row + 1, :, token : token + 1], None, index[row : row + 1, token : token + 1]
            one, _ = forward(*alone, tables(dim), "half", norm)
            assert torch.equal(one, whole[row : row + 1, :, token : token + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 63, 64, 65, 129])
def test_launches_for_pieces_write_the_bits_of_one_launch(size: int, dtype: torch.dtype) -> None:
    """With one thread and with two, as a cache calls the kernel: queries, keys and values."""
    q, k, v = (torch.randn(2, heads, 130, 64).to(dtype) for heads in (4, 2, 2))
    norm, index = HeadNorm(torch.randn(64), torch.randn(64)), far_positions(2, 130)
    of, whole_v = tables(64), torch.empty_like(v)
    kernels = cpu if choose_kernel(q, index, of, norm).kernel == "native" else reference
    whole = (*forward(q, k, index, of, "half", norm, v, whole_v), whole_v)
    for count in (1, 2):
        with threads(count):
            outputs = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            for pieces in zip(*(x.split(size, 2) for x in (q, k, v, *outputs)), index.split(size, 1), strict=True):
                *inputs, out_q, out_k, out_v, where = pieces
                kernels.norm_and_rotate_(inputs[0], inputs[1], out_q, out_k, where, of, "half", norm, inputs[2], out_v)
        for found, expected in zip(outputs, whole, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["head", "heads"])
def test_gradients_do_not_depend_on_the_number_of_threads(kind: str) -> None:
    q, grad = (torch.randn(2, 4, 300, 64) for _ in range(2))
    norm, index = HeadNorm(weights(64, 4, kind, torch.float32), None), far_positions(1, 300)
    found = []
    for count in (1, 2, 3):
        with threads(count):
            found.append(backward(grad, None, q, None, index, tables(64), "half", norm))
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_not_finite_stay_in_their_rows(dtype: torch.dtype) -> None:
    """NaN, infinity and squares that overflow in float32, in queries and in weights."""
    q = torch.randn(1, 1, 5, 16).to(dtype)
    q[0, 0, 1, 3], q[0, 0, 2, 4], q[0, 0, 3] = torch.nan, torch.inf, torch.finfo(dtype).max
    weight = torch.ones(16)
    weight[2] = torch.frombuffer(bytearray(b"\xff\xff\xff\x7f"), dtype=torch.float32)[0]  # NaN with all bits set
    index, of = far_positions(1, 5), tables(4)
    for norm in (HeadNorm(weight, None), HeadNorm(None, None)):
        out = torch.full_like(q, 0.0)
        is_native = choose_kernel(q, index, of, norm).kernel == "native"
        (cpu if is_native else reference).norm_and_rotate_(q, None, out, None, index, of, "half", norm)
        expected, _ = reference.norm_and_rotate(q, None, index, of, "half", norm)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num(), expected.nan_to_num())


def require_bits_of_reference(q: Tensor, norm: HeadNorm, layout: Layout) -> None:
    """NaN may have any bits."""
    index, of, ours = torch.arange(q.shape[2])[None], tables(q.shape[3]), torch.empty_like(q)
    is_native = choose_kernel(q, index, of, norm).kernel == "native"
    (cpu if is_native else reference).norm_and_rotate_(q, None, ours, None, index, of, layout, norm)
    expected, _ = reference.norm_and_rotate(q, None, index, of, layout, norm)
    is_nan = expected.isnan()
    assert torch.equal(ours.isnan(), is_nan)
    assert torch.equal(_bits(ours)[~is_nan], _bits(expected)[~is_nan])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [64, 96, 128, 256, 512])
def test_every_kind_of_bfloat16_number_has_the_bits_of_the_reference(dim: int, layout: Layout) -> None:
    """Zeros of both signs, numbers below the normal range, ties and overflow, in rows and in weights."""
    tokens = 4  # at position 0, a sine of zero leaves the sign of a zero
    bits = torch.randint(0, 0x7F80, (2, 3, tokens, dim)) | torch.randint(2, (2, 3, tokens, dim)) << 15
    any_number = bits.to(torch.uint16).view(torch.bfloat16)
    near_one = torch.randn(any_number.shape).to(torch.bfloat16)
    share = torch.tensor([0.0, 0.02, 0.5, 1.0]).view(1, 1, tokens, 1)
    q = torch.where(torch.rand(any_number.shape) < share, any_number, near_one)
    q = torch.where(torch.rand(q.shape) < 0.1, torch.zeros_like(q).copysign(near_one), q)
    ones = torch.ones_like(q).copysign(near_one)  # their norm without epsilon is 1, so that they become the weights
    ties = 1 + torch.arange(dim) / 256
    for weight in (None, ties, torch.randn(dim) * 1e38, torch.randn(dim) * (torch.rand(dim) < 0.5)):
        for rounded in (False, True):
            norm = HeadNorm(weight, None, 0.0, round_before_weight=rounded)
            require_bits_of_reference(q, norm, layout)
            require_bits_of_reference(ones, norm, layout)


@pytest.mark.parametrize("dim", [64, 96, 128, 256, 512])
def test_sums_of_bfloat16_rows_have_the_bits_of_the_reference(dim: int) -> None:
    """A sum in another order changes one number of some hundred thousand, so here are two million."""
    require_bits_of_reference(torch.randn(2, 2**20 // dim, 1, dim).to(torch.bfloat16), HeadNorm(None, None), "half")


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16)


def test_squares_are_added_in_the_order_of_torch(path: str) -> None:
    if path == "reference":
        return
    function, lanes = native.function("locant_sum_of_squares"), cpu.sum_lanes()
    function.restype, function.argtypes = cpu.SUM_TYPES
    assert lanes is not None
    for width in (2, 3, 5, 8, 13, 16, 31, 33, 100, 127, 512, 520, 1_000, 2_053, 16_384, 100_000):
        for row in torch.randn(3, width):
            assert function(row.data_ptr(), width, lanes) == row.pow(2).sum().item()
