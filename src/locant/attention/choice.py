"""Choose the backend that computes attention, and state the reason. No other file makes this choice.

Each backend's file in `locant.attention.backends` has a function, such as `obstacle`, that returns the reason why the
backend does not support some inputs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch

from locant.arguments import one_of
from locant.attention.backends import flex, tiled
from locant.attention.backends.dense import sdpa_obstacle
from locant.attention.inputs import AttentionInputs
from locant.errors import LocantError
from locant.kernels.distance_attention import supports

BackendName = Literal["auto", "sdpa", "flex", "tiled", "eager"]
BACKENDS = get_args(BackendName)

FAST_MATRIX_SCORES = 2**20
"""The number of scores, over all heads, below which a matrix for mask and bias is faster than no matrix."""

MAX_MATRIX_SCORES = 2**28
"""The number of scores above which a compiled graph on an accelerator uses many tiles instead of a large matrix."""


class BackendChoice(NamedTuple):
    """A backend, the reason for the choice, and the method if the backend is `tiled`."""

    name: str
    reason: str
    method: tiled.Method | None = None


def choose_backend(backend: str, inputs: AttentionInputs) -> BackendChoice:
    """Return the backend to use. Raise an error if the requested backend does not support these inputs.

    >>> from locant.attention.mask import AttentionMask
    >>> from locant.positions import ALiBi, Positions
    >>> x, mask = torch.zeros(1, 8, 512, 64), AttentionMask(Positions.arange(512))
    >>> choose_backend("auto", AttentionInputs(x, x, x, mask)).reason
    'there is no matrix for bias or mask'
    >>> choice = choose_backend("auto", AttentionInputs(x, x, x, mask, ALiBi(8)))
    >>> choice.name, choice.method.name, choice.reason
    ('tiled', 'table', 'one number per head and distance is enough')
    """
    if one_of("backend", backend, BACKENDS) == "auto":
        return _choose(inputs)
    obstacles = {"sdpa": sdpa_obstacle, "flex": flex.obstacle, "tiled": tiled.obstacle}
    if backend != "eager" and (obstacle := obstacles[backend](inputs)) is not None:
        only_eager = tiled.obstacle(inputs) is not None
        remedy = "backend='eager', which uses plain operations" if only_eager else "backend='tiled'"
        raise LocantError(f"got backend={backend!r}, {obstacle}", remedy)
    method = tiled.choose_method(inputs) if backend == "tiled" else None
    return BackendChoice(backend, "requested by the caller", method)


def _choose(inputs: AttentionInputs) -> BackendChoice:
    if inputs.return_weights:
        return BackendChoice("eager", "only eager keeps the weights")
    if inputs.q.is_cpu and inputs.is_decoding and supports(inputs.q, inputs.v):  # first, as in decoding its time counts
        method = tiled.choose_method(inputs)
        if method.name == "table":
            reason = "every key and value is read once, for all heads that share it"
            return BackendChoice("tiled", reason, method)
    if inputs.is_transformed:
        return BackendChoice("eager", "fused kernels do not support torch.func and forward mode")
    if torch.compiler.is_exporting():
        name = "sdpa" if sdpa_obstacle(inputs) is None else "eager"
        return BackendChoice(name, "an exported program must work for every length and in any engine")
    fused = sdpa_obstacle(inputs) is None
    if fused and inputs.mask.is_plain and inputs.bias is None:
        return BackendChoice("sdpa", "there is no matrix for bias or mask")
    on_cuda = inputs.q.device.type == "cuda"
    flex_obstacle = flex.obstacle(inputs) if on_cuda else None
    can_use_flex = on_cuda and flex_obstacle is None
    if can_use_flex and inputs.bias is not None and inputs.q.dtype.itemsize == 2:
        return BackendChoice("flex", "the bias stays in float32 with 16-bit queries")
    if inputs.num_scores < FAST_MATRIX_SCORES and fused:
        return BackendChoice("sdpa", "mask and bias are small")
    if inputs.num_scores < FAST_MATRIX_SCORES and not (
        inputs.is_decoding and tiled.choose_method(inputs).name == "table"
    ):
        what = "softcap" if inputs.softcap is not None else "the log-sum-exp"
        return BackendChoice("eager", f"fused kernels do not support {what}, and there are few scores")
    if can_use_flex:
        return BackendChoice("flex", "the bias goes into the kernel as a function")
    method = tiled.choose_method(inputs)
    fits_memory = inputs.q.device.type == "cpu" or inputs.num_scores <= MAX_MATRIX_SCORES
    if method.name == "tiles" and torch.compiler.is_compiling() and fits_memory:
        reason = "each tile would be compiled separately, and again for every length"
        return BackendChoice("sdpa" if fused else "eager", reason)
    reason = method.reason if flex_obstacle is None else f"{method.reason}; not flex, {flex_obstacle}"
    return BackendChoice("tiled", reason, method)
