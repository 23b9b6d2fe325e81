"""`locant train` and `locant generate`, as they are typed: two commands from a text to a text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, GPT2Config, GPT2LMHeadModel

import locant
from locant.lab import Decoder, generate, load, save
from locant.lab.position_overrides import PositionOverride
from locant.lab.resume_state import preserve_random_state
from locant.positions.registry import encodings
from tests.cli.conftest import Complains, Run, listing, refused

UNTOLD = ("dual_chunk", "rerope", "rope_plus_plus", "rotary_by_head", "self_extend")
"""Encodings that are made of others."""

TRAIN = "train text.txt --train-length 8 --steps 2 --tokenizer bytes"


def test_two_commands_lead_from_a_text_to_a_text(succeeds: Run, folder: Path) -> None:
    done = succeeds(f"{TRAIN} --encoding alibi -o small")
    assert done.stdout.startswith("small: alibi, 2 steps, loss 5.")
    assert done.stdout.endswith("Next: locant generate small 'To be'\n")
    assert sorted(path.name for path in (folder / "small").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    model, tokenizer = locant.lab.train(
        (folder / "text.txt").read_text(), "alibi", tokenizer=locant.Tokenizer.bytes(), num_steps=2, train_length=8
    )
    for options, drawing in (("", {}), ("--temperature 0.5 --top-k 7 --seed 3", {"temperature": 0.5, "top_k": 7})):
        ids = generate(model, tokenizer.encode("the cat"), 20, seed=3 if options else 0, **drawing)
        written = succeeds(f"generate small 'the cat' --tokens 20 {options}")
        assert written.stdout == tokenizer.decode(ids) + "\n"
        assert written.stderr == ""
    facts = json.loads(succeeds("generate small - --tokens 20 --json", input="the cat").stdout)
    assert (facts["model"], facts["prompt"]) == ("small", "the cat")
    assert facts["prompt_ids"] == [*b"the cat"]
    assert len(facts["ids"]) == 20
    assert facts["continuation"] == tokenizer.decode(facts["ids"])


def test_what_was_trained_is_told(succeeds: Run, folder: Path) -> None:
    printed = json.loads(succeeds(f"{TRAIN} --seed 4 --json").stdout)
    assert (printed.pop("encoding"), printed.pop("output")) == ("rotary", "model")
    told = json.loads((folder / "model" / "config.json").read_text())
    assert told.items() >= printed.items()
    assert (told["model_type"], told["encoding"]["name"]) == ("locant_decoder", "rotary")
    assert told["options"] == {"train_length": 8, "num_steps": 2, "seed": 4}
    assert told["trained_on"]["files"] == ["text.txt"]
    assert len(told["losses"]) == 2
    assert "torch" in told["environment"]


@pytest.mark.parametrize("name", [name for name in encodings() if name not in UNTOLD])
def test_a_decoder_with_any_encoding_is_read_as_it_was_saved(name: str, tmp_path: Path) -> None:
    from tests.lab.test_decoder import decoder

    model, tokenizer = decoder(name), locant.Tokenizer.bytes()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    save(model.bfloat16() if name == "fire" else model, tokenizer, tmp_path / "saved")
    state = torch.get_rng_state()
    again, its = load(tmp_path / "saved")
    assert torch.equal(torch.get_rng_state(), state)
    assert its.fingerprint == tokenizer.fingerprint
    assert repr(again) == repr(model)
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys() == load_file(tmp_path / "saved" / "model.safetensors").keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    assert torch.equal(generate(model, [1, 2, 3], 5), generate(again, [1, 2, 3], 5))


def test_a_model_of_transformers_writes_what_its_own_generate_does(succeeds: Run, folder: Path, model: Path) -> None:
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(model), locant.Tokenizer.load(model)
    prompt = torch.tensor([tokenizer.encode("The cat").tolist()])
    asked = "generate model 'The cat' --tokens 12 --json"
    ids = plain.generate(prompt, do_sample=False, max_new_tokens=12)[0, prompt.shape[1] :]
    facts = json.loads(succeeds(f"{asked} --temperature 0").stdout)
    assert facts["ids"] == ids.tolist()
    assert facts["continuation"] == tokenizer.decode(ids)
    first, again, other = (json.loads(succeeds(f"{asked} --seed {seed}").stdout)["ids"] for seed in (0, 0, 1))
    assert first == again != other
    best = json.loads(succeeds(f"{asked} --top-k 1").stdout)
    assert best["ids"] == facts["ids"]
    with locant.swap(plain):
        exact = plain.generate(prompt, do_sample=False, max_new_tokens=12)[0, prompt.shape[1] :]
    assert json.loads(succeeds(f"{asked} --temperature 0 --with exact").stdout)["ids"] == exact.tolist()
    with locant.swap(plain, locant.PositionEncoding()):
        nope = plain.generate(prompt, do_sample=False, max_new_tokens=12)[0, prompt.shape[1] :]
    assert json.loads(succeeds(f"{asked} --temperature 0 --with nope").stdout)["ids"] == nope.tolist() != ids.tolist()


def test_an_encoding_that_needs_whole_texts_is_given_them(succeeds: Run, folder: Path, model: Path) -> None:
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(model), locant.Tokenizer.load(model)
    rows = torch.tensor([tokenizer.encode("The cat").tolist()])
    asked = "generate model 'The cat' --tokens 6 --temperature 0 --with convolutional --json"
    written = json.loads(succeeds(asked).stdout)["ids"]
    with preserve_random_state(torch.device("cpu")), torch.no_grad():
        encoding = PositionOverride.of("convolutional").encoding(plain, 64, 64)
        with locant.swap(plain, encoding):
            for _ in range(6):
                rows = torch.cat([rows, plain(rows, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert written == rows[0, -6:].tolist()


def test_a_text_begins_and_ends_as_the_tokenizer_and_the_model_say(succeeds: Run, folder: Path, model: Path) -> None:
    """The tokenizer puts a token before a text, and the model ends with the first one that it writes."""
    definition = json.loads((model / "tokenizer.json").read_text())
    end = next(each["id"] for each in definition["added_tokens"])
    definition["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "start", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"start": {"id": "start", "ids": [end], "tokens": ["<|endoftext|>"]}},
    }
    (model / "tokenizer.json").write_text(json.dumps(definition))
    asked = "generate model cat --tokens 9 --temperature 0 --json"
    facts = json.loads(succeeds(asked).stdout)
    assert facts["prompt_ids"] == [end, *locant.Tokenizer.load(model).encode("cat")]
    assert facts["prompt"] == "cat"
    assert len(facts["ids"]) == 9
    GenerationConfig(eos_token_id=facts["ids"][3]).save_pretrained(model)
    stop = facts["ids"].index(facts["ids"][3]) + 1
    assert json.loads(succeeds(asked).stdout)["ids"] == facts["ids"][:stop]


test_what_cannot_be_generated_is_one_line = refused(
    "generate",
    ("nothing here", "got nothing, expected the folder of a model"),
    ("model ''", "got a prompt without a token; try: pass a word or more"),
    ("model a --tokens 0", "0 is not in the range"),
    ("model a --temperature -1", "-1.0 is not in the range"),
    ("model a --with yarnn:2", "expected 'own', 'exact'"),
    ("model a --device tpu", "finds on this machine: cpu"),
    fixtures=["model"],
)


def test_what_a_decoder_of_the_lab_is_not_for_is_said(
    run: Run, folder: Path, complains: Complains, succeeds: Run
) -> None:
    succeeds(f"{TRAIN} --encoding learned")
    assert "--tokens 5, or use an encoding without a table" in complains("generate model cat --tokens 6")
    assert "which is not rotary" in complains("generate model cat --tokens 5 --with yarn:2")
    assert "at most 257; try: --top-k 50" in complains("generate model cat --tokens 5 --top-k 300")
    weights = (folder / "model" / "model.safetensors").read_bytes()
    (folder / "model" / "model.safetensors").write_bytes(weights[:-9])
    assert "is not an intact safetensors file" in complains("generate model cat")
    (folder / "model" / "config.json").write_text('{"model_type": "locant_decoder"}')
    assert "without vocab_size" in complains("generate model cat")


def test_a_table_of_positions_that_is_too_short_is_said_before(complains: Complains, model: Path) -> None:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    vocab_size = locant.Tokenizer.load(model).vocab_size
    GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, **sizes)).save_pretrained(model.with_name("gpt2"))
    shutil.copy(model / "tokenizer.json", model.with_name("gpt2"))
    assert "whose table has 32 positions" in complains("generate gpt2 cat --tokens 40")
    assert "0 rotary encodings" in complains("generate gpt2 cat --tokens 4 --with yarn:2")


def test_a_folder_that_is_there_is_not_written_over(complains: Complains, succeeds: Run, folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "notes.txt").write_text("mine")
    assert "which is not empty" in complains(f"{TRAIN} -o mine")
    assert "which is not the folder of a model" in complains(f"{TRAIN} -o mine --force")
    succeeds(f"{TRAIN} --encoding nope")
    before = listing(folder)
    assert "which is not empty" in complains(TRAIN)
    succeeds(f"{TRAIN} --force")
    assert listing(folder) != before
    assert "got both steps and minutes" in complains(f"{TRAIN} --minutes 1 -o other")
    for name in UNTOLD:
        assert "which cannot be saved" in complains(f"{TRAIN} -o other --encoding {name}")
    for name in ("rotary+yarn", "yarn"):
        assert "but a scaling is not trained; try: 'rotary'" in complains(f"{TRAIN} --encoding {name} -o other")


def test_an_encoding_that_its_options_do_not_tell_is_refused(tmp_path: Path) -> None:
    class Unknown(locant.PositionEncoding):
        pass

    model = Decoder(257, Unknown(), d_model=8, num_layers=1, num_heads=2)
    with pytest.raises(locant.InputError, match="got Unknown, which cannot be saved"):
        save(model, locant.Tokenizer.bytes(), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
