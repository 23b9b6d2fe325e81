"""`rotate`: queries and keys rotated in one operation, by whichever kernel is fastest for them.

The kernels agree on this::

    reference.rotate(q, k, positions, tables, layout, inverse) -> (q, k)                    any device
    cpu.rotate_natively_(q, k, out_q, out_k, positions, tables, layout, inverse) -> None    C
    cpu.rotate_by_torch_(q, k, out_q, out_k, positions, tables, layout, inverse) -> None
    triton.rotate_(q, k, out_q, out_k, positions, tables, layout, inverse) -> None

    q            [batch, heads, seq, head_dim], any strides, any floating dtype
    k            [batch, kv_heads, seq, head_dim], the same dtype and device, other strides; or None: q alone.
                 `rotate` refuses another batch: kernels take the sizes of q for those of both
    positions    int64 [batch or 1, seq], any strides; or [batch or 1, seq, axes] together with tables.axis_of_pair
    tables       `Tables`, see reference.py
    layout       "half": pair i is (i, i + rotary_dim / 2); "interleaved": (2i, 2i + 1)
    out_q, out_k of the shape and dtype of q and k, any strides without overlap; every element is written, those beyond
                 the pairs included. They may be q and k themselves (the same tensor objects): in place; then q and k
                 share no memory
    inverse      rotate by the negative angle (sine negated, the attention factor unchanged): the backward

Arithmetic: cos and sin are formed as `Tables` says, rounded to float32 (float64 for float64 inputs), then
``a cos - b sin`` and ``b cos + a sin`` in float32, every product rounded, and rounded once more to the dtype of q.
A size of 0 anywhere is legal and writes nothing.

A compiler sees two operators of ours. ``locant::rotate`` makes new tensors; its derivative is itself with the negative
angle, so that it can be differentiated as often as one likes, and all that a backward pass keeps is the positions and
the tables. ``locant::rotate_`` writes into q and k. Tools that record or count operators see them, too. Otherwise
uncompiled code reaches the kernels through a function with the same derivatives, which also knows `torch.func`, and
directly without gradients: one token then takes 16 microseconds, with the function 52, by the operator 42.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, Literal, NamedTuple, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.errors import LocantError, ShapeError
from locant.kernels import transforms
from locant.kernels.rotary import cpu, reference
from locant.kernels.rotary.inplace import are_the_same, is_transformed, require_writable
from locant.kernels.rotary.reference import Layout, Tables


class KernelChoice(NamedTuple):
    """Which kernel rotates some tensors, and why not a faster one."""

    kernel: Literal["native", "cpu", "triton", "reference"]
    why: str


def choose_kernel(
    q: Float[Tensor, "batch heads seq head_dim"],
    positions: Int[Tensor, "#batch seq"] | Int[Tensor, "#batch seq axes"],
    tables: Tables,
) -> KernelChoice:
    """The fastest kernel that can rotate these tensors.

    >>> q = torch.ones(1, 1, 1, 2, device="meta")
    >>> choose_kernel(q, torch.zeros(1, 1, dtype=torch.int64), Tables(torch.ones(1)))
    KernelChoice(kernel='reference', why='there is no kernel for meta')
    """
    if q.device.type == "cpu":
        reason = cpu.why_not_native(q, positions, tables)
        return KernelChoice("native", "q is on a CPU") if reason is None else KernelChoice("cpu", reason)
    if q.device.type != "cuda":
        return KernelChoice("reference", f"there is no kernel for {q.device.type}")
    if not _has_triton():
        return KernelChoice("reference", "triton is not installed")
    from locant.kernels.rotary import triton

    reason = triton.unsupported(q, positions, tables)
    return KernelChoice("triton", "q is on a GPU") if reason is None else KernelChoice("reference", reason)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


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
        q, k: of one dtype, on one device; `k` may be missing.
        positions: one per token, or several per token where `tables.axis_of_pair` says which pair takes which.
        tables: where cosines and sines come from.
        layout: which dimensions form a pair.
        inplace: write into `q` and `k`, and return them. Where both are the same elements, these are rotated once.
        inverse: rotate by the negative angles.

    Raises:
        ShapeError: `q` and `k` differ in more than their heads; or, in place, a tensor repeats its elements in memory,
            or `q` and `k` have only some in common.
        LocantError: what is to be overwritten is a leaf, or a view that torch cannot follow. Nothing is written then.

    >>> quarter = Tables(torch.tensor([torch.pi / 2]))
    >>> rotate(torch.tensor([[[[1.0, 0.0]]]]), None, torch.tensor([[2]]), quarter, "half")[0].round()
    tensor([[[[-1., -0.]]]])
    """
    if k is not None:
        (batch, _, *rest), (k_batch, _, *k_rest) = q.shape, k.shape
        if batch != k_batch or rest != k_rest:
            raise ShapeError(
                f"got q of shape {tuple(q.shape)} and k of shape {tuple(k.shape)}, which differ in more than their "
                "heads",
                "q and k of the same batch and length",
            )
    if not inplace and transforms.is_plain_eager() and type(q) is Tensor:
        out_q, out_k = torch.empty_like(q), None if k is None else torch.empty_like(k)
        _run(q, k, out_q, out_k, positions, tables, layout, inverse)
        return out_q, out_k
    how = (positions, tables.table, tables.axis_of_pair, tables.levels, tables.attention_factor, layout, inverse)
    if not inplace:
        return _rotated(q, k, *how)
    same = require_writable(q, k)
    in_graph = torch.is_grad_enabled() and (q.requires_grad or (k is not None and k.requires_grad))
    traced = torch.compiler.is_compiling() and (in_graph or transforms.is_graph_transformed())
    if traced or is_transformed() or torch.compiler.is_exporting():
        # Function transforms know operators of torch, and a compiler removes the copy where it is not needed. Both are
        # rotated before either is written, as they may share memory.
        rotated_q, rotated_k = _rotated(q, k, *how)
        return q.copy_(rotated_q), None if k is None or rotated_k is None else k.copy_(rotated_k)
    if in_graph:
        if positions.is_inference():  # torch would raise, too, but after q is overwritten
            raise LocantError(
                "got positions made in inference mode for a gradient",
                "positions made outside of torch.inference_mode()",
            )
        rotated_q = _RotateInPlace.apply(q, *how)
        return rotated_q, rotated_q if same else None if k is None else _RotateInPlace.apply(k, *how)
    _write(q, None if same else k, *how)
    return q, k


def _write(q: Tensor, k: Tensor | None, *how: Any) -> None:
    if not torch.compiler.is_compiling() and _is_plain(q):
        _run(q, k, q, k, *_unpacked(*how))  # torch's own operators, which tell its graph what they write to
    else:
        _rotate_(q, k, *how)


def _is_plain(q: Tensor) -> bool:
    """Whether it can be rotated without asking torch which kind of tensor it is."""
    return type(q) is Tensor and q.device.type in ("cpu", "cuda") and not transforms.is_watched()


# ---------------------------------------------------------------------- what torch knows of it

ARGUMENTS = (
    "Tensor positions, Tensor table, Tensor? axis_of_pair, int levels, float attention_factor, str layout, bool inverse"
)


@torch.library.custom_op(
    "locant::rotate", mutates_args=(), schema=f"(Tensor q, Tensor? k, {ARGUMENTS}) -> (Tensor, Tensor)"
)
def _rotate(q: Tensor, k: Tensor | None, *how: Any) -> tuple[Tensor, Tensor]:
    out_q, out_k = _empty(q, k, *how)
    _run(q, k, out_q, out_k, *_unpacked(*how))
    return out_q, out_k


@_rotate.register_fake
def _empty(q: Tensor, k: Tensor | None, *how: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(0) if k is None else torch.empty_like(k)


@torch.library.custom_op(
    "locant::rotate_", mutates_args=("q", "k"), schema=f"(Tensor(a!) q, Tensor(b!)? k, {ARGUMENTS}) -> ()"
)
def _rotate_(q: Tensor, k: Tensor | None, *how: Any) -> None:
    k = None if are_the_same(q, k) else k  # compiled code can check it only here
    _run(q, k, q, k, *_unpacked(*how))


@_rotate_.register_fake
def _nothing(q: Tensor, k: Tensor | None, *how: Any) -> None:
    return None


def _unpacked(
    positions: Tensor, table: Tensor, axis_of_pair: Tensor | None, levels: int, attention_factor: float,
    layout: Layout, inverse: bool,
) -> tuple[Tensor, Tables, Layout, bool]:  # fmt: skip
    """What kernels take in the place of what torch's operators and functions take."""
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


def _rotated(q: Tensor, k: Tensor | None, *how: Any) -> tuple[Tensor, Tensor | None]:
    """A compiler is given the operator; everyone else the function, which `torch.func` can look into.

    Without gradients, as in generating, that one is left out too. The operator has a backward and no more:
    a compiler that differentiates in another way is given operators of torch. So are programs that are exported, for
    ONNX, ExecuTorch and OpenVINO know no operator of ours.
    """
    if torch.compiler.is_exporting() or (torch.compiler.is_compiling() and transforms.is_differentiated(q)):
        return _rotated_by_torch(q, *how), None if k is None else _rotated_by_torch(k, *how)
    if torch.compiler.is_compiling() or transforms.is_functionalizing():
        rotated_q, rotated_k = _rotate(q, k, *how)
        return rotated_q, None if k is None else rotated_k
    wanted = torch.is_grad_enabled() and (q.requires_grad or (k is not None and k.requires_grad))
    differentiated = wanted or transforms.in_forward_mode() or transforms.is_transforming()
    return _Rotate.apply(q, k, *how) if differentiated else _Rotate.forward(q, k, *how)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    _, _, *tensors = inputs[:5]
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.settings = inputs[5:]
    ctx.set_materialize_grads(False)


def _rotate_back(ctx: Any, grad_q: Tensor | None, grad_k: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of q and k: what arrives, rotated by the negative angles."""
    *numbers, layout, inverse = ctx.settings
    how = (*ctx.saved_tensors, *numbers, layout, not inverse)
    wanted = [grad if needed else None for grad, needed in zip((grad_q, grad_k), ctx.needs_input_grad, strict=False)]
    if any(grad is not None and transforms.is_batched_gradient(grad) for grad in wanted):
        rotated = tuple(None if grad is None else _rotated_by_torch(grad, *how) for grad in wanted)
    else:
        rotated = _rotated_where_given(wanted[0], wanted[1], *how)
    return *rotated, *(None for _ in how)


def _rotated_where_given(q: Tensor | None, k: Tensor | None, *how: Any) -> tuple[Tensor | None, ...]:
    if q is not None:
        return _rotated(q, k, *how)
    return None, None if k is None else _rotated(k, None, *how)[0]


def _rotated_by_torch(x: Tensor, *how: Any) -> Tensor:
    """Through operators of torch alone, with the same bits."""
    return reference.rotate(x, None, *_unpacked(*how))[0]


class _Rotate(torch.autograd.Function):
    """Both tensors, in new memory."""

    @staticmethod
    def forward(q: Tensor, k: Tensor | None, *how: Any) -> tuple[Tensor, Tensor | None]:
        if not _is_plain(q):
            rotated_q, rotated_k = _rotate(q, k, *how)
            return rotated_q, None if k is None else rotated_k
        out_q, out_k = torch.empty_like(q), None if k is None else torch.empty_like(k)
        _run(q, k, out_q, out_k, *_unpacked(*how))  # torch's own operators: no need to go through ours
        return out_q, out_k

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        _keep(ctx, inputs, output)
        ctx.kinds = tuple(None if x is None else (x.shape, x.dtype, x.device) for x in output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _rotate_back(ctx, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        """A tangent is rotated as its vector is; for one that stands still, torch wants zeros."""
        rotated = _rotated_where_given(tangents[0], tangents[1], *ctx.saved_tensors, *ctx.settings)
        return tuple(
            torch.zeros(kind[0], dtype=kind[1], device=kind[2]) if x is None and kind is not None else x
            for x, kind in zip(rotated, ctx.kinds, strict=True)
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        """Several samples are a larger batch."""
        q, k, positions, *how = args
        if any(dim is not None for dim in in_dims[3:]):
            raise LocantError("got tables that differ from sample to sample", "one encoding for all samples")

        def merged(x: Tensor, dim: int | None) -> Tensor:
            return (x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

        samples = (info.batch_size, q.shape[1 if in_dims[0] == 0 else 0])
        if in_dims[2] is not None or positions.shape[0] > 1:
            each = positions[None] if in_dims[2] is None else positions.movedim(in_dims[2], 0)
            positions = each.expand(*samples, *each.shape[2:]).flatten(0, 1)
        rotated = _rotated(merged(q, in_dims[0]), None if k is None else merged(k, in_dims[1]), positions, *how)
        return tuple(None if x is None else x.unflatten(0, samples) for x in rotated), (0, None if k is None else 0)


class _RotateInPlace(torch.autograd.Function):
    """One tensor, for torch's graph does not take a view among several that are written to."""

    @staticmethod
    def forward(x: Tensor, *how: Any) -> Tensor:
        _write(x, None, *how)
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.mark_dirty(inputs[0])
        _keep(ctx, (inputs[0], None, *inputs[1:]), output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rotated, _, *nothing = _rotate_back(ctx, grads[0], None)
        return rotated, *nothing


_rotate.register_autograd(_rotate_back, setup_context=_keep)
