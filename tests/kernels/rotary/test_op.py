"""`rotate`: derivatives of every kind, in place, compiled, without data, and which kernel it takes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from locant import LocantError, Positions, Rotary
from locant.kernels import native
from locant.kernels.rotary import Tables, choice, choose_kernel, cpu, op, rotate
from locant.kernels.rotary.choice import KernelChoice
from tests.kernels.rotary.rotating import far_positions, tables, truth
from tests.refusal import refuses
from tests.tolerances import assert_close

LAYOUTS = ["half", "interleaved"]
DIM, ROTARY_DIM = 14, 6


def tokens(dtype: torch.dtype = torch.float64, grad: bool = True) -> tuple[Tensor, Tensor]:
    q, k = torch.randn(2, 3, 5, DIM, dtype=dtype), torch.randn(2, 1, 5, DIM, dtype=dtype)
    return q.requires_grad_(grad), k.requires_grad_(grad)


def rotating(layout: str, index: Tensor | None = None, **options: Any) -> Callable[..., Any]:
    """`rotate` as a function of q and k alone."""
    index = torch.arange(5)[None] if index is None else index
    return lambda q, k: rotate(q, k, index, tables(ROTARY_DIM), layout, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [2, 72, 128])
def test_the_gradient_is_what_arrives_rotated_back(head_dim: int, dtype: torch.dtype, layout: str) -> None:
    q = torch.randn(2, 3, 5, head_dim).to(dtype).requires_grad_()
    k = torch.randn(2, 5, 2, head_dim).to(dtype).transpose(1, 2).requires_grad_()
    index = far_positions(2, 5)
    out = rotate(q, k, index, tables(head_dim), layout)  # type: ignore[arg-type]
    cotangents = [torch.randn_like(x) for x in out]
    gradients = torch.autograd.grad(out, (q, k), cotangents)
    for gradient, cotangent, x in zip(gradients, cotangents, (q, k), strict=True):
        assert gradient.shape == x.shape
        assert gradient.dtype == dtype
        assert_close(gradient, truth(cotangent, index, layout, head_dim, sign=-1))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_and_second_derivatives_are_those_of_finite_differences(layout: str, inplace: bool) -> None:
    index, of = far_positions(1, 2), tables(4)
    q = torch.randn(1, 2, 2, 5, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 1, 2, 5, dtype=torch.float64, requires_grad=True)

    def of_copies(q: Tensor, k: Tensor) -> Any:
        return rotate(q * 1, k * 1, index, of, layout, inplace=inplace)  # type: ignore[arg-type]

    assert torch.autograd.gradcheck(of_copies, (q, k))
    assert torch.autograd.gradgradcheck(of_copies, (q, k))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_what_is_asked_for_is_computed(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two gradients, one of two outputs used: the other one is not rotated back for nothing."""
    rotation, (q, k) = rotating(layout), tokens()
    kernel, rotated = op._run, []
    monkeypatch.setattr(
        op, "_run", lambda q, k, *rest: (rotated.append((q is not None, k is not None)), kernel(q, k, *rest))
    )
    cotangent = torch.randn_like(k)
    (alone,) = torch.autograd.grad(rotation(q.detach(), k)[1], k, cotangent)
    (of_one,) = torch.autograd.grad(rotation(q, k)[1], k, cotangent)
    torch.autograd.grad(rotation(q.detach(), k), k, (torch.randn_like(q), cotangent))
    assert rotated == [(True, True), (True, False)] * 3
    assert torch.equal(alone, of_one)
    assert_close(alone, truth(cotangent, torch.arange(5)[None], layout, ROTARY_DIM, sign=-1))
    assert torch.autograd.grad(rotation(q, k)[1].sum(), q, allow_unused=True) == (None,)


def test_nothing_of_the_size_of_q_is_kept_for_the_backward() -> None:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        q, k = (torch.randn(1, 2, 1_000, 6, requires_grad=True) for _ in range(2))
        rotate(q, k, torch.arange(1_000)[None], tables(6), "half")
    assert kept
    assert all(x.dtype == torch.int64 or x is tables(6).table for x in kept)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's forward mode, about itself
@pytest.mark.parametrize(("layout", "inplace"), [("half", False), ("interleaved", False), ("half", True)])
def test_transformations_of_functions_work(layout: str, inplace: bool) -> None:
    """`torch.func`: gradients, tangents, samples side by side, one inside of the other."""
    of_copies, (q, k) = rotating(layout, far_positions(2, 5), inplace=inplace), tokens(grad=False)
    along = torch.randn_like(q)

    def rotation(q: Tensor, k: Tensor) -> Any:
        return of_copies(q * 1, k * 1)

    _, (tangent, still) = torch.func.jvp(lambda q: rotation(q, k), (q,), (along,))
    assert_close(tangent, rotation(along, k)[0])
    assert not still.any()
    with forward_ad.dual_level():
        dual = rotation(forward_ad.make_dual(q, along), k)[0]
        assert torch.equal(forward_ad.unpack_dual(dual).tangent, tangent)

    def loss(q: Tensor, k: Tensor) -> Tensor:
        return (rotation(q, k)[0] * along).sum() + rotation(q, k)[1].pow(2).sum()

    many_q, many_k = torch.randn(4, *q.shape, dtype=q.dtype), torch.randn(2, 4, *k.shape[1:], dtype=k.dtype)
    together = torch.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, 1))(many_q, many_k)
    # Of what not every sample has its own, `vmap` lets nobody overwrite any.
    shared = torch.vmap(lambda q: rotation(q, k + 0 * q[:, :1] if inplace else k))(many_q)
    for i in range(4):
        for x, alone in zip(together, torch.func.grad(loss, argnums=(0, 1))(many_q[i], many_k[:, i]), strict=True):
            assert torch.equal(x[i], alone)
        for x, alone in zip(shared, rotation(many_q[i], k), strict=True):
            assert torch.equal(x[i], alone)


def test_samples_may_stand_at_positions_of_their_own() -> None:
    q, index = torch.randn(4, 2, 3, 5, 14), torch.randint(99, (4, 2, 5))
    each = torch.vmap(lambda q, index: rotate(q, None, index, tables(14), "half")[0])(q, index)
    for i in range(4):
        assert torch.equal(each[i], rotate(q[i], None, index[i], tables(14), "half")[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_bit(reentrant: bool) -> None:
    rotation, (q, k) = rotating("half"), tokens(torch.float32)
    cotangents = torch.randn_like(q), torch.randn_like(k)
    plain = torch.autograd.grad(rotation(q, k), (q, k), cotangents)
    torch.autograd.backward(checkpoint(rotation, q, k, use_reentrant=reentrant), cotangents)
    assert torch.equal(q.grad, plain[0])
    assert torch.equal(k.grad, plain[1])


def test_autocast_changes_nothing() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        rotation, (q, k) = rotating("half"), tokens(dtype)
        expected = rotation(q, k)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for x, wanted in zip(rotation(q, k), expected, strict=True):
                assert x.dtype == dtype
                assert torch.equal(x, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad", [False, True])
def test_in_place_is_the_same_and_torch_is_told(layout: str, grad: bool) -> None:
    """Views of one projection, rotated where they lie: same bits, same gradients, other versions."""
    leaf = torch.randn(2, 5, 4 * DIM, dtype=torch.float64, requires_grad=grad)
    cotangents = torch.randn(2, 3, 5, DIM, dtype=torch.float64), torch.randn(2, 1, 5, DIM, dtype=torch.float64)
    results = []
    for inplace in (False, True):
        projected = leaf * 2
        q, k = (
            x.transpose(1, 2) for x in (projected.view(2, 5, 4, DIM)[:, :, :3], projected.view(2, 5, 4, DIM)[:, :, 3:])
        )
        version, out = projected._version, rotating(layout, inplace=inplace)(q, k)
        assert (projected._version > version) == inplace
        assert (out[0].data_ptr() == q.data_ptr()) == inplace
        assert (out[1].data_ptr() == k.data_ptr()) == inplace
        now = (q, k) if inplace else out  # what was handed in has become what came out, for the graph as well
        results.append([*now, *(torch.autograd.grad(now, leaf, cotangents) if grad else ())])
    for fresh, overwritten in zip(*results, strict=True):
        assert torch.equal(fresh, overwritten)


def test_a_value_that_was_overwritten_is_missed_by_the_backward() -> None:
    q, k = tokens()
    hidden = q.exp()  # whose backward needs its result
    rotate(hidden, k * 1, torch.arange(5)[None], tables(DIM), "half", inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        hidden.sum().backward()


@pytest.mark.parametrize("through", [lambda x: x, lambda x: x.view(x.shape)])
def test_a_leaf_is_not_overwritten(through: Callable[[Tensor], Tensor]) -> None:
    q, k = tokens()
    before = q.detach().clone(), k.detach().clone()
    for given in ((through(q), k * 1), (q * 1, through(k))):
        with refuses(LocantError, "leaf", "inplace=False"):
            rotating("half", inplace=True)(*given)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
    with torch.no_grad():  # as torch's own operators allow
        assert rotating("half", inplace=True)(q, k)[0] is q
    assert not torch.equal(q, before[0])


def test_in_place_in_inference_mode() -> None:
    with torch.inference_mode():
        q, k = torch.randn(1, 3, 5, DIM), torch.randn(1, 1, 5, DIM)
        expected = rotating("half")(q, k)
        for x, wanted in zip(rotating("half", inplace=True)(q, k), expected, strict=True):
            assert torch.equal(x, wanted)


@pytest.mark.unchecked
@pytest.mark.parametrize(("grad", "axes"), [(False, 3), (True, 1)])
def test_the_operators_pass_opcheck(grad: bool, axes: int) -> None:
    of = tables(ROTARY_DIM)._replace(axis_of_pair=torch.tensor([0, 2, 1]) if axes > 1 else None)
    index = torch.randint(99, (2, 5, axes) if axes > 1 else (2, 5))
    rest = (index, of.table, of.axis_of_pair, of.levels, of.attention_factor, "interleaved", False)
    q, k = tokens(torch.float32, grad)
    torch.library.opcheck(op._rotate, (q, k, *rest))
    torch.library.opcheck(op._rotate, (q.detach().transpose(1, 2).contiguous().transpose(1, 2), None, *rest))
    torch.library.opcheck(op._rotate_, (q.detach(), k.detach(), *rest))
    torch.library.opcheck(op._rotate_, (q.detach(), None, *rest))


def require_same_bits(
    compiled: Callable[..., Any], plain: Callable[..., Any], lengths: tuple[int, ...], grad: bool
) -> None:
    """Results, and gradients if asked for."""
    for n in lengths:
        q, k = (torch.randn(2, heads, n, DIM, requires_grad=grad) for heads in (3, 1))
        cotangents = torch.randn_like(q), torch.randn_like(k)
        results = []
        for function in (compiled, plain):
            out = function(q, k, Positions.arange(n))
            results.append([*out, *(torch.autograd.grad(out, (q, k), cotangents) if grad else ())])
        for ours, expected in zip(*results, strict=True):
            assert torch.equal(ours, expected)
    torch._dynamo.reset()


@pytest.mark.unchecked
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_compiled_code_is_one_graph_with_the_same_bits(grad: bool, inplace: bool) -> None:
    torch._dynamo.reset()
    rotary, counter = Rotary(DIM, rotary_dim=ROTARY_DIM), CompileCounterWithBackend("aot_eager")

    def use(q: Tensor, k: Tensor, positions: Positions, inplace: bool = inplace) -> tuple[Tensor, Tensor]:
        return rotary.rotate(q * 1, k * 1, positions, inplace=inplace)

    compiled = torch.compile(use, fullgraph=True, backend=counter)
    require_same_bits(compiled, functools.partial(use, inplace=False), (5, 6, 9, 31, 64), grad)
    assert 1 <= counter.frame_count <= 2


@pytest.mark.unchecked
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's compiler, about itself
@pytest.mark.parametrize(("layout", "inplace"), [("half", True), ("interleaved", False)])
def test_the_real_compiler_changes_no_bit(layout: str, inplace: bool) -> None:
    torch._dynamo.reset()
    rotary = Rotary(DIM, layout=layout)  # type: ignore[arg-type]

    def use(q: Tensor, k: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        rotated = rotary.rotate(q * 2, k * 2, positions, inplace=inplace)
        return rotated[0] + 1, rotated[1] + 1

    require_same_bits(torch.compile(use, fullgraph=True), use, (5, 6, 31), grad=True)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("options", [{}, {"sections": (2, 4, 1)}, {"angles": "float32"}], ids=str)
def test_shapes_without_data(options: dict[str, Any], inplace: bool) -> None:
    rotary = Rotary(DIM, **options)
    with FakeTensorMode():
        q, k = torch.randn(2, 3, 5, DIM).bfloat16(), torch.randn(2, 5, 1, DIM).transpose(1, 2)
        for x, before in zip(rotary.rotate(q, k, Positions.arange(5), inplace=inplace), (q, k), strict=True):
            assert isinstance(x, FakeTensor)
            assert (x.shape, x.dtype, x.stride()) == (before.shape, before.dtype, before.stride())
    q, k = (torch.empty(2, heads, 5, DIM, device="meta") for heads in (3, 1))
    for x, before in zip(rotary.rotate(q, k, Positions.arange(5, device="meta")), (q, k), strict=True):
        assert (x.device, x.shape) == (before.device, before.shape)
    real = torch.randn(1, 1, 5, DIM)  # and nothing of it stays behind
    assert not torch.equal(rotary.rotate(real, real, Positions.arange(5))[0], real)


def test_the_choice_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    index, of = torch.zeros(1, 1, dtype=torch.int64), Tables(torch.ones(1))

    def chosen(device: str) -> tuple[str, str]:
        q = torch.ones(1, 1, 1, 2, device="meta")
        monkeypatch.setattr(torch.Tensor, "device", torch.device(device), raising=False)
        try:
            return tuple(choose_kernel(q, index, of))
        finally:
            monkeypatch.undo()

    with mock.patch.object(native, "function", return_value=None):
        assert chosen("cpu") == ("cpu", f"native kernels are {native.status()}")
    assert chosen("meta") == ("reference", "there is no kernel for meta")
    monkeypatch.setattr(choice, "_has_triton", lambda: False)
    assert choose_kernel(torch.ones(1, 1, 1, 2), index, of).kernel in ("cpu", "native")


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_plain_tensors_on_a_gpu_reach_the_kernel_without_an_operator(
    grad: bool, inplace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator of ours would take longer than the launch."""
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    from locant.kernels.rotary import triton

    launched = []

    def rotate_(*arguments: Any) -> None:
        launched.append(arguments[-1])
        cpu.rotate_by_torch_(*arguments)

    def refuse(*_: object) -> None:
        raise AssertionError("an operator was called")

    monkeypatch.setattr(Tensor, "device", property(lambda _: torch.device("cuda")))
    monkeypatch.setattr(op, "choose_kernel", lambda *_: KernelChoice("triton", "q is on a GPU"))
    monkeypatch.setattr(triton, "rotate_", rotate_)
    monkeypatch.setattr(op, "_rotate", refuse)
    monkeypatch.setattr(op, "_rotate_", refuse)
    leaves = [x.requires_grad_(grad) for x in tokens(torch.float32, grad=False)]
    q, k = (x * 1 for x in leaves) if inplace else leaves
    out = rotating("half", inplace=inplace)(q, k)
    if grad:
        torch.autograd.grad(out, leaves, [torch.randn(x.shape) for x in out])
    assert launched == [False] * (2 if inplace and grad else 1) + [True] * (2 if inplace else 1) * grad


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("length", [100, 600])
def test_make_fx_records_the_operator(length: int, grad: bool) -> None:
    """Tokens that follow each other are looked at, which nobody can do with what is only being recorded."""
    q = torch.randn(1, 2, length, 64, requires_grad=grad)
    rotary, positions = Rotary(64), Positions.arange(length)
    graph = make_fx(lambda q: rotary.rotate(q, q, positions)[0])(q)
    assert torch.equal(graph(q), rotary.rotate(q, q, positions)[0])
