"""`swap` in every causal and masked language model of `transformers`, and the page that tells of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import locant
from tests.checkpoints.swap.families import Family, families, outcome, page, tiny
from tests.checkpoints.swap.work import ids
from tests.tolerances import LOGITS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "swapped-models.md"
SAMPLED = [
    Family("gemma3_text", "Gemma3ForCausalLM"),  # rope parameters for each type of layers
    Family("gpt_neox", "GPTNeoXForCausalLM"),  # a part of each head
    Family("llama4_text", "Llama4ForCausalLM"),  # complex numbers
    Family("modernbert", "ModernBertForMaskedLM"),  # both directions
]


@pytest.mark.parametrize("family", SAMPLED, ids=lambda family: family.model_type)
def test_its_own_encoding_in_float32_gives_the_same_bits_and_exact_angles_nearly(family: Family) -> None:
    assert outcome(family).verdict == "same bits"
    model = tiny(family)
    before = model(ids()).logits
    with locant.swap(model):
        assert 0 < (model(ids()).logits - before).abs().max() <= LOGITS
    assert torch.equal(model(ids()).logits, before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of other people's code
def test_every_model_class_is_in_the_table() -> None:
    """``python -m tests.checkpoints.swap.families`` writes the page anew."""
    if f"`transformers` {transformers.__version__} has" not in PAGE.read_text(encoding="utf-8"):
        pytest.skip("the page was written with another release of transformers")
    outcomes = {family: outcome(family) for family in families()}
    assert PAGE.read_text(encoding="utf-8") == page(outcomes)
    assert sum(told.verdict == "same bits" for told in outcomes.values()) >= 120
    assert not [family.id for family, told in outcomes.items() if told.verdict == "differs"]
