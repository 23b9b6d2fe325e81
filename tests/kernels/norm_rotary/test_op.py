"""`Rotary.rotate` with a norm: derivatives of every kind, in place, compiled, mapped, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from locant import HeadNorm, LocantError, Positions, RangeError, Rotary, ShapeError
from locant.kernels.norm_rotary import norm_and_rotate_into, reference
from tests.refusal import refuses
from tests.tolerances import assert_close

DIM, HEADS, KV_HEADS, SEQ = 10, 3, 2, 4
ROTARY = Rotary(DIM, rotary_dim=6)
POSITIONS = Positions.after(1_000, SEQ)
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(dtype: torch.dtype = torch.float64, *, over_heads: bool = False, grad: bool = True) -> Inputs:
    """q, k and both weights."""
    width = HEADS * DIM if over_heads else DIM
    shapes = (2, HEADS, SEQ, DIM), (2, KV_HEADS, SEQ, DIM), (width,), (DIM,)
    q, k, q_weight, k_weight = (torch.randn(shape, dtype=dtype).requires_grad_(grad) for shape in shapes)
    return q, k, q_weight, k_weight


def rotate(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return ROTARY.rotate(q, k, POSITIONS, norm=HeadNorm(q_weight, k_weight, plus_one=True), **options)


def by_torch(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, Tensor]:
    """The reference, which `test_cpu.py` compares with NumPy. Its derivatives are those of torch's operators."""
    index, tables = ROTARY._index_and_tables(POSITIONS)
    norm = HeadNorm(q_weight, k_weight, plus_one=True)
    return reference.norm_and_rotate(q, k, index, tables, "half", norm)  # type: ignore[return-value]


def overwritten(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    """In place, in memory that is no leaf."""
    q, k, *norm_weights = tensors
    return rotate(q * 1, k * 1, *norm_weights, inplace=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [rotate, overwritten])
@pytest.mark.parametrize("over_heads", [False, True])
def test_first_and_second_derivatives_are_those_of_finite_differences(
    function: Callable[..., Any], over_heads: bool
) -> None:
    assert torch.autograd.gradcheck(function, inputs(over_heads=over_heads), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, inputs(over_heads=over_heads))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 3), (1, 2)])
def test_only_what_needs_a_gradient_gets_one(wanted: tuple[int, ...]) -> None:
    given = inputs(grad=False)
    for i in wanted:
        given[i].requires_grad_()
    cotangents = torch.randn_like(given[0]), torch.randn_like(given[1])
    for outputs in (rotate(*given), overwritten(*given)):
        pairs = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if y.requires_grad]
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
    pairs = [(y, g) for y, g in zip(by_torch(*given), cotangents, strict=True) if y.requires_grad]
    expected = torch.autograd.grad([y for y, _ in pairs], [given[i] for i in wanted], [g for _, g in pairs])
    for i, gradient in zip(wanted, expected, strict=True):
        found = given[i].grad
        assert found is not None
        assert_close(found, 2 * gradient)
    assert all(x.grad is None for i, x in enumerate(given) if i not in wanted)


@pytest.mark.parametrize("kind", ["expanded", "only k"])
def test_any_cotangent_is_taken(kind: str) -> None:
    given = inputs()
    loss = sum(y.sum() for y in rotate(*given)) if kind == "expanded" else rotate(*given)[1].square().sum()
    theirs = by_torch(*given)
    expected = sum(y.sum() for y in theirs) if kind == "expanded" else theirs[1].square().sum()
    found = torch.autograd.grad(loss, given, allow_unused=True)  # type: ignore[arg-type]
    true = torch.autograd.grad(expected, given, allow_unused=True)  # type: ignore[arg-type]
    for ours, other in zip(found, true, strict=True):
        assert_close(ours, torch.zeros_like(ours) if other is None else other)


def test_weights_and_rows_of_other_dtypes_keep_their_dtypes() -> None:
    """Weights in float32 under rows in bfloat16, as in mixed precision, and autocast changes nothing."""
    q, k, *_ = (x.detach().bfloat16().requires_grad_() for x in inputs())
    *_, q_weight, k_weight = inputs(torch.float32)
    outputs = rotate(q, k, q_weight, k_weight)
    with torch.autocast("cpu", torch.bfloat16):
        same = rotate(q, k, q_weight, k_weight)
    assert [y.dtype for y in outputs] == [torch.bfloat16] * 2
    assert all(torch.equal(one, other) for one, other in zip(outputs, same, strict=True))
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    assert [x.grad.dtype for x in (q, q_weight) if x.grad is not None] == [torch.bfloat16, torch.float32]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward mode calls it
def test_functional_transforms_see_the_norm() -> None:
    given = inputs(grad=False)

    def loss(*tensors: Tensor) -> Tensor:
        return sum((y.sin() for y in map(torch.sum, rotate(*tensors))), torch.zeros(()))  # type: ignore[arg-type]

    def true_loss(*tensors: Tensor) -> Tensor:
        return sum((y.sin() for y in map(torch.sum, by_torch(*tensors))), torch.zeros(()))  # type: ignore[arg-type]

    every = (0, 1, 2, 3)
    for ours, theirs in zip(
        torch.func.grad(loss, every)(*given), torch.func.grad(true_loss, every)(*given), strict=True
    ):
        assert_close(ours, theirs)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, x.cos()) for x in given]
        tangents, true_tangents = ([forward_ad.unpack_dual(y).tangent for y in f(*duals)] for f in (rotate, by_torch))
    for ours, theirs in zip(tangents, true_tangents, strict=True):
        assert_close(ours, theirs)
    samples = tuple(torch.stack([x, x * 2, x + 1]) for x in given)
    per_sample = torch.func.vmap(torch.func.grad(loss, every))(*samples)
    for ours, theirs in zip(per_sample, torch.func.vmap(torch.func.grad(true_loss, every))(*samples), strict=True):
        assert_close(ours, theirs)


@pytest.mark.unchecked  # a compiler cannot read the signatures of checked classes
@pytest.mark.parametrize("inplace", [False, True])
def test_one_graph_has_the_results_and_gradients_of_eager_code(inplace: bool) -> None:
    def layer(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return (overwritten if inplace else rotate)(*tensors)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    given = inputs(torch.float32)
    cotangents = torch.randn_like(given[0]), torch.randn_like(given[1])
    ours, theirs = compiled(*given), layer(*given)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    found, true = (torch.autograd.grad(outputs, given, cotangents) for outputs in (ours, theirs))
    for one, other in zip(found, true, strict=True):
        assert torch.equal(one, other)
    assert counter.frame_count == 1
    with torch.no_grad():
        for one, other in zip(compiled(*given), theirs, strict=True):
            assert torch.equal(one, other)


def test_operators_pass_the_checks_of_torch() -> None:
    q, k, q_weight, k_weight = inputs(torch.float32)
    index, tables = ROTARY._index_and_tables(POSITIONS)
    rest = (q_weight, k_weight, index, tables.table, None, tables.levels, 1.0, "half", 1e-6, False, True)
    torch.library.opcheck(torch.ops.locant.norm_and_rotate.default, (q, k, *rest))
    detached = [x.detach() if isinstance(x, Tensor) else x for x in (q, k, q, k, *rest)]
    torch.library.opcheck(torch.ops.locant.norm_and_rotate_backward.default, tuple(detached))


def test_a_tracer_sees_one_operator_and_exported_programs_only_those_of_torch() -> None:
    given = inputs(torch.float32, grad=False)
    traced = make_fx(lambda q, k, v, w: rotate(q, k, v, w))(*given)
    assert "norm_and_rotate" in traced.code
    exported = torch.export.export(_Layer(), given[:2])
    assert "locant" not in str(exported.graph)
    layer = _Layer()
    for one, other in zip(torch.export.export(layer, given[:2]).module()(*given[:2]), layer(*given[:2]), strict=True):
        assert_close(one, other)


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_weight, self.k_weight = (torch.nn.Parameter(torch.randn(DIM)) for _ in range(2))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, k, self.q_weight, self.k_weight)


def test_inference_mode_and_meta_tensors() -> None:
    given = inputs(torch.float32, grad=False)
    with torch.inference_mode():
        for one, other in zip(rotate(*given), by_torch(*given), strict=True):
            assert torch.equal(one, other)
    index = Positions.arange(SEQ, device="meta")
    q, k, q_weight, k_weight = (x.to("meta") for x in given)
    rotated, _ = ROTARY.rotate(q, k, index, norm=HeadNorm(q_weight, k_weight))
    assert rotated.shape == q.shape
    assert rotated.is_meta


def test_a_cache_and_values_are_written_beside_and_the_graph_notices() -> None:
    q, k, q_weight, k_weight = inputs(torch.float32, grad=False)
    v = torch.randn(2, KV_HEADS, SEQ, 7)
    keys, values = torch.zeros(2, KV_HEADS, 9, DIM), torch.zeros(2, KV_HEADS, 9, 7)
    index, tables = ROTARY._index_and_tables(POSITIONS)
    version, expected = keys._version, by_torch(q, k, q_weight, k_weight)
    norm = HeadNorm(q_weight, k_weight, plus_one=True)
    norm_and_rotate_into(q, k, v, q, keys[:, :, 3:7], values[:, :, 3:7], index, tables, "half", norm)
    assert torch.equal(q, expected[0])
    assert torch.equal(keys[:, :, 3:7], expected[1])
    assert torch.equal(values[:, :, 3:7], v)
    assert keys._version > version
    assert not keys[:, :, [0, 1, 2, 7, 8]].any()
    assert not values[:, :, [0, 1, 2, 7, 8]].any()


def test_weights_that_do_not_fit_are_refused_before_anything_is_written() -> None:
    q, k, q_weight, k_weight = inputs(torch.float32, grad=False)
    before = q.clone()
    for norm, words in (
        (HeadNorm(q_weight[:7], k_weight), ("q_weight of 7", "30 for all heads")),
        (HeadNorm(q_weight, torch.ones(HEADS * DIM)), ("k_weight of 30", "20 for all heads")),
        (HeadNorm(q_weight, k_weight.to("meta")), ("k_weight on meta", "k on cpu")),
    ):
        for keys in (None, Positions.arange(SEQ)):
            with refuses(ShapeError, *words):
                ROTARY.rotate(q, k, POSITIONS, keys, inplace=True, norm=norm)
            with refuses(ShapeError, *words):
                ROTARY.rotate(q, k, POSITIONS, keys, norm=norm)
    with refuses(RangeError, "for norm", "HeadNorm("):
        ROTARY.rotate(q, k, POSITIONS, norm=q_weight)  # type: ignore[arg-type]
    with refuses(ShapeError, "one tensor as q and k", "clone"):
        ROTARY.rotate(q, q, POSITIONS, inplace=True, norm=HeadNorm(q_weight, k_weight))
    with refuses(LocantError, "leaf"):
        ROTARY.rotate(q.requires_grad_(), k, POSITIONS, inplace=True, norm=HeadNorm(q_weight, k_weight))
    assert torch.equal(q, before)


def test_weights_are_vectors_of_floating_point_numbers() -> None:
    for weight in (torch.ones(2, 2), torch.ones(4, dtype=torch.int64), torch.ones(())):
        with refuses(ShapeError, "q_weight", "vector"):
            HeadNorm(weight, None)
    with refuses(RangeError, "k_weight", "k_norm"):
        HeadNorm(None, [1.0, 2.0])  # type: ignore[arg-type]
    with refuses(RangeError, "eps"):
        HeadNorm(None, None, -1e-6)
