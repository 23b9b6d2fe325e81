"""Every encoding that adds to the scores of attention, ready for use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from locant import ALiBi, PositionEncoding, T5Bias
from locant.positions.encodings.cope import Cope
from locant.positions.encodings.deberta import Deberta
from locant.positions.encodings.fire import Fire
from locant.positions.encodings.kerple import Kerple
from locant.positions.encodings.sandwich import Sandwich
from locant.positions.encodings.shaw import Shaw
from locant.positions.encodings.transformer_xl import TransformerXL
from tests.known_bugs.subjects import HEADS, WIDTH

__all__ = ["BIASES", "OF_DISTANCE", "PER_HEAD", "built"]

Build = Callable[..., PositionEncoding]

BIASES: dict[str, Build] = {
    "alibi": ALiBi,
    "alibi learned": lambda heads, **options: ALiBi(heads, learned=True, **options),
    "t5": T5Bias,
    "t5 bidirectional": lambda heads, **options: T5Bias(heads, bidirectional=True, **options),
    "kerple": Kerple,
    "kerple power": lambda heads, **options: Kerple(heads, "power", **options),
    "sandwich": Sandwich,
    "fire": Fire,
    "transformer_xl": lambda heads, **options: TransformerXL(heads, heads * WIDTH, **options),
    "deberta": lambda heads, **options: Deberta(heads, WIDTH, **options),
    "shaw": lambda heads, **options: Shaw(WIDTH, **options),
    "cope": lambda heads, **options: Cope(WIDTH, **options),
}
OF_DISTANCE = [name for name in BIASES if name not in ("fire", "transformer_xl", "deberta", "shaw", "cope")]
"""Those that depend on the distance alone; FIRE's depends on how far the query is into its document as well."""

PER_HEAD = [name for name in BIASES if name not in ("shaw", "cope")]
"""Those with something per head; the tables of the others are shared by all heads."""


def built(name: str, heads: int = HEADS, **options: Any) -> PositionEncoding:
    torch.manual_seed(0)
    encoding = BIASES[name](heads, **options)
    with torch.no_grad():
        for parameter in encoding.parameters():
            if not parameter.any():  # begins as zeros, as the table of CoPE and the offsets of projections do
                parameter.add_(0.5 if name in PER_HEAD else torch.arange(parameter.numel()).view_as(parameter) % 5)
    return encoding
