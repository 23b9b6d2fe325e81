"""The Results screen: what a report holds, and a comparison that the page starts, watches and stops."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from locant.errors import InputError, LocantError
from locant.explore.comparison import StepWriter
from locant.explore.screens.results import start
from locant.explore.session import Session, State
from locant.lab import Settings, compare
from locant.lab.comparison import Progress
from locant.lab.summary import summarise
from locant.lab.training import Training
from locant.text import sample_text
from tests.explore.screens import EVALUATED, executed, numbers_of
from tests.lab.fabricated import results as fabricated
from tests.lab.fabricated import task_results
from tests.tolerances import SHORT_SUM

SMALL = {"encodings": "nope, alibi", "steps": "2", "train": "8"}


numbers = partial(numbers_of, "results")


def finished(session: Session, key: str) -> dict[str, Any]:
    while session.comparisons[key].state == "running":
        time.sleep(0.05)
    return numbers(session, report=key)


def reported(folder: Path, name: str, results: dict[str, Any], *, dropped: bool) -> dict[str, Any]:
    """What is shown of a report in a folder, or of its file, dropped on the page."""
    (folder / name).write_text(json.dumps(results))
    session = Session() if dropped else Session.of([str(folder)], [])
    key = session.drop(name, (folder / name).read_bytes()) if dropped else folder.name
    return numbers(session, report=key)


def gives_what_is_drawn(shown: dict[str, Any]) -> None:
    """The Python of a comparison's or an evaluation's pictures gives the losses that they draw."""
    by_length, by_position = (executed(shown, f"loss-by-{by}") for by in ("length", "position"))
    assert list(by_length["losses"]) == list(by_position["losses"]) == [row["name"] for row in shown["rows"]]
    for row in shown["rows"]:
        np.testing.assert_array_equal(by_length["losses"][row["name"]], row["by_length"])
        np.testing.assert_array_equal(by_position["losses"][row["name"]], row["by_position"])
        if "half" in by_length:
            np.testing.assert_array_equal(by_length["intervals"][row["name"]], [row["low"], row["high"]])


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    settings = Settings(encodings=("nope", "alibi"), seeds=(0, 1), num_steps=2, train_length=8, d_model=16)
    results = compare(np.arange(900) % 7, 7, settings).to_dict()
    folder = tmp_path_factory.mktemp("report")
    (folder / "results.json").write_text(json.dumps(results))
    return folder, results


def test_the_losses_of_a_report_are_shown_with_its_intervals(report: tuple[Path, dict[str, Any]]) -> None:
    folder, results = report
    shown = numbers(Session.of([str(folder)], []))
    assert shown["lengths"].tolist() == [8, 16, 32, 64]
    for row in shown["rows"]:
        records = [record for record in results["records"] if record["encoding"] == row["name"]]
        means = [np.mean([record["loss_by_length"][str(n)] for record in records]) for n in (8, 16, 32, 64)]
        np.testing.assert_allclose(row["by_length"], means, **SHORT_SUM)
        places = np.mean([record["loss_by_position"] for record in records], axis=0)
        np.testing.assert_allclose(row["by_position"][30], places[22:38].mean(), **SHORT_SUM)
    assert shown["said"]
    gives_what_is_drawn(shown)
    for each, row in zip(shown["rows"], summarise(results).rows, strict=True):
        half = np.array([row.margin(length) or np.nan for length in (8, 16, 32, 64)])
        np.testing.assert_allclose(each["high"] - each["low"], 2 * half, **SHORT_SUM)
        assert np.isfinite(half).any()


@pytest.mark.parametrize("dropped", [False, True])
def test_an_evaluation_is_shown_with_its_intervals_and_pass_keys(tmp_path: Path, dropped: bool) -> None:
    shown = reported(tmp_path, "results.json", EVALUATED, dropped=dropped)
    own, yarn = shown["rows"]
    np.testing.assert_array_equal([own["low"], own["by_length"], own["high"]], [[1.5, 2.5], [2, 3], [2.5, 3.5]])
    np.testing.assert_array_equal([yarn["low"], yarn["by_length"]], [[2.5, np.nan], [3, np.nan]])
    assert shown["trained"] == 32
    assert any("Nothing was trained" in sentence for sentence in shown["said"])
    for at, keys in enumerate(shown["pass_keys"]):
        assert (keys["lengths"], keys["depths"]) == ([16, 64], [0.0, 1.0])
        np.testing.assert_array_equal(keys["share"], [[np.nan, at / 2]] * 2)
    if not dropped:
        gives_what_is_drawn(shown)
        assert executed(shown, "loss-by-length")["intervals"]["own"] == {"16": [1.5, 2.5], "64": [2.5, 3.5]}
        for at, keys in enumerate(shown["pass_keys"]):
            share = executed(shown, f"pass-keys-{at}")["share"]
            drawn = {(depth, n): keys["share"][row, column] for row, depth in enumerate(keys["depths"])
                     for column, n in enumerate(keys["lengths"])}  # fmt: skip
            assert share == {place: value for place, value in drawn.items() if np.isfinite(value)}


TUNED = {
    "settings": {"way": "yarn:4", "train": "all", "length": 64, "batch_size": 2, "text": {"source": "a text"}},
    "environment": {}, "num_steps": 3, "train_loss": [4.0, 3.5, 3.25], "held_out": [[0, 4.5], [2, 3.75], [3, 3.5]],
    "before": [4.0, 5.0], "before_by_length": {"16": 4.25, "32": 4.375, "64": 4.5}, "swapped": False,
    "after": [3.0, 4.0], "after_by_length": {"16": 3.625, "32": 3.5625, "64": 3.5},
}  # fmt: skip
"""As `locant tune` writes it into the folder of the model."""


@pytest.mark.parametrize("dropped", [False, True])
def test_a_tuning_is_shown_over_steps_and_by_length(tmp_path: Path, dropped: bool) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # a model, too
    shown = reported(tmp_path, "tuning.json", TUNED, dropped=dropped)
    assert {name: curve["steps"].tolist() for name, curve in shown["training"].items()} == {
        "training": [1, 2, 3], "held-out": [0, 2, 3],
    }  # fmt: skip
    assert shown["training"]["held-out"]["losses"].tolist() == [4.5, 3.75, 3.5]
    assert shown["lengths"].tolist() == [16, 32, 64]
    assert [row["by_length"].tolist() for row in shown["rows"]] == [[4.25, 4.375, 4.5], [3.625, 3.5625, 3.5]]
    assert "4.500 before, 3.500 after" in shown["said"][1]
    if not dropped:
        ran = executed(shown, "training")
        assert (ran["training"], [*ran["held_out"].items()]) == ([4.0, 3.5, 3.25], [(0, 4.5), (2, 3.75), (3, 3.5)])
        losses = executed(shown, "loss-by-length")["losses"]
        assert [[*losses[row["name"]].values()] for row in shown["rows"]] == [
            row["by_length"].tolist() for row in shown["rows"]
        ]


def test_a_comparison_on_tasks_says_what_it_found(tmp_path: Path) -> None:
    seeds = [{"12": 1.0, "24": 0.95, "48": 0.0}] * 2
    only, both = task_results({("copy", "alibi"): seeds}), fabricated()
    both["records"] += only["records"]
    said = "copy: alibi is right up to 24 items, 2 times the trained length."
    for name in ("tasks", "both"):
        (tmp_path / name).mkdir()
    shown = reported(tmp_path / "tasks", "results.json", only, dropped=False)
    assert (shown["said"], len(shown["rows"])) == ([said], 0)
    shown = reported(tmp_path / "both", "results.json", both, dropped=False)
    assert (shown["said"][0], len(shown["rows"])) == (said, 3)


def test_a_file_that_was_dropped_on_another_screen_is_not_opened_unasked() -> None:
    session = Session()
    session.drop("config.json", b'{"model_type": "llama"}')
    assert numbers(session)["folder"] == numbers(Session())["folder"] != "config.json"


@pytest.mark.parametrize(
    "content", ["", "[]", '{"held_out": [0]}', '{"records": []}', '{"records": [{}]}', "{" * 100_000]
)
def test_a_folder_that_holds_no_report_is_refused(tmp_path: Path, content: str) -> None:
    if content:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(InputError):
        numbers(Session.of([str(tmp_path)], []))


@pytest.mark.parametrize(
    "wrong", [{"encodings": "nonsense"}, {"encodings": ""}, {"encodings": "nope, nope"}, {"encodings": "mine.py:Mine"}]
)
def test_what_cannot_be_compared_is_said_before_anything_starts(
    wrong: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoding in a file is not run, as a page of anywhere may have made the address."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("open('was run', 'w')")
    with pytest.raises(LocantError):
        start(State({**SMALL, **wrong}), Session())
    assert [file.name for file in tmp_path.iterdir()] == ["mine.py"]


def test_if_no_report_is_given_that_of_the_current_folder_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: tuple[Path, dict[str, Any]]
) -> None:
    """Of ``locant compare``, and of ``make demo``, else what the package has recorded; not beside a report.

    A text or a model is no report: with it the screen is not empty.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("locant.explore.session.RECORDED", (tmp_path / "recorded",))
    assert numbers(Session())["folder"] == ""
    (tmp_path / "recorded").mkdir()
    (tmp_path / "recorded" / "v1-tiny.json").write_text(json.dumps(report[1]))
    shown = numbers(Session())
    assert (shown["folder"], len(shown["rows"])) == ("v1-tiny", 2)
    gives_what_is_drawn(shown)
    for name in ("demo/report", "report"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "results.json").write_text(json.dumps(report[1]))
        shown = numbers(Session())
        assert (shown["folder"], len(shown["rows"])) == (name, 2)
        gives_what_is_drawn(shown)
    (tmp_path / "text.txt").write_text("to be")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "head_dim": 64}')
    for files in (["text.txt"], ["model"], ["text.txt", "model"]):
        shown = numbers(Session.of(files, []))
        assert (shown["folder"], len(shown["rows"])) == ("report", 2)
    assert numbers(Session.of(["text.txt", "demo/report"], []))["folder"] == "report"
    assert Session.of(["text.txt", "demo/report"], []).reports == {"report": Path("demo/report")}


def test_of_a_comparison_that_runs_elsewhere_it_is_said_what_is_missing(
    tmp_path: Path, report: tuple[Path, dict[str, Any]]
) -> None:
    """Its file is written anew after every training: two encodings with two seeds are four."""
    session = Session.of([str(report[0])], [])
    assert numbers(session)["missing"] == 0
    swept = [{**report[1]["records"][0], "seed": 2**31 - 1}]
    for count in (1, 3, 4):
        records = report[1]["records"][:count] + swept
        (tmp_path / "results.json").write_text(json.dumps({**report[1], "records": records}))
        shown = numbers(Session.of([str(tmp_path)], []))
        assert shown["missing"] == 4 - count
        assert shown["rows"]


@pytest.mark.slow
def test_a_comparison_runs_and_its_folder_is_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(sample_text()[:20_000])
    session = Session.of(["text.txt"], [])
    shown = finished(session, start(State(SMALL), session))
    assert shown["state"] == "finished"
    assert {name: len(curve["losses"]) for name, curve in shown["training"].items()} == {
        "nope, seed 0": 2,
        "alibi, seed 0": 2,
    }
    assert [row["name"] for row in shown["rows"]] == ["nope", "alibi"]
    assert (tmp_path / "explore-report-1" / "report.html").is_file()
    ran = executed(shown, "training")["training"]  # the same again
    assert {name: curve["losses"].tolist() for name, curve in shown["training"].items()} == ran
    later = numbers(Session.of([str(tmp_path / "explore-report-1")], []))
    np.testing.assert_array_equal(later["rows"][0]["by_length"], shown["rows"][0]["by_length"])


def test_an_interrupt_that_python_drops_ends_the_next_step() -> None:
    writer = StepWriter()
    with pytest.raises(KeyboardInterrupt):
        writer.interrupt()
    with pytest.raises(KeyboardInterrupt):
        writer.advance(Progress(training=Training("text", "nope", 0), loss=1.0, done=1, total=10))


@pytest.mark.slow
def test_a_comparison_that_is_stopped_says_so_and_leaves_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    session = Session()
    key = start(State({**SMALL, "steps": "2000"}), session)
    while session.comparisons[key].num_steps < 3:
        assert session.comparisons[key].state == "running"
        time.sleep(0.05)
    session.stop(wait=True)
    shown = finished(session, key)
    assert (shown["state"], shown["rows"]) == ("stopped", [])
    assert not (tmp_path / "explore-report-1").exists()
