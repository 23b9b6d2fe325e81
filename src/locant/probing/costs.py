"""The measured costs of mistakes with positions.

Each number is the increase of the loss of SmolLM2-135M (rotary base 100 000, trained to 8 192 tokens) on Python's
documentation, in nats. We used 4 windows of 2 048 tokens and 2 windows of 8 192. This is one model and one text, so the
order of the mistakes is more reliable than the numbers.
"""

from __future__ import annotations

from typing import NamedTuple

MODEL = "SmolLM2-135M"
SMALL = 1e-3
"""Changes of the loss up to this size do not count as a cost."""


class Cost(NamedTuple):
    """The nats by which a mistake raised the loss in windows of two lengths, or ``None`` if not measured."""

    mistake: str
    at_2048: float
    at_8192: float | None

    @property
    def worst(self) -> float:
        """The larger of the two costs."""
        return max(self.at_2048, self.at_8192 or 0.0)

    def __str__(self) -> str:
        """Return one sentence on how much the mistake matters, with the evidence."""
        if self.worst <= SMALL:
            return (
                f"This hardly matters up to 8,192 tokens: {self.mistake} changed the loss of one measured model, "
                f"{MODEL}, by less than {SMALL} nats in windows of 2,048 and of 8,192 tokens, its trained length."
            )
        rises = {2048: self.at_2048, 8192: self.at_8192}
        parts = [f"by {nats:.2f} nats in windows of {length:,} tokens" for length, nats in rises.items() if nats]
        parts += [] if self.at_2048 > SMALL else ["not at all in windows of 2,048"]
        matters = "This matters" if self.at_2048 > SMALL else "This matters in long texts"
        return f"{matters}: {self.mistake} raised the loss of one measured model, {MODEL}, {' and '.join(parts)}."


COSTS = {
    "narrow frequencies": Cost("frequencies in bfloat16 or float16", 0.0, 0.0),
    "narrow tables": Cost("cosines and sines in bfloat16", 0.0, 0.0),
    "positions in float16": Cost("positions counted in float16", 0.0, 0.77),
    "base": Cost("a base of 10,000 instead of 100,000", 0.15, 4.60),
    "attention factor": Cost("an attention factor of 1.2 instead of 1", 0.21, 0.26),
    "pairs not rotated": Cost("leaving half of the pairs unrotated", 0.89, 2.22),
    "positions in bfloat16": Cost("positions counted in bfloat16", 1.02, 1.95),
    "product in bfloat16": Cost("position x frequency in bfloat16", 1.09, 1.98),
    "restarts": Cost("counting from 0 again at position 1,024", 1.41, None),
    "linear scaling": Cost("linear scaling by 4 that it was not trained with", 2.13, None),
}

ROUNDING_COSTS = {
    "bfloat16 frequencies": "narrow frequencies",
    "float16 frequencies": "narrow frequencies",
    "positions counted in bfloat16": "positions in bfloat16",
    "positions counted in float16": "positions in float16",
    "bfloat16(position) x bfloat16(frequency)": "product in bfloat16",
    "angles rounded to bfloat16": "product in bfloat16",
}
"""The key in `COSTS` for each rounding that `locant.probing.precision` names."""


class Finding(NamedTuple):
    """A warning, the key of its cost if the cost was measured, and whether the problem does harm."""

    text: str
    cost: str | None = None
    harms: bool = True

    @property
    def rank(self) -> float:
        """The sort key. Harm without a measured cost comes first, then the highest cost. Notes come last."""
        if self.cost is None:
            return -float("inf") if self.harms else 0.0
        return -COSTS[self.cost].worst

    @property
    def matters(self) -> bool:
        """Whether the problem deserves a warning: it has a measured cost, or it does harm and was not measured."""
        return self.harms if self.cost is None else COSTS[self.cost].worst > SMALL

    def __str__(self) -> str:
        return self.text if self.cost is None else f"{self.text} {COSTS[self.cost]}"
