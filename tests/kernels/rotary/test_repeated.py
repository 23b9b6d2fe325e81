"""The same positions rotated in one layer after another: the bits of the first time, and nothing that goes stale."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from locant import LocantError, Positions, Rotary, ShapeError
from locant.kernels import native as kernels
from locant.kernels.rotary import native, reference, repeated
from tests.kernels.rotary.rotating import truth
from tests.refusal import refuses
from tests.tolerances import assert_close

ANGLES = ["exact", "float32"]


@pytest.fixture(scope="module", autouse=True, params=["native", "torch"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which code rotates, in all that is tested here."""
    if request.param == "native" and kernels.function(native.FUNCTION) is None:
        pytest.skip(f"native kernels are {kernels.status()}")
    function = kernels.function if request.param == "native" else lambda name: None
    with mock.patch.object(kernels, "function", function):
        yield request.param


@pytest.fixture(params=[torch.no_grad, torch.inference_mode])
def mode(request: pytest.FixtureRequest) -> Iterator[None]:
    with request.param():
        yield


def tokens(seq: int, dtype: torch.dtype = torch.float32, batch: int = 2, head_dim: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, seq, head_dim).to(dtype), torch.randn(batch, 1, seq, head_dim).to(dtype)


def first_time(rotary: Rotary, q: Tensor, k: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
    """By positions that nothing is kept of."""
    return rotary.rotate(q.clone(), k.clone(), copy.copy(positions))


def assert_same(ours: Any, expected: Any) -> None:
    for x, y in zip(ours, expected, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


def is_known(rotary: Rotary, q: Tensor, k: Tensor, positions: Positions) -> bool:
    return positions.kept[rotary.angles].rotate(q, k, rotary.layout, False) is not None


# ---------------------------------------------------------------------- the same bits


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("angles", ANGLES)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_layer_has_the_bits_of_the_first(dtype: torch.dtype, layout: Any, angles: Any) -> None:
    rotary = Rotary(8, layout=layout, rotary_dim=6, angles=angles)
    for positions in (Positions.after(70_000, 1), Positions.after(torch.tensor([3, 90]), 5), Positions.arange(5)):
        for _ in range(4):
            q, k = tokens(positions.seq_len, dtype)
            assert_same(rotary.rotate(q, k, positions), first_time(rotary, q, k, positions))
            expected = first_time(rotary, q, k, positions)
            ours = rotary.rotate(q, k, positions, inplace=True)
            assert ours[0] is q
            assert ours[1] is k
            assert_same(ours, expected)


@torch.no_grad()
def test_against_float64() -> None:
    rotary, positions = Rotary(8), Positions.after(8_191, 3)
    for _ in range(3):
        q, k = tokens(3)
        for x, rotated in zip((q, k), rotary.rotate(q, k, positions), strict=True):
            expected = truth(x, positions.index, "half", 8)
            assert_close(rotated, expected)
    assert is_known(rotary, *tokens(3), positions)


@torch.no_grad()
@pytest.mark.parametrize("angles", ANGLES)
def test_layers_of_other_shapes_strides_dtypes_and_threads_take_turns(angles: Any) -> None:
    rotary, positions = Rotary(8, angles=angles), Positions.after(5, 4)
    qkv = torch.randn(2, 4, 5, 8)
    kinds = [
        tokens(4),
        tokens(4, batch=1),
        tokens(4, torch.bfloat16),
        (qkv[:, :, :3].transpose(1, 2), qkv[:, :, 3:4].transpose(1, 2)),
        (torch.randn(2, 3, 4, 16)[..., ::2], torch.randn(2, 1, 4, 8)),  # not side by side
        (torch._neg_view(torch.randn(2, 3, 4, 8)), torch.randn(2, 1, 4, 8)),
        (torch.randn(2, 0, 4, 8), torch.randn(2, 1, 4, 8)),
    ]
    before = torch.get_num_threads()
    for threads, (q, k) in itertools.product((1, 2, 1), kinds * 3):
        torch.set_num_threads(threads)
        assert_same(rotary.rotate(q, k, positions), first_time(rotary, q, k, positions))
    torch.set_num_threads(before)


@torch.no_grad()
def test_two_encodings_share_positions() -> None:
    near, far = Rotary(8), Rotary(8, 5e5, layout="interleaved", angles="float32")
    positions = Positions.arange(4)
    for rotary in (near, far) * 4:
        q, k = tokens(4)
        assert_same(rotary.rotate(q, k, positions), first_time(rotary, q, k, positions))
    near.layout = "interleaved"
    for _ in range(3):
        q, k = tokens(4)
        assert_same(near.rotate(q, k, positions), first_time(near, q, k, positions))


# ---------------------------------------------------------------------- made once


@pytest.mark.usefixtures("mode")
def test_angles_that_torch_makes_are_made_for_the_first_two_layers_alone(path: str) -> None:
    positions, layers = Positions.after(9, 1), [tokens(1) for _ in range(8)]
    for angles in ANGLES:
        rotary, made = Rotary(8, angles=angles), []
        counted = [mock.patch(f"locant.kernels.rotary.{name}.cos_sin", made_by(made)) for name in ("cpu", "native")]
        with counted[0], counted[1], mock.patch.object(repeated, "cos_sin", made_by(made)):
            for q, k in layers:
                rotary.rotate(q, k, positions)
        assert len(made) == (0 if (path, angles) == ("native", "exact") else 3)


def made_by(made: list[int]) -> Any:
    def cos_sin(*arguments: Any) -> Any:
        made.append(1)
        return reference.cos_sin(*arguments)

    return cos_sin


@torch.no_grad()
@pytest.mark.parametrize(("length", "kept"), [(7, True), (8, True), (9, False)])
def test_many_angles_are_not_kept(length: int, kept: bool, path: str) -> None:
    rotary, positions = Rotary(8, angles="float32"), Positions.arange(length)
    with mock.patch.object(repeated, "MOST_ANGLES", 32):
        for _ in range(3):
            q, k = tokens(length)
            assert_same(rotary.rotate(q, k, positions), first_time(rotary, q, k, positions))
        assert is_known(rotary, *tokens(length), positions) == kept


# ---------------------------------------------------------------------- nothing stale, nothing held


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("angles", ANGLES)
def test_positions_in_memory_that_is_written_to_are_read_anew(angles: Any) -> None:
    """As those of a `StaticKVCache` are."""
    rotary, index = Rotary(8, angles=angles), torch.tensor([[3, 4]])
    positions = Positions(index, min_index=0, max_index=100)  # the plain constructor copies nothing
    for step in range(4):
        for _ in range(3):
            q, k = tokens(2)
            expected = rotary.rotate(q, k, Positions.of(index.clone(), max_index=100))
            assert_same(rotary.rotate(q, k, positions), expected)
        index.add_(step + 1)


@torch.no_grad()
def test_what_is_kept_is_no_part_of_the_positions() -> None:
    rotary, positions = Rotary(8), Positions.arange(4)
    for _ in range(3):
        rotary.rotate(*tokens(4), positions)
    assert len(positions.kept) == 1
    assert positions == Positions.arange(4)
    assert repr(positions) == repr(Positions.arange(4))
    leaves, _ = torch.utils._pytree.tree_flatten(positions)
    assert len(leaves) == len(torch.utils._pytree.tree_leaves(Positions.arange(4)))
    for other in (copy.copy(positions), copy.deepcopy(positions), positions.slice(0, 2), positions.to("cpu")):
        assert not other.kept


@torch.no_grad()
def test_nothing_is_held_by_it() -> None:
    rotary, positions = Rotary(8, angles="float32"), Positions.arange(4)
    for _ in range(3):
        rotary.rotate(*tokens(4), positions)
    of_rotary, of_positions, kept = weakref.ref(rotary.angles), weakref.ref(positions), positions.kept
    gc.disable()
    try:
        del rotary
        assert of_rotary() is None
        assert not kept
        del positions
        assert of_positions() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------- what else may be wanted


@torch.no_grad()
def test_overwriting_is_counted_and_refused_as_the_first_time() -> None:
    rotary, positions = Rotary(8), Positions.arange(4)
    q, k = tokens(4)
    for _ in range(4):
        before = q._version, k._version
        rotary.rotate(q, k, positions, inplace=True)
        assert q._version > before[0]
        assert k._version > before[1]
    shared = torch.randn(2, 4, 4, 8)
    with refuses(ShapeError, "q and k that share", "k.clone()"):
        rotary.rotate(shared[:, :3], shared[:, 2:3], positions, inplace=True)
    with torch.inference_mode():
        inside = tokens(4)
    with refuses(LocantError, "inference mode", "inplace=False"):
        rotary.rotate(*inside, positions, inplace=True)


@pytest.mark.unchecked
@torch.no_grad()
def test_wrong_tensors_are_refused_as_the_first_time() -> None:
    rotary, positions = Rotary(8), Positions.arange(4)
    for _ in range(3):
        rotary.rotate(*tokens(4), positions)
    q, k = tokens(4)
    for wrong in (k[:1], k[:, :, :2], k[..., :6], k.long(), k[0], k.to("meta")):
        with pytest.raises(ShapeError):
            rotary.rotate(q, wrong, positions)
    with refuses(ShapeError, "None for k", "rotate_one"):
        rotary.rotate(q, None, positions)  # type: ignore[arg-type]


def test_gradients_samples_and_subclasses_go_another_way() -> None:
    rotary, positions = Rotary(8), Positions.arange(4)
    with torch.no_grad():
        for _ in range(3):
            rotary.rotate(*tokens(4), positions)
        q, k = tokens(4)
        expected = rotary.rotate(q, k, positions)
        samples = vmap(lambda x: rotary.rotate(x, k, positions)[0])(q[None])
        assert torch.equal(samples[0], expected[0])
        parameter = nn.Parameter(q)
        assert_same(rotary.rotate(parameter, k, positions), expected)
    rotated, _ = rotary.rotate(q.requires_grad_(), k, positions)
    (gradient,) = torch.autograd.grad(rotated.sum(), q)
    assert_close(gradient, rotary.rotate(torch.ones_like(q), k, Positions.of(-positions.index))[0])


@pytest.mark.unchecked
@torch.no_grad()
def test_a_compiled_layer_takes_the_positions_of_an_uncompiled_one() -> None:
    rotary, positions = Rotary(8), Positions.after(3, 1)
    compiled = torch.compile(rotary.rotate, fullgraph=True, backend="aot_eager")
    for q, k in (tokens(1) for _ in range(3)):
        expected = rotary.rotate(q, k, positions)
        assert_same(compiled(q, k, positions), expected)
