"""A decoder that learns a task: what it is trained on, when its rate falls, and what counts as right."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch

from locant import InputError
from locant.lab import Decoder, Settings, generate, task_learning
from locant.lab.candidate import Candidate
from locant.lab.task_learning import IGNORED, ROWS, Accuracy, LearningResult, accuracy, batch, learn, measured_rows
from locant.lab.tasks import OWN, Row, Task, task
from locant.lab.text_learning import build
from locant.positions import Positions
from locant.positions.generalizing import abacus, randomized
from tests.refusal import refuses
from tests.tolerances import FEW_ROUNDINGS

LONGEST = 60


def model(name: str = "rotary", its: str = "copy", seed: int = 0) -> tuple[Decoder, Candidate]:
    candidate = Candidate.of(name)
    settings = Settings(d_model=16, num_layers=1, num_heads=2)
    return build(candidate, seed, task(its).vocab_size, settings, longest=LONGEST, task=its), candidate


@pytest.mark.parametrize("name", OWN)
def test_a_batch_holds_the_rows_and_asks_for_what_counts(name: str) -> None:
    lengths = [5, 1, 3]
    ids, targets = batch(task(name), Random(0), lengths)
    random = Random(0)
    rows = [task(name).row(random, length) for length in lengths]
    assert ids.shape == targets.shape == (3, max(len(row.prompt) + len(row.answer) for row in rows))
    for row, its, aims in zip(rows, ids.tolist(), targets.tolist(), strict=True):
        whole = [*row.prompt, *row.answer]
        assert its == [*whole, *[0] * (len(its) - len(whole))]
        counted = [True] * len(row.answer) if row.counts is None else row.counts
        asked = {len(row.prompt) + place for place, counts in enumerate(counted) if counts}
        assert {place + 1: aim for place, aim in enumerate(aims) if aim != IGNORED} == {at: whole[at] for at in asked}


class Certain(torch.nn.Module):
    """Is sure of the token that a rule says comes next."""

    def __init__(self, rule: Callable[[list[int]], int], vocab_size: int) -> None:
        super().__init__()
        self.rule, self.vocab_size = rule, vocab_size

    def scores(self, ids: torch.Tensor, positions: Positions) -> torch.Tensor:
        said = [[self.rule(row[: place + 1]) for place in range(len(row))] for row in ids.tolist()]
        return torch.nn.functional.one_hot(torch.tensor(said), self.vocab_size).float()


def test_a_row_is_right_where_each_token_that_counts_is() -> None:
    def copied(row: list[int]) -> int:
        return row[len(row) - 1 - row.index(16)] if 16 in row else 0

    def never_7(row: list[int]) -> int:
        return min(copied(row), 6) if copied(row) == 7 else copied(row)

    def measured(rule: Callable[[list[int]], int]) -> Accuracy:
        return accuracy(Certain(rule, 17), Candidate.of("nope"), task("copy"), 5, longest=LONGEST)  # type: ignore[arg-type]

    answers = measured_rows(task("copy"), 5).ids[:, 6:]
    assert measured(copied) == Accuracy(1.0, 1.0)
    assert measured(lambda row: 99 % 17 if 16 not in row else copied(row)) == Accuracy(1.0, 1.0), "prompts do not count"
    without = (answers != 7).float()
    wanted = (float(without.all(1).double().mean()), float(without.double().mean()))
    assert measured(never_7) == wanted
    assert 0.5 < wanted[0] < wanted[1] < 1


def test_padding_changes_no_accuracy() -> None:
    """Brackets have answers of several lengths: read alone, each row has the same first choices."""
    decoder, candidate = model("alibi", "brackets")
    ids, targets = measured_rows(task("brackets"), 6)
    right = []
    for row, aims in zip(ids, targets, strict=True):
        end = int((aims != IGNORED).nonzero().max()) + 1
        said = decoder(row[None, :end]).argmax(-1)[0]
        right.append((said == aims[:end])[aims[:end] != IGNORED])
    assert len({len(each) for each in right}) > 2
    rows = sum(bool(each.all()) for each in right) / ROWS
    tokens = float(torch.cat(right).double().mean())
    assert accuracy(decoder, candidate, task("brackets"), 6, longest=LONGEST) == (rows, tokens)


def learned(
    length: int = 3, seed: int = 0, num_steps: int = 400
) -> tuple[Decoder, Candidate, LearningResult, list[float]]:
    decoder, candidate = model(seed=seed)
    losses = list[float]()
    how = learn(
        decoder, candidate, Few(), length=length, longest=LONGEST, num_steps=num_steps, batch_size=32, rate=1.0,
        seed=seed, on_step=lambda step, loss: losses.append(loss),
    )  # fmt: skip
    return decoder, candidate, how, losses


class Few(Task):
    """Each symbol of four, and the next one: nothing to learn but a table."""

    @property
    def vocab_size(self) -> int:
        return 17

    def make(self, random: Random, length: int) -> Row:
        items = random.choices(range(4), k=length)
        return Row([*items, 16, items[0]], [(items[0] + place + 1) % 4 for place in range(length)])


def test_a_small_task_is_learned_and_a_right_row_is_what_the_model_writes() -> None:
    decoder, candidate, how, losses = learned()
    assert how.steps == len(losses) < 400, "it ends before the steps are spent"
    assert how.loss == losses[-1] < losses[0] / 10
    for length in (2, 3, 9):
        ids, _ = measured_rows(Few(), length)
        written = generate(decoder, ids[:, : length + 2], length, temperature=0)
        right = accuracy(decoder, candidate, Few(), length, longest=LONGEST).rows
        assert float((written == ids).all(1).double().mean()) == right
        assert length > 3 or right == 1


def test_the_same_seed_learns_the_same() -> None:
    first, again, other = (learned(seed=seed, num_steps=12)[3] for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("is_learned", [True, False])
@pytest.mark.parametrize(
    ("num_steps", "is_learned_at", "steps"),
    [(60, 5, 15), (60, 10, 20), (60, 25, 50), (60, 35, 60), (60, 40, 60), (60, None, 60), (10, None, 10), (1, None, 1)],
)
def test_the_rate_rises_stays_and_falls_once_half_of_the_rows_are_right(
    monkeypatch: pytest.MonkeyPatch, num_steps: int, is_learned_at: int | None, steps: int, is_learned: bool
) -> None:
    """In as many steps as there were, or in the fewest, and no more than there are; again where too few are right."""
    asked, noted = list[int](), {kind: list[float]() for kind in (torch.optim.Muon, torch.optim.AdamW)}

    def noting(kind: type, real: Callable[..., object]) -> Callable[..., object]:
        def step(optimizer: torch.optim.Optimizer) -> object:
            noted[kind].append(optimizer.param_groups[0]["lr"])
            return real(optimizer)

        return step

    def right(*_: object, **__: object) -> Accuracy:
        asked.append(len(noted[torch.optim.AdamW]))
        if asked[-1] == steps and steps < num_steps:
            return Accuracy(task_learning.STOP_SHARE - (0 if is_learned else 0.01), 0.0)
        return Accuracy(task_learning.DECAY_SHARE * (asked[-1] == is_learned_at), 0.0)

    for kind in noted:
        monkeypatch.setattr(kind, "step", noting(kind, kind.step))
    monkeypatch.setattr(task_learning, "accuracy", right)
    monkeypatch.setattr(task_learning, "CHECK", 5)
    monkeypatch.setattr(task_learning, "FALLING", 10)
    decoder, candidate = model()
    options = {"length": 1, "longest": LONGEST, "num_steps": num_steps, "batch_size": 1, "rate": 0.5, "seed": 0}
    again = 0 if is_learned else num_steps - steps
    assert learn(decoder, candidate, task("copy"), **options).steps == steps + again
    start = is_learned_at or max(1, int(2 / 3 * num_steps))
    shares = [min(1.0, (step + 1) / 20) for step in range(start)]
    shares += [left / (steps - start + 1) for left in range(steps - start, 0, -1)]
    shares += [0.5 * left / (again + 1) for left in range(again, 0, -1)]
    for kind, highest in ((torch.optim.Muon, 0.01), (torch.optim.AdamW, 1.5e-3)):
        assert noted[kind] == pytest.approx([0.5 * highest * share for share in shares], rel=FEW_ROUNDINGS, abs=0)
    assert asked == [*range(task_learning.CHECK, start + 1, task_learning.CHECK), *[steps] * (steps < num_steps)]


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_positions_of_numbers_are_those_of_the_package(seed: int | None) -> None:
    ids, _ = batch(task("addition"), Random(0), [3, 3])
    offset = 0 if seed is None else Random(seed).randrange(LONGEST // 3 - 3)

    def placed(name: str) -> Positions:
        return Candidate.of(name).positions(ids, LONGEST, seed, task=task("addition"), length=3)

    assert torch.equal(placed("nope").index, torch.arange(12)[None])
    assert torch.equal(placed("rotary@randomized").index, randomized(12, LONGEST, seed=seed or 0).index)
    assert torch.equal(placed("rotary@abacus").index, abacus(ids, range(10), offset=offset).index)
    # The units come first in all three numbers, and digits of equal significance have the same index.
    units, tens, hundreds, sign = 4 + offset, 3 + offset, 2 + offset, 5 + offset
    number = [units, tens, hundreds]
    assert placed("rotary@coupled").index[0].tolist() == [*number, sign, *number, sign, *number, 1 + offset]
    digits = [1 + offset, 2 + offset, 3 + offset]
    assert placed("rotary@abacus").index[1].tolist() == [*digits, 0, *digits, 0, *digits, 4 + offset]


@pytest.mark.parametrize("name", ["rotary@abacus", "rotary@coupled"])
@pytest.mark.parametrize("its", ["copy", "addition_hints", None])
def test_rows_without_numbers_have_no_digits_to_count(name: str, its: str | None) -> None:
    with refuses(InputError, name, "tasks=('addition',)"):
        Candidate.of(name).positions(torch.zeros(1, 5, dtype=torch.long), LONGEST, task=its and task(its), length=2)
