"""A mistake in a batch, as a sentence and as data; and a batch as the checks read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from locant.engines.batches.model import ModelFacts
from locant.positions.batches import BOUNDARIES

NO_TARGET = -100


class Finding(str):
    """A sentence that says what is wrong with a batch, where, and what to do; and the same as data.

    Args:
        check: the kind of mistake, a name for programs.
        wrong: what is wrong, with its place.
        remedy: what to do.
        row: the row of the batch, if it is one.
        token: the token of the row, if it is one.
    """

    check: str
    remedy: str
    row: int | None
    token: int | None

    def __new__(cls, check: str, wrong: str, remedy: str, row: int | None = None, token: int | None = None) -> Finding:
        finding = super().__new__(cls, f"{wrong}; {remedy}")
        finding.check, finding.remedy, finding.row, finding.token = check, remedy, row, token
        return finding

    def __reduce__(self) -> tuple[Any, ...]:
        wrong = str(self)[: -len(self.remedy) - 2]
        return Finding, (self.check, wrong, self.remedy, self.row, self.token)

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        return {
            "check": self.check, "message": str(self), "remedy": self.remedy, "row": self.row, "token": self.token,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch as it was read, each tensor with a row for each row of it.

    Args:
        given: tensors by name.
        shape: rows and tokens.
        text: ids in which documents are found; ``None``: there are none.
        index: ids of every axis, ``rows tokens`` or ``rows tokens axes``.
        real: which tokens are no padding.
        visible: which key each query sees, of a mask of four axes.
        facts: about the model.
    """

    given: Mapping[str, Tensor]
    shape: torch.Size
    text: Int[Tensor, "rows tokens"] | None
    index: Tensor | None
    real: Bool[Tensor, "rows tokens"]
    visible: Bool[Tensor, "rows queries keys"] | None
    facts: ModelFacts

    @property
    def has_mask(self) -> bool:
        return "attention_mask" in self.given

    @property
    def has_padding_mask(self) -> bool:
        """Whether there is a mask of two axes."""
        return self.has_mask and self.visible is None

    @property
    def has_boundaries(self) -> bool:
        return any(name in self.given for name in BOUNDARIES)


def place_of(where: Bool[Tensor, "*places"]) -> tuple[int, ...] | None:
    """The first place that is marked, as a number on each axis."""
    if not bool(where.any()):
        return None
    first = where.flatten().byte().argmax()  # of large masks, all places at once would take long
    return tuple(int(number) for number in torch.unravel_index(first, where.shape))


def at(row: int, token: int) -> str:
    """The place of a token, for a sentence."""
    return f"at token {token:,} of row {row:,}"
