"""In a ring the next shard is on its way while this one is computed with, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import Work

from locant import ALiBi, Positions, attend
from locant.parallel import ring
from tests.tolerances import assert_close

WORLD, LENGTH = 3, 4


class Arrival(Work):
    def __init__(self, waited: Callable[[], None]) -> None:
        super().__init__()
        self.waited = waited

    def wait(self, *_: Any) -> bool:
        self.waited()
        return True


class LastRank(ring.Ring):
    """The last of several ranks that hold the same keys and values, so that what it sends is what it receives."""

    def __init__(self, keys: Tensor) -> None:
        self.rank, self.world = WORLD - 1, WORLD
        self.keys, self.log = keys, list[str]()

    def send(self, *tensors: Tensor) -> ring.Transfer:
        what = "shard" if tensors[0].data_ptr() == self.keys.data_ptr() else "gradients"
        self.log.append(f"send {what}")
        return ring.Transfer(tensors, tensors, [Arrival(lambda: self.log.append(f"await {what}"))])


def test_the_next_shard_is_sent_for_before_this_one_is_computed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone, options = Positions.arange(WORLD * LENGTH), {"encoding": ALiBi(2)}
    where = everyone.slice((WORLD - 1) * LENGTH, WORLD * LENGTH)
    leaves = q, k, v = [torch.randn(1, 2, LENGTH, 8, requires_grad=True) for _ in range(3)]
    last = LastRank(k)

    def logged(*tensors: Tensor, **options: Any) -> Any:
        if tensors[0].shape[2] > 1:  # and no trial whether anything is refused
            last.log.append("compute")
        return attend(*tensors, **options)

    monkeypatch.setattr(ring, "attend", logged)
    y, _ = ring.ring_attention(last, q, k, v, where, everyone, options)
    forward = ["send shard", "compute", "await shard"] * (WORLD - 1) + ["compute"]
    assert last.log == forward

    last.log.clear()
    cotangent = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, cotangent)
    assert [each for each in last.log if "gradients" not in each] == forward
    gradients = " ".join(each for each in last.log if each == "compute" or "gradients" in each)
    meanwhile = "send gradients compute await gradients "
    assert gradients == "compute " + meanwhile * (WORLD - 1) + "send gradients await gradients"

    whole = attend(q, *(x.repeat(1, 1, WORLD, 1) for x in (k, v)), positions=where, k_positions=everyone, **options)
    for ours, truth in zip((y, *found), (whole, *torch.autograd.grad(whole, leaves, cotangent)), strict=True):
        assert_close(ours, truth)
