"""Token embeddings: look-up, scale, padding, resizing, and the head that shares the table."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from locant import RangeError, SegmentEmbedding, ShapeError, TokenEmbedding
from tests.refusal import refuses
from tests.tolerances import DRAWN, ONE_ROUNDING, assert_close

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 5), (7,), (), (2, 3, 5), (0, 3)])
def test_every_id_gets_its_row(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    embedding, ids = TokenEmbedding(11, 7).to(dtype), torch.randint(11, shape)
    rows = embedding(ids)
    assert (rows.shape, rows.dtype) == ((*shape, 7), dtype)
    for row, token in zip(rows.view(-1, 7), ids.flatten().tolist(), strict=True):
        assert torch.equal(row, embedding.weight[token])


def test_gradients_are_counted_once_per_use() -> None:
    embedding = TokenEmbedding(5, 3, scale=2.5).double()
    ids = torch.tensor([[0, 4, 4], [4, 1, 0]])
    cotangent = torch.randn(2, 3, 3, dtype=torch.float64)
    embedding(ids).backward(cotangent)
    expected = torch.zeros(5, 3, dtype=torch.float64)
    for b in range(2):
        for s in range(3):
            expected[ids[b, s]] += 2.5 * cotangent[b, s]
    assert_close(embedding.weight.grad, expected)


FACTORS = {
    torch.float64: 55.42562584220407, torch.float32: 55.42562584220407, torch.float16: 55.4375, torch.bfloat16: 55.5,
}  # fmt: skip
"""sqrt(3072) as each dtype has it; float32's is that of float64 to the digits compared."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_factor_is_rounded_only_where_that_is_asked_for(dtype: torch.dtype) -> None:
    plain = TokenEmbedding(11, 3072).to(dtype)
    ids, rows = torch.arange(11), plain.weight.detach().double()
    for scale, factor in (("sqrt_d_model", math.sqrt(3072)), ("sqrt_d_model_rounded", FACTORS[dtype]), (0.3, 0.3)):
        embedding = TokenEmbedding(11, 3072, scale=scale).to(dtype)
        embedding.load_state_dict(plain.state_dict())
        out = embedding(ids)
        assert out.dtype == dtype
        exact = rows * factor
        half_a_step = exact.abs() * torch.finfo(dtype).eps / 2 + 2.0**-25 + exact.abs() * ONE_ROUNDING[torch.float32]
        assert bool(((out.double() - exact).abs() <= half_a_step).all()), scale


def _rms(x: Tensor) -> float:
    return float(x.detach().double().pow(2).mean().sqrt())


def test_rows_begin_with_length_one_and_scaled_entries_with_variance_one() -> None:
    torch.manual_seed(0)
    for scale, expected in ((None, 64**-0.5), ("sqrt_d_model", 1.0)):
        rows = TokenEmbedding(2003, 64, scale=scale)(torch.arange(2003))
        assert _rms(rows) == pytest.approx(expected, rel=DRAWN, abs=0)


@pytest.mark.parametrize("scale", ["sqrt", "", "sqrt_d", "2.0", "nan", "inf", "double"])
def test_an_unknown_scale_is_refused(scale: str) -> None:
    with refuses(RangeError, f"got {scale!r} for scale", "'sqrt_d_model'", "'sqrt_d_model_rounded'"):
        TokenEmbedding(11, 7, scale=scale)


@pytest.mark.parametrize("padding_idx", [0, 3, 10, -1, -11])
def test_the_padding_row_is_zero_and_stays_zero(padding_idx: int) -> None:
    embedding = TokenEmbedding(11, 7, padding_idx=padding_idx, scale=3.0)
    row = padding_idx % 11
    ids = torch.arange(11).repeat(3).view(3, 11)
    assert torch.equal(embedding(ids)[:, row], torch.zeros(3, 7))
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.5)
    before = embedding.weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        embedding(ids).backward(torch.randn(3, 11, 7))
        assert torch.equal(embedding.weight.grad[row], torch.zeros(7))
        optimizer.step()
    assert torch.equal(embedding.weight[row], torch.zeros(7))
    assert bool((embedding.weight != before).any(1).sum() == 10), "the other rows learn"


def test_the_padding_row_survives_resizing_resetting_and_loading() -> None:
    embedding = TokenEmbedding(11, 7, padding_idx=-1)
    embedding.resize(17)
    assert embedding.padding_idx == 10
    assert torch.equal(embedding.weight[10], torch.zeros(7))
    embedding(torch.arange(17)).sum().backward()
    assert embedding.weight.grad.any(1).tolist() == [i != 10 for i in range(17)]
    embedding.reset_parameters()
    assert embedding.weight.any(1).tolist() == [i != 10 for i in range(17)]
    again = TokenEmbedding(17, 7, padding_idx=10)
    again.load_state_dict(embedding.state_dict(), strict=True)
    assert torch.equal(again.weight, embedding.weight)


@pytest.mark.parametrize("padding_idx", [11, -12])
def test_a_padding_row_outside_the_table_is_refused(padding_idx: int) -> None:
    with refuses(RangeError, f"got {padding_idx} for padding_idx", "11"):
        TokenEmbedding(11, 7, padding_idx=padding_idx)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_resizing_keeps_every_old_row_byte_for_byte(dtype: torch.dtype) -> None:
    embedding = TokenEmbedding(11, 64).to(dtype)
    with torch.no_grad():
        embedding.weight[3, :2] = torch.tensor([float("nan"), -0.0])  # bits that comparing values would not see
    before = embedding.weight.detach().clone()
    embedding.resize(4099)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(embedding.weight[:11].view(bits), before.view(bits))
    assert (embedding.vocab_size, embedding.weight.dtype) == (4099, dtype)
    assert embedding.weight.requires_grad
    assert _rms(embedding.weight[11:]) == pytest.approx(64**-0.5, rel=DRAWN, abs=0)
    embedding(torch.tensor([4098])).sum().backward()
    with refuses(RangeError, "4099"):
        embedding(torch.tensor([4099]))


def test_resizing_keeps_a_frozen_table_frozen_and_a_meta_table_on_meta_and_the_same_size_as_it_is() -> None:
    embedding = TokenEmbedding(11, 7)
    weight = embedding.weight.requires_grad_(False)
    embedding.resize(11)
    assert embedding.weight is weight
    embedding.resize(13)
    assert not embedding.weight.requires_grad
    large = TokenEmbedding(11, 7).to("meta")
    large.resize(13)
    assert (large.weight.device.type, large.vocab_size) == ("meta", 13)


@pytest.mark.parametrize("vocab_size", [10, 0, -1])
def test_a_table_never_shrinks(vocab_size: int) -> None:
    embedding = TokenEmbedding(11, 7)
    before = embedding.weight.detach().clone()
    with refuses(RangeError, f"got {vocab_size} for vocab_size", "11 or more", "never dropped"):
        embedding.resize(vocab_size)
    assert torch.equal(embedding.weight, before)


@pytest.mark.parametrize("scale", [None, "sqrt_d_model"])
def test_logits_are_products_with_every_row_unscaled(scale: str | None) -> None:
    embedding = TokenEmbedding(11, 7, scale=scale).double()
    x = torch.randn(2, 5, 7, dtype=torch.float64)
    logits = embedding.logits(x)
    for token in range(11):
        assert_close(logits[..., token], (x * embedding.weight[token]).sum(-1))


def test_the_head_is_the_same_parameter_and_learns_from_both_uses() -> None:
    embedding = TokenEmbedding(11, 7).double()
    assert len(list(embedding.parameters())) == 1
    ids, cotangent = torch.randint(11, (2, 5)), torch.randn(2, 5, 11, dtype=torch.float64)
    embedding.logits(embedding(ids)).backward(cotangent)
    weight = embedding.weight.detach()
    expected = torch.zeros_like(weight)
    for b in range(2):
        for s in range(5):
            expected += torch.outer(cotangent[b, s], weight[ids[b, s]])
            expected[ids[b, s]] += cotangent[b, s] @ weight
    assert_close(embedding.weight.grad, expected)
    embedding.resize(13)
    assert embedding.logits(torch.zeros(1, 7, dtype=torch.float64)).shape == (1, 13)


def test_hidden_states_of_another_width_are_refused() -> None:
    with refuses(ShapeError, "x of shape", "d_model=7"):
        TokenEmbedding(11, 7).logits(torch.zeros(2, 8))


@pytest.mark.parametrize("bad", [-1, 11, 2**31, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("name", ["TokenEmbedding", "SegmentEmbedding"])
def test_an_id_outside_the_table_is_named_and_the_next_call_works(name: str, bad: int) -> None:
    embedding = TokenEmbedding(11, 7) if name == "TokenEmbedding" else SegmentEmbedding(11, 7)
    ids = torch.tensor([[0, 10, 3], [4, bad, bad]])
    with refuses(RangeError, f"id {bad} at (1, 1)", name, "=11", "0 to 10"):
        embedding(ids)
    assert embedding(ids.clamp(0, 10)).shape == (2, 3, 7)


@pytest.mark.parametrize(
    "ids", [torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.complex64)]
)
def test_ids_that_are_no_integers_are_refused(ids: Tensor) -> None:
    for embedding in (TokenEmbedding(11, 7), SegmentEmbedding(2, 7)):
        with refuses(ShapeError, str(ids.dtype).removeprefix("torch."), "integers"):
            embedding(ids)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32], ids=str
)
def test_ids_of_any_integer_dtype_are_looked_up(dtype: torch.dtype) -> None:
    """Token stores hold ids in 16 bits."""
    ids = torch.tensor([[0, 10, 3]])
    for embedding in (TokenEmbedding(11, 7), SegmentEmbedding(11, 7)):
        assert torch.equal(embedding(ids.to(dtype)), embedding(ids))


def test_ids_on_another_device_are_refused() -> None:
    for embedding in (TokenEmbedding(11, 7), SegmentEmbedding(2, 7)):
        with refuses(ShapeError, "meta", "cpu"):
            embedding(torch.zeros(2, 3, dtype=torch.long, device="meta"))
        with refuses(ShapeError, "meta", "cpu"):
            embedding.to("meta")(torch.zeros(2, 3, dtype=torch.long))
