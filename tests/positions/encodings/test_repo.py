"""RePo: against the paper's formula and `Rotary`, alone and in rows, caches and attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from locant import LocantError, Positions, ShapeError, attend, encoding
from locant.positions.encodings.repo import RePo
from tests.positions.claims import DTYPES, shaken
from tests.positions.oracles_of_biases import numerical_gradients
from tests.refusal import refuses
from tests.tolerances import assert_close

HEADS, KV_HEADS, HEAD_DIM, D_MODEL = 4, 2, 6, 16


def made(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return shaken(RePo(HEAD_DIM, KV_HEADS, D_MODEL, **{"width": 3, "base": 50.0, **options})).to(dtype)


def formula(x: np.ndarray, q: np.ndarray, gate: np.ndarray, content: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Li et al. 2025, section 3: a position of every token and head, and RoPE at it; ``heads token head_dim``."""
    gated = x @ gate.T
    place = (gated / (1 + np.exp(-gated)) * (x @ content.T)) @ weight.T
    out, half = np.empty_like(q), HEAD_DIM // 2
    for head, token, pair in np.ndindex(len(q), len(x), half):
        angle = place[token, head // (len(q) // len(weight))] * 50.0 ** (-2 * pair / HEAD_DIM)
        first, second = q[head, token, pair], q[head, token, pair + half]
        out[head, token, pair] = first * np.cos(angle) - second * np.sin(angle)
        out[head, token, pair + half] = first * np.sin(angle) + second * np.cos(angle)
    return out


def test_values_and_gradients_are_those_of_the_formula() -> None:
    """By the hidden states, the queries and every parameter, with a random cotangent."""
    repo, x, q = made(), torch.randn(1, 5, D_MODEL), torch.randn(1, HEADS, 5, HEAD_DIM)
    leaves = {"x": x.requires_grad_(), "q": q.requires_grad_(), **dict(repo.named_parameters())}
    rotated, _ = repo.rotate(q, q, repo.read(x, Positions.after(900, 5)))
    given = {name: (leaf[0] if name in "xq" else leaf).detach().double().numpy() for name, leaf in leaves.items()}
    assert_close(rotated[0].detach(), torch.from_numpy(formula(**given)))
    cotangent = torch.randn(rotated.shape)
    truth = numerical_gradients(formula, given, cotangent[0].double().numpy())
    for name, ours in zip(leaves, torch.autograd.grad(rotated, list(leaves.values()), cotangent), strict=True):
        assert_close(ours[0] if name in "xq" else ours, torch.from_numpy(truth[name]))


def test_repo_unrotates_and_rotates_in_place() -> None:
    repo = made(torch.float64)
    x, y = torch.randn(2, 7, D_MODEL, dtype=torch.float64), torch.randn(2, HEADS, 7, HEAD_DIM, dtype=torch.float64)
    positions = repo.read(x, Positions.arange(7))
    rotated, _ = repo.rotate(y, y, positions)
    assert_close(repo.unrotate(rotated, positions), y)
    q, k = y.clone(), y.clone()
    with torch.no_grad():
        assert repo.rotate(q, k, positions, inplace=True)[0] is q
    assert torch.equal(q, rotated)
    assert torch.equal(k, rotated)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_padded_and_token_by_token_are_alone(dtype: torch.dtype) -> None:
    repo, lengths = made(dtype), [5, 1, 13]
    x, q = torch.randn(1, 22, D_MODEL, dtype=dtype), torch.randn(1, HEADS, 22, HEAD_DIM, dtype=dtype)
    with torch.no_grad():
        whole, _ = repo.rotate(q, q, repo.read(x, Positions.packed([lengths], length=22)))
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            here, _ = repo.rotate(q[:, :, part], q[:, :, part], repo.read(x[:, part], Positions.arange(length)))
            assert torch.equal(whole[:, :, part], here)
            start += length
        for token in range(19):
            part = slice(token, token + 1)
            one, _ = repo.rotate(q[:, :, part], q[:, :, part], repo.read(x[:, part], Positions.after(token, 1)))
            assert torch.equal(whole[:, :, part], one)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "tiled"])
def test_attention_with_repo_is_right_forward_and_every_gradient(backend: Any) -> None:
    """Against float64 attention through the eager backend, of rows that are padded and packed."""
    places = Positions.packed([[7, 1, 9], [4, 11]], length=17)
    shapes = [(2, 17, D_MODEL), (2, HEADS, 17, HEAD_DIM), *[(2, KV_HEADS, 17, HEAD_DIM)] * 2]
    leaves, cotangent = [torch.randn(shape) for shape in shapes], torch.randn(2, HEADS, 17, HEAD_DIM)
    repo = made()

    def through(backend: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        module, (x, q, k, v) = repo.to(dtype), (leaf.to(dtype).requires_grad_() for leaf in leaves)
        read = module.read(x, places)
        y = attend(*module.rotate(q, k, read), v, encoding=module, positions=read, backend=backend)
        return y.detach(), *torch.autograd.grad(y, [x, q, k, v, *module.parameters()], cotangent.to(dtype))

    for ours, expected in zip(through(backend, torch.float32), through("eager", torch.float64), strict=True):
        assert_close(ours, expected, torch.float32)


def test_mistakes_are_named() -> None:
    repo, q = made(), torch.zeros(1, HEADS, 3, HEAD_DIM)
    with refuses(LocantError, "positions = encoding.read(x, positions)", "without the features that RePo reads"):
        repo.rotate(q, q, Positions.arange(3))
    with refuses(ShapeError, f"d_model={D_MODEL}", "x of shape"):
        repo.read(torch.zeros(1, 3, D_MODEL + 1), Positions.arange(3))
    read = repo.read(torch.zeros(1, 3, D_MODEL), Positions.arange(3))
    with refuses(ShapeError, "a multiple of 2 heads"):
        repo.rotate(torch.zeros(1, 3, 3, HEAD_DIM), q, read)
    assert encoding("re-positioning", head_dim=6, num_heads=2, d_model=16).width == 2  # type: ignore[union-attr]
