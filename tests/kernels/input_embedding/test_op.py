"""The operation as torch sees it: compilers, autograd, checkpointing, threads."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from locant.kernels.input_embedding import Operands, input_embedding, native, reference
from locant.kernels.input_embedding.op import input_embedding_backward
from locant.kernels.native import has
from tests.kernels.input_embedding.embedded import LEARNED, Kernel, operands
from tests.threads import threads
from tests.tolerances import assert_close

pytestmark = pytest.mark.skipif(not has(native.FORWARD), reason="there are no native kernels")


def values(o: Operands) -> tuple[Any, ...]:
    return tuple(getattr(o, field.name) for field in dataclasses.fields(o))


def learning(o: Operands, *names: str) -> Operands:
    tables = {n: getattr(o, n).detach().requires_grad_() for n in names or LEARNED if getattr(o, n) is not None}
    return dataclasses.replace(o, **tables)


WITHOUT = [
    (),
    ("position", "position_index", "segment", "segments", "eps", "gamma", "beta", "padding_idx", "scale"),
    ("segments", "beta"),
]


@pytest.mark.unchecked  # it is traced with symbols for sizes, which are no int
@pytest.mark.parametrize(("without", "p"), [(WITHOUT[0], 0.3), (WITHOUT[1], 0.0), (WITHOUT[2], 0.0)])
def test_it_is_registered_as_torch_wants_it(without: tuple[str, ...], p: float) -> None:
    """Schema, autograd, fake tensors with shapes known and unknown, and the same gradients compiled."""
    o = learning(operands(without=without, seed=torch.tensor([5]), p=p))
    torch.library.opcheck(input_embedding, values(o))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_have_the_strides_that_a_compiler_was_told_of(dtype: torch.dtype) -> None:
    """Whatever the strides of the table, such as one that is the transpose of another."""
    o = operands(dtype=dtype)
    o = dataclasses.replace(
        o, **{name: getattr(o, name).mT.contiguous().mT for name in ("token", "position", "segment")}
    )
    given = (torch.randn(*o.ids.shape, o.width).to(dtype), *native.forward(o)[1:], *values(o), [True] * len(LEARNED))
    torch.library.opcheck(input_embedding_backward, given, test_utils="test_faketensor")


@pytest.mark.parametrize("without", WITHOUT[:2], ids=len)
def test_gradients_of_second_order(without: tuple[str, ...]) -> None:
    """Those of the operation are the reference's, which is held against finite differences."""
    ids = torch.tensor([[4, 7, 4]])  # none of padding, which finite differences know nothing of
    given = learning(operands((1, 3), 3, dtype=torch.float64, ids=ids, without=without, seed=torch.tensor([5]), p=0.3))
    names = [name for name in LEARNED if getattr(given, name) is not None]

    def through(*tables: Tensor) -> Tensor:
        o = dataclasses.replace(given, **dict(zip(names, tables, strict=True)))
        return reference.input_embedding(o, native.kept(o))

    assert torch.autograd.gradgradcheck(through, tuple(getattr(given, name) for name in names), fast_mode=True)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_gradients_that_can_be_differentiated_are_the_same(p: float) -> None:
    """They are computed by other operations, which have to drop the same entries."""
    given = learning(operands((3, 5), 7, seed=torch.tensor([5]), p=p))
    tables = [getattr(given, name) for name in LEARNED]
    y = input_embedding(*values(given))[0]
    assert bool((y == 0).any()) == (p > 0)
    cotangent = torch.randn_like(y)
    plain = torch.autograd.grad(y, tables, cotangent, retain_graph=True)
    differentiable = torch.autograd.grad(y, tables, cotangent, create_graph=True)
    for name, one, other in zip(LEARNED, plain, differentiable, strict=True):
        assert other.requires_grad == (name != "beta")  # whose gradient is the sum of the cotangents, whatever x is
        assert_close(other.detach(), one)


@pytest.mark.parametrize("name", LEARNED)
def test_frozen_tables_get_no_gradient(name: str) -> None:
    o = learning(operands(), name)
    input_embedding(*values(o))[0].sum().backward()
    whole = learning(operands())
    for other in LEARNED:
        assert (getattr(o, other).grad is not None) == (other == name), other
    assert getattr(o, name).grad.shape == getattr(whole, name).shape


def test_one_number_as_gradient() -> None:
    """`sum().backward()` hands on a gradient of stride 0."""
    first = learning(operands())
    second = learning(first)
    input_embedding(*values(first))[0].sum().backward()
    input_embedding(*values(second))[0].backward(torch.ones(*first.ids.shape, first.width))
    for name in LEARNED:
        assert torch.equal(getattr(first, name).grad, getattr(second, name).grad), name


def test_checkpointing_drops_the_same_entries() -> None:
    """The seed is drawn outside, from the generator whose state checkpointing brings back."""
    o = learning(operands())

    def drawn(token: Tensor) -> Tensor:
        seed = torch.randint(2**63 - 1, (1,))
        return input_embedding(*values(dataclasses.replace(o, token=token, seed=seed, p=0.5)))[0]

    cotangent = torch.randn(*o.ids.shape, o.width)
    torch.manual_seed(3)
    (kept_all,) = torch.autograd.grad(drawn(o.token), o.token, cotangent)
    torch.manual_seed(3)
    y = checkpoint(drawn, o.token, use_reentrant=False)
    torch.randn(100)
    assert isinstance(y, Tensor)
    (again,) = torch.autograd.grad(y, o.token, cotangent)
    assert torch.equal(kept_all, again)


@pytest.mark.parametrize(("width", "dtype"), [(192, torch.float32), (131, torch.float32), (131, torch.bfloat16)])
def test_any_number_of_threads_gives_the_same_bits(kernel: Kernel, width: int, dtype: torch.dtype) -> None:
    """Tensors large enough for torch to share them out among threads; 131 columns do not divide evenly."""
    rows = {"token": torch.randn(101, width).to(dtype), "position": torch.randn(600, width).to(dtype)}
    ids = torch.randint(101, (3, 599)).where(torch.rand(3, 599) < 0.7, 7)
    for index in (torch.arange(599)[None], torch.randint(600, (3, 599))):
        given = {**rows, "ids": ids, "position_index": index}
        o = operands((3, 599), width, dtype=dtype, **given, seed=torch.tensor([5]), p=0.1)
        cotangent = torch.randn(3, 599, width).to(dtype)
        found = []
        for count in (1, 2, 3, 8):
            with threads(count):
                y, gradients = kernel.both(cotangent, o)
                found.append((y, *gradients.values()))
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_nothing_as_large_as_the_result_is_kept_for_the_backward_pass() -> None:
    o = learning(operands((16, 64), 64, seed=torch.tensor([5]), p=0.1))
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x) or x, lambda x: x):
        y = input_embedding(*values(o))[0]
    new = [x for x in held if all(x is not v for v in values(o))]
    assert sum(x.numel() for x in new) <= 2 * o.ids.numel() + sum(v.numel() for v in values(o) if isinstance(v, Tensor))
    assert all(x.numel() < y.numel() for x in held)


def test_the_result_is_no_view_of_something_else() -> None:
    """FSDP warns of modules that return one."""
    assert not input_embedding(*values(operands()))[0]._is_view()
    assert not input_embedding(*values(operands(without=("eps", "gamma", "beta"))))[0]._is_view()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_result_has_the_bits_of_the_reference(kernel: Kernel, dtype: torch.dtype) -> None:
    """What double backward and this package's documentation rest on."""
    for p in (0.0, 0.3):
        o = operands((7, 61), 31, dtype=dtype, seed=torch.tensor([5]), p=p)
        expected = reference.input_embedding(o, kernel.kept(o) if p else None)
        assert torch.equal(kernel.forward(o)[0], expected)
