"""Find out which function transforms are active: `torch.func`, forward mode, batched gradients.

Kernels work on memory, and under a transform a tensor represents more than its memory contains. torch has no public
API for this, so only this file calls its private functions. Compilers handle transforms themselves. In a compiler these
functions return ``False``, unless their docstrings state otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad


def is_transforming() -> bool:
    """Return whether any transform of `torch.func` is active."""
    return not torch.compiler.is_compiling() and functorch.peek_interpreter_stack() is not None


def is_functionalizing() -> bool:
    """Return whether the innermost transform is `torch.func.functionalize`, which sees operators, not functions."""
    transform = None if torch.compiler.is_compiling() else functorch.peek_interpreter_stack()
    return transform is not None and transform.key() == functorch.TransformType.Functionalize


def is_mapping() -> bool:
    """Return whether `torch.func.vmap` is active. In a compiler, this holds for the whole graph."""
    levels = functorch.get_interpreter_stack() or []
    return any(level.key() == functorch.TransformType.Vmap for level in levels)


def in_forward_mode() -> bool:
    """Return whether tensors may have tangents."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]


def may_be_differentiated() -> bool:
    """Return whether forward mode or any transform of `torch.func` is active. In a compiler, return ``True``."""
    if torch.compiler.is_compiling():
        return True
    level = forward_ad._current_level  # pyright: ignore[reportPrivateUsage]
    return level >= 0 or functorch.peek_interpreter_stack() is not None


def is_dispatch_mode_active() -> bool:
    """Return whether a dispatch mode intercepts every operator: `make_fx`, fake tensors, operator counters."""
    return torch._C._len_torch_dispatch_stack() > 0  # pyright: ignore[reportPrivateUsage]


def is_plain_eager() -> bool:
    """Return whether the caller needs only the result: no gradient, no graph, no transform, no dispatch mode."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    level = forward_ad._current_level  # pyright: ignore[reportPrivateUsage]
    return level < 0 and functorch.peek_interpreter_stack() is None and not is_dispatch_mode_active()


def is_exporting() -> bool:
    """Return whether torch exports a graph for other programs, which do not have our operators."""
    tracing = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]  # it is in torch's documentation
    # `torch.compiler.is_exporting` returns this flag, but in torch 2.9 it returns True in every compiled function.
    exporting = torch.compiler._is_exporting_flag  # pyright: ignore[reportPrivateUsage]
    return tracing or (torch.compiler.is_compiling() and exporting)


def is_batched_gradient(grad: Tensor) -> bool:
    """Return whether one tensor contains a batch of gradients (``is_grads_batched``)."""
    return not torch.compiler.is_compiling() and functorch.is_legacy_batchedtensor(grad)


def is_batched(tensor: Tensor) -> bool:
    """Return whether the tensor is a batch of samples of `torch.func.vmap`, whose values cannot be read."""
    is_wrapped = functorch.is_functorch_wrapped_tensor(tensor)
    return is_wrapped and any(functorch.is_batchedtensor(layer) for layer in _layers(tensor))


def hides_gradient(tensor: Tensor) -> bool:
    """Return whether samples of `torch.func.vmap` need a gradient although the batch itself does not require one.

    A graph does not show what a tensor contains. In a graph, return whether this is possible.
    """
    if torch.compiler.is_compiling():
        return tensor.is_floating_point() and torch.is_grad_enabled() and is_mapping()
    *layers, innermost = _layers(tensor)
    return innermost.requires_grad and any(functorch.is_batchedtensor(layer) for layer in layers)


def is_differentiated(*tensors: Tensor) -> bool:
    """Return whether forward mode or `torch.func` differentiates one of these tensors. ``backward`` does not count.

    `torch.func.vmap` alone does not count either. In a compiler, this holds for the whole graph.
    """
    if not may_be_differentiated():
        return False
    if torch.compiler.is_compiling():  # the compiler sees that the level is read here, and adds a guard
        return _is_graph_differentiated() or forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]
    if in_forward_mode() and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        return True
    return is_transforming() and any(functorch.is_gradtrackingtensor(x) for tensor in tensors for x in _layers(tensor))


def is_graph_transformed() -> bool:
    """Return whether a compiler traces a graph with any transform, including `torch.func.vmap`."""
    if not torch.compiler.is_compiling():
        return False
    return _has_graph_levels() or forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]


def _layers(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor, the tensor that its outermost transform wraps, and so on, down to the tensor with memory."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        yield tensor
        tensor = functorch.get_unwrapped(tensor)
    yield tensor


def unwrap_transforms(tensor: Tensor) -> Tensor:
    """Return the tensor inside all wrappers of active transforms, which wrap the results of operators."""
    if is_transforming():
        *_, tensor = _layers(tensor)
    return tensor


def _is_graph_differentiated() -> bool:
    """Return whether a transform differentiates the graph. This is constant, as other transforms cause a new trace."""
    levels = functorch.get_interpreter_stack() or []
    return any(level.key() != functorch.TransformType.Vmap for level in levels)


def _has_graph_levels() -> bool:
    return bool(functorch.get_interpreter_stack())


# `torch.compiler.assume_constant_result` sets this attribute, but would import the whole compiler.
_is_graph_differentiated._dynamo_marked_constant = True  # type: ignore[attr-defined]
_has_graph_levels._dynamo_marked_constant = True  # type: ignore[attr-defined]
is_mapping._dynamo_marked_constant = True  # type: ignore[attr-defined]
