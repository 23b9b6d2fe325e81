"""The values of `--with`: names that mean something else, and models whose layers have several rotary encodings."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from locant.errors import InputError, RangeError
from locant.lab.position_overrides import PositionOverride, swap_positions
from tests.gguf_files import random_model
from tests.refusal import refuses
from tests.tolerances import LOGITS

TRAINED = 128
IDS = torch.randint(3, 300, (1, 160), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "cause", "remedy"),
    [
        ("bert", "a model whose positions are learned", "with='learned'"),
        ("t5-small", "a model whose positions are t5", "with='t5'"),
        ("llama", "a model whose positions are rotary", "own, exact or yarn:4"),
        ("mrope", "rotary with several position axes", "own, exact or yarn:4"),
        ("positional_encoding", "a name of several", "with='sinusoidal'"),
        ("alibix", "expected 'own'", "with='alibi'"),
        ("yarnrotary", "expected 'own'", "with='yarn'"),
    ],
)
def test_a_name_of_something_else_is_refused_with_what_it_is(name: str, cause: str, remedy: str) -> None:
    with refuses(RangeError if name in ("alibix", "yarnrotary") else InputError, cause, remedy):
        PositionOverride.of(name)


def test_full_layers_alone_are_stretched_if_others_have_another_encoding() -> None:
    model: Any = random_model("gemma3")
    config = copy.deepcopy(model.config)
    config.rope_parameters["full_attention"] |= {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": TRAINED,
    }  # fmt: skip
    config.max_position_embeddings = 2 * TRAINED
    stretched: Any = AutoModelForCausalLM.from_config(config).eval()
    stretched.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected, own = stretched(IDS).logits, model(IDS).logits
        with swap_positions(model, PositionOverride.of("yarn:2").replacement(model, TRAINED, 2 * TRAINED)):
            assert float((model(IDS).logits - expected).abs().max()) < LOGITS
    assert float((own - expected).abs().max()) > 100 * LOGITS


def test_self_extend_changes_full_layers_alone() -> None:
    model: Any = random_model("gemma3")
    override = PositionOverride.of("self-extend:4")
    with swap_positions(model, override.replacement(model, TRAINED, 2 * TRAINED)) as swapped, torch.no_grad():
        assert ["SelfExtend" in sentence for sentence in swapped.sentences] == [False] * 5 + [True]
        assert torch.isfinite(model(IDS).logits).all()


def test_one_encoding_does_not_stand_for_several() -> None:
    with refuses(InputError, "2 rotary encodings"):
        PositionOverride.of("yarn:2").encoding(random_model("gemma3"), TRAINED, 2 * TRAINED)
