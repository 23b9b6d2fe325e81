"""The score function and the table of distances are not inherited when a subclass overrides `bias`: backends are no
choice of what is computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from locant import ALiBi, LocantError, PositionEncoding, Positions, ShapeError, TransformerXL, attend
from locant.positions.base import ScoreMod, effective_score_bias, has_bias
from locant.positions.score_bias import ByDistance
from tests.refusal import refuses
from tests.tolerances import assert_close

HEADS, LENGTH, HEAD_DIM = 2, 9, 16


def tilt(q: Tensor, k: Tensor, positions: Positions, k_positions: Positions | None = None) -> Tensor:
    """Depends on the place of the key, not on the distance."""
    keys = positions if k_positions is None else k_positions
    return ALiBi(HEADS).bias(q, k, positions, k_positions) + keys.index[:, None, None] % 3


class Tilted(ALiBi):
    def bias(self, q: Tensor, k: Tensor, positions: Positions, k_positions: Positions | None = None) -> Tensor:
        return tilt(q, k, positions, k_positions)


class TiltedThrice(Tilted):
    """Overrides nothing."""


class TiltedAgain(Tilted):
    def score_mod(self, q: Tensor, k: Tensor, positions: Positions, k_positions: Positions | None = None) -> ScoreMod:
        keys, plain = positions if k_positions is None else k_positions, super().score_mod(q, k, positions, k_positions)
        index = keys.expand(q.shape[0]).index
        return lambda score, b, h, i, j: plain(score, b, h, i, j) + index[b, j] % 3


class SameBias(ALiBi):
    """A function of its own for the bias of another."""

    def score_mod(self, q: Tensor, k: Tensor, positions: Positions, k_positions: Positions | None = None) -> ScoreMod:
        return super().score_mod(q, k, positions, k_positions)


class FunctionAlone(PositionEncoding):
    def score_mod(self, *_: object) -> ScoreMod:
        return lambda score, b, h, i, j: score + j


class Silent(ALiBi):
    """Has both, and no function to give."""

    def bias(self, q: Tensor, k: Tensor, positions: Positions, k_positions: Positions | None = None) -> Tensor:
        return super().bias(q, k, positions, k_positions)

    def score_mod(self, *_: object) -> None:
        return None


def on_the_object() -> ALiBi:
    encoding = ALiBi(HEADS)
    encoding.bias = tilt  # type: ignore[method-assign]
    return encoding


class Thrice:
    """No encoding by itself."""

    def bias(self, q: Tensor, k: Tensor, positions: Positions, k_positions: Positions | None = None) -> Tensor:
        return 3 * super().bias(q, k, positions, k_positions)  # type: ignore[misc]


class Mixed(Thrice, ALiBi):
    """What is mixed in is written last."""


class Late(ALiBi):
    """Gets its bias when it is made already."""


Late.bias = lambda self, q, k, p, keys=None: 3 * ALiBi.bias(self, q, k, p, keys)  # type: ignore[method-assign]

TILTED: dict[str, Callable[[], PositionEncoding]] = {
    "a class": lambda: Tilted(HEADS),
    "a class below it": lambda: TiltedThrice(HEADS),
    "the object": on_the_object,
}
THRICE = {"a class mixed in": lambda: Mixed(HEADS), "a class that was there": lambda: Late(HEADS)}


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 1, HEADS, LENGTH, HEAD_DIM)
    return q, k, v


def with_tilt(q: Tensor, k: Tensor, v: Tensor, tilt: int = 1, times: int = 1) -> Tensor:
    """Attention from its definition; `times` the bias of ALiBi, and so often the tilt."""
    slopes = torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64)[:, None, None]
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    scores = q.double() @ k.double().mT * HEAD_DIM**-0.5 - times * slopes * (i - j).abs() + tilt * (j % 3)
    return scores.masked_fill(j > i, float("-inf")).softmax(-1) @ v.double()


@pytest.mark.parametrize("backend", ["auto", "sdpa", "tiled", "eager"])
@pytest.mark.parametrize("where", [*TILTED, *THRICE])
def test_every_backend_takes_the_bias_that_overrides(where: str, backend: str) -> None:
    q, k, v = drawn()
    y = attend(q, k, v, encoding=(TILTED | THRICE)[where](), positions=Positions.arange(LENGTH), backend=backend)
    expected = with_tilt(q, k, v, tilt=0, times=3) if where in THRICE else with_tilt(q, k, v)
    assert_close(y, expected, torch.float32)


def test_what_is_inherited_when_a_method_is_overridden() -> None:
    def said(encoding: PositionEncoding) -> tuple[bool, bool]:
        q, where = torch.zeros(1, HEADS, 3, HEAD_DIM), Positions.arange(3)
        bias = effective_score_bias(encoding, q, q, where, where)
        return bias.has_score_mod, isinstance(bias, ByDistance)

    assert said(ALiBi(HEADS)) == (True, True)
    assert said(Tilted(HEADS)) == (False, False)
    assert said(TiltedThrice(HEADS)) == (False, False)
    assert said(SameBias(HEADS)) == (True, False)
    assert said(TiltedAgain(HEADS)) == (True, False)
    assert said(on_the_object()) == (False, False)
    assert not has_bias(PositionEncoding())
    assert not has_bias(FunctionAlone())
    both = on_the_object()
    both.score_mod = lambda *_: None  # type: ignore[method-assign, misc, return-value]
    assert said(both) == (True, False)


def test_the_function_of_an_overridden_bias_is_not_the_one_above() -> None:
    q, k, _ = drawn()
    functions = [each.score_mod(q, k, Positions.arange(LENGTH)) for each in (Tilted(HEADS), on_the_object())]
    assert functions == [None, None]


@pytest.mark.unchecked
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_agrees_with_the_other_backends() -> None:
    q, k, v = drawn()
    where = Positions.arange(LENGTH)
    y = attend(q, k, v, encoding=TiltedAgain(HEADS), positions=where, backend="flex")
    assert_close(y, with_tilt(q, k, v), torch.float32)
    plain = attend(q, k, v, positions=where, backend="eager")
    assert_close(attend(q, k, v, encoding=FunctionAlone(), positions=where, backend="flex"), plain)
    with refuses(LocantError, "Silent", "no score_mod", "tiled"):
        attend(q, k, v, encoding=Silent(HEADS), positions=where, backend="flex")


def test_one_of_the_two_is_written() -> None:
    with refuses(LocantError, "Both", "score_bias and bias", "define one"):
        type("Both", (ALiBi,), {"bias": ALiBi.bias, "score_bias": ALiBi.score_bias})


def test_a_matrix_of_other_heads_is_named() -> None:
    class OfFour(PositionEncoding):
        def bias(self, q: Tensor, *rest: object) -> Tensor:
            return q.new_zeros(1, 4, q.shape[2], q.shape[2])

    q, k, v = drawn()
    with refuses(ShapeError, "a bias of 4 heads", "queries of 2", "gather"):
        attend(q, k, v, encoding=OfFour(), positions=Positions.arange(LENGTH))


class OwnBias(PositionEncoding):
    def score_bias(self, q: Tensor, k: Tensor, queries: Positions, keys: Positions, heads: object = None) -> None:
        self.bias(q, k, queries, keys)


class BiasAbove(ALiBi):
    def score_bias(self, q: Tensor, k: Tensor, queries: Positions, keys: Positions, heads: object = None) -> Tensor:
        return super().bias(q, k, queries, keys)  # type: ignore[return-value]


class OwnScoreBias(PositionEncoding):
    def bias(self, q: Tensor, k: Tensor, positions: Positions, k_positions: Positions | None = None) -> Tensor:
        return self.score_bias(q, k, positions, positions).dense()  # type: ignore[union-attr, return-value]


class OwnScoreMod(ALiBi):
    def score_bias(self, q: Tensor, k: Tensor, queries: Positions, keys: Positions, heads: object = None) -> None:
        self.score_mod(q, k, queries, keys)


@pytest.mark.parametrize(
    ("encoding", "method", "called"),
    [
        (OwnBias(), "score_bias", "bias"), (BiasAbove(HEADS), "score_bias", "bias"),
        (OwnScoreBias(), "bias", "score_bias"), (OwnScoreMod(HEADS), "score_bias", "score_mod"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, PositionEncoding) else each,
)  # fmt: skip
def test_a_bias_that_follows_from_itself_is_refused(encoding: PositionEncoding, method: str, called: str) -> None:
    q, k, v = drawn()
    with refuses(LocantError, f"whose {method} calls its own {called}", f"call super().{method}(...)"):
        attend(q, k, v, encoding=encoding, positions=Positions.arange(LENGTH))


class SameAbove(ALiBi):
    def score_bias(self, q: Tensor, k: Tensor, queries: Positions, keys: Positions, heads: object = None) -> ByDistance:
        return super().score_bias(q, k, queries, keys)


class OfNothing(PositionEncoding):
    def score_bias(self, q: Tensor, k: Tensor, queries: Positions, keys: Positions, heads: object = None) -> None:
        return super().score_bias(q, k, queries, keys)  # type: ignore[return-value]


class Doubled(TransformerXL):
    """Its parent computes a matrix, too."""

    def bias(self, q: Tensor, k: Tensor, positions: Positions, k_positions: Positions | None = None) -> Tensor:
        return 2 * super().bias(q, k, positions, k_positions)  # type: ignore[operator]


def test_a_bias_that_is_twice_a_matrix_reaches_attention() -> None:
    q, k, v = drawn()
    where, encoding = Positions.arange(LENGTH), Doubled(d_model=HEADS * HEAD_DIM, num_heads=HEADS)
    bias = TransformerXL.score_bias(encoding, q, k, where, where).dense()
    scores = (q @ k.mT * HEAD_DIM**-0.5 + 2 * bias).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    assert_close(attend(q, k, v, encoding=encoding, positions=where), scores.softmax(-1) @ v, torch.float32)


def test_an_override_gets_the_bias_of_its_parent() -> None:
    q, k, v = drawn()
    for encoding, times in ((SameAbove(HEADS), 1), (OfNothing(), 0)):
        y = attend(q, k, v, encoding=encoding, positions=Positions.arange(LENGTH))
        assert_close(y, with_tilt(q, k, v, tilt=0, times=times), torch.float32)
