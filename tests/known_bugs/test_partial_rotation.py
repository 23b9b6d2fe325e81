"""Entries about how much of a head is rotated, and about dimensions that do not come in pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from locant import LocantError, Positions, RangeError, Rotary, ShapeError, Sinusoidal
from locant.positions.scaling import LongRoPE, Scaling
from tests.known_bugs.exhibit import exhibit
from tests.known_bugs.oracle import plain, rotated
from tests.tolerances import FAR_DOUBLE, FORMULA

HEAD_DIM, ROTARY_DIM = 256, 64
FROM, TO = 700, 2355
"""The positions at which entry 55 was measured."""

Rotate = Callable[[Tensor, Positions], Tensor]


def rotating(*sizes: int, **options: Any) -> Rotate:
    rotary = Rotary(*sizes, **options)
    return lambda x, positions: rotary.rotate(x, x, positions)[0]


def refusal(kind: type[LocantError], call: Callable[[], object]) -> str:
    """What is said against a call; nothing where it is taken."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def test_55_frequencies_and_pairs_count_the_part_that_is_rotated() -> None:
    """Frequencies are those of the whole head in partial rotary.

    pie-project/pie#603: Quality fell with length in every model that rotates a part of its heads. Exponents and
    partners were computed from the whole head instead of the rotated part.

    Check: `locant.probe(rotary, expected=locant.encoding_from_config(config))` lists the pairs that differ.

    Test: 64 of 256 dimensions at positions 0 to 2355.
    """
    x = torch.randn(1, 1, TO - FROM, HEAD_DIM, dtype=torch.float64)

    def check(rotate: Rotate) -> None:
        for first in (0, FROM):
            count = TO - FROM
            out = rotate(x, Positions.after(first, count))
            truth = rotated(x, range(first, first + count), plain(ROTARY_DIM, 10_000.0))
            assert torch.equal(out[..., ROTARY_DIM:], x[..., ROTARY_DIM:]), "dimensions that stand still were moved"
            off = float((out - truth).abs().max())
            assert off <= FAR_DOUBLE, f"off by {off:.2g} from position {first} on"

    def exponents_of_the_head(x: Tensor, positions: Positions) -> Tensor:
        return rotated(x, positions.index[0].tolist(), plain(HEAD_DIM, 10_000.0)[: ROTARY_DIM // 2])

    def partners_half_a_head_away(x: Tensor, positions: Positions) -> Tensor:
        still = torch.zeros(HEAD_DIM // 2 - ROTARY_DIM // 2, dtype=torch.float64)
        return rotated(x, positions.index[0].tolist(), torch.cat([plain(ROTARY_DIM, 10_000.0), still]))

    ours = rotating(HEAD_DIM, rotary_dim=ROTARY_DIM)
    exhibit(check, ours, twin=exponents_of_the_head, because="off by [0-9.]+ from position 0 on")
    exhibit(check, ours, twin=partners_half_a_head_away, because="dimensions that stand still were moved")
    zero = Positions.of([0])
    assert torch.equal(exponents_of_the_head(x[:, :, :1], zero), x[:, :, :1]), "the twin is wrong at 0, unlike the bug"


def test_56_a_share_of_the_head_has_its_own_number_of_frequencies() -> None:
    """Partial rotary gets frequencies for the whole head.

    huggingface/transformers#48652: Models with a `rotary_pct` other than 1 crashed, and 44 models rotate a part of a
    head. Frequencies for the whole head had been copied: four where two were needed.

    Check: `len(inv_freq)` must be `rotary_dim // 2`.

    Test: the whole head, half and a quarter.
    """
    sizes = {"model_type": "gpt_neox", "hidden_size": 32, "num_attention_heads": 4, "rotary_emb_base": 10_000}
    x = torch.randn(1, 4, 3, 8, dtype=torch.float64)

    def ours(share: float) -> tuple[Tensor, Tensor]:
        rotary = Rotary.from_config({**sizes, "rotary_pct": share})
        return rotary.cos_sin(Positions.arange(3))[0], rotary.rotate(x, x, Positions.arange(3))[1]

    def of_the_whole_head(share: float) -> tuple[Tensor, Tensor]:
        return Rotary(8).cos_sin(Positions.arange(3))[0], ours(share)[1]

    def check(tables: Callable[[float], tuple[Tensor, Tensor]]) -> None:
        for share, pairs in ((1.0, 4), (0.5, 2), (0.25, 1)):
            cos, out = tables(share)
            assert cos.shape[-1] == pairs, f"share {share}: {cos.shape[-1]} frequencies, not {pairs}"
            truth = rotated(x, range(3), plain(2 * pairs, 10_000.0))
            assert float((out - truth).abs().max()) <= FORMULA, f"share {share}: rotated otherwise"

    exhibit(check, ours, twin=of_the_whole_head, because=r"share 0.5: 4 frequencies, not 2")


def test_57_several_axes_and_a_share_of_the_head_go_together() -> None:
    """Positions of several axes ignore the rotated share.

    AI-Hypercomputer/maxtext#4616: With positions of several axes, the share of the head that is rotated was ignored.
    The class for them had no such argument, and no error was raised.

    Check: `locant.probe(rotary, expected=locant.encoding_from_config(config))` prints how many dimensions are rotated.

    Test: three axes with half of the head.
    """
    sections, positions = (1, 2, 1), Positions.grid(2, 3, 2)
    x = torch.randn(1, 2, 12, 16, dtype=torch.float64)

    def check(build: Callable[..., Rotate]) -> None:
        out = build(16, rotary_dim=8, sections=sections)(x, positions)
        assert torch.equal(out[..., 8:], x[..., 8:]), "dimensions that stand still were moved"
        axis = torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
        angle = positions.index[0][:, axis].double() * plain(8, 10_000.0)
        a, b = x[..., :4], x[..., 4:8]
        truth = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), x[..., 8:]], dim=-1)
        assert float((out - truth).abs().max()) <= FORMULA, "pairs do not follow their axes"

    def without_such_an_argument(head_dim: int, *, sections: tuple[int, ...], **ignored: int) -> Rotate:
        return rotating(head_dim, sections=tuple(2 * section for section in sections))

    exhibit(check, rotating, twin=without_such_an_argument, because="dimensions that stand still were moved")


def test_58_there_is_one_factor_for_each_pair_that_is_rotated() -> None:
    """LongRoPE's factors have the size of the whole head.

    apache/tvm#18102: A buffer for LongRoPE's factors had the size of half a head. The rotated part of the head is
    smaller.

    Check: `len(long_factor)` must be `rotary_dim // 2`.

    Test: one factor per pair, and four wrong numbers of them.
    """

    def scaling(count: int) -> Scaling:
        factors = tuple(2.0 + pair for pair in range(count))
        return LongRoPE(short_factor=factors, long_factor=factors, original_max_seq_len=64, factor=4.0)

    def check(build: Callable[[Scaling], Rotary]) -> None:
        table = build(scaling(4)).cos_sin(Positions.arange(9), torch.float64)[0] / scaling(4).effective_attention_factor
        radians = plain(8, 10_000.0) / torch.arange(2.0, 6.0, dtype=torch.float64)
        truth = (torch.arange(9, dtype=torch.float64)[:, None] * radians).cos()
        assert float((table[0] - truth).abs().max()) <= FORMULA, "frequencies are divided otherwise"
        for wrong in (1, 3, 5, 8):
            said = refusal(ShapeError, lambda wrong=wrong: build(scaling(wrong)))
            assert f"{wrong} LongRoPE factors for 4 pairs" in said, f"{wrong} factors for 4 pairs are taken"

    def half_a_head(given: Scaling) -> Rotary:
        """As many as there is room for: filled up, or cut off."""
        assert isinstance(given, LongRoPE)
        fitted = tuple([*given.long_factor, *[1.0] * 8][:4])
        return Rotary(16, rotary_dim=8, scaling=LongRoPE(
            short_factor=fitted, long_factor=fitted, original_max_seq_len=64, factor=4.0
        ))  # fmt: skip

    exhibit(
        check, lambda given: Rotary(16, rotary_dim=8, scaling=given),
        twin=half_a_head, because="1 factors for 4 pairs are taken",
    )  # fmt: skip


SIZES = [(7, None), (1, None), (8, 7), (8, 1), (8, 10), (8, 0), (8, -2), (0, None), (64, 66)]
"""head_dim and rotary_dim that cannot be rotated in pairs."""


def test_59_odd_and_too_large_dimensions_are_refused() -> None:
    """A kernel accepts odd and too large dimensions.

    fla-org/flash-linear-attention#1177: With an odd number of dimensions, or more than the head has, a kernel read
    memory behind the head. Nothing was checked.

    Check: Call your kernel with `rotary_dim=63`, and with more than `head_dim`: it must raise an error.

    Test: nine sizes, and heads of another width than stated.
    """

    def check(build: Callable[..., Rotary]) -> None:
        for head_dim, rotary_dim in SIZES:
            said = refusal(RangeError, lambda sizes=(head_dim, rotary_dim): build(sizes[0], rotary_dim=sizes[1]))
            dims = head_dim if rotary_dim is None else rotary_dim
            assert "even " in said, f"{dims} dimensions of a head of {head_dim} are rotated"
        rotary = build(8)
        for width in (6, 7, 9, 16):
            x = torch.zeros(1, 1, 2, width)
            with pytest.raises(ShapeError, match="head_dim=8"):
                rotary.rotate(x, x, Positions.arange(2))

    class Unchecked(Rotary):
        def __init__(self, head_dim: int, *, rotary_dim: int | None = None) -> None:
            dims = head_dim if rotary_dim is None else rotary_dim
            super().__init__(max(head_dim, dims + dims % 2, 2), rotary_dim=max(dims + dims % 2, 2))

    exhibit(check, Rotary, twin=Unchecked, because="7 dimensions of a head of 7 are rotated")


Vectors = Callable[[int, list[int]], Tensor]


def test_60_sinusoids_of_any_width_are_pairs_of_one_angle() -> None:
    """Sinusoidal positions of odd width crash, and cosines have another frequency.

    codertimo/BERT-pytorch#78, pyaptamer/pyaptamer#526, SamLynnEvans/Transformer#25: An odd width left more sines than
    cosines, and the slices did not fit. Elsewhere the exponent of the cosine was that of the next dimension, so a
    cosine was not the partner of its sine.

    Check: `(pe[:, 0::2] ** 2 + pe[:, 1::2] ** 2 - 1).abs().max()` must be 0 up to rounding.

    Test: six widths, odd ones among them.
    """

    def ours(d_model: int, index: list[int]) -> Tensor:
        return Sinusoidal(d_model).vectors(Positions.of(index), torch.float64)[0]

    def next_exponent(d_model: int, index: list[int]) -> Tensor:
        rows = []
        for p in index:
            row = []
            for i in range(0, d_model, 2):
                row += [math.sin(p / 10_000 ** (2 * i / d_model)), math.cos(p / 10_000 ** (2 * (i + 1) / d_model))]
            rows.append(row[:d_model])
        return torch.tensor(rows, dtype=torch.float64)

    def check(vectors: Vectors) -> None:
        index = [0, 1, 2, 50, 777]
        for d_model in (1, 2, 3, 7, 16, 33):
            found = vectors(d_model, index)
            assert found.shape == (len(index), d_model)
            sines, cosines = found[:, 0::2], found[:, 1::2]
            size = sines[:, : cosines.shape[1]] ** 2 + cosines**2
            one = torch.allclose(size, torch.ones_like(size), rtol=0, atol=FORMULA)
            assert one, f"width {d_model}: a sine and a cosine of two angles"
            truth = torch.tensor(
                [[math.sin(p * 10_000 ** (-i / d_model)) for i in range(0, d_model, 2)] for p in index],
                dtype=torch.float64,
            )
            assert torch.allclose(sines, truth, rtol=0, atol=FAR_DOUBLE), f"width {d_model}: other angles"

    exhibit(check, ours, twin=next_exponent, because="width 2: a sine and a cosine of two angles")
