"""`probe` names vectors that are added to tokens by position: which table, along which axis, up to which position."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import locant
from locant import InputError, Rotary, Sinusoidal
from locant.probing.addition import AdditionReport
from locant.probing.report import RotationReport
from tests.refusal import refuses

WIDTH, ROWS = 32, 200


def table(base: float = 10_000.0, rows: int = ROWS, width: int = WIDTH, layout: str = "interleaved") -> Tensor:
    """The paper's formula."""
    angle = torch.outer(torch.arange(rows).double(), base ** -(torch.arange(0, width, 2).double() / width))
    both = [angle.sin(), angle.cos()]
    return (torch.stack(both, -1).flatten(-2) if layout == "interleaved" else torch.cat(both, -1)).float()


class SequenceFirst(nn.Module):
    """The module of PyTorch's tutorial on language models: tokens are ``[seq, batch, dim]``."""

    def __init__(self, dropout: float = 0.1, width: int = WIDTH) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pe", table(width=width)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.pe[: x.size(0)])


class BatchFirst(SequenceFirst):
    """The same for tokens ``[batch, seq, dim]``."""

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.pe[: x.size(1), 0])


class Scaled(BatchFirst):
    """Tokens are multiplied by the root of their width first."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * math.sqrt(WIDTH))


class Learned(nn.Module):
    """A table of parameters, which knows the positions it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(ROWS, WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.rows(positions)


class OfAllRows(nn.Module):
    """A vision transformer's: sequences are as long as the table, and of a width that is not tried for heads."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.rand(1, 50, 36, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rows


WRITTEN: dict[str, tuple[Any, Sinusoidal | None, str, int, str]] = {
    "sequence first": (
        SequenceFirst().eval(), Sinusoidal(WIDTH), "from 0 along axis 0: tokens are [seq, batch, dim]", ROWS - 1,
        "counts along the batch"),
    "batch first": (
        BatchFirst().eval(), Sinusoidal(WIDTH), "from 0 along axis 1: tokens are [batch, seq, dim]", ROWS - 1, ""),
    "scaled": (Scaled().eval(), Sinusoidal(WIDTH), "the square root of the width 32", ROWS - 1, ""),
    "wide": (BatchFirst(width=512).eval(), Sinusoidal(512), "layout interleaved", ROWS - 1, ""),
    "halves": (
        lambda x: x + table(500.0, x.shape[-2], x.shape[-1], "half"), Sinusoidal(64, base=500.0, layout="half"),
        "base 500", 2**16 - 1, ""),
    "heads behind": (
        lambda x: x + table(rows=x.shape[1], width=64)[:, None] if x.ndim == 4 else 0, Sinusoidal(64),
        "tokens are [batch, seq, heads, dim]", 2**16 - 1, ""),
    "learned, told positions": (Learned(), None, "It takes positions of tokens along axis 1", ROWS - 1, ""),
    "a table": (nn.Embedding(ROWS, WIDTH), None, "another table", ROWS - 1, ""),
    "of one length": (OfAllRows(), None, "f(x) of exactly 50 tokens", 49, ""),
    "an encoding": (
        Sinusoidal(WIDTH, layout="half", offset=2, first="cosine", scale=0.5),
        Sinusoidal(WIDTH, layout="half", offset=2, first="cosine", scale=0.5), "axis 1", 2**31 - 1, ""),
}  # fmt: skip


@pytest.mark.parametrize("written", WRITTEN)
def test_an_addition_is_named(written: str) -> None:
    target, encoding, fact, last, warned = WRITTEN[written]
    report = locant.probe(target)
    assert isinstance(report, AdditionReport)
    assert repr(report.encoding) == repr(encoding)
    assert report.last == last
    text = str(report)
    assert "It adds a vector to each token" in text
    assert fact in text
    assert len(report.warnings) == bool(warned)
    assert warned in " ".join(report.warnings)
    assert report.to_dict()["encoding"] == (None if encoding is None else repr(encoding))


def test_what_was_expected_is_compared() -> None:
    module = BatchFirst().eval()
    assert locant.probe(module, expected=Sinusoidal(WIDTH)).warnings == ()
    assert "differ from position 1 on" in " ".join(
        locant.probe(module, expected=Sinusoidal(WIDTH, base=500.0)).warnings
    )
    assert "adds vectors to tokens" in " ".join(locant.probe(module, expected=Rotary(WIDTH)).warnings)


def test_a_table_that_goes_wrong_far_away_is_warned_of() -> None:
    def restarts(x: Tensor) -> Tensor:
        return x + table(rows=100, width=64)[torch.arange(x.shape[-2]) % 100]

    (warning,) = locant.probe(restarts).warnings
    assert "of the sinusoidal table up to position 61, but up to position 4,096 they are up to" in warning


def test_active_dropout_is_named() -> None:
    with refuses(InputError, "dropout is active, because it is in training mode", ".eval()"):
        locant.probe(SequenceFirst())


def test_a_rotation_is_no_addition() -> None:
    assert isinstance(locant.probe(lambda x, positions: x * positions.cos()[..., None], head_dim=8), RotationReport)
