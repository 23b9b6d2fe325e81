"""An index of one axis is the same index however it is written: ``batch seq`` or ``batch seq 1``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locant import InputEmbedding, Learned, PositionEncoding, Positions, Rotary, Sinusoidal, attend
from locant.positions import ModelShape
from locant.positions.registry import find

BATCH, HEADS, LENGTH, DIM = 3, 2, 3, 8  # as many rows as tokens: what is broadcast then fits, and is wrong
NAMES = (
    "nope", "sinusoidal", "learned", "rotary", "xpos", "alibi", "t5", "kerple", "fire", "sandwich", "cope", "shaw",
    "transformer_xl", "deberta",
)  # fmt: skip
SHAPE = ModelShape(d_model=DIM, num_heads=HEADS, head_dim=DIM, max_seq_len=20)


def spellings() -> list[tuple[Positions, Positions]]:
    index = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
    return [
        (Positions.grid(LENGTH), Positions.arange(LENGTH)),
        (Positions.of(index[:1, :, None]), Positions.of(index[:1])),
        (Positions.of(index[:, :, None]), Positions.of(index)),
        (Positions.cat([Positions.grid(2), Positions.grid(1)]), Positions.of([0, 1, 0], order=[0, 1, 2])),
    ]


def doors(encoding: PositionEncoding, q: Tensor, k: Tensor, positions: Positions) -> list[Tensor | None]:
    score_mod = encoding.score_mod(q, k, positions)
    slots = torch.meshgrid(*(torch.arange(n) for n in (BATCH, HEADS, LENGTH, LENGTH)), indexing="ij")
    return [
        encoding.embed(q[:, 0], positions),
        *encoding.rotate(q, k, positions),
        *encoding.rotate(q, k, positions, positions),
        encoding.bias(q, k, positions),
        None if score_mod is None else score_mod(torch.zeros(slots[0].shape), *slots),
        attend(q, k, k, encoding=encoding, positions=positions),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_door_of_every_encoding_takes_it(name: str) -> None:
    encoding = find(name).for_model(SHAPE)
    for parameter in encoding.parameters():
        nn.init.normal_(parameter)
    q, k = torch.randn(2, BATCH, HEADS, LENGTH, DIM)
    for with_axis, without in spellings():
        for found, expected in zip(doors(encoding, q, k, with_axis), doors(encoding, q, k, without), strict=True):
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                assert found.shape == expected.shape
                assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", ["plain", "fused", "auto"])
@pytest.mark.parametrize("encoding", [Learned(20, DIM), Sinusoidal(DIM), Learned(20, DIM, offset=2)], ids=str)
def test_input_embeddings_take_it(encoding: PositionEncoding, backend: Any) -> None:
    embedding = InputEmbedding(11, DIM, encoding=encoding, backend=backend)
    ids = torch.randint(11, (BATCH, LENGTH))
    for with_axis, without in spellings():
        assert torch.equal(embedding(ids, with_axis), embedding(ids, without))


def test_a_rotary_of_one_section_takes_it() -> None:
    q, k = torch.randn(2, BATCH, HEADS, LENGTH, DIM)
    for with_axis, without in spellings():
        ours, expected = Rotary(DIM, sections=(4,)).rotate(q, k, with_axis), Rotary(DIM).rotate(q, k, without)
        for x, other in zip(ours, expected, strict=True):
            assert torch.equal(x, other)
