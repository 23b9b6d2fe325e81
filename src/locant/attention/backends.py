"""Which way attention is computed: a choice made by one pure function that can say why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from locant.errors import LocantError

__all__ = ["BackendName", "Choice", "Request", "choose_backend"]

BackendName = Literal["auto", "sdpa", "flex", "tiled", "eager"]

SMALL = 2**20
"""Scores of all heads. With fewer, a matrix for the mask and the bias costs less than doing without one."""
FLEX_WIDTH = 16
"""The narrowest head that FlexAttention's CUDA kernels take."""
FLEX_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What there is to compute, as far as the choice depends on it."""

    device: str
    dtype: torch.dtype = torch.float32
    head_dim: int = 64
    scores: int
    """Of all rows and heads: ``batch x heads x query x key``."""
    gradient: bool = False
    """Whether one is wanted, for q, k, v or what the bias is made of."""
    transformed: bool = False
    """Whether a derivative is wanted otherwise than by ``backward``: in forward mode, or by `torch.func`."""
    dropout: bool = False
    return_weights: bool = False
    bias: bool = False
    score_mod: bool = True
    """Whether the bias, if there is one, is also to be had as a function of one pair."""
    mask: bool = False
    """Whether there is more to hide than what comes later."""
    table: bool = False
    """Whether one number per head and distance says all of bias and mask (`locant.attention.tiled`)."""
    compiling: bool = False


@dataclass(frozen=True)
class Choice:
    """A backend and the reason for it."""

    name: str
    reason: str


def choose_backend(backend: str, request: Request) -> Choice:
    """The backend that runs; asking for one that cannot run raises.

    >>> choose_backend("auto", Request(device="cpu", scores=8 * 8192**2, bias=True, table=True))
    Choice(name='tiled', reason='one number per head and distance is enough')
    >>> choose_backend("auto", Request(device="cuda", scores=8 * 8192**2, bias=True))
    Choice(name='flex', reason='the bias goes into the kernel as a function')
    """
    known = get_args(BackendName)
    if backend not in known:
        raise LocantError(f"got backend={backend!r}, this version has {', '.join(known)}", "backend='auto'")
    if backend == "auto":
        return _chosen(request)
    if request.return_weights and backend != "eager":
        raise LocantError(
            f"got backend={backend!r} with return_weights=True, only eager ever holds the weights", "backend='eager'"
        )
    if backend in ("flex", "tiled") and request.transformed:
        raise LocantError(
            f"got backend={backend!r} in forward mode or inside torch.func.grad and the like, it knows backward alone",
            "backend='eager', which is made of plain operations",
        )
    if backend == "flex" and (obstacle := _flex_obstacle(request)) is not None:
        raise LocantError(f"got backend='flex', {obstacle}", "backend='tiled', which needs as little memory")
    return Choice(backend, "asked for")


def _chosen(request: Request) -> Choice:
    if request.return_weights:
        return Choice("eager", "only eager keeps the weights")
    if request.transformed:
        return Choice("eager", "torch.func and forward mode know no fused kernels")
    if not request.bias and not request.mask:
        return Choice("sdpa", "there is no bias and no mask to hold")
    if request.scores < SMALL:
        return Choice("sdpa", "mask and bias are small enough to be held")
    if request.device == "cuda" and _flex_obstacle(request) is None:
        return Choice("flex", "the bias goes into the kernel as a function")
    if request.table:
        return Choice("tiled", "one number per head and distance is enough")
    if request.compiling:
        return Choice("sdpa", "tiles would be compiled one by one, and anew for every length")
    return Choice("tiled", "mask and bias are held for a tile of queries at a time")


def _flex_obstacle(request: Request) -> str | None:
    """Why FlexAttention cannot do it, or ``None``."""
    obstacles = {
        "which drops no weights": request.dropout,
        "the encoding has a bias but no score_mod": request.bias and not request.score_mod,
        f"which does not compute in {request.dtype}": request.dtype not in FLEX_DTYPES,
        f"which runs on cpu and cuda, not on {request.device}": request.device not in ("cpu", "cuda"),
        "which has no backward on a CPU": request.device == "cpu" and request.gradient,
        f"which takes no heads of {request.head_dim} dimensions on cuda, {FLEX_WIDTH} or more": (
            request.device == "cuda" and request.head_dim < FLEX_WIDTH
        ),
    }
    return next((obstacle for obstacle, stands in obstacles.items() if stands), None)
