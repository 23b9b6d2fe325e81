"""The Triton kernel has the bits of the reference, whatever it is given: interpreted, and on a GPU where there is one.

Every product is rounded before the sum is, on any device; `test_reference` and `test_cpu` hold these bits against the
paper. What a GPU would be given is looked at as well; what into it is compiled, `tests/gpu_without_gpu` says.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from locant import Positions, Rotary
from locant.kernels.rotary import choose_kernel, reference
from locant.kernels.rotary.reference import Tables
from tests import oracles
from tests.kernels.interpreted import Place
from tests.kernels.rotary.rotating import Case, far_positions, launch, rotate_pairs, tables
from tests.tolerances import assert_close

pytest.importorskip("triton", reason="there is no Triton for this platform")

LAYOUTS = ["half", "interleaved"]
SIZES = {2: 257, 10: 100, 40: 63, 72: 7, 80: 11, 96: 1, 128: 9, 192: 3, 256: 5, 512: 3}
"""Head dimensions, each with a number of tokens."""


def case(
    dim: int, layout: str = "half", *, rotary_dim: int | None = None, seq: int = 5, heads: int = 3, kv_heads: int = 1
) -> Case:
    """float32; two rows, and a position of its own for every token of every row."""
    q, k = torch.randn(2, heads, seq, dim), torch.randn(2, kv_heads, seq, dim)
    return Case(q, k, far_positions(2, seq), layout, dim if rotary_dim is None else rotary_dim)


def require_bits(
    place: Place, given: Case, *, of: Tables | None = None, inverse: bool = False, inplace: bool = False
) -> None:
    of = tables(given.rotary_dim) if of is None else of
    expected = reference.rotate(given.q, given.k, given.index, of, given.layout, inverse)  # type: ignore[arg-type]
    assert all(map(torch.equal, rotate_pairs(place, given, of=of, inverse=inverse, inplace=inplace), expected))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", SIZES)
def test_heads_of_every_size(dim: int, layout: str, place: Place) -> None:
    require_bits(place, case(dim, layout, seq=SIZES[dim]))


@pytest.mark.parametrize(("dim", "rotary_dim"), [(3, 2), (40, 2), (72, 40), (96, 32), (80, 72), (200, 50), (13, 12)])
def test_dimensions_past_the_rotary_ones_are_handed_through(dim: int, rotary_dim: int, place: Place) -> None:
    for layout, inplace in itertools.product(LAYOUTS, (False, True)):
        require_bits(place, case(dim, layout, rotary_dim=rotary_dim), inverse=layout == "half", inplace=inplace)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (7, 7), (9, 2), (5, 0), (0, 3), (2, 11)])
def test_any_number_of_heads(heads: int, kv_heads: int, place: Place) -> None:
    require_bits(place, case(8, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("levels", [1, 2, 3, 4])
def test_positions_of_few_bytes_and_factors_in_every_dtype(levels: int, layout: str, place: Place) -> None:
    of = tables(20, levels=levels, attention_factor=1.0 + levels / 7)
    for dtype, inverse in ((torch.float64, True), (torch.float32, False), (torch.float16, False)):
        given = case(28, layout, rotary_dim=20)
        given = given._replace(q=given.q.to(dtype), k=given.k.to(dtype), index=given.index % 256**levels)
        require_bits(place, given, of=of, inverse=inverse)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sections", [(4, 3, 0), (1, 2, 4), (5, 2)])
def test_each_pair_follows_the_axis_of_its_section(sections: tuple[int, ...], layout: str, place: Place) -> None:
    given = case(17, layout, rotary_dim=14, seq=6)._replace(index=far_positions(2, 6, len(sections)))
    require_bits(place, given, of=tables(14, axis_of_pair=torch.repeat_interleave(torch.tensor(sections))))


def test_positions_that_are_negative_shared_or_narrow_and_queries_alone(place: Place) -> None:
    given = case(10)
    require_bits(place, given._replace(index=-given.index))
    for dtype in (torch.int32, torch.int64):
        require_bits(place, given._replace(index=given.index[:1].to(dtype)))
    alone, nothing = rotate_pairs(place, given._replace(k=None))
    assert nothing is None
    assert torch.equal(alone, rotate_pairs(place, given)[0])


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


FREQUENCIES = torch.tensor([1.0, 0.3, 0.01, 1e-4, 1e-7, 7e-1, 0.0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_angles_are_the_rounded_products(layout: str, place: Place) -> None:
    """The cosine of ``float32(position) * frequency``, itself rounded, with up to 2 units in its last place."""
    given = case(14, layout, seq=33)
    q, _ = rotate_pairs(place, given, of=Tables(FREQUENCIES, attention_factor=1.5))
    products = (given.index.float()[..., None] * FREQUENCIES).numpy().astype(np.float64)
    for row in range(2):
        cos, sin = (1.5 * np.vectorize(each)(products[row]) for each in (math.cos, math.sin))
        true = oracles.rotate(given.q[row : row + 1].double().numpy(), cos, sin, layout)
        assert_close(q[row : row + 1], torch.from_numpy(true))


@pytest.mark.gpu
def test_float32_angles_have_the_bits_of_torch_on_the_same_device() -> None:
    """So that a model gets the angles it was trained with; in exact mode all devices agree anyway."""
    given, of = case(14, seq=513), Tables(FREQUENCIES)
    expected = reference.rotate(*(x.cuda() for x in given[:3]), of._replace(table=FREQUENCIES.cuda()), "half")
    found = rotate_pairs(Place("cuda"), given, of=of)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"layout": "interleaved"}, {"rotary_dim": 10}, {"sections": (3, 2, 3)}])
def test_the_public_door_gives_the_bits_of_a_cpu(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Forward and backward, out of place and in place, at positions near and far."""
    rotary = Rotary(16, **options)
    there = torch.ones(1, 1, 1, 16, dtype=dtype, device="cuda"), torch.zeros(1, 1, dtype=torch.long, device="cuda")
    assert choose_kernel(*there, tables(16, "cuda")).kernel == "triton"
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


def compiled_for(arguments: dict[str, Any]) -> tuple[object, ...]:
    """What of a launch Triton compiles anew for: constants, dtypes, and what it may assume of the free integers."""
    key = []
    for name, value in sorted(arguments.items()):
        if isinstance(value, Tensor):
            key.append((name, value.dtype, value.data_ptr() % 16 == 0))
        elif name.isupper() or isinstance(value, bool):
            key.append((name, value))
        elif name.endswith("_dim"):
            key.append((name, value == 1, value % 16 == 0))
    return tuple(key)


LENGTHS = [*range(1, 40), 63, 64, 100, 127, 128, 1000, 1023, 1024, 4095, 4096, 4099]


@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("tokens_first", [False, True])
def test_one_compilation_serves_all_lengths_and_batches(tokens_first: bool, head_dim: int) -> None:
    def queries(batch: int, heads: int, seq: int) -> Tensor:
        shape = (batch, seq, heads, head_dim) if tokens_first else (batch, heads, seq, head_dim)
        x = torch.empty(shape, dtype=torch.bfloat16)
        return x.transpose(1, 2) if tokens_first else x

    keys = {compiled_for(launch(queries(1, 8, seq), queries(1, 2, seq))) for seq in LENGTHS}
    keys |= {compiled_for(launch(queries(batch, 8, 1), queries(batch, 2, 1))) for batch in (2, 17, 256)}
    assert len(keys) == 1
    assert len(keys | {compiled_for(launch(queries(1, 8, 5).double(), queries(1, 2, 5).double()))}) == 2


def test_the_stride_of_a_single_row_says_nothing_about_alignment() -> None:
    x = torch.empty(1, 4, 5, 64, dtype=torch.bfloat16)
    odd = x.as_strided(x.shape, (7, *x.stride()[1:]))
    assert launch(odd, odd)["UNIT"] == launch(x, x)["UNIT"] == 8


def test_the_backward_and_in_place_need_no_compilation_of_their_own() -> None:
    x = torch.empty(1, 4, 5, 64)
    forward = launch(x, x)
    assert forward["direction"] == 1
    assert compiled_for(forward) == compiled_for({**forward, "direction": -1, "out_q": x, "out_k": x})


def test_few_tokens_share_out_their_heads() -> None:
    """So that a GPU is not left idle while one program rotates all heads of the newest token."""

    def shares(batch: int, seq: int) -> int:
        x = torch.empty(batch, 32, seq, 128, dtype=torch.bfloat16)
        return launch(x, x[:, :8])["shares"]

    assert shares(1, 1) == 8  # one block of four heads each
    assert shares(1, 4096) == 2
    assert shares(1, 16_384) == 1


@pytest.mark.gpu
def test_fifty_lengths_compile_once_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    from locant.kernels.rotary import triton as module

    made: list[object] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **about: made.append(about))
    of = tables(44, "cuda", levels=2)
    for seq in LENGTHS:
        x = torch.randn(1, 5, seq, 44, device="cuda")
        index = torch.arange(seq, device="cuda")[None]
        module.rotate_(x, x[:, :3], x, x[:, :3], index, of, "half", seq % 2 == 0)
    assert len(made) <= 1
