"""`rotate`: rotate queries and keys in one operation, with the fastest kernel that supports them.

All kernels have these signatures::

    reference.rotate(q, k, positions, tables, layout, inverse) -> (q, k)                    any device
    cpu.rotate_natively_(q, k, out_q, out_k, positions, tables, layout, inverse) -> None    C
    cpu.rotate_by_torch_(q, k, out_q, out_k, positions, tables, layout, inverse) -> None
    triton.rotate_(q, k, out_q, out_k, positions, tables, layout, inverse) -> None

    q            [batch, heads, seq, head_dim], any strides, any floating dtype
    k            [batch, kv_heads, seq, head_dim], the same dtype and device, any strides, or None.
                 `rotate` raises for another batch, because kernels use the sizes of q for q and k
    positions    int64 [batch or 1, seq], any strides; or [batch or 1, seq, axes] together with tables.axis_of_pair
    tables       `Tables`, see reference.py
    layout       "half": pair i is (i, i + rotary_dim / 2); "interleaved": (2i, 2i + 1)
    out_q, out_k the shape and dtype of q and k, any strides without overlap. Every element is written, including the
                 dimensions after the pairs. They may be q and k themselves (the same tensor objects) to rotate in
                 place, if q and k do not share memory
    inverse      rotate by the negative angle (sine negated, the attention factor unchanged): the backward

Arithmetic: cos and sin are computed as `Tables` defines them and rounded to float32 (float64 for float64 inputs), then
``a cos - b sin`` and ``b cos + a sin`` in float32, every product rounded, and the result rounded once more to the dtype
of q. Any size may be 0. Then nothing is written.

A compiler sees two custom operators. ``locant::rotate`` returns new tensors. Its derivative is the same operator with
the negative angle, so it can be differentiated any number of times. A backward pass stores only the positions and the
tables. ``locant::rotate_`` writes into q and k. Tools that record or count operators also see these operators. Other
uncompiled code calls the kernels through a function with the same derivatives, which also supports `torch.func`.
Without gradients it calls the kernels directly. Then one token takes 16 microseconds, instead of 52 with the function
or 42 with the operator.
"""

from __future__ import annotations

from typing import Any, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.graph import increment_version

from locant.errors import LocantError, ShapeError
from locant.kernels import transforms
from locant.kernels.rotary import cpu, reference
from locant.kernels.rotary.choice import choose_kernel
from locant.kernels.rotary.inplace import are_the_same, is_transformed, require_writable
from locant.kernels.rotary.reference import Layout, Tables


@overload
def rotate(
    q: Tensor, k: Tensor, positions: Tensor, tables: Tables, layout: Layout, *,
    inplace: bool = False, inverse: bool = False,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def rotate(
    q: Tensor, k: None, positions: Tensor, tables: Tables, layout: Layout, *,
    inplace: bool = False, inverse: bool = False,
) -> tuple[Tensor, None]: ...  # fmt: skip
def rotate(
    q: Float[Tensor, "batch heads seq head_dim"],
    k: Float[Tensor, "batch kv_heads seq head_dim"] | None,
    positions: Int[Tensor, "#batch seq"] | Int[Tensor, "#batch seq axes"],
    tables: Tables,
    layout: Layout,
    *,
    inplace: bool = False,
    inverse: bool = False,
) -> tuple[Float[Tensor, "batch heads seq head_dim"], Float[Tensor, "batch kv_heads seq head_dim"] | None]:
    """Rotate the first ``2 * tables.pairs()`` dimensions of every head by its token's position.

    Args:
        q, k: tensors with one dtype on one device. `k` may be ``None``.
        positions: one position per token, or one per token and axis. `tables.axis_of_pair` is the axis of each pair.
        tables: the tables for cosines and sines.
        layout: the dimensions that form a pair.
        inplace: write into `q` and `k`, and return them. If `q` and `k` have the same elements in memory, they are
            rotated once.
        inverse: rotate by the negative angles.

    Raises:
        ShapeError: `q` and `k` differ in more than their heads. In place: elements of a tensor share memory, or `q` and
            `k` have only some elements in common.
        LocantError: a tensor to overwrite is a leaf, or a view that torch cannot track. Nothing is written then.

    >>> quarter = Tables(torch.tensor([torch.pi / 2]))
    >>> rotate(torch.tensor([[[[1.0, 0.0]]]]), None, torch.tensor([[2]]), quarter, "half")[0].round()
    tensor([[[[-1., -0.]]]])
    """
    require_same_tokens(q, k)
    if not inplace and transforms.is_plain_eager() and type(q) is Tensor:
        out_q, out_k = torch.empty_like(q), None if k is None else torch.empty_like(k)
        _run(q, k, out_q, out_k, positions, tables, layout, inverse)
        return out_q, out_k
    options = (positions, tables.table, tables.axis_of_pair, tables.levels, tables.attention_factor, layout, inverse)
    if not inplace:
        return _rotate_copies(q, k, *options)
    is_same = require_writable(q, k)
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or (k is not None and k.requires_grad))
    is_traced = torch.compiler.is_compiling() and (needs_grad or transforms.is_graph_transformed())
    if is_traced or is_transformed() or torch.compiler.is_exporting():
        # Function transforms support torch's operators, and a compiler removes an unnecessary copy. q and k are
        # both rotated before one of them is written, because they may share memory.
        rotated_q, rotated_k = _rotate_copies(q, k, *options)
        return q.copy_(rotated_q), None if k is None or rotated_k is None else k.copy_(rotated_k)
    if needs_grad:
        if positions.is_inference():  # torch would raise, too, but after q is overwritten
            raise LocantError(
                "got positions made in inference mode for a gradient",
                "create positions outside of torch.inference_mode()",
            )
        rotated_q = _RotateInPlace.apply(q, *options)
        return rotated_q, rotated_q if is_same else None if k is None else _RotateInPlace.apply(k, *options)
    _write(q, None if is_same else k, *options)
    return q, k


def require_same_tokens(q: Tensor, k: Tensor | None) -> None:
    """Raise if `q` and `k` differ in more than their heads."""
    if k is None:
        return
    (batch, _, *rest), (k_batch, _, *k_rest) = q.shape, k.shape
    if batch != k_batch or rest != k_rest:
        raise ShapeError(
            f"got q of shape {tuple(q.shape)} and k of shape {tuple(k.shape)}, which differ in more than their heads",
            "pass q and k with the same batch and length",
        )


def rotate_into(
    q: Tensor, k: Tensor | None, out_q: Tensor, out_k: Tensor | None,
    positions: Tensor, tables: Tables, layout: Layout,
) -> None:  # fmt: skip
    """Write rotated queries and keys into any memory, such as the memory of a cache. No gradient is recorded."""
    _run(q, k, out_q, out_k, positions, tables, layout, False)
    increment_version(out_q if out_k is None else (out_q, out_k))  # torch's graph does not see writes of a kernel


def _write(q: Tensor, k: Tensor | None, *options: Any) -> None:
    if not torch.compiler.is_compiling() and is_plain(q):
        _run(
            q, k, q, k, *_to_kernel_arguments(*options)
        )  # torch's own operators, which notify the graph of their writes
    else:
        _rotate_(q, k, *options)


def is_plain(q: Tensor) -> bool:
    """Return whether this is a plain tensor that can be rotated without torch's dispatch."""
    return type(q) is Tensor and (q.is_cpu or q.is_cuda) and not transforms.is_dispatch_mode_active()


# ---------------------------------------------------------------------- operators

ARGUMENTS = (
    "Tensor positions, Tensor table, Tensor? axis_of_pair, int levels, float attention_factor, str layout, bool inverse"
)


@torch.library.custom_op(
    "locant::rotate", mutates_args=(), schema=f"(Tensor q, Tensor? k, {ARGUMENTS}) -> (Tensor, Tensor)"
)
def _rotate(q: Tensor, k: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    out_q, out_k = _empty(q, k, *options)
    _run(q, k, out_q, out_k, *_to_kernel_arguments(*options))
    return out_q, out_k


@_rotate.register_fake
def _empty(q: Tensor, k: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(0) if k is None else torch.empty_like(k)


@torch.library.custom_op(
    "locant::rotate_", mutates_args=("q", "k"), schema=f"(Tensor(a!) q, Tensor(b!)? k, {ARGUMENTS}) -> ()"
)
def _rotate_(q: Tensor, k: Tensor | None, *options: Any) -> None:
    k = None if are_the_same(q, k) else k  # compiled code can only check this here
    _run(q, k, q, k, *_to_kernel_arguments(*options))


@_rotate_.register_fake
def _write_nothing(q: Tensor, k: Tensor | None, *options: Any) -> None:
    return None


def _to_kernel_arguments(
    positions: Tensor, table: Tensor, axis_of_pair: Tensor | None, levels: int, attention_factor: float,
    layout: Layout, inverse: bool,
) -> tuple[Tensor, Tables, Layout, bool]:  # fmt: skip
    """Convert the arguments of torch's operators and functions to the arguments of kernels."""
    return positions, Tables(table, levels, attention_factor, axis_of_pair), layout, inverse


def _run(
    q: Tensor, k: Tensor | None, out_q: Tensor, out_k: Tensor | None,
    positions: Tensor, tables: Tables, layout: Layout, inverse: bool,
) -> None:  # fmt: skip
    kernel = choose_kernel(q, positions, tables).kernel
    if kernel == "reference":
        rotated_q, rotated_k = reference.rotate(q, k, positions, tables, layout, inverse)
        out_q.copy_(rotated_q)
        if out_k is not None and rotated_k is not None:
            out_k.copy_(rotated_k)
        return
    if kernel == "triton":
        from locant.kernels.rotary.triton import rotate_
    else:
        rotate_ = cpu.rotate_natively_ if kernel == "native" else cpu.rotate_by_torch_
    rotate_(q, k, out_q, None if k is None else out_k, positions, tables, layout, inverse)


# ---------------------------------------------------------------------- derivatives


def _rotate_copies(q: Tensor, k: Tensor | None, *options: Any) -> tuple[Tensor, Tensor | None]:
    """Return rotated copies. A compiler gets the operator, and other code gets a function that supports `torch.func`.

    Code without gradients, as in generation, does not need the function. The operator supports only ``backward``, so a
    compiler that differentiates in another way gets torch's operators. Exported programs also get torch's operators,
    because ONNX, ExecuTorch and OpenVINO do not have our operators.
    """
    if torch.compiler.is_exporting() or (torch.compiler.is_compiling() and transforms.is_differentiated(q)):
        return _rotate_with_torch(q, *options), None if k is None else _rotate_with_torch(k, *options)
    if torch.compiler.is_compiling() or transforms.is_functionalizing():
        rotated_q, rotated_k = _rotate(q, k, *options)
        return rotated_q, None if k is None else rotated_k
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or (k is not None and k.requires_grad))
    needs_function = needs_grad or transforms.in_forward_mode() or transforms.is_transforming()
    return _Rotate.apply(q, k, *options) if needs_function else _Rotate.forward(q, k, *options)


def _save_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    _, _, *tensors = inputs[:5]
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.settings = inputs[5:]
    ctx.set_materialize_grads(False)


def _rotate_back(ctx: Any, grad_q: Tensor | None, grad_k: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of q and k: the gradients of the outputs, rotated by the negative angles."""
    *numbers, layout, inverse = ctx.settings
    options = (*ctx.saved_tensors, *numbers, layout, not inverse)
    grads = [grad if needed else None for grad, needed in zip((grad_q, grad_k), ctx.needs_input_grad, strict=False)]
    if any(grad is not None and transforms.is_batched_gradient(grad) for grad in grads):
        rotated = tuple(None if grad is None else _rotate_with_torch(grad, *options) for grad in grads)
    else:
        rotated = _rotate_existing(grads[0], grads[1], *options)
    return *rotated, *(None for _ in options)


def _rotate_existing(q: Tensor | None, k: Tensor | None, *options: Any) -> tuple[Tensor | None, ...]:
    if q is not None:
        return _rotate_copies(q, k, *options)
    return None, None if k is None else _rotate_copies(k, None, *options)[0]


def _rotate_with_torch(x: Tensor, *options: Any) -> Tensor:
    """Return a rotated copy, with only torch's operators and the same bits."""
    return reference.rotate(x, None, *_to_kernel_arguments(*options))[0]


class _Rotate(torch.autograd.Function):
    """The rotation of both tensors into new memory."""

    @staticmethod
    def forward(q: Tensor, k: Tensor | None, *options: Any) -> tuple[Tensor, Tensor | None]:
        if not is_plain(q):
            rotated_q, rotated_k = _rotate(q, k, *options)
            return rotated_q, None if k is None else rotated_k
        out_q, out_k = torch.empty_like(q), None if k is None else torch.empty_like(k)
        _run(
            q, k, out_q, out_k, *_to_kernel_arguments(*options)
        )  # torch's own operators, without the dispatch of a custom operator
        return out_q, out_k

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        _save_context(ctx, inputs, output)
        ctx.kinds = tuple(None if x is None else (x.shape, x.dtype, x.device) for x in output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _rotate_back(ctx, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        """Rotate tangents like their vectors. For a missing tangent, torch requires zeros."""
        rotated = _rotate_existing(tangents[0], tangents[1], *ctx.saved_tensors, *ctx.settings)
        return tuple(
            torch.zeros(kind[0], dtype=kind[1], device=kind[2]) if x is None and kind is not None else x
            for x, kind in zip(rotated, ctx.kinds, strict=True)
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        """Rotate several samples as a larger batch."""
        q, k, positions, *options = args
        if any(dim is not None for dim in in_dims[3:]):
            raise LocantError("got tables that differ from sample to sample", "use one encoding for all samples")

        def merge(x: Tensor, dim: int | None) -> Tensor:
            return (x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

        samples = (info.batch_size, q.shape[1 if in_dims[0] == 0 else 0])
        if in_dims[2] is not None or positions.shape[0] > 1:
            each = positions[None] if in_dims[2] is None else positions.movedim(in_dims[2], 0)
            positions = each.expand(*samples, *each.shape[2:]).flatten(0, 1)
        rotated = _rotate_copies(merge(q, in_dims[0]), None if k is None else merge(k, in_dims[1]), positions, *options)
        return tuple(None if x is None else x.unflatten(0, samples) for x in rotated), (0, None if k is None else 0)


class _RotateInPlace(torch.autograd.Function):
    """The rotation of one tensor in place. If a function writes to several tensors, torch does not allow views."""

    @staticmethod
    def forward(x: Tensor, *options: Any) -> Tensor:
        _write(x, None, *options)
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.mark_dirty(inputs[0])
        _save_context(ctx, (inputs[0], None, *inputs[1:]), output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rotated, _, *nothing = _rotate_back(ctx, grads[0], None)
        return rotated, *nothing


_rotate.register_autograd(_rotate_back, setup_context=_save_context)
