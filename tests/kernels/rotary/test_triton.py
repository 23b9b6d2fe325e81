"""What the Triton kernel computes, against NumPy in float64. Interpreted, and on a GPU where there is one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from locant import Positions, Rotary
from locant.kernels.rotary import reference
from locant.kernels.rotary.reference import Tables
from tests import oracles
from tests.kernels.interpreted import Place
from tests.kernels.rotary.rotating import BASE, Case, far_positions, rotate_pairs, tables, truth
from tests.tolerances import DOUBLE, ROTATED, assert_close

LAYOUTS = ["half", "interleaved"]
SIZES = {2: 257, 10: 100, 40: 63, 72: 7, 80: 11, 96: 1, 128: 9, 192: 3, 256: 5, 512: 3}
"""Head dimensions, each with a number of tokens."""


def case(dim: int, layout: str = "half", *, rotary_dim: int | None = None, seq: int = 5, heads: int = 3) -> Case:
    """float32; two rows, one key head, and a position of its own for every token of every row."""
    q, k = torch.randn(2, heads, seq, dim), torch.randn(2, 1, seq, dim)
    return Case(q, k, far_positions(2, seq), layout, dim if rotary_dim is None else rotary_dim)


def require_rotated(out: Tensor, x: Tensor, given: Case, sign: int = 1) -> None:
    """float32 results are as close as a rounded cosine and three rounded operations allow."""
    true = truth(x, given.index, given.layout, given.rotary_dim, sign)
    half = given.rotary_dim // 2
    rotated = x[..., : given.rotary_dim].double()
    pair = rotated.unflatten(-1, (2, half)) if given.layout == "half" else rotated.unflatten(-1, (half, 2)).mT
    off = (out.double() - true)[..., : given.rotary_dim]
    off = off.unflatten(-1, (2, half)) if given.layout == "half" else off.unflatten(-1, (half, 2)).mT
    worst = (off.abs() / pair.norm(dim=-2, keepdim=True)).max()
    assert worst <= ROTATED, f"off by {float(worst):.3g} of the pair's length"
    assert torch.equal(out[..., given.rotary_dim :], x[..., given.rotary_dim :])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", SIZES)
def test_every_pair_is_rotated_as_the_paper_says(dim: int, layout: str, place: Place) -> None:
    given = case(dim, layout, seq=SIZES[dim])
    q, k = rotate_pairs(place, given)
    require_rotated(q, given.q, given)
    require_rotated(k, given.k, given)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dim", "rotary_dim"), [(3, 2), (40, 2), (72, 40), (96, 32), (80, 72), (200, 50), (13, 12)])
def test_dimensions_past_the_rotary_ones_are_handed_through(
    dim: int, rotary_dim: int, layout: str, place: Place
) -> None:
    given = case(dim, layout, rotary_dim=rotary_dim)
    for inplace in (False, True):
        q, k = rotate_pairs(place, given._replace(q=given.q.clone(), k=given.k.clone()), inplace=inplace)
        require_rotated(q, given.q, given)
        require_rotated(k, given.k, given)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (7, 7), (9, 2), (5, 0), (0, 3), (2, 11)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_number_of_heads(layout: str, heads: int, kv_heads: int, place: Place) -> None:
    given = case(8, layout, heads=heads)._replace(k=torch.randn(2, kv_heads, 5, 8))
    q, k = rotate_pairs(place, given)
    for out, x in ((q, given.q), (k, given.k)):
        if x.numel():
            require_rotated(out, x, given)


def test_queries_alone(place: Place) -> None:
    given = case(10)
    alone, nothing = rotate_pairs(place, given._replace(k=None))
    assert nothing is None
    assert torch.equal(alone, rotate_pairs(place, given)[0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_of_one_row_serve_all(dtype: torch.dtype, place: Place) -> None:
    given = case(10)
    one = given._replace(index=given.index[:1].to(dtype))
    both = given._replace(index=given.index[:1].repeat(2, 1))
    assert all(map(torch.equal, rotate_pairs(place, one), rotate_pairs(place, both)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("levels", [1, 2, 3, 4])
def test_the_bits_are_those_of_the_reference(levels: int, layout: str, place: Place) -> None:
    """Every product is rounded before the sum is: on any device the same bits as plain torch on a CPU."""
    of = tables(20, levels=levels, attention_factor=1.0 + levels / 7)
    for dtype, inverse in ((torch.float64, True), (torch.float32, False), (torch.float16, False)):
        given = case(28, layout, rotary_dim=20)
        given = given._replace(q=given.q.to(dtype), k=given.k.to(dtype), index=given.index % 256**levels)
        expected = reference.rotate(given.q, given.k, given.index, of, layout, inverse)
        assert all(map(torch.equal, rotate_pairs(place, given, of=of, inverse=inverse), expected))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_negative_positions_rotate_the_other_way(layout: str, place: Place) -> None:
    given = case(10, layout)
    backwards = given._replace(index=-given.index)
    assert all(map(torch.equal, rotate_pairs(place, backwards), rotate_pairs(place, given, inverse=True)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_is_the_float32_result_rounded_once(layout: str, place: Place) -> None:
    """Triton's interpreter cuts off where a device rounds to bfloat16, so each is held to what it does."""
    given = case(72, layout, rotary_dim=40)
    for dtype in (torch.float16, torch.bfloat16):
        low = given._replace(q=given.q.to(dtype), k=given.k.to(dtype))
        wide = rotate_pairs(place, low._replace(q=low.q.float(), k=low.k.float()))
        for out, exact in zip(rotate_pairs(place, low), wide, strict=True):
            assert out.dtype == dtype
            cut = place.is_interpreted and dtype == torch.bfloat16
            assert torch.equal(out, _cut_off(exact) if cut else exact.to(dtype))


def _cut_off(x: Tensor) -> Tensor:
    return (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rotary_dim", [14, 10])
def test_the_backward_is_the_adjoint(rotary_dim: int, layout: str, place: Place) -> None:
    """<R x, c> = <x, R' c> for random x and c, in float64, and R' is the rotation by the negative angle."""
    given = case(14, layout, rotary_dim=rotary_dim, seq=9)
    given = given._replace(q=given.q.double(), k=given.k.double())
    cotangent = given._replace(q=torch.randn_like(given.q), k=torch.randn_like(given.k))
    of = tables(rotary_dim, attention_factor=1.25)
    outs, gradients = rotate_pairs(place, given, of=of), rotate_pairs(place, cotangent, of=of, inverse=True)
    for x, out, c, gradient in zip(given[:2], outs, cotangent[:2], gradients, strict=True):
        torch.testing.assert_close((out * c).sum(), (x * gradient).sum(), rtol=DOUBLE, atol=DOUBLE)
        rotated = truth(c, given.index, layout, rotary_dim, sign=-1)
        rotated[..., :rotary_dim] *= 1.25
        assert_close(gradient, rotated)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sections", [(4, 3, 0), (1, 2, 4), (5, 2)])
def test_each_pair_follows_the_axis_of_its_section(sections: tuple[int, ...], layout: str, place: Place) -> None:
    given = case(17, layout, rotary_dim=14, seq=6)
    index = far_positions(2, 6, len(sections))
    axis_of_pair = torch.repeat_interleave(torch.tensor(sections))
    of = tables(14, axis_of_pair=axis_of_pair)
    q, k = rotate_pairs(place, given._replace(index=index), of=of)
    for out, x in ((q, given.q), (k, given.k)):
        for row in range(2):
            cos, sin = oracles.angles(index[row].numpy(), 14, BASE)
            picked = [t[:, axis_of_pair, np.arange(7)] for t in (cos, sin)]
            true = oracles.rotate(x[row : row + 1].double().numpy(), *picked, layout)
            assert_close(out[row : row + 1], torch.from_numpy(true))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_angles_are_the_rounded_products(layout: str, place: Place) -> None:
    """The cosine of ``float32(position) * frequency``, itself rounded, with up to 2 units in its last place."""
    frequencies = torch.tensor([1.0, 0.3, 0.01, 1e-4, 1e-7, 7e-1, 0.0])
    given = case(14, layout, seq=33)
    cos, sin = oracles_of_products(given.index, frequencies)
    q, _ = rotate_pairs(place, given, of=Tables(frequencies, attention_factor=1.5))
    for row in range(2):
        true = oracles.rotate(given.q[row : row + 1].double().numpy(), 1.5 * cos[row], 1.5 * sin[row], layout)
        assert_close(q[row : row + 1], torch.from_numpy(true))


def oracles_of_products(index: Tensor, frequencies: Tensor) -> tuple[np.ndarray, np.ndarray]:
    products = (index.float()[..., None] * frequencies).tolist()
    return tuple(  # type: ignore[return-value]
        np.array([[[function(angle) for angle in token] for token in row] for row in products])
        for function in (math.cos, math.sin)
    )


@pytest.mark.gpu
def test_float32_angles_have_the_bits_of_torch_on_the_same_device() -> None:
    """So that a model gets the angles it was trained with; in exact mode all devices agree anyway."""
    frequencies = torch.tensor([1.0, 0.3, 0.01, 1e-4, 1e-7, 7e-1, 0.0])
    given, of = case(14, seq=513), Tables(frequencies)
    on_gpu = [x.cuda() for x in given[:3]]
    expected = reference.rotate(*on_gpu, of._replace(table=frequencies.cuda()), "half")
    assert all(
        torch.equal(a, b.cpu()) for a, b in zip(rotate_pairs(Place("cuda"), given, of=of), expected, strict=True)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"layout": "interleaved"}, {"rotary_dim": 10}, {"sections": (3, 2, 3)}])
def test_the_public_door_gives_the_bits_of_a_cpu(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Forward and backward, out of place and in place, at positions near and far."""
    rotary = Rotary(16, **options)
    axes = () if "sections" not in options else (3,)
    for limit in (2**16, 2**31):
        where = Positions.of(torch.randint(0, limit, (2, 33, *axes)))
        q, k = torch.randn(2, 6, 33, 16).to(dtype), torch.randn(2, 2, 33, 16).to(dtype)
        cotangents = torch.randn_like(q), torch.randn_like(k)
        found = []
        for device in ("cpu", "cuda"):
            leaves = [x.to(device).requires_grad_() for x in (q, k)]
            out = rotary.rotate(*leaves, where.to(device))
            gradients = torch.autograd.grad(out, leaves, [c.to(device) for c in cotangents])
            inplace = rotary.rotate(q.to(device).clone(), k.to(device).clone(), where.to(device), inplace=True)
            found.append([x.detach().cpu() for x in (*out, *gradients, *inplace)])
        assert all(map(torch.equal, *found))
