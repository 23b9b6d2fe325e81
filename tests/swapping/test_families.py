"""`swap` in every causal and masked language model of `transformers`, and the page that tells of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import transformers

import locant
from locant.errors import InputError
from locant.lab.position_overrides import PositionOverride
from locant.swapping.rotary_point import rotary_points
from tests.refusal import refuses
from tests.swapping.families import (
    BESIDE_16,
    LLAMA,
    SAME,
    SCALINGS,
    SHORT,
    WORKS,
    Family,
    cells,
    differences,
    families,
    one_of_each,
    outcome,
    scaled,
    tiny,
)
from tests.swapping.work import ids
from tests.tolerances import LOGITS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "swapped-models.md"
SAMPLED = [
    Family("gemma3_text", "Gemma3ForCausalLM"),  # rope parameters for each type of layers
    Family("gpt_neox", "GPTNeoXForCausalLM"),  # a part of each head
    Family("gptj", "GPTJForCausalLM"),  # sines before cosines, of a table
    Family("llama4_text", "Llama4ForCausalLM"),  # complex numbers
    Family("modernbert", "ModernBertForMaskedLM"),  # both directions
]


@pytest.mark.parametrize("family", SAMPLED, ids=lambda family: family.model_type)
def test_its_own_encoding_in_float32_gives_the_same_bits_and_exact_angles_nearly(family: Family) -> None:
    assert outcome(family, works=()).verdict == "same bits"
    model = tiny(family)
    before = model(ids()).logits
    with locant.swap(model):
        assert 0 < (model(ids()).logits - before).abs().max() <= LOGITS
    assert torch.equal(model(ids()).logits, before)


PHIMOE = Family("phimoe", "PhimoeForCausalLM")
BY_LENGTH = [(PHIMOE, "longrope"), (Family("phi3", "Phi3ForCausalLM"), "longrope"), (LLAMA, "dynamic")]


@pytest.mark.parametrize(("family", "scaling"), BY_LENGTH, ids=lambda each: getattr(each, "model_type", each))
def test_its_own_encoding_gives_the_same_bits_on_both_sides_of_every_length_that_it_names(
    family: Family, scaling: str
) -> None:
    assert not differences(scaled(tiny(family), scaling), BESIDE_16)


def test_a_module_that_computes_otherwise_from_some_length_on_is_refused_with_that_length() -> None:
    model = scaled(tiny(LLAMA), "dynamic")
    forward = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: forward(x, position_ids % 24)
    with refuses(InputError, "LlamaRotaryEmbedding", "at a length of 32", "swap(model, encoding)"):
        locant.swap(model)
    with refuses(InputError, "at a length of 32"):
        PositionOverride.of("yarn:4").encoding(model, 16, 16)
    another = locant.Rotary(16, base=500.0)
    tokens = ids().repeat(1, 40 // ids().shape[1] + 1)
    with locant.swap(model, another) as swapped:
        assert "in place of" in swapped.sentences[0]
        actual = model(tokens).logits
    del model.model.rotary_emb.forward
    with locant.swap(model, another):
        assert torch.equal(actual, model(tokens).logits)


SWEEP = [pytest.mark.slow, pytest.mark.sweep]
some_and_all = pytest.mark.parametrize(
    "classes", [pytest.param(one_of_each, marks=pytest.mark.slow), pytest.param(families, marks=SWEEP)]
)


@some_and_all
@pytest.mark.filterwarnings("ignore")
def test_every_model_class_keeps_its_bits_under_every_scaling(classes: Callable[[], list[Family]]) -> None:
    """If `transformers` can build and run it so, and locant reads that configuration.

    One of each code has two of the scalings, in turn. The sweep has all scalings of all classes.
    """
    found: dict[str, dict[str, dict[int, float]]] = {scaling: {} for scaling in SCALINGS}
    every = itertools.cycle(SCALINGS)
    for family in classes():
        with suppress(Exception):  # no rotary positions
            model = tiny(family)
            rotary_points(model, angles="float32")
            for scaling in SCALINGS if classes is families else itertools.islice(every, 2):
                with suppress(Exception):  # a class that knows no such scaling
                    found[scaling][family.id] = differences(scaled(model, scaling), BESIDE_16)
    assert not {name: each for of_families in found.values() for name, each in of_families.items() if each}
    assert min(map(len, found.values())) >= (100 if classes is families else 15)


@some_and_all
@pytest.mark.filterwarnings("ignore")  # those of other people's code
def test_every_model_class_is_what_the_table_says(classes: Callable[[], list[Family]]) -> None:
    """One of the works of each class, in turn: ``python -m tests.swapping.families`` does all of them."""
    text = PAGE.read_text(encoding="utf-8")
    if f"`transformers` {transformers.__version__} for" not in text:
        pytest.skip("the page was written with another release of transformers")
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| configuration |")]
    rows = [tuple(SAME if cell == SHORT else cell for cell in line[2:-2].split(" | ")) for line in lines]
    written = {row[:2]: row for row in rows}
    chosen, found = classes(), dict[tuple[str, ...], tuple[str, ...]]()
    for n, family in enumerate(families()):
        if family not in chosen:
            continue
        work = n % len(WORKS)
        told = outcome(family, [*WORKS][work : work + 1])
        row, there = cells(family, told), written[family.model_type, family.cls]
        row = (*row[:3], told.why) if told.why else row
        found[row[:2]] = tuple(cell if cell or k == 3 + work else there[k] for k, cell in enumerate(row))
    assert found == {names: written[names][: len(row)] for names, row in found.items()}
    assert {*written} == {(family.model_type, family.cls) for family in families()}
    assert sum(row[2] == SAME for row in written.values()) >= 120
    assert not [row for row in written.values() if "differs" in row]
