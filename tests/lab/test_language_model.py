"""Models of `transformers`, measured with few of their logits at a time."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from locant.lab import language_model
from locant.lab.language_model import AsDecoder, Head
from tests.checkpoints.swap.families import Family, tiny
from tests.largest import Largest
from tests.tolerances import LOGITS

BEHIND = [
    Family("gemma2", "Gemma2ForCausalLM"),  # a soft cap
    Family("cohere", "CohereForCausalLM"),  # a scale
    Family("opt", "OPTForCausalLM"),  # a decoder inside of its model
]
"""What they do to logits."""


@torch.no_grad()
@pytest.mark.parametrize("family", BEHIND, ids=lambda family: family.model_type)
def test_losses_are_those_of_all_logits_and_few_of_these_are_held(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family, vocab_size=2003)
    if hasattr(model.config, "final_logit_softcapping"):
        model.config.final_logit_softcapping = 0.1
    ids = torch.arange(200).view(2, 100)
    targets = (ids + 7).masked_fill(ids % 5 == 0, -100)
    logits = model(ids).logits
    expected = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    monkeypatch.setattr(language_model, "HELD", 13 * 2003)
    with Largest() as largest:
        losses = AsDecoder(model).losses(ids, targets, None)
    assert largest.numbers == 2003 * 64, "nothing is larger than the table of tokens"
    assert (losses - expected).abs().max() <= LOGITS
    assert (Head(model).of_last(ids, 3) - logits[:, -3:]).abs().max() <= LOGITS
    assert torch.equal(model(ids).logits, logits), "no hook is left"
