"""Which tensors may be rotated in place, checked before anything is written.

Two tensors in the same memory would be rotated twice, and so would a tensor whose elements share their places. So
addresses are compared, exactly: heads of one projection that lie side by side or interleaved, have no element in common
even where the stretches of memory they lie in overlap.

It costs some microseconds. There are no addresses while code is compiled; it calls `are_the_same` when it
runs. Where it also makes a gradient it rotates copies, and in memory that q and k share, k is what remains.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch._C._autograd import CreationMeta, _get_creation_meta  # pyright: ignore[reportPrivateUsage]

from locant.errors import LocantError, ShapeError
from locant.kernels.transforms import in_forward_mode, is_functionalizing, is_transforming

__all__ = ["are_the_same", "is_transformed", "require_writable"]

Step = tuple[int, int, int]
"""The size of a step, and how often it is taken: at least (which may be negative) and at most."""


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
    if in_memory and (x.is_contiguous() or not _layout(x.shape, x.stride())[0]):
        return
    if in_memory or any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        got = "got a tensor to rotate in place that repeats its elements in memory, as one of stride 0"
        raise ShapeError(got, "x.contiguous()")


def _share(q: Tensor, k: Tensor) -> bool:
    """Whether both are the same elements; raises if some are and some are not, or in another order."""
    distance = k.data_ptr() - q.data_ptr()
    if distance >= _extent(q) or -distance >= _extent(k):
        return False
    if not distance and q.dtype == k.dtype and q.shape == k.shape and _stepped(q) == _stepped(k):
        return True
    q_size, k_size = q.element_size(), k.element_size()
    if _meet(distance, q.shape, q.stride(), q_size, k.shape, k.stride(), k_size):
        raise ShapeError(
            "got q and k that share part of their memory to rotate in place", "inplace=False, or k.clone()"
        )
    return False


def _extent(x: Tensor) -> int:
    """How many bytes there are from the first element to the end of the last."""
    return x.nbytes if x.is_contiguous() else _layout(x.shape, x.stride())[1] * x.element_size()


def _stepped(x: Tensor) -> list[int]:
    """Strides, without those of dimensions of one element, which are never used."""
    return [stride if size > 1 else 0 for stride, size in zip(x.stride(), x.shape, strict=True)]


@functools.lru_cache(maxsize=4_096)
def _layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[bool, int]:
    """Whether two elements are one, and how many elements there is room for from the first to the last."""
    if 0 in shape:
        return False, 0
    moves = _moves(shape, strides)
    return _repeats(moves), 1 + sum(stride * most for stride, most in moves)


def _moves(shape: tuple[int, ...], strides: tuple[int, ...], size: int = 1) -> list[tuple[int, int]]:
    """How far apart neighbours are along each dimension, the farthest first, and how many steps there are."""
    return sorted(((stride * size, n - 1) for stride, n in zip(strides, shape, strict=True) if n > 1), reverse=True)


def _repeats(moves: list[tuple[int, int]]) -> bool:
    """Whether some steps to and fro lead back to where they began."""
    for i, (stride, most) in enumerate(moves):
        smaller = moves[i + 1 :]
        if stride > sum(step * n for step, n in smaller):
            continue  # it goes past all that they reach, as strides do that were not made by hand
        if not stride or _reach([(stride, 1, most), *((step, -n, n) for step, n in smaller if step)], 0):
            return True
    return False


@functools.lru_cache(maxsize=4_096)
def _meet(
    distance: int,
    q_shape: tuple[int, ...],
    q_strides: tuple[int, ...],
    q_size: int,
    k_shape: tuple[int, ...],
    k_strides: tuple[int, ...],
    k_size: int,
) -> bool:
    """Whether a byte of q is one of k, which begins `distance` bytes behind: there on q's steps, back on k's."""
    there = [(step, 0, most) for step, most in [*_moves(q_shape, q_strides, q_size), (1, q_size - 1)]]
    back = [(step, -most, 0) for step, most in [*_moves(k_shape, k_strides, k_size), (1, k_size - 1)]]
    return _reach(there + back, distance)


def _reach(steps: list[Step], distance: int) -> bool:
    """Whether such steps can add up to `distance`."""
    sizes = sorted({size for size, _, _ in steps}, reverse=True)
    ends = [tuple(sum(step[end] for step in steps if step[0] == size) for end in (1, 2)) for size in sizes]
    left = {distance}  # what the steps of the sizes still to come have to make up for
    for i, (size, (low, high)) in enumerate(zip(sizes, ends, strict=True)):
        rest = list(zip(sizes, ends, strict=True))[i + 1 :]
        least, most = (sum(step * end[which] for step, end in rest) for which in (0, 1))
        left = {
            far - n * size
            for far in left
            for n in range(max(low, -((most - far) // size)), min(high, (far - least) // size) + 1)
        }
    return 0 in left
