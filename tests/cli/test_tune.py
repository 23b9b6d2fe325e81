"""`locant tune`, as it is typed, and the folders that neither it nor `locant evaluate` reads."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from locant.models.config_values import TRAINED
from tests.cli.conftest import Complains, Run

ASKED = ("text.txt", "--steps", 2, "--batch", 2)


@pytest.mark.slow
def test_it_says_what_it_did_and_evaluate_reads_what_it_wrote(
    run: Run, succeeds: Run, folder: Path, model: Path
) -> None:
    done = succeeds("tune model --with yarn:2", *ASKED)
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["training", "2", "steps", "of", "2", "x", "64", "tokens"]
    assert "AutoModelForCausalLM.from_pretrained('model-yarn-2')" in lines[-1]
    done = run("tune model --with drope", *ASKED, "-o", "dropped", "--json")
    assert json.loads(done.stdout)["swapped"] is True
    evaluated = ("--lengths", "16,32", "--keys", 0, "-o", "out", "--json")
    succeeds("evaluate model-yarn-2 text.txt --with own,exact", *evaluated)
    records = json.loads(run("evaluate dropped text.txt --with own", *evaluated).stdout)["records"]
    assert [record["encoding"] for record in records] == ["own"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--with exact", "--with own"),
        ("--with yarn", "yarn:4"),
        ("--with yarn:1", "does not stretch the model"),
        ("--with yarn:0.5", "at least 1"),
        ("--with alibi:4", "takes no number"),
        ("--with albi", "--with alibi"),
        ("--with self-extend", "--with own"),
        ("--with drope --train new", "--train all"),
        ("--with own --adapter", "--train lora"),
        ("--with own --minutes 1 --steps 1", "--minutes alone"),
        ("--with own --length 5000", "a shorter length"),
        ("--with own -o model", "pass another path as output"),
        ("--with own -o here", "not empty"),
        ("--with own -o here --force", "not the folder of a model"),
        ("--with own -o no/where --force", "mkdir -p no"),
        ("--with own -o here/mine --force", "is a file"),
        ("", "Missing option"),
    ],
)
def test_what_cannot_be_done_is_refused(complains: Complains, folder: Path, model: Path, words: str, said: str) -> None:
    (folder / "here").mkdir()
    (folder / "here" / "mine").touch()
    assert said.lower() in complains(f"tune model text.txt {words}").lower()


def a_key(name: str, value: Any) -> Callable[[Path], None]:
    """Writes another value into the configuration."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, name: value}))

    return change


def sharded(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink()
    min(folder.glob("model-*")).unlink()


def narrower(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def an_encoder(folder: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=300, **sizes)).save_pretrained(folder)


def fewer_tokens(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(257)
    model.save_pretrained(folder)


def a_short_table(folder: Path) -> None:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    GPT2LMHeadModel(GPT2Config(vocab_size=300, bos_token_id=0, eos_token_id=0, **sizes)).save_pretrained(folder)


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "remote code": (a_key("auto_map", {"AutoModel": "theirs.Model"}), "code of its own"),
    "attention of the Hub": (a_key("attn_implementation", "theirs/kernel"), "is 'theirs/kernel'"),
    "attention of the Hub, in a part of a part": (
        a_key("thinker_config", {"text_config": {"_attn_implementation": {"": "theirs/kernel@main"}}}),
        "code of its own",
    ),
    "a pickle": (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "a pickle"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
    "an unknown kind": (a_key("model_type", "llamma"), "cannot load"),
    "a kind of something else": (a_key("hidden_size", "wide"), "cannot load"),
    "fewer layers": (a_key("num_hidden_layers", 1), "does not have"),
    "more layers": (a_key("num_hidden_layers", 3), "without model.layers.2"),
    "another width": (a_key("hidden_size", 32), "lm_head.weight of shape (290, 16)"),
    "another shape": (narrower, "model.norm.weight of shape (15,)"),
    "a shard is missing": (sharded, "model-00001-of"),
    "a truncated file": (lambda folder: (folder / "model.safetensors").write_bytes(b"123456789"), "not an intact"),
    "no head": (an_encoder, "without cls.predictions"),
    "an adapter": (lambda folder: (folder / "adapter_config.json").write_text("{}"), "an adapter"),
    "no length": (a_key("max_position_embeddings", None), "max_position_embeddings"),
    "a table of positions": (a_short_table, "whose table has 8 positions"),
    "another tokenizer": (fewer_tokens, "no row for"),
    "layers without end": (a_key("num_hidden_layers", 2**40), "for the layers of a model, expected from 0 to 1,000"),
    "fewer heads than none": (a_key("n_head", -4), "-4 for the heads of a model"),
    "no share to drop": (a_key("attention_dropout", 2.5), "has to be between 0 and 1"),
    "gigabytes of nothing": (a_key("intermediate_size", 2**26), "but its configuration describes 6,4"),
    "a length that is none": (a_key("max_position_embeddings", 0), "0 for max_position_embeddings"),
    "a trained length that is none": (
        a_key("rope_parameters", {"rope_type": "default", "rope_theta": 1e4, TRAINED: math.nan}),
        f"nan for {TRAINED}",
    ),
}


@pytest.mark.parametrize(
    "verb", [("evaluate", "--lengths", 16), ("tune", "--length", 16, "--with", "own")], ids=lambda verb: verb[0]
)
@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_folders_cost_one_line(
    complains: Complains, folder: Path, model: Path, what: str, verb: tuple[object, ...]
) -> None:
    spoil, said = HOSTILE[what]
    spoil(model)
    name, *options = verb
    assert said in complains(name, "model", "text.txt", *options)
