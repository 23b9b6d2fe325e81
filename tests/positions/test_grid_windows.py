"""Windows of a grid, shifted and not: against a layer of Swin, whose positions and masks these are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from locant import GridBias, RangeError, ShapeError, attend
from locant.positions import GridWindows
from tests.refusal import refuses
from tests.tolerances import assert_close

HEADS, HEAD_DIM, WINDOW = 3, 4, 4


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_a_layer_of_swin(shift: int) -> None:
    """Two images of 8 x 12 tokens, output and gradients."""
    from transformers import SwinConfig
    from transformers.models.swin.modeling_swin import SwinLayer

    config = SwinConfig(window_size=WINDOW, attn_implementation="sdpa")  # the other has its softmax in float32
    theirs = SwinLayer(config, HEADS * HEAD_DIM, (8, 12), HEADS, shift_size=shift).double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    theirs = theirs.eval()
    table = theirs.attention.relative_position_bias.relative_position_bias_table
    ours = GridBias(HEADS, WINDOW, WINDOW).double()
    ours.load_state_dict({"weight": table})
    x = torch.randn(2, 8 * 12, HEADS * HEAD_DIM, dtype=torch.float64, requires_grad=True)
    expected, _ = theirs(x, (8, 12))

    windows, projections = GridWindows(8, 12, WINDOW, shift=shift), theirs.attention
    rows = windows.cut(theirs.layernorm_before(x))
    q, k, v = (
        projection(rows).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for projection in (projections.q_proj, projections.k_proj, projections.v_proj)
    )
    y = attend(q, k, v, encoding=ours, positions=windows.positions(2), causal=False)
    y = x + windows.join(projections.o_proj(y.transpose(1, 2).flatten(2)))
    y = y + theirs.mlp(theirs.layernorm_after(y))
    assert_close(y, expected)
    cotangent = torch.randn_like(y)
    mine = torch.autograd.grad(y, [x, ours.weight], cotangent)
    for gradient, its in zip(mine, torch.autograd.grad(expected, [x, table], cotangent), strict=True):
        assert_close(gradient, its)


def test_mistakes_are_named() -> None:
    with refuses(RangeError, "multiple of 4", "width=8"):
        GridWindows(4, 7, 4)
    with refuses(RangeError, "shift"):
        GridWindows(4, 8, 4, shift=4)
    windows = GridWindows(4, 8, 4, shift=2)
    with refuses(ShapeError, "(batch, 32, d_model)"):
        windows.cut(torch.zeros(1, 31, 2))
    with refuses(ShapeError, "(batch * 2, 16, d_model)"):
        windows.join(torch.zeros(3, 16, 2))
    assert repr(windows) == "GridWindows(4, 8, 4, shift=2)"
