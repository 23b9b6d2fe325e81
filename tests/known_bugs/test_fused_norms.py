"""Entries about kernels that fuse the norm of each head with its rotation: none of these bugs raises an error.

Each twin is also given to `locant.probe`, which has to name it without the truth at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import locant
from locant import Positions, Rotary
from tests.known_bugs.exhibit import exhibit
from tests.known_bugs.oracle import plain
from tests.tolerances import ROTATED_TOKEN

WIDTH, PART, BASE, EPS = 32, 16, 10_000.0, 1e-6
PAIRS = PART // 2
OF_Q, OF_K = torch.rand(2, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5

Fused = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of queries and keys ``[batch, heads, seq, dim]`` and positions: both normed and rotated."""


def normed(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """The first dimensions by angles ``[batch, 1 or heads, seq, pairs]``, in halves; the rest stays as it is."""
    count = angle.shape[-1]
    a, b, rest = x[..., :count], x[..., count : 2 * count], x[..., 2 * count :]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1)


def fusing(rotate: Callable[[Tensor, Tensor], Tensor]) -> Fused:
    """A kernel of this rotation, which norms each head first."""

    def kernel(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(normed(q, OF_Q), positions).to(q.dtype), rotate(normed(k, OF_K), positions).to(k.dtype)

    return kernel


def ours(rotary: Rotary) -> Fused:
    return fusing(lambda x, positions: rotary.rotate_one(x, Positions.of(positions)))


def at(positions: Tensor, axes: list[int] | None = None) -> Tensor:
    """Angles of a token's position, or of the position on the axis of each pair."""
    rows = positions[..., None] if axes is None else positions[..., axes]
    return (rows.double() * plain(PART, BASE))[:, None]


def equals(angles: Callable[[Tensor], Tensor], positions: Tensor, because: str) -> Callable[[Fused], None]:
    """The check that a kernel does what the formula says, on four heads."""

    def check(kernel: Fused) -> None:
        q, k = torch.randn(2, 1, 4, positions.shape[1], WIDTH, generator=torch.Generator().manual_seed(1))
        for x, weight, got in zip((q, k), (OF_Q, OF_K), kernel(q, k, positions), strict=True):
            apart = (got - turned(normed(x, weight), angles(positions))).abs().amax((0, 2, 3))
            assert float(apart.max()) <= ROTATED_TOKEN, f"{because}: heads {apart.gt(ROTATED_TOKEN).tolist()}"

    return check


def names(kernel: Fused, words: str, **options: Any) -> None:
    """`locant.probe` has to say so of the twin, and to have nothing to say of a right kernel."""
    options = {"norm": (OF_Q, OF_K), "eps": EPS, **options}
    warnings = locant.probe(kernel, **options).warnings
    assert any(words in warning for warning in warnings), warnings
    right = ours(options["expected"])
    assert locant.probe(right, **options).warnings == ()


AXES = [0] * 4 + [1] * 2 + [2] * 2
SECTIONS = Rotary(WIDTH, rotary_dim=PART, sections=(4, 2, 2))


def test_111_a_fused_kernel_rotates_by_all_axes_of_a_position() -> None:
    """A fused kernel drops rows and columns of image positions.

    sgl-project/sglang#34446, #35345 and #36762: Height and width of image tokens were dropped, because a fused kernel
    read one position for each token. Text has the same number on all axes, so tests of text passed, and boxes in images
    were some 90 pixels off.

    Check: `locant.probe(kernel, head_dim=128, axes=3)` names the axes that are dropped.

    Test: a norm and a rotation by three axes in one kernel, against a formula; `probe` names the axes that are dropped.
    """
    image = torch.tensor([[[3, 0, 0], [3, 0, 1], [3, 1, 0], [3, 1, 1], [5, 5, 5]]])
    check = equals(lambda positions: at(positions, AXES), image, "height and width are dropped")

    def of_the_first_row(x: Tensor, positions: Tensor) -> Tensor:
        return turned(x, at(positions[..., 0]))

    twin = fusing(of_the_first_row)
    exhibit(check, ours(SECTIONS), twin=twin, because="height and width are dropped")
    names(twin, "Axes 1 and 2 have no effect", axes=3, expected=SECTIONS)


ROW = torch.tensor([[0, 1, 7, 30, 500]])
HALF = Rotary(WIDTH, rotary_dim=PART)


def test_112_every_head_of_a_warp_gets_its_own_partners() -> None:
    """Only the first head of a warp is rotated right.

    vllm-project/vllm#51049: With partial rotary, all heads of a warp but the first were wrong. Only the lanes of the
    rotated part entered the branch in which all lanes exchange their numbers.

    Check: `locant.probe(kernel, head_dim=128)` compares thousands of tokens with a few.

    Test: four heads of which half is rotated; `probe` compares thousands of tokens with a few.
    """
    check = equals(at, ROW, "heads after the first are wrong")

    def exchanged_late(x: Tensor, positions: Tensor) -> Tensor:
        right, stale = turned(x, at(positions)), turned(x.roll(1, 1), at(positions))
        several = x.shape[1] * x.shape[2] >= 10_240 or x.shape[1] > 2
        return torch.cat([right[:, :1], stale[:, 1:] if several else right[:, 1:]], 1)

    twin = fusing(exchanged_late)
    exhibit(check, ours(HALF), twin=twin, because=r"heads after the first are wrong: heads \[False, True, True, True\]")
    names(twin, "Some tokens are rotated differently among thousands", expected=HALF)


def test_113_a_fused_kernel_rotates_the_part_that_its_table_is_for() -> None:
    """A fused kernel rotates the whole head instead of a part.

    vllm-project/vllm#43676: `rotary_dim` was not handed on, so the kernel rotated the whole head and read past each row
    of its table. GLM-4.7 then solved none of 1,319 problems.

    Check: `locant.probe(kernel, head_dim=128)` counts the pairs that are rotated.

    Test: half of a head rotated, against a table that is read past its rows; `probe` counts the pairs.
    """
    check = equals(at, ROW, "what should stay is rotated")
    angle = torch.arange(2**12)[:, None] * plain(PART, BASE)
    table = torch.cat([angle.cos(), angle.sin()], -1)

    def of_the_whole_head(x: Tensor, positions: Tensor) -> Tensor:
        columns = torch.arange(WIDTH)
        rows = table.flatten()[(positions.clamp(max=2**12 - 9)[..., None] * PART + columns)][:, None]
        cos, sin = rows.chunk(2, -1)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    twin = fusing(of_the_whole_head)
    exhibit(check, ours(HALF), twin=twin, because="what should stay is rotated")
    names(twin, "its pairs are (0, 16), (1, 17)", expected=HALF, limit=2**11)


def test_115_norm_and_rotation_come_in_the_order_of_the_model() -> None:
    """Heads are normalized before the rotation instead of after it.

    vllm-project/vllm-metal#660: HunYuan rotates heads first and normalizes them afterwards, but the engine did the
    reverse. The weights of the norm then scale the wrong dimensions.

    Check: `locant.probe(kernel, norm=(q_weight, k_weight), norm_follows=True)` reports a wrong order.

    Test: a norm after the rotation; `probe` names the order in both directions.
    """

    def check(kernel: Fused) -> None:
        q, k = torch.randn(2, 1, 4, ROW.shape[1], WIDTH, generator=torch.Generator().manual_seed(1))
        for x, weight, got in zip((q, k), (OF_Q, OF_K), kernel(q, k, ROW), strict=True):
            apart = float((got - normed(turned(x.double(), at(ROW)), weight)).abs().max())
            assert apart <= ROTATED_TOKEN, f"the norm does not come after the rotation: {apart:.1e} off"

    def rotated_first(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (x.float() for x in HALF.rotate(q.double(), k.double(), Positions.of(positions)))
        return normed(q, OF_Q).float(), normed(k, OF_K).float()

    twin = ours(HALF)
    exhibit(check, rotated_first, twin=twin, because="the norm does not come after the rotation")
    options: dict[str, Any] = {"norm": (OF_Q, OF_K), "eps": EPS, "expected": HALF, "norm_follows": True}
    (warning,) = locant.probe(twin, **options).warnings
    assert warning == "The norm of queries and of keys is wrong: it comes before the rotation."
    assert locant.probe(rotated_first, **options).warnings == ()
