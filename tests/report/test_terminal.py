"""What is printed fits the terminal, is never cut short, and is plain text where no terminal is."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest

from locant.embedding.flow import Plan, embed
from locant.files import json_text
from locant.lab.comparison import Progress
from locant.lab.results import Results, ResultsFolder
from locant.lab.settings import Settings
from locant.lab.training import Training
from locant.report import console
from locant.report.comparison import Screen, print_losses, record_line
from locant.report.console import out
from locant.report.embedding import print_flow
from locant.report.evaluation import print_evaluation
from locant.report.listing import encoding_facts, facts_of_all, print_all, print_encoding
from locant.report.tasks import print_tasks
from locant.text.corpus import read_corpus
from tests.lab.fabricated import THE_FIELD, evaluation_results, results, task_results

WIDTHS = (60, 80, 160)
LONG = "learned@randomized"
STRETCHES = [{length: [3.0] * 16 for length in (64, 128, 256, 512)}] * 2
TASKS = ("copy", "mqar", "pass_key", "flip_flop")
SHARES = [{"6": 1.0, "12": 1.0, "24": 1.0}, {"6": 0.1, "12": 0.1, "24": 0.1}, {"6": 0.1, "12": 0.1, "24": 0.1}]


def flow(text: str = "cat :smile: [bold]x[/bold] sat\n", **options: object) -> None:
    path = Path("text.txt")
    path.write_text(text)
    usual = {"encoding": "learned", "d_model": 256, "num_heads": 4, "context": 4, "batch": 8, "seed": 0}
    print_flow(
        embed(read_corpus([str(path)], tokenizer="bytes", default_vocab_size=300), Plan(**{**usual, **options})).flow
    )


PRINTED: dict[str, Callable[[], None]] = {
    "list": lambda: print_all(facts_of_all()[0]),
    "list rotary": lambda: print_encoding(encoding_facts("rotary")),
    "embed": flow,
    "compare": lambda: print_losses(results()),
    "compare with full context": lambda: print_losses(results({LONG: [(3.0,) * 4] * 2}, stretches={LONG: STRETCHES})),
    "compare tasks": lambda: print_tasks(task_results(dict.fromkeys(itertools.product(TASKS, (LONG, "fox")), SHARES))),
    "evaluate": lambda: print_evaluation(evaluation_results()),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: Callable[[], None], width: int
) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    what()
    return capsys.readouterr().out


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PRINTED)
def test_it_fits_the_width_uncut_and_without_colours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, width: int
) -> None:
    text = printed(monkeypatch, capsys, PRINTED[name], width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "\x1b" not in text


@pytest.mark.parametrize(("width", "same"), [(0, 80), (1, 60), (20, 60)])
@pytest.mark.parametrize("name", PRINTED)
def test_no_width_hides_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, width: int, same: int
) -> None:
    text = printed(monkeypatch, capsys, PRINTED[name], width)
    assert text == printed(monkeypatch, capsys, PRINTED[name], same) != ""


@pytest.mark.parametrize("width", WIDTHS)
def test_the_list_says_everything_of_every_encoding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    words = printed(monkeypatch, capsys, PRINTED["list"], width).split()
    for fact in facts_of_all()[0]:
        for value in (value for name, value in fact.items() if name != "sizes"):
            assert {*", ".join([value] if isinstance(value, str) else value).split()} <= {*words}


@pytest.mark.parametrize("width", WIDTHS)
def test_the_losses_are_all_there_best_first_with_a_star_for_the_best(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    text = printed(monkeypatch, capsys, PRINTED["compare"], width)
    table = text.partition("\n\n")[0]
    for mean in ("3.620", "3.830", "3.510", "6.800", "3.520"):
        assert mean in table
    assert table.count("*") == 6, "alibi and nope, from 128 on"
    assert len(re.findall(r"±\d\.\d{3}", table)) == 12  # no number is torn from its sign
    first = [line.split()[0] for line in table.splitlines() if line.split()[0] in THE_FIELD]
    assert first == ["alibi", "nope", "sinusoidal"]


def test_a_star_stands_only_where_a_difference_is_clear_and_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    losses: dict[str, list[tuple[float, float]]] = {"a": [(2.0, 2.0)], "b": [(3.0, 3.0)]}
    legend = "* the lowest value in its column, and values not clearly different from it"
    for windows, stars in ((9, 0), (10, 2)):
        print_losses(results(losses, (8, 16), windows={name: [0.0] * windows for name in losses}))
        text = capsys.readouterr().out
        assert (text.replace(legend, "").count("*"), legend in text) == (stars, stars > 0)


def test_the_counts_stand_below_the_losses(capsys: pytest.CaptureFixture[str]) -> None:
    print_losses(results(unigram_loss=5.3912, bigram_loss=4.2))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["unigram", *["5.391"] * 4] in lines
    assert ["bigram", *["4.200"] * 4] in lines


def test_losses_with_full_context_stand_below_those_without(capsys: pytest.CaptureFixture[str]) -> None:
    losses = {"a": [(3.0,) * 4] * 2, "b": [(3.1,) * 4] * 2}
    stretches = {"a": [{64: [3.0] * 16, 512: [2.9] * 16}] * 2, "b": [{64: [3.0] * 16, 512: [3.0] * 16}] * 2}
    print_losses(results(losses, stretches=stretches))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["encoding", "64", "512", "difference"] in lines
    assert ["a", "3.000", "2.900", "-0.100"] in lines
    assert ["b", "3.000", "3.000", "0.000", "(not", "clear)"] in lines


def test_text_is_printed_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flow("[b]")
    assert "[1, 4] → [1, 4, 256] + [4, 256] → [1, 4, 256]" in capsys.readouterr().out
    out().print("[bold]x[/bold] :smile: 1")
    assert capsys.readouterr().out == "[bold]x[/bold] :smile: 1\n"


def test_the_other_doors_say_what_they_give(capsys: pytest.CaptureFixture[str]) -> None:
    for encoding, words in (
        ("rotary", "rotates queries and keys, by cos and sin of shape [4, 32]"),
        ("alibi", "adds a bias of shape [4, 4, 4] (heads, queries, keys)"),
        ("t5", "adds a bias of shape [4, 4, 4]"),
        ("nope", "only through the causal mask"),
    ):
        flow(encoding=encoding)
        assert words in " ".join(capsys.readouterr().out.split())


def test_colours_come_with_a_terminal_and_go_with_no_color(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    PRINTED["compare"]()
    assert "\x1b[1;32m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    PRINTED["compare"]()
    assert "\x1b[1;32m" not in capsys.readouterr().out


def test_a_line_for_a_training_has_every_length() -> None:
    line = record_line(results({"a": [(2.0, None)]}, (8, 16))["records"][0])
    assert line.split() == ["a", "seed", "0", "train:", "2.000", "8:", "2.000", "16:", "–", "2", "s"]


@pytest.mark.parametrize(
    "value", [results(), facts_of_all()[0], {}, [], {"a": {"b": {"c": {"d": "é\ud800"}}}}, [[[[1]]]]]
)
def test_json_for_people_is_json_for_programs(value: object) -> None:
    text = json_text(value)
    assert json.loads(text) == value
    assert text.isascii()
    assert text.endswith("\n")


class Bar:
    """What `tqdm` does, written down."""

    made: ClassVar[list[Bar]] = []

    def __init__(self, total: int | None = None, **look: Any) -> None:
        self.total, self.n, self.words, self.is_open = total, 0, "", True
        self.made.append(self)

    def set_description(self, words: str, *, refresh: bool) -> None:
        self.words = words

    def update(self, steps: int = 1) -> None:
        self.n += steps

    def close(self) -> None:
        self.is_open = False

    external_write_mode = staticmethod(nullcontext)


def test_every_training_has_a_line_with_its_steps_until_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqdm.tqdm", Bar)
    monkeypatch.setattr(Bar, "made", [])
    names = ("alibi", "rotary", "rotary+ntk")
    screen = Screen()
    screen.plan(Results(settings=Settings(tasks=("copy",), encodings=names, seeds=(3,), num_steps=7)), 1.0)
    for done, name in enumerate(("alibi", "rotary", "alibi"), 1):
        screen.advance(Progress(training=Training("copy", name, 3), loss=2.5, done=done, total=14))
    whole, alibi, rotary = Bar.made
    assert [(bar.n, bar.total) for bar in Bar.made] == [(3, 14), (2, 7), (1, 7)]
    assert alibi.words == "copy, alibi, seed 3, loss 2.50"
    record = {"task": "copy", "encoding": "rotary+ntk", "seed": 3, "rate": 1.0, "failed": "ValueError: no"}
    screen.record({"records": [record]})
    screen.record({"records": [record, {**record, "encoding": "rotary"}]})
    assert [bar.is_open for bar in Bar.made] == [True, True, False], "the training of two candidates"
    screen.end({}, ResultsFolder(tmp_path), complete=False)
    assert not any(bar.is_open for bar in (whole, alibi, rotary))


def test_where_no_bar_is_shown_lines_say_how_far_a_run_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "PATIENCE", 0.0)
    with console.progress_bar("window") as progress:
        progress(2, 8, "base 10,000")
        progress(4, 10)
    monkeypatch.setattr(console, "PATIENCE", 60.0)
    with console.progress_bar("window") as progress:
        progress(2, 8)
    assert capsys.readouterr().err.splitlines() == ["window 2 of 8: base 10,000", "window 4 of 10, about 0:00 left"]
