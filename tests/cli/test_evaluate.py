"""`locant evaluate`, as it is typed, on a model of some thousand weights."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import locant
from locant.lab import evaluation
from locant.lab.evaluation import interval_of_mean
from locant.lab.ruler import FILLER, Prompt
from tests.cli.conftest import Complains, Run, refused
from tests.tolerances import LOGITS

pytest.importorskip("matplotlib", reason="pictures need the extra `lab`")

ASKED = ("--lengths", "16,64", "--windows", 12, "--keys", 1, "-o", "out")
FILES = ["loss_by_length.png", "loss_by_position.png", "report.html", "results.json"]


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out" / "results.json").read_text())


@pytest.mark.slow
def test_it_measures_what_the_model_itself_computes(succeeds: Run, folder: Path, model: Path) -> None:
    done = succeeds("evaluate model --with own,exact,nope,yarn:4,ntk:4,linear:2,dynamic:2,self-extend:4", *ASKED)
    assert sorted(path.name for path in (folder / "out").iterdir()) == FILES
    assert done.stdout.splitlines()[-1] == "Report: out/report.html"
    found = results(folder)
    records = {record["encoding"]: record for record in found["records"]}
    assert [*records] == ["own", "exact", "nope", "yarn:4", "ntk:4", "linear:2", "dynamic:2", "self-extend:4"]
    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    tokenizer = locant.Tokenizer.load(str(model))
    ids = torch.from_numpy(np.asarray(tokenizer.encode(locant.text.reading.sample_text()[:20_000]))).long()
    for length in (16, 64):
        window = ids[None, length : 2 * length]
        loss = F.cross_entropy(plain(window).logits[0], ids[length + 1 : 2 * length + 1]).item()
        assert records["own"]["loss_by_window"][str(length)][1] == pytest.approx(loss, abs=LOGITS)
        low, high = records["own"]["interval_by_length"][str(length)]
        assert low <= records["own"]["loss_by_length"][str(length)] <= high
    near, far = (records["self-extend:4"]["loss_by_position"][part] for part in (slice(7), slice(9, None)))
    assert near == pytest.approx(records["own"]["loss_by_position"][:7], abs=LOGITS), "within a quarter of 32 tokens"
    assert far != pytest.approx(records["own"]["loss_by_position"][9:], abs=LOGITS)
    assert len(records["own"]["loss_by_window"]["64"]) == 12
    assert len(records["own"]["loss_by_window"]["16"]) == 48
    for task in ("pass_keys", "key_values"):
        assert [each["length"] for each in records["own"][task]] == [16] * 5 + [64] * 5
    assert "exact compared with own: less than 0.001 nats apart at 16, 64 tokens" in " ".join(done.stdout.split())
    page = (folder / "out" / "report.html").read_text()
    assert "for one model and one text" in page
    assert "http" not in page.replace("http://www.w3.org", "")


@pytest.mark.slow
def test_what_far_tokens_do_is_measured_where_it_is_asked_for(
    succeeds: Run, folder: Path, model: Path, complains: Complains
) -> None:
    """The model states 32 tokens: the same targets are read with 32 and with 64 before them."""
    assert "--lengths 4,16" in complains("evaluate model --far --lengths 16 -o out")
    done = succeeds("evaluate model --with own,nope --far", *ASKED)
    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    tokenizer = locant.Tokenizer.load(str(model))
    ids = torch.from_numpy(np.asarray(tokenizer.encode(locant.text.reading.sample_text()[:20_000]))).long()
    found = results(folder)["records"]
    for length in (32, 64):
        losses, stride = [], length // 8
        for end in range(65 + stride, 65 + 64 + 1, stride):  # the first of 11 stretches, of 12 windows
            scores = plain(ids[None, end - 1 - length : end - 1]).logits[0, -stride:]
            losses += F.cross_entropy(scores, ids[end - stride : end], reduction="none").tolist()
        measured = found[0]["context_loss_by_stretch"][str(length)]
        assert len(measured) == 11
        assert measured[0] == pytest.approx(np.mean(losses), abs=LOGITS)
    said = " ".join(done.stdout.split())
    assert "With 64 tokens before every token, in overlapping windows, the losses are own" in said
    assert "Tokens more than 32 back (up to 64) " in said
    assert "At 16, 64 tokens, not all pass keys were asked for: some rows would have to be cut." in said
    page = (folder / "out" / "report.html").read_text()
    assert "<h2>Loss with full context</h2>" in page
    assert "--keys 1 --far" in re.sub("</?span>", "", page)  # a command may break before an option


def test_what_is_finished_is_not_done_again(
    succeeds: Run, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = lambda results, folder: folder / "report.html"  # noqa: E731
    monkeypatch.setattr("locant.report.evaluation.write_evaluation", drawn)
    succeeds("evaluate model --with own,nope", *ASKED)
    first, measured = results(folder)["records"], []
    monkeypatch.setattr(evaluation, "_measure", lambda model, way, *rest: measured.append(way) or first[0])
    succeeds("evaluate model --with nope,own,exact", *ASKED)
    assert measured == ["exact"]
    assert results(folder)["records"][:2] == first[::-1]
    succeeds("evaluate model --with own", *ASKED[:-4], "--keys", 0, "-o", "out")
    assert measured == ["exact", "own"], "other settings"
    monkeypatch.setattr(
        evaluation, "_measure", lambda model, *rest: measured.append(str(model.module.dtype)) or first[0]
    )
    succeeds("evaluate model --with own", *ASKED, "--dtype", "bfloat16")
    assert measured[2:] == ["torch.bfloat16"]


@torch.no_grad()
def test_a_model_trained_on_in_place_is_measured_anew(
    succeeds: Run, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files have the names and sizes that they had; what answers must not be the report of the old weights."""
    monkeypatch.setattr("locant.report.evaluation.write_evaluation", lambda results, folder: folder / "report.html")
    asked = ("evaluate", "model", "--lengths", 16, "--with", "own", "--windows", 2, "--keys", 0, "-o")
    succeeds(*asked, "out")
    before, size = results(folder)["records"][0]["loss_by_length"], (model / "model.safetensors").stat().st_size
    trained = AutoModelForCausalLM.from_pretrained(model)
    trained.lm_head.weight *= 1.7
    trained.save_pretrained(model)
    assert (model / "model.safetensors").stat().st_size == size
    succeeds(*asked, "out")
    succeeds(*asked, "fresh")
    after = results(folder)["records"][0]["loss_by_length"]
    assert after == json.loads((folder / "fresh" / "results.json").read_text())["records"][0]["loss_by_length"]
    assert after != before


@pytest.mark.slow
def test_tasks_of_ruler_are_asked_and_what_was_written_is_told(succeeds: Run, folder: Path, model: Path) -> None:
    """Random weights know nothing: it is said what they wrote, what was not asked, and that nothing was cut."""
    (model / "chat_template.jinja").write_text("{{ messages }}")
    asked = "evaluate model --lengths 64,500 --windows 1 --keys 0 --with own,nope -o out"
    done = succeeds(f"{asked} --tasks niah_single_1,fwe --rows 2")
    found = results(folder)
    assert found["settings"]["text"]["chat_template"] is True
    cells = {(each["task"], each["length"]): each for each in found["records"][0]["ruler"]}
    assert [*cells] == [("niah_single_1", 64), ("niah_single_1", 500), ("fwe", 64), ("fwe", 500)]
    assert {cell: each["asked"] for cell, each in cells.items()} == {
        ("niah_single_1", 64): 0, ("niah_single_1", 500): 2, ("fwe", 64): 0, ("fwe", 500): 0
    }  # fmt: skip
    cell = cells["niah_single_1", 500]
    assert cell["score"] == 0
    assert all(250 < tokens <= 500 - 128 for tokens in cell["tokens"])
    said, number = " ".join(done.stdout.split()), cell["first"]["expected"][0]
    low, high = min(cell["tokens"]), max(cell["tokens"])
    assert "fwe at 500 tokens was not measured: its shortest row would have to be cut." in said
    assert f"niah_single_1 at 500 tokens, rows of {low} to {high}, read without cuts: own 0.00, nope 0.00." in said
    assert re.search(
        rf"own wrote .+ there, expected {number}\. nope wrote .+ there, expected {number}\.", said.replace("· ", "")
    )
    assert "The model has a chat template. It was not used" in said
    page = (folder / "out" / "report.html").read_text()
    assert "--tasks niah_single_1,fwe --rows 2" in re.sub("</?span>", "", page)
    assert "0.00 of 2" in page


test_what_cannot_be_measured_is_refused = refused(
    "evaluate model",
    ("--tasks niah_single", "niah_single_1"),
    ("--tasks vt --rows 0", "--rows"),
    ("--with longrope", "longrope:4"),
    ("--with self-extend:many", "self-extend:4"),
    ("--with self-extend:2.5", "expected a whole number"),
    ("--with self-extend:inf", "self-extend:4"),
    ("--with rerope:4", "rerope takes no number"),
    ("--with dual-chunk:2", "dual-chunk takes no number"),
    ("--with nope:3", "nope takes no number"),
    ("--with yarn", "yarn:4"),
    ("--with yarrn:4", "'yarrn'"),
    ("--lengths 1", "--lengths"),
    ("--device tpu", "finds on this machine: cpu"),
    ("--lengths 1000000", "too short for a window of 1,000,000"),
    fixtures=["model"],
)


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ({"vocab_size": 17}, ", but its config.json states (17, "),
        ({"num_attention_heads": 5}, "is not a multiple of the number of attention heads (5)"),
    ],
)
def test_a_configuration_that_lies_is_named(complains: Complains, model: Path, lie: dict[str, Any], said: str) -> None:
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | lie))
    assert said in complains("evaluate model --with own --lengths 16")


def test_what_a_model_is_not_for_is_said_before_anything_is_measured(complains: Complains, model: Path) -> None:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    vocab_size = locant.Tokenizer.load(str(model)).vocab_size
    GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, **sizes)).save_pretrained(model.with_name("gpt2"))
    shutil.copy(model / "tokenizer.json", model.with_name("gpt2"))
    said = complains("evaluate gpt2 --lengths 16")
    assert "got exact for GPT2LMHeadModel, which has no rotary positions; try: --with own,nope" in said
    config = model / "config.json"
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}
    config.write_text(json.dumps(json.loads(config.read_text()) | rope))
    assert "got 0.0 for base" in complains("evaluate model --lengths 16 --with own,exact")


def test_an_interval_knows_that_neighbours_are_alike() -> None:
    """Four levels in runs of 16: as independent numbers their mean would look four times as sure."""
    runs = [*np.repeat([1.0, 2.0, 3.0, 4.0], 16)]
    mixed = [*np.tile([1.0, 2.0, 3.0, 4.0], 16)]
    wide, narrow = (interval_of_mean(values) for values in (runs, mixed))
    assert wide is not None
    assert narrow is not None
    assert wide[0] < narrow[0] <= 2.5 <= narrow[1] < wide[1]
    for count in range(2, 12):  # the interval is around the mean, also of few windows
        low, high = interval_of_mean([*range(count)])
        assert low < (count - 1) / 2 < high
    assert interval_of_mean([1.0]) is None
    assert interval_of_mean([1.0, float("nan")]) is None


def test_keys_are_asked_for_at_each_depth_in_rows_of_ruler(
    succeeds: Run, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a model that remembers what stands in the first half of a row, if it is a pass key."""

    def written(_: object, tokenizer: locant.Tokenizer, prompt: Prompt) -> str:
        text = tokenizer.decode(prompt.ids)
        if prompt.answers == ("no two tokens spell this",):  # the trial before anything is measured
            return ""
        assert prompt.most == len(tokenizer.encode(f" {prompt.answers[0]}")), "the number at once"
        is_near = text.index(prompt.answers[0]) < len(text) / 2
        return f" {prompt.answers[0]}." if is_near and FILLER in text else " the grass"

    monkeypatch.setattr(evaluation.ruler, "write_answer", written)
    done = succeeds("evaluate model text.txt --with own --lengths '64, 600' --windows 1 --keys 2 -o out")
    record = results(folder)["records"][0]
    for name, near in (("pass_keys", 2), ("key_values", 0)):
        cells = [(each["length"], each["depth"], each["asked"], each["recalled"]) for each in record[name]]
        assert [cell[:2] for cell in cells] == [(at, depth) for at in (64, 600) for depth in evaluation.DEPTHS]
        assert [cell[2:] for cell in cells[:5]] == [(0, 0)] * 5
        assert [cell[2:] for cell in cells[5:] if cell[1] != 0.5] == [(2, near)] * 2 + [(2, 0)] * 2
    assert record["ruler"] == []
    assert "Values of keys recalled, of 10: own 0." in " ".join(done.stdout.split())
    assert "At 64 tokens, not all pass keys were asked for" in " ".join(done.stdout.split())
    assert "<td>75%</td>" in (folder / "out" / "report.html").read_text()


def test_minutes_decide_how_many_windows_once(
    succeeds: Run, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("evaluate", "model", "--lengths", 16, "--with", "own", "--keys", 0, "-o", "out", "--json", "--minutes")
    monkeypatch.setattr("locant.report.evaluation.write_evaluation", lambda results, folder: folder / "report.html")
    succeeds(*asked, 1e-9)
    assert results(folder)["settings"]["text"]["windows"] == 1, "one at least"
    monkeypatch.setattr(evaluation, "_windows_in_time", lambda *given: 3)
    succeeds(*asked, 1e-9)
    assert results(folder)["settings"]["text"]["windows"] == 1, "as it was decided"
    succeeds(*asked, 1.0)
    assert len(results(folder)["records"][0]["loss_by_window"]["16"]) == 3
