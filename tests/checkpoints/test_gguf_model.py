"""A GGUF file gives the model that it was made from, and what is not a model is refused with the reason."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import locant
from locant import InputError, Rotary
from locant.checkpoints import load_gguf, load_swapped
from locant.checkpoints.config_source import read_source
from locant.checkpoints.gguf_model import gguf_weights
from locant.gguf_file import find_gguf, open_gguf
from tests.gguf_files import BASE, KINDS, gguf, random_model, write_gguf
from tests.refusal import refuses

IDS = torch.randint(3, 300, (1, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(random_model("llama"), tmp_path / "tiny.gguf")


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_gives_the_weights_and_positions_that_it_was_made_from(kind: str, tmp_path: Path) -> None:
    model = random_model(kind)
    path = write_gguf(model, tmp_path / "tiny.gguf")
    loaded = load_gguf(path)
    theirs = loaded.state_dict()
    for name, tensor in model.state_dict().items():
        if kind == "gemma3" and "norm" in name:
            tensor = (tensor + 1) - 1  # as in the file, which has 1 added to them
        assert torch.equal(theirs[name], tensor), name
    assert read_source(path)["model_type"] == model.config.model_type
    assert loaded.config.rope_parameters == model.config.rope_parameters
    model.load_state_dict(theirs)
    assert torch.equal(_logits(loaded), _logits(model))


@pytest.mark.parametrize("kind", KINDS)
def test_a_swapped_model_of_a_file_is_saved_as_a_folder(kind: str, tmp_path: Path) -> None:
    loaded = load_gguf(write_gguf(random_model(kind), tmp_path / "tiny.gguf", quantisation="Q8_0"))
    own = _logits(loaded)
    loaded.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in read_source(tmp_path / "plain")
    assert torch.equal(_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")), own)
    with locant.swap(loaded, angles="float32"):
        assert torch.equal(_logits(loaded), own)
    with locant.swap(loaded, locant.ALiBi(4)):
        loaded.save_pretrained(tmp_path / "swapped")
        swapped = _logits(loaded)
    assert torch.equal(_logits(load_swapped(tmp_path / "swapped")), swapped)
    assert torch.equal(_logits(loaded), own)
    loaded.train()(IDS, labels=IDS).loss.backward()
    assert all(each.grad is not None for each in loaded.parameters())


def test_a_layer_is_described_with_its_own_encoding() -> None:
    local, full = Rotary(16, base=10_000.0), Rotary(16, base=BASE["gemma3"])
    with locant.swap(random_model("gemma3")) as swapped:
        for layer, sentence in enumerate(swapped.sentences):
            own, other = (full, local) if layer == 5 else (local, full)
            assert str(own) in sentence
            assert str(other) not in sentence
    linear = Rotary(16, scaling=locant.scaling.Linear(factor=2.0))
    with locant.swap(random_model("gemma3"), linear) as swapped:
        assert [str(full) in each for each in swapped.sentences] == [False] * 5 + [True]


def test_quantised_weights_are_dequantised_as_gguf_does_it(tmp_path: Path) -> None:
    model = random_model("llama")
    path = write_gguf(model, tmp_path / "tiny.gguf", quantisation="Q8_0")
    table = model.get_input_embeddings().weight.detach().numpy()
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    expected = gguf.quants.dequantize(gguf.quants.quantize(table, q8_0), q8_0)
    for found in (load_gguf(path).get_input_embeddings().weight, locant.TokenEmbedding.from_pretrained(path).weight):
        assert np.array_equal(found.detach().numpy(), expected)
    count = sum(each.numel() for each in model.parameters())
    weights = gguf_weights(path)
    assert weights.num_bytes == 4 * count
    norms = sum(each.numel() for each in model.parameters() if each.ndim == 1)
    assert weights.types == {"Q8_0": (count - norms) / count, "F32": norms / count}
    assert re.search(r"Q8_0 \(\d\d\.\d%\), F32 \(0\.\d%\), dequantised to float32", str(weights))
    assert load_gguf(path, dtype="bfloat16").dtype == torch.bfloat16


def test_a_folder_with_one_file_and_no_safetensors_is_that_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_gguf(tmp_path) == file
    shutil.copyfile(file, tmp_path / "mmproj-tiny.gguf")
    assert find_gguf(tmp_path) == file
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert load_gguf("~/tiny.gguf").config.num_hidden_layers == 6
    shutil.copyfile(file, tmp_path / "other.gguf")
    with refuses(InputError, "2 GGUF files", "tiny.gguf", "other.gguf"):
        find_gguf(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert find_gguf(tmp_path) is None


def _cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def _spoil(**more: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        write_gguf(random_model("llama"), path, **more)

    return write


def _change_architecture(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"llama", b"rwkv7"))


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (lambda path: _cut(path, 100_000), "which ends inside its tensors, after 100,000 bytes"),
    "cut in the header": (lambda path: _cut(path, 100), "the header cannot be read"),
    "a pointer": (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "another file": (lambda path: path.write_text("<!doctype html>"), "<!doctyp"),
    "an unknown architecture": (_change_architecture, "of the architecture rwkv7, which transformers does not read"),
    "a shard": (_spoil(keys={"split.count": 4, "split.no": 1}), "file 2 of 4"),
    "an adapter": (_spoil(keys={"general.type": "adapter"}), "an adapter"),
    "a projector": (_spoil(keys={"general.type": "mmproj"}), "images or sound"),
    "a vocabulary": (_spoil(weights=False), "a vocabulary without weights"),
    "an embedding model": (_spoil(keys={"llama.pooling_type": 1}), "sentence embeddings"),
    "a weight of another size": (_spoil(keys={"llama.vocab_size": 400}), "of shape"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_a_model_is_refused_with_the_reason(fault: str, file: Path) -> None:
    spoil, reason = FAULTS[fault]
    spoil(file)
    with refuses(InputError, reason):
        load_gguf(file)


def test_a_shard_is_counted_by_its_name_and_the_missing_shards_are_named(file: Path) -> None:
    second = file.rename(file.with_name("tiny-00002-of-00003.gguf"))
    with refuses(InputError, "file 2 of 3", "add the missing tiny-00001-of-00003.gguf, tiny-00003-of-00003.gguf, then"):
        load_gguf(second)
    for number in (1, 3):
        shutil.copyfile(second, file.with_name(f"tiny-0000{number}-of-00003.gguf"))
    first = file.with_name("tiny-00001-of-00003.gguf")
    with refuses(InputError, f"try: merge the files: llama-gguf-split --merge {first} whole.gguf"):
        load_gguf(second)


def test_a_piece_of_a_file_and_a_missing_file_are_named(file: Path) -> None:
    piece = file.rename(file.with_name("tiny.gguf.part00"))
    with refuses(InputError, "a piece of a GGUF file", f"cat {file}.* > {file}"):
        load_gguf(piece)
    with refuses(InputError, "got no file"):
        load_gguf(file)


def test_a_file_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    path = write_gguf(random_model("llama"), tmp_path / "tiny.gguf", tokenizer=False)
    with refuses(InputError, "without a tokenizer"):
        locant.Tokenizer.load(path)


FACTORS = np.linspace(1, 8, 8, dtype=np.float32)
BIASES = {f"blk.{layer}.attn_q.bias": np.ones(64, np.float32) for layer in range(6)}
UNREAD: dict[str, tuple[dict[str, Any], dict[str, np.ndarray], str, int]] = {
    "YaRN": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, {},
        "a scaling of the positions (yarn by 4), which transformers does not read", 0,
    ),
    "Llama 3": ({}, {"rope_freqs.weight": FACTORS}, "(rope_freqs.weight), which transformers does not read", 1),
    "factors of one": ({}, {"rope_freqs.weight": FACTORS * 0 + 1}, "all factors are 1, so nothing is missing", 1),
    "frequencies": ({}, {"blk.0.attn_rot_embd.weight": FACTORS}, "computed from the base, so nothing is missing", 1),
    "biases": ({}, BIASES, "blk.3.attn_q.bias and 2 more): the model computes without them, but llama.cpp uses", 6),
    "a norm": ({}, {"blk.3.attn_q_norm.weight": FACTORS}, "1 tensor that transformers does not read", 1),
    "an adapter": ({}, {"blk.0.attn_v.weight.lora_a": np.ones((2, 64), np.float32)}, "attn_v.weight.lora_a", 1),
    "more layers": ({}, {"blk.6.attn_norm.weight": np.ones(64, np.float32)}, "the model computes without them", 1),
    "further tokens": (
        {}, {f"blk.6.{name}.weight": np.ones(64, np.float32) for name in ("attn_norm", "nextn.enorm")},
        "they predict further tokens, and the 6 layers of the model do not use them", 2,
    ),
}  # fmt: skip
"""Metadata and tensors that are added to a file, and what is written about them."""


@pytest.mark.parametrize("what", UNREAD)
def test_what_transformers_does_not_read_is_a_warning(what: str, tmp_path: Path) -> None:
    keys, tensors, sentence, count = UNREAD[what]
    model = random_model("llama")
    path = write_gguf(model, tmp_path / "tiny.gguf", keys=keys, tensors=tensors)
    with pytest.warns(UserWarning, match=re.escape(sentence)) as warned:
        loaded = load_gguf(path)
    assert torch.equal(_logits(loaded), _logits(model)), "as if the file did not have them"
    weights = gguf_weights(path)
    assert [*weights.notes] == [str(each.message) for each in warned]
    assert sentence in weights.notes[0]
    assert {*weights.unread} == {*tensors}
    assert len(tensors) == count


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_read_to_the_end_has_no_notes(kind: str, tmp_path: Path) -> None:
    none = {f"{kind}.rope.scaling.type": "linear", f"{kind}.rope.scaling.factor": 1.0}
    path = write_gguf(random_model(kind), tmp_path / "tiny.gguf", keys=none)
    load_gguf(path)
    weights = gguf_weights(path)
    assert weights.unread == weights.notes == ()


def test_the_functions_of_gguf_are_replaced_for_the_time_of_a_call(file: Path, tmp_path: Path) -> None:
    before = gguf.GGUFReader, gguf.get_tensor_name_map
    load_gguf(file)
    other = write_gguf(random_model("llama"), tmp_path / "other.gguf", keys={"llama.context_length": 77})
    with open_gguf(file).shared_with_transformers():
        assert gguf.GGUFReader(other).get_field("llama.context_length").contents() == 77
    with refuses(InputError), open_gguf(file).shared_with_transformers():
        raise InputError("a fault", "mend it")
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before


def test_nothing_is_downloaded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    states, real = list[bool](), AutoModelForCausalLM.from_pretrained

    def record(*args: Any, **options: Any) -> Any:
        states.append(constants.HF_HUB_OFFLINE and options["local_files_only"])
        return real(*args, **options)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", record)
    load_gguf(file)
    assert states == [True]
    assert not constants.HF_HUB_OFFLINE
