"""`merge`: attention over parts of the keys, joined, is attention over all of them, with every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from locant import ALiBi, Positions, ShapeError, attend
from locant.attention import merge
from tests.refusal import refuses
from tests.tolerances import assert_close

HEADS, KV_HEADS, LENGTH = 4, 2, 13
PARTS = {
    "one": [slice(0, 13)],
    "halves": [slice(0, 7), slice(7, 13)],
    "uneven": [slice(0, 1), slice(1, 2), slice(2, 11), slice(11, 13)],
    "out of order": [slice(9, 13), slice(0, 4), slice(4, 9)],
    "with nothing": [slice(0, 0), slice(0, 13)],
}
WHERE = {
    "causal": Positions.arange(LENGTH),
    "packed": Positions.packed([[4, 9], [2, 1]], length=LENGTH),
    "left padding": Positions.from_mask(torch.tensor([[0] * 5 + [1] * 8, [1] * 13])),
}


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, HEADS, LENGTH, 8), (2, KV_HEADS, LENGTH, 8), (2, KV_HEADS, LENGTH, 5))
    q, k, v = (torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v


def in_parts(
    q: Tensor, k: Tensor, v: Tensor, where: Positions, parts: list[slice], **options: object
) -> tuple[Tensor, Tensor]:
    def over(keys: slice) -> tuple[Tensor, Tensor]:
        k_positions = where.slice(keys.start, keys.stop)
        return attend(
            q, k[:, :, keys], v[:, :, keys], positions=where, k_positions=k_positions, return_lse=True, **options
        )  # type: ignore[call-overload]

    return merge([over(keys) for keys in parts])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("where", WHERE)
def test_parts_make_the_whole(where: str, parts: str, window: int | None) -> None:
    """Windows and documents leave many queries without a key in some parts, padding in all."""
    encoding, tensors = ALiBi(HEADS, learned=True), drawn()
    options = {"encoding": encoding, "window": window}
    leaves = (*tensors, *encoding.parameters())
    whole = attend(*tensors, positions=WHERE[where], backend="eager", return_lse=True, **options)  # type: ignore[call-overload]
    joined = in_parts(*tensors, WHERE[where], PARTS[parts], **options)
    for found, expected in zip(joined, whole, strict=True):
        assert_close(found, expected)
    with_key = whole[1].isfinite()
    on_y, on_lse = torch.randn_like(whole[0]), torch.randn_like(whole[1])
    sums = [(y * on_y).sum() + (lse * on_lse)[with_key].sum() for y, lse in (joined, whole)]
    for found, expected in zip(*(torch.autograd.grad(each, leaves) for each in sums), strict=True):
        assert_close(found, expected)


def test_parts_of_parts_and_the_mean_in_numbers() -> None:
    """By hand: exp(0) = 1 and exp(log 3) = 3, so the second output weighs three times as much as the first."""
    one, three = torch.zeros(1, 1, 1), torch.full((1, 1, 1), 3.0).log()
    first, second = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[[5.0, 2.0]]]])
    y, lse = merge([(first, one), (second, three)])
    assert_close(y, torch.tensor([[[[4.0, 1.5]]]]))
    assert_close(lse, torch.tensor([[[4.0]]]).log())
    again, lse = merge([merge([(first, one)]), merge([(second, three)])])
    assert_close(again, y)


def test_one_part_has_the_sinks() -> None:
    q, k, v = drawn()
    sinks, where = torch.randn(HEADS, dtype=torch.float64), WHERE["packed"]
    whole = attend(q, k, v, positions=where, sinks=sinks, return_lse=True)
    first = attend(q, k[:, :, :4], v[:, :, :4], positions=where, k_positions=where.slice(0, 4), sinks=sinks,
                   return_lse=True)  # fmt: skip
    rest = attend(q, k[:, :, 4:], v[:, :, 4:], positions=where, k_positions=where.slice(4, 13), return_lse=True)
    for found, expected in zip(merge([first, rest]), whole, strict=True):
        assert_close(found, expected)


def test_scores_that_overflow_an_exponential() -> None:
    """float32 ends at exp(88)."""
    y = torch.ones(1, 1, 3, 2)
    far = torch.tensor([[[900.0, -900.0, 900.0]]]), torch.tensor([[[901.0, -900.0, -900.0]]])
    _, lse = merge([(y, far[0]), (y, far[1])])
    assert_close(lse, torch.logaddexp(*(each.double() for each in far)).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_outputs_stay_narrow(dtype: torch.dtype) -> None:
    q, k, v = (x.detach() for x in drawn(dtype))
    y, lse = in_parts(q, k, v, WHERE["causal"], PARTS["halves"])
    assert (y.dtype, lse.dtype) == (dtype, torch.float32)
    expected = attend(q.double(), k.double(), v.double(), positions=WHERE["causal"])
    assert_close(y, expected)


def test_derivatives_of_higher_order_and_where_no_part_has_a_key() -> None:
    outputs = [torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    logarithms = [torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def joined(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return merge([(tensors[0], tensors[2]), (tensors[1], tensors[3])])

    assert torch.autograd.gradcheck(joined, (*outputs, *logarithms))
    assert torch.autograd.gradgradcheck(joined, (*outputs, *logarithms))
    y, lse = joined(*(x * 0 for x in outputs), *(x.masked_fill(x.isfinite(), float("-inf")) for x in logarithms))
    assert bool((y == 0).all())
    assert bool((lse == float("-inf")).all())
    for gradient in torch.autograd.grad(y.sum() + lse.sum(), (*outputs, *logarithms)):
        assert bool(gradient.isfinite().all())


Y, LSE = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([], ("[]",)),
        (3, ("3 for parts",)),
        ([(Y,)], ("[1]", "log-sum-exp")),
        ([(Y, LSE, LSE)], ("[3]",)),
        ([(Y, None)], ("NoneType",)),
        ([(Y, LSE), (Y[:, :, :2], LSE)], ("(1, 2, 2, 4)", "(1, 2, 3, 4)")),
        ([(Y, LSE[..., None])], ("(1, 2, 3, 1)", "(1, 2, 3)")),
        ([(Y[0], LSE[0])], ("(2, 3, 4)", "batch")),
        ([(Y, LSE), (Y.double(), LSE)], ("float64", "float32")),
        ([(Y, LSE.to("meta"))], ("meta", "cpu")),
    ],
    ids=str,
)
def test_parts_that_do_not_belong_together(parts: object, words: tuple[str, ...]) -> None:
    with refuses(ShapeError, *words):
        merge(parts)  # type: ignore[arg-type]
