"""Text from modules that know nothing of locant: small models as tutorials write them, in plain torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from locant import RangeError, ShapeError
from locant.lab import Decoder, generate
from locant.positions import ModelShape
from locant.positions.registry import find
from tests.refusal import refuses

VOCAB, LONGEST, WIDTH = 23, 8, 12


class GPT(nn.Module):
    """One block with learned positions, which returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCAB)
        self.drop = nn.Dropout(0.5)

    def forward(self, ids: Tensor) -> Any:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        q, k, v = self.qkv(x).split(WIDTH, -1)
        return self.head(self.drop(x + F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class Nano(GPT):
    """Returns logits of the last token and a loss, and states its length in a configuration."""

    config = SimpleNamespace(block_size=LONGEST)

    def forward(self, ids: Tensor) -> Any:
        assert ids.shape[1] <= LONGEST, "too long"
        return super().forward(ids)[:, [-1]], None


class FromScratch(GPT):
    """States its length in a dictionary, and returns one."""

    cfg = {"context_length": LONGEST}  # noqa: RUF012

    def forward(self, ids: Tensor) -> Any:
        return {"logits": super().forward(ids)}


def expected(model: GPT, ids: Tensor, count: int) -> Tensor:
    """As tutorials do it: the last tokens that fit, again for each new one."""
    for _ in range(count):
        ids = torch.cat([ids, GPT.forward(model, ids[:, -LONGEST:])[:, -1].argmax(-1, keepdim=True)], 1)
    return ids


@pytest.mark.parametrize(("kind", "given"), [(GPT, LONGEST), (Nano, None), (FromScratch, None)])
def test_a_model_of_a_tutorial_goes_on_as_its_own_loop_does(kind: type[GPT], given: int | None) -> None:
    model, ids = kind().eval(), torch.randint(VOCAB, (2, 5))
    want = expected(model, ids, 20)
    assert torch.equal(generate(model, ids, 20, temperature=0, max_seq_len=given), want)
    assert torch.equal(generate(model, ids[0].tolist(), 20, temperature=0, max_seq_len=given), want[0])
    assert torch.equal(generate(lambda rows: model(rows), ids, 20, temperature=0, max_seq_len=LONGEST), want)


def test_the_modes_of_all_parts_stay_and_the_seed_decides() -> None:
    model = Nano().train()
    model.wte.eval()
    first, again, other = (generate(model, [1, 2], 30, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert model.training
    assert model.drop.training
    assert not model.wte.training


def test_a_model_of_transformers_goes_on_as_its_own_generate_does() -> None:
    sizes: Any = {"n_positions": 32, "n_embd": 12, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": None}
    model, ids = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, **sizes)).eval(), torch.randint(1, VOCAB, (2, 5))
    want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(generate(model, ids, 12, temperature=0), want)


def test_a_decoder_reads_the_last_tokens_if_a_length_is_given() -> None:
    encoding = find("learned").for_model(ModelShape(d_model=24, num_heads=3, max_seq_len=LONGEST))
    model, ids = Decoder(VOCAB, encoding, d_model=24, num_layers=1, num_heads=3).eval(), torch.randint(VOCAB, (1, 5))
    want = ids
    for _ in range(9):
        want = torch.cat([want, model(want[:, -LONGEST:])[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(generate(model, ids, 9, temperature=0, max_seq_len=LONGEST), want)


def test_tokens_that_do_not_fit_name_the_length_that_does() -> None:
    with refuses(RangeError, "got 9 tokens", "IndexError", "max_seq_len=8"):
        generate(GPT(), [1, 2], 20)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda ids: torch.zeros(2, VOCAB), ("a tensor of shape (2, 23)", "(2, 3, vocab_size)")),
        (lambda ids: torch.zeros(6, 1, VOCAB), ("a tensor of shape (6, 1, 23)",)),
        (lambda ids: torch.zeros(2, 2, VOCAB), ("a tensor of shape (2, 2, 23)",)),
        (lambda ids: torch.zeros(2, 3, VOCAB, dtype=torch.long), ("of int64",)),
        (lambda ids: (torch.zeros(()), torch.zeros(2, 3, VOCAB)), ("a tuple of (a tensor of shape ()",)),
        (lambda ids: {"loss": 0.0}, ("a dict of loss",)),
        (lambda ids: None, ("a NoneType",)),
        (lambda ids: (), ("a tuple of ()",)),
    ],
)
def test_what_a_model_returned_instead_of_logits_is_stated(returned: Any, words: tuple[str, ...]) -> None:
    with refuses(ShapeError, "from the model", *words):
        generate(returned, torch.ones(2, 3, dtype=torch.long), 1)


def test_what_cannot_be_drawn_from_is_refused() -> None:
    wrong = {torch.nan: "NaN of the logits", torch.inf: "inf as the", -torch.inf: "-inf as the largest"}
    for number, words in wrong.items():
        with refuses(RangeError, words):
            generate(lambda ids, number=number: torch.full((1, 2, VOCAB), number), [1, 2], 1)
    with refuses(ShapeError, "ids of dtype float32, expected integers"):
        generate(GPT(), [1.5], 1)  # type: ignore[list-item]
    with refuses(RangeError, "top_k", "23"):
        generate(GPT(), [1, 2], 1, top_k=VOCAB + 1)
    with refuses(RangeError, "max_seq_len"):
        generate(GPT(), [1, 2], 1, max_seq_len=0)
    with refuses(RangeError, "for model"):
        generate("a/folder", [1, 2], 1)  # type: ignore[arg-type]
