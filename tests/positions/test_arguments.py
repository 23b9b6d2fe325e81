"""Whatever a constructor is given, it answers with an object, or with an error that says what was got.

Every parameter of every public class is tried, as the signatures have them: none can be forgotten.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from locant import (
    ALiBi,
    Deberta,
    Fire,
    Kerple,
    Learned,
    PositionEncoding,
    Positions,
    Rotary,
    Sandwich,
    Sinusoidal,
    T5Bias,
    XPos,
    attend,
    encoding,
    scaling,
)
from locant.errors import LocantError, RangeError
from locant.positions import Pairs, abacus, coupled, randomized
from locant.positions.registry import encodings
from locant.positions.scaling import Linear, LongRoPE, YaRN
from tests.odd import FLAG, POSITIVE, REAL, parameters, require_refused
from tests.refusal import refuses

typed = pytest.mark.unchecked  # the shape checks refuse the numbers of other libraries

Build = Callable[..., Any]

SAMPLE = {
    "max_seq_len": 16, "d_model": 8, "num_heads": 2, "head_dim": 4, "factor": 2.0, "original_max_seq_len": 8,
    "short_factor": (1.0, 1.0), "long_factor": (2.0, 2.0), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "seq_len": 4, "cache_len": 4, "n": 2, "attention_mask": torch.ones(1, 2), "lengths": [2, 3], "index": [1],
    "batch": {"position_ids": [[0, 1]]},
    "parts": [Positions.arange(2)], "sizes": 2, "rank": 0, "world": 2, "ids": [1], "digits": [1], "numbers": [1, 2],
    "rotary": Rotary(4), "grids": [(1, 2)], "groups": [Rotary(4)], "height": 2, "width": 3,
    "num_frames": 8, "pair": 1,
}  # fmt: skip


def _grid(sizes: Any, centred: Any = True, prefix: Any = 1, device: Any = None) -> Positions:
    """As it is, but its sizes have one name."""
    return Positions.grid(2, sizes, centred=centred, prefix=prefix, device=device)


WRAPPED = {"grid": _grid}
ENCODINGS = list(encodings().values())
SCALINGS = [kind for name in scaling.__all__ if (kind := getattr(scaling, name)) is not scaling.Scaling]
FACTORIES = [
    *(
        WRAPPED.get(name, getattr(Positions, name))
        for name, one in sorted(vars(Positions).items())  # the values of old names would warn
        if isinstance(one, classmethod) and name[0] != "_" and name != "from_fields"  # the others call it
    ),
    Positions.arange(4).shard, Positions.arange(4).shard_slots, abacus, coupled, randomized,
]  # fmt: skip
BUILDS: dict[str, Build] = {
    one.__qualname__.lstrip("_"): one for one in (*ENCODINGS, *SCALINGS, *FACTORIES) if one is not PositionEncoding
}

NONE = frozenset({"None"})
ZERO = frozenset({"0"})

ACCEPTED: dict[str, Collection[str]] = {
    # Beside these, what every signature says: ``None`` where it is the default, and a flag where the default is one.
    **dict.fromkeys(("base", "c", "gamma", "scale_base", "threshold", "factor", "low_freq_factor"), POSITIVE),
    **dict.fromkeys(("max_distance", "offset", "rank", "sizes", "batch", "start", "seed", "prefix"), ZERO),
    **dict.fromkeys(
        ("short_factor", "long_factor", "index", "lengths", "numbers", "Positions.multimodal.parts"),
        frozenset({"list"}),
    ),
    **dict.fromkeys(("ids", "digits"), frozenset({"list", "0", "-1"})),
    "randomized.lengths": frozenset({"0", "list"}),
    "Positions.from_batch.batch": frozenset(),
    "abacus.ids": frozenset({"list"}),
    **dict.fromkeys(("mscale", "mscale_all_dim"), ZERO | POSITIVE),
    **dict.fromkeys(("document", "order"), frozenset({"0", "-1", "list"})),
    "attention_factor": POSITIVE,
    "slopes": {"array", "tensor"},
    "Rotary.axial": (),
    "attention_mask": {"True", "0", "tiny", "array", "tensor"},
    "cache_len": {"0", "list"},
    "center": {"0", "-1"},
    "device": ZERO if torch.accelerator.is_available() else (),
    "init_std": ZERO | POSITIVE,
    "max_index": {"0", "-1"},
    "max_later": ZERO,
    "rotated_share": {"0", "tiny"},
    "scale": REAL,
    # What others of the same name take, these do not, or the other way round.
    **dict.fromkeys(("DynamicNTK.factor", "MixedNTK.factor", "YaRN.factor", "beta_fast"), POSITIVE - {"tiny"}),
    "MixedNTK.b": {"0", "1.5", "tiny"},
    **dict.fromkeys(("T5Bias.max_distance", "Deberta.max_distance"), ()),
    "RIFLEx.pair": ZERO,
    "RIFLEx.share": {"tiny"},
    "DyPE.factor": POSITIVE - {"tiny"},
    "DyPE.time": {"0", "tiny"},
    **dict.fromkeys(("strength", "exponent"), frozenset({"0", "tiny", "1.5"})),
    "Deberta.num_buckets": NONE,
    "GridBias.prefix": FLAG,
    "Convolutional.norm": (),
    "PaTH.rank": NONE,
    "largest": POSITIVE,
    "FoPE.noise": ZERO | POSITIVE,
    **dict.fromkeys(("alpha", "initial"), REAL),
    **dict.fromkeys(("Positions.arange.seq_len", "Positions.after.n"), ZERO),
    "DualChunk.local_size": ZERO,
    "SelectiveRoPE.rank": NONE,
    "SelectiveRoPE.offset": FLAG,
    "beta_slow": {"1.5"},
    "Llama3.low_freq_factor": {"1.5", "tiny"},
    "Llama3.high_freq_factor": {"1.5", "2**70"},
}

OTHERS = {
    "norm", "axial", "scaling", "device",
    "layout", "angles", "kind", "form", "terms", "sections", "slopes", "short_factor", "long_factor",
    "lengths", "length", "parts", "ids", "digits", "positions", "numbers", "goes_on", "continue_from", "padding",
    "grids",
    "attention_mask", "index", "document", "order", "cache_len", "pairs", "temperature",
    "rotary", "groups", "Positions.from_batch.batch",
}  # fmt: skip
"""Parameters that are no numbers; what is wrong with them is a `LocantError` of one kind or another."""

WORDS = {
    "goes_on": "continue_from",  # its old name
    "lengths": "length",
    "sizes": "size",
    "Positions.cat.parts": "",
    "attention_mask": "mask",
    "length": "",
}
"""What errors call a parameter, where that is not its name."""

CASES = [
    pytest.param(build, required, owner, name, id=f"{owner}.{name}")
    for owner, build in BUILDS.items()
    for name, required in parameters(build, SAMPLE | ({"parts": [2]} if owner == "Positions.multimodal" else {}))
]


@pytest.mark.filterwarnings("ignore:locant:DeprecationWarning")  # from old names
@pytest.mark.parametrize(("build", "required", "owner", "name"), CASES)
def test_an_invalid_argument_raises_an_error_with_its_name(
    build: Build, required: dict[str, Any], owner: str, name: str
) -> None:
    default = inspect.signature(build).parameters[name].default
    flag = FLAG if isinstance(default, bool) else frozenset()
    accepted = {*ACCEPTED.get(f"{owner}.{name}", ACCEPTED.get(name, flag)), *(NONE if default is None else ())}
    number = OTHERS.isdisjoint({name, f"{owner}.{name}"}) and not isinstance(default, bool)
    require_refused(
        build, required, name, accepted, number=number, word=WORDS.get(f"{owner}.{name}", WORDS.get(name, name))
    )


@pytest.mark.parametrize(
    "build",
    [
        lambda: Sinusoidal(2**20),
        lambda: Rotary(2**20),
        lambda: Sandwich(2, dim=2**20),
        lambda: ALiBi(2**30),
        lambda: T5Bias(2, max_distance=2**30),
        lambda: Deberta(2, 4, max_distance=2**30),
        lambda: Deberta(2, 4, num_buckets=5, max_distance=2**20),  # five buckets reach its square
        lambda: Deberta(2**20, 2**20),
        lambda: Rotary(
            8, scaling=LongRoPE(short_factor=[1] * 4, long_factor=[1] * 4, original_max_seq_len=1, factor=2)
        ),
        lambda: Rotary(8, base=1.0, scaling=YaRN(factor=2, original_max_seq_len=8)),
    ],
)
def test_values_that_never_end_or_divide_by_zero_raise_an_error(build: Build) -> None:
    with refuses(RangeError):
        build()


@pytest.mark.parametrize("number", [5e-324, 1e-30, 1e30, 3e38])
@pytest.mark.parametrize("kind", SCALINGS)
def test_extreme_scalings_can_be_built_with(kind: Build, number: float) -> None:
    """Or are refused; whatever they are good for, no arithmetic fails on them."""
    for name, required in parameters(kind, SAMPLE):
        with suppress(LocantError, jaxtyping.TypeCheckError):
            Rotary(4, scaling=kind(**{**required, name: number}))


def _numbers() -> list[Any]:
    return [np.int64(4), np.uint8(4), np.array(4), torch.tensor(4)]


@typed
@pytest.mark.parametrize("number", _numbers(), ids=repr)
def test_integers_of_other_kinds_become_plain_ones(number: Any) -> None:
    rotary, table = Rotary(number), Learned(number, number, offset=number)
    assert (type(rotary.head_dim), rotary.head_dim, type(rotary.rotary_dim)) == (int, 4, int)
    assert (type(table.max_seq_len), table.weight.shape) == (int, (8, 4))
    assert Positions.arange(number) == Positions.arange(4) == Positions.after(0, number)
    assert Positions.grid(number, number) == Positions.grid(4, 4)
    assert Positions.packed([[number], [2]]) == Positions.packed([[4], [2]])
    assert repr(ALiBi(number)) == "ALiBi(num_heads=4)"


@typed
@pytest.mark.parametrize("number", [*_numbers(), np.float32(4), torch.tensor(4.0), Fraction(4), Decimal(4)], ids=repr)
def test_real_numbers_of_other_kinds_become_plain_ones(number: Any) -> None:
    assert type(Rotary(4, base=number).base) is float
    assert Rotary(4, base=number).angles.frequencies == Rotary(4, base=4.0).angles.frequencies
    assert Linear(factor=number) == Linear(factor=4.0)
    assert repr(Linear(factor=number)) == "Linear(factor=4.0)"


@typed
def test_errors_show_the_argument() -> None:
    assert repr(LongRoPE(short_factor=[1, 2.0], long_factor=(3, 4), original_max_seq_len=8, factor=2)) == (
        "LongRoPE(short_factor=(1, 2.0), long_factor=(3, 4), original_max_seq_len=8, factor=2, attention_factor=None)"
    )


@pytest.mark.parametrize("part", ["0:2", 0, (0, 2), slice("a", None), slice(1.5), slice(0, 2, 0), slice(0, 2**70), []])
@pytest.mark.parametrize("build", [ALiBi, T5Bias, Sandwich, Kerple, Fire])
def test_an_invalid_head_slice_raises_an_error(build: Build, part: Any) -> None:
    with refuses(RangeError, "head_slice", "2 heads"):
        build(2, head_slice=part)


@pytest.mark.parametrize("sections", [(1.0, 1.0), ("1", "1"), (3, -1), (True, 1), (1, None), 2])
def test_invalid_sections_raise_an_error(sections: Any) -> None:
    with pytest.raises((LocantError, jaxtyping.TypeCheckError), match="sections"):
        Rotary(4, sections=sections)


def test_methods_called_by_name_pass_errors_on() -> None:
    with refuses(RangeError, "'8'", "num_heads"):
        encoding("alibi", num_heads="8")
    with refuses(RangeError, "[8]"):
        encoding([8])  # type: ignore[arg-type]
    with refuses(RangeError, "1.5", "seq_len"):
        Rotary(4).for_length(1.5)  # type: ignore[arg-type]


@typed
def test_sizes_that_a_graph_keeps_open_stay_open() -> None:
    """In a graph that is exported, a size that was made an integer, or compared with a limit, would be fixed."""

    class Counting(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return Positions.arange(ids.shape[1], batch=ids.shape[0]).index + ids

    sizes = {"ids": {0: Dim("batch"), 1: Dim("seq", max=2**31 - 1)}}
    ids = torch.zeros(2, 3, dtype=torch.long)
    graph = torch.export.export(Counting(), (ids,), dynamic_shapes=sizes, strict=False)
    assert graph.module()(torch.zeros(5, 4, dtype=torch.long)).tolist() == [[0, 1, 2, 3]] * 5


SMALL = {"original_max_seq_len": 64, "factor": 4}
WITH_INTEGERS: dict[str, Callable[[], object]] = {
    "LongRoPE": lambda: Rotary(4, scaling=scaling.LongRoPE(short_factor=[1, 2], long_factor=[2, 3], **SMALL)).cos_sin(
        3
    ),
    "YaRN": lambda: Rotary(8, base=100, scaling=scaling.YaRN(**SMALL, beta_fast=32, beta_slow=1)).cos_sin(3),
    "Llama3": lambda: Rotary(8, scaling=scaling.Llama3(**SMALL, low_freq_factor=1, high_freq_factor=4)).cos_sin(3),
    "Pairs": lambda: Rotary(4, pairs=Pairs(dims=[(0, 1), (2, 3)], inv_freq=[1, 2])).cos_sin(3),
    "ALiBi": lambda: ALiBi(2, slopes=[1, 2]).matrix(2),
    "Fire": lambda: Fire(2, c=1, threshold=512),
    "XPos": lambda: XPos(8, base=100, gamma=1, scale_base=512).rotate(*torch.ones(2, 1, 1, 3, 8)),
    "Sinusoidal": lambda: Sinusoidal(8, base=100, scale=1).vectors(3),
    "attend": lambda: attend(*torch.ones(3, 1, 1, 3, 8), scale=1, softcap=5, dropout_p=0),
}


@pytest.mark.parametrize("name", WITH_INTEGERS)
def test_an_integer_is_taken_where_a_float_is(name: str) -> None:
    """The checks of shapes distinguish them, so this test needs these checks."""
    assert WITH_INTEGERS[name]() is not None
