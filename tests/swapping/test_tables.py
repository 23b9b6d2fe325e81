"""A table of learned positions is taken out: there is no last position, and `undo` and files have every row."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import locant
from locant.checkpoints import load_swapped
from locant.errors import InputError
from tests.refusal import refuses
from tests.swapping.families import Family, tiny
from tests.swapping.work import ids
from tests.tolerances import DIFFERENT, LOGITS

GPT2, OPT = Family("gpt2", "GPT2LMHeadModel"), Family("opt", "OPTForCausalLM")
TABLES = {"gpt2": "transformer.wpe", "opt": "model.decoder.embed_positions"}
LONGEST = 8
both = pytest.mark.parametrize("family", [GPT2, OPT], ids=lambda family: family.model_type)


def model_of(family: Family) -> Any:
    """With a table of eight positions, fewer than the tokens of `ids`."""
    model = tiny(family, max_position_embeddings=LONGEST, num_hidden_layers=2).double()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def without(model: Any) -> Any:
    """The same model with a longer table of zeros: by its own code, no positions."""
    plain = copy.deepcopy(model)
    table = plain.get_submodule(TABLES[model.config.model_type])
    table.weight = torch.nn.Parameter(table.weight.new_zeros(64, table.weight.shape[1]))
    return plain


ALIBI, ROTARY, SINUSOIDAL = locant.ALiBi(4), locant.Rotary(16), locant.Sinusoidal(64)


@pytest.mark.parametrize(
    ("family", "encoding"),
    [(GPT2, ALIBI), (GPT2, ROTARY), (OPT, ROTARY), (OPT, SINUSOIDAL)],
    ids=["gpt2-bias", "gpt2-rotation", "opt-rotation", "opt-embedding"],
)
@torch.no_grad()
def test_rows_are_longer_than_the_table_was(family: Family, encoding: Any) -> None:
    model = model_of(family)
    short = model(ids()[:, :LONGEST]).logits
    with locant.swap(model, encoding):
        logits = model(ids()).logits
        padded = torch.cat([ids()[:, :4], ids()], 1)
        mask = torch.cat([torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 12, dtype=torch.int64)], 1)
        places = (mask.cumsum(1) - 1).clamp(min=0)
        behind = model(padded, attention_mask=mask, position_ids=places).logits[:, 4:]
        assert (behind - logits).abs().max() <= LOGITS
        options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        cached, whole = (model.generate(ids(), use_cache=use, **options) for use in (True, False))
        assert torch.equal(cached, whole)
        assert cached.shape == (2, 15)
    assert torch.equal(model(ids()[:, :LONGEST]).logits, short), "undo left something"
    assert (logits - without(model)(ids()).logits).abs().max() > DIFFERENT, "the encoding does nothing"


@both
@torch.no_grad()
def test_nothing_is_left_of_its_positions_and_nothing_else_is_lost(family: Family) -> None:
    model = model_of(family)
    with locant.swap(model, locant.PositionEncoding()) as handle:
        assert "table of positions removed" in handle.sentences[0]
        assert (model(ids()).logits - without(model)(ids()).logits).abs().max() <= LOGITS
        assert not any(TABLES[family.model_type] in name for name, _ in model.named_parameters()), "it is trained"


@both
def test_undo_puts_back_the_table_where_the_model_has_gone(family: Family) -> None:
    model, path = model_of(family), TABLES[family.model_type]
    before, table = model.state_dict(), model.get_submodule(path)
    kept = {name: each.clone() for name, each in before.items()}
    handle = locant.swap(model, locant.ALiBi(4))
    assert [*model.state_dict()] == [*kept]
    handle.undo()
    assert model.get_submodule(path) is table
    assert all(torch.equal(each, kept[name]) for name, each in model.state_dict().items())
    handle = locant.swap(model, locant.ALiBi(4))
    model.float()
    model.load_state_dict({name: each + 1 for name, each in model.state_dict().items()})
    handle.undo()
    assert torch.equal(table.weight, kept[f"{path}.weight"].float() + 1)
    assert table.weight.requires_grad


@both
@torch.no_grad()
def test_it_is_saved_with_its_table_and_loaded(family: Family, tmp_path: Path) -> None:
    model, path = model_of(family), TABLES[family.model_type]
    rows = model.get_parameter(f"{path}.weight").clone()
    locant.swap(model, locant.Kerple(4))
    model.save_pretrained(tmp_path)
    again = load_swapped(tmp_path, dtype=torch.float64)
    assert (again(ids()).logits - model(ids()).logits).abs().max() <= LOGITS
    assert torch.equal(again.state_dict()[f"{path}.weight"], rows)


@torch.no_grad()
def test_opt_gets_what_is_added_to_its_embeddings() -> None:
    """Its classes call the decoder inside of the model, so that hooks around that model heard nothing."""
    model = tiny(OPT)
    table = model.model.decoder.embed_positions
    rows = locant.Sinusoidal(64).embed(torch.zeros(1, 12, 64), locant.Positions.arange(12))[0]
    learned = copy.deepcopy(model)
    learned.model.decoder.embed_positions.weight[table.offset : 12 + table.offset] = rows
    with locant.swap(model, locant.Sinusoidal(64)):
        assert (model(ids()).logits - learned(ids()).logits).abs().max() <= LOGITS


def test_a_table_that_is_not_added_is_not_taken_for_one() -> None:
    """RoFormer rotates by its table: zeros in its place left neither queries nor keys."""
    with refuses(InputError, "RoFormerForCausalLM", "positions of an unknown kind"):
        locant.swap(tiny(Family("roformer", "RoFormerForCausalLM")), locant.PositionEncoding())
