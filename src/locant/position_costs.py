"""The measured costs of mistakes with positions, for the warnings of `probe` and `check_batch`.

The numbers are those of ``make real``: the increase of the loss of two trained models, in nats, if they read a text
with a mistake. `benchmarks/real_models/bugs.py` has each mistake, under the id that a warning has here. Two models and
two texts are few, so the order of the mistakes is more reliable than the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

PLACES = (Path(__file__).parent / "report" / "results", Path(__file__).parents[2] / "benchmarks" / "results")
"""The folders of results in an installed package and in a checkout."""
FILE = Path("real_models") / "bugs.json"
SMALL = 5e-3
"""Changes of the loss up to this size do not count as a cost, in nats."""
USUAL = 2048
"""The length at which costs are compared first."""


class Cost(NamedTuple):
    """The cost of a mistake.

    Args:
        mistake: the mistake, as a clause.
        nats: the increase of the loss by the title of a model and the length of the text.
    """

    mistake: str
    nats: Mapping[str, Mapping[int, float]]

    @property
    def worst(self) -> float:
        """The largest cost."""
        return max(cost for by_length in self.nats.values() for cost in by_length.values())

    @property
    def matters(self) -> bool:
        """Return whether any cost is larger than `SMALL`."""
        return self.worst > SMALL

    def __str__(self) -> str:
        """Return one sentence on how much the mistake matters, with the evidence."""
        if not self.matters:
            titles: dict[int, list[str]] = {}
            for title, by_length in self.nats.items():
                titles.setdefault(max(by_length), []).append(title)
            where = " and ".join(f"up to {length:,} tokens in {' and '.join(of)}" for length, of in titles.items())
            return f"This hardly matters: if {self.mistake}, the loss rises by less than {SMALL} nats {where}."
        parts = [_rises(by_length, title) for title, by_length in self.nats.items()]
        return f"This matters: if {self.mistake}, the loss rises {', and '.join(parts)}."


def _rises(by_length: Mapping[int, float], title: str) -> str:
    """Return the costs at the usual and at the longest length of one model.

    >>> _rises({512: 0.1, 2048: 1.0249, 8192: 1.95}, "SmolLM2")
    'by 1.02 nats at 2,048 tokens and 1.95 at 8,192 in SmolLM2'
    """
    lengths = sorted({min(by_length, key=lambda length: abs(length - USUAL)), max(by_length)})
    words = (" nats at {:,} tokens", " at {:,}")
    parts = [f"{max(by_length[at], 0):.2f}{word.format(at)}" for at, word in zip(lengths, words, strict=False)]
    return f"by {' and '.join(parts)} in {title}"


@cache
def costs() -> Mapping[str, Cost]:
    """Return the cost of each mistake that was measured. The result is empty if this copy has no measurements."""
    file = next((place / FILE for place in PLACES if (place / FILE).is_file()), None)
    if file is None:
        return {}
    record = json.loads(file.read_text(encoding="utf-8"))
    titles = {model: facts["title"] for model, facts in record["weights"].items()}
    return {
        kind: Cost(
            row["sentence"],
            {
                titles[model]: {int(length): each["cost"] for length, each in by_length.items()}
                for model, by_length in row["costs"].items()
            },
        )
        for kind, row in record.get("summary", {"rows": {}})["rows"].items() if row["costs"]
    }  # fmt: skip


def rank(kind: str | None, harms: bool = True) -> float:
    """Return the sort key of a warning: first harm without a measured cost, then the highest cost, and notes last.

    Args:
        kind: the id of the mistake, or ``None`` if no measured mistake is like it.
        harms: whether a mistake that was not measured does harm.
    """
    cost = None if kind is None else costs().get(kind)
    if cost is None:
        return -float("inf") if harms else 0.0
    return -cost.worst


def matters(kind: str | None, harms: bool = True) -> bool:
    """Return whether a warning deserves its name, because of harm that was not measured or of a measured cost."""
    cost = None if kind is None else costs().get(kind)
    return harms if cost is None else cost.matters


def with_cost(text: str, kind: str | None) -> str:
    """Return a warning with the sentence on its cost, if it was measured."""
    cost = None if kind is None else costs().get(kind)
    return text if cost is None else f"{text} {cost}"
