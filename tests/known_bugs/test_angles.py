"""Entries whose angles were computed wrongly in the first place, and how far off phases and scores are then."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import mpmath
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from locant import PositionEncoding, Positions, Rotary
from locant.positions.angles import AngleMode
from locant.positions.scaling import KINDS, Unscaled
from tests.known_bugs.exhibit import exhibit
from tests.known_bugs.figures import published
from tests.known_bugs.oracle import EDGES, frequencies, phase_error, rounded_frequencies, true_cos_sin
from tests.known_bugs.subjects import (
    CONSTANT,
    EACH_CODE,
    ROTARY_OPTIONS,
    WIDTH,
    Build,
    differences,
    queries,
    rotary,
    use,
)
from tests.known_bugs.twins import BufferRotary, MultipliedRotary, coarsely_reduced
from tests.tolerances import LENGTH, PHASE, SHIFTED

CosSin = Callable[[Positions], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rotation:
    """What rotates pairs, the frequencies it means to rotate them by, and the length it gives them."""

    cos_sin: CosSin
    frequencies: Sequence[mpmath.mpf] | Tensor
    attention_factor: float = 1.0


def rotation(**options: Any) -> Rotation:
    """One of our rotaries, seen with one number per token. What its scaling makes of a base is tested elsewhere."""
    encoding = rotary(**options)
    dims = [2 * pairs for pairs in encoding.sections or ()] if encoding.axial else [encoding.rotary_dim]
    scaling = None if isinstance(encoding.scaling, Unscaled) else encoding.scaling
    meant: Sequence[mpmath.mpf] | Tensor
    if encoding.angles.mode == "float32":
        rounded = rounded_frequencies if scaling is None else partial(scaling.rounded, seq_len=encoding.seq_len)
        meant = torch.cat([rounded(dim, encoding.base) for dim in dims])
    elif scaling is None:
        meant = [frequency for dim in dims for frequency in frequencies(dim, encoding.base)]
    else:
        exact = [frequency for dim in dims for frequency in scaling.frequencies(dim, encoding.base, encoding.seq_len)]
        with mpmath.workdps(50):
            meant = [mpmath.mpf(str(frequency)) for frequency in exact]
    return Rotation(encoding.cos_sin, meant, encoding.scaling.effective_attention_factor)


def rotations() -> dict[str, Rotation]:
    """All of them, by name."""
    return {name: rotation(**options) for name, options in ROTARY_OPTIONS.items()}


def worst_error(subject: Rotation, index: list[int]) -> float:
    """How far any cosine or sine is from the truth. Each position comes alone, with bounds that fit it."""
    ours = zip(*(subject.cos_sin(Positions.of([position])) for position in index), strict=True)
    true = true_cos_sin(index, subject.frequencies)
    pairs = zip(ours, true, strict=True)
    return max(
        float((torch.cat(some, 1)[0].double() / subject.attention_factor - truth).abs().max()) for some, truth in pairs
    )


def bound(subject: Rotation) -> float:
    """Half a unit of float32 for the exact mode; one more for torch's cosine in the other; another for a factor."""
    roundings = 1 + isinstance(subject.frequencies, Tensor) + (subject.attention_factor != 1)
    return 1.01 * 2.0**-25 * 2 ** (roundings - 1)


class Operators(TorchDispatchMode):
    """Writes down the name of every operator that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def matmul_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("matmul_precision")
def test_05_angles_are_no_matrix_product() -> None:
    """Angles are a matrix product in TF32.

    huggingface/transformers#48428 and #48450: Positions from 2,049 on merged, on one kind of GPU and for batches only.
    The outer product of positions and frequencies was a matrix product, which hardware may compute in TF32 with 11
    bits.

    Check: Cosines of the first pair at positions 2,049 and 2,050 must differ on your GPU.

    Test: matrix products at "high" and "medium"; and no matrix product at all. A CPU has no TF32, so the operator is
    what counts.
    """
    products = {"mm", "bmm", "addmm", "baddbmm", "dot", "mv", "ger", "einsum", "linear", "matmul"}
    positions = Positions.arange(4096)

    def check(build: Build) -> None:
        encoding = build()
        x = queries(encoding, 64)
        few = positions.slice(2040, 2104)
        torch.set_float32_matmul_precision("highest")
        expected = use(encoding, x, few)
        for precision in ("high", "medium"):
            torch.set_float32_matmul_precision(precision)
            with Operators() as ran:
                moved = differences(expected, use(encoding, x, few))
            assert not ran.names & products, f"{encoding}: a matrix product, {ran.names & products}"
            assert not moved, f"{encoding}: {precision!r} moved {moved}"

    ours = [build for name, build in CONSTANT.items() if name in EACH_CODE]
    exhibit(check, *ours, twin=MultipliedRotary, because="a matrix product")


STEP = 2**18


@pytest.mark.parametrize(
    "starts", [pytest.param(range(0, 2**24, STEP), id="all", marks=pytest.mark.slow), pytest.param((0, 2**24 - STEP))]
)
def test_07_no_two_neighbours_share_a_position(starts: Iterable[int]) -> None:
    """Positions counted in bfloat16 merge.

    huggingface/diffusers#13920 and #13922: An image came out flat, because all of its positions were equal. They began
    at 65,536 in bfloat16, where the next number is 66,048.

    Check: `locant probe FOLDER`, or `(p[1:] == p[:-1]).any()` on the positions that reach your rotation.

    Test: every p and p + 1 below 2^24.
    """

    def check(cos_sin: CosSin) -> None:
        for start in starts:
            table = torch.cat(cos_sin(Positions.after(start, STEP + 1)), dim=-1)[0]
            same = (table[1:] == table[:-1]).all(-1)
            assert not same.any(), f"{int(same.sum())} of {STEP} positions from {start} on equal the one before"

    def rounded(positions: Positions) -> tuple[Tensor, Tensor]:
        offset = positions.index.to(torch.bfloat16).float()[..., None]
        return offset.cos(), offset.sin()

    ours = [Rotary(2).cos_sin, Rotary(2, angles="float32").cos_sin]
    exhibit(check, *ours, twin=rounded, because="positions from 0 on equal the one before")


def test_15_cosines_are_right_around_every_power_of_two() -> None:
    """Fast sines are wrong at large angles.

    kekzl/imp#1316 and #1325, lablup/mlxcel#1055: The cosine was off by 1.0e-2 at position 131,071, although everything
    was in float32. Fast sines are accurate only for small angles, and a compiler flag can replace the accurate ones by
    them.

    Check: `locant golden -o golden.safetensors`, and compare your cosines at positions up to 2³¹ − 1.

    Test: 2^k and its neighbours up to 2^24; four of them for every kind of rotary.
    """

    def right(edges: list[int], subject: Rotation) -> None:
        error = worst_error(subject, edges)
        assert error <= bound(subject), f"a cosine is off by {error:.2g}"

    twin = Rotation(coarsely_reduced, rounded_frequencies(WIDTH, 10_000.0))
    plain = [rotation(**ROTARY_OPTIONS[name]) for name in ("rotary", "rotary float32")]
    exhibit(partial(right, EDGES), *plain, twin=twin, because="a cosine is off by")
    few = [2**power + more for power in (1, 8, 17, 24) for more in (-1, 0, 1)]
    exhibit(partial(right, few), *rotations().values(), twin=twin, because="a cosine is off by")


def test_16_no_kind_of_rotary_is_left_out() -> None:
    """A fix reaches two of three branches.

    kekzl/imp#1630: A fix reached two of three branches. No test could reach the third.

    Check: Compare all your kinds of rotary with `locant golden`, not only the default one.

    Test: the list of all kinds, of which entry 15 is asked, against the constructor.
    """
    scalings = {*KINDS.values()} - {Unscaled}
    options = [p for p in inspect.signature(Rotary).parameters.values() if p.default is not inspect.Parameter.empty]

    def check(kinds: Iterable[Mapping[str, Any]]) -> None:
        for option in options:
            assert any(kind.get(option.name, option.default) != option.default for kind in kinds), (
                f"no kind sets {option.name}"
            )
        for angles in get_args(AngleMode):
            found = {type(kind.get("scaling")) for kind in kinds if kind.get("angles", "exact") == angles}
            assert scalings <= found, f"no kind has {scalings - found} with {angles} angles"

    def without(**excluded: object) -> list[dict[str, Any]]:
        return [kind for kind in ROTARY_OPTIONS.values() if not excluded.items() <= kind.items()]

    ours, yarn = list(ROTARY_OPTIONS.values()), ROTARY_OPTIONS["rotary yarn"]["scaling"]
    exhibit(check, ours, twin=without(layout="interleaved"), because="no kind sets layout")
    exhibit(check, ours, twin=without(scaling=yarn, angles="float32"), because="YaRN'>} with float32 angles")


def test_17_no_angle_is_too_large() -> None:
    """Sines are computed outside the range of their polynomial.

    tenstorrent/tt-metal#33971: sin(5e5) was minus infinity. A polynomial for one circle was evaluated far outside of
    it, because the angle was never reduced first.

    Check: Compare `sin(x)` with float64 for `x = 5e5` on your device.

    Test: angles up to 2^40, positions of both signs up to 2^31 - 1.
    """
    ends = [2**31 - 1, 2**31 - 2, 2**30, 500_000, 2**24 + 1]
    index = [sign * p for p in ends for sign in (1, -1)]

    def unreduced(positions: Positions) -> tuple[Tensor, Tensor]:
        angle = positions.index[..., None].float()
        terms = [(-1) ** n * angle ** (2 * n) / float(math.factorial(2 * n)) for n in range(12)]
        cos = torch.stack(terms).sum(0)
        return cos, cos

    def check(subject: Rotation) -> None:
        for table in subject.cos_sin(Positions.of(index)):
            assert torch.isfinite(table).all(), "a cosine that is no number"
            largest = float(table.abs().max() / subject.attention_factor)
            assert largest <= 1 + (subject.attention_factor != 1) * 2.0**-23, f"a cosine of {largest:.9g}"
        error = worst_error(subject, index)
        assert error <= bound(subject), f"a cosine is off by {error:.2g}"

    fast = rotation(base=1e-3)  # frequencies up to 400: angles up to 2**40
    exhibit(check, *rotations().values(), fast, twin=Rotation(unreduced, []), because="a cosine that is no number")


LONG = [65_535, 65_536, 65_537, 2**17]


def test_24_more_tokens_than_a_grid_has_blocks() -> None:
    """Sequences end at the size of a GPU grid.

    microsoft/onnxruntime#20204: Rotary failed for sequences of more than 65,535 tokens. The kernel used the second
    dimension of its grid for the sequence, which has that limit.

    Check: Call your kernel with 65,536 tokens.

    Test: up to 2^17 tokens; 2^20 on a GPU in `tests/kernels/rotary`.
    """

    def one_block_per_token(rotary: PositionEncoding, x: Tensor, positions: Positions) -> Tensor:
        rotated, _ = rotary.rotate(x, x, positions)
        return torch.cat([rotated[:, :, :65_535], x[:, :, 65_535:]], dim=2)

    def check(rotate: Callable[[PositionEncoding, Tensor, Positions], Tensor]) -> None:
        rotary = Rotary(4)
        for seq_len in LONG:
            x = torch.randn(1, 1, seq_len, 4)
            rotated = rotate(rotary, x, Positions.arange(seq_len))
            last = x[:, :, -3:]
            alone, _ = rotary.rotate(last, last, Positions.after(seq_len - 3, 3))
            assert torch.equal(rotated[:, :, -3:], alone), f"the end of {seq_len} tokens is not rotated"
            norms = rotated.norm(dim=-1) / x.norm(dim=-1)
            assert ((norms - 1).abs() < LENGTH).all(), f"some of {seq_len} tokens changed their length"

    def ours(rotary: PositionEncoding, x: Tensor, positions: Positions) -> Tensor:
        return rotary.rotate(x, x, positions)[0]

    exhibit(check, ours, twin=one_block_per_token, because="the end of 65536 tokens is not rotated")


def shift_error(cos_sin: CosSin, dtype: torch.dtype = torch.float32) -> float:
    """By how much q . k changes, per unit of length, when both move on together by up to 2**20 positions."""
    dim = 2 * cos_sin(Positions.arange(1))[0].shape[-1]
    q, k = torch.randn(2, 16, dim, dtype=torch.float64).to(dtype)
    starts, lag = torch.arange(16), 100
    lengths = q.double().norm(dim=-1) * k.double().norm(dim=-1)

    def score(shift: int) -> Tensor:
        rotated_q, rotated_k = (
            _rotated(x, *cos_sin(Positions.of(starts + shift + more))).double() for x, more in ((q, lag), (k, 0))
        )
        return (rotated_q * rotated_k).sum(-1) / lengths

    unmoved = score(0)
    return max(float((score(2**power) - unmoved).abs().max()) for power in range(21))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([a * cos[0] - b * sin[0], b * cos[0] + a * sin[0]], -1).to(x.dtype)


def in_bfloat16(positions: Positions) -> tuple[Tensor, Tensor]:
    cos, sin = Rotary(WIDTH).cos_sin(positions)
    return cos.bfloat16(), sin.bfloat16()


@pytest.mark.parametrize("dtype", SHIFTED)
def test_11_scores_depend_on_the_distance_alone(dtype: torch.dtype) -> None:
    """Cosines in bfloat16 make scores depend on more than distances.

    KellerJordan/modded-nanogpt#39: Cosines in bfloat16 cost training loss: 3.2800, against 3.2783 in float32. A rounded
    table rotates queries and keys by wrong angles, so their product depends on more than a distance.

    Check: `locant.probe(rotate, head_dim=64)` reports by how much q . k changes when both move on.

    Test: a common shift of up to 2^20 for five kinds of rotary; figures in the README.
    """

    def check(cos_sin: CosSin) -> None:
        error = shift_error(cos_sin, dtype)
        assert error <= SHIFTED[dtype], f"a common shift changed a score by {error:.2g}"

    def from_bfloat16(positions: Positions) -> tuple[Tensor, Tensor]:
        return BufferRotary().bfloat16().cos_sin(positions)

    kinds = ("rotary", "rotary partial", "rotary axial", "rotary yarn", "rotary pairs")
    ours = [rotation(**ROTARY_OPTIONS[name]).cos_sin for name in kinds]
    exhibit(check, *ours, twin=from_bfloat16, because="a common shift changed a score")
    if dtype == torch.float32:
        exhibit(check, ours[0], twin=in_bfloat16, because="a common shift changed a score")


def test_11_the_figures_of_the_readme_are_measured() -> None:
    """KellerJordan/modded-nanogpt#39: what each table costs, as a published figure."""
    float32 = Rotary(WIDTH, angles="float32").cos_sin
    tables = {"exact": Rotary(WIDTH).cos_sin, "float32": float32, "bfloat16 table": in_bfloat16}

    def check(table_of: Callable[[str], CosSin]) -> None:
        for name, (told,) in published("relative shift").items():
            measured = shift_error(table_of(name))
            assert told / 2 < measured < told * 2, f"{name}: the README says {told:.2g}, measured {measured:.2g}"

    exhibit(check, tables.__getitem__, twin=lambda name: float32, because="exact: the README says")


def test_14_the_phase_error_is_a_published_figure() -> None:
    """Frequencies have the dtype of the tokens.

    Modalities/modalities#462: Phases were off by 0.62 radians at position 512 and by pi at 4,096. The frequencies were
    cast to the dtype of the tokens.

    Check: `locant.probe(rotate, head_dim=128)` states the error of the angles in radians.

    Test: phases at four positions; figures in the README.
    """
    figures = published("phase error")
    index = [512, 4096, 65_536, 2**20]

    def errors(cos_sin: CosSin) -> list[float]:
        true = true_cos_sin(index, frequencies(128, 10_000.0))
        cos, sin = (table[0] for table in cos_sin(Positions.of(index)))
        return phase_error(cos, sin, *true).amax(-1).tolist()

    def cast(positions: Positions) -> tuple[Tensor, Tensor]:
        angle = positions.index[..., None].float() * BufferRotary(128).inv_freq.bfloat16().float()
        return angle.cos(), angle.sin()

    def check(cos_sin: CosSin) -> None:
        for position, error in zip(index, errors(cos_sin), strict=True):
            assert error < PHASE, f"at position {position} the phase is off by {error:.2g}"

    exhibit(check, Rotary(128).cos_sin, twin=cast, because="at position 512 the phase is off by 0.")
    tables = {"exact": Rotary(128).cos_sin, "float32": Rotary(128, angles="float32").cos_sin, "bfloat16": cast}
    assert figures.keys() == tables.keys()
    for name, cos_sin in tables.items():
        for told, measured in zip(figures[name], errors(cos_sin), strict=True):
            assert told / 2 < measured < told * 2, f"{name}: the README says {told:.2g}, measured {measured:.2g}"
