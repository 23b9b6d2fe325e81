"""The decoder is causal with every encoding, and goes on with a text as if it read all of it anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from locant import KVCache, Positions, RangeError, ShapeError, Tokenizer
from locant.lab import Decoder, generate, load, save, train
from locant.positions import ModelShape
from locant.positions.registry import encodings, find
from tests.refusal import refuses
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


def test_outputs_are_unrotated_if_keys_are_values():
    encoding = find("rotary").for_model(SHAPE)
    sizes = {"d_model": SHAPE.d_model, "num_layers": 2, "num_heads": SHAPE.num_heads}
    model = Decoder(VOCAB, encoding, **sizes, keys_are_values=True).eval()
    assert model.blocks[0].qkv.weight.shape[0] == 2 * SHAPE.d_model
    ids = torch.randint(VOCAB, (2, LENGTH))
    expected = model(ids)
    assert_close(model(ids, Positions.after(500, LENGTH)), expected)  # by distances alone
    caches = [KVCache() for _ in model.blocks]
    with torch.no_grad():
        steps = [model(ids[:, i : i + 1], caches=caches) for i in range(LENGTH)]
    assert_close(torch.cat(steps, dim=1), expected)


@pytest.mark.parametrize("name", ["rotary", "alibi"])
def test_heads_of_queries_and_keys_are_normed(name, tmp_path):
    """Scaled queries and keys change nothing, as no other norm comes after the projection. A folder keeps the norm."""
    sizes = {"d_model": SHAPE.d_model, "num_layers": 2, "num_heads": SHAPE.num_heads}
    ids = torch.randint(VOCAB, (2, LENGTH))
    for qk_norm in (True, False):
        model = Decoder(VOCAB, find(name).for_model(SHAPE), **sizes, qk_norm=qk_norm).eval()
        before = model(ids)
        with torch.no_grad():
            model.blocks[0].qkv.weight[: 2 * SHAPE.d_model] *= 64
        if qk_norm:
            assert_close(model(ids), before)
        else:
            assert not torch.allclose(model(ids), before, atol=DIFFERENT)

    model = Decoder(VOCAB, find(name).for_model(SHAPE), **sizes, qk_norm=True).eval()
    for weight in (model.blocks[1].q_norm.weight, model.blocks[1].k_norm.weight):
        torch.nn.init.uniform_(weight)
    expected, caches = model(ids), [KVCache() for _ in model.blocks]
    with torch.no_grad():
        steps = [model(ids[:, i : i + 1], caches=caches) for i in range(LENGTH)]
    assert_close(torch.cat(steps, dim=1), expected)
    save(model, Tokenizer.words([" ".join(map(str, range(VOCAB)))]), tmp_path / "model")
    assert torch.equal(load(tmp_path / "model")[0](ids), expected)


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_equal_separate_ones(name):
    model = decoder(name)
    first, second = torch.randint(VOCAB, (1, 5)), torch.randint(VOCAB, (1, 8))
    together = model(torch.cat([first, second], dim=1), Positions.packed([5, 8]))
    assert_close(together, torch.cat([model(first), model(second)], dim=1))


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_tokens_matters(name):
    """Even to the last token, whose own place is the same: without positions it sees a bag of tokens, in one layer."""
    encoding = find(name).for_model(SHAPE)
    model = Decoder(VOCAB, encoding, d_model=SHAPE.d_model, num_layers=1, num_heads=SHAPE.num_heads).eval()
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter)
    ids = torch.arange(LENGTH)[None]
    swapped = ids.clone()
    swapped[0, [2, 9]] = ids[0, [9, 2]]
    before, after = model(ids)[0, -1], model(swapped)[0, -1]
    if name == "nope":
        assert_close(before, after)
    else:
        assert (before - after).abs().max() > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name):
    model = decoder(name).train()
    logits = model(torch.randint(VOCAB, (2, LENGTH)))
    (logits * torch.randn_like(logits)).sum().backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []


def test_a_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(RangeError, match="multiple"):
        Decoder(VOCAB, find("nope").for_model(SHAPE), d_model=25, num_layers=1, num_heads=3)


@pytest.mark.parametrize("name", [name for name in encodings() if name != "convolutional"])
@torch.no_grad()
def test_logits_with_and_without_a_cache_are_equal(name):
    """The prompt in two parts, then token by token."""
    model = decoder(name)
    for parameter in model.embedding.encoding.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ids, caches = torch.randint(VOCAB, (2, LENGTH)), [KVCache() for _ in model.blocks]
    parts = [model(part, caches=caches) for part in ids.split([5, 4, 1, 1, 1, 1], dim=1)]
    assert_close(torch.cat(parts, dim=1), model(ids))


@pytest.mark.parametrize("name", [*NAMES, "convolutional"])
def test_greedy_text_is_the_best_token_after_all_of_the_text_each_time(name):
    model, ids = decoder(name), torch.randint(VOCAB, (2, 4))
    expected = ids
    for _ in range(6):
        expected = torch.cat([expected, model(expected)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generate(model, ids, 6, temperature=0), expected)


def test_the_seed_decides_what_is_drawn_and_nothing_else_random_does():
    model, state = decoder("rotary").train(), torch.get_rng_state()
    first, again, other = (generate(model, [1, 2, 3], 40, seed=seed) for seed in (0, 0, 1))
    assert first.shape == (43,)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


def test_top_k_and_temperature_choose_among_which_tokens_is_drawn():
    model = decoder("alibi")
    best = generate(model, [5], 20, temperature=0)
    assert torch.equal(generate(model, [5], 20, top_k=1), best)
    assert torch.equal(generate(model, [5], 20, temperature=1e-4), best)
    prompts = torch.full((200, 1), 5)
    drawn = generate(model, prompts, 1, top_k=3, temperature=10.0)[:, -1]
    assert {*drawn.tolist()} == {*model(prompts[:1])[0, -1].topk(3).indices.tolist()}


def test_text_ends_where_learned_positions_do():
    model = decoder("learned")
    assert generate(model, [1] * 60, 4).shape == (64,)
    with refuses(RangeError, "60 + 5 tokens", "64"):
        generate(model, [1] * 60, 5)


@pytest.mark.parametrize(
    ("ids", "options"),
    [
        ([], {}),
        ([[[1]]], {}),
        ([1], {"num_tokens": 0}),
        ([1], {"temperature": -1.0}),
        ([1], {"top_k": 0}),
        ([1], {"top_k": VOCAB + 1}),
    ],
    ids=str,
)
def test_what_cannot_be_continued_is_refused(ids, options):
    with refuses(RangeError if options else ShapeError, *options):
        generate(decoder("nope"), torch.tensor(ids), **{"num_tokens": 1, **options})


@pytest.mark.parametrize("name", ["t5", "learned", "rotary"])
def test_a_folder_of_an_older_release_is_read_and_a_new_one_has_its_names(name: str, tmp_path: Path) -> None:
    """Names and order of parameters as they have been since 0.1: also the order in which gradients are clipped."""
    named = {"t5": ["embedding.encoding.weight"], "learned": ["embedding.encoding.weight"], "rotary": []}[name]
    model, tokenizer = train("to be, or not to be. " * 40, name, vocab_size=300, num_steps=1, d_model=24)
    parameters = [key for key, _ in model.named_parameters()]
    assert parameters[: 3 + len(named)] == [
        "embedding.token.weight", *named, "embedding.norm.weight", "embedding.norm.bias",
    ]  # fmt: skip
    save(model, tokenizer, tmp_path / "model")
    old = {key: torch.randn_like(weight) for key, weight in load_file(tmp_path / "model" / "model.safetensors").items()}
    assert [key for key in old if "encoding" in key] == named
    save_file(old, tmp_path / "model" / "model.safetensors")
    again, _ = load(tmp_path / "model")
    for key in named:
        assert torch.equal(again.encoding.weight, old[key])
    ids = torch.arange(9)[None]
    model.load_state_dict(old)
    assert torch.equal(again(ids), model.eval()(ids))
