"""The Triton kernels of norm and rotation, against formulas in NumPy: interpreted, and on a GPU if there is one."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from locant.kernels.norm_rotary import HeadNorm, choose_kernel, norm_and_rotate, op
from locant.kernels.rotary.choice import KernelChoice
from locant.kernels.rotary.reference import Tables
from tests import oracles
from tests.kernels.interpreted import Place
from tests.kernels.norm_rotary.norming import truth
from tests.kernels.rotary.rotating import BASE, far_positions, tables
from tests.tolerances import assert_close

pytest.importorskip("triton", reason="there is no Triton for this platform")

KERNEL = "locant.kernels.norm_rotary.triton"
LAYOUTS = ["half", "interleaved"]
EPS = 0.01


class Case(NamedTuple):
    """What is to be normed and rotated. `weights` are for q and k."""

    q: Tensor
    k: Tensor | None
    weights: tuple[Tensor | None, Tensor | None]
    index: Tensor
    layout: str
    rotary_dim: int

    def tensors(self) -> tuple[tuple[Tensor, Tensor | None], ...]:
        return tuple((x, weight) for x, weight in zip((self.q, self.k), self.weights, strict=True) if x is not None)


def case(
    dim: int = 14, layout: str = "half", *, rotary_dim: int | None = None, seq: int = 5, heads: int = 3,
    kv_heads: int = 2, kinds: str = "each each", dtype: torch.dtype = torch.float32,
) -> Case:  # fmt: skip
    """Two rows of tokens, with a different position for every token. `kinds`: which heads a weight is for."""
    sizes = {"each": lambda n: dim, "all": lambda n: n * dim}
    weights = (
        torch.randn(sizes[kind](n)).to(dtype) if kind in sizes else None
        for kind, n in zip(kinds.split(), (heads, kv_heads), strict=True)
    )
    q, k = (torch.randn(2, n, seq, dim).to(dtype) for n in (heads, kv_heads))
    return Case(q, k, (*weights,), far_positions(2, seq), layout, dim if rotary_dim is None else rotary_dim)


def norm_of(given: Case, **options: Any) -> HeadNorm:
    return HeadNorm(*given.weights, **{"eps": EPS} | options)


def forward(
    place: Place, given: Case, norm: HeadNorm | None, *, into: tuple[Tensor, Tensor | None] | None = None,
    v: Tensor | None = None, out_v: Tensor | None = None, slots: Tensor | None = None, of: Tables | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The results of the kernel. New memory is full of NaN. Tensors are on the device of `place` already."""
    fresh = (None if x is None else torch.full_like(x, torch.nan) for x in given[:2])
    out_q, out_k = into or fresh
    of = tables(given.rotary_dim, place.device) if of is None else of
    place.load(KERNEL).norm_and_rotate_(
        given.q, given.k, out_q, out_k, given.index, of, given.layout, norm, v, out_v, slots
    )
    return out_q, out_k


def on(place: Place, given: Case) -> Case:
    """The same numbers on the device of `place`."""
    weights = tuple(None if weight is None else weight.to(place.device) for weight in given.weights)
    q, k, index = (None if x is None else x.to(place.device) for x in (given.q, given.k, given.index))
    return given._replace(q=q, k=k, weights=weights, index=index)


# ---------------------------------------------------------------------- formulas


def rows_of(x: Tensor, weight: Tensor | None) -> np.ndarray:
    """float64 ``[batch, seq, rows, width]``: each head of a token, or all heads in one row."""
    rows = x.cpu().double().transpose(1, 2).numpy()
    return rows if weight is None or len(weight) == rows.shape[3] else rows.reshape(*rows.shape[:2], 1, -1)


def scale_of(weight: Tensor | None, plus_one: bool) -> np.ndarray | float:
    return 1.0 if weight is None else weight.cpu().double().numpy() + plus_one


def true_forward(x: Tensor, weight: Tensor | None, given: Case, plus_one: bool = False) -> Tensor:
    return truth(x, (weight, EPS, plus_one), given.index.cpu(), given.layout, given.rotary_dim)


def true_backward(
    x: Tensor, weight: Tensor | None, grad: Tensor, given: Case, plus_one: bool = False, eps: float = EPS
) -> tuple[Tensor, Tensor]:
    """The gradients of `x` and of the weight, with the Jacobian of every row written out.

    `norming.gradients` would take seconds for as many elements.
    """
    rows = rows_of(x, weight)
    back = turned(grad.cpu().double().numpy(), given, sign=-1).transpose(1, 2).numpy().reshape(rows.shape)
    width, size = rows.shape[-1], np.sqrt(np.mean(rows**2, axis=-1, keepdims=True) + eps)
    jacobian = np.eye(width) / size[..., None] - rows[..., None] * rows[..., None, :] / (width * size[..., None] ** 3)
    dx = np.einsum("bsri,bsrij->bsrj", back * scale_of(weight, plus_one), jacobian)
    shape = x.transpose(1, 2).shape
    return torch.from_numpy(dx.reshape(shape).swapaxes(1, 2)), torch.from_numpy((back * rows / size).sum((0, 1, 2)))


def turned(x: np.ndarray, given: Case, sign: int = 1) -> Tensor:
    index = given.index.cpu().expand(len(x), -1).numpy()
    rotated = []
    for row, positions in zip(x, index, strict=True):
        cos, sin = oracles.angles(positions, given.rotary_dim, BASE)
        rotated.append(oracles.rotate(row[None], cos, sign * sin, given.layout))
    return torch.from_numpy(np.concatenate(rotated))


# ---------------------------------------------------------------------- forward


def require_truth(place: Place, given: Case, **options: Any) -> None:
    there = on(place, given)
    found = forward(place, there, norm_of(there, **options))
    for (x, weight), out in zip(given.tensors(), found, strict=False):
        assert_close(out.cpu(), true_forward(x, weight, given, options.get("plus_one", False)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dim", "rotary_dim"), [(2, 2), (14, 14), (13, 6), (40, 2), (72, 72), (96, 64), (256, 256)])
def test_heads_of_every_size(dim: int, rotary_dim: int, layout: str, place: Place) -> None:
    require_truth(place, case(dim, layout, rotary_dim=rotary_dim))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kinds", ["all all", "each all", "all none", "none each"])
def test_a_weight_is_for_each_head_or_for_all_heads_or_absent(kinds: str, layout: str, place: Place) -> None:
    for heads, plus_one in ((1, True), (6, False)):
        require_truth(place, case(14, layout, rotary_dim=10, heads=heads, kinds=kinds), plus_one=plus_one)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_and_queries_alone(dtype: torch.dtype, place: Place) -> None:
    for options in ({"plus_one": True}, {}):
        given = case(dtype=dtype)
        require_truth(place, given, **options)
        require_truth(place, given._replace(k=None), **options)
    require_truth(place, case(heads=0, dtype=dtype))


def test_weights_of_another_dtype_and_with_gaps(place: Place) -> None:
    given = case(dtype=torch.float16)
    spread = (torch.randn(14, 3, dtype=torch.float64)[:, 1], torch.randn(28)[::2])
    require_truth(place, given._replace(weights=spread))


SPELLINGS = [
    ("qwen3", "Qwen3RMSNorm", {}),
    ("gemma3", "Gemma3RMSNorm", {"plus_one": True}),
    ("olmo2", "Olmo2RMSNorm", {"round_before_weight": False}),
]


@pytest.mark.parametrize(("model", "name", "options"), SPELLINGS)
def test_numbers_are_rounded_where_transformers_rounds_them(
    model: str, name: str, options: dict[str, Any], place: Place
) -> None:
    """Squares of small whole numbers have the same sum in every order, and position 0 does not rotate."""
    transformers = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    module = getattr(transformers, name)(96, EPS).half()
    module.weight.data = torch.randn(96).half()
    q = torch.randint(-40, 41, (2, 3, 5, 96)).half()
    given = Case(q, None, (module.weight.detach(), None), torch.zeros(1, 5, dtype=torch.long), "half", 96)
    there = on(place, given)
    assert torch.equal(forward(place, there, norm_of(there, **options))[0].cpu(), module(q).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_order_of_the_dimensions_changes_no_bit_of_the_norm(dtype: torch.dtype, place: Place) -> None:
    """A device adds in an order that depends on strides and sizes, so all orders must have the same bits."""
    x = torch.randn(1, 40, 3, 96).to(dtype) * 10 ** (3 * torch.randn(1, 40, 3, 96))
    order, still = torch.randperm(96), torch.zeros(1, 3, dtype=torch.long)
    norms = []
    for each in (x, x[..., order]):
        there = on(place, Case(each.contiguous(), None, (None, None), still, "half", 6))
        norms.append(forward(place, there, norm_of(there))[0].cpu())
    assert torch.equal(norms[0][..., order], norms[1])
    assert_close(norms[0], true_forward(x, None, Case(x, None, (None, None), still, "half", 6)))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy, about infinities
def test_huge_tiny_and_infinite_numbers(place: Place) -> None:
    x = torch.randn(1, 1, 4, 14) * torch.tensor([1e18, 1e-30, 0.0, 1.0])[:, None]
    x[0, 0, 3, 3] = torch.inf
    given = Case(x, None, (None, None), torch.zeros(1, 4, dtype=torch.long), "half", 4)
    there = on(place, given)
    found = forward(place, there, norm_of(there))[0].cpu()
    assert_close(found[:, :, :3], true_forward(x, None, given)[:, :, :3])
    assert bool(found[0, 0, 3, 3].isnan())
    assert not found[0, 0, 3, 4:].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_axes_factors_and_float32_angles(layout: str, place: Place) -> None:
    """The rotation is the kernel of `rotate`, of which the norm is the identity for rows of ones and minus ones."""
    given = case(14, layout, kinds="none none")
    signs = given._replace(q=given.q.sign(), k=given.k.sign(), index=far_positions(2, 5, 3))
    axes = tables(14, axis_of_pair=torch.tensor([0, 0, 1, 1, 2, 2, 0]), attention_factor=1.25)
    rotary = place.load("locant.kernels.rotary.triton")
    for of, index in ((axes, signs.index), (Tables(torch.rand(7)), signs.index[..., 0])):
        there = on(place, signs._replace(index=index))
        of = of._replace(
            table=of.table.to(place.device),
            axis_of_pair=None if of.axis_of_pair is None else of.axis_of_pair.to(place.device),
        )
        expected = torch.empty_like(there.q), torch.empty_like(there.k)
        rotary.rotate_(there.q, there.k, *expected, there.index, of, layout, False)
        for norm in (HeadNorm(None, None, 0.0), None):
            assert all(map(torch.equal, forward(place, there, norm, of=of), expected))


# ---------------------------------------------------------------------- memory and caches

MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "tokens before heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "one of three projections": lambda x: torch.stack([x + 1, x, x + 2], dim=3)[:, :, :, 1],
    "every other element": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], dim=-1).flatten(-2)[..., ::2],
    "not aligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("kinds", ["each each", "all each"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("memory", MEMORY)
def test_memory_laid_out_otherwise_and_in_place_have_the_same_bits(
    memory: str, layout: str, kinds: str, place: Place
) -> None:
    given, lay = on(place, case(14, layout, rotary_dim=10, kinds=kinds, heads=6)), MEMORY[memory]
    norm = norm_of(given)
    expected = forward(place, given, norm)
    other = given._replace(q=lay(given.q), k=lay(given.k))
    assert all(map(torch.equal, forward(place, other, norm), expected))
    into = lay(torch.full_like(given.q, torch.nan)), lay(torch.full_like(given.k, torch.nan))
    assert all(map(torch.equal, forward(place, given, norm, into=into), expected))
    versions = other.q._version, other.k._version
    assert all(map(torch.equal, forward(place, other, norm, into=(other.q, other.k)), expected))
    assert other.q._version > versions[0]
    assert other.k._version > versions[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("has_norm", [True, False])
def test_keys_and_values_are_appended_to_a_cache(has_norm: bool, dtype: torch.dtype, place: Place) -> None:
    """The values have another width, and slots before and after the new tokens are not touched."""
    given = on(place, case(rotary_dim=10))
    norm = norm_of(given) if has_norm else None
    expected = forward(place, given, norm)
    v = torch.randint(0, 100, (2, 2, 5, 9), device=place.device).to(dtype)
    keys, values = torch.full((2, 2, 11, 14), torch.nan), torch.full((2, 2, 11, 9), 255).to(dtype)
    keys, values = keys.to(place.device), values.to(place.device)
    views = keys[:, :, 4:9], values[:, :, 4:9]
    q, k = forward(place, given, norm, into=(given.q.clone(), views[0]), v=v, out_v=views[1])
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])
    assert torch.equal(views[1], v)
    outside = [0, 1, 2, 3, 9, 10]
    assert bool(keys[:, :, outside].isnan().all())
    assert bool((values[:, :, outside] == 255).all())


@pytest.mark.parametrize("rows", [1, 2])
def test_tokens_go_to_their_slots_or_nowhere(rows: int, place: Place) -> None:
    given = on(place, case())
    norm = norm_of(given)
    q, k = forward(place, given, norm)
    v = torch.randn(2, 2, 5, 9, device=place.device)
    slots = torch.stack([torch.randperm(11)[:5] for _ in range(rows)]).to(place.device)
    slots[:, 2] = -1
    keys, values = (torch.full((2, 2, 11, width), torch.nan, device=place.device) for width in (14, 9))
    found, _ = forward(place, given, norm, into=(torch.empty_like(q), keys), v=v, out_v=values, slots=slots)
    assert torch.equal(found, q)
    for row in range(2):
        own = slots[min(row, rows - 1)]
        kept = own >= 0
        for store, new in ((keys, k), (values, v)):
            assert torch.equal(store[row][:, own[kept]], new[row][:, kept])
            assert int((~store[row].isnan()).any(-1).any(0).sum()) == 4


@pytest.mark.parametrize("shape", [(0, 3, 5, 14), (2, 3, 0, 14)])
def test_nothing_is_launched_for_nothing(shape: tuple[int, ...], place: Place) -> None:
    x, module = torch.empty(shape, device=place.device), place.load(KERNEL)
    given = Case(x, x, (torch.ones(14), None), torch.zeros(1, shape[2], dtype=torch.long), "half", 14)
    forward(place, on(place, given), norm_of(given))
    norm = HeadNorm(torch.ones(14, device=place.device), None)
    dq, dk, dw, nothing = module.norm_and_rotate_backward(
        x, x, x, x, given.index.to(place.device), tables(14, place.device), "half", norm
    )
    assert dq.shape == dk.shape == shape
    assert nothing is None
    assert not dw.any()


# ---------------------------------------------------------------------- backward


def backward(place: Place, given: Case, grads: list[Tensor], **options: Any) -> tuple[Tensor | None, ...]:
    there = on(place, given)
    grad_q, grad_k = [x.to(place.device) for x in grads] + [None] * (2 - len(grads))
    found = place.load(KERNEL).norm_and_rotate_backward(
        grad_q, grad_k, there.q, there.k, there.index, tables(given.rotary_dim, place.device), given.layout,
        norm_of(there, **options),
    )  # fmt: skip
    return tuple(None if x is None else x.cpu() for x in found)


def require_true_gradients(place: Place, given: Case, **options: Any) -> None:
    grads = [torch.randn_like(x) for x, _ in given.tensors()]
    dq, dk, dq_weight, dk_weight = backward(place, given, grads, **options)
    for (x, weight), grad, dx, dw in zip(given.tensors(), grads, (dq, dk), (dq_weight, dk_weight), strict=False):
        true_dx, true_dw = true_backward(x, weight, grad, given, **options)
        assert dx is not None
        assert dx.dtype == x.dtype
        assert_close(dx, true_dx)
        assert (dw is None) == (weight is None)
        if dw is not None and weight is not None:
            assert dw.dtype == weight.dtype
            assert_close(dw, true_dw)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dim", "rotary_dim"), [(2, 2), (13, 6), (72, 72), (96, 64)])
def test_gradients_of_heads_of_every_size(dim: int, rotary_dim: int, layout: str, place: Place) -> None:
    require_true_gradients(place, case(dim, layout, rotary_dim=rotary_dim, dtype=torch.float64))


@pytest.mark.parametrize("kinds", ["each none", "all all", "none all"])
def test_gradients_of_weights_of_every_kind(kinds: str, place: Place) -> None:
    for layout, options in (("half", {"plus_one": True}), ("interleaved", {})):
        given = case(14, layout, rotary_dim=10, heads=6, kinds=kinds, dtype=torch.float64)
        require_true_gradients(place, given, **options)
    require_true_gradients(place, case(kinds=kinds)._replace(k=None))


@pytest.mark.parametrize("kinds", ["each each", "all all"])
@pytest.mark.parametrize("programs", [1, 2, 1024])
def test_a_program_takes_several_blocks_of_tokens(
    programs: int, kinds: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = place.load(KERNEL).norm_and_rotate_backward.__globals__  # of the file of the backward, as loaded here
    monkeypatch.setitem(settings, "PROGRAMS", programs)
    given = case(8, seq=41, heads=5, kinds=kinds, dtype=torch.float64)
    require_true_gradients(place, given, eps=0.0)


def test_gradients_with_other_strides_have_the_same_bits(place: Place) -> None:
    """A sum hands over a gradient with stride 0, and models hand over views of a projection."""
    given = case(rotary_dim=10)
    grads = [torch.randn(1, 1, 1, 14).expand(x.shape) for x, _ in given.tensors()]
    expected = backward(place, given._replace(q=given.q, k=given.k), [x.contiguous() for x in grads])
    for lay in MEMORY.values():
        found = backward(place, given._replace(q=lay(given.q), k=lay(given.k)), grads)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True) if a is not None and b is not None)


# ---------------------------------------------------------------------- the operation


def test_the_operation_uses_the_kernels_forward_and_backward() -> None:
    given, place = case(dtype=torch.float64), Place("cpu")
    leaves = [x.requires_grad_() for pair in given.tensors() for x in pair if x is not None]
    module = place.load(KERNEL)
    with (
        mock.patch.dict(sys.modules, {KERNEL: module}),
        mock.patch.object(sys.modules["locant.kernels.norm_rotary"], "triton", module, create=True),
        mock.patch.object(op, "choose_kernel", return_value=KernelChoice("triton", "this test")),
        mock.patch.object(module, "norm_and_rotate_", wraps=module.norm_and_rotate_) as forwards,
        mock.patch.object(module, "norm_and_rotate_backward", wraps=module.norm_and_rotate_backward) as backwards,
    ):
        out = norm_and_rotate(given.q, given.k, given.index, tables(14), "half", norm_of(given))
        grads = [torch.randn_like(x) for x in out]
        dq, dq_weight, dk, dk_weight = torch.autograd.grad(out, leaves, grads)
    assert forwards.call_count == backwards.call_count == 1
    for (x, weight), grad, dx, dw in zip(given.tensors(), grads, (dq, dk), (dq_weight, dk_weight), strict=True):
        x, weight = x.detach(), weight.detach()
        for found, true in zip((dx, dw), true_backward(x, weight, grad, given), strict=True):
            assert_close(found, true)


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", ["each each", "all all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_has_the_true_results_and_every_run_the_same_bits(dtype: torch.dtype, kinds: str) -> None:
    place = Place("cuda")
    for layout, rotary_dim in itertools.product(LAYOUTS, (64, 32)):
        given = case(64, layout, rotary_dim=rotary_dim, seq=513, heads=8, kinds=kinds, dtype=dtype)
        there = on(place, given)
        assert choose_kernel(there.q, there.index, tables(rotary_dim, "cuda"), norm_of(there)).kernel == "triton"
        require_truth(place, given)
        grads = [torch.randn_like(x) for x, _ in given.tensors()]
        first, *others = (backward(place, given, grads) for _ in range(3))
        for other in others:
            assert all(map(torch.equal, first, other))
        for (x, weight), grad, dx in zip(given.tensors(), grads, first, strict=False):
            assert dx is not None
            assert_close(dx, true_backward(x, weight, grad, given)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_has_the_bits_that_it_has_among_others_on_a_device(dtype: torch.dtype) -> None:
    """One token, some heads, and other strides compile other kernels, which add in another order."""
    place = Place("cuda")
    given = on(place, case(72, seq=301, heads=8, kinds="each each", dtype=dtype))
    norm = norm_of(given)
    q, _ = forward(place, given, norm)
    lay = MEMORY["not aligned"]
    for heads, seq in ((slice(0, 1), slice(0, 1)), (slice(2, 5), slice(7, 8)), (slice(0, 8), slice(100, 200))):
        for part in (given.q[:, heads, seq], lay(given.q[:, heads, seq].contiguous())):
            alone, _ = forward(place, given._replace(q=part, k=None, index=given.index[:, seq]), norm)
            assert torch.equal(alone, q[:, heads, seq])
