"""Entry 81: ids, segments and positions that have no row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from locant import InputEmbedding, Learned, Positions, Rotary, SegmentEmbedding, Sinusoidal, TokenEmbedding
from locant.positions.scaling import DynamicNTK, LongRoPE
from tests.known_bugs.exhibit import exhibit

LIMIT = 8


@dataclass(frozen=True)
class Case:
    """Something that has places 0 .. LIMIT - 1, and how it is asked for some of them, which may be others."""

    layer: str
    ask: Callable[[list[list[int]]], Tensor]


def _table(layer: str, module: nn.Module) -> Case:
    return Case(layer, lambda ids: module(torch.tensor(ids)))


def _learned(layer: str, module: Learned) -> Case:
    def ask(places: list[list[int]]) -> Tensor:
        positions = Positions.of(places)
        return module.embed(torch.zeros(positions.batch, positions.seq_len, 4), positions)

    return Case(layer, ask)


def _rotary(layer: str, module: Rotary) -> Case:
    return Case(layer, lambda places: torch.cat(module.cos_sin(Positions.of(places)), dim=-1))


NTK = DynamicNTK(factor=2.0, original_max_seq_len=LIMIT)
LONG = LongRoPE(short_factor=(1.0, 1.0), long_factor=(2.0, 4.0), original_max_seq_len=LIMIT // 2, factor=2.0)

MODEL = InputEmbedding(100, 4, encoding=Learned(LIMIT, 4), num_segments=LIMIT)


def _segments(places: list[list[int]]) -> Tensor:
    segments = torch.tensor(places)
    return MODEL(torch.zeros_like(segments), Positions.arange(segments.shape[1]), segments=segments)


CASES = [
    _table("TokenEmbedding", TokenEmbedding(LIMIT, 4)),
    _table("TokenEmbedding", TokenEmbedding(LIMIT, 4, scale=2.0, padding_idx=0)),
    _table("TokenEmbedding", InputEmbedding(LIMIT, 4, encoding=Sinusoidal(4), num_segments=2)),
    _table("SegmentEmbedding", SegmentEmbedding(LIMIT, 4)),
    Case("SegmentEmbedding", _segments),
    Case("Learned", lambda places: MODEL(torch.zeros_like(torch.tensor(places)), Positions.of(places))),
    _learned("Learned", Learned(LIMIT, 4)),
    _learned("Learned", Learned(LIMIT, 4, offset=2)),  # RoBERTa: 514 rows for 512 positions
    _rotary("DynamicNTK", Rotary(4, scaling=NTK)),
    _rotary("DynamicNTK", Rotary(4, scaling=NTK).for_length(LIMIT)),
    _rotary("LongRoPE", Rotary(4, scaling=LONG).for_length(LIMIT)),
]

BAD = (LIMIT, LIMIT + 1, 2 * LIMIT, 2**31 - 1)


def places(case: Case) -> Iterator[tuple[list[list[int]], int]]:
    """What is asked for, and the first place in it that there is not."""
    for bad in BAD if case.layer in ("DynamicNTK", "LongRoPE") else (*BAD, -1):
        yield [[bad]], bad
        yield [[0, LIMIT - 1, 3], [2, bad, 4 * LIMIT]], bad


def check(case: Case) -> None:
    good = [[0, 1, LIMIT - 1]]
    before = case.ask(good)
    for asked, bad in places(case):
        try:
            case.ask(asked)
        except (ValueError, IndexError) as error:
            said = str(error)
        else:
            raise AssertionError(f"{case.layer} has nothing against {bad}")
        for what in (case.layer, str(bad), str(LIMIT), "try: "):
            assert what in said, f"{case.layer} says {said!r}, without {what!r}"
        assert len(asked) == 1 or "(1, 1)" in said, f"{case.layer} does not say where"
        assert torch.equal(case.ask(good), before), f"{case.layer} is not the same after an error"


class WithOffset(nn.Module):
    """Positions of OPT and RoBERTa as they are usually written: a table with two more rows, and an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(LIMIT + 2, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids + 2)


class OutOfTable(nn.Module):
    """Cosines from a table, which a position past its end reads from the last row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(LIMIT).float()[:, None].cos()

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids.clamp(0, LIMIT - 1)]


@pytest.mark.parametrize("case", CASES, ids=[f"{case.layer}-{i}" for i, case in enumerate(CASES)])
def test_81_the_first_place_that_is_missing_is_named(case: Case) -> None:
    """An id past the end of a table ends in a device-side assert.

    huggingface/transformers#11242, #9116, #10832, #19240, #22359, #24698 and #28104, pytorch/pytorch#72696,
    EleutherAI/gpt-neox#650, microsoft/onnxruntime#27597 and #28214: Ids and positions past the end of a table stop a
    GPU with a device-side assert that names no cause, after which nothing works. In rotary tables the code reads what
    lies behind them.

    Check: `ids.max() < embedding.num_embeddings and positions.max() < max_position_embeddings`.

    Test: ids, segments and positions, with an offset and under scalings that end: the layer, the place, the value, the
    limit; then the next call.
    """
    exhibit(check, case, twin=_table("WithOffset", WithOffset()), because="says 'index out of range in self', without")
    exhibit(check, case, twin=_table("OutOfTable", OutOfTable()), because="OutOfTable has nothing against 8")
