"""RoPE++: real and imaginary scores are those of complex numbers, forward and by every gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from locant import LocantError, Positions, RangeError, Rotary, attend
from locant.positions import RoPEPlusPlus
from tests.refusal import refuses
from tests.tolerances import assert_close

HEADS, KV_HEADS, WIDTH = 4, 2, 6
WHERE = Positions.of([[0, 1, 2, 5, 9, 30, 400]])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_heads_are_real_and_imaginary_parts_of_one_complex_score(layout: str) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(1, heads, 7, WIDTH, dtype=torch.float64, requires_grad=True) for heads in (HEADS, KV_HEADS))
    rotated, keys = RoPEPlusPlus(Rotary(WIDTH, layout=layout)).rotate(q, k, WHERE)  # type: ignore[arg-type]
    ours = rotated @ keys.repeat_interleave(2 * HEADS // KV_HEADS, dim=1).mT
    cotangent = torch.randn_like(ours)
    gradients = torch.autograd.grad(ours, (q, k), cotangent)

    def members(x: torch.Tensor) -> np.ndarray:
        pairs = x.detach().numpy()
        pairs = (
            np.stack([pairs[..., :3], pairs[..., 3:]], -1) if layout == "half" else pairs.reshape(*x.shape[:3], 3, 2)
        )
        return pairs[..., 0] + 1j * pairs[..., 1]

    def flat(z: np.ndarray) -> torch.Tensor:
        parts = [z.real, z.imag]
        return torch.from_numpy(
            np.concatenate(parts, -1) if layout == "half" else np.stack(parts, -1).reshape(1, -1, 7, 6)
        )

    index = WHERE.index[0].numpy()
    turn = np.exp(1j * (index[:, None] - index)[..., None] * 10_000.0 ** (-2 * np.arange(3) / WIDTH))
    complex_q, complex_k = members(q), members(k).repeat(2, axis=1)
    score = np.einsum("bhnp,bhmp,nmp->bhnm", complex_q, complex_k.conj(), turn)
    expected = np.stack([score.real, score.imag], axis=2).reshape(1, 2 * HEADS, 7, 7)
    assert_close(ours.detach(), torch.from_numpy(expected), torch.float64)
    real, imaginary = cotangent.numpy().reshape(1, HEADS, 2, 7, 7).transpose(2, 0, 1, 3, 4)
    weight = real + 1j * imaginary
    by_q = np.einsum("bhnm,bhmp,nmp->bhnp", weight, complex_k, turn.conj())
    by_k = np.einsum("bhnm,bhnp,nmp->bhmp", weight.conj(), complex_q, turn).reshape(1, KV_HEADS, 2, 7, 3).sum(2)
    assert_close(gradients[0], flat(by_q), torch.float64)
    assert_close(gradients[1], flat(by_k), torch.float64)


def test_attention_has_an_output_for_both() -> None:
    encoding, (q, k) = RoPEPlusPlus(Rotary(WIDTH)), (torch.randn(1, heads, 7, WIDTH) for heads in (HEADS, KV_HEADS))
    rotated, keys = encoding.rotate(q, k, WHERE)
    assert attend(rotated, keys, k, encoding=encoding, positions=WHERE).shape == (1, 2 * HEADS, 7, WIDTH)


def test_mistakes_are_named() -> None:
    q = torch.zeros(1, 2, 7, WIDTH)
    with refuses(LocantError, "inplace", "rotate(q, k, positions)"):
        RoPEPlusPlus(Rotary(WIDTH)).rotate(q, q, WHERE, inplace=True)
    with refuses(RangeError, "rotary", "RoPEPlusPlus("):
        RoPEPlusPlus(64)  # type: ignore[arg-type]
