"""`probe` looks behind a norm of each head, names what is wrong with it, and finds queries and keys in one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import locant
from locant import HeadNorm, InputError, KVCache, Positions, RangeError, Rotary
from locant.kernels.rotary import rotate_pairs
from locant.probing.report import RotationReport
from tests.refusal import refuses

WIDTH = 32
INV_FREQ = 10_000.0 ** -(torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
OF_Q, OF_K = torch.rand(2, WIDTH, generator=torch.Generator().manual_seed(0)) + 0.5

Both = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def turned(x: Tensor, positions: Tensor) -> Tensor:
    angle = positions[..., None].double() * INV_FREQ
    return rotate_pairs(x, angle.cos().float(), angle.sin().float(), "half")


def normed(x: Tensor, weight: Tensor | float, eps: float = 1e-6, over: Any = -1) -> Tensor:
    return x * torch.rsqrt(x.square().mean(over, keepdim=True) + eps) * weight


def right(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    return turned(normed(x, weight), positions)


def keys(of_k: Callable[[Tensor, Tensor], Tensor]) -> Both:
    return lambda q, k, positions: (right(q, positions, OF_Q), of_k(k, positions))


def probed(target: object, **options: object) -> RotationReport:
    report = locant.probe(target, **{"norm": (OF_Q, OF_K), **options})  # type: ignore[arg-type]
    assert isinstance(report, RotationReport)
    return report


def test_a_head_norm_describes_the_norm() -> None:
    """Of a function of others, and of our own norm and rotation through a cache."""
    norm, rotary = HeadNorm(OF_Q, OF_K, eps=1e-5, plus_one=True), Rotary(WIDTH)

    def others(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return turned(normed(q, 1 + OF_Q, 1e-5), positions), turned(normed(k, 1 + OF_K, 1e-5), positions)

    def ours(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return KVCache().rotate_and_append(rotary, q, k, k, Positions.of(positions), norm=norm)[:2]

    for function in (others, ours):
        report = probed(function, norm=norm, expected=rotary)
        assert report.warnings == ()
        assert "RMSNorm with eps 1e-05" in str(report)


def test_a_head_norm_has_its_own_eps_and_weights() -> None:
    norm = HeadNorm(OF_Q, OF_K)
    for options in ({"eps": 1e-5}, {"plus_one": True}):
        with refuses(RangeError, "together with a HeadNorm"):
            probed(right, norm=norm, **options)
    with refuses(RangeError, "expected weights"):
        probed(right, norm=HeadNorm(None, OF_K))


def test_a_right_norm_leaves_no_trace_of_itself() -> None:
    report = probed(keys(lambda k, positions: right(k, positions, OF_K)), expected=Rotary(WIDTH))
    assert report.warnings == ()
    assert repr(report.encoding) == repr(Rotary(WIDTH))
    assert "It norms each head of queries and keys before it rotates, as expected: RMSNorm with eps 1e-06" in str(
        report
    )
    one_side = probed(lambda x, positions: right(x, positions, 1 + OF_Q), norm=OF_Q, plus_one=True)
    assert one_side.warnings == ()
    equal = probed(lambda x, positions: normed(turned(x, positions), 1.0), norm=torch.ones(WIDTH))
    assert equal.warnings == ()
    assert "With equal weights the other order would be the same." in str(equal)


WRONG: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "order": (lambda k, positions: normed(turned(k, positions), OF_K), "it comes after the rotation"),
    "weights of queries": (
        lambda k, positions: right(k, positions, OF_Q), "the weights are those of the other side"),
    "no weights": (lambda k, positions: turned(normed(k, 1.0), positions), "the weights are left out"),
    "1 + the weights": (lambda k, positions: right(k, positions, 1 + OF_K), "1 + the weights are multiplied"),
    "weights of the other layout": (
        lambda k, positions: right(k, positions, OF_K.unflatten(0, (2, -1)).T.flatten()), "order of the other layout"),
    "no norm": (turned, "it is missing"),
    "weights alone": (lambda k, positions: turned(k * OF_K, positions), "heads are not divided by their size"),
    "no eps": (lambda k, positions: turned(normed(k, OF_K, 0.0), positions), "there is no eps"),
    "another eps": (lambda k, positions: turned(normed(k, OF_K, 1e-5), positions), "eps is 1e-05, not 1e-06"),
    "an unusual eps": (lambda k, positions: turned(normed(k, OF_K, 0.0123), positions), "eps is 0.0123, not 1e-06"),
    "another eps outside": (
        lambda k, positions: turned(k / (k.square().mean(-1, keepdim=True).sqrt() + 1e-3) * OF_K, positions),
        "not to the mean square, and it is 0.001, not 1e-06"),
    "eps outside": (
        lambda k, positions: turned(k / (k.square().mean(-1, keepdim=True).sqrt() + 1e-6) * OF_K, positions),
        "eps is added to the root of the mean square"),
    "all heads": (
        lambda k, positions: turned(normed(k, OF_K, over=(1, 3)), positions), "the mean is over all heads"),
    "a length": (
        lambda k, positions: turned(functional.normalize(k, dim=-1) * OF_K, positions),
        "heads are divided by their length"),
    "rounded": (
        lambda k, positions: turned(normed(k, OF_K).bfloat16().float(), positions),
        "heads are rounded to bfloat16 before the rotation"),
    "rounded between": (
        lambda k, positions: turned(normed(k, 1.0).half().float() * OF_K, positions),
        "heads are rounded to float16 before the weights are multiplied"),
    "two mistakes": (
        lambda k, positions: turned(normed(k, 1 + OF_Q, 1e-5), positions), "no known mistake explains that"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_norm_of_keys_is_named_and_no_more(mistake: str) -> None:
    of_k, named = WRONG[mistake]
    report = probed(keys(of_k), expected=Rotary(WIDTH))
    (warning, *others) = report.warnings
    assert warning.startswith("The norm of keys is wrong: ")
    assert named in warning
    assert not others or mistake == "two mistakes"
    assert "YaRN" not in str(report)  # which would explain the lengths that an unknown norm changes


def test_the_order_that_is_expected_may_be_the_other_one() -> None:
    def followed(x: Tensor, positions: Tensor) -> Tensor:
        return normed(turned(x, positions), OF_Q)

    assert probed(followed, norm=OF_Q, norm_follows=True).warnings == ()
    (warning,) = probed(lambda x, positions: right(x, positions, OF_Q), norm=OF_Q, norm_follows=True).warnings
    assert warning == "The norm of queries and of keys is wrong: it comes before the rotation."


def test_norms_of_both_sides_are_named_once_and_exchanged_ones_too() -> None:
    def exchanged(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return right(q, positions, OF_K), right(k, positions, OF_Q)

    (warning,) = probed(exchanged).warnings
    assert warning == "The norm of queries and of keys is wrong: the weights are those of the other side."


def test_a_wrong_rotation_is_named_behind_a_right_norm() -> None:
    reversed_keys = probed(keys(lambda k, positions: right(k, -positions, OF_K)))
    assert any("keys in the opposite direction" in warning for warning in reversed_keys.warnings)
    coarse = probed(lambda x, positions: right(x, positions.to(torch.bfloat16), OF_Q), norm=OF_Q)
    assert any("positions counted in bfloat16" in warning for warning in coarse.warnings)


def test_what_cannot_be_measured_is_refused() -> None:
    with refuses(InputError, "subtracts the mean", "LayerNorm"):
        probed(lambda x, positions: turned(functional.layer_norm(x, (WIDTH,), OF_Q, eps=1e-6), positions), norm=OF_Q)
    with refuses(RangeError, "weights of 0"):
        probed(turned, norm=torch.zeros(WIDTH))
    with refuses(RangeError, "the weights [head_dim] of queries and of keys"):
        probed(turned, norm=(OF_Q, 3))


HEADS = (4, 2, 2)


def fused(qkv: Tensor, positions: Tensor, heads: tuple[int, ...] = HEADS, norm: bool = True) -> None:
    """Rotate views of one tensor in place, as serving engines do."""
    q, k, _ = qkv.split([count * WIDTH for count in heads], -1)
    for part, weight in ((q, OF_Q), (k, OF_K)):
        view = part.unflatten(-1, (-1, WIDTH))
        x = normed(view, weight) if norm else view.clone()
        view.copy_(turned(x.transpose(0, 1)[None], positions[None])[0].transpose(0, 1))


def of_fused(target: Any, **options: Any) -> RotationReport:
    return probed(target, head_dim=WIDTH, qkv=HEADS, expected=Rotary(WIDTH), **options)


def test_queries_and_keys_in_one_tensor_are_found() -> None:
    report = of_fused(fused)
    assert report.called == "f(qkv, positions)"
    assert report.warnings == ()
    assert of_fused(lambda qkv, positions: fused(qkv, positions, norm=False), norm=None).warnings == ()

    def returned(positions: Tensor, qkv: Tensor) -> Tensor:
        fused(qkv, positions)
        return qkv

    assert of_fused(returned).warnings == ()


def test_a_wrong_head_or_changed_values_are_named() -> None:
    def second_head(qkv: Tensor, positions: Tensor) -> None:
        before = qkv.clone()
        fused(qkv, positions)
        fused(before, positions + 1)
        qkv[:, 2 * WIDTH : 3 * WIDTH] = before[:, 2 * WIDTH : 3 * WIDTH]

    assert any("Heads are rotated differently" in warning for warning in of_fused(second_head).warnings)
    with refuses(InputError, "changed the values, which follow queries and keys"):
        of_fused(lambda qkv, positions: fused(qkv, positions, heads=(4, 4, 0)), norm=None)


def test_a_kernel_that_is_chosen_for_many_tokens_or_trips_over_a_view_is_named() -> None:
    def crowded(x: Tensor, positions: Tensor) -> Tensor:
        return turned(x, positions + (x.shape[2] > 4096))

    def contiguous(x: Tensor, positions: Tensor) -> Tensor:
        whole = torch.as_strided(x, x.shape, torch.empty(x.shape).stride(), 0)
        return turned(whole, positions)

    def warned(target: Any) -> str:
        return " ".join(locant.probe(target, head_dim=WIDTH).warnings)

    assert "Some tokens are rotated differently among thousands" in warned(crowded)
    assert "a view of a larger tensor" in warned(contiguous)
    assert warned(turned) == ""
