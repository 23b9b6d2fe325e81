"""Models of `transformers`, measured with few of their logits at a time."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from torch import nn
from torch.nn import functional as F
from transformers import RobertaConfig, RobertaModel

from locant import InputError, Tokenizer
from locant.lab import language_model
from locant.lab.language_model import TransformersDecoder, fingerprint, require_positions, stated_length, trained_length
from tests.largest import Largest
from tests.refusal import refuses
from tests.swapping.families import Family, tiny
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
    monkeypatch.setattr(language_model, "MAX_LOGITS", 13 * 2003)
    with Largest() as largest:
        losses = TransformersDecoder(model, Tokenizer.bytes()).losses(ids, targets, None)
    assert largest.numbers == 2003 * 64, "nothing is larger than the table of tokens"
    assert (losses - expected).abs().max() <= LOGITS
    assert torch.equal(model(ids).logits, logits), "no hook is left"


@torch.no_grad()
def test_many_improbable_tokens_are_not_lost_beside_a_probable_one() -> None:
    """A float32 sum of 50 000 terms, one after another, drops those below half a unit in the last place."""
    vocab, low = 50_000, -17.0
    head = nn.Linear(1, vocab, bias=False)
    head.weight.fill_(low)[0] = 0.0
    model: Any = nn.Module()
    text_config = SimpleNamespace(vocab_size=vocab)
    model.device, model.config = torch.device("cpu"), SimpleNamespace(get_text_config=lambda: text_config)
    model.get_output_embeddings = lambda: head
    model.forward = lambda ids, use_cache: SimpleNamespace(logits=head(torch.ones(*ids.shape, 1)))
    ids = torch.zeros(1, 3, dtype=torch.long)
    losses = TransformersDecoder(model, Tokenizer.bytes()).losses(ids, ids, None)
    expected = math.log1p((vocab - 1) * math.exp(low))
    assert (losses - expected).abs().max() <= LOGITS


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_windows_begin_with_what_the_tokenizer_puts_before_a_text(length: int) -> None:
    """In the place of their first tokens: a window keeps its length, and no target is lost."""
    library = tokenizers.Tokenizer.from_str(Tokenizer.bytes().to_json())
    library.add_special_tokens(["<s>"])
    library.post_processor = TemplateProcessing("<|endoftext|> <s> $A", None, [("<|endoftext|>", 256), ("<s>", 257)])
    model = tiny(BEHIND[0], vocab_size=300)
    ids = torch.arange(2 * length).view(2, length)
    read = torch.cat([torch.tensor([[256, 257]] * 2)[:, :length], ids[:, 2:]], 1)
    expected, decoder = model(read).logits, TransformersDecoder(model, Tokenizer.from_json(library.to_str()))
    assert (decoder(ids, None) - expected).abs().max() <= LOGITS
    losses = F.cross_entropy(expected.transpose(1, 2), ids, reduction="none")
    assert (decoder.losses(ids, ids, None) - losses).abs().max() <= LOGITS


def test_a_fingerprint_is_of_what_the_files_hold(tmp_path: Path) -> None:
    """As the cache of a hub has them: links to files whose names say nothing, in two shards."""
    folder, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    folder.mkdir()
    blobs.mkdir()
    place = {"a": "one.safetensors", "b": "two.safetensors"}
    (blobs / "config").write_text("{}")
    for name, file in place.items():
        save_file({name: torch.zeros(3)}, blobs / file[:3])
        (folder / file).symlink_to(f"../blobs/{file[:3]}")
    (folder / "config.json").symlink_to("../blobs/config")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    seen = [fingerprint(folder)]
    save_file({"b": torch.ones(3)}, blobs / "two")
    seen.append(fingerprint(folder))
    (blobs / "config").write_text("[]")
    seen.append(fingerprint(folder))
    save_file({"unread": torch.ones(3)}, folder / "consolidated.safetensors")
    (folder / "README.md").write_text("What is not read has no part in it.")
    assert fingerprint(folder) == seen[-1]
    assert len({*seen}) == 3
    for name in ("one.safetensors", "two.safetensors", "config.json"):
        plain = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).write_bytes(plain)
    assert fingerprint(folder) == seen[-1], "files in the place of links to the same"


WITH_TABLES = [
    Family("gpt2", "GPT2LMHeadModel"),
    Family("opt", "OPTForCausalLM"),  # two rows before position 0
    Family("biogpt", "BioGptForCausalLM"),
    Family("bart", "BartForCausalLM"),
    Family("roberta", "RobertaForCausalLM"),  # positions begin after the row of padding
]


@torch.no_grad()
@pytest.mark.parametrize("family", WITH_TABLES, ids=lambda family: family.model_type)
def test_the_longest_window_is_the_longest_that_the_model_itself_reads(family: Family) -> None:
    model = tiny(family, is_decoder=True)

    def is_read(length: int) -> bool:
        try:
            model(torch.full((1, length), 5))
        except (IndexError, RuntimeError):
            return False
        return True

    longest = max(length for length in range(120, 140) if is_read(length))
    require_positions(model, longest)
    with refuses(InputError, f"{longest + 1} tokens", f"{longest} positions"):
        require_positions(model, longest + 1)


def test_the_stated_length_counts_only_positions() -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 9}
    config = RobertaConfig(**sizes, max_position_embeddings=14)
    length = stated_length(config)
    assert (length, trained_length(config)) == (12, 12)
    model = RobertaModel(config)
    model(torch.full((1, length), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, length + 1), 5))
