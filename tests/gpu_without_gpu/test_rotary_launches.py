"""A launch of the rotary kernel like an earlier one is not worked out anew, and is the same to the last argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from locant.kernels.rotary.reference import Tables
from tests.gpu_without_gpu.launcher import Launch, fresh_process, launches

pytest.importorskip("triton", reason="there is no Triton for this platform")

DIM = 16


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    with fresh_process(tmp_path_factory.mktemp("triton")) as run:
        yield run


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, DIM, dtype=dtype)


def exact(**options: Any) -> Tables:
    return Tables(torch.empty(4, 256, DIM // 2, 2, dtype=torch.float64), **options)


def apart(x: Tensor) -> Tensor:
    """The same numbers, the first of them 8 bytes behind a multiple of 16."""
    return torch.empty(x.numel() + 16, dtype=x.dtype)[8 // x.element_size() :][: x.numel()].view(x.shape)


def calls() -> dict[str, tuple[Any, ...]]:
    """Each differs from the first in one thing."""
    q, k, index, tables = tokens(2, 4, 3), tokens(2, 2, 3), torch.zeros(2, 3, dtype=torch.long), exact(levels=2)
    axes = exact(levels=2, axis_of_pair=torch.zeros(DIM // 2, dtype=torch.long))
    first = (q, k, torch.empty_like(q), torch.empty_like(k), index, tables, "half", False)
    changed: dict[str, dict[int, Any]] = {
        "nothing": {},
        "batch": {0: tokens(1, 4, 3), 1: tokens(1, 2, 3), 2: tokens(1, 4, 3), 3: tokens(1, 2, 3), 4: index[:1]},
        "heads": {0: tokens(2, 3, 3), 2: tokens(2, 3, 3)},
        "strides of q": {0: tokens(2, 3, 4).transpose(1, 2)},
        "strides of k": {1: tokens(2, 3, 2).transpose(1, 2)},
        "strides of the result": {2: tokens(2, 3, 4).transpose(1, 2)},
        "dtype": {place: x.half() for place, x in enumerate(first[:4])},
        "address": {0: apart(q)},
        "address of the positions": {4: apart(index)},
        "one row of positions": {4: index[:1]},
        "strides of the positions": {4: torch.zeros(3, 2, dtype=torch.long).T},
        "narrow positions": {4: index.int()},
        "several axes": {4: torch.zeros(2, 3, 2, dtype=torch.long), 5: axes},
        "levels": {5: exact(levels=4)},
        "attention factor": {5: exact(levels=2, attention_factor=1.5)},
        "angles": {5: Tables(torch.empty(DIM // 2))},
        "layout": {6: "interleaved"},
        "part of a head": {5: Tables(torch.empty(4, 256, 4, 2, dtype=torch.float64), 2)},
        "in place": {2: q, 3: k},
        "q alone": {1: None, 3: None},
        "backward": {7: True},
    }
    return {name: tuple(new.get(place, x) for place, x in enumerate(first)) for name, new in changed.items()}


def cold_and_warm() -> list[tuple[str, Launch, Launch, int]]:
    """Every call worked out by itself; then all of them known, and how often Triton was asked to find the kernel."""
    from triton.runtime.jit import JITFunction

    from locant.kernels.rotary import triton

    every, cold, run = calls(), {}, JITFunction.run
    for name, arguments in every.items():
        triton._LAUNCHES.clear()
        (cold[name],) = launches(triton.rotate_, *arguments)
    triton._LAUNCHES.clear()
    for arguments in every.values():
        triton.rotate_(*arguments)
    found = []
    for name, arguments in every.items():
        with mock.patch.object(JITFunction, "run", autospec=True, side_effect=run) as asked:
            (warm,) = launches(triton.rotate_, *arguments)
        found.append((name, cold[name], warm, asked.call_count))
    return found


@pytest.mark.slow
def test_a_launch_that_is_known_is_the_launch_that_would_be_made(there: Callable[..., Any]) -> None:
    different = set()
    for name, cold, warm, asked in there(cold_and_warm):
        assert warm == cold, name
        assert asked == 0, name
        different.add((cold.grid, cold.arguments, cold.ptx))
    assert len(different) == len(calls())


def remembered(limit: int, kinds: int) -> int:
    from locant.kernels.rotary import triton

    with mock.patch.object(triton, "MAX_LAUNCHES", limit):
        for seq in range(1, kinds + 1):
            q = tokens(1, 1, seq)
            triton.rotate_(q, None, q, None, torch.zeros(1, seq, dtype=torch.long), exact(), "half", False)
    return len(triton._LAUNCHES)


@pytest.mark.slow
def test_not_more_launches_are_kept_than_have_a_place(there: Callable[..., Any]) -> None:
    assert there(remembered, 5, 13) <= 5
