"""The data types of the checks: `Finding`, a mistake in a batch, and `Batch`, the input of all checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from locant import position_costs
from locant.engines.batches.model import ModelFacts
from locant.positions.batches import BOUNDARIES

NO_TARGET = -100


class Finding(str):
    """A mistake in a batch, as a sentence with the mistake, its place and the remedy. The parts are also attributes.

    Args:
        check: the kind of mistake, as a name for programs.
        wrong: the mistake and its place.
        remedy: what to do.
        row: the row of the batch, if the mistake is in one row.
        token: the token of the row, if the mistake is at one token.
        kind: the id of such a mistake in `locant.position_costs`, whose cost the sentence has then, or ``None``.
    """

    check: str
    wrong: str
    remedy: str
    row: int | None
    token: int | None
    kind: str | None

    def __new__(
        cls, check: str, wrong: str, remedy: str, row: int | None = None, token: int | None = None,
        kind: str | None = None,
    ) -> Finding:  # fmt: skip
        cost = position_costs.with_cost("", kind).rstrip(".")
        finding = super().__new__(cls, f"{wrong}; {remedy}" + (cost and f".{cost}"))
        finding.check, finding.wrong, finding.remedy = check, wrong, remedy
        finding.row, finding.token, finding.kind = row, token, kind
        return finding

    def __reduce__(self) -> tuple[Any, ...]:
        return Finding, (self.check, self.wrong, self.remedy, self.row, self.token, self.kind)

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return {
            "check": self.check, "message": str(self), "remedy": self.remedy, "row": self.row, "token": self.token,
            "kind": self.kind,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The input of all checks.

    Args:
        tensors: its tensors by name, with one row for each row of the batch.
        shape: the numbers of rows and tokens.
        text: the ids in which models look for documents, or ``None``.
        index: the ids of all axes, ``rows tokens`` or ``rows tokens axes``.
        real: whether each token is not padding.
        visible: whether each query sees each key, if the mask has four axes.
        facts: facts about the model.
    """

    tensors: Mapping[str, Tensor]
    shape: torch.Size
    text: Int[Tensor, "rows tokens"] | None
    index: Tensor | None
    real: Bool[Tensor, "rows tokens"]
    visible: Bool[Tensor, "rows queries keys"] | None
    facts: ModelFacts

    @property
    def has_mask(self) -> bool:
        return "attention_mask" in self.tensors

    @property
    def has_padding_mask(self) -> bool:
        """Return whether there is a mask of two axes."""
        return self.has_mask and self.visible is None

    @property
    def has_boundaries(self) -> bool:
        return any(name in self.tensors for name in BOUNDARIES)


def first_place(where: Bool[Tensor, "*places"]) -> tuple[int, ...] | None:
    """Return the first place that is true, as a number on each axis, or ``None``."""
    if not bool(where.any()):
        return None
    first = where.flatten().byte().argmax()  # nonzero() of a large mask would be slow
    return tuple(int(number) for number in torch.unravel_index(first, where.shape))


def at(row: int, token: int) -> str:
    """Return the place of a token, for a sentence."""
    return f"at token {token:,} of row {row:,}"
