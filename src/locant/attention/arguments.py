"""What `attend` accepts, checked before anything is computed: errors of torch's kernels name no cause."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.masked import MaskedTensor

from locant.arguments import Real, real, scale_of, shown
from locant.errors import LocantError, RangeError, ShapeError
from locant.positions import PositionEncoding
from locant.tensors import require_tensor

__all__ = ["DTYPES", "dropout_of", "factor_of", "require_encoding", "require_tensors"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What torch multiplies; float8 is a way to store numbers."""


DENSE = {
    "masked": "x.to_tensor(0.0), and Positions.from_mask(...) for what is hidden",
    "nested": "torch.nested.to_padded_tensor(x, 0.0), and Positions.from_mask(...) for the padding",
}
"""How what says by itself where its tokens are is made an ordinary tensor."""


def require_tensors(q: Any, k: Any, v: Any) -> None:
    """Raise unless these are queries, keys and values that belong together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        require_tensor(name, x)
        if (kind := _unusual(x)) is not None:
            raise ShapeError(f"got {name} as a {kind} tensor, expected a dense one", DENSE.get(kind, "x.to_dense()"))
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ShapeError(
            f"got {shapes}, expected (batch, heads, seq, head_dim) each",
            "x.view(batch, seq, heads, -1).transpose(1, 2)",
        )
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[-1] != k.shape[-1]:
        raise ShapeError(
            f"got {shapes}, expected one batch, one length for k and v, one head_dim for q and k",
            "keys and values of the same tokens",
        )
    if q.shape[-1] == 0:
        raise ShapeError(f"got {shapes}, expected a head_dim of 1 or more", "head_dim = d_model // num_heads")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError(
            f"got {q.shape[1]} query heads for {k.shape[1]} key heads, expected a multiple",
            "each key head serving the same number of query heads",
        )
    if q.dtype not in DTYPES or len({q.dtype, k.dtype, v.dtype}) > 1 or len({q.device, k.device, v.device}) > 1:
        raise ShapeError(
            f"got q, k, v of {q.dtype}, {k.dtype}, {v.dtype} on {q.device}, {k.device}, {v.device}, "
            "expected one dtype, floating-point of 16 bits or more, and one device",
            "k.to(q), v.to(q)" if q.dtype in DTYPES else "q.bfloat16()",
        )


def _unusual(x: Tensor) -> str | None:
    """What kind of tensor it is, if it has no strides, or not one length."""
    if isinstance(x, MaskedTensor):
        return "masked"
    if x.is_nested:
        return "nested"
    return None if x.layout == torch.strided else str(x.layout).removeprefix("torch.").lstrip("_")


def require_encoding(encoding: Any) -> None:
    """Raise unless it is an encoding, or none: what wraps one hides which doors it uses."""
    if encoding is None or isinstance(encoding, PositionEncoding):
        return
    if isinstance(encoding, type):
        cause, remedy = f"the class {encoding.__name__}", f"{encoding.__name__}(num_heads)"
    elif isinstance(encoding, torch.nn.Module):
        cause, remedy = f"a module {type(encoding).__name__}", "the encoding itself; wrap or compile what calls attend"
    else:
        cause, remedy = shown(encoding), "locant.encoding(name, ...)"
    raise LocantError(f"got {cause} for encoding, expected a PositionEncoding or None", remedy)


def factor_of(scale: Any, head_dim: int) -> Real:
    """What scores are multiplied with."""
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise RangeError("got a scale that requires a gradient, which it would not get", "attend(q * scale, scale=1.0)")
    return scale_of(scale, float(head_dim) ** -0.5)


def dropout_of(probability: Any) -> Real:
    """The probability of dropping a weight."""
    return real("dropout_p", probability, low=0, below=1, remedy="dropout_p=0.0 outside training")
