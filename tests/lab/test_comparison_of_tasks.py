"""A comparison is a table of trainings: any may be killed, run elsewhere or come later; the numbers are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from locant import InputError, RangeError
from locant.lab import Settings, compare
from locant.lab import training as trainings
from locant.lab.comparison import Watcher, compare_files
from locant.lab.results import Failure, Record, TaskRecord
from locant.lab.training import SWEEP_SEED, Training
from locant.positions.encodings.sinusoidal import Sinusoidal
from locant.positions.registry import ENCODINGS
from tests.lab.fabricated import SMALL, VOCAB, ids
from tests.refusal import refuses
from tests.registries import restore

TASKS = {
    "tasks": ("copy", "mqar"), "encodings": ("alibi", "rotary", "rotary+ntk", "rotary@randomized"), "seeds": (0, 1),
    "task_length": 3, "num_steps": 6, "d_model": 16, "num_layers": 1, "num_heads": 2, "batch_size": 4,
}  # fmt: skip


def timeless(results: dict[str, Any]) -> dict[str, Any]:
    return {**results, "records": [{**record, "seconds": 0} for record in results["records"]]}


def compared(folder: Path, options: dict[str, Any], files: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    text = {"tokenizer": "bytes" if files else None, "vocab_size": None, "download": False}
    return compare_files(
        files, options, folder=folder, force=False, watcher=more.pop("watcher", Watcher()), **text, **more
    )


def test_a_record_of_a_task_says_what_was_right_at_each_length() -> None:
    results = compare(settings=Settings(**TASKS))
    keys = [(record.task, record.encoding, record.seed) for record in results.records]
    assert keys == [(task, name, seed) for seed in (0, 1) for task in TASKS["tasks"] for name in TASKS["encodings"]]
    for record in json.loads(json.dumps(results.to_dict()))["records"]:
        assert (record["train_length"], record["steps"], record["learned"]) == (3, 6, False)
        assert (
            [*record["accuracy_by_length"]] == [*record["token_accuracy_by_length"]] == ["2", "3", "4", "6", "9", "12"]
        )
        shares = [*record["accuracy_by_length"].values(), *record["token_accuracy_by_length"].values()]
        assert all(0 <= share <= 1 for share in shares)
    scaled = {record.encoding: record for record in results.records if (record.task, record.seed) == ("copy", 1)}
    assert scaled["rotary"].train_loss == scaled["rotary+ntk"].train_loss != scaled["rotary@randomized"].train_loss


def test_lengths_without_rows_are_left_out() -> None:
    options = {"tasks": ("mqar",), "encodings": ("nope",), "seeds": (0,), "task_length": 30}
    [record] = compare(settings=Settings(**{**TASKS, **options})).records
    assert isinstance(record, TaskRecord)
    assert [*record.accuracy_by_length] == [15, 30, 38, 45, 60], "and not 90 and 120: there are 64 keys"


def test_a_comparison_without_a_text_asks_for_none_and_one_with_text_and_tasks_does_both() -> None:
    with refuses(InputError, "no text", "tasks="):
        compare(settings=Settings())
    options = {**SMALL, "tasks": ("copy", "text"), "encodings": ("alibi",), "seeds": (0,), "task_length": 2}
    of_task, of_text = compare(ids(), VOCAB, Settings(**options)).records
    assert (type(of_task), type(of_text)) == (TaskRecord, Record)
    assert (
        compare(ids(), VOCAB, Settings(**{**options, "tasks": ("text",)})).records[0].train_loss == of_text.train_loss
    )


def test_finished_trainings_are_not_repeated(tmp_path: Path, trained: list[Training]) -> None:
    first = compared(tmp_path, {**TASKS, "seeds": (0,)})
    assert len(trained) == 2 * 3
    assert timeless(compared(tmp_path, {**TASKS, "seeds": (0,)})) == timeless(first)
    assert len(trained) == 6, "the same again"
    more = compared(tmp_path, {**TASKS, "encodings": ("nope", *TASKS["encodings"])})
    assert {training for training in trained[6:] if training.seed == 0} == {
        ("copy", "nope", 0, 1),
        ("mqar", "nope", 0, 1),
    }
    assert len(trained) == 6 + 2 + 8
    alone = compared(tmp_path / "alone", {**TASKS, "encodings": ("nope", *TASKS["encodings"])})
    assert timeless(more) == timeless(alone)


@pytest.mark.parametrize("change", [{"num_steps": 7}, {"d_model": 8}, {"task_length": 4}, {"rates": (0.5,)}], ids=str)
def test_records_of_other_settings_are_not_used(
    tmp_path: Path, trained: list[Training], change: dict[str, Any]
) -> None:
    options = {**TASKS, "encodings": ("nope",), "seeds": (0,), "tasks": ("copy",)}
    compared(tmp_path, options)
    compared(tmp_path, {**options, **change})
    assert len(trained) == 2


def test_another_text_is_another_comparison(tmp_path: Path, trained: list[Training]) -> None:
    options = {**SMALL, "encodings": ("nope",), "seeds": (0,)}
    for name, text in {"one": "to be or not to be " * 50, "two": "that is the question " * 50}.items():
        (tmp_path / name).write_text(text)
    for name, times in (("one", 1), ("one", 1), ("two", 2)):
        compared(tmp_path / "out", options, files=(str(tmp_path / name),))
        assert len(trained) == times
    (tmp_path / "one").write_text("to be or not to be " * 51)
    compared(tmp_path / "out", options, files=(str(tmp_path / "one"),))
    assert len(trained) == 3


def test_steps_chosen_by_minutes_are_kept(tmp_path: Path, trained: list[Training]) -> None:
    options = {**TASKS, "encodings": ("nope",), "tasks": ("copy",), "minutes": 1e-4}
    del options["num_steps"]
    first = compared(tmp_path, {**options, "seeds": (0,)})
    more = compared(tmp_path, options)
    assert first["settings"]["num_steps"] == more["settings"]["num_steps"]
    assert more["settings"]["minutes"] == 1e-4
    assert len(trained) == 2


def test_a_training_that_fails_is_a_row_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: list[Training]
) -> None:
    restore(ENCODINGS, monkeypatch)

    class Broken(Sinusoidal):
        def embed(self, *given: Any) -> Any:
            raise ValueError("not today")

    ENCODINGS.register("broken_here", Broken)
    options = {**TASKS, "encodings": ("broken_here", "nope", "rotary@coupled"), "tasks": ("copy",), "seeds": (0,)}
    broken, fine, coupled = compared(tmp_path, options)["records"]
    assert broken == {
        "task": "copy",
        "encoding": "broken_here",
        "seed": 0,
        "rate": 1.0,
        "failed": "ValueError: not today",
    }
    assert "accuracy_by_length" in fine
    assert coupled["failed"].startswith("InputError: got rotary@coupled for rows without numbers")
    compared(tmp_path, options)
    assert [training.encoding for training in trained[3:]] == ["broken_here", "rotary@coupled"], (
        "they may not fail again"
    )
    with refuses(InputError, "every training failed", "not today"):
        compare(settings=Settings(**{**options, "encodings": ("broken_here",)}))


def test_the_best_of_several_rates_is_used_and_recorded(
    trained: list[Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this, rotary learns at a rate of 0.5 and ALiBi at 2; it is found on the first task, and holds for all."""
    best = {"rotary": 0.5, "alibi": 2.0}

    def run(training: Training, settings: Settings, text: object, on_step: object) -> list[TaskRecord]:
        trained.append(training)
        right = float(training.rate == best[training.encoding])
        return [
            TaskRecord(
                **training._replace(encoding=candidate.name)._asdict(), train_length=3, learned=True, steps=6,
                accuracy_by_length={3: right}, token_accuracy_by_length={3: right}, train_loss=0.0, num_parameters=1,
                seconds=0.0,
            )
            for candidate in trainings.candidates(training, settings)
        ]  # fmt: skip

    monkeypatch.setattr("locant.lab.pool.run", run)
    settings = Settings(**{**TASKS, "encodings": ("rotary+ntk", "alibi"), "rates": (1.0, 0.5, 2.0)})
    records = compare(settings=settings).records
    sweep, measured = records[: 2 * 3], records[2 * 3 :]
    assert [(each.task, each.encoding, each.seed, each.rate) for each in sweep] == [
        ("copy", name, SWEEP_SEED, rate) for name in ("rotary+ntk", "alibi") for rate in (1.0, 0.5, 2.0)
    ]
    assert [(each.task, each.encoding, each.seed, each.rate) for each in measured] == [
        (task, name, seed, rate)
        for seed in (0, 1)
        for task in ("copy", "mqar")
        for name, rate in (("rotary+ntk", 0.5), ("alibi", 2.0))
    ]
    assert len(trained) == len(records)
    resumed = compare(settings=settings, finished=[each for each in records if not isinstance(each, Failure)])
    assert resumed.records == records
    assert len(trained) == len(records)


def test_records_that_are_no_longer_asked_for_stay_in_the_results(tmp_path: Path, trained: list[Training]) -> None:
    whole = compared(tmp_path / "out", TASKS)
    fewer = {**TASKS, "tasks": ("copy",), "encodings": ("alibi",), "seeds": (1,)}
    again = compared(tmp_path / "out", fewer)
    count = len(trained)
    assert sorted(map(str, timeless(again)["records"])) == sorted(map(str, timeless(whole)["records"]))
    assert {name: sorted(again["settings"][name]) for name in ("tasks", "encodings", "seeds")} == {
        name: sorted(TASKS[name]) for name in ("tasks", "encodings", "seeds")
    }
    assert compared(tmp_path / "out", TASKS) == whole
    assert len(trained) == count


DAMAGE: dict[str, Any] = {
    "no steps": lambda each: each.pop("steps"),
    "an unknown field": lambda each: each.update(other=1),
    "a name that is a list": lambda each: each.update(encoding=["nope"]),
    "a seed that is text": lambda each: each.update(seed="0"),
    "shares that are a list": lambda each: each.update(accuracy_by_length=[1.0]),
    "a length that is no number": lambda each: each.update(accuracy_by_length={"a": 1.0}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_records_are_named_and_not_taken(tmp_path: Path, damage: str) -> None:
    few = {**TASKS, "tasks": ("copy",), "encodings": ("alibi",), "seeds": (0,)}
    results = json.loads(json.dumps(compared(tmp_path / "out", few)))
    DAMAGE[damage](results["records"][0])
    (tmp_path / "out" / "results.json").write_text(json.dumps(results))
    with refuses(InputError, "results.json", "damaged"):
        compared(tmp_path / "out", few)


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"suite": "v1", "seeds": (0, 1)}, {}),
        ({"suite": "v1", "rates": (1.0,)}, {}),
        ({"suite": "v1"}, {"files": ("text.txt",)}),
        ({"suite": "v1"}, {"tokenizer": "bytes"}),
        ({"tasks": ("copy",)}, {"tokenizer": "bytes"}),
        ({"tasks": ("copy",)}, {"files": ("text.txt",)}),
    ],
    ids=str,
)
def test_options_without_effect_are_refused(tmp_path: Path, options: dict[str, Any], more: dict[str, Any]) -> None:
    """Also what a suite fixes, where it is the usual value."""
    text = {"tokenizer": more.get("tokenizer"), "vocab_size": None, "download": False}
    with refuses(InputError if more else RangeError, "got"):
        compare_files(
            more.get("files", ()), {"encodings": ("nope",), **options},
            folder=tmp_path / "out", force=False, watcher=Watcher(), **text,
        )  # fmt: skip
    assert not (tmp_path / "out").exists()
