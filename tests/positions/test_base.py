"""The base class of all encodings does nothing to anything."""

from __future__ import annotations

import pytest
import torch

from locant import Learned, LocantError, PositionEncoding, Positions, Rotary, ShapeError, Sinusoidal, XPos
from locant.positions import ModelShape
from locant.positions.registry import encodings
from locant.scaling import Linear
from tests.refusal import refuses
from tests.tolerances import FORMULA

SHAPE = ModelShape(d_model=12, num_heads=3, max_seq_len=8)


def test_the_base_class_is_nope() -> None:
    encoding, positions = PositionEncoding(), Positions.packed([2, 3])
    x, q, k = torch.randn(1, 5, 7), torch.randn(1, 4, 5, 6), torch.randn(1, 2, 5, 6)
    assert encoding.embed(x, positions) is x
    assert all(ours is x for ours, x in zip(encoding.rotate(q, k, positions), (q, k), strict=True))
    assert encoding.bias(q, k, positions) is None
    assert encoding.score_mod(q, k, positions) is None
    assert not list(encoding.parameters())


WITH_BIAS = [name for name, kind in encodings().items() if "bias" in kind.methods()]


@pytest.mark.parametrize("name", WITH_BIAS)
def test_the_bias_of_some_keys_equals_the_bias_of_all_unless_it_needs_all_keys(name: str) -> None:
    """What parts of the keys are merged by, and a ring goes round with; the last of the keys are left out."""
    encoding, whole = encodings()[name].for_model(SHAPE), Positions.arange(8)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_()
    q, k = torch.randn(2, 1, 3, 8, 4)
    read = encoding.read(torch.randn(1, 8, 12), whole)
    of_all = encoding.bias(q, k, read)
    of_some = encoding.bias(q, k[:, :, :5], read, read.slice(0, 5))
    assert torch.equal(of_some, of_all[..., :5]) is not encoding.needs_all_keys


@pytest.mark.parametrize("encoding", [Learned(8, 12), Sinusoidal(12), PositionEncoding()])
def test_encodings_that_only_embed_can_be_called(encoding: PositionEncoding) -> None:
    x = torch.randn(2, 5, 12)
    assert torch.equal(encoding(x), encoding.embed(x, Positions.arange(5)))
    where = Positions.after(2, 5)
    assert torch.equal(encoding(x, where), encoding.embed(x, where))


@pytest.mark.parametrize("name", encodings())
def test_calling_other_encodings_raises_an_error_with_the_right_method(name: str) -> None:
    encoding = encodings()[name].for_model(SHAPE)
    elsewhere = [method for method in encoding.methods() if method != "embed"]
    if elsewhere:
        with refuses(LocantError, type(encoding).__name__, f"encoding.{elsewhere[0]}("):
            encoding(torch.randn(1, 3, 5, 4))
    else:
        assert encoding(torch.randn(1, 5, 12)).shape == (1, 5, 12)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotate_one_equals_rotate(layout: str) -> None:
    rotary = Rotary(8, layout=layout, rotary_dim=6)
    q, k, where = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8), Positions.after(7, 5)
    rotated_q, rotated_k = rotary.rotate(q, k, where)
    assert torch.equal(rotary.rotate_one(q, where), rotated_q)
    assert torch.equal(rotary.rotate_one(k, where), rotated_k)


def test_none_instead_of_a_tensor_suggests_rotate_one() -> None:
    q, where = torch.randn(1, 2, 5, 8), Positions.arange(5)
    for q_or_none, k_or_none in ((q, None), (None, q)):
        with refuses(ShapeError, "got None for", "rotate_one"):
            Rotary(8).rotate(q_or_none, k_or_none, where)
    with refuses(LocantError, "opposite ways", "rotate(q, k"):
        XPos(8).rotate_one(q, where)


def test_inverse_frequencies_are_numbers() -> None:
    assert Rotary(8).inv_freq.tolist() == [1.0, 0.1, 0.01, 0.001]
    halved = Rotary(8, scaling=Linear(factor=2.0)).inv_freq
    assert halved.dtype == torch.float64
    assert torch.equal(halved, Rotary(8).inv_freq / 2)


def test_inverse_frequencies_of_sinusoidal_are_the_same_numbers() -> None:
    assert Sinusoidal(8).inv_freq.tolist() == Rotary(8).inv_freq.tolist()
    expected = [16 ** (-2 * i / 7) for i in range(4)]
    assert Sinusoidal(7, base=16.0).inv_freq.tolist() == pytest.approx(expected, rel=FORMULA, abs=0)


@pytest.mark.parametrize("name", WITH_BIAS)
def test_a_bias_called_with_a_length_suggests_matrix(name: str) -> None:
    """``ALiBi(4)(6)`` is how one looks at other people's; one that depends on the tokens has no matrix."""
    has_one = encodings()[name].matrix is not PositionEncoding.matrix
    with refuses(LocantError, "called like a function", "try: encoding.matrix(6)" if has_one else "encoding."):
        encodings()[name].for_model(SHAPE)(6)  # type: ignore[arg-type]
