"""A device that refuses float64: angles are the same, bit for bit, and nothing on the way is float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from locant import PositionEncoding, Positions, Rotary, Sinusoidal
from locant.positions.scaling import DynamicNTK, YaRN
from locant.tensors import FLOAT64, has_float64
from tests.tolerances import assert_close

CPU = torch.device("cpu")
WHERE = Positions.of([[0, 1, 2, 255, 256, 65_535, 65_536, 999_999, 2**24 + 1, 2**31 - 1, 77, 5]])
GRID = Positions.of(torch.stack([WHERE.index[0], WHERE.index[0].flip(0)], dim=-1)[None])
ENCODINGS: dict[str, tuple[PositionEncoding, Positions]] = {
    "rotary": (Rotary(64), WHERE),
    "interleaved, a part": (Rotary(64, layout="interleaved", rotary_dim=32), WHERE),
    "YaRN": (Rotary(64, scaling=YaRN(factor=40.0, original_max_seq_len=4096)), WHERE),
    "two axes": (Rotary(64, sections=(16, 16)), GRID),
    "float32 angles": (Rotary(64, angles="float32"), WHERE),
    "sinusoidal": (Sinusoidal(64), WHERE),
}


class WithoutFloat64(TorchDispatchMode):
    """Refuses it as Apple's GPUs do."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **kwargs or {})
        if any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in (out if isinstance(out, tuple) else (out,))):
            raise TypeError("Cannot convert a tensor to float64, which this device does not support")
        return out


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[], WithoutFloat64]:
    """The CPU, as if it had no float64 from here on."""

    def found_out() -> WithoutFloat64:
        monkeypatch.delitem(FLOAT64, "cpu")
        with WithoutFloat64():
            assert not has_float64(CPU)
        assert not has_float64(CPU), "it is asked once"
        return WithoutFloat64()

    return found_out


@pytest.mark.parametrize("name", ENCODINGS)
def test_results_without_float64_have_the_same_bits(name: str, without: Callable[[], WithoutFloat64]) -> None:
    torch.manual_seed(0)
    encoding, where = ENCODINGS[name]
    q, k, cotangent = (torch.randn(1, heads, 12, 64) for heads in (2, 1, 2))

    def used() -> list[Tensor]:
        leaf = q.detach().clone().requires_grad_()
        rotated, keys = encoding.rotate(leaf, k, where)
        gradient = torch.autograd.grad(rotated, leaf, cotangent)
        return [rotated.detach(), keys, *gradient, encoding.unrotate(q, where), encoding.embed(k[0], where)]

    expected = used()
    mode = without()
    encoding.rotate(q, k, where)
    encoding.embed(k[0], where)  # its tables are made by the host
    with mode:
        found = used()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_cached_keys_are_moved_by_the_host(without: Callable[[], WithoutFloat64]) -> None:
    rotary, k = Rotary(64, scaling=DynamicNTK(factor=2.0, original_max_seq_len=64)), torch.randn(1, 1, 9, 64)
    here, there = Positions.arange(9), Positions.after(40, 9)

    def used() -> list[Tensor]:
        return [rotary.move(k, here, there), rotary.rerotate(k, here, 64, 256)]

    expected = used()
    without()
    for a, b in zip(used(), expected, strict=True):
        assert_close(a, b)
