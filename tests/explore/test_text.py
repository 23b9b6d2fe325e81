"""The Your text screen: tokens, windows and vectors are those that its Python makes; a text is only text."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from torch.nn.functional import cross_entropy

from locant.errors import InputError
from locant.explore import models
from locant.explore.screens import answer, encodings_of_text
from locant.explore.session import Session
from locant.lab.decoder import Decoder
from locant.text import Tokenizer, sample_text
from tests.explore.screens import executed, numbers_of
from tests.minilm import MINILM
from tests.tolerances import SHORT_SUM

STORY = "The cat sat on the mat. The dog sat on the log. " * 20


numbers = partial(numbers_of, "text")


MODELS = [
    *(("small, trained", name, "bytes") for name in models.ENCODINGS),
    *(("untrained", name, "bytes") for name in ("learned", "sinusoidal", "fire")),
    *(("untrained", name, "trained on this text") for name in ("pope", "rope_plus_plus", "transformer_xl")),
]


@pytest.mark.parametrize(("model", "encoding", "tokenizer"), MODELS)
def test_the_python_of_each_picture_makes_its_numbers(model: str, encoding: str, tokenizer: str) -> None:
    asked = {"model": model, "encoding": encoding, "tokenizer": tokenizer, "vocabulary": "300"}
    shown = numbers(typed=STORY, layer="1", head="3", **asked)
    values = {name: value for name, value in shown["attention"].items() if isinstance(value, np.ndarray)}
    for name, value in values.items():
        made = executed(shown, name)[name].numpy()
        np.testing.assert_array_equal(np.where(np.isnan(value), np.nan, made), value, err_msg=name)
    made = executed(shown, "vectors")
    np.testing.assert_array_equal(made["ids"], shown["ids"])
    np.testing.assert_array_equal(made["x"][0].detach(), shown["vectors"])
    assert len(made["windows"]) == len(shown["windows"]["starts"])
    assert set(shown["python"]) == {"tokens", "vectors", "attended", *values}


@pytest.mark.parametrize("name", encodings_of_text())
def test_of_every_encoding_attention_is_that_of_the_decoder(name: str) -> None:
    """What the pictures show, in the place of the layer's own attention, gives the layer's own output."""
    model = models.untrained_model(name, 300)
    ids = torch.arange(40, 63)
    seen: list[torch.Tensor] = []
    hooks = [block.out.register_forward_hook(lambda _, given, out: seen.append(given[0])) for block in model.blocks]
    layers = models.layers_of(model, ids.tolist())
    for hook in hooks:
        hook.remove()
    for block, layer, heads_out, x in zip(model.blocks, layers, seen, stream(model, ids), strict=True):
        v = block.qkv(block.attention_norm(x)).unflatten(-1, (3, 4, 16))[0, :, 2].transpose(0, 1)
        groups = len(layer.weights) // len(v)
        y = layer.weights @ v.repeat_interleave(groups, 0)
        np.testing.assert_allclose(y.transpose(0, 1).flatten(1).detach(), heads_out[0].detach(), **SHORT_SUM)
        np.testing.assert_allclose(layer.weights.sum(-1).detach(), 1, **SHORT_SUM)


def stream(model: Decoder, ids: torch.Tensor) -> list[torch.Tensor]:
    """What goes into each block."""
    given: list[torch.Tensor] = []
    hooks = [block.register_forward_pre_hook(lambda _, x: given.append(x[0])) for block in model.blocks]
    with torch.no_grad():
        model(ids[None])
    for hook in hooks:
        hook.remove()
    return given


def test_a_rotated_key_is_the_key_turned_by_position_times_frequency() -> None:
    shown = numbers(typed=STORY, count="30", head="2")["attention"]
    first, second = shown["keys"][:, :8], shown["keys"][:, 8:]
    turned = (first + 1j * second) * np.exp(1j * np.arange(30)[:, None] * 10_000.0 ** (-np.arange(8) / 8))
    np.testing.assert_allclose(np.hstack([turned.real, turned.imag]), shown["rotated"], **SHORT_SUM)
    assert numbers(typed=STORY, encoding="alibi")["attention"]["rotated"] is None


def test_alibi_adds_its_slope_for_every_token_between() -> None:
    added = numbers(typed=STORY, count="9", encoding="alibi", head="1")["attention"]["added"]
    expected = -(2.0**-4) * (np.arange(9)[:, None] - np.arange(9))
    np.testing.assert_array_equal(added, np.where(expected > 0, np.nan, expected))
    assert numbers(typed=STORY)["attention"]["added"] is None


def test_the_small_model_has_learned_what_follows_what() -> None:
    """Of a text that it read a part of, in all of its encodings: nats for each token far below those of any guess."""
    tokenizer = Tokenizer.load(models.FOLDER)
    ids = torch.from_numpy(tokenizer.encode(sample_text()[200_000:204_000])).long()[: 6 * models.LENGTH].view(6, -1)
    for name in models.ENCODINGS:
        with torch.no_grad():
            logits = models.small_model(name)(ids)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        assert loss < 0.65 * np.log(models.VOCAB_SIZE), name


def test_it_is_said_what_is_trained_and_what_is_not() -> None:
    assert numbers()["told"].startswith("Trained")
    assert numbers(model="untrained")["told"].startswith("Untrained")


def test_tokens_spell_the_text_and_windows_follow_it() -> None:
    shown = numbers(typed=STORY, model="untrained", tokenizer="bytes", start="4", count="9", length="4", stride="3")
    assert bytes.fromhex(" ".join(shown["bytes"])).decode() == STORY[4:13]
    assert shown["pieces"] == list(STORY[4:13].replace(" ", "␣"))
    assert shown["windows"]["inputs"] == [list("cat␣"), list("␣sat"), ["t", "␣", "", ""]]
    assert shown["windows"]["targets"] == [list("at␣s"), list("sat␣"), ["␣", "o", "", ""]]


def test_the_spelling_of_a_special_token_stays_text() -> None:
    shown = numbers(typed="<|endoftext|>", model="untrained", tokenizer="bytes")
    assert "".join(shown["pieces"]) == "<|endoftext|>"
    assert len(shown["ids"]) == 13


def test_a_dropped_file_is_read_as_text_or_refused() -> None:
    session = Session()
    key = session.drop("story.txt", STORY.encode())
    assert numbers(session, file=key)["name"] == "story.txt"
    for content, words in ((b"\xff\xfe", "not text in UTF-8: byte 0"), (b"", "empty")):
        with pytest.raises(InputError, match=words):
            numbers(session, file=session.drop("odd.txt", content))


def test_a_file_of_the_command_line_comes_first(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text(STORY, encoding="utf-8")
    session = Session.of([str(tmp_path / "mine.txt")], [])
    assert numbers(session)["characters"] == len(STORY)


def test_a_model_of_the_command_line_shows_its_own_vectors_and_nearest_tokens() -> None:
    session = Session.of([str(MINILM)], [])
    shown = numbers(session, typed="The king saw a house.", at="1")
    with safetensors.safe_open(MINILM / "model.safetensors", "np") as file:
        (name,) = (key for key in file.keys() if key.endswith("word_embeddings.weight"))  # noqa: SIM118
        table = file.get_tensor(name)
    assert shown["pieces"] == ["the", "king", "saw", "a", "house", "."]
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    king = int(shown["ids"][1])
    cosines = unit @ unit[king]
    expected = [int(each) for each in np.argsort(-cosines) if each != king][:8]
    assert [number for _, number, _ in shown["neighbours"]] == expected
    np.testing.assert_allclose([score for *_, score in shown["neighbours"]], cosines[expected], **SHORT_SUM)
    np.testing.assert_array_equal(shown["alone"], table[shown["ids"], :64])
    made = executed(shown, "vectors")
    np.testing.assert_array_equal(made["x"][0, :, :64].detach(), shown["vectors"])
    assert made["near"].ids.tolist() == expected
    assert numbers(session, model="untrained", typed=STORY)["neighbours"] == []


def test_the_attention_of_a_model_is_what_transformers_says_and_other_positions_change_it() -> None:
    transformers = pytest.importorskip("transformers", reason="reads models of folders")
    session = Session.of([str(MINILM)], [])
    shown = numbers(session, typed="The king saw a house.", layer="3", head="7", at="1")
    model = transformers.AutoModel.from_pretrained(MINILM, attn_implementation="eager").eval()
    with torch.no_grad():
        attentions = model(torch.from_numpy(shown["ids"]).long()[None], output_attentions=True).attentions
    np.testing.assert_array_equal(shown["attention"]["weights"], attentions[3][0, 7])
    assert shown["attention"]["far"].shape == (6, 12)
    assert "own attention" in shown["told"]
    np.testing.assert_array_equal(executed(shown, "weights")["weights"], shown["attention"]["weights"])
    other = numbers(session, typed="The king saw a house.", layer="3", head="7", encoding="nope")
    assert np.abs(other["attention"]["weights"] - shown["attention"]["weights"]).max() > 0.01
    assert "than in its training" in other["told"]
    refused = numbers(session, typed="The king saw a house.", encoding="yarn:4")
    assert refused["attention"] == {}
    assert "no attention to show: got yarn for BertModel" in refused["told"]
    assert numbers(session, typed="The king saw a house.", attention="tables alone")["attention"] == {}


def test_the_folder_of_a_model_is_no_report() -> None:
    """So the recorded results are shown."""
    session = Session.of([str(MINILM)], [])
    recorded = answer("results", {}, Session.of([], []))["numbers"]["rows"]
    assert [row["name"] for row in answer("results", {}, session)["numbers"]["rows"]] == [
        row["name"] for row in recorded
    ]
    assert answer("model", {}, session)["numbers"]["model_type"] == "bert"
