"""Scalings that depend on the length: whatever the layers have, they are those of the longest row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import locant
from locant.errors import InputError
from tests.refusal import refuses
from tests.swapping.families import LLAMA, telling, tiny
from tests.swapping.work import ids, padded
from tests.tolerances import DIFFERENT, LOGITS

NTK = locant.scaling.DynamicNTK(factor=4.0, original_max_seq_len=6)
LONGROPE = locant.scaling.LongRoPE(
    short_factor=[1.0] * 8, long_factor=[float(each) for each in range(1, 9)], original_max_seq_len=6, factor=4.0
)
LENGTHS = {
    "ntk": locant.Rotary(16, scaling=NTK),
    "longrope": locant.Rotary(16, scaling=LONGROPE),
    "partial": locant.Rotary(16, rotary_dim=8, scaling=NTK),  # through the attention
}
each = pytest.mark.parametrize("name", LENGTHS)


def plans(rotary: locant.Rotary) -> list[dict[str, Any]]:
    """In every layer, in some, and in some beside another encoding."""
    return [
        {"encoding": rotary},
        {"layers": {"every": 2, "encoding": rotary}},
        {"encoding": locant.ALiBi(4), "layers": {"every": 2, "encoding": rotary}},
    ]


@each
@torch.no_grad()
def test_the_layers_that_have_it_have_that_of_the_length(name: str) -> None:
    model, rotary = telling(), LENGTHS[name]
    tokens, mask, position_ids = padded()
    options = {"attention_mask": mask, "position_ids": position_ids}
    for place, plan in enumerate(plans(rotary)):
        fixed = plans(rotary.for_length(12))[place]
        with locant.swap(model, **fixed):
            expected, in_batch = model(ids()).logits, model(tokens, **options).logits
            short = model(ids()[:, :6]).logits
        with locant.swap(model, **plan):
            assert (model(ids()).logits - expected).abs().max() <= LOGITS
            assert (model(tokens, **options).logits - in_batch)[mask.bool()].abs().max() <= LOGITS
            assert (model(ids()[:, :6]).logits - short).abs().max() > DIFFERENT, "within the trained length it is plain"


@pytest.mark.unchecked  # what is compiled is not run while shapes are checked
@pytest.mark.slow
@pytest.mark.parametrize("name", ["ntk", pytest.param("longrope", marks=pytest.mark.sweep), "partial"])
@torch.no_grad()
def test_compiled_it_is_not_left_unscaled(name: str) -> None:
    """In a graph nobody looked at the length, and the angles were those of short rows, without a word.

    Two scalings in the rotary module differ in their numbers alone: one is compiled, and the other in the sweep.
    """
    model, rotary = telling(), LENGTHS[name]
    with locant.swap(model, **plans(rotary.for_length(12))[1]):
        expected = model(ids()).logits
    with locant.swap(model, **plans(rotary)[1]):
        torch.compiler.reset()
        logits = torch.compile(model, backend="eager")(ids()).logits
    assert (logits - expected).abs().max() <= LOGITS


@torch.no_grad()
def test_a_length_that_was_said_stays() -> None:
    """Keys in a cache are right as long as the frequencies stay: a shorter row does not change them."""
    model, fixed = telling(), LENGTHS["ntk"].for_length(24)
    plain = locant.Rotary(16, scaling=locant.scaling.NTK(factor=4.0 * 24 / 6 - 3.0))
    assert torch.allclose(fixed.inv_freq, plain.inv_freq)
    with locant.swap(model, plain):
        expected = model(ids()).logits
    with locant.swap(model, fixed):
        assert (model(ids()).logits - expected).abs().max() <= LOGITS


def test_one_inside_of_another_encoding_is_to_say_its_length() -> None:
    model = tiny(LLAMA)
    with refuses(InputError, "SelfExtend", "depends on the length", "for_length"):
        locant.swap(model, locant.SelfExtend(LENGTHS["ntk"], 3, 4))
    locant.swap(model, locant.SelfExtend(LENGTHS["ntk"].for_length(12), 3, 4)).undo()
