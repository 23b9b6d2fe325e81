"""The decoder is causal with every encoding, and knows them only by the three doors."""

from __future__ import annotations

import pytest
import torch

from locant import Positions, RangeError
from locant.lab import Decoder
from locant.positions import ModelShape
from locant.positions.registry import find
from tests.tolerances import DIFFERENT, assert_close

NAMES = ("nope", "learned", "sinusoidal", "rotary", "alibi", "t5")
VOCAB, LENGTH = 31, 13
SHAPE = ModelShape(d_model=24, num_heads=3, max_seq_len=64)


def decoder(name: str) -> Decoder:
    encoding = find(name).for_model(SHAPE)
    return Decoder(VOCAB, encoding, d_model=SHAPE.d_model, num_layers=2, num_heads=SHAPE.num_heads).eval()


@pytest.mark.parametrize("name", NAMES)
def test_no_token_sees_a_later_one(name):
    model = decoder(name)
    ids = torch.randint(VOCAB, (2, LENGTH))
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % VOCAB
    before, after = model(ids), model(changed)
    assert_close(after[:, :7], before[:, :7])
    assert not torch.allclose(after[:, 7:], before[:, 7:], atol=DIFFERENT)


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_are_as_if_alone(name):
    model = decoder(name)
    first, second = torch.randint(VOCAB, (1, 5)), torch.randint(VOCAB, (1, 8))
    together = model(torch.cat([first, second], dim=1), Positions.packed([5, 8]))
    assert_close(together, torch.cat([model(first), model(second)], dim=1))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "nope"])
def test_the_order_of_tokens_matters(name):
    """Even to the last token, whose own place is the same: without positions it sees a bag of tokens, in one layer."""
    encoding = find(name).for_model(SHAPE)
    model = Decoder(VOCAB, encoding, d_model=SHAPE.d_model, num_layers=1, num_heads=SHAPE.num_heads).eval()
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter)
    ids = torch.arange(LENGTH)[None]
    swapped = ids.clone()
    swapped[0, [2, 9]] = ids[0, [9, 2]]
    assert (model(ids)[0, -1] - model(swapped)[0, -1]).abs().max() > 1e-4


def test_without_positions_one_layer_sees_a_bag_of_tokens():
    model = Decoder(VOCAB, find("nope").for_model(SHAPE), d_model=24, num_layers=1, num_heads=3).eval()
    ids = torch.arange(LENGTH)[None]
    swapped = ids.clone()
    swapped[0, [2, 9]] = ids[0, [9, 2]]
    assert_close(model(ids)[0, -1], model(swapped)[0, -1])


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name):
    model = decoder(name).train()
    logits = model(torch.randint(VOCAB, (2, LENGTH)))
    (logits * torch.randn_like(logits)).sum().backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []


def test_a_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(RangeError, match="multiple"):
        Decoder(VOCAB, find("nope").for_model(SHAPE), d_model=25, num_layers=1, num_heads=3)
