"""Clipping and optimizers for a model whose token table is split: on two and four processes as on one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from locant.parallel import clip_grad_norm_, parameter_groups
from tests.parallel.gradient_ranks import MAX_NORM, OPTIMIZERS, find_out
from tests.ranks import found_on, needs_gloo
from tests.tolerances import OVER_RANKS

pytestmark = needs_gloo


def trained_as_one(world: int, cases: list[tuple[Any, ...]]) -> None:
    for rank, found in enumerate(found_on(world, find_out, cases)):
        for case in cases:
            result = found[str(case)]
            assert result["off"] <= OVER_RANKS, f"rank {rank}, {case}: off by {result['off']}"
            assert max(result["norms"]) > MAX_NORM, "nothing was clipped"
            assert result["saved"] > 0


@pytest.mark.slow
def test_two_processes_are_clipped_and_trained_as_one() -> None:
    """Of three rows, the second rank has one."""
    trained_as_one(2, [(11, (2,), "AdamW, fused", 2.0), (11, (2,), "AdamW, foreach", math.inf)])


@pytest.mark.slow
def test_four_processes_are_clipped_and_trained_as_one() -> None:
    """Of five rows, the fourth rank has none; and split once more by FSDP."""
    every = [(5, (4,), name, norm) for name, norm in zip(OPTIMIZERS, (2.0, 1.0, 3.0, math.inf), strict=True)]
    trained_as_one(
        4, every + [(11, (2, 2), name, norm) for name, norm in zip(OPTIMIZERS, (2.0, math.inf), strict=False)]
    )


def test_what_is_not_split_is_clipped_as_torch_does() -> None:
    for norm_type in (1.0, 2.0, math.inf):
        for limit in (0.1, 100.0):
            one, other = (nn.Linear(3, 2).double() for _ in range(2))
            for p, q in zip(one.parameters(), other.parameters(), strict=True):
                p.grad = torch.randn_like(p)
                q.grad = p.grad.clone()
            norm = clip_grad_norm_(one.parameters(), limit, norm_type)
            assert torch.equal(norm, nn.utils.clip_grad_norm_(other.parameters(), limit, norm_type))
            for p, q in zip(one.parameters(), other.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad)
    assert clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0) == 0


def test_groups_keep_their_settings_and_their_order() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = parameter_groups([{"params": first.parameters(), "lr": 0.5}, {"params": [second.weight]}])
    assert [group.get("lr") for group in groups] == [0.5, None]
    assert [list(map(id, group["params"])) for group in groups] == [
        list(map(id, first.parameters())),
        [id(second.weight)],
    ]
