"""The operation as torch knows it, on a CPU: with shapes for the compiler and gradients; and the look-up alone.

``torch.ops.locant.input_embedding`` is a pure function: what dropout takes away follows from a seed that it is given,
so that recomputing it, as activation checkpointing does, takes away the same. Its backward is an operation as well.
Asked for a gradient of the gradient, it is computed by the reference, which torch can differentiate.

`look_up` reads rows of a trained table, with a gradient that is added up in float32 however narrow the table is. torch
adds up the gradient of a 16-bit table in 16 bits: a row that is read often stops growing where the next addend is less
than half of its last bit, which is at 256 for ones in bfloat16. Here every gradient is summed in float32 and rounded
once. Tables in float32 and float64, and those that are not trained, are read by torch itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.kernels import native as library
from locant.kernels.input_embedding import native, reference
from locant.kernels.input_embedding.reference import Operands
from locant.kernels.transforms import in_forward_mode, is_exporting, is_graph_transformed, is_transforming

OPERANDS = (
    "Tensor ids, Tensor token, Tensor? position_index, Tensor? position, Tensor? segments, Tensor? segment, "
    "Tensor? gamma, Tensor? beta, Tensor? seed, float scale, int? padding_idx, float? eps, float p"
)
"""The fields of `Operands`, in their order."""

NAMES = tuple(field.name for field in dataclasses.fields(Operands))
LEARNED = tuple(NAMES.index(name) for name in ("token", "position", "segment", "gamma", "beta"))


def _operands(values: tuple[Any, ...]) -> Operands:
    return Operands(**dict(zip(NAMES, values, strict=True)))


@torch.library.custom_op(
    "locant::input_embedding",
    mutates_args=(),
    device_types="cpu",
    schema=f"({OPERANDS}) -> (Tensor, Tensor, Tensor)",
)
def input_embedding(*values: Any) -> native.Forward:
    """Takes the fields of `Operands`; gives what `native.forward` does, and raises for an id without a row."""
    return native.forward(_operands(values))


@torch.library.custom_op(
    "locant::input_embedding_backward",
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor grad, Tensor mean, Tensor rstd, {OPERANDS}, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def input_embedding_backward(grad: Tensor, mean: Tensor, rstd: Tensor, *values: Any) -> native.Gradients:
    """Gives the gradients of token, position, segment, gamma and beta; empty where the last argument says no."""
    return native.backward(grad, mean, rstd, _operands(values[:-1]), values[-1])


@input_embedding.register_fake
def _(*values: Any) -> native.Forward:
    return native.empty_forward(_operands(values))


@input_embedding_backward.register_fake
def _(grad: Tensor, mean: Tensor, rstd: Tensor, *values: Any) -> native.Gradients:
    return native.empty_backward(_operands(values[:-1]), values[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: native.Forward) -> None:
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    tensors = [value if isinstance(value, Tensor) else None for value in inputs]
    ctx.save_for_backward(mean, rstd, *tensors)
    ctx.inputs = [None if isinstance(value, Tensor) else value for value in inputs]


def _gradients(ctx: Any, grad: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    mean, rstd, *tensors = ctx.saved_tensors
    values = [plain if tensor is None else tensor for tensor, plain in zip(tensors, ctx.inputs, strict=True)]
    needs = [ctx.needs_input_grad[place] for place in LEARNED]
    if torch.is_grad_enabled():
        of_tables = _differentiable(grad, _operands(tuple(values)), needs)
    else:
        of_tables = input_embedding_backward(grad, mean, rstd, *values, needs)
    gradients: list[Tensor | None] = [None] * len(values)
    for place, need, gradient in zip(LEARNED, needs, of_tables, strict=True):
        gradients[place] = gradient if need else None
    return tuple(gradients)


def _differentiable(grad: Tensor, o: Operands, needs: list[bool]) -> list[Tensor | None]:
    """The same gradients from operations that have gradients themselves."""
    keep = native.kept(o) if o.dropping else None
    y = reference.input_embedding(o, keep)
    inputs = [table for table, need in zip(o.learned, needs, strict=True) if need and table is not None]
    gradients = iter(torch.autograd.grad(y, inputs, grad, create_graph=True))
    return [next(gradients) if need else None for need in needs]


input_embedding.register_autograd(_gradients, setup_context=_save)


# ---------------------------------------------------------------------- the look-up alone


def look_up(
    ids: Int[Tensor, "*batch"], table: Float[Tensor, "num_rows width"], padding_idx: int | None = None
) -> Float[Tensor, "*batch width"]:
    """The row of every id; the padding row gets no gradient.

    >>> ones = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    >>> torch.autograd.grad(look_up(torch.zeros(1_000, dtype=torch.long), ones).sum(), ones)[0]
    tensor([[1000., 1000.]], dtype=torch.bfloat16)
    """
    is_transformed = is_transforming() or is_graph_transformed()
    is_trained = torch.is_grad_enabled() and (table.requires_grad or is_transformed)
    if table.dtype not in (torch.float16, torch.bfloat16) or not is_trained or is_exporting():
        return F.embedding(ids, table, padding_idx)
    is_plain = type(table) in (Tensor, nn.Parameter) and table.device.type == "cpu"
    is_native = library.has(native.FORWARD)
    if not is_plain or is_transformed or in_forward_mode() or (torch.compiler.is_compiling() and not is_native):
        # Slower: unless it is compiled, it converts all rows.
        return F.embedding(ids, table.float(), padding_idx).to(table.dtype)
    if not is_native:
        used, places = torch.unique(ids, return_inverse=True)
        return F.embedding(places, F.embedding(used, table, padding_idx).float()).to(table.dtype)
    tokens = ids.reshape(1, -1)
    rows, _, _ = input_embedding(tokens, table, *[None] * 7, 1.0, padding_idx, None, 0.0)
    return rows.view(*ids.shape, table.shape[1])
