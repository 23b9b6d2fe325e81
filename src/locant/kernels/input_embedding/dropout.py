"""Which entries dropout leaves on a CPU: what follows from a seed, for whichever kernel asks.

16 random bits of each entry are compared with a limit. That of a token is drawn between the two whole numbers next to
``p * 2**16``, so that the probability of each entry is p to the last bit of a float64. Bits are drawn for some hundred
tokens, then their limits, and so on; where these parts are cut depends on the shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int16
from torch import Tensor

from locant.kernels.input_embedding.reference import Operands

__all__ = ["Drawn", "draw", "kept"]

PART = 393_216
"""Entries in one part: 512 tokens of width 768."""


class Drawn(NamedTuple):
    """An entry is dropped if its bits are below the limit of its token."""

    bits: Int16[Tensor, " places"]
    limits: Int16[Tensor, " tokens"]
    of_group: int
    """Tokens that parts are cut from: some whole rows of the batch, or one."""
    of_part: int
    group_step: int
    """How far in `bits` from one group to the next, and from one part to the next."""
    part_step: int

    def parts(self) -> Iterator[tuple[slice, int]]:
        """The tokens of each part, and where its bits begin."""
        tokens = len(self.limits)
        for group, start in enumerate(range(0, tokens, self.of_group)):
            last = min(start + self.of_group, tokens)
            for part, first in enumerate(range(start, last, self.of_part)):
                place = group * self.group_step + part * self.part_step
                yield slice(first, min(first + self.of_part, last)), place


def draw(o: Operands, seed: Tensor) -> Drawn:
    """What follows from the seed; memory of the size of the result in 16 bits."""
    seq_len, width, tokens = o.ids.shape[1], o.width, o.num_tokens
    fit = max(PART // max(width, 1), 1)
    of_group = of_part = max(fit // max(seq_len, 1) * seq_len, 1)
    if fit < seq_len:
        of_group, of_part = seq_len, fit
    part_step, rest = _words(of_part * width), _words(of_group % of_part * width)
    group_step = of_group // of_part * part_step + rest
    places = tokens // of_group * group_step + _words(tokens % of_group * width)
    bits, limits = torch.empty(places, dtype=torch.int16), torch.empty(tokens, dtype=torch.int16)
    drawn = Drawn(bits, limits, of_group, of_part, group_step, part_step)
    generator = torch.Generator().manual_seed(int(seed))
    whole = int(o.p * 2**16)
    for part, place in drawn.parts():
        count = part.stop - part.start
        some = bits[place : place + _words(count * width)]
        some.view(torch.int64).random_(-(2**63), None, generator=generator)
        one_more = torch.rand(count, dtype=torch.float64, generator=generator) < o.p * 2**16 - whole
        limits[part] = (one_more + (whole - 2**15)).to(torch.int16)
    return drawn


def _words(entries: int) -> int:
    """Four are drawn at a time."""
    return -(-entries // 4) * 4


def kept(o: Operands) -> Bool[Tensor, "batch seq d_model"]:
    """Which entries of the result are left."""
    keep = torch.ones(o.num_tokens, o.width, dtype=torch.bool)
    if o.dropping and o.seed is not None:
        drawn = draw(o, o.seed)
        for part, place in drawn.parts():
            bits = drawn.bits[place : place + keep[part].numel()].view(-1, o.width)
            torch.ge(bits, drawn.limits[part, None], out=keep[part])
    return keep.view(*o.ids.shape, o.width)
