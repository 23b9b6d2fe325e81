"""Launches of every Triton kernel of the package, which take every branch of it, and what must hold of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from locant.kernels.rotary.reference import Tables
from tests.gpu_without_gpu.launcher import Launch, device, launches
from tests.gpu_without_gpu.outcomes import atomics, target

__all__ = [
    "CASES", "UNCOUNTED", "There", "launched", "norm_and_rotate", "require_fit", "require_registers", "rotate",
]  # fmt: skip

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
There = Callable[..., Any]
"""Calls a function in a process whose Triton has a make-believe device: `launcher.fresh_process`."""


def rotate(
    capability: int, head_dim: int, dtype: torch.dtype, layout: str, rotary_dim: int | None = None, **of: Any
) -> list[Launch]:
    """The launch that rotates 32 heads of queries and 8 of keys."""
    from locant.kernels.rotary import triton

    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    axes, float32_angles = of.pop("axes", 0), of.pop("float32_angles", False)
    size = (rotary_dim // 2,) if float32_angles else (4, 256, rotary_dim // 2, 2)
    axis_of_pair = torch.zeros(rotary_dim // 2, dtype=torch.long) if axes else None
    tables = Tables(torch.empty(size, dtype=FP32 if float32_angles else FP64), axis_of_pair=axis_of_pair, **of)
    q, k = torch.empty(1, 32, 5, head_dim, dtype=dtype), torch.empty(1, 8, 5, head_dim, dtype=dtype)
    index = torch.zeros(1, 5, *([axes] if axes else []), dtype=torch.long)
    out = torch.empty_like(q), torch.empty_like(k)
    triton._LAUNCHES.clear()  # in the eyes of tensors all these devices are one
    with device(capability):
        return launches(triton.rotate_, q, k, *out, index, tables, layout, False)


def norm_and_rotate(
    capability: int, head_dim: int, dtype: torch.dtype, layout: str, rotary_dim: int | None = None, *,
    over_heads: bool = False, **options: Any,
) -> list[Launch]:  # fmt: skip
    """The launches that norm, rotate and append 32 heads of queries and 8 of keys, and those of their backward."""
    from locant.kernels.norm_rotary import HeadNorm, triton
    from locant.kernels.rotary.triton import _LAUNCHES

    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    tables = Tables(torch.empty(4, 256, rotary_dim // 2, 2, dtype=FP64), levels=2)
    q, k = torch.empty(1, 32, 5, head_dim, dtype=dtype), torch.empty(1, 8, 5, head_dim, dtype=dtype)
    weights = (torch.empty(head_dim * (x.shape[1] if over_heads else 1), dtype=dtype) for x in (q, k))
    norm, index = HeadNorm(*weights, **options), torch.zeros(1, 5, dtype=torch.long)
    cache = torch.empty(2, 1, 8, 64, head_dim, dtype=dtype)[:, :, :, 3:8]
    _LAUNCHES.clear()
    with device(capability):
        forward = launches(
            triton.norm_and_rotate_, q, k, torch.empty_like(q), cache[0], index, tables, layout, norm, k, cache[1]
        )
        grads = torch.empty_like(q), torch.empty_like(k)
        return forward + launches(triton.norm_and_rotate_backward, *grads, q, k, index, tables, layout, norm)


def gradient_of_biases(
    capability: int, width: int, dtype: torch.dtype, documents: bool, beside: bool = False, terms: int = 0
) -> list[Launch]:
    """The launches for 4 heads of queries and 2 of keys; with a log-sum-exp and a soft cap, or without.

    The biases are a table's, or products of queries, or of queries and of keys.
    """
    from locant.kernels.distance_gradient import Biases, Pairs, triton

    n, far = 300, 2**40
    tokens, some = torch.zeros(2, 3, n, dtype=torch.long), torch.ones(2, 3, 3, dtype=torch.bool)
    pairs = Pairs(1 - n, 0, far, None, tokens, None, some) if documents else Pairs(1 - n, 0, far, 0)
    q, k, lse = torch.empty(2, 4, n, width, dtype=dtype), torch.empty(2, 2, n, width, dtype=dtype), torch.empty(2, 4, n)
    products = torch.empty(2, 4, n, 100)
    row_of = (torch.arange(2 * n - 1) // 6).int()
    biases = Biases(products, products if terms == 2 else None, row_of) if terms else Biases(torch.empty(4, 2 * n - 1))
    given = torch.empty_like(q), lse if beside else None, q, k, k, lse, biases, pairs
    with device(capability):
        return launches(triton.gradients, *given, 0.1, 30.0 if beside else None)


CASES: dict[str, tuple[Callable[..., list[Launch]], tuple[Any, ...], dict[str, Any]]] = {
    "half": (rotate, (128, BF16, "half"), {"levels": 2}),
    "interleaved": (rotate, (128, BF16, "interleaved"), {"levels": 2}),
    "several axes, partial, far, YaRN": (rotate, (96, FP32, "half", 64), {"axes": 3, "attention_factor": 1.25}),
    "float32 angles": (rotate, (64, FP16, "interleaved"), {"float32_angles": True}),
    "float64": (rotate, (64, FP64, "half"), {}),
    "norm": (norm_and_rotate, (128, BF16, "half"), {}),
    "norm, interleaved, Gemma": (norm_and_rotate, (256, BF16, "interleaved"), {"plus_one": True}),
    "norm over all heads": (norm_and_rotate, (128, BF16, "half"), {"over_heads": True, "round_before_weight": False}),
    "norm, partial": (norm_and_rotate, (128, FP16, "half", 64), {}),
    "norm, float32": (norm_and_rotate, (80, FP32, "interleaved"), {}),
    "learned bias": (gradient_of_biases, (64, BF16, False), {}),
    "learned bias, packed": (gradient_of_biases, (128, FP16, True), {"beside": True}),
    "learned bias, wide heads, packed": (gradient_of_biases, (256, BF16, True), {}),
    "learned bias, float32": (gradient_of_biases, (80, FP32, False), {"beside": True}),
    "Shaw": (gradient_of_biases, (64, BF16, False), {"terms": 1}),
    "DeBERTa, packed": (gradient_of_biases, (128, FP16, True), {"terms": 2}),
    "DeBERTa, float32": (gradient_of_biases, (80, FP32, False), {"terms": 2, "beside": True}),
}
DIGITS = 32
"""Bytes for digits of 2 / pi, which the cosine of a large float32 angle has at hand in Triton 3.6 and before."""
UNCOUNTED = {"_entries": 800, "_rows": 600}
"""Bytes of stack of kernels that need more for tokens whose slots tell no distance."""

SPILLED = {("Shaw", 100, "_means"): 8}
"""Bytes of stack of the one other case that does not fit, by Triton 3.5."""


def require_fit(there: There, case: str, capability: int, stack: Mapping[str, int] = {}) -> None:
    """Raise unless the kernels fit. `stack` has the bytes of stack of kernels that need more with an older Triton."""
    uncounted = UNCOUNTED | stack
    options = CASES[case][2]
    for launch in there(launched, case, capability):
        allowed = DIGITS if options.get("float32_angles") else uncounted.get(launch.kernel, 0)
        allowed = SPILLED.get((case, capability, launch.kernel), allowed)
        require_registers(launch, capability, allowed)


def require_registers(launch: Launch, capability: int, allowed: int = 0) -> None:
    """Raise unless so many bytes of a thread at most are kept in memory."""
    assert launch.stack <= allowed, f"{launch.kernel} keeps {launch.stack} bytes of a thread in memory"
    assert target(launch.ptx) in (f"sm_{capability}", f"sm_{capability}a")
    assert atomics(launch.ptx) == 0, "an order of its own"


def launched(case: str, capability: int) -> list[Launch]:
    function, arguments, options = CASES[case]
    return function(capability, *arguments, **options)
