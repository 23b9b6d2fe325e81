"""`norm_and_rotate`: norm and rotate queries and keys in one operation, with the fastest kernel that supports them.

A compiler sees the custom operators ``locant::norm_and_rotate`` and, in the backward,
``locant::norm_and_rotate_backward``. Other code that needs a gradient calls the kernels through a function. The
backward of this function uses torch's operators if the gradient is differentiated again. Transforms of `torch.func`,
forward mode and exported programs get torch's operators from the start.

The backward needs the inputs. So if a gradient is needed, a rotation in place keeps copies of q and k.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.errors import ShapeError
from locant.kernels import transforms
from locant.kernels.norm_rotary import cpu, reference
from locant.kernels.norm_rotary.choice import choose_kernel
from locant.kernels.norm_rotary.head_norm import HeadNorm
from locant.kernels.rotary.inplace import is_transformed, require_writable
from locant.kernels.rotary.op import is_plain, require_same_tokens, rotate_into
from locant.kernels.rotary.reference import Layout, Tables


@overload
def norm_and_rotate(
    q: Tensor, k: Tensor, positions: Tensor, tables: Tables, layout: Layout, norm: HeadNorm, *, inplace: bool = False
) -> tuple[Tensor, Tensor]: ...
@overload
def norm_and_rotate(
    q: Tensor, k: None, positions: Tensor, tables: Tables, layout: Layout, norm: HeadNorm, *, inplace: bool = False
) -> tuple[Tensor, None]: ...
def norm_and_rotate(
    q: Float[Tensor, "batch heads seq head_dim"],
    k: Float[Tensor, "batch kv_heads seq head_dim"] | None,
    positions: Int[Tensor, "#batch seq"] | Int[Tensor, "#batch seq axes"],
    tables: Tables,
    layout: Layout,
    norm: HeadNorm,
    *,
    inplace: bool = False,
) -> tuple[Float[Tensor, "batch heads seq head_dim"], Float[Tensor, "batch kv_heads seq head_dim"] | None]:
    """Norm the heads of `q` and `k`, and rotate them as `locant.kernels.rotary.rotate` does.

    Raises:
        ShapeError: `q` and `k` differ in more than their heads, or a weight does not match them. In place: they share
            memory, or elements of a tensor do.
        LocantError: a tensor to overwrite is a leaf, or a view that torch cannot track. Nothing is written then.

    >>> still = Tables(torch.zeros(1))
    >>> norm = HeadNorm(torch.tensor([1.0, 2.0]), None)
    >>> norm_and_rotate(torch.tensor([[[[3.0, 3.0]]]]), None, torch.tensor([[2]]), still, "half", norm)[0]
    tensor([[[[1.0000, 2.0000]]]])
    """
    require_same_tokens(q, k)
    norm.require_fits(q, k)
    if not inplace and transforms.is_plain_eager() and type(q) is Tensor:
        out_q, out_k = torch.empty_like(q), None if k is None else torch.empty_like(k)
        _run(q, k, out_q, out_k, positions, tables, layout, norm)
        return out_q, out_k
    if not inplace:
        return _norm_and_rotate_copies(q, k, positions, tables, layout, norm)
    if require_writable(q, k) and k is not None:
        raise ShapeError("got one tensor as q and k to norm and rotate in place", "k.clone()")
    needs_grad, compiling = _needs_grad(q, k, norm), torch.compiler.is_compiling()
    if not (needs_grad or compiling or is_transformed()) and is_plain(q):
        _run(q, k, q, k, positions, tables, layout, norm)
        return q, k
    if needs_grad:  # the graph keeps the inputs, which are overwritten
        rotated = _norm_and_rotate_copies(q.clone(), None if k is None else k.clone(), positions, tables, layout, norm)
    else:
        rotated = _norm_and_rotate_copies(q, k, positions, tables, layout, norm)
    rotated_q, rotated_k = rotated
    return q.copy_(rotated_q), None if k is None or rotated_k is None else k.copy_(rotated_k)


def can_write_into(q: Tensor, k: Tensor) -> bool:
    """Return whether `norm_and_rotate_into` may replace `norm_and_rotate`: plain tensors, without a graph or gradients.

    If `q` and `k` are of different tokens or dtypes, only the other functions can rotate them, or raise the error.
    """
    if not (transforms.is_plain_eager() and type(q) is Tensor and type(k) is Tensor and q.dtype == k.dtype):
        return False
    (batch, _, *rest), (k_batch, _, *k_rest) = q.shape, k.shape
    return batch == k_batch and rest == k_rest and q.device == k.device


def norm_and_rotate_into(
    q: Tensor, k: Tensor | None, v: Tensor | None, out_q: Tensor, out_k: Tensor | None, out_v: Tensor | None,
    positions: Tensor, tables: Tables, layout: Layout, norm: HeadNorm | None,
) -> None:  # fmt: skip
    """Write the rotated norms of `q` and `k` into `out_q` and `out_k`, and `v` into `out_v`, in one launch.

    This is for caches: the outputs are any views, and no gradient is recorded. Without a norm, `q` and `k` are rotated.
    The caller has asked `can_write_into` and `HeadNorm.require_fits`, before it reserved the outputs.
    """
    if torch.is_grad_enabled():
        with torch.no_grad():
            norm_and_rotate_into(q, k, v, out_q, out_k, out_v, positions, tables, layout, norm)
        return
    kernels = _kernels(q, positions, tables, norm) if is_plain(q) else None
    if kernels is reference and norm is None:
        rotate_into(q, k, out_q, out_k, positions, tables, layout)  # the rotation alone has more kernels
        if v is not None and out_v is not None:
            out_v.copy_(v)
    else:
        (kernels or reference).norm_and_rotate_(q, k, out_q, out_k, positions, tables, layout, norm, v, out_v)


def _run(
    q: Tensor, k: Tensor | None, out_q: Tensor, out_k: Tensor | None,
    positions: Tensor, tables: Tables, layout: Layout, norm: HeadNorm | None,
) -> None:  # fmt: skip
    _kernels(q, positions, tables, norm).norm_and_rotate_(q, k, out_q, out_k, positions, tables, layout, norm)


def _run_backward(
    grad_q: Tensor, grad_k: Tensor | None, q: Tensor, k: Tensor | None,
    positions: Tensor, tables: Tables, layout: Layout, norm: HeadNorm,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    kernels = _kernels(q, positions, tables, norm)
    return kernels.norm_and_rotate_backward(grad_q, grad_k, q, k, positions, tables, layout, norm)


def _kernels(q: Tensor, positions: Tensor, tables: Tables, norm: HeadNorm | None) -> ModuleType:
    """Return the module with the kernels that support these tensors."""
    kernel = choose_kernel(q, positions, tables, norm).kernel
    if kernel == "triton":
        from locant.kernels.norm_rotary import triton

        return triton
    return cpu if kernel == "native" else reference


def _needs_grad(q: Tensor, k: Tensor | None, norm: HeadNorm) -> bool:
    tensors = (q, k, norm.q_weight, norm.k_weight)
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _norm_and_rotate_copies(
    q: Tensor, k: Tensor | None, positions: Tensor, tables: Tables, layout: Layout, norm: HeadNorm
) -> tuple[Tensor, Tensor | None]:
    """Return results in new memory, by torch's operators, an operator of ours, or a function, as the caller needs."""
    compiling = torch.compiler.is_compiling()
    by_torch = transforms.is_differentiated(q) if compiling else is_transformed() or transforms.in_forward_mode()
    if by_torch or torch.compiler.is_exporting():
        return reference.norm_and_rotate(q, k, positions, tables, layout, norm)
    inputs = (q, k, norm.q_weight, norm.k_weight, *_options(positions, tables, layout, norm))
    if compiling or transforms.is_functionalizing():
        rotated_q, rotated_k = _norm_and_rotate(*inputs)
        return rotated_q, None if k is None else rotated_k
    return _NormAndRotate.apply(*inputs) if _needs_grad(q, k, norm) else _NormAndRotate.forward(*inputs)


# ---------------------------------------------------------------------- operators

ARGUMENTS = (
    "Tensor? q_weight, Tensor? k_weight, Tensor positions, Tensor table, Tensor? axis_of_pair, "
    "int levels, float attention_factor, str layout, float eps, bool plus_one, bool round_before_weight"
)


def _options(positions: Tensor, tables: Tables, layout: Layout, norm: HeadNorm) -> tuple[Any, ...]:
    """Return the arguments of torch's operators and functions after the weights."""
    numbers = (tables.levels, tables.attention_factor, layout, norm.eps, norm.plus_one, norm.round_before_weight)
    return positions, tables.table, tables.axis_of_pair, *numbers


def _to_kernel_arguments(
    q_weight: Tensor | None, k_weight: Tensor | None,
    positions: Tensor, table: Tensor, axis_of_pair: Tensor | None,
    levels: int, attention_factor: float, layout: Layout, eps: float, plus_one: bool, round_before_weight: bool,
) -> tuple[Tensor, Tables, Layout, HeadNorm]:  # fmt: skip
    norm = HeadNorm(q_weight, k_weight, eps, plus_one, round_before_weight=round_before_weight)
    return positions, Tables(table, levels, attention_factor, axis_of_pair), layout, norm


@torch.library.custom_op(
    "locant::norm_and_rotate", mutates_args=(), schema=f"(Tensor q, Tensor? k, {ARGUMENTS}) -> (Tensor, Tensor)"
)
def _norm_and_rotate(q: Tensor, k: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    out_q, out_k = _empty(q, k, *options)
    _run(q, k, out_q, None if k is None else out_k, *_to_kernel_arguments(*options))
    return out_q, out_k


@_norm_and_rotate.register_fake
def _empty(q: Tensor, k: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(0) if k is None else torch.empty_like(k)


@torch.library.custom_op(
    "locant::norm_and_rotate_backward",
    mutates_args=(),
    schema=f"(Tensor grad_q, Tensor? grad_k, Tensor q, Tensor? k, {ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    grad_q: Tensor, grad_k: Tensor | None, q: Tensor, k: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = _run_backward(grad_q, grad_k, q, k, *_to_kernel_arguments(*options))
    dq, dk, dq_weight, dk_weight = (q.new_empty(0) if grad is None else grad for grad in grads)
    return dq, dk, dq_weight, dk_weight


@_backward.register_fake
def _empty_gradients(
    grad_q: Tensor, grad_k: Tensor | None, q: Tensor, k: Tensor | None, q_weight: Tensor | None,
    k_weight: Tensor | None, *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    keys = (None, None) if k is None or grad_k is None else (k, k_weight)
    dq, dk, dq_weight, dk_weight = (
        q.new_empty(0) if x is None else torch.empty_like(x) for x in (q, keys[0], q_weight, keys[1])
    )
    return dq, dk, dq_weight, dk_weight


# ---------------------------------------------------------------------- derivatives


def _save_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.settings = inputs[7:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_q: Tensor | None, grad_k: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k and both weights."""
    q, k, *options = *ctx.saved_tensors, *ctx.settings
    grad_q = torch.zeros_like(q) if grad_q is None else grad_q
    grad_k = torch.zeros_like(k) if grad_k is None and k is not None else grad_k
    if k is None:
        grad_k = None
    again = torch.is_grad_enabled() or transforms.is_batched_gradient(grad_q)
    if torch.compiler.is_compiling() or not (again or is_plain(q)):
        grads = _backward(grad_q, grad_k, q, k, *options)
    elif again or (grad_k is not None and transforms.is_batched_gradient(grad_k)):
        grads = reference.norm_and_rotate_backward(grad_q, grad_k, q, k, *_to_kernel_arguments(*options))
    else:
        grads = _run_backward(grad_q, grad_k, q, k, *_to_kernel_arguments(*options))
    needed = (grad if need else None for grad, need in zip(grads, ctx.needs_input_grad, strict=False))
    return *needed, *(None for _ in options[2:])


class _NormAndRotate(torch.autograd.Function):
    """The norm and rotation of both tensors into new memory."""

    @staticmethod
    def forward(q: Tensor, k: Tensor | None, *options: Any) -> tuple[Tensor, Tensor | None]:
        if not is_plain(q):
            rotated_q, rotated_k = _norm_and_rotate(q, k, *options)
            return rotated_q, None if k is None else rotated_k
        out_q, out_k = torch.empty_like(q), None if k is None else torch.empty_like(k)
        _run(q, k, out_q, out_k, *_to_kernel_arguments(*options))
        return out_q, out_k

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        _save_context(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, *grads)


_norm_and_rotate.register_autograd(_differentiate, setup_context=_save_context)
