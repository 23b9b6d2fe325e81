"""The encodings of papers on the page for authors: each against its formula in NumPy, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from locant import PositionEncoding, Positions, attend
from locant.positions.encodings.selective_rope import RunningAngles
from tests.house.test_documentation import EXTENDING, blocks, run
from tests.positions.claims import shaken
from tests.positions.oracles_of_biases import numerical_gradients
from tests.tolerances import assert_close

HEADS, HEAD_DIM, D_MODEL, LENGTH = 2, 6, 5, 7


def example(name: str) -> Any:
    return getattr(run(next(code for code, _ in blocks(EXTENDING) if f"class {name}(" in code)), name)


def turned(q: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Queries, ``heads token head_dim``, rotated by the sums of steps, ``token heads pairs``."""
    half = q.shape[-1] // 2
    rotated = (q[..., :half] + 1j * q[..., half:]) * np.exp(1j * steps.cumsum(0).swapaxes(0, 1))
    return np.concatenate([rotated.real, rotated.imag], -1)


def carope(x: np.ndarray, q: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Veisi et al. 2025: the angle of pair i grows by the i-th power of a bounded number of each head."""
    number = 1 / (1 + np.logaddexp(0, x @ weight.T))
    return turned(q, np.stack([number**i for i in range(1, HEAD_DIM // 2 + 1)], -1))


def mamba3(x: np.ndarray, q: np.ndarray, **given: np.ndarray) -> np.ndarray:
    """Lahoti et al. 2026, and the authors' kernel: tanh of an angle of each pair, times pi, times the step size."""
    angle = np.tanh(x @ given["angle.weight"].T)
    size = np.logaddexp(0, x @ given["step.weight"].T + given["step.bias"])
    return turned(q, np.pi * size[:, :, None] * angle[:, None])


@pytest.mark.parametrize(("name", "formula"), [("CARoPE", carope), ("Mamba3Angles", mamba3)])
def test_a_running_sum_is_that_of_the_paper(name: str, formula: Callable[..., np.ndarray]) -> None:
    encoding: RunningAngles = example(name)(head_dim=HEAD_DIM, num_heads=HEADS, d_model=D_MODEL)
    shaken(encoding)
    x, q = torch.randn(1, LENGTH, D_MODEL), torch.randn(1, HEADS, LENGTH, HEAD_DIM)
    leaves = {"x": x.requires_grad_(), "q": q.requires_grad_(), **dict(encoding.named_parameters())}
    rotated = encoding.rotate_one(q, encoding.read(x, Positions.arange(LENGTH)))
    given = {key: (leaf[0] if key in "xq" else leaf).detach().double().numpy() for key, leaf in leaves.items()}
    assert_close(rotated[0].detach(), torch.from_numpy(formula(**given)))
    cotangent = torch.randn(rotated.shape)
    truth = numerical_gradients(formula, given, cotangent[0].double().numpy())
    for key, ours in zip(leaves, torch.autograd.grad(rotated, list(leaves.values()), cotangent), strict=True):
        assert_close(ours[0] if key in "xq" else ours, torch.from_numpy(truth[key]))
    with torch.no_grad():  # in two steps, with the bits of the whole row
        first = encoding.read(x[:, :4], Positions.arange(4))
        second = encoding.read(x[:, 4:], Positions.after(4, 3), first)
        assert torch.equal(encoding.rotate_one(q[:, :, 4:], second), rotated[:, :, 4:])


def test_hope_rotates_the_pairs_that_complete_a_turn() -> None:
    hope = run(next(code for code, _ in blocks(EXTENDING) if "hope = " in code)).hope
    frequencies = 10_000.0 ** (-np.arange(32) / 32)
    expected = np.where(frequencies >= 2 * np.pi / 2_048, frequencies, 0.0)
    assert_close(hope.inv_freq.double(), torch.from_numpy(expected), torch.float32)


def dape(q: np.ndarray, k: np.ndarray, v: np.ndarray, **given: np.ndarray) -> np.ndarray:
    """Zheng et al. 2024: causal attention with scores, a bias (ALiBi), and an MLP of both."""
    scores = np.einsum("hid,hjd->hij", q, k) / np.sqrt(q.shape[-1])
    distance = np.abs(np.subtract.outer(np.arange(q.shape[1]), np.arange(q.shape[1])))
    slopes = 2.0 ** (-8 * np.arange(1, len(q) + 1) / len(q))
    bias = -slopes[:, None, None] * distance
    hidden = np.moveaxis(np.concatenate([scores, bias]), 0, -1) @ given["mlp.0.weight"].T + given["mlp.0.bias"]
    hidden = np.where(hidden > 0, hidden, 0.01 * hidden)
    total = scores + bias + np.moveaxis(hidden @ given["mlp.2.weight"].T + given["mlp.2.bias"], -1, 0)
    weights = np.exp(np.where(np.tri(q.shape[1], dtype=bool), total, -np.inf))
    return weights / weights.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("backend", ["eager", "sdpa", "tiled"])
def test_dape_is_that_of_the_paper(backend: Any) -> None:
    encoding: PositionEncoding = example("DAPE")(num_heads=HEADS, hidden=3)
    leaves: dict[str, Tensor] = {name: torch.randn(1, HEADS, 5, HEAD_DIM, requires_grad=True) for name in "qkv"}
    q, k, v = leaves.values()
    leaves |= dict(encoding.named_parameters())
    y = attend(q, k, v, encoding=encoding, positions=Positions.arange(5), backend=backend)
    given = {key: (leaf[0] if key in "qkv" else leaf).detach().double().numpy() for key, leaf in leaves.items()}
    assert_close(y[0].detach(), torch.from_numpy(dape(**given)))
    cotangent = torch.randn(y.shape)
    truth = numerical_gradients(dape, given, cotangent[0].double().numpy())
    for key, ours in zip(leaves, torch.autograd.grad(y, list(leaves.values()), cotangent), strict=True):
        assert_close(ours[0] if key in "qkv" else ours, torch.from_numpy(truth[key]))


def expm(skew: np.ndarray) -> np.ndarray:
    """The exponential of a skew-symmetric matrix, by the eigenvalues of a Hermitian one."""
    values, vectors = np.linalg.eigh(1j * skew)
    return (vectors * np.exp(-1j * values) @ vectors.conj().T).real


def liere(q: np.ndarray, generator: np.ndarray) -> np.ndarray:
    """Ostmeier et al. 2025: exp of the sum of coordinates times skew-symmetric matrices, for an image of 2 x 3."""
    skew = np.triu(generator, 1) - np.swapaxes(np.triu(generator, 1), 1, 2)
    places = [(row, column) for row in range(2) for column in range(3)]
    return np.stack([q[:, i] @ expm(row * skew[0] + column * skew[1]).T for i, (row, column) in enumerate(places)], 1)


def test_liere_is_that_of_the_paper() -> None:
    encoding = example("LieRE")(head_dim=HEAD_DIM)
    q, generator = torch.randn(1, HEADS, 6, HEAD_DIM, requires_grad=True), encoding.generator
    rotated, _ = encoding.rotate(q, q, Positions.grid(2, 3))
    given = {"q": q[0].detach().double().numpy(), "generator": generator.detach().double().numpy()}
    assert_close(rotated[0].detach(), torch.from_numpy(liere(**given)))
    cotangent = torch.randn(rotated.shape)
    truth = numerical_gradients(liere, given, cotangent[0].double().numpy())
    of_q, of_generator = torch.autograd.grad(rotated, [q, generator], cotangent)
    assert_close(of_q[0], torch.from_numpy(truth["q"]))
    assert_close(of_generator, torch.from_numpy(truth["generator"]))
