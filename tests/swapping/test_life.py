"""A swapped model does what it did before: with its own encoding in float32, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import locant
from locant.swapping.forward_arguments import cache_in
from tests.ranks import found_on, needs_gloo
from tests.swapping.compiled_and_sharded import SPREAD, found_by_two, losses_on_two
from tests.swapping.families import SAME, WORKS, WRITTEN, Family, tiny, worked
from tests.swapping.work import behind, compiled, ids, in_bfloat16, padded
from tests.tolerances import LOGITS

HEADS = 4
three = pytest.mark.parametrize("family", WRITTEN, ids=lambda family: family.model_type)
OFTEN = {
    *((WRITTEN[0], name) for name in WORKS),
    (SPREAD[1], "generation"), (SPREAD[2], "packed"), (SPREAD[3], "gradients"), (SPREAD[5], "LoRA"),
}  # fmt: skip
"""Those of the fast suite: every work, and every family."""

CANNOT = {("modernbert", "generation"), ("llama4_text", "LoRA")}
"""What a class cannot do without `swap` either."""

CASES = [
    pytest.param(family, name, id=f"{family.model_type}-{name}", marks=() if fast else pytest.mark.slow)
    for family in dict.fromkeys((*WRITTEN, *SPREAD))
    for name in WORKS
    for fast in [(family, name) in OFTEN]
    if (family.model_type, name) not in CANNOT
]


@pytest.mark.filterwarnings("ignore")  # those of other people's code
@pytest.mark.parametrize(("family", "name"), CASES)
def test_its_own_encoding_in_float32_changes_no_bit(family: Family, name: str) -> None:
    assert worked(tiny(family), WORKS[name]) == SAME


@three
def test_bfloat16_keeps_its_frequencies(family: Family) -> None:
    """`model.bfloat16()` rounds the frequencies of the module; those of a swapped model are of the configuration."""
    model = tiny(family)
    module = next(each for name, each in model.named_modules() if name.endswith("rotary_emb"))
    kept = module.inv_freq.clone()
    with locant.swap(model, angles="float32"):
        swapped = in_bfloat16(model)
    module.inv_freq = kept
    assert torch.equal(model(ids()).logits, swapped)


@pytest.mark.parametrize("encoding", [locant.Sinusoidal(64), locant.Learned(16, 64)], ids=["sinusoidal", "learned"])
def test_positions_in_embeddings_begin_behind_the_padding(encoding: Any) -> None:
    """Without position ids and with a cache: the row is what it is alone."""
    model = tiny(WRITTEN[0])
    tokens, mask, _ = padded()
    with locant.swap(model, encoding), torch.no_grad():
        alone = model(tokens[1:, 3:]).logits
        first = model(tokens[:, :8], attention_mask=mask[:, :8])
        rest = model(tokens[:, 8:], attention_mask=mask, **behind(model, cache_in(first)))
        found = torch.cat([first.logits, rest.logits], 1)[1:, 3:]
    assert (found - alone).abs().max() <= LOGITS


@pytest.mark.unchecked  # what is compiled is not run while shapes are checked
@pytest.mark.slow
@pytest.mark.parametrize("family", SPREAD, ids=lambda family: family.model_type)
def test_compiled_it_is_one_graph(family: Family) -> None:
    model = tiny(family)
    assert worked(model, compiled) == SAME
    with locant.swap(model):
        assert (compiled(model) - model(ids()).logits).abs().max() <= LOGITS


@pytest.mark.unchecked
@pytest.mark.slow
@three
def test_compiled_with_a_bias_it_is_one_graph(family: Family) -> None:
    model = tiny(family)
    with locant.swap(model, locant.Kerple(HEADS)):
        assert (compiled(model) - model(ids()).logits).abs().max() <= LOGITS


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21 calls it
def test_lora_trains_the_encoding_beside_its_adapters() -> None:
    import peft

    model = tiny(WRITTEN[0])
    locant.swap(model, locant.Kerple(HEADS))
    lora = peft.get_peft_model(model, peft.LoraConfig(r=2, modules_to_save=["locant"]))
    lora(ids(), labels=ids()).loss.backward()
    learned = {name: each.grad for name, each in lora.named_parameters() if "locant" in name and each.requires_grad}
    assert len(learned) == 2
    assert all(grad is not None and grad.abs().max() > 0 for grad in learned.values())


@needs_gloo
@pytest.mark.slow
def test_sharded_over_two_processes_no_bit_changes() -> None:
    """FSDP2: logits and gradients, beside those of the plain model sharded so."""
    found = found_on(2, found_by_two, [[family.model_type, family.cls] for family in SPREAD])
    assert found == [["same bits"] * len(SPREAD)] * 2


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", ["own", "kerple"])
def test_sharded_over_two_processes_it_is_the_same(name: str) -> None:
    """FSDP2: the loss and the gradients of two steps, sharded as on one process."""
    alone, (first, second) = losses_on_two(name, sharded=False), found_on(2, losses_on_two, name)
    assert first == second
    assert first == pytest.approx(alone, abs=LOGITS)
