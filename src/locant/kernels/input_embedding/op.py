"""The operation as torch knows it: with shapes for the compiler, gradients, and one implementation per device.

``torch.ops.locant.input_embedding`` is a pure function: what dropout takes away follows from a seed that it is given,
so that recomputing it, as activation checkpointing does, takes away the same. Its backward is an operation as well.
Asked for a gradient of the gradient, it is computed by the reference, which torch can differentiate.

A token whose id (or position, or segment) has no row: on a CPU the operation raises. On a GPU nothing can be raised
from inside a kernel without poisoning the device, so no memory outside a table is read, the token's output is NaN, and
the number of the first such token of each table is in the fourth output, for the caller to read later.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from locant.kernels.input_embedding import cpu, native, reference
from locant.kernels.input_embedding.dropout import kept
from locant.kernels.input_embedding.operands import NO_FAULT, Operands

__all__ = ["input_embedding", "input_embedding_backward"]

OPERANDS = (
    "Tensor ids, Tensor token, Tensor? position_index, Tensor? position, Tensor? segments, Tensor? segment, "
    "Tensor? gamma, Tensor? beta, Tensor? seed, float scale, int? padding_idx, float? eps, float p"
)
"""The fields of `Operands`, in their order."""

NAMES = tuple(field.name for field in dataclasses.fields(Operands))
LEARNED = tuple(NAMES.index(name) for name in ("token", "position", "segment", "gamma", "beta"))

Forward = tuple[Tensor, Tensor, Tensor, Tensor]


def _operands(values: tuple[Any, ...]) -> Operands:
    return Operands(**dict(zip(NAMES, values, strict=True)))


def _forward_on_cpu(*values: Any) -> Forward:
    o = _operands(values)
    return (*_on_cpu(o).forward(o), o.ids.new_full((3,), NO_FAULT))


def _on_cpu(o: Operands) -> ModuleType:
    return cpu if native.unsupported(o) else native


def _forward_on_cuda(*values: Any) -> Forward:
    from locant.kernels.input_embedding import triton

    return triton.forward(_operands(values))


def _backward_on_cpu(grad: Tensor, mean: Tensor, rstd: Tensor, *values: Any) -> cpu.Gradients:
    o = _operands(values[:-1])
    return _on_cpu(o).backward(grad, mean, rstd, o, values[-1])


def _backward_on_cuda(grad: Tensor, mean: Tensor, rstd: Tensor, *values: Any) -> cpu.Gradients:
    from locant.kernels.input_embedding import triton

    return triton.backward(grad, mean, rstd, _operands(values[:-1]), values[-1])


input_embedding = torch.library.custom_op(
    "locant::input_embedding",
    _forward_on_cpu,
    mutates_args=(),
    device_types="cpu",
    schema=f"({OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
"""Takes the fields of `Operands`; gives the result, mean, reciprocal deviation, and faults of the three tables."""

input_embedding_backward = torch.library.custom_op(
    "locant::input_embedding_backward",
    _backward_on_cpu,
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor grad, Tensor mean, Tensor rstd, {OPERANDS}, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
"""Gives the gradients of token, position, segment, gamma and beta; empty where `needs` says no."""

input_embedding.register_kernel("cuda", _forward_on_cuda)
input_embedding_backward.register_kernel("cuda", _backward_on_cuda)


def _forward_shapes(*values: Any) -> Forward:
    o = _operands(values)
    normed = o.ids.numel() if o.eps is not None else 0
    mean, rstd = (o.token.new_empty(normed, dtype=o.accumulator) for _ in range(2))
    return o.token.new_empty(*o.ids.shape, o.token.shape[1]), mean, rstd, o.ids.new_empty(3)


def _backward_shapes(grad: Tensor, mean: Tensor, rstd: Tensor, *values: Any) -> cpu.Gradients:
    tables = [values[place] for place in LEARNED]
    needed = zip(tables, values[-1], strict=True)
    token, position, segment, gamma, beta = (
        torch.empty_like(table, memory_format=torch.contiguous_format) if need else grad.new_empty(0)
        for table, need in needed
    )
    return token, position, segment, gamma, beta


def _save(ctx: Any, inputs: tuple[Any, ...], output: Forward) -> None:
    _, mean, rstd, fault = output
    ctx.mark_non_differentiable(mean, rstd, fault)
    tensors = [value if isinstance(value, Tensor) else None for value in inputs]
    ctx.save_for_backward(mean, rstd, *tensors)
    ctx.inputs = [None if isinstance(value, Tensor) else value for value in inputs]


def _gradients(ctx: Any, grad: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    mean, rstd, *tensors = ctx.saved_tensors
    values = [plain if tensor is None else tensor for tensor, plain in zip(tensors, ctx.inputs, strict=True)]
    needs = [ctx.needs_input_grad[place] for place in LEARNED]
    if torch.is_grad_enabled():
        found = _differentiable(grad, _operands(tuple(values)), needs)
    else:
        found = input_embedding_backward(grad, mean, rstd, *values, needs)
    gradients: list[Tensor | None] = [None] * len(values)
    for place, need, gradient in zip(LEARNED, needs, found, strict=True):
        gradients[place] = gradient if need else None
    return tuple(gradients)


def _differentiable(grad: Tensor, o: Operands, needs: list[bool]) -> list[Tensor | None]:
    """The same gradients from operations that have gradients themselves."""
    keep = dropped(o) if o.dropping else None
    y = reference.input_embedding(o, keep)
    inputs = [getattr(o, NAMES[place]) for place, need in zip(LEARNED, needs, strict=True) if need]
    found = iter(torch.autograd.grad(y, inputs, grad, create_graph=True))
    return [next(found) if need else None for need in needs]


def dropped(o: Operands) -> Tensor:
    """Which entries dropout leaves on the device of the operands."""
    if o.ids.device.type == "cpu":
        return kept(o)
    from locant.kernels.input_embedding import triton

    return triton.kept(o)


input_embedding.register_fake(_forward_shapes)
input_embedding_backward.register_fake(_backward_shapes)
input_embedding.register_autograd(_gradients, setup_context=_save)
