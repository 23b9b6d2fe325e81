"""A NaN or an infinity in one document of a packed row does not change a bit of another document."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from locant import KVCache, PositionEncoding, Positions, attend
from locant.positions import ModelShape
from locant.positions.base import reads_hidden_states
from locant.positions.registry import encodings

LENGTHS, HEADS, HEAD_DIM = (30, 130, 10), 2, 4
"""PaTH multiplies the matrices of 64 tokens, which belong to two documents. A cache moves its keys over 68 of them."""
SHAPE = ModelShape(d_model=HEADS * HEAD_DIM, num_heads=HEADS, max_seq_len=130)
READERS = [name for name, kind in encodings().items() if reads_hidden_states(kind.for_model(SHAPE))]
SPOILED = {"last token": LENGTHS[0] - 1, "early token": 3}


def shaken(name: str) -> PositionEncoding:
    encoding = encodings()[name].for_model(SHAPE)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return encoding


def tokens(n: int) -> dict[str, Tensor]:
    heads = {name: torch.randn(1, HEADS, n, HEAD_DIM) for name in ("q", "k", "v")}
    return {"x": torch.randn(1, n, SHAPE.d_model), **heads}


def spoiled(given: dict[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Each tensor with each odd number at each of two tokens of the first document. The rest is unchanged."""
    for name in ("x", "q", "k"):
        for where, slot in SPOILED.items():
            for odd in (math.nan, math.inf):
                x = given[name].clone()
                x[..., slot, :] = odd
                yield f"{odd} at the {where} of {name}", {**given, name: x}


def results(encoding: PositionEncoding, given: dict[str, Tensor], positions: Positions) -> list[Tensor]:
    """What a model computes of the later documents. Attention is the reference, whose mask multiplies nothing by 0."""
    embedded, places = encoding.embed(given["x"], positions), encoding.read(given["x"], positions)
    q, k = encoding.rotate(given["q"], given["k"], places)
    y = attend(q, k, given["v"], encoding=encoding, positions=places, backend="eager")
    return [embedded[:, LENGTHS[0] :], *(each[:, :, LENGTHS[0] :] for each in (q, k, encoding.unrotate(y, places)))]


@torch.no_grad()
@pytest.mark.parametrize("name", encodings())
def test_odd_numbers_stay_in_their_document(name: str) -> None:
    encoding, given, positions = shaken(name), tokens(sum(LENGTHS)), Positions.packed([LENGTHS])
    expected = results(encoding, given, positions)
    for label, odd in spoiled(given):
        found = results(encoding, odd, positions)
        assert all(map(torch.equal, found, expected)), label


@torch.no_grad()
@pytest.mark.parametrize("settles", [True, False])
@pytest.mark.parametrize("name", READERS)
def test_nor_do_they_leave_it_in_a_cache(name: str, settles: bool) -> None:
    encoding, given, row = shaken(name), tokens(sum(LENGTHS)), Positions.packed([LENGTHS])

    def decoded(given: dict[str, Tensor]) -> Tensor:
        cache, parts = KVCache(encoding=encoding if settles else None), []
        for start in range(0, row.seq_len, 50):
            part = slice(start, min(start + 50, row.seq_len))
            places = encoding.read(given["x"][:, part], row.slice(part.start, part.stop), cache.positions)
            q, k = encoding.rotate(given["q"][:, :, part], given["k"][:, :, part], places)
            k, v, keys = cache.append(k, given["v"][:, :, part], places)
            parts.append(attend(q, k, v, encoding=encoding, positions=places, k_positions=keys, backend="eager"))
        return torch.cat(parts, dim=2)[:, :, LENGTHS[0] :]

    expected = decoded(given)
    for label, odd in spoiled(given):
        assert torch.equal(decoded(odd), expected), label
