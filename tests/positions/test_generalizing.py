"""Other indices than 0, 1, 2, ...: randomized positions, the places of digits, coupled digits, and keys that move."""

from __future__ import annotations

import itertools

import mpmath
import pytest
import torch
from transformers.models.dinov3_vit import modeling_dinov3_vit as dinov3

from locant import ALiBi, Learned, Positions, RangeError, Rotary, ShapeError, Sinusoidal
from locant.positions import Pairs, abacus, coupled, randomized
from locant.positions.scaling import DynamicNTK, YaRN
from tests.refusal import refuses
from tests.tolerances import ANGLE, assert_close


def test_randomized_positions_are_different_numbers_in_order_and_of_each_document_its_own() -> None:
    positions = randomized([[5, 40], [30]], 50, seed=7, length=50)
    documents = [(row, int(d)) for row in range(2) for d in positions.document[row].unique() if d >= 0]
    drawn = [positions.index[row][positions.document[row] == d].tolist() for row, d in documents]
    assert [len(one) for one in drawn] == [5, 40, 30]
    assert all(one == sorted({*one}) and one[0] >= 0 and one[-1] < 50 for one in drawn)
    assert drawn[2] != drawn[1][:30]
    assert torch.equal(positions.mask(window=3), Positions.packed([[5, 40], [30]], length=50).mask(window=3))
    assert positions == randomized([[5, 40], [30]], 50, seed=7, length=50)
    assert positions != randomized([[5, 40], [30]], 50, seed=8, length=50)
    assert randomized(50, 50) == Positions.of(torch.arange(50))
    counts = sum(randomized(4, 8, seed=seed).index[0].bincount(minlength=8) for seed in range(200))
    assert counts.min() > 60, "each number is drawn about as often as any other: 100 times"
    with refuses(RangeError, "max_seq_len=4", "5 tokens"):
        randomized([2, 5], 4)


def places(row: list[int], digits: set[int], document: list[int]) -> list[int]:
    """One token after the other."""
    places: list[int] = []
    for slot, token in enumerate(row):
        goes_on = slot and row[slot - 1] in digits and document[slot] == document[slot - 1]
        places.append(0 if token not in digits else places[-1] + 1 if goes_on else 1)
    return places


@pytest.mark.parametrize("offset", [0, 17])
def test_abacus_counts_digits_within_their_numbers(offset: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 5, (3, 30), generator=generator)
    where = Positions.packed([[7, 11, 12], [30], [3, 4]], length=30)
    found = abacus(ids, [1, 2, 4], offset=offset, positions=where)
    for row, document, index in zip(ids.tolist(), where.document.tolist(), found.index.tolist(), strict=True):
        expected = places(row, {1, 2, 4}, document)
        assert index == [place + offset if place else 0 for place in expected]
    assert torch.equal(found.mask(), where.mask())
    assert found.index.max() <= found.max_index


def test_coupled_digits_share_an_index_by_their_significance() -> None:
    written = itertools.product([[3, 2, 4], [1, 1, 1], [2, 5, 1, 5]], [1, 9], [True, False], [True, False])
    for digits, start, reverse, reverse_operands in written:
        *operands, result = digits
        units = start + max(operands)
        expected: list[int] = []
        for count in operands:
            of_operand = [units - significance for significance in range(count)]
            expected += [*(of_operand if reverse_operands else of_operand[::-1]), units + 1]
        of_result = [units - significance for significance in range(result)]
        expected += of_result if reverse else of_result[::-1]
        options = {"reverse": reverse, "reverse_operands": reverse_operands}
        assert coupled(digits, start=start, **options).index.tolist() == [expected]
    rows = coupled([[3, 2, 4], [1, 1, 1]])
    assert rows.document[1].tolist() == [0] * 5 + [-1] * 6
    assert torch.equal(rows.mask(window=4), Positions.packed([[11], [5]]).mask(window=4))
    with refuses(RangeError, "start=0", "too low"):
        coupled([1, 5], start=0)


HALVES = Positions.of([[-3, 0, 1, 2**31 - 1]], denominator=2)


@pytest.mark.parametrize(
    "rotary", [Rotary(8), Rotary(8, layout="interleaved", scaling=YaRN(factor=2.0, original_max_seq_len=64))]
)
def test_angles_are_exact_between_positions(rotary: Rotary) -> None:
    cos, sin = rotary.cos_sin(HALVES)
    size = rotary.scaling.effective_attention_factor
    for slot, place in enumerate(HALVES.index[0].tolist()):
        for pair, frequency in enumerate(rotary.angles.frequencies):
            with mpmath.workdps(40):
                angle = mpmath.mpf(place) / 2 * mpmath.mpf(str(frequency))
                assert abs(float(cos[0, slot, pair]) - float(mpmath.cos(angle)) * size) <= 2 * ANGLE
                assert abs(float(sin[0, slot, pair]) - float(mpmath.sin(angle)) * size) <= 2 * ANGLE
    q = torch.randn(1, 2, 4, 8)
    whole = Positions.of([[-6, 0, 2, 8]])
    over_three = Positions.of(whole.index * 3, denominator=3)
    assert_close(rotary.rotate(q, q, over_three, whole)[0], rotary.rotate(q, q, over_three, whole)[1])


def test_centred_grids_rotate_as_dinov3_does_at_any_size_of_image() -> None:
    config = dinov3.DINOv3ViTConfig(hidden_size=64, num_attention_heads=2, patch_size=16, image_size=224)
    frequencies = [2 * torch.pi * 100.0 ** (-4 * rung / 32) for rung in range(8)]
    table = Pairs(dims=Pairs.of(32).dims, axes=[0] * 8 + [1] * 8, inv_freq=frequencies * 2)
    for rows, columns in ((3, 5), (14, 14), (1, 7)):
        cos, sin = dinov3.DINOv3ViTRopePositionEmbedding(config).eval()(torch.zeros(1, 3, rows * 16, columns * 16))
        q = torch.randn(1, 2, rows * columns, 32)
        expected, _ = dinov3.apply_rotary_pos_emb(q, q, cos, sin)
        rotary = Rotary(32, pairs=table)
        assert_close(rotary.rotate_one(q, Positions.grid(rows, columns, centred=True)), expected)


def test_encodings_that_count_whole_tokens_reject_denominators() -> None:
    x, q = torch.zeros(1, 4, 8), torch.zeros(1, 2, 4, 8)
    for call in (
        lambda: Sinusoidal(8).embed(x, HALVES),
        lambda: Learned(8, 8).embed(x, HALVES),
        lambda: ALiBi(2).bias(q, q, HALVES),
    ):
        with refuses(ShapeError, "1/2", "whole tokens"):
            call()
    with refuses(ShapeError, "denominators [1, 2]"):
        Positions.cat([Positions.arange(1), HALVES])
    assert Positions.of([2], denominator=2) != Positions.of([2])
    assert HALVES.slice(0, 2).denominator == HALVES.to("cpu").expand(3).denominator == 2
    assert torch.equal(HALVES.mask(window=2), Positions.arange(4).mask(window=2))


def test_the_length_threshold_counts_whole_positions() -> None:
    rotary = Rotary(8, scaling=DynamicNTK(factor=2.0, original_max_seq_len=4))
    rotary.cos_sin(Positions.of([7], denominator=2))
    with refuses(RangeError, "4 tokens"):
        rotary.cos_sin(Positions.of([8], denominator=2))


ENCODINGS: dict[str, Rotary] = {
    "half": Rotary(8),
    "interleaved, scaled": Rotary(8, layout="interleaved", scaling=YaRN(factor=4.0, original_max_seq_len=64)),
    "float32": Rotary(8, angles="float32"),
    "scattered": Rotary(8, pairs=Pairs(dims=[(7, 0), (2, 5)])),
    "axes": Rotary(8, sections=(2, 1, 1)),
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_moved_keys_equal_keys_rotated_at_the_new_positions(name: str) -> None:
    rotary = ENCODINGS[name]
    axes = rotary.pairs.num_axes or 1
    here, there = (torch.randint(0, high, (2, 5, axes)) for high in (100, 1_000_000))
    here, there = (Positions.of(each if axes > 1 else each[..., 0]) for each in (here, there))
    k = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    moved = rotary.move(rotary.rotate_one(k, here), here, there)
    assert_close(moved, rotary.rotate_one(k, there), torch.float32 if name == "float32" else None)
    cotangent = torch.randn_like(k)
    grads = [torch.autograd.grad(y, k, cotangent)[0] for y in (moved, rotary.rotate_one(k, there))]
    assert_close(*grads, torch.float32 if name == "float32" else None)
    narrow = rotary.move(rotary.rotate_one(k.detach().bfloat16(), here), here, there)
    assert narrow.dtype == torch.bfloat16


def test_moving_keys_needs_a_position_for_every_key() -> None:
    with refuses(ShapeError, "4 tokens"):
        ENCODINGS["half"].move(torch.zeros(1, 1, 5, 8), Positions.arange(5), Positions.arange(4))
