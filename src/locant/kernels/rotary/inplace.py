"""Which tensors may be rotated in place, checked before anything is written.

Two tensors in the same memory would be rotated twice, and so would a tensor whose elements share their places. So
addresses are compared, exactly: heads of one projection that lie side by side or interleaved, have no element in common
even where the stretches of memory they lie in overlap. Of one tensor strides tell: each has to go past what smaller
ones reach, as they do unless they were made by hand.

There are no addresses while code is compiled; it calls `are_the_same` when it runs. Where it also makes a gradient it
rotates copies, and in memory that q and k share, k is what remains.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import CreationMeta, _get_creation_meta  # pyright: ignore[reportPrivateUsage]

from locant.errors import LocantError, ShapeError
from locant.kernels.transforms import in_forward_mode, is_functionalizing, is_transforming


def require_writable(q: Tensor, k: Tensor | None) -> bool:
    """Raise unless both can be overwritten; returns whether they are the same elements, to be rotated once."""
    _require_graph_allows(q)
    if k is not None and k is not q:
        _require_graph_allows(k)
    return are_the_same(q, k)


def are_the_same(q: Tensor, k: Tensor | None) -> bool:
    """Whether both are the same elements in the same order; raises if elements share memory in another way."""
    in_memory = _has_address(q)
    _require_no_repeats(q, in_memory)
    if k is None or k is q:
        return k is q
    in_memory = in_memory and _has_address(k)
    _require_no_repeats(k, in_memory)
    return in_memory and _share(q, k)


def is_transformed() -> bool:
    """Whether a transform is at work under which a tensor stands for more than its own memory holds."""
    return in_forward_mode() or (is_transforming() and not is_functionalizing())


# ---------------------------------------------------------------------- what torch's graph allows


def _require_graph_allows(x: Tensor) -> None:
    """Raise where torch would, and where it would do so after the fact."""
    compiling = torch.compiler.is_compiling()
    if not compiling and x.is_inference() and not torch.is_inference_mode_enabled():
        raise LocantError("got a tensor made in inference mode to rotate in place outside of it", "inplace=False")
    if not torch.is_grad_enabled():
        return
    leaf = x if compiling else x._base if x._is_view() else x
    if leaf is not None and leaf.requires_grad and leaf.is_leaf:
        raise LocantError("got a leaf that requires a gradient to rotate in place", "inplace=False")
    if leaf is not x and x.requires_grad and _get_creation_meta(x) != CreationMeta.DEFAULT:
        raise LocantError(
            "got a view to rotate in place that torch cannot follow: one of several outputs of chunk, split or unbind, "
            "or one made without gradients",
            "inplace=False, or slices such as qkv[..., :width]",
        )


# ---------------------------------------------------------------------- memory


def _has_address(x: Tensor) -> bool:
    """Not for tensor subclasses or in a compiler; tensors inside a subclass are checked when they are rotated."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, nn.Parameter) or x.is_meta:
        return False
    return not is_transforming()


def _require_no_repeats(x: Tensor, in_memory: bool) -> None:
    if in_memory and (x.is_contiguous() or not _may_repeat(x.shape, x.stride())):
        return
    if in_memory or any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        got = "got a tensor to rotate in place that repeats its elements in memory, as one of stride 0"
        raise ShapeError(got, "x.contiguous()")


@functools.lru_cache(maxsize=4_096)
def _may_repeat(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Unless a step along each dimension goes past all that those of smaller strides reach."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride <= reach:
            return 0 not in shape
        reach += stride * (size - 1)
    return False


def _share(q: Tensor, k: Tensor) -> bool:
    """Whether both are the same elements; raises if some are and some are not, or in another order."""
    distance = k.data_ptr() - q.data_ptr()
    if distance >= _extent(q) or -distance >= _extent(k):
        return False
    if not distance and q.dtype == k.dtype and q.shape == k.shape and _stepped(q) == _stepped(k):
        return True
    of_q, of_k = ((x.shape, x.stride(), x.element_size()) for x in (q, k))
    if _meet(distance, *of_q, *of_k):
        raise ShapeError(
            "got q and k that share part of their memory to rotate in place", "inplace=False, or k.clone()"
        )
    return False


def _extent(x: Tensor) -> int:
    """How many bytes there are from the first element to the end of the last."""
    if x.is_contiguous() or not x.numel():
        return x.nbytes
    return x.element_size() * (1 + sum(stride * (n - 1) for stride, n in zip(x.stride(), x.shape, strict=True)))


def _stepped(x: Tensor) -> list[int]:
    """Strides, without those of dimensions of one element, which are never used."""
    return [stride if size > 1 else 0 for stride, size in zip(x.stride(), x.shape, strict=True)]


@functools.lru_cache(maxsize=4_096)
def _meet(distance: int, *layouts: Any) -> bool:
    """Whether a byte of q is one of k, which begins `distance` bytes behind: shape, strides, element size of both."""
    import numpy as np  # asked only where the two lie within each other; it compares addresses, and reads nothing

    first = 1 + max(0, -distance)
    q, k = (
        SimpleNamespace(__array_interface__={
            "version": 3, "typestr": f"|V{size}", "data": (place, True), "shape": tuple(shape),
            "strides": tuple(stride * size for stride in strides),
        })
        for place, (shape, strides, size) in zip((first, first + distance), (layouts[:3], layouts[3:]), strict=True)
    )  # fmt: skip
    return np.shares_memory(q, k)
