"""`locant compare`, as it is typed, with models that train in a moment."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import locant
from locant.lab import Settings, comparison
from locant.positions.registry import ENCODINGS
from locant.report import comparison as terminal
from locant.report.commands import command
from locant.report.comparison import Screen
from tests.cli.conftest import Complains, Run, listing, refused
from tests.registries import restore

pytest.importorskip("matplotlib", reason="pictures need the extra `lab`")

SMALL = "compare text.txt --tokenizer bytes --train-length 4 --multiples 1,2 --batch 2 --d-model 8 --num-layers 1"
TINY = f"{SMALL} --num-heads 2 --steps 2"
FILES = ["loss_by_length.png", "loss_by_position.png", "report.html", "results.json"]


@pytest.fixture
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pictures and page, for what they have no part in."""
    monkeypatch.setattr(terminal, "write_report", lambda results, folder: folder / "report.html")


def records(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "results.json").read_text())["records"]


def test_it_leaves_results_pictures_and_a_page_and_the_command_asks_for_the_same_again(
    run: Run, succeeds: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = succeeds(f"{TINY} --encodings alibi,nope --seeds 3,5 -o out")
    assert sorted(path.name for path in (folder / "out").iterdir()) == FILES
    assert result.stdout.splitlines()[-1] == "Report: out/report.html"
    assert "Loss (nats per token)" in result.stdout
    told = re.findall(r"(?m)^(?:alibi|nope) +seed [35] +train: \d\.\d{3} +4: \d\.\d{3} +8: ", result.stderr)
    assert len(told) == 4
    before, _, _ = result.stderr.partition("alibi ")
    counted = json.loads((folder / "out" / "results.json").read_text())["settings"]["text"]["unigram_loss"]
    assert f"a unigram count (how often each token is in the training text) has a loss of {counted:.3f} there" in before
    assert re.search(r"(?m)^this takes about \d+ s$", before)
    assert f"unigram  {counted:.3f}" in re.sub(" +", "  ", result.stdout)

    results = json.loads((folder / "out" / "results.json").read_text())
    assert set(results) == {"schema", "settings", "environment", "records"}
    made = [(record["encoding"], record["seed"], record["train_length"]) for record in results["records"]]
    assert made == [("alibi", 3, 4), ("nope", 3, 4), ("alibi", 5, 4), ("nope", 5, 4)]
    for record in results["records"]:
        assert set(record["loss_by_length"]) == {"4", "8"}
        assert len(record["loss_by_position"]) == 8
    assert results["settings"]["d_model"] == 8
    assert results["settings"]["text"]["files"] == ["text.txt"]
    assert results["settings"]["text"]["tokens"] == len((folder / "text.txt").read_bytes())
    assert "torch" in results["environment"]

    words = shlex.split(command(results["settings"]))
    assert words[:2] == ["locant", "compare"]
    monkeypatch.setattr(terminal, "write_report", lambda results, folder: folder / "report.html")
    again = run(*words[1:], "--json", "-o", "two")
    printed = json.loads(again.stdout)
    assert printed.pop("report") == "two/report.html"
    assert printed == json.loads((folder / "two" / "results.json").read_text())
    assert printed["settings"] == results["settings"]
    losses = [[record["loss_by_length"] for record in each["records"]] for each in (results, printed)]
    assert losses[0] == losses[1]


def test_defaults_are_those_of_the_lab(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Settings] = []

    def note(ids: object, vocab_size: int, settings: Settings, **_: object) -> None:
        asked.append(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "compare", note)
    (folder / "long.txt").write_text("".join(chr(97 + n * n % 26) + " " * (n % 7 == 0) for n in range(40_000)))
    run("compare long.txt --tokenizer bytes")
    assert asked == [Settings()]


@pytest.mark.usefixtures("_undrawn")
def test_minutes_choose_the_steps(succeeds: Run, folder: Path) -> None:
    succeeds(f"{SMALL} --num-heads 2 --encodings nope --seeds 0 --minutes 0.005 -o out")
    assert json.loads((folder / "out" / "results.json").read_text())["settings"]["minutes"] == 0.005


@pytest.mark.usefixtures("_undrawn")
def test_an_earlier_report_is_replaced_and_other_things_are_not(
    succeeds: Run, folder: Path, complains: Complains
) -> None:
    line = f"{TINY} --encodings nope --seeds 0 -o out"
    succeeds(line)
    (folder / "out" / "notes.txt").write_text("mine")
    assert "out holds 1 record of this comparison, which are not measured again" in succeeds(line).stderr
    assert "holds an earlier report, which is overwritten" in succeeds(line, "--batch", 3).stderr
    assert (folder / "out" / "notes.txt").read_text() == "mine"
    (folder / "out" / "results.json").unlink()
    assert "holds other things than a report" in complains(line)
    succeeds(line, "--force")
    assert (folder / "out" / "notes.txt").read_text() == "mine"


def test_ctrl_c_keeps_a_report_of_what_was_finished(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Screen.advance

    def interrupt(screen: Screen, progress: comparison.Progress) -> None:
        real(screen, progress)
        if progress.training.encoding == "alibi":
            raise KeyboardInterrupt

    monkeypatch.setattr(Screen, "advance", interrupt)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # one after the other
    result = run(f"{TINY} --encodings nope,alibi --seeds 0 -o out")
    assert result.exit_code == 130
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1] == "locant: interrupted"
    assert "report of the finished part: out/report.html" in result.stderr
    assert sorted(path.name for path in (folder / "out").iterdir()) == FILES
    assert len(records(folder / "out")) == 1


def test_ctrl_c_before_the_first_result_leaves_nothing(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(screen: Screen, progress: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Screen, "advance", interrupt)
    before = listing(folder)
    result = run(f"{TINY} --encodings nope -o deep/out")
    assert result.exit_code == 130
    assert listing(folder) == before


@pytest.fixture
def _untrained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "folder").mkdir()
    (folder / "folder" / "mine.txt").write_text("mine")
    monkeypatch.setattr(Screen, "advance", lambda *_: pytest.fail("a training began"))


test_wrong_input_is_one_line_before_any_training = refused(
    "compare",
    ("text.txt --encodings rotary,alibbi", "'alibi'"),
    ("text.txt --encodings ,", "expected one or more"),
    ("text.txt --seeds 0,x", "'0,x' is not a list of numbers such as 0,1,2"),
    ("text.txt --steps 0", "0 is not in the range"),
    ("text.txt --train-length 0", "0 is not in the range"),
    ("text.txt --minutes 0", "0.0 is not in the range x>0"),
    ("text.txt --minutes 1 --steps 5", "got both steps and minutes; try: use --steps or --minutes alone"),
    ("--suite v1 --steps 3", "got 3 for what the suite v1 fixes; try: use no --steps, or no suite"),
    ("--suite v1 --seeds 0,1", "got (0, 1) for what the suite v1 fixes; try: use --seeds 0,1,2, or no suite"),
    ("text.txt --suite v1", "got a text or a tokenizer for the suite v1"),
    ("text.txt --multiples 0,1", "expected an integer of 1 or more"),
    ("missing.txt", "there is no such file"),
    ("text.txt -o text.txt", "text.txt, which is a file"),
    ("text.txt -o text.txt/out", "cannot make text.txt/out"),
    ("text.txt -o folder", "holds other things than a report"),
    fixtures=["_untrained"],
)


def test_a_text_too_short_for_the_lengths_leaves_nothing(run: Run, folder: Path) -> None:
    before = listing(folder)
    result = run("compare text.txt --train-length 4000 -o out")
    assert result.exit_code == 2
    assert "too short to hold out a window of 32000; try: " in result.stderr.splitlines()[-1]
    assert listing(folder) == before


@pytest.mark.usefixtures("_undrawn")
def test_little_text_is_said_before_and_after(succeeds: Run, folder: Path) -> None:
    """1 920 bytes: 192 held out, which are 6 windows of 32."""
    tiny = ("--tokenizer", "bytes", "--train-length", 16, "--multiples", "1,2", "--d-model", 8, "--num-heads", 2)
    few = ("--num-layers", 1, "--batch", 256, "--encodings", "alibi,nope", "--seeds", 0)
    result = succeeds("compare text.txt", *tiny, *few, "-o", "out")
    assert "on 1,728 tokens, in windows of 16 (6 steps each, 14.2 epochs)" in result.stderr
    assert "on the last 192 tokens, in windows: 12 of 16, 6 of 32" in result.stderr
    assert "There is not enough text for 32 tokens: 6 windows of 32" in " ".join(result.stdout.split())
    settings = json.loads((folder / "out" / "results.json").read_text())["settings"]
    assert {record["steps"] for record in records(folder / "out")} == {6}
    assert (settings["text"]["train_tokens"], settings["text"]["held_out_tokens"]) == (1728, 192)


@pytest.mark.usefixtures("_undrawn")
def test_an_encoding_that_somebody_registered_takes_part(
    succeeds: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore(ENCODINGS, monkeypatch)
    locant.register_encoding("test_of_compare", type("Mine", (locant.Sinusoidal,), {}), aliases=("mine",))
    succeeds(f"{TINY} --encodings nope,mine --seeds 0 -o out")
    assert records(folder / "out")[1]["encoding"] == "test_of_compare"


@pytest.mark.usefixtures("_undrawn")
def test_tasks_are_compared_without_a_text_and_the_command_asks_for_the_same_again(
    run: Run, succeeds: Run, folder: Path
) -> None:
    line = "compare --tasks copy --encodings nope,rotary@randomized --task-length 2 --seeds 0 --batch 4 --d-model 8"
    result = succeeds(f"{line} --num-layers 1 --num-heads 2 --steps 3 -o out")
    assert "training 2 encodings with 1 seed on copy\nrows of 1 to 2 items, measured up to 8\n" in result.stderr
    assert re.search(r"(?m)^this takes at most about \d+ s$", result.stderr)
    assert len(re.findall(r"(?m)^copy +\S+ +seed 0 +did not learn +1: \d", result.stderr)) == 2
    assert result.stdout.startswith("Effective length (items)")
    first = json.loads((folder / "out" / "results.json").read_text())
    again = json.loads(run(*shlex.split(command(first["settings"]))[1:], "--json", "-o", "two").stdout)
    for results in (first, again):
        for record in results["records"]:
            del record["seconds"]
    assert {**again, "report": 0} == {**first, "report": 0}


def test_a_size_is_what_is_not_given_otherwise(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Settings] = []
    monkeypatch.setattr(comparison, "compare", lambda ids, size, settings, **_: asked.append(settings) or 1 / 0)
    for words in ("--size small", "--size small --num-layers 1", "--size tiny"):
        run(f"compare --tasks copy {words}")
    tasks = {"tasks": ("copy",)}
    assert asked == [
        Settings(**tasks, d_model=192, num_layers=4, num_heads=6),
        Settings(**tasks, d_model=192, num_layers=1, num_heads=6),
        Settings(**tasks),
    ]
