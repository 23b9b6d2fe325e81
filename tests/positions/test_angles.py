"""Angles: exact at every position, and beyond the reach of whatever casts a model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from decimal import Decimal
from threading import Barrier

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from locant import ALiBi, PositionEncoding, Positions, RangeError, Rotary, Sinusoidal, T5Bias
from locant.positions import angles
from locant.positions.frequencies import inverse_frequencies
from tests import oracles
from tests.refusal import refuses
from tests.tolerances import ANGLE, ANGLE_IN_DOUBLE, FORMULA, PRINTED

BASES = [1e4, 5e5, 1e6, 1e7]
EDGES = oracles.edge_positions()


def spread(count: int, seed: int = 0) -> np.ndarray:
    """`count` positions below 2^31: every edge, a run from 0, and the rest at random on all scales."""
    rng = np.random.default_rng(seed)
    chosen = (2.0 ** rng.uniform(0, 31, size=count)).astype(np.int64)
    chosen[::2] = rng.integers(2**31, size=len(chosen[::2]))
    run = min(4096, count // 4)
    chosen[:run] = np.arange(run)
    chosen[run : run + len(EDGES)] = EDGES
    return chosen


def worst(rotary: Rotary, positions: np.ndarray, dim: int, base: float) -> float:
    """The largest error of any cosine or sine of these positions."""
    error = 0.0
    for chunk in np.array_split(positions, -(-len(positions) * dim // 2**21)):
        cos, sin = oracles.angles(chunk, dim, base)
        ours_cos, ours_sin = rotary.cos_sin(Positions.of(torch.from_numpy(chunk)))
        assert ours_cos.dtype == ours_sin.dtype == torch.float32
        off_cos, off_sin = ours_cos[0].double().numpy() - cos, ours_sin[0].double().numpy() - sin
        error = max(error, float(np.abs(off_cos).max()), float(np.abs(off_sin).max()))
    return error


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dim", [2, 10, 64])
def test_the_fast_oracle_agrees_with_sixty_digits(dim: int, base: float) -> None:
    sample = np.array([*EDGES[::3], *spread(300)[150:200], 2**31 - 1])
    for fast, slow in zip(
        oracles.angles(sample, dim, base), oracles.true_angles(sample.tolist(), dim, base), strict=True
    ):
        assert np.abs(fast - slow).max() < FORMULA


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dim", [2, 6, 64])
def test_a_hundred_thousand_positions_have_exact_angles(dim: int, base: float) -> None:
    positions = spread(140_000, seed=dim)
    assert len(np.unique(positions)) >= 100_000
    assert worst(Rotary(dim, base), positions, dim, base) <= ANGLE


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dim", [128, 512])
def test_wide_heads_have_exact_angles(dim: int, base: float) -> None:
    assert worst(Rotary(dim, base), spread(8_000, seed=dim), dim, base) <= ANGLE


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_very_many_positions_of_wide_heads_have_exact_angles(base: float) -> None:
    """512 wide: the frequencies of 128 and 256 are among them."""
    assert worst(Rotary(512, base), spread(50_000, seed=512), 512, base) <= ANGLE


@pytest.mark.parametrize("last", [2**k + step for k in (8, 16, 17, 24, 25) for step in (-1, 0, 1)])
def test_angles_are_exact_whatever_the_largest_position_is(last: int) -> None:
    """How much of a position is read depends on the largest of them."""
    positions = np.array([p for p in EDGES if p < last] + [last])
    assert Positions.of(torch.from_numpy(positions)).max_index == last
    assert worst(Rotary(64), positions, 64, 1e4) <= ANGLE


def test_the_bound_tells_the_usual_arithmetic_from_the_exact_one() -> None:
    """The twin: float32 position times float32 frequency, already at 4095, and float32 products of exact tables."""
    positions = np.arange(4096)
    assert worst(Rotary(128, angles="float32"), positions, 128, 1e4) > 1e-4
    coarse, fine = (oracles.angles(part, 128, 1e4) for part in (positions - positions % 64, positions % 64))
    (a, b), (c, d) = (tuple(x.astype(np.float32) for x in pair) for pair in (coarse, fine))
    assert np.abs(a * c - b * d - oracles.angles(positions, 128, 1e4)[0]).max() > ANGLE


def test_angles_in_float64_are_exact_to_fifteen_digits() -> None:
    sample = np.array([*EDGES, *spread(500)])
    cos, sin = oracles.angles(sample, 96, 1e4)
    ours = Rotary(96).cos_sin(Positions.of(torch.from_numpy(sample)), torch.float64)
    assert np.abs(ours[0][0].numpy() - cos).max() < ANGLE_IN_DOUBLE
    assert np.abs(ours[1][0].numpy() - sin).max() < ANGLE_IN_DOUBLE


def test_negative_positions_turn_the_other_way() -> None:
    there, back = Positions.of(EDGES), Positions.of([-p for p in EDGES])
    (cos, sin), (cos_back, sin_back) = (Rotary(64, 5e5).cos_sin(where, torch.float64) for where in (there, back))
    assert float((cos - cos_back).abs().max()) < ANGLE_IN_DOUBLE
    assert float((sin + sin_back).abs().max()) < ANGLE_IN_DOUBLE


def test_what_the_host_knows_of_the_positions_changes_no_bit() -> None:
    """Bytes of the index that are known to be zero are skipped; not knowing must cost time only."""
    index = torch.tensor([[0, 1, 255, 256, 65_535]])
    known, unknown = Positions.of(index), Positions(index)
    assert (known.min_index, known.max_index, unknown.min_index, unknown.max_index) == (0, 65_535, None, None)
    far = Positions.of(torch.cat([index, torch.tensor([[2**31 - 1]])], dim=1))
    for rotary in (Rotary(62), Rotary(62, 1e7)):
        for ours, other, third in zip(*(rotary.cos_sin(p) for p in (known, unknown, far)), strict=True):
            assert torch.equal(ours, other)
            assert torch.equal(ours, third[:, :-1])


def test_layers_share_the_tables_of_the_same_frequencies_wherever_the_first_was_built() -> None:
    with torch.inference_mode():
        first = Rotary(36, 321.0)  # of no other test, so that the tables are made here
    with FakeTensorMode():
        fake = Rotary(36, 321.5)
    others = [Rotary(36, 321.0, layout="interleaved"), Rotary(36, 321.5)]
    tables = [each.angles.tables(torch.device("cpu")).table for each in (first, *others, fake)]
    assert tables[0] is tables[1]
    assert tables[1] is not tables[2]
    for each, table in zip(others, tables[1:3], strict=True):
        assert type(table) is Tensor
        assert not table.is_inference()
        q = torch.randn(1, 1, 3, 36, requires_grad=True)
        each.rotate_one(q, Positions.arange(3)).sum().backward()


def test_layers_that_threads_build_at_once_share_their_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    make, both = angles._byte_tables, Barrier(2)

    def made_while_the_other_does(frequencies: Sequence[Decimal]) -> Tensor:
        both.wait(60)
        return make(frequencies)

    monkeypatch.setattr(angles, "_byte_tables", made_while_the_other_does)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda base: Rotary(36, base), (323.0, 323.0))  # of no other test
    host = torch.device("cpu")
    assert first.angles.tables(host).table is second.angles.tables(host).table


def test_the_first_layer_may_be_built_inside_a_transform() -> None:
    made: list[Rotary] = []

    def loss(x: Tensor) -> Tensor:
        made.append(Rotary(36, 322.0))  # of no other test
        return made[0].rotate_one(x, Positions.arange(3)).sum()

    x = torch.randn(1, 1, 3, 36)
    torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(x)
    later, again = Rotary(36, 322.0), pickle.loads(pickle.dumps(Rotary(36, 322.0)))  # noqa: S301
    assert later.angles.tables(torch.device("cpu")).table is made[0].angles.tables(torch.device("cpu")).table
    assert torch.equal(later.rotate_one(x, Positions.arange(3)), again.rotate_one(x, Positions.arange(3)))


def test_frequencies_have_fifty_digits() -> None:
    for dim, base in ((64, 1e4), (7, 5e5), (2, 1e7)):
        with oracles.mpmath.workdps(60):
            for i, frequency in enumerate(inverse_frequencies(dim, base)):
                true = oracles.mpmath.power(oracles.mpmath.mpf(base), oracles.mpmath.mpf(-2 * i) / dim)
                assert abs(oracles.mpmath.mpf(str(frequency)) / true - 1) < oracles.mpmath.mpf(10) ** -48


def test_rotary_inverse_frequencies_at_dim_64() -> None:
    assert [round(float(f), 4) for f in inverse_frequencies(64, 10_000.0)[:4]] == [1.0, 0.7499, 0.5623, 0.4217]
    cos, sin = Rotary(64).cos_sin(Positions.after(1, 1), torch.float64)
    assert torch.atan2(sin, cos)[0, 0, :4].tolist() == pytest.approx([1.0, 0.7499, 0.5623, 0.4217], abs=PRINTED[4])


# ---------------------------------------------------------------------- nothing moves them

WIDTH, HEADS = 22, 11
FAR = Positions.of([0, 1, 127, 2049, 65_535, 1_000_001, 2**24 + 1, 2**31 - 1])

Table = Callable[[nn.Module], tuple[Tensor, ...]]


def bias_of(encoding: nn.Module) -> tuple[Tensor, ...]:
    assert isinstance(encoding, PositionEncoding)
    q = torch.zeros(1, HEADS, FAR.seq_len, 2)
    bias = encoding.bias(q, q, FAR)
    assert bias is not None
    return (bias,)


def rotated(encoding: nn.Module) -> tuple[Tensor, ...]:
    assert isinstance(encoding, Rotary)
    q = torch.linspace(-2, 2, 3 * FAR.seq_len * WIDTH, dtype=torch.float32).view(1, 3, FAR.seq_len, WIDTH)
    return *encoding.cos_sin(FAR), *encoding.rotate(q, q, FAR)


def build(name: str) -> tuple[PositionEncoding, Table]:
    if name == "sinusoidal":
        return Sinusoidal(WIDTH), lambda m: (m.vectors(FAR), m.embed(torch.ones(1, FAR.seq_len, WIDTH), FAR))
    if name == "alibi":
        return ALiBi(HEADS), bias_of
    if name.startswith("t5"):
        t5 = T5Bias(HEADS, bidirectional="both" in name)
        # Whole numbers up to 32 x 11 would round in bfloat16; halves of small ones do not.
        nn.init.constant_(t5.weight, 0.5)
        with torch.no_grad():
            t5.weight += torch.arange(t5.num_buckets)[:, None] / 2
        return t5, bias_of
    options = {"rotary": {}, "interleaved": {"layout": "interleaved"}, "partial": {"rotary_dim": 6}}
    options["float32"] = {"angles": "float32"}
    return Rotary(WIDTH, **options[name]), rotated


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    before, tf32 = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.set_float32_matmul_precision(before)


def in_autocast(table: Table, module: nn.Module) -> tuple[Tensor, ...]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return table(module)


def in_precision(precision: str) -> Callable[[Table, nn.Module], tuple[Tensor, ...]]:
    def run(table: Table, module: nn.Module) -> tuple[Tensor, ...]:
        with matmul_precision(precision):
            return table(module)

    return run


def through_meta(table: Table, module: nn.Module) -> tuple[Tensor, ...]:
    weights = {name: parameter.clone() for name, parameter in module.state_dict().items()}
    emptied = copy.deepcopy(module).to("meta").to_empty(device="cpu")
    for parameter in emptied.parameters():
        nn.init.constant_(parameter, float("nan"))
    emptied.load_state_dict(weights, strict=True)
    return table(emptied)


EVENTS: dict[str, Callable[[Table, nn.Module], tuple[Tensor, ...]]] = {
    "half": lambda table, module: table(module.half()),
    "bfloat16": lambda table, module: table(module.bfloat16()),
    "bfloat16 and back": lambda table, module: table(module.bfloat16().float()),
    "to(like)": lambda table, module: table(module.to(torch.zeros(1, dtype=torch.float16))),
    "apply": lambda table, module: table(module._apply(lambda tensor: tensor.half())),
    "autocast": in_autocast,
    "matmul precision high": in_precision("high"),
    "matmul precision medium": in_precision("medium"),
    "deepcopy": lambda table, module: table(copy.deepcopy(module)),
    "deepcopy of a cast": lambda table, module: table(copy.deepcopy(module.half())),
    "meta to empty": through_meta,
    "inside a model": lambda table, module: table(nn.Sequential(module).bfloat16()[0]),
}
NAMES = ["rotary", "interleaved", "partial", "float32", "sinusoidal", "alibi", "t5", "t5 both ways"]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("name", NAMES)
def test_no_bit_moves_under(event: str, name: str) -> None:
    (untouched, table), (module, _) = build(name), build(name)
    expected, after = table(untouched), EVENTS[event](table, module)
    for before, now in zip(expected, after, strict=True):
        assert before.dtype == now.dtype
        assert torch.equal(before, now)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_no_bit_moves_when_built_under_another_default_dtype(name: str, default: torch.dtype) -> None:
    untouched, table = build(name)
    expected = table(untouched)
    torch.set_default_dtype(default)
    try:
        module, _ = build(name)
    finally:
        torch.set_default_dtype(torch.float32)
    for before, now in zip(expected, table(module.float()), strict=True):
        assert before.dtype == now.dtype
        assert torch.equal(before, now)


@pytest.mark.parametrize("name", NAMES)
def test_no_bit_moves_when_built_on_meta(name: str) -> None:
    """Large models are built without memory, which must not leave constants without values."""
    untouched, table = build(name)
    with torch.device("meta"):
        module = type(untouched)(*_arguments(untouched), **_options(name))
    emptied = module.to_empty(device="cpu")
    for parameter in emptied.parameters():
        nn.init.constant_(parameter, float("nan"))
    emptied.load_state_dict(untouched.state_dict(), strict=True)
    for before, now in zip(table(untouched), table(emptied), strict=True):
        assert torch.equal(before, now)


def _arguments(encoding: PositionEncoding) -> tuple[int]:
    return (HEADS,) if isinstance(encoding, ALiBi | T5Bias) else (WIDTH,)


def _options(name: str) -> dict[str, object]:
    options: dict[str, dict[str, object]] = {
        "interleaved": {"layout": "interleaved"},
        "partial": {"rotary_dim": 6},
        "float32": {"angles": "float32"},
        "t5 both ways": {"bidirectional": True},
    }
    return options.get(name, {})


@pytest.mark.parametrize("event", ["half", "bfloat16", "bfloat16 and back", "autocast", "meta to empty"])
def test_a_twin_with_a_buffer_does_move(event: str) -> None:
    """The test above can fail: this is rotary as it is usually written."""

    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            frequencies = 1.0 / 10_000.0 ** (torch.arange(0, WIDTH, 2) / WIDTH)
            self.register_buffer("inv_freq", frequencies, persistent=False)

        def forward(self) -> tuple[Tensor, ...]:
            return ((self.inv_freq[:, None] @ FAR.index.to(self.inv_freq.dtype)).cos().float(),)

    expected, moved = Buffered()()[0], EVENTS[event](lambda module: module(), Buffered())[0]
    assert not torch.equal(expected, moved)


def test_no_encoding_without_parameters_keeps_state() -> None:
    for name in NAMES:
        module, _ = build(name)
        assert not list(module.buffers())
        assert set(module.state_dict()) == ({"weight"} if name.startswith("t5") else set())


def test_legacy_frequencies_in_a_checkpoint_are_ignored() -> None:
    rotary = Rotary(8)
    expected = rotary.cos_sin(FAR)
    rotary.load_state_dict({"inv_freq": torch.full((4,), float("nan"))}, strict=True)
    nn.Sequential(rotary).load_state_dict({"0.inv_freq": torch.full((4,), float("nan"))}, strict=True)
    rotary.load_state_dict({}, strict=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, rotary.cos_sin(FAR), strict=True))
    with pytest.raises(RuntimeError, match="unexpected"):
        rotary.load_state_dict({"unexpected": torch.zeros(1)}, strict=True)


def test_an_unknown_angle_mode_is_refused() -> None:
    with refuses(RangeError, "'exakt'", "'exact'", "'float32'"):
        Rotary(8, angles="exakt")


@pytest.mark.parametrize("base", [0.0, -1.0, float("inf"), float("nan")])
def test_a_base_that_is_no_positive_number_is_refused(base: float) -> None:
    with refuses(RangeError, f"got {base} for base"):
        Rotary(8, base)
    with refuses(RangeError, f"got {base} for base"):
        Sinusoidal(8, base=base)
