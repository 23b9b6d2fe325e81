"""A bias written once, as a function of distance and head, is the same in every form that attention asks for."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from locant import (
    ALiBi,
    Deberta,
    DistanceBias,
    Fire,
    Kerple,
    LocantError,
    PositionEncoding,
    Positions,
    RangeError,
    Sandwich,
    ShapeError,
    Shaw,
    T5Bias,
    attend,
)
from locant.positions import ModelShape
from locant.positions.hidden_bias import HiddenBias
from locant.positions.registry import encodings
from locant.positions.score_bias import ByDistance
from locant.positions.score_bias.by_distance import largest_distance
from tests.refusal import refuses
from tests.tolerances import assert_close

HEADS = 5
"""Odd and prime, so that a slice of heads is no half."""


class Gentle(DistanceBias):
    """A formula of the head's number, as somebody else would write it."""

    def of_distance(self, distance: Tensor, head: Tensor) -> Tensor:
        return -torch.log1p(distance.abs()) / (head + 1) - (distance < 0) * head


KINDS: dict[str, Callable[..., DistanceBias]] = {
    "gentle": Gentle, "alibi": ALiBi, "learned alibi": lambda *a, **b: ALiBi(*a, learned=True, **b), "t5": T5Bias,
    "t5 both ways": lambda *a, **b: T5Bias(*a, bidirectional=True, **b), "kerple": Kerple,
    "kerple power": lambda *a, **b: Kerple(*a, kind="power", **b), "sandwich": Sandwich,
}  # fmt: skip
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def shaken(encoding: PositionEncoding) -> PositionEncoding:
    with torch.no_grad():
        for number, parameter in enumerate(encoding.parameters()):
            parameter.add_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(number)))
    return encoding


def by_pairs(encoding: PositionEncoding, q: Tensor, k: Tensor, positions: Positions, keys: Positions) -> Tensor:
    score_mod = encoding.score_mod(q, k, positions, keys)
    assert score_mod is not None
    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    indices = [torch.arange(size).view([-1 if i == j else 1 for j in range(4)]) for i, size in enumerate(sizes)]
    return score_mod(torch.zeros(sizes, dtype=torch.float64), *indices)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_bias_score_function_table_and_matrix_have_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    encoding = shaken(KINDS[kind](HEADS))
    q, k = torch.randn(2, HEADS, 7, 4, dtype=dtype), torch.randn(2, 1, 19, 4, dtype=dtype)
    positions, keys = Positions.after(12, 7), Positions.arange(19)
    bias = encoding.bias(q, k, positions, keys)
    wide = torch.promote_types(dtype, torch.float32)
    assert (bias.dtype, bias.shape[1:]) == (wide, (HEADS, 7, 19))
    assert torch.equal(by_pairs(encoding, q, k, positions, keys), bias.double().expand(2, -1, -1, -1))
    table = encoding.distance_table(q, -6, 18)
    assert table.dtype == wide
    distance = positions.index[0, :, None] - keys.index
    assert torch.equal(table[:, distance + 6], bias[0])
    if dtype == torch.float32:
        assert torch.equal(encoding.matrix(7, 19), bias[0])
        assert torch.equal(encoding.matrix(7), encoding.bias(q, q, Positions.arange(7))[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_computed_in_parts_has_the_same_bits(kind: str) -> None:
    """As decoding asks for it on a CPU: without gradients, of more entries than one thread gets at a time."""
    encoding = shaken(KINDS[kind](HEADS))
    q, k = torch.randn(1, HEADS, 1, 4), torch.randn(1, 1, 20_001, 4)
    bias = encoding.bias(q, k, Positions.after(20_000, 1), Positions.arange(20_001))
    with torch.no_grad():
        table = encoding.distance_table(q, 0, 20_000)
    assert torch.equal(table.flip(-1), bias[0, :, 0])


@pytest.mark.parametrize("backend", ["eager", "sdpa", "tiled", "auto"])
def test_every_backend_supports_a_new_distance_bias(backend: str) -> None:
    q, k, v = torch.randn(3, 1, HEADS, 300, 8).double().unbind()
    i, j, h = torch.arange(300)[:, None], torch.arange(300), torch.arange(HEADS)[:, None, None]
    scores = q @ k.mT * 8**-0.5 - torch.log1p((i - j).abs().double()) / (h + 1)
    expected = scores.masked_fill(j > i, float("-inf")).softmax(-1) @ v
    encoding, where = Gentle(HEADS), Positions.arange(300)
    assert isinstance(encoding.score_bias(q, k, where, where), ByDistance)
    got = attend(q.float(), k.float(), v.float(), encoding=encoding, positions=Positions.arange(300), backend=backend)
    assert_close(got, expected, torch.float32)


class Halved(ALiBi):
    def of_distance(self, distance: Tensor, head: Tensor, *, slopes: Tensor) -> Tensor:
        return super().of_distance(distance, head, slopes=slopes) / 2


class Doubled(ALiBi):
    def operands(self, q: Tensor, largest: int | None) -> dict[str, Tensor]:
        return {name: 2 * x for name, x in super().operands(q, largest).items()}


class FarthestBucket(T5Bias):
    def buckets(self, distance: Tensor, bucket_of: Tensor | None = None) -> Tensor:
        return self.num_buckets - 1 - super().buckets(distance, bucket_of)


@torch.no_grad()
@pytest.mark.parametrize("kind", [Halved, Doubled, FarthestBucket])
def test_a_subclass_with_another_formula_does_not_take_the_numbers_of_its_parent(kind: type[DistanceBias]) -> None:
    """One thread has a way of its own to compute a table, which a subclass may not know."""
    encoding = shaken(kind(HEADS))
    q, places = torch.zeros(1, HEADS, 7, 4), Positions.arange(7)
    value = encoding.score_bias(q, q, places, places)
    assert isinstance(value, ByDistance)
    distance = torch.arange(7)[:, None] - torch.arange(7)
    assert torch.equal(value.table(-6, 6)[:, distance + 6], value.dense()[0])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["alibi", "learned alibi", "t5", "t5 both ways"])
def test_a_kept_table_grows_and_follows_its_parameters(kind: str) -> None:
    """In decoding, and with a change that torch does not count."""
    encoding = shaken(KINDS[kind](HEADS))
    assert isinstance(encoding, DistanceBias)
    parameters = [*encoding.parameters()]

    def at(first: int, last: int, dtype: torch.dtype = torch.float32) -> None:
        found = encoding.distance_table(torch.zeros(1, HEADS, 0, 4, dtype=dtype), first, last)
        assert found.dtype == dtype
        assert found.stride(-1) == 1, "kernels read the distances of a head in a row"
        with torch.enable_grad():  # which keeps nothing
            assert torch.equal(found, encoding.distance_table(torch.zeros(1, HEADS, 0, 4, dtype=dtype), first, last))

    spans = [(0, 4), (0, 5), (0, 2_000), (-7, 30), (5_000, 5_001), (-3, -1), (0, 4)]
    for first, last in spans:
        at(first, last)
    for parameter in parameters:
        parameter.data.mul_(-2)
    for first, last in spans:
        at(first, last)
        at(first, last, torch.float64)


@torch.no_grad()
def test_a_kept_table_is_computed_once_and_holds_no_queries() -> None:
    class Counted(ALiBi):
        counted = 0

        def along(self, q: Tensor, distance: Tensor) -> Tensor:
            self.counted += len(distance)
            return super().along(q, distance)

    encoding, queries = Counted(HEADS), torch.zeros(1, HEADS, 1, 4)
    alive = weakref.ref(queries)
    for last in range(100, 120):
        encoding.distance_table(queries, 0, last)
    assert encoding.counted <= 101 + 25
    del queries
    gc.collect()
    assert alive() is None
    assert copy.deepcopy(encoding)._kept_table._kept is None


def test_a_formula_that_is_missing_is_named() -> None:
    class Empty(DistanceBias):
        pass

    with pytest.raises(LocantError, match=r"Empty does not define of_distance"):
        Empty(2).matrix(2)


def test_constants_are_resolved_before_the_score_function_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    where = Positions.arange(5)
    for encoding in (ALiBi(3), T5Bias(3), Kerple(3), Sandwich(3), Deberta(3, 4), Shaw(4), Fire(3)):
        q = torch.randn(1, 3, 5, 4)
        score_mod = encoding.score_mod(q, q, where)

        def copies(*_: object) -> Tensor:
            raise AssertionError("a constant is copied inside of the score function")

        with monkeypatch.context() as patch:
            patch.setattr("locant.positions.constant.Constant.on", copies)
            zero = torch.tensor(0)
            score_mod(torch.tensor(0.0), zero, zero, zero, zero)


def test_score_functions_of_some_heads_take_their_numbers_in_the_model() -> None:
    """Without bounds of the positions there is no table, which would have the right heads by itself."""
    index = torch.tensor([3, 0, 9])
    encoding, where = Gentle(HEADS, head_slice=slice(1, 5, 2)), Positions.of(index, max_index=9)
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    distance, head = (index[:, None] - index).double(), torch.tensor([1.0, 3.0])[:, None, None]
    expected = -torch.log1p(distance.abs()) / (head + 1) - (distance < 0) * head
    assert_close(by_pairs(encoding, q, q, where, where)[0], expected, torch.float32)


def test_the_largest_distance_is_known_where_it_helps() -> None:
    assert largest_distance(Positions.arange(5), Positions.arange(5)) == 4
    assert largest_distance(Positions.after(100, 2), Positions.arange(102)) == 101
    assert largest_distance(Positions.of([5000]), Positions.of([0])) is None, "more distances than pairs"


def test_slopes_are_numbers() -> None:
    assert ALiBi(8).slopes.tolist() == [2.0**-n for n in range(1, 9)]
    assert ALiBi(8, head_slice=slice(2, 4)).slopes.tolist() == [2.0**-3, 2.0**-4]


@pytest.mark.parametrize("learned", [False, True])
def test_slopes_can_be_given(learned: bool) -> None:
    given = [0.5, 0.3, 0.1]
    encoding = ALiBi(3, slopes=given, learned=learned, head_slice=slice(1, 3))
    assert torch.equal(encoding.matrix(2)[:, 0, 1], -torch.tensor([0.3, 0.1]))
    assert "0.3" in repr(encoding)
    with refuses(ShapeError, "2 slopes", "3"):
        ALiBi(3, slopes=given[:2])
    with refuses(RangeError, "slopes"):
        ALiBi(1, slopes=["steep"])


@pytest.mark.parametrize("name", encodings())
def test_every_encoding_has_a_matrix_or_suggests_a_call(name: str) -> None:
    encoding = encodings()[name].for_model(ModelShape(d_model=12, num_heads=3, max_seq_len=8))
    q, k = torch.randn(1, 3, 2, 4), torch.randn(1, 3, 5, 4)
    keys = encoding.read(torch.randn(1, 5, 12), Positions.arange(5))
    bias, other = (encoding.bias(x, k, keys.slice(3, 5), keys) for x in (q, q + 1))
    if bias is not None and torch.equal(bias, other) and bias.any() and not isinstance(encoding, HiddenBias):
        assert torch.equal(encoding.matrix(2, 5), bias[0])
    else:
        with refuses(LocantError, type(encoding).__name__, "encoding."):
            encoding.matrix(2, 5)
