"""FIRE's shared numbers as parameters that others can handle: one dimension, for FSDP, and states from before."""

from __future__ import annotations

import pytest
import torch

from locant import Fire, Positions


def test_no_parameter_is_without_a_dimension() -> None:
    assert {name: tuple(each.shape) for name, each in Fire(2, hidden=3).named_parameters()} == {
        "c": (1,), "threshold_multiple": (1,), "hidden.weight": (3, 1), "hidden.bias": (3,),
        "output.weight": (2, 3), "output.bias": (2,),
    }  # fmt: skip


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("prefix", ["", "0."])
def test_a_state_with_scalars_is_read(prefix: str, assign: bool) -> None:
    saved, fresh = Fire(2, hidden=3), Fire(2, hidden=3)
    with torch.no_grad():
        saved.c.fill_(0.37)
        saved.threshold_multiple.fill_(1.3)
    state = {prefix + name: each.detach().clone() for name, each in saved.named_parameters()}
    for name in ("c", "threshold_multiple"):
        state[prefix + name] = state[prefix + name][0]
    model = torch.nn.Sequential(fresh) if prefix else fresh
    model.load_state_dict(state, assign=assign)
    assert state[prefix + "c"].ndim == 0
    q = torch.zeros(1, 2, 9, 4)
    assert torch.equal(fresh.bias(q, q, Positions.arange(9)), saved.bias(q, q, Positions.arange(9)))
    assert fresh.c.shape == (1,)


def test_a_state_of_another_size_is_still_refused() -> None:
    state = Fire(2).state_dict()
    state["c"] = torch.zeros(2)
    with pytest.raises(RuntimeError, match="size mismatch for c"):
        Fire(2).load_state_dict(state)
