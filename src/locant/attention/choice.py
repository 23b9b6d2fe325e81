"""Which backend computes attention, and the reason for it; nothing else decides that.

What a backend cannot do is in its own file, as `obstacle` in `locant.attention.backends`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from locant.arguments import one_of
from locant.attention.backends import flex, tiled
from locant.attention.backends.dense import sdpa_obstacle
from locant.attention.inputs import AttentionInputs
from locant.errors import LocantError
from locant.kernels.distance_attention import takes

BackendName = Literal["auto", "sdpa", "flex", "tiled", "eager"]

SMALL = 2**20
"""Scores, over all heads, below which a matrix for mask and bias costs less than computing without one."""

LARGE = 2**28
"""Scores from which, on an accelerator, a compiled graph is better full of tiles than its memory of a matrix."""


@dataclass(frozen=True)
class BackendChoice:
    """A backend, the reason for it, and which of its four ways `tiled` takes."""

    name: str
    reason: str
    way: tiled.Way | None = None


def choose_backend(backend: str, inputs: AttentionInputs) -> BackendChoice:
    """The backend that runs; asking for one that cannot run raises.

    >>> from locant.attention.mask import AttentionMask
    >>> from locant.positions import ALiBi, Positions
    >>> x, mask = torch.zeros(1, 8, 512, 64), AttentionMask(Positions.arange(512))
    >>> choose_backend("auto", AttentionInputs(x, x, x, mask)).reason
    'there is no bias and no mask to hold'
    >>> choice = choose_backend("auto", AttentionInputs(x, x, x, mask, ALiBi(8)))
    >>> choice.name, choice.way.name, choice.reason
    ('tiled', 'table', 'one number per head and distance is enough')
    """
    if one_of("backend", backend, get_args(BackendName)) == "auto":
        return _chosen(inputs)
    obstacles = {"sdpa": sdpa_obstacle, "flex": flex.obstacle, "tiled": tiled.obstacle}
    if backend != "eager" and (obstacle := obstacles[backend](inputs)) is not None:
        plain = tiled.obstacle(inputs) is not None
        remedy = "backend='eager', which is made of plain operations" if plain else "backend='tiled'"
        raise LocantError(f"got backend={backend!r}, {obstacle}", remedy)
    return BackendChoice(backend, "asked for", tiled.way_of(inputs) if backend == "tiled" else None)


def _chosen(inputs: AttentionInputs) -> BackendChoice:
    if inputs.return_weights:
        return BackendChoice("eager", "only eager keeps the weights")
    if inputs.is_transformed:
        return BackendChoice("eager", "torch.func and forward mode know no fused kernels")
    if torch.compiler.is_exporting():
        plain = sdpa_obstacle(inputs) is None
        return BackendChoice("sdpa" if plain else "eager", "an exported program is for every length and any engine")
    if inputs.q.device.type == "cpu" and inputs.is_decoding and takes(inputs.q, inputs.v):
        way = tiled.way_of(inputs)
        if way.name == "table":
            reason = "a few queries read every key and value once, for all heads that share it"
            return BackendChoice("tiled", reason, way)
    fused = sdpa_obstacle(inputs) is None
    if fused and inputs.mask.is_plain and inputs.bias is None:
        return BackendChoice("sdpa", "there is no bias and no mask to hold")
    on_cuda = inputs.q.device.type == "cuda"
    not_flex = flex.obstacle(inputs) if on_cuda else None
    through_flex = on_cuda and not_flex is None
    if through_flex and inputs.bias is not None and inputs.q.dtype.itemsize == 2:
        return BackendChoice("flex", "the bias keeps its float32 beside 16-bit queries")
    if inputs.scores < SMALL and fused:
        return BackendChoice("sdpa", "mask and bias are small enough to be held")
    if inputs.scores < SMALL and not (inputs.is_decoding and tiled.way_of(inputs).name == "table"):
        what = "softcap" if inputs.softcap is not None else "the log-sum-exp"
        return BackendChoice("eager", f"{what} is in no fused kernel, and scores are small enough to be held")
    if through_flex:
        return BackendChoice("flex", "the bias goes into the kernel as a function")
    way = tiled.way_of(inputs)
    held = inputs.q.device.type == "cpu" or inputs.scores <= LARGE
    if way.name == "tiles" and torch.compiler.is_compiling() and held:
        reason = "tiles would be compiled one by one, and anew for every length"
        return BackendChoice("sdpa" if fused else "eager", reason)
    return BackendChoice("tiled", way.reason if not_flex is None else f"{way.reason}; not flex, {not_flex}", way)
