"""Biases of rows and columns: against the published models that have them, forward and every gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from locant import ContinuousGridBias, DecomposedBias, GridBias, Positions, RangeError, ShapeError, attend
from locant.attention.backends import blocks, tiled
from locant.positions.offset_bias import OffsetBias
from tests.largest import Largest
from tests.positions import claims
from tests.refusal import refuses
from tests.tolerances import assert_close

HEADS, HEAD_DIM = 3, 4


def randomized(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.eval()


def same_gradients(ours: Tensor, theirs: Tensor, sources: Sequence[tuple[Tensor, Tensor]]) -> None:
    """And the same values; by pairs of a tensor of ours and one of theirs, for a random cotangent.

    In float32, and relative to the largest: some of the models compute in it whatever their inputs are.
    """
    cotangent = torch.randn_like(ours)
    mine, its = zip(*sources, strict=True)
    found = (ours.detach(), *torch.autograd.grad(ours, mine, cotangent))
    truth = (theirs.detach(), *torch.autograd.grad(theirs, its, cotangent))
    for each, expected in zip(found, truth, strict=True):
        size = expected.abs().max()
        assert_close((each / size).float(), (expected / size).float())


def zeros(tokens: int, heads: int = HEADS) -> Tensor:
    return torch.zeros(1, heads, tokens, HEAD_DIM)


@pytest.mark.parametrize("size", [(4, 4), (5, 3), (2, 9)], ids=str)
def test_beit_with_its_class_token_and_for_grids_of_other_sizes(size: tuple[int, int]) -> None:
    from transformers import BeitConfig
    from transformers.models.beit.modeling_beit import BeitRelativePositionBias

    config = BeitConfig(image_size=8, patch_size=2, num_attention_heads=HEADS, hidden_size=HEADS * HEAD_DIM)
    theirs = randomized(BeitRelativePositionBias(config))
    ours = GridBias(HEADS, 4, 4, prefix=True)
    ours.load_state_dict({"weight": theirs.relative_position_bias_table})
    expected, positions = theirs(size), Positions.grid(*size, prefix=1)
    q = zeros(positions.seq_len)
    bias = ours.at(*size).bias(q, q, positions)
    same_gradients(bias, expected, [(ours.weight, theirs.relative_position_bias_table)])
    ours.resize(*size)
    assert_close(ours.bias(q, q, positions).detach(), expected.detach())
    assert repr(ours) == f"GridBias(num_heads=3, height={size[0]}, width={size[1]}, prefix=True)"


@pytest.mark.parametrize("trained", [0, 4])
def test_swin_v2_attention_also_in_windows_larger_than_the_trained_ones(trained: int) -> None:
    from transformers import Swinv2Config
    from transformers.models.swinv2.modeling_swinv2 import Swinv2SelfAttention

    width = HEADS * HEAD_DIM
    theirs = randomized(Swinv2SelfAttention(Swinv2Config(), width, HEADS, 6, [trained, trained])).double()
    ours = ContinuousGridBias(HEADS, trained or 6, trained or 6).double()
    first, _, last = theirs.continuous_position_bias_mlp
    state = {"hidden.weight": first.weight, "hidden.bias": first.bias, "weight": last.weight}
    ours.load_state_dict(state)
    with torch.no_grad():
        theirs.logit_scale.copy_(torch.linspace(0.5, 2.0, HEADS)[:, None, None])
    x = torch.randn(2, 36, width, dtype=torch.float64, requires_grad=True)
    (expected,) = theirs(x)
    q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (theirs.query, theirs.key, theirs.value))
    q, k = F.normalize(q, dim=-1) * theirs.logit_scale.exp(), F.normalize(k, dim=-1)
    positions = Positions.grid(6, 6)
    y = attend(q, k, v, encoding=ours.at(6, 6), positions=positions, causal=False, scale=1.0).transpose(1, 2).flatten(2)
    learned = dict(ours.named_parameters())
    same_gradients(y, expected, [(x, x), *((learned[name], state[name]) for name in state)])


@pytest.mark.parametrize("size", [(4, 4), (6, 3)], ids=str)
def test_sam_attention_also_with_interpolated_tables(size: tuple[int, int]) -> None:
    from transformers import SamVisionConfig
    from transformers.models.sam.modeling_sam import SamVisionAttention

    config = SamVisionConfig(hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, use_rel_pos=True)
    theirs = randomized(SamVisionAttention(config, 4)).double()
    ours = DecomposedBias(HEAD_DIM, 4, 4).double()
    ours.load_state_dict({"rows": theirs.rel_pos_h, "columns": theirs.rel_pos_w})
    x = torch.randn(2, *size, HEADS * HEAD_DIM, dtype=torch.float64, requires_grad=True)
    expected, _ = theirs(x)
    q, k, v = theirs.qkv(x).view(2, -1, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
    y = attend(q, k, v, encoding=ours.at(*size), positions=Positions.grid(*size), causal=False)
    y = theirs.proj(y.transpose(1, 2).reshape(x.shape))
    tables = [(ours.rows, theirs.rel_pos_h), (ours.columns, theirs.rel_pos_w)]
    same_gradients(y, expected, [(x, x), (theirs.qkv.weight, theirs.qkv.weight), *tables])
    bias = ours.at(*size).bias(q, k, Positions.grid(*size))
    ours.resize(*size)
    assert_close(ours.bias(q, k, Positions.grid(*size)), bias)


ENCODINGS: dict[str, Callable[[], OffsetBias]] = {
    "table": lambda: GridBias(HEADS, 4, 5, prefix=True),
    "continuous": lambda: ContinuousGridBias(HEADS, 4, 5, hidden=8),
    "decomposed": lambda: DecomposedBias(HEAD_DIM, 4, 5),
}
ARRANGEMENTS: dict[str, Callable[[], Positions]] = {
    "one image": lambda: Positions.grid(4, 5),
    "prefix tokens": lambda: Positions.grid(3, 5, prefix=2),
    "images of two sizes, padded": lambda: Positions.packed_grids([[(2, 3), (4, 2)], [(3, 5)]], prefix=1, length=20),
}


def written_out(encoding: OffsetBias, q: Tensor, positions: Positions, row: int) -> Tensor:
    """What is added for every pair of one row, by a loop over pairs; differentiable by `q` and parameters."""
    given = dict(encoding.named_parameters())
    prefix = positions.grids[0].prefix
    starts = np.cumsum([0, *(grid.num_tokens for grid in positions.grids)])
    cells = []
    for place, (y, x) in zip(positions.place_or_none[row].tolist(), positions.index[row].tolist(), strict=True):
        is_prefix = place - max(start for start in starts if start <= place) < prefix
        cells.append(None if is_prefix else (y, x))
    out = []
    for i, here in enumerate(cells):
        for there in cells:
            if isinstance(encoding, GridBias):
                if here is None or there is None:
                    entry = 63 + (2 if here is there else 0 if here is None else 1)
                else:
                    entry = (here[0] - there[0] + 3) * 9 + here[1] - there[1] + 4
                out.append(given["weight"][entry])
            elif here is None or there is None:
                out.append(torch.zeros(HEADS, dtype=q.dtype))
            elif isinstance(encoding, DecomposedBias):
                vector = given["rows"][here[0] - there[0] + 3] + given["columns"][here[1] - there[1] + 4]
                out.append(q[row, :, i] @ vector)
            else:
                share = torch.tensor([(here[0] - there[0]) / 3, (here[1] - there[1]) / 4], dtype=q.dtype) * 8
                share = share.sign() * (1 + share.abs()).log() / np.log(8)
                hidden = (given["hidden.weight"] @ share + given["hidden.bias"]).clamp(min=0)
                out.append(16 / (1 + torch.exp(-given["weight"] @ hidden)))
    return torch.stack(out, -1).view(HEADS, len(cells), len(cells))


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_every_backend_computes_attention_with_the_bias_written_out(name: str, arrangement: str) -> None:
    """Forward and every gradient, in float64."""
    encoding, positions = claims.shaken(ENCODINGS[name]()).double(), ARRANGEMENTS[arrangement]()
    assert isinstance(encoding, OffsetBias)
    shape = (2, HEADS, positions.seq_len, HEAD_DIM)
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3))
    wide, sources = positions.expand(2), [q, k, v, *encoding.parameters()]
    bias = torch.stack([written_out(encoding, q, wide, row) for row in range(2)])
    same = (wide.document[:, :, None] == wide.document[:, None]) & (wide.document >= 0)[:, None]
    scores = (q @ k.mT / HEAD_DIM**0.5 + bias).masked_fill(~same[:, None], -1e300)
    expected = (scores.softmax(-1) * same[:, None]) @ v
    cotangent = torch.randn_like(expected)
    truth = torch.autograd.grad(expected, sources, cotangent)
    for backend in ("eager", "sdpa", "tiled"):
        options: dict[str, Any] = {"causal": False, "backend": backend}
        y = attend(q, k, v, encoding=encoding, positions=positions, **options)
        assert_close(y, expected)
        for gradient, its in zip(torch.autograd.grad(y, sources, cotangent), truth, strict=True):
            assert_close(gradient, its)
    slots = torch.meshgrid(*(torch.arange(n) for n in (2, HEADS, positions.seq_len, positions.seq_len)), indexing="ij")
    by_pair = encoding.score_mod(q, k, positions)(torch.zeros_like(scores), *slots)
    assert_close(by_pair, bias)


@pytest.mark.parametrize("name", ENCODINGS)
def test_no_matrix_is_stored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of 256 tokens, 64 queries at a time: no tensor larger than a tile of the bias."""
    encoding, side, heads, rows = ENCODINGS[name]().at(16, 16), 16, HEADS, 64
    n = side * side
    monkeypatch.setattr(tiled, "TILE_BYTES", heads * rows * n * 4)
    monkeypatch.setattr(blocks, "BLOCK", rows)
    q, k, v = (torch.randn(1, heads, n, HEAD_DIM, requires_grad=True) for _ in range(3))
    with Largest() as largest:
        options: dict[str, Any] = {"causal": False, "backend": "tiled"}  # as from 2**20 scores on
        attend(q, k, v, encoding=encoding, positions=Positions.grid(side, side), **options).sum().backward()
    assert largest.numbers <= heads * rows * n


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_flex_attention_runs_it_on_a_cpu() -> None:
    """What queries and keys are filled up with stands on the grid, too."""
    encoding, positions = claims.shaken(ENCODINGS["table"]()), Positions.grid(3, 5, prefix=2)
    q, k, v = (torch.randn(2, HEADS, 17, 16) for _ in range(3))
    with torch.no_grad():
        y, expected = (
            attend(q, k, v, encoding=encoding, positions=positions, causal=False, backend=backend)
            for backend in ("flex", "eager")
        )
    assert_close(y, expected)


@pytest.mark.parametrize("resized", ["the copy", "the original"])
def test_resizing_one_of_two_that_share_their_parameters_leaves_the_other_as_it_was(resized: str) -> None:
    bias = GridBias(HEADS, 3, 5)
    one, other = bias.at(4, 4), bias
    if resized == "the original":
        one, other = other, one
    before = other.matrix(15).clone()
    one.resize(6, 6)
    assert torch.equal(other.matrix(15), before)


def test_offsets_beyond_the_grid_raise_an_error() -> None:
    bias = GridBias(HEADS, 3, 5)
    bias.bias(zeros(15), zeros(15), Positions.grid(3, 5))
    for size, what in (((4, 5), "3 rows"), ((3, 6), "5 columns")):
        q = zeros(size[0] * size[1])
        with refuses(RangeError, what, "encoding.at(height, width)"):
            bias.bias(q, q, Positions.grid(*size))
    part = Positions.of([[[7, 20], [9, 24]]])
    assert bias.bias(zeros(2), zeros(2), part).shape == (1, HEADS, 2, 2)
    row = Positions.after(100, 5)
    assert torch.equal(bias.bias(zeros(5), zeros(5), row)[0], bias.matrix(5))
    with refuses(RangeError, "5 columns"):
        bias.score_mod(zeros(6), zeros(6), Positions.arange(6))


def test_mistakes_are_named() -> None:
    bias = GridBias(HEADS, 3, 5)
    with refuses(ShapeError, "3 axes", "Positions.grid(height, width)"):
        bias.bias(zeros(8), zeros(8), Positions.grid(2, 2, 2))
    with refuses(ShapeError, "in parts of 1/2", "Positions.grid"):
        bias.bias(zeros(4), zeros(4), Positions.grid(2, 2, centred=True))
    with refuses(ShapeError, "axes", "for queries and keys"):
        bias.bias(zeros(4), zeros(4), Positions.grid(2, 2), Positions.arange(4))
    with refuses(ShapeError, "GridBias", "num_heads=3"):
        bias.bias(zeros(4, 2), zeros(4, 2), Positions.grid(2, 2))
    with refuses(ShapeError, "head_dim=7"):
        DecomposedBias(7, 2, 2).bias(zeros(4), zeros(4), Positions.grid(2, 2))
    with refuses(RangeError, "query_len", "15"):
        bias.matrix(16)
