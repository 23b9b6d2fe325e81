"""Generated tasks in a terminal and on the page."""

from __future__ import annotations

import re

import pytest

from locant.lab.task_summary import scores
from locant.report.comparison import page, print_comparison
from locant.report.tasks import record_line, task_sentences
from tests.lab.fabricated import results, task_results

pytest.importorskip("matplotlib", reason="pictures need the extra `lab`")


def seeds(far: float, trained: float = 1.0, count: int = 2) -> list[dict[str, float]]:
    return [{"6": trained, "12": trained, "24": far, "48": far / 2}] * count


COPY = {"rotary": seeds(0.2), "alibi": seeds(0.95), "<nope>": seeds(0.0, 0.5)}
SORT = {"rotary": seeds(0.3), "alibi": seeds(0.3), "<nope>": [*seeds(0.95), *seeds(0.1, 0.1, 1)]}
PARITY = {name: seeds(0.0, 0.1) for name in COPY}
FIELD = {"copy": COPY, "sort": SORT, "parity": PARITY}
THE_FIELD = {(task, name): its for task, of in FIELD.items() for name, its in of.items()}


def test_sentences_follow_from_the_numbers() -> None:
    assert task_sentences(scores(task_results(THE_FIELD))) == [
        "copy: alibi goes furthest, up to 24 items, 2 times the trained length. <nope> did not learn it.",
        "sort: <nope> goes furthest, up to 24 items, 2 times the trained length.",
        "parity: no encoding learned it, so it allows no comparison.",
    ]


def test_a_tie_and_a_single_seed_are_said() -> None:
    tied = {("copy", "rotary"): seeds(0.95), ("copy", "alibi"): seeds(0.95)}
    [said] = task_sentences(scores(task_results(tied)))
    assert said.endswith("times the trained length, not clearly further than alibi.")
    one = {("copy", "rotary"): seeds(0.95, count=1)}
    assert task_sentences(scores(task_results(one))) == [
        "copy: rotary is right up to 24 items, 2 times the trained length.",
        "One seed was trained, so no difference is clear. Small differences may be chance.",
    ]


def test_the_terminal_shows_effective_lengths_those_that_learned_most_first(capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison(task_results(THE_FIELD))
    lines = [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1:6:1][0] == ["encoding", "copy", "sort", "parity", "rank"]
    assert lines[3:6] == [
        ["alibi", "24", "12", "did not learn", "0.75"],
        ["rotary", "12", "12", "did not learn", "0.50"],
        ["<nope>", "did not learn", "24 (2/3)", "did not learn", "1.00"],
    ]


def test_the_page_has_a_cell_for_each_and_nothing_of_its_text_becomes_markup() -> None:
    html = page(task_results(THE_FIELD))
    assert "<nope>" not in html
    assert html.count('class="grey"') == 4
    assert html.count("color-mix") == 5
    assert "Trained to 12 items, read at more" in html
    assert html.count("<img ") == 1
    assert "Loss by length" not in html
    assert "--steps" not in html


def test_a_text_beside_tasks_has_its_sections_too(capsys: pytest.CaptureFixture[str]) -> None:
    both, of_tasks = results(), task_results(THE_FIELD)
    both["records"] += of_tasks["records"]
    both["settings"] |= {"tasks": ["text", "copy", "sort", "parity"], "task_length": 12}
    html = page(both)
    for name in ("How far each encoding goes", "Task by task", "Loss by length", "The two curves"):
        assert f"<h2>{name}</h2>" in html
    print_comparison(both)
    printed = capsys.readouterr().out
    assert 0 == printed.index("Effective length (items)") < printed.index("Loss (nats per token)")


def test_a_failure_is_told_with_its_reason() -> None:
    failed = {"task": "copy", "encoding": "fire", "seed": 0, "rate": 1.0, "failed": "ValueError: <b>"}
    shown = task_results({("copy", "rotary"): seeds(0.95)})
    shown["records"].append(failed)
    assert record_line(failed) == "copy         fire         seed 0   failed: ValueError: <b>"
    html = page(shown)
    assert 'title="ValueError: &lt;b&gt;">failed</td>' in html
    assert "<b>" not in html


def test_a_line_for_each_training() -> None:
    first, _ = task_results({("copy", "rotary"): seeds(0.95)})["records"]
    right = "6: 1.00  12: 1.00  24: 0.95  48: 0.47"
    assert record_line(first) == f"copy         rotary       seed 0   learned in 700 steps   {right}   2 s"
    assert "did not learn " in record_line({**first, "learned": False})
