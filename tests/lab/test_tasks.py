"""Every task against an answer found in another way, from the tokens of its prompt alone."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from locant import RangeError
from locant.lab import Settings, tasks
from locant.lab.tasks import OWN, TASKS, Row, Task, task
from tests.refusal import refuses
from tests.registries import restore

SEEDS, LENGTHS = st.integers(0, 2**31), st.integers(1, 40)


def number(digits: list[int]) -> int:
    return int("".join(map(str, reversed(digits))))


def copied(row: Row) -> None:
    assert row.prompt == [*row.answer, 16]


def reversed_(row: Row) -> None:
    assert [16, *row.answer] == row.prompt[::-1]


def sorted_(row: Row) -> None:
    assert all(a <= b for a, b in zip(row.answer, row.answer[1:], strict=False))
    assert all(row.answer.count(symbol) == row.prompt.count(symbol) for symbol in range(16))


def added(row: Row) -> None:
    plus, equals = row.prompt.index(10), row.prompt.index(11)
    first, second = row.prompt[:plus], row.prompt[plus + 1 : equals]
    assert len(first) == len(second) == len(row.answer) - 1
    assert equals == len(row.prompt) - 1
    assert number(first) + number(second) == number(row.answer)


def added_with_hints(row: Row) -> None:
    plus = row.prompt.index(10)
    numbers = [row.prompt[:plus], row.prompt[plus + 1 : -1], row.answer]
    for hinted in numbers:
        assert hinted[::2] == [*range(row.prompt[0], row.prompt[0] + len(hinted) // 2)]
        assert max(hinted[::2]) < 12 + 64
    added(Row([*numbers[0][1::2], 10, *numbers[1][1::2], 11], numbers[2][1::2]))


def odd(row: Row) -> None:
    parity = 0
    for bit, said in zip(row.prompt[:-1], row.answer, strict=True):
        parity ^= bit
        assert said == parity


def recalled(row: Row) -> None:
    told = dict(zip(row.prompt[:-1:2], row.prompt[1:-1:2], strict=True))
    asked = dict(zip(row.answer[::2], row.answer[1::2], strict=True))
    assert told == asked
    assert len(told) == len(row.answer) // 2
    assert row.counts == [place % 2 == 1 for place in range(len(row.answer))]


def found(row: Row) -> None:
    mark = row.prompt.index(16)
    assert row.prompt[mark + 1 : mark + 5] == row.answer
    assert row.prompt.count(16) == 2
    assert row.prompt[-1] == 16


def looked_up(row: Row) -> None:
    items, steps = row.prompt[:-1], [row.answer[place : place + 3] for place in range(0, len(row.answer), 3)]
    assert sorted(symbol for symbol, _, _ in steps) == sorted(items)
    for symbol, offset, there in steps:
        assert items[items.index(symbol) + offset - 67] == there
        assert -3 <= offset - 67 <= 3
        assert items.index(symbol) + offset - 67 >= 0
    assert row.counts == [False, False, True] * len(items)


def remembered(row: Row) -> None:
    assert row.counts is not None
    said, memory = row.answer, row.prompt[1]
    for place in range(0, len(said), 2):
        memory = said[place + 1] if said[place] == 2 else memory
        assert row.counts[place : place + 2] == [False, said[place] == 4]
        assert said[place] != 4 or said[place + 1] == memory
    assert said[-2] == 4


def closed(row: Row) -> None:
    """By striking out pairs until none is left."""
    text = "".join("([{<)]}>"[token] for token in (*row.prompt[:-1], *row.answer))
    while (shorter := text.replace("()", "").replace("[]", "").replace("{}", "").replace("<>", "")) != text:
        text = shorter
    assert not text
    assert min(row.answer) >= 4


def done(row: Row) -> None:
    """Verbs are 0 to 3; then: no turn, left, right, once, twice, thrice, and, end."""
    answer = list(row.answer)
    for place in range(0, len(row.prompt), 4):
        verb, turn, times, behind = row.prompt[place : place + 4]
        step = [verb] if turn == 4 else [turn, verb]
        for _ in range({7: 1, 8: 2, 9: 3}[times]):
            assert answer[: len(step)] == step
            del answer[: len(step)]
        assert behind == (11 if place + 4 == len(row.prompt) else 10)
    assert not answer


def counted(row: Row) -> None:
    first, last, _ = row.prompt
    assert row.answer == [*range(first, last + 1)]


ORACLES: dict[str, Callable[[Row], None]] = {
    "copy": copied, "reverse": reversed_, "sort": sorted_, "addition": added, "addition_hints": added_with_hints,
    "parity": odd, "mqar": recalled, "pass_key": found, "indexing": looked_up, "flip_flop": remembered,
    "brackets": closed, "scan": done, "counting": counted,
}  # fmt: skip

ITEMS: dict[str, Callable[[Row], int]] = {
    "addition": lambda row: row.prompt.index(10), "addition_hints": lambda row: row.prompt.index(10) // 2,
    "mqar": lambda row: (len(row.prompt) - 1) // 2, "pass_key": lambda row: len(row.prompt) - 6,
    "flip_flop": lambda row: len(row.answer) // 2, "scan": lambda row: len(row.prompt) // 4,
    "counting": lambda row: len(row.answer),
}  # fmt: skip
"""How many items a row has; else as many as its prompt has tokens but for the mark behind them."""


def test_every_task_has_an_oracle() -> None:
    assert [*ORACLES] == [*OWN]


@pytest.mark.parametrize("name", OWN)
@given(seed=SEEDS, length=LENGTHS)
def test_answers_follow_from_prompts(name: str, seed: int, length: int) -> None:
    its = task(name)
    row = its.row(Random(seed), length)
    ORACLES[name](row)
    assert ITEMS.get(name, lambda row: len(row.prompt) - 1)(row) == length
    assert {*row.prompt, *row.answer} <= {*range(its.vocab_size)}
    assert row == its.row(Random(seed), length), "the same random numbers make the same row"


@pytest.mark.parametrize("name", OWN)
def test_rows_differ_and_all_tokens_occur(name: str) -> None:
    random, its = Random(0), task(name)
    rows = [its.row(random, 12) for _ in range(300)]
    assert len({(*row.prompt, *row.answer) for row in rows}) > 40
    assert {token for row in rows for token in (*row.prompt, *row.answer)} == {*range(its.vocab_size)}


@pytest.mark.parametrize("name", OWN)
def test_lengths_that_there_are_no_rows_of_are_refused(name: str) -> None:
    its = task(name)
    with refuses(RangeError, "length", "1 or more"):
        its.row(Random(0), 0)
    if its.longest is not None:
        ORACLES[name](its.row(Random(0), its.longest))
        with refuses(RangeError, "length", f"at most {its.longest}"):
            its.row(Random(0), its.longest + 1)
        tasks.require_longer(name, its.longest)
        with refuses(RangeError, name, f"longer than {its.longest}", f"task_length={its.longest // 4}"):
            tasks.require_longer(name, its.longest + 1)


class Two(Task):
    """Always the same row, which a test may spoil."""

    made = Row([0], [1])

    @property
    def vocab_size(self) -> int:
        return 2

    def make(self, random: Random, length: int) -> Row:
        return self.made


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (Row([], [1]), ("without a prompt",)),
        (Row([0], []), ("counts",)),
        (Row([0], [1], [False]), ("counts",)),
        (Row([0], [1], [True, True]), ("counts",)),
        (Row([0], [2]), ("outside of 0 to 1",)),
        (Row([-1], [1]), ("outside of 0 to 1",)),
    ],
    ids=str,
)
def test_a_task_of_others_is_checked_when_it_is_registered(
    monkeypatch: pytest.MonkeyPatch, made: Row, words: tuple[str, ...]
) -> None:
    restore(TASKS, monkeypatch)
    TASKS.register("two", Two())
    assert task("TWO").row(Random(0), 5) == Row([0], [1])
    spoiled = type("Spoiled", (Two,), {"made": made})()
    with refuses(RangeError, "spoiled", *words):
        TASKS.register("spoiled", spoiled)
    with refuses(RangeError, "expected a Task"):
        TASKS.register("class", Two)  # type: ignore[arg-type]


@pytest.mark.parametrize(("length", "there"), [(50, True), (51, True), (52, False), (63, False)])
def test_the_first_length_beyond_the_trained_one_has_rows(length: int, there: bool) -> None:
    """Counting has 64 numbers, and 1.25 times 52 are 65."""
    if there:
        assert max(Settings(tasks=("counting",), task_length=length).task_lengths) > length
        return
    with refuses(RangeError, "counting", "longer than 64"):
        Settings(tasks=("counting",), task_length=length)
