"""Entries about kernels that rotate queries and keys: what they wrote, forgot, and took for granted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from locant import Positions, Rotary
from tests import oracles
from tests.known_bugs.exhibit import exhibit
from tests.tolerances import DOUBLE

HEAD_DIM = 6
LAYOUTS = ("half", "interleaved")
Rotate = Callable[[Tensor, Positions], Tensor]
"""From tokens of shape ``batch heads seq head_dim``, and where they stand, to what they are rotated to."""


def ours(layout: str = "half", **options: Any) -> Rotate:
    rotary = Rotary(HEAD_DIM, layout=layout, **options)  # type: ignore[arg-type]
    return lambda x, positions: rotary.rotate(x, x, positions)[0]


BOTH = [ours(layout) for layout in LAYOUTS]


def truth(x: Tensor, positions: Positions, layout: str = "half", sign: int = 1) -> Tensor:
    """The paper's matrices, row by row, at angles of sixty digits."""
    rows = []
    for row, index in zip(x.detach(), positions.expand(x.shape[0]).index.tolist(), strict=True):
        cos, sin = oracles.true_angles(index, HEAD_DIM, 10_000.0)
        rows.append(torch.from_numpy(oracles.rotate(row[None].double().numpy(), cos, sign * sin, layout)))
    return torch.cat(rows)


def kernel(x: Tensor, positions: Positions, out: Tensor, sign: int = 1) -> Tensor:
    """What the twins have in common: the right arithmetic for the half layout, written into `out`."""
    cos, sin = (part[:, None] for part in Rotary(HEAD_DIM).cos_sin(positions, x.dtype))
    a, b = x.chunk(2, dim=-1)
    out[..., : HEAD_DIM // 2], out[..., HEAD_DIM // 2 :] = a * cos - sign * b * sin, b * cos + sign * a * sin
    return out


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class _Own(torch.autograd.Function):
    """The wrapping of a hand-written kernel: a forward and a backward of one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Positions, backward: Callable[..., Tensor]) -> Tensor:
        ctx.rest = positions, backward
        return kernel(x, positions, torch.zeros_like(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        positions, backward = ctx.rest
        return backward(gradient, positions), None, None


def with_backward(backward: Callable[[Tensor, Positions], Tensor]) -> Rotate:
    return lambda x, positions: _Own.apply(x, positions, backward)


def test_64_a_gradient_without_strides_is_read_as_one() -> None:
    """A gradient with strides of 0 is read as contiguous.

    unslothai/unsloth#3781: Gradients were wrong after `sum().backward()`, because the gradient of a sum is one number
    repeated by strides of 0. The kernel asked `if not x.is_contiguous` without parentheses, which is never true.

    Check: Compare the gradients of `y.sum()` and of `(y * torch.ones_like(y)).sum()`.

    Test: cotangents of stride 0 for q and k.
    """
    positions = Positions.after(7, 5)
    x = random(2, 3, 5, HEAD_DIM).requires_grad_()
    cotangents = [torch.ones((), dtype=torch.float64).expand(x.shape), random(1, 3, 1, HEAD_DIM).expand(x.shape)]

    def check(rotate: Rotate) -> None:
        for cotangent in cotangents:
            (gradient,) = torch.autograd.grad(rotate(x, positions), x, cotangent)
            off = float((gradient - truth(cotangent, positions, sign=-1)).abs().max())
            assert off < DOUBLE, f"a gradient of strides {cotangent.stride()} is rotated wrongly, by {off:.2g}"

    def reads_on(gradient: Tensor, positions: Positions) -> Tensor:
        memory = torch.zeros(gradient.numel(), dtype=gradient.dtype)  # what lies behind it
        storage = torch.as_strided(gradient, (gradient.untyped_storage().nbytes() // 8,), (1,), 0)
        memory[: len(storage)] = storage[: len(memory)]
        return kernel(memory.view(gradient.shape), positions, torch.zeros_like(memory).view(gradient.shape), sign=-1)

    exhibit(check, ours(), twin=with_backward(reads_on), because=r"strides \(0, 0, 0, 0\) is rotated wrongly")


def test_65_inputs_stay_as_they_were() -> None:
    """A kernel overwrites its inputs.

    unslothai/unsloth#5001: Inputs were overwritten if they happened to be contiguous. What was rotated in place was
    meant to be a copy, and `contiguous()` copies only tensors that are not contiguous yet.

    Check: Compare `q.clone()` before the call with `q` after it.

    Test: bytes and versions of the inputs, unless `inplace=True`.
    """

    def check(rotate: Rotate) -> None:
        for x in (random(2, 3, 5, HEAD_DIM), random(2, 5, 3, HEAD_DIM).transpose(1, 2)):
            before, version = x.clone(), x._version
            rotate(x, Positions.after(7, 5))
            assert torch.equal(x, before), f"an input of strides {x.stride()} was overwritten"
            assert x._version == version

    def in_a_copy_or_not(x: Tensor, positions: Positions) -> Tensor:
        copy = x.contiguous()
        return kernel(copy.clone(), positions, copy)

    exhibit(check, *BOTH, twin=in_a_copy_or_not, because=r"strides \(90, 30, 6, 1\) was overwritten")


def test_66_a_single_head_is_rotated() -> None:
    """A single head is not rotated.

    linkedin/Liger-Kernel#342: Nothing was rotated if there was one head. The axis of the heads was guessed from the
    strides, and an axis of size 1 can have any stride.

    Check: `locant.probe(rotate, head_dim=64)` with one head, or compare one head with the first of two.

    Test: every combination of sizes 1 to 3.
    """

    def check(rotate: Rotate) -> None:
        for batch, heads, seq in itertools.product((1, 2, 3), repeat=3):
            x, positions = random(batch, seq, heads, HEAD_DIM).transpose(1, 2), Positions.after(7, seq)
            wrong = not torch.allclose(rotate(x, positions), truth(x, positions), rtol=0, atol=DOUBLE)
            assert not wrong, f"{batch} x {heads} heads x {seq} tokens are rotated wrongly"

    def guesses(x: Tensor, positions: Positions) -> Tensor:
        """It wants heads before tokens in memory, and takes strides for a sign of what it has."""
        as_it_believes = x if x.transpose(1, 2).is_contiguous() and not x.is_contiguous() else x.transpose(1, 2)
        if as_it_believes.shape[2] != positions.seq_len:
            return x
        return kernel(x, positions, x.clone())

    exhibit(check, ours(), twin=guesses, because="1 x 1 heads x 2 tokens are rotated wrongly")


def test_67_gradients_arrive() -> None:
    """A fused kernel drops the gradient.

    NVlabs/LongLive#61: Queries and keys got no gradient, and no error was raised. The kernel wrote into new memory, so
    its output required no gradient.

    Check: `assert rotate(q.requires_grad_(), ...).requires_grad`.

    Test: a gradient check of the rotation, in place too; that every table gets its gradient is in `tests/embedding`.
    """

    def check(rotate: Rotate) -> None:
        x, positions = random(1, 2, 3, HEAD_DIM).requires_grad_(), Positions.after(7, 3)
        rotated = rotate(x, positions)
        assert rotated.requires_grad, "what comes out requires no gradient"
        assert torch.autograd.gradcheck(lambda x: rotate(x, positions), (x,))

    def raw(x: Tensor, positions: Positions) -> Tensor:
        return kernel(x.detach(), positions, torch.zeros_like(x))

    def in_place(x: Tensor, positions: Positions) -> Tensor:
        q, _ = Rotary(HEAD_DIM).rotate(x * 1, x * 1, positions, inplace=True)
        return q

    exhibit(check, *BOTH, in_place, twin=raw, because="requires no gradient")


def test_68_the_backward_rotates_the_other_way() -> None:
    """The backward of a rotation does not rotate back.

    NVIDIA/apex#1750: The backward of a fused rotation was wrong. The derivative of a rotation is the rotation back, and
    many wrong ones look right with a cotangent of ones.

    Check: `torch.autograd.gradcheck(rotate, q.double().requires_grad_())`.

    Test: a random cotangent against the matrix rotated back.
    """
    positions = Positions.packed([2, 3])

    def check(rotate: Rotate) -> None:
        x, cotangent = random(2, 3, 5, HEAD_DIM).requires_grad_(), random(2, 3, 5, HEAD_DIM)
        (gradient,) = torch.autograd.grad(rotate(x, positions), x, cotangent)
        off = float((gradient - truth(cotangent, positions, sign=-1)).abs().max())
        assert off < DOUBLE, f"the gradient is {off:.2g} away from what arrives rotated back"

    def rotates_on(gradient: Tensor, positions: Positions) -> Tensor:
        return kernel(gradient, positions, torch.zeros_like(gradient))

    because = "away from what arrives rotated back"
    exhibit(check, ours(), twin=with_backward(rotates_on), because=because)


def test_71_nothing_is_rotated_to_nothing() -> None:
    """A batch without tokens cannot be rotated.

    sgl-project/sglang#30628: A batch without tokens raised an error. A kernel was launched on a grid without programs,
    which drivers refuse.

    Check: `rotate(q[:, :, :0], ...)`.

    Test: any size 0 of the rotation, with its gradients.
    """
    shapes = [(0, 3, 5, HEAD_DIM), (2, 0, 5, HEAD_DIM), (2, 3, 0, HEAD_DIM)]

    def check(rotate: Rotate) -> None:
        for shape in shapes:
            x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
            try:
                rotated = rotate(x, Positions.arange(shape[2]))
            except RuntimeError as error:
                raise AssertionError(f"{shape[:3]} cannot be rotated: {error}") from error
            assert rotated.shape == shape
            rotated.sum().backward()
            assert x.grad is not None
            assert x.grad.shape == shape

    def launches(x: Tensor, positions: Positions) -> Tensor:
        """A program for each 4 numbers, whatever there are."""
        grid = -(-x.numel() // 4)
        if not grid:
            raise RuntimeError("invalid configuration argument")
        return kernel(x, positions, x.clone())

    exhibit(check, *BOTH, twin=launches, because="cannot be rotated: invalid configuration argument")
