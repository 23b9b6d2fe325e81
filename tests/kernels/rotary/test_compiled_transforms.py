"""`rotate` where a compiler meets other derivatives than ``backward``, and `torch.func.vmap`.

Rotating is linear, so the truth is known for all of them: a tangent is rotated as its vector is, a cotangent back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

from locant.kernels.rotary import rotate
from tests.kernels.rotary.rotating import far_positions, tables, truth
from tests.tolerances import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's forward mode, about itself

SHAPE, ROTARY_DIM, LAYOUT = (2, 3, 5, 14), 6, "half"
Rotate = Callable[[Tensor], Tensor]


def rotating(index: Tensor, inplace: bool) -> Rotate:
    """Queries and keys of one tensor, added up, so that both count."""
    of = tables(ROTARY_DIM)

    def rotation(x: Tensor) -> Tensor:
        q, k = rotate(x * 1, x[:, :1] * 2, index, of, LAYOUT, inplace=inplace)
        return q + k

    return rotation


def rotated(x: Tensor, index: Tensor, sign: int = 1) -> Tensor:
    """What `rotating` does, by the oracle; with ``sign=-1`` its transpose, which is what a gradient takes."""
    both = truth(x, index, LAYOUT, ROTARY_DIM, sign)
    if sign > 0:
        return both + 2 * both[:, :1]
    first = torch.zeros_like(both)
    first[:, 0] = both.sum(1)
    return both + 2 * first


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.unchecked
@pytest.mark.parametrize("inplace", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_compiled_transform_is_the_transform(inplace: bool) -> None:
    index, x, other = far_positions(2, 5), torch.randn(SHAPE), torch.randn(SHAPE)
    rotation = rotating(index, inplace)
    out, tangent = compiled(lambda a, b: jvp(rotation, (a,), (b,)))(x, other)
    assert_close(out, rotated(x, index))
    assert_close(tangent, rotated(other, index))
    assert_close(compiled(grad(lambda a: (rotation(a) * other).sum()))(x), rotated(other, index, sign=-1))
    samples = compiled(vmap(rotation))(torch.stack([x, other]))
    for sample, vector in zip(samples, (x, other), strict=True):
        assert_close(sample, rotated(vector, index))
    torch._dynamo.reset()


@pytest.mark.unchecked
@pytest.mark.slow
def test_a_transform_of_a_transform_is_compiled() -> None:
    """The second derivative of half a square is the rotation back of the rotation; and a tangent for every sample."""
    index, x, other = far_positions(2, 5), torch.randn(SHAPE), torch.randn(SHAPE)
    rotation = rotating(index, False)
    gradient = grad(lambda a: rotation(a).square().sum() / 2)
    second = compiled(lambda a, b: jvp(gradient, (a,), (b,))[1])(x, other)
    assert_close(second, rotated(rotated(other, index), index, sign=-1))
    each = compiled(vmap(lambda a, b: jvp(rotation, (a,), (b,))[1]))(torch.stack([other, x]), torch.stack([x, other]))
    assert_close(each[0], rotated(x, index))
    torch._dynamo.reset()


@pytest.mark.unchecked
def test_compiled_code_rotates_the_tangent_that_it_is_given() -> None:
    """Whether it was called without one before or not."""
    index, x, tangent = far_positions(2, 5), torch.randn(SHAPE), torch.randn(SHAPE)
    rotation = compiled(rotating(index, False))
    assert_close(rotation(x), rotated(x, index))
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(rotation(forward_ad.make_dual(x, tangent))).tangent
        assert found is not None
        assert_close(found, rotated(tangent, index))
    assert_close(rotation(x), rotated(x, index))
    torch._dynamo.reset()
