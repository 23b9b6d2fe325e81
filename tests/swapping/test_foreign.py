"""Encodings that a model was not built with, beside attention that is written out by hand with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PerceiverConfig, PerceiverForMaskedLM

import locant
from locant.errors import InputError, RangeError
from locant.models.config_values import attribute
from locant.positions import PoPE
from locant.swapping.rotary_point import rotary_points
from tests.refusal import refuses
from tests.swapping import reference
from tests.swapping.families import WRITTEN, Family, telling, tiny
from tests.swapping.work import ids, off
from tests.tolerances import DIFFERENT, LOGITS

HEADS, WIDTH = 4, 16
YARN = locant.scaling.YaRN(factor=4.0, original_max_seq_len=64)


def model_of(family: Family, **options: Any) -> Any:
    """GPT-NeoX, which rotates a part of each head, rotates the whole here."""
    whole = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}
    return telling(family, **(whole if family.model_type == "gpt_neox" else {}), **options)


ENCODINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], reference.Way]]] = {
    "nope": (locant.PositionEncoding, lambda held: reference.nope()),
    "alibi": (lambda: locant.ALiBi(HEADS), lambda held: reference.alibi(HEADS)),
    "xpos": (lambda: locant.XPos(WIDTH), lambda held: reference.xpos(WIDTH)),
    "kerple": (lambda: locant.Kerple(HEADS), lambda held: reference.kerple(held.r1.detach(), held.r2.detach())),
    "yarn": (lambda: locant.Rotary(WIDTH, scaling=YARN), lambda held: reference.yarn(WIDTH, 4.0, 64)),
}


three = pytest.mark.parametrize("family", WRITTEN, ids=lambda family: family.model_type)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_layers_that_keep_their_own_see_no_later_keys_whatever_function_is_named(attention: str) -> None:
    model, own = model_of(WRITTEN[0]), reference.rotary(WIDTH)
    model.set_attn_implementation(attention)
    expected = reference.logits(model, ids(), [own, reference.alibi(HEADS)])
    with locant.swap(model, layers={"every": 2, "encoding": locant.ALiBi(HEADS)}):
        assert off(model(ids()).logits, expected) <= LOGITS


def test_heads_may_be_those_of_keys_and_twice_as_wide() -> None:
    model = model_of(WRITTEN[0])
    expected = reference.logits(model, ids(), reference.pope(WIDTH))
    with locant.swap(model, PoPE(WIDTH, num_heads=2)):
        assert off(model(ids()).logits, expected) <= LOGITS
    with refuses(RangeError, "num_heads=2"):
        locant.swap(model, PoPE(WIDTH, num_heads=HEADS))
    with refuses(RangeError, "doubles the heads", "locant.lab.Decoder"):
        locant.swap(model, locant.positions.RoPEPlusPlus(locant.Rotary(WIDTH)))


@torch.no_grad()
def test_pairs_may_be_rotated_by_their_class() -> None:
    """Padded and behind a cache, see `test_places`."""
    model, encoding = model_of(WRITTEN[0]), locant.SelfExtend(locant.Rotary(WIDTH), group=3, neighbours=4)
    tokens = ids()[:1]
    expected = reference.logits(model, tokens, reference.self_extend(WIDTH, 3, 4))
    with locant.swap(model, encoding):
        assert off(model(tokens).logits, expected) <= LOGITS
    with refuses(RangeError, "layout='half'"):
        locant.swap(model, locant.ReRoPE(locant.Rotary(WIDTH, layout="interleaved")))


@three
@pytest.mark.parametrize("name", ENCODINGS)
def test_another_encoding_is_what_attention_written_by_hand_computes(family: Family, name: str) -> None:
    model = model_of(family)
    before = model(ids()).logits
    make, way = ENCODINGS[name]
    encoding = make()
    with locant.swap(model, encoding):
        actual = model(ids()).logits
    assert off(actual, reference.logits(model, ids(), way(encoding))) <= LOGITS
    assert off(actual, before) > DIFFERENT
    assert torch.equal(model(ids()).logits, before), "undo left something"


@three
def test_layers_may_differ(family: Family) -> None:
    """Every second layer without positions, and a function that gives three kinds."""
    model, own = model_of(family, num_hidden_layers=4), reference.rotary(WIDTH)
    nope, alibi = locant.PositionEncoding(), locant.ALiBi(HEADS)
    expected = reference.logits(model, ids(), [own, reference.nope()] * 2)
    with locant.swap(model, layers={"every": 2, "encoding": nope}) as swapped:
        assert off(model(ids()).logits, expected) <= LOGITS
    assert "no positions" in swapped.sentences[1]
    expected = reference.logits(model, ids(), [own, reference.nope(), reference.alibi(HEADS), own])
    with locant.swap(model, layers=lambda layer, kind: [None, nope, alibi, None][layer]) as swapped:
        assert off(model(ids()).logits, expected) <= LOGITS
    assert [len(swapped.sentences), *("layer" in each for each in swapped.sentences)] == [4, *[True] * 4]


def test_sizes_are_those_of_each_layer_and_an_unknown_configuration_is_refused_by_name() -> None:
    """Every second layer of this Gemma 4 has wider heads: from transformers 5.24 on there is no one `head_dim`."""
    gemma = tiny(Family("gemma4_text", "Gemma4ForCausalLM"))
    [point] = rotary_points(gemma, angles="float32")
    with locant.swap(gemma, layers=lambda layer, kind: locant.ALiBi(HEADS)) as swapped:
        assert "ALiBi" in swapped.sentences[0]
    expected = gemma(ids()).logits
    with locant.swap(gemma, layers=lambda layer, kind: point.own[kind]):
        assert off(gemma(ids()).logits, expected) <= LOGITS
    with refuses(RangeError, "head_dim"):
        locant.swap(gemma, locant.Rotary(7 * WIDTH))
    sizes: dict[str, Any] = {
        "vocab_size": 99, "d_model": 32, "d_latents": 32, "num_latents": 8, "max_position_embeddings": 16,
        "num_blocks": 1, "num_self_attends_per_block": 2, "num_self_attention_heads": 2,
        "num_cross_attention_heads": 2,
    }  # fmt: skip
    perceiver = PerceiverForMaskedLM(PerceiverConfig(**sizes))
    with refuses(InputError, "PerceiverConfig has no num_hidden_layers"):
        locant.swap(perceiver, locant.ALiBi(2))


def test_a_configuration_whose_layers_differ_is_asked_for_one_layer() -> None:
    config = tiny(Family("gemma4_text", "Gemma4ForCausalLM")).config
    if not hasattr(config, "is_heterogeneous"):
        pytest.skip("layers have configurations of their own from transformers 5.24 on")
    assert [attribute(config, "head_dim", layer) for layer in range(2)] == [
        each.head_dim for each in list(config.per_layer_config)[:2]
    ]
    assert attribute(config, "no_such_key", 0) is None
    with refuses(InputError, "Gemma4TextConfig, whose layers differ in head_dim"):
        attribute(config, "head_dim")
