"""What every encoding has to hold, asked of each: see `tests.positions.claims`; plain ones are in `test_same_alone`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from locant import (
    ALiBi,
    ContinuousGridBias,
    Cope,
    Deberta,
    DecomposedBias,
    Fire,
    GridBias,
    Kerple,
    Learned,
    PositionEncoding,
    Positions,
    Rotary,
    Sandwich,
    ShapeError,
    Shaw,
    Sinusoidal,
    T5Bias,
    TransformerXL,
    XPos,
)  # fmt: skip
from locant.positions import FoPE, MixedRotary, PoPE, RoPEPlusPlus, RotaryByHead, StringRotary
from tests.positions import claims
from tests.refusal import refuses

Builds = dict[str, Callable[..., PositionEncoding]]


def deberta(heads: int, width: int, part: slice | None = None, **options: Any) -> Deberta:
    return Deberta(heads, width, num_buckets=8, max_distance=16, head_slice=part, **options)


def t5(heads: int, width: int, part: slice | None = None, **options: Any) -> T5Bias:
    return T5Bias(heads, num_buckets=8, max_distance=16, head_slice=part, **options)


def kv_heads(heads: int) -> int:
    return 2 if heads > 2 else 1


PLAIN: Builds = {
    "alibi": lambda heads, width, part=None: ALiBi(heads, head_slice=part),
    "t5": t5,
    "t5, both ways": partial(t5, bidirectional=True),
}
SLICED: Builds = {
    "alibi, learned": lambda heads, width, part=None: ALiBi(heads, learned=True, head_slice=part),
    "kerple": lambda heads, width, part=None: Kerple(heads, head_slice=part),
    "kerple, power": lambda heads, width, part=None: Kerple(heads, "power", head_slice=part),
    "sandwich": lambda heads, width, part=None: Sandwich(heads, dim=16, head_slice=part),
    "fire": lambda heads, width, part=None: Fire(heads, hidden=5, threshold=3.0, head_slice=part),
    "deberta": partial(deberta, norm=True),
    "deberta, c2p": partial(deberta, terms=("c2p",)),
    "deberta, p2c": partial(deberta, terms=("p2c",)),
}
SHAW: Builds = {
    "shaw": lambda heads, width: Shaw(width, 3, max_later=1),
    "shaw, both terms": lambda heads, width: Shaw(width, 3, max_later=1, key_term=True),
}
COPE: Builds = {"cope": lambda heads, width: Cope(width, 6)}
XL: Builds = {
    "transformer_xl": lambda heads, width, part=None: TransformerXL(heads, 12, head_dim=width, head_slice=part)
}
GRIDS: Builds = {  # in one row
    "grid": lambda heads, width, part=None: GridBias(heads, 1, 60, head_slice=part),
    "continuous grid": lambda heads, width, part=None: ContinuousGridBias(heads, 1, 60, hidden=5, head_slice=part),
}
DECOMPOSED: Builds = {"decomposed": lambda heads, width: DecomposedBias(width, 1, 60)}
ROTATIONS: Builds = {
    "xpos": lambda heads, width: XPos(width, scale_base=8.0),
    "xpos, interleaved": lambda heads, width: XPos(width, layout="interleaved"),
    "mixed": lambda heads, width: MixedRotary(width, kv_heads(heads)),
    "string": lambda heads, width: StringRotary(width),
    "fope": lambda heads, width: FoPE(width, kv_heads(heads), base=100.0, original_max_seq_len=64),
}
OF_SOME_HEADS: Builds = {
    "by head": lambda heads, width: RotaryByHead([Rotary(width), Rotary(width, base=7.0, layout="interleaved")]),
    "pope": lambda heads, width: PoPE(width, 2),
    "rope++": lambda heads, width: RoPEPlusPlus(Rotary(width)),
}
"""Or with others than they are given."""
BY_TABLE = SLICED | SHAW
OTHERS = BY_TABLE | COPE | XL | ROTATIONS


def each(builds: Builds, *, slow: bool = True) -> pytest.MarkDecorator:
    """By name and as it is built; learned rotations, whose formulas are tested elsewhere, are `slow`."""
    marks = {name: [pytest.mark.slow] if slow and name in ("mixed", "string", "fope") else [] for name in builds}
    cases = [pytest.param(name, build, id=name, marks=marks[name]) for name, build in builds.items()]
    return pytest.mark.parametrize(("name", "build"), cases)


@pytest.mark.parametrize("dtype", claims.DTYPES, ids=str)
@each(OTHERS | OF_SOME_HEADS, slow=False)
def test_every_row_gets_the_same_result_as_alone(name: str, build: claims.Build, dtype: torch.dtype) -> None:
    claims.agrees_with_itself_alone(build, dtype)


@pytest.mark.unchecked
@each(PLAIN | BY_TABLE | GRIDS | DECOMPOSED)
def test_the_score_function_adds_the_bias(name: str, build: claims.Build) -> None:
    claims.score_mod_is_bias(build)


@each({name: build for name, build in {**PLAIN, **OTHERS}.items() if name not in ("alibi", "sandwich")})
def test_gradients_are_those_of_differences(name: str, build: claims.Build) -> None:
    claims.passes_gradcheck(build(2, 4), 2, 4, shake=0.0 if "kerple" in name else 0.3)


def test_gradients_of_lengths_and_angles_are_those_of_differences() -> None:
    claims.passes_gradcheck(PoPE(4, 1), 2, 4)


@pytest.mark.unchecked
@each({name: (OTHERS | GRIDS)[name] for name in ("fire", "deberta", "cope", "xpos", "fope", "grid")})
def test_compiles_at_most_twice(name: str, build: claims.Build) -> None:
    """Every encoding does: entries 33 and 37 of the known bugs, among their slow tests."""
    claims.compiles_at_most_twice(build)


@pytest.mark.unchecked
@each(OTHERS | GRIDS | DECOMPOSED)
def test_sizes_and_state(name: str, build: claims.Build) -> None:
    claims.handles_every_size(build)
    claims.has_no_state_but_parameters(build)
    assert bool(build(2, 4).state_dict()) != (name in ("sandwich", "xpos", "xpos, interleaved"))


@each(PLAIN | SLICED | XL | GRIDS)
def test_ranks_hold_slices_of_one_model(name: str, build: claims.Build) -> None:
    """Up to rounding where each sums up, or projects to, fewer columns."""
    claims.ranks_make_the_whole(build, same_bits=name != "fire" and "deberta" not in name)


Case = tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], Positions, Positions | None, tuple[str, ...]]

QK, FIVE = (2, 3, 5, 4), Positions.arange(5)


def of_heads(ask: Callable[..., Any], name: str) -> list[Case]:
    """What a bias with numbers of its own for three heads refuses."""
    return [
        (ask, (2, 4, 5, 4), QK, FIVE, None, ("(2, 4, 5, 4)", f"{name}(num_heads=3)")),
        (ask, (3, 5, 4), QK, FIVE, None, ("(3, 5, 4)",)),
        (ask, QK, QK, Positions.arange(4), None, ("1 x 4", "2 x 5")),
        (ask, QK, QK, FIVE, Positions.arange(6), ("k has 2 x 5",)),
        (ask, (1, 3, 6, 4), (1, 3, 6, 4), Positions.grid(2, 3), None, (f"{name} needs one index", "2 axes")),
        (ask, QK, QK, Positions.arange(5, device="meta"), None, ("meta",)),
    ]


def of_width(ask: Callable[..., Any], name: str) -> list[Case]:
    """What one that knows the width of its heads, 4, refuses."""
    return [
        (ask, (2, 3, 5, 6), QK, FIVE, None, ("head_dim=4", "q of shape")),
        (ask, QK, (2, 3, 5, 6), FIVE, None, ("head_dim=4", "k of shape")),
        (ask, QK, (2, 3, 2, 4), FIVE, None, ("k has 2 x 2",)),
        (ask, (2, 3, 6, 4), (2, 3, 6, 4), Positions.grid(2, 3), None, (f"{name} needs one index",)),
    ]


FOREIGN: list[Case] = [
    *of_heads(ALiBi(3).bias, "ALiBi"),
    *of_heads(T5Bias(3).score_mod, "T5Bias"),
    *of_heads(Kerple(3).score_mod, "Kerple"),
    *of_heads(Sandwich(3).bias, "Sandwich"),
    *of_heads(Fire(3).bias, "Fire"),
    *of_heads(Deberta(3, 4).bias, "Deberta"),
    *of_heads(TransformerXL(3, 12).bias, "TransformerXL"),
    *of_width(Deberta(3, 4).bias, "Deberta"),
    *of_width(TransformerXL(3, 12).bias, "TransformerXL"),
    *of_width(Shaw(4).bias, "Shaw"),
    *of_width(Cope(4).bias, "Cope"),
    *of_width(XPos(4).rotate, "XPos"),
    *((one.bias, QK, (2, 2, 5, 4), FIVE, None, ("k of shape (2, 2, 5, 4)", "3 query heads"))
      for one in (Deberta(3, 4), Shaw(4, key_term=True), Cope(4))),
]  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN, ids=lambda case: f"{type(case[0].__self__).__name__}, {case[-1][0]}")
def test_queries_and_keys_of_another_shape_are_refused(case: Case) -> None:
    ask, q, k, positions, k_positions, words = case
    with refuses(ShapeError, *words):
        ask(torch.zeros(q), torch.zeros(k), positions, k_positions)


@pytest.mark.parametrize("encoding", [Sinusoidal(6), Learned(9, 6)], ids=str)
def test_embeddings_of_another_shape_are_refused(encoding: PositionEncoding) -> None:
    cases: list[tuple[tuple[int, ...], Positions, tuple[str, ...]]] = [
        ((1, 5, 7), FIVE, ("7)", "d_model=6")),
        ((2, 5, 6), Positions.arange(4), ("1 x 4", "2 x 5")),
        ((2, 5, 6), Positions.arange(5, device="meta"), ("meta", "cpu")),
        ((1, 6, 6), Positions.grid(2, 3), ("2 axes",)),
        *((shape, Positions.arange(6), ("x",)) for shape in ((6,), (6, 6), (2, 3, 6, 6))),
    ]
    for shape, positions, words in cases:
        with refuses(ShapeError, *words):
            encoding.embed(torch.zeros(shape), positions)
