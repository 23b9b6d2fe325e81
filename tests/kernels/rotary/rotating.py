"""Tables, tokens and the truth for the tests of the rotary kernels: NumPy and mpmath, nothing of the package."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from locant.kernels.rotary.reference import Tables
from tests import oracles
from tests.kernels.interpreted import Place

__all__ = ["BASE", "KERNEL", "Case", "far_positions", "launch", "rotate_pairs", "tables", "truth"]

BASE = 10_000.0
KERNEL = "locant.kernels.rotary.triton"


@functools.cache
def _byte_rows(rotary_dim: int) -> Tensor:
    byte = np.arange(256)
    signed = np.where(byte < 128, byte, byte - 256)
    steps = np.stack([byte, byte << 8, byte << 16, signed << 24])
    return torch.from_numpy(np.stack(oracles.angles(steps, rotary_dim, BASE), axis=-1))


def tables(rotary_dim: int, device: str = "cpu", **options: Any) -> Tables:
    """The exact tables of the plain frequencies, whose rows are correct to 4e-15."""
    return Tables(_byte_rows(rotary_dim).to(device), **options)


def far_positions(*shape: int) -> Tensor:
    """Positions of any size, the largest among them."""
    index = torch.randint(0, 2**31, shape)
    index.view(-1)[0] = 2**31 - 1
    return index


def truth(x: Tensor, index: Tensor, layout: str, rotary_dim: int, sign: int = 1) -> Tensor:
    """float64: every row of the batch rotated by a block-diagonal matrix per token. `index` is ``batch|1 seq``."""
    rows = index.cpu().expand(x.shape[0], -1)
    out = [torch.empty(0, *x.shape[1:], dtype=torch.float64)]
    for row, positions in zip(x.detach().cpu().double(), rows, strict=True):
        cos, sin = oracles.angles(positions.numpy(), rotary_dim, BASE)
        out.append(torch.from_numpy(oracles.rotate(row[None].numpy(), cos, sign * sin, layout)))
    return torch.cat(out)


class Case(NamedTuple):
    """What is to be rotated."""

    q: Tensor
    k: Tensor | None
    index: Tensor
    layout: str
    rotary_dim: int


def rotate_pairs(
    place: Place,
    case: Case,
    *,
    inverse: bool = False,
    inplace: bool = False,
    of: Tables | None = None,
    into: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`case` through the kernel, where `place` says. Memory that it does not write stays NaN."""
    q, k = case.q.to(place.device), None if case.k is None else case.k.to(place.device)
    if into is None:
        fresh = (torch.full_like(q, torch.nan), None if k is None else torch.full_like(k, torch.nan))
        into = (q, k) if inplace else fresh
    found = tables(case.rotary_dim) if of is None else of
    axes = found.axis_of_pair
    there = found._replace(
        table=found.table.to(place.device), axis_of_pair=None if axes is None else axes.to(place.device)
    )
    index = case.index.to(place.device)
    module = place.load(KERNEL)
    assert module.why_not_triton(q, index, there) is None
    module.rotate_(q, k, *into, index, there, case.layout, inverse)
    return into[0].cpu(), None if into[1] is None else into[1].cpu()


def launch(q: Tensor, k: Tensor, *, layout: str = "half", rotary_dim: int | None = None, **of: Any) -> dict[str, Any]:
    """The arguments with which the kernel would be started to rotate both in place, by name, and "programs"."""
    taken: list[dict[str, Any]] = []
    module = Place("cpu").load(KERNEL)
    names = module._rotate_kernel.arg_names

    class Launches:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *args, **options: taken.append(
                {"programs": grid[0], **dict(zip(names, args, strict=False)), **options}
            )

    rotary_dim = q.shape[-1] if rotary_dim is None else rotary_dim
    with mock.patch.object(module, "_rotate_kernel", Launches()):
        module.rotate_(q, k, q, k, torch.arange(q.shape[2])[None], tables(rotary_dim, **of), layout, False)
    (arguments,) = taken
    return arguments
