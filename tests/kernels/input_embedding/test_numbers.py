"""Every kernel against NumPy in float64: the result and all gradients, from memory full of NaN."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from locant.kernels.input_embedding import Operands, native
from tests.kernels.input_embedding.embedded import LEARNED, Kernel, answer, operands
from tests.tolerances import TOLERANCES, assert_close

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def require(kernel: Kernel, o: Operands, cotangent: Tensor | None = None) -> None:
    """Result and gradients are those of the formulas, up to what the dtype can hold."""
    cotangent = torch.randn(*o.ids.shape, o.width).to(o.token.dtype) if cotangent is None else cotangent
    keep = kernel.kept(o) if o.dropping else None
    true = answer(o, cotangent, keep)
    y, found = kernel.both(cotangent, o)
    assert (y.dtype, y.shape) == (o.token.dtype, cotangent.shape)
    assert_close(y, torch.from_numpy(true.y))
    for name in LEARNED:
        table = getattr(o, name)
        if table is None:
            continue
        gradient = found[name]
        assert (gradient.dtype, gradient.shape) == (table.dtype, table.shape), name
        rtol, atol = TOLERANCES[table.dtype]
        size = max(1.0, float(abs(true.gradients[name]).max()))  # a sum of a hundred terms is as exact as the largest
        expected = torch.from_numpy(true.gradients[name])
        torch.testing.assert_close(
            gradient.double(), expected, rtol=rtol, atol=atol * size, msg=lambda m, n=name: f"{n}: {m}"
        )
    if o.padding_idx is not None:
        assert not found["token"][o.padding_idx].any(), "the padding row has a gradient"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_everything_at_once(kernel: Kernel, dtype: torch.dtype) -> None:
    require(kernel, operands((2, 5), dtype=dtype, seed=torch.tensor([5]), p=0.3))


@pytest.mark.parametrize(
    "without",
    [
        ("position", "position_index"),
        ("segment", "segments"),
        ("segments",),
        ("eps", "gamma", "beta"),
        ("gamma", "beta"),
        ("beta",),
        ("padding_idx",),
        ("scale", "position", "position_index", "segment", "segments", "eps", "gamma", "beta", "padding_idx"),
    ],
    ids="-".join,
)
def test_any_part_may_be_missing(kernel: Kernel, without: tuple[str, ...]) -> None:
    require(kernel, operands((2, 3), without=without, seed=torch.tensor([7]), p=0.5))


@pytest.mark.parametrize("width", [1, 2, 63, 64, 257])
def test_any_width(kernel: Kernel, width: int) -> None:
    """Few entries may be almost equal, and nothing says more of their rounding than a norm: hence its eps."""
    require(kernel, operands((1, 3), width, seed=torch.tensor([1]), p=0.1, eps=0.5))


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (9, 1), (2, 5)])
@pytest.mark.parametrize("shared", [True, False], ids=["shared positions", "positions per row"])
def test_any_batch_and_length(kernel: Kernel, shape: tuple[int, int], shared: bool) -> None:
    index = torch.randint(37, (1 if shared else shape[0], shape[1]))
    require(kernel, operands(shape, 5, position_index=index))


@pytest.mark.parametrize(
    "index", [[*range(8, 15)], [8, 9], [*range(11)], [0, 3, 1, 3], [4, 6, 5, 7], [0, 1, 2, 5], [1, 1, 2, 3]], ids=str
)
def test_positions_that_count_up_and_that_only_seem_to(kernel: Kernel, index: list[int]) -> None:
    require(kernel, operands((2, len(index)), 5, position_index=torch.tensor([index])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_random_bits_for_several_rows_and_for_less_than_one(
    kernel: Kernel, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are cut where parts are full: between rows, or within one."""
    for entries in (1, 40, 65, 300):
        monkeypatch.setattr(native, "PART", entries)
        for index in (torch.arange(4, 15)[None], torch.randint(37, (7, 11))):
            o = operands((7, 11), 5, dtype=dtype, position_index=index, seed=torch.tensor([3]), p=0.2)
            require(kernel, o)


@pytest.mark.parametrize("index", [torch.arange(11)[None], torch.arange(16 * 11).view(16, 11) % 7], ids=len)
def test_a_cpu_reads_tables_with_few_rows_many_times(kernel: Kernel, index: Tensor) -> None:
    position = torch.randn(11, 5, dtype=torch.bfloat16)
    o = operands((16, 11), 5, dtype=torch.bfloat16, position=position, position_index=index)
    require(kernel, o)


@pytest.mark.parametrize("table_shape", [(0, 5), (3, 0), (0, 0)])
def test_no_tokens_launch_nothing(kernel: Kernel, table_shape: tuple[int, int]) -> None:
    o = operands(table_shape, 5, position_index=torch.zeros(1, table_shape[1], dtype=torch.long))
    y, found = kernel.forward(o)[0], kernel.backward(torch.zeros(*table_shape, 5), o)
    assert y.shape == (*table_shape, 5)
    for name in LEARNED:
        assert torch.equal(found[name], torch.zeros_like(getattr(o, name)))


def test_sinusoidal_rows_are_not_rounded_first(kernel: Kernel) -> None:
    require(kernel, operands((1, 5), dtype=torch.bfloat16, position=torch.randn(37, 13)))


def gradients_of(kind: str, shape: tuple[int, int, int]) -> Tensor:
    batch, seq_len, width = shape
    if kind == "one number":
        return torch.tensor(0.75).expand(shape)
    if kind == "one row":
        return torch.randn(width).expand(shape)
    if kind == "transposed":
        return torch.randn(width, seq_len, batch).permute(2, 1, 0)
    return torch.randn(batch, seq_len, 2 * width)[..., ::2]


@pytest.mark.parametrize("kind", ["one number", "one row", "transposed", "every second"])
def test_gradients_of_any_strides(kernel: Kernel, kind: str) -> None:
    require(kernel, operands((2, 3), 5), gradients_of(kind, (2, 3, 5)))
    require(kernel, operands((2, 3), 5, without=("eps", "gamma", "beta")), gradients_of(kind, (2, 3, 5)))


def test_tables_and_ids_of_any_strides(kernel: Kernel) -> None:
    o = operands((2, 4), 5)
    strided = dataclasses.replace(
        o,
        token=torch.randn(23, 11)[:, 2:7],
        position=torch.randn(5, 37).T,
        segment=torch.randn(3, 10)[:, ::2],
        ids=torch.randint(23, (4, 2)).T,
        segments=torch.randint(3, (2, 8))[:, ::2],
        position_index=torch.randint(37, (1, 4)).expand(2, 4),
    )
    require(kernel, strided)


@pytest.mark.parametrize("needed", range(len(LEARNED)), ids=lambda place: LEARNED[place])
def test_only_the_gradients_asked_for(kernel: Kernel, needed: int) -> None:
    o, cotangent = operands((2, 3), 5), torch.randn(2, 3, 5)
    every = kernel.backward(cotangent, o)
    some = kernel.backward(cotangent, o, [place == needed for place in range(len(LEARNED))])
    for place, name in enumerate(LEARNED):
        assert torch.equal(some[name], every[name] if place == needed else torch.empty(0))


# ---------------------------------------------------------------------- sums of many


def test_many_uses_of_one_row_are_added_in_float32(kernel: Kernel) -> None:
    """In bfloat16 a sum of ones stops at 256: what is added then is half a step, and rounded away."""
    without = ("eps", "gamma", "beta", "scale", "segment", "segments")
    ids, index = torch.tensor([[4] * 9 + [9]]), torch.zeros(1, 10, dtype=torch.long)
    o = operands((1, 10), 3, dtype=torch.bfloat16, ids=ids, position_index=index, without=without)
    cotangent = torch.ones(1, 10, 3, dtype=torch.bfloat16)
    cotangent[0, 0] = 256
    found = kernel.backward(cotangent, o)
    assert found["token"][[4, 9], 0].tolist() == [264, 1]
    assert float(found["position"][0, 0]) in (264, 266)  # 265 has no place in bfloat16
    naive = torch.zeros(3, dtype=torch.bfloat16)
    for row in cotangent[0, :9]:
        naive += row
    assert naive.tolist() == [256] * 3


NOTHING_BUT_TOKENS = ("eps", "gamma", "beta", "position", "position_index", "segment", "segments")


@pytest.mark.parametrize("before", [0, 1, 4])
@pytest.mark.parametrize("hot", [1, 4, 5, 8, 11])
def test_ids_of_any_number_of_uses(kernel: Kernel, hot: int, before: int) -> None:
    """Some fill a run of sorted tokens, some cross its border, some several; other ids stand on both sides."""
    ids = torch.tensor([*range(3, 3 + before), *[11] * hot, *range(12, 12 + (hot + before) % 3)])
    ids = ids[torch.randperm(len(ids))][None]
    o = operands((1, ids.numel()), 3, ids=ids, without=NOTHING_BUT_TOKENS, padding_idx=11 if hot == 8 else 2)
    require(kernel, o)


def test_every_id_once_and_none_at_all(kernel: Kernel) -> None:
    require(kernel, operands((1, 23), 3, ids=torch.randperm(23)[None], without=NOTHING_BUT_TOKENS))
    padding = torch.full((1, 23), 2)
    require(kernel, operands((1, 23), 3, ids=padding, without=NOTHING_BUT_TOKENS))


def test_the_same_bits_every_time(kernel: Kernel) -> None:
    o = operands((3, 5), 7, ids=torch.randint(3, (3, 5)), seed=torch.tensor([2**62 + 3]), p=0.3)
    cotangent = torch.randn(3, 5, 7)
    first = kernel.backward(cotangent, o)
    for _ in range(2):
        again = kernel.backward(cotangent, o)
        assert all(torch.equal(first[name], again[name]) for name in LEARNED)


# ---------------------------------------------------------------------- agreement


def test_a_token_alone_gets_the_bits_it_gets_in_a_batch(kernel: Kernel) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        o = operands((3, 5), 13, dtype=dtype)
        whole = kernel.forward(o)[0]
        for row, slot in ((0, 0), (1, 3), (2, 4)):
            here = {n: getattr(o, n)[row : row + 1, slot : slot + 1] for n in ("ids", "position_index", "segments")}
            assert torch.equal(kernel.forward(dataclasses.replace(o, **here))[0][0, 0], whole[row, slot])
