"""What `probe` says of code that has one bug each, most from `tests/known_bugs`, or that fails or does nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import locant
from locant import ALiBi, InputError, Positions, Rotary, T5Bias
from locant.kernels.rotary import rotate_pairs
from locant.positions.scaling import Linear
from locant.probing.report import RotationReport
from tests.known_bugs.subjects import WIDTH as TWIN
from tests.known_bugs.twins import BufferRotary, GrowingRotary, coarsely_reduced
from tests.refusal import refuses
from tests.tolerances import RADIANS

WIDTH = 32
INV_FREQ = 10_000.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH)


def turned(x: Tensor, angle: Tensor, layout: str = "half") -> Tensor:
    return rotate_pairs(x, angle.cos(), angle.sin(), layout)  # type: ignore[arg-type]


def at(positions: Tensor) -> Tensor:
    """Float32 angles, as most code has them: not wrong, for an instrument that has to tell bugs apart."""
    return positions[..., None].float() * INV_FREQ


class StaysLong(nn.Module):
    """Dynamic NTK that never shrinks again (huggingface/transformers#25306)."""

    longest = 0

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        self.longest = max(self.longest, int(positions.max()) + 1)
        base = 10_000 * max(1.0, 4 * self.longest / 256 - 3) ** (WIDTH / (WIDTH - 2))
        return turned(x, positions[..., None] * base ** -(torch.arange(0, WIDTH, 2) / WIDTH))


def two_angles(x: Tensor, positions: Tensor) -> Tensor:
    one, other = at(positions), 0.5 * at(positions)
    a, b = x.chunk(2, -1)
    return torch.cat([a * one.cos() - b * one.sin(), b * other.cos() + a * other.sin()], -1)


def in_place(x: Tensor, positions: Tensor) -> Tensor:
    return x.copy_(turned(x, at(positions)))


def of_half(x: Tensor, positions: Tensor) -> Tensor:
    whole = 10_000.0 ** -(torch.arange(0, WIDTH, 2) / (2 * WIDTH))
    return torch.cat([turned(x[..., :WIDTH], positions[..., None] * whole), x[..., WIDTH:]], -1)


BROKEN: dict[str, tuple[Any, dict[str, Any], str]] = {
    "rotated twice": (
        lambda x, positions: turned(turned(x, at(positions)), at(positions)), {"head_dim": WIDTH},
        "Frequencies begin at 2 radians per position, not at 1: positions are counted twice, as if tokens were rotated",
    ),
    "positions that are multiplied": (
        lambda x, positions: turned(x, 1.7 * at(positions)), {"head_dim": WIDTH}, "positions are multiplied by 1.7"),
    "1, 14: a cast rounds frequencies": (
        BufferRotary(), {}, "Casting its module to bfloat16 casts its table: angles up to position 4,097 are then off",
    ),
    "7: positions in bfloat16": (
        lambda x, positions: turned(x, at(positions.to(torch.bfloat16))), {"head_dim": WIDTH},
        "Angles are wrong, as with positions counted in bfloat16: off by 1 radians at position 257",
    ),
    "12: angles in the dtype of tokens": (
        lambda x, positions: turned(x, positions[..., None].to(x.dtype) * INV_FREQ.to(x.dtype)), {"head_dim": WIDTH},
        "With bfloat16 tokens angles are computed in bfloat16",
    ),
    "15: fast sines": (
        lambda x, positions: rotate_pairs(x, *coarsely_reduced(Positions.of(positions)), "half"), {"head_dim": TWIN},
        "Angles are wrong, which rounding of float32 products does not explain",
    ),
    "35: a table by length": (GrowingRotary(), {}, "The positions that are passed to it have no effect"),
    "39: stays long": (StaysLong(), {"head_dim": WIDTH}, "depends on earlier calls: after a long sequence"),
    "38: depends on the length": (StaysLong(), {"head_dim": WIDTH}, "the largest position in the call (from 256 on)"),
    "43: a factor twice": (
        lambda x, positions: 1.4852**2 * turned(x, at(positions)),
        {"head_dim": WIDTH, "expected": Rotary(WIDTH)}, "tokens are multiplied by 2.20582, not by 1",
    ),
    "52: the other layout": (
        lambda x, positions: turned(x, at(positions), "interleaved"),
        {"head_dim": WIDTH, "expected": Rotary(WIDTH)}, "..., (30, 31), the encoding's (0, 16)",
    ),
    "52: the other direction": (
        lambda x, positions: turned(x, -at(positions)), {"head_dim": WIDTH}, "The direction is reversed",
    ),
    "56: frequencies of the whole head": (
        of_half, {"head_dim": 2 * WIDTH, "expected": Rotary(2 * WIDTH, rotary_dim=WIDTH)},
        "15 of 16 pairs have another frequency, the first of them (1, 17)",
    ),
    "65: inputs are overwritten": (in_place, {"head_dim": WIDTH}, "It overwrites the tokens that are passed to it"),
    "72: one row for all": (
        lambda x, positions: turned(x, at(positions[:1])), {"head_dim": WIDTH}, "Rows of a batch do not have separate",
    ),
    "97: two angles in a pair": (two_angles, {"head_dim": WIDTH}, "not a rotation: the two members of 16 pairs get"),
    "keys the other way": (
        lambda q, k, positions: (turned(q, at(positions)), turned(k, -at(positions))), {"head_dim": WIDTH},
        "Queries and keys are not rotated alike: keys in the opposite direction",
    ),
    "111: axes that are dropped": (
        lambda x, positions: turned(x, at(positions[..., 0])), {"head_dim": WIDTH, "axes": 3},
        "Axes 1 and 2 have no effect",
    ),
    "positions begin again": (
        lambda x, positions: turned(x, at(positions % 2048)), {"head_dim": WIDTH},
        "Angles are wrong, as with positions that start again at 2,048: off by 3 radians at position 4,097",
    ),
    "counting from 1": (
        lambda x, positions: turned(x, at(positions + 1)), {"head_dim": WIDTH},
        "Position 0 is already rotated, as far as position 1 should be",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BROKEN)
def test_a_bug_of_what_rotates_is_named(bug: str) -> None:
    target, options, named = BROKEN[bug]
    warnings = locant.probe(target, **options).warnings
    assert any(named in warning for warning in warnings), warnings


def test_what_is_not_broken_is_not_warned_about() -> None:
    for target in (Rotary(WIDTH), Rotary(WIDTH, layout="interleaved", rotary_dim=16), T5Bias(4), ALiBi(6)):
        assert locant.probe(target).warnings == ()
    found = locant.probe(lambda x, positions: turned(x, at(positions)), head_dim=WIDTH, expected=Rotary(WIDTH))
    assert found.warnings == ()
    assert repr(found.encoding) == repr(Rotary(WIDTH, angles="float32"))


def wrong_half(x: Tensor, positions: Tensor) -> Tensor:
    """The second half is rotated with itself, and one member of each pair is dropped."""
    a, b = x.chunk(2, -1)
    return torch.cat([a, turned(torch.cat([b, b], -1), at(positions))[..., : WIDTH // 2]], -1)


def test_sentences_on_what_is_no_rotation_agree() -> None:
    """Nothing that depends on positions is said to, and the other way round."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(WIDTH, WIDTH, generator=generator)
    still = [lambda x: x, lambda x: 1.5 * x, lambda x: x @ matrix, lambda x: x + 1]
    for target in still:
        (warning,) = locant.probe(target, head_dim=WIDTH).warnings
        assert warning.startswith("It does nothing that depends on positions.")
        assert ("as a projection does" in warning) == (target in still[2:])
    moving = [wrong_half, lambda q, k, positions: (q, wrong_half(k, positions))]
    for target in moving:
        told = " ".join(locant.probe(target, head_dim=WIDTH).warnings)
        assert "each dimension is multiplied by a number that depends on the position" in told
        assert "does nothing that depends" not in told


def test_a_deliberate_factor_is_not_warned_about() -> None:
    scaled = Rotary(WIDTH, scaling=Linear(factor=0.5), angles="float32")
    assert locant.probe(scaled, expected=scaled).warnings == ()


SLOPES = [2.0 ** (-8 * (head + 1) / 12) for head in range(12)]


def distances(query_len: int, key_len: int) -> Tensor:
    return torch.arange(key_len - query_len, key_len)[:, None] - torch.arange(key_len)


def of_t5(bias: T5Bias, distance: Tensor) -> Tensor:
    return bias.weight.T[:, bias.buckets(distance)]


def biases() -> dict[str, tuple[Callable[[int, int], Tensor], Any, str]]:
    one_way, both = T5Bias(4), T5Bias(4, bidirectional=True)
    slopes = ALiBi(8).slopes[:, None, None]
    return {
        "21: slopes of twelve heads": (
            lambda q, k: -torch.tensor(SLOPES)[:, None, None] * distances(q, k).abs(), ALiBi(12),
            "the biases of 12 heads differ, in head 0 from distance 1 on",
        ),
        "22: a bias in bfloat16": (
            lambda q, k: (-slopes * distances(q, k).abs()).bfloat16(), None, "The bias is rounded to bfloat16",
        ),
        "74: the cache is forgotten": (
            lambda q, k: -slopes * (torch.arange(q)[:, None] - torch.arange(k)).abs(), None,
            "With a cache the newest query gets another bias",
        ),
        "80: the direction of two sides": (
            lambda q, k: of_t5(both, -distances(q, k)), both, "earlier and later keys are exchanged",
        ),
        "80: the direction of one side": (
            lambda q, k: of_t5(one_way, -distances(q, k)), None, "the distance is counted in the other direction",
        ),
        "a sign": (lambda q, k: slopes * distances(q, k).abs(), None, "Far tokens count more than near ones"),
        "slopes by one formula": (
            lambda q, k: -torch.tensor(SLOPES)[:, None, None] * distances(q, k).abs(), None,
            "The slopes follow no known rule: ALiBi has 0.5, 0.25, 0.125, ..., 0.08839 for 12 heads",
        ),
        "slopes from head 0": (lambda q, k: -2 * slopes * distances(q, k).abs(), None, "They begin one head too early"),
        "no distance": (lambda q, k: torch.outer(torch.arange(q), torch.arange(k)).sqrt()[None], None, "on more than"),
    }  # fmt: skip


@pytest.mark.parametrize("bug", biases())
def test_a_bug_of_a_bias_is_named(bug: str) -> None:
    target, expected, named = biases()[bug]
    warnings = locant.probe(target, expected=expected).warnings
    assert any(named in warning for warning in warnings), warnings


def test_slopes_of_some_heads_of_more_are_no_mistake() -> None:
    slopes = ALiBi(16).slopes[8:, None, None]
    report = locant.probe(lambda q, k: -slopes * distances(q, k).abs())
    assert report.warnings == ()
    assert "These are the slopes of heads 8 to 15 of 16, as one rank of several has them." in str(report)


def test_what_costs_most_is_said_first_and_what_costs_nothing_is_a_note() -> None:
    """The costs are those of `locant.position_costs`, and radians do not order them."""

    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", INV_FREQ.clone())

        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return turned(x, positions[..., None].float() * self.inv_freq.float())

    note = locant.probe(Rounded(), head_dim=WIDTH)
    assert "This hardly matters: if frequencies are rounded to " in note.warnings[0]
    assert "the loss rises by less than 0.005 nats up to " in note.warnings[0]
    assert "Note: Casting its module to bfloat16 or float16" in str(note)
    assert "Warning:" not in str(note)

    def coarse(x: Tensor, positions: Tensor) -> Tensor:
        return x.copy_(turned(x, at(positions[:1].to(torch.bfloat16))))

    found = locant.probe(coarse, head_dim=WIDTH, expected=Rotary(WIDTH, base=1e6)).warnings
    begins = ["Scores depend", "Rows of a batch", "It is not Rotary", "It overwrites"]
    assert [each for each in begins if any(one.startswith(each) for one in found)] == begins
    order = [next(number for number, one in enumerate(found) if one.startswith(each)) for each in begins]
    assert order == sorted(order)
    assert "This matters: if the base is 10,000" in found[order[2]]
    assert " nats at 2,048 tokens" in found[order[2]]


def test_a_cast_is_measured_at_all_positions_not_at_a_few() -> None:
    """A table in bfloat16 is up to half a circle off somewhere below 4,097, which no sample of positions shows."""
    from transformers import LlamaConfig

    report = locant.probe(LlamaConfig(hidden_size=256, num_attention_heads=2))
    assert isinstance(report, RotationReport)
    frequencies = 10_000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    apart = torch.outer(torch.arange(1, 4098).double(), frequencies.float().bfloat16().double() - frequencies)
    largest = torch.remainder(apart + torch.pi, 2 * torch.pi).sub(torch.pi).abs().max()
    assert report.casts["bfloat16"][0] == pytest.approx(float(largest), rel=0, abs=RADIANS)
    assert report.casts["bfloat16"][0] > 3.1
    unknown = replace(report, casts={"bfloat16": (3.1, None), "float16": (0.4, None)})
    sentence = "casts its table: angles up to position 4,097 are then off by up to 3.1 and 0.4 radians, "
    assert any(sentence + "which no known rounding explains." in each for each in unknown.warnings)


def test_an_axis_that_gets_the_columns_of_another_is_named() -> None:
    """A table for (12, 10, 10) dimensions is split as (12, 11, 9): pair 11 has its cosine from one axis, its sine
    from the next.
    """
    columns = torch.cat([10_000.0 ** -(torch.arange(0, dims, 2) / dims) for dims in (12, 10, 10)]).repeat_interleave(2)
    axis = torch.tensor([0] * 12 + [1] * 11 + [2] * 9)

    def split(x: Tensor, positions: Tensor) -> Tensor:
        angle = (positions[..., axis] * columns)[:, None]
        a, b, cos, sin = x[..., 0::2], x[..., 1::2], angle.cos()[..., 0::2], angle.sin()[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    warnings = locant.probe(split, head_dim=WIDTH, axes=3).warnings
    assert "the cosine of pair (22, 23) follows axis 1 and its sine axis 2" in warnings[0]
    assert not any("0.0%" in warning or "float16" in warning for warning in warnings)
    right = Rotary(WIDTH, sections=(6, 5, 5), axial=True, layout="interleaved")
    axis = torch.tensor([0] * 14 + [1] * 8 + [2] * 10)
    found = locant.probe(split, head_dim=WIDTH, axes=3, expected=right).differences
    assert found == ("1 of 16 pairs follow another axis, the first of them (12, 13) axis 0 and not axis 1",)


def missing(key: str) -> Any:
    raise KeyError(key)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        *((wrong, "; try: locant.probe(lambda x, positions:") for wrong in (3, b"llama", None, int, lambda: None)),
        (lambda x, positions: 1 / 0, "f(x, positions) and f(q, k) and f(query_len, key_len) raised ZeroDivisionError"),
        (lambda x: missing("table"), "f(x) raised KeyError: 'table'"),
        (lambda q, k, positions: missing("table"), "f(q, k, positions) raised KeyError: 'table'"),
        (lambda x, positions: None, "returned None, which is not a tensor"),
        (lambda x: None, "f(x) returned None, which is not a tensor"),
        (lambda x, positions: x * torch.nan, "f(x, positions) returned NaN"),
        (lambda x, positions: x[..., :4],
         "f(x, positions) returned shape [1, 2, 3, 4] for tokens of shape [1, 2, 3, 32]"),
    ],
)  # fmt: skip
def test_a_call_that_fails_is_named_with_its_own_error(target: Any, said: str) -> None:
    with refuses(InputError, "with any known calling convention", said):
        locant.probe(target, head_dim=WIDTH)


def test_the_error_of_the_code_is_the_cause() -> None:
    with pytest.raises(InputError) as caught:
        locant.probe(lambda x, positions: 1 / 0, head_dim=WIDTH)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_what_is_random_is_refused_before_it_is_measured() -> None:
    def bias(query_len: int, key_len: int) -> Tensor:
        return torch.randn(2, query_len, key_len)

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.1)

        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return self.dropout(x)

    for target in (lambda x: torch.randn_like(x), lambda q, k, positions: (q, torch.rand_like(k)), Dropped(), bias):
        with refuses(InputError, "two equal calls", ".eval()"):
            locant.probe(target, head_dim=WIDTH)
    assert locant.probe(Dropped().eval(), head_dim=WIDTH).encoding is None


def test_what_does_nothing_is_not_said_to_count() -> None:
    (warning,) = locant.probe(lambda x, positions: x, head_dim=WIDTH).warnings
    assert warning.startswith("It does nothing that depends on positions.")


def test_the_encoding_that_is_named_rounds_as_was_found_and_says_how_far_it_was_compared() -> None:
    from transformers import LlamaConfig

    found = str(locant.probe(LlamaConfig(hidden_size=64, num_attention_heads=2)))
    assert "The explanation: float32(position) x float32(frequency)." in found
    assert "The same as Rotary(head_dim=32, base=10000, layout='half', angles='float32'), to " in found
    assert " on random tokens at positions up to 61." in found
