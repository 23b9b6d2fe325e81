"""`swap` in every causal and masked language model of `transformers`, and the page that tells of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import locant
from tests.checkpoints.swap.families import SAME, WORKS, Family, cells, families, outcome, tiny
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
def test_every_model_class_is_what_the_table_says() -> None:
    """One of the works of each class, in turn: ``python -m tests.checkpoints.swap.families`` does all of them."""
    text = PAGE.read_text(encoding="utf-8")
    if f"`transformers` {transformers.__version__} has" not in text:
        pytest.skip("the page was written with another release of transformers")
    table = [tuple(line[2:-2].split(" | ")) for line in text.splitlines() if line.startswith("| ")][1:]
    written = {row[:2]: (*row[: 3 + len(WORKS)], row[-1]) for row in table}
    found = dict[tuple[str, ...], tuple[str, ...]]()
    for n, family in enumerate(families()):
        work = n % len(WORKS)
        told = cells(family, outcome(family, [*WORKS][work : work + 1]))
        there = written[told[:2]]
        found[told[:2]] = tuple(cell if cell or k == 3 + work else there[k] for k, cell in enumerate(told))
    assert found == written
    assert sum(row[2] == SAME for row in written.values()) >= 120
    assert not [row for row in written.values() if "differs" in row]
