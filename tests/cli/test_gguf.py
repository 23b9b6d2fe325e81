"""A verb gives for a GGUF file what it gives for the folder that `transformers` makes of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.conftest import Complains, Run
from tests.gguf_files import KINDS, random_model, write_gguf

LINE = "tiny.gguf: weights in F32, converted to float32 (1 MB in memory)"
VERBS = {
    "evaluate": "evaluate {} text.txt --lengths 16,32 --with own,exact,nope --windows 4 --keys 0 -o report-{}",
    "audit": "audit {} --text text.txt --length 16 --windows 10",
    "generate": "generate {} cat --tokens 6 --temperature 0",
    "generate without positions": "generate {} cat --tokens 6 --temperature 0 --with nope",
    "neighbours": "neighbours {} t",
    "probe": "probe {}",
    "tune": "tune {} text.txt --with yarn:2 --length 16 --steps 2 --batch 2 -o tuned-{}",
}
TIMES = ("report", "environment", "output", "seconds", "model", "tokenizer", "model_sha256", "source")
"""Facts that tell where, when and from which file."""


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, folder: Path) -> str:
    """The kind of a model, in the file tiny.gguf, and in the folder plain as `transformers` reads the file."""
    write_gguf(random_model(request.param), folder / "tiny.gguf")
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.gguf", dtype=torch.float32)
    vars(read.config).pop("quantization_config", None)
    plain = type(read)(read.config)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder / "plain")
    AutoTokenizer.from_pretrained(folder, gguf_file="tiny.gguf").save_pretrained(folder / "plain")
    return request.param


def _without_times(facts: Any) -> Any:
    if isinstance(facts, dict):
        return {key: _without_times(value) for key, value in facts.items() if key not in TIMES}
    return [_without_times(each) for each in facts] if isinstance(facts, list) else facts


@pytest.mark.parametrize(
    "verb", [pytest.param(verb, marks=pytest.mark.slow) if verb == "audit" else verb for verb in VERBS]
)
def test_a_verb_reads_a_file_as_it_reads_the_folder(verb: str, model: str, succeeds: Run) -> None:
    of_file, of_folder = (succeeds(f"{VERBS[verb].format(each, each)} --json") for each in ("tiny.gguf", "plain"))
    facts = json.loads(of_file.stdout)
    weights = facts.pop("weights", None)
    assert (weights is None) == (verb == "probe")
    expected = json.loads(of_folder.stdout)
    assert expected
    assert _without_times(facts) == _without_times(expected)
    if weights is not None and verb != "neighbours":
        assert of_file.stderr.count(LINE) == 1
        assert weights["types"] == {"F32": 1.0}


def test_what_is_tuned_from_a_file_is_a_folder(model: str, folder: Path, succeeds: Run) -> None:
    long = folder / ("a-long-name-" * 8)
    said = succeeds(f"tune tiny.gguf text.txt --with alibi --length 16 --steps 1 --batch 2 -o {long}").stdout
    assert said.splitlines()[-1] == f"locant.checkpoints.load_swapped({str(long)!r})", "it can be copied"
    long.rename(folder / "tuned")
    config = json.loads((folder / "tuned" / "config.json").read_text())
    assert "quantization_config" not in config
    assert (folder / "tuned" / "tokenizer.json").is_file()
    assert "hello" in succeeds("generate tuned hello --tokens 2").stdout
    succeeds("tune tiny.gguf text.txt --with own --length 16 --steps 1 --batch 2")
    tuned = AutoModelForCausalLM.from_pretrained(folder / "tiny-own")
    before = random_model(model).state_dict()
    assert tuned.dtype == torch.float32
    assert any(not torch.equal(each, before[name]) for name, each in tuned.state_dict().items())


def test_a_tensor_that_is_skipped_is_named_once(folder: Path, succeeds: Run) -> None:
    bias = {"blk.0.attn_q.bias": np.ones(64, np.float32)}
    write_gguf(random_model("llama"), folder / "tiny.gguf", tensors=bias)
    result = succeeds("evaluate tiny.gguf text.txt --lengths 16 --with own --windows 2 --keys 0 -o report --json")
    assert result.stderr.count("1 tensor that transformers does not read (blk.0.attn_q.bias)") == 1
    assert "UserWarning" not in result.stderr
    assert json.loads(result.stdout)["weights"]["unread"] == ["blk.0.attn_q.bias"]
    assert "does not read" not in succeeds("neighbours tiny.gguf t").stderr, "only the token table is read"


def test_explain_names_the_layers_of_a_note(model: str, succeeds: Run) -> None:
    said = " ".join(succeeds("explain tiny.gguf").stdout.split())
    sentence = "layers with full attention have this encoding, and layers with a window have the base 10,000"
    assert (sentence in said) == (model == "gemma3")


WORDS = {
    "evaluate": "text.txt", "audit": "", "generate": "hello", "neighbours": "king", "probe": "", "tune": "--with own",
}  # fmt: skip
"""The words that each verb needs after its model."""


@pytest.mark.parametrize("verb", WORDS)
def test_what_is_no_model_is_refused_in_one_line_before_anything_is_said_of_its_weights(
    verb: str, folder: Path, complains: Complains
) -> None:
    assert "got no file missing.gguf" in complains(f"{verb} missing.gguf {WORDS[verb]}")
    whole = write_gguf(random_model("llama"), folder / "tiny.gguf").read_bytes()
    (folder / "tiny.gguf").write_bytes(whole.replace(b"llama", b"rwkv7"))
    assert "of the architecture rwkv7" in complains(f"{verb} tiny.gguf {WORDS[verb]}")
    (folder / "tiny.gguf").rename(folder / "tiny-00002-of-00002.gguf").write_bytes(whole)
    assert "add the missing tiny-00001-of-00002.gguf" in complains(f"{verb} tiny-00002-of-00002.gguf {WORDS[verb]}")
