"""Check which tensors may be rotated in place, before anything is written.

Two tensors in the same memory would be rotated twice, and so would a tensor whose elements share memory. Addresses are
compared exactly, because contiguous or interleaved heads of one projection have no element in common even if their
ranges of memory overlap. For one tensor the strides are checked. Each stride must be greater than the range of all
smaller strides. This holds unless somebody sets strides by hand.

While code is compiled, there are no addresses to compare. Compiled code calls `are_the_same` when it runs. If it also
computes a gradient, it rotates copies. If q and k share memory, this memory then contains k.
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
    """Raise unless `q` and `k` can be overwritten.

    Return whether they have the same elements, which are rotated only once.
    """
    _require_graph_allows(q)
    if k is not None and k is not q:
        _require_graph_allows(k)
    return are_the_same(q, k)


def are_the_same(q: Tensor, k: Tensor | None) -> bool:
    """Return whether `q` and `k` have the same elements in one order. Raise if they share memory in another way."""
    in_memory = _has_address(q)
    _require_no_repeats(q, in_memory)
    if k is None or k is q:
        return k is q
    in_memory = in_memory and _has_address(k)
    _require_no_repeats(k, in_memory)
    return in_memory and _are_same_elements(q, k)


def is_transformed() -> bool:
    """Return whether an active transform lets a tensor represent more than its own memory contains."""
    return in_forward_mode() or (is_transforming() and not is_functionalizing())


# ---------------------------------------------------------------------- conditions of torch's graph


def _require_graph_allows(x: Tensor) -> None:
    """Raise if torch would raise an error, now or only after the memory is overwritten."""
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
            "got a view to rotate in place that torch cannot track: one of several outputs of chunk, split or unbind, "
            "or a view created without gradients",
            "inplace=False, or slices such as qkv[..., :width]",
        )


# ---------------------------------------------------------------------- memory


def _has_address(x: Tensor) -> bool:
    """Return whether the address of `x` is known. Inner tensors of subclasses are checked when they are rotated."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, nn.Parameter) or x.is_meta:
        return False
    return not is_transforming()


def _require_no_repeats(x: Tensor, in_memory: bool) -> None:
    if in_memory and (x.is_contiguous() or not _may_repeat(x.shape, x.stride())):
        return
    if in_memory or any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        got = "got a tensor to rotate in place that repeats its elements in memory, such as a tensor with stride 0"
        raise ShapeError(got, "x.contiguous()")


@functools.lru_cache(maxsize=4_096)
def _may_repeat(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether a stride is not greater than the range of all smaller strides. Then elements may share memory."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride <= reach:
            return 0 not in shape
        reach += stride * (size - 1)
    return False


def _are_same_elements(q: Tensor, k: Tensor) -> bool:
    """Return whether `q` and `k` have the same elements. Raise if they share only some, or in another order."""
    distance = k.data_ptr() - q.data_ptr()
    if distance >= _extent(q) or -distance >= _extent(k):
        return False
    if not distance and q.dtype == k.dtype and q.shape == k.shape and _used_strides(q) == _used_strides(k):
        return True
    q_layout, k_layout = ((x.shape, x.stride(), x.element_size()) for x in (q, k))
    if _share_bytes(distance, *q_layout, *k_layout):
        raise ShapeError(
            "got q and k that share part of their memory to rotate in place", "inplace=False, or k.clone()"
        )
    return False


def _extent(x: Tensor) -> int:
    """Return the number of bytes from the first element to the end of the last element."""
    if x.is_contiguous() or not x.numel():
        return x.nbytes
    return x.element_size() * (1 + sum(stride * (n - 1) for stride, n in zip(x.stride(), x.shape, strict=True)))


def _used_strides(x: Tensor) -> list[int]:
    """Return the strides, with 0 for dimensions of one element, whose strides are not used."""
    return [stride if size > 1 else 0 for stride, size in zip(x.stride(), x.shape, strict=True)]


@functools.lru_cache(maxsize=4_096)
def _share_bytes(distance: int, *layouts: Any) -> bool:
    """Return whether q and k share a byte. k begins `distance` bytes after q. A layout is shape, strides and size."""
    import numpy as np  # called only for overlapping ranges. It compares addresses and does not read memory

    first = 1 + max(0, -distance)
    q, k = (
        SimpleNamespace(__array_interface__={
            "version": 3, "typestr": f"|V{size}", "data": (address, True), "shape": tuple(shape),
            "strides": tuple(stride * size for stride in strides),
        })
        for address, (shape, strides, size) in zip((first, first + distance), (layouts[:3], layouts[3:]), strict=True)
    )  # fmt: skip
    return np.shares_memory(q, k)
