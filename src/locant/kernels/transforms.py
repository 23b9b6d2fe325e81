"""Which transforms of functions are at work: `torch.func`, forward mode, several gradients at once.

Kernels work on memory, and under a transform a tensor stands for more than its memory holds. torch has no public
API for this, so its private functions are called here and nowhere else. Compilers handle transforms themselves and
get ``False``, unless a function states otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad


def is_transforming() -> bool:
    """Whether any transform of `torch.func` is at work."""
    return not torch.compiler.is_compiling() and functorch.peek_interpreter_stack() is not None


def is_functionalizing() -> bool:
    """Whether the innermost is `torch.func.functionalize`, which looks into operators and not into functions."""
    transform = None if torch.compiler.is_compiling() else functorch.peek_interpreter_stack()
    return transform is not None and transform.key() == functorch.TransformType.Functionalize


def is_mapping() -> bool:
    """Whether `torch.func.vmap` is among them. Under a compiler too: for the graph as a whole."""
    levels = functorch.get_interpreter_stack() or []
    return any(level.key() == functorch.TransformType.Vmap for level in levels)


def in_forward_mode() -> bool:
    """Whether tensors may have tangents."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]


def is_watched() -> bool:
    """Whether every operator is intercepted: by `make_fx`, fake tensors, counters."""
    return torch._C._len_torch_dispatch_stack() > 0  # pyright: ignore[reportPrivateUsage]


def wants_result_alone() -> bool:
    """Whether nothing is wanted but the result: no gradient, no graph, and nobody watches operators."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return not (is_watched() or is_transforming() or in_forward_mode())


def is_exporting() -> bool:
    """Whether what is computed becomes a graph for others, who have no operators of ours."""
    tracing = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]  # it is in torch's documentation
    # What `is_exporting` returns; asked itself, it is true of everything that torch 2.9 compiles.
    exporting = torch.compiler._is_exporting_flag  # pyright: ignore[reportPrivateUsage]
    return tracing or (torch.compiler.is_compiling() and exporting)


def holds_several(grad: Tensor) -> bool:
    """Whether torch has put several gradients into one that looks like a single one (``is_grads_batched``)."""
    return not torch.compiler.is_compiling() and functorch.is_legacy_batchedtensor(grad)


def is_batched(tensor: Tensor) -> bool:
    """Whether `torch.func.vmap` has put several samples into it, so that it has no values to look at."""
    return any(functorch.is_batchedtensor(layer) for layer in _layers(tensor))


def hides_gradient(tensor: Tensor) -> bool:
    """Whether a gradient is wanted of samples that `torch.func.vmap` has put together: the whole says it is not.

    A graph does not show what is in a tensor, so there it is whether that may be.
    """
    if torch.compiler.is_compiling():
        return tensor.is_floating_point() and torch.is_grad_enabled() and is_mapping()
    *layers, innermost = _layers(tensor)
    return innermost.requires_grad and any(functorch.is_batchedtensor(layer) for layer in layers)


def is_differentiated(*tensors: Tensor) -> bool:
    """Whether one of them is differentiated otherwise than by ``backward``: in forward mode, or by `torch.func`.

    `torch.func.vmap` alone is none of these. Under a compiler too: for the graph as a whole.
    """
    if torch.compiler.is_compiling():  # the level is read where the compiler sees it, and makes it a condition
        return _is_graph_differentiated() or forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]
    if in_forward_mode() and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        return True
    return is_transforming() and any(functorch.is_gradtrackingtensor(x) for tensor in tensors for x in _layers(tensor))


def is_graph_transformed() -> bool:
    """Whether a compiler is at work, and a transform of any kind in what it compiles, `torch.func.vmap` included."""
    if not torch.compiler.is_compiling():
        return False
    return _has_graph_levels() or forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]


def _layers(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor, what the outermost transform has wrapped, and so on to the one that has memory."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        yield tensor
        tensor = functorch.get_unwrapped(tensor)
    yield tensor


def untransformed(tensor: Tensor) -> Tensor:
    """What is left of a tensor when all transforms have ended: those at work wrap whatever operators return."""
    if is_transforming():
        *_, tensor = _layers(tensor)
    return tensor


def _is_graph_differentiated() -> bool:
    """A graph is traced anew where it meets other transforms, so this holds for all of it."""
    levels = functorch.get_interpreter_stack() or []
    return any(level.key() != functorch.TransformType.Vmap for level in levels)


def _has_graph_levels() -> bool:
    return bool(functorch.get_interpreter_stack())


# What `torch.compiler.assume_constant_result` sets, which would import the whole compiler.
_is_graph_differentiated._dynamo_marked_constant = True  # type: ignore[attr-defined]
_has_graph_levels._dynamo_marked_constant = True  # type: ignore[attr-defined]
is_mapping._dynamo_marked_constant = True  # type: ignore[attr-defined]
