"""The warnings of `probe`, each with the id of the mistake whose cost was measured in trained models."""

from __future__ import annotations

from typing import NamedTuple

from locant import position_costs

ROUNDING_COSTS = {
    "bfloat16 frequencies": "frequencies-bfloat16",
    "float16 frequencies": "frequencies-float16",
    "positions counted in bfloat16": "positions-bfloat16",
    "positions counted in float16": "positions-float16",
    "bfloat16(position) x bfloat16(frequency)": "product-bfloat16",
    "float16(position) x float16(frequency)": "product-float16",
    "angles rounded to bfloat16": "product-bfloat16",
}
"""The id of the mistake for each rounding that `locant.probing.precision` names."""


class Finding(NamedTuple):
    """A warning, the id of its mistake in `position_costs` if one is known, and whether the problem does harm."""

    text: str
    kind: str | None = None
    harms: bool = True

    @property
    def rank(self) -> float:
        """The sort key."""
        return position_costs.rank(self.kind, self.harms)

    @property
    def matters(self) -> bool:
        """Return whether the problem deserves a warning."""
        return position_costs.matters(self.kind, self.harms)

    def __str__(self) -> str:
        return position_costs.with_cost(self.text, self.kind)
