"""Train a decoder on rows of a task until it has learned them. The rows have every length up to the trained length.

Muon (Jordan et al. 2024) trains the matrices of attention and MLP, and AdamW trains all other parameters. With the two
optimizers, two layers with rotary positions learn to recall 12 pairs in 600 steps. With AdamW alone, they have not
learned this after 1,500 steps.

After a warm-up, the learning rate is constant until half of the longest trained rows are correct, or until two thirds
of the steps are taken. Then it falls to zero over the same number of steps again. This number is at least 150, unless
fewer steps remain. If not enough rows are correct at the end, the rate restarts at half of its peak and falls until the
last step. So a model that learns more slowly takes more steps, and their number is recorded. If the rate stayed high,
the model would make a mistake in one of five copies of 12 symbols for another thousand steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from locant.lab.candidate import Candidate
from locant.lab.decoder import Decoder
from locant.lab.tasks import Task
from locant.lab.text_learning import OnStep, update

MATRIX_RATE, OTHER_RATE = 0.01, 1.5e-3
"""The peak learning rates of Muon and AdamW. At twice the rates, models with rotary positions do not learn to copy."""

WARMUP = 20
"""The number of steps over which the rate rises."""

CHECK = 50
"""The number of steps between two measurements of the share of correct rows of the trained length."""

DECAY_SHARE = 0.5
"""The share of correct rows at which the rate begins to fall."""

CONSTANT = 2 / 3
"""The largest share of the steps that may come before the rate falls."""

FALLING = 150
"""The smallest number of steps over which the rate falls, unless fewer steps remain."""

RESTART_RATE = 0.5
"""The share of the peak rate at which training restarts if the model has not learned enough."""

ROWS = 128
"""The number of rows at each length that a model is measured on. All models read the same rows."""

LEARNED = 0.9
"""The share of the longest trained rows that must be correct for the task to count as learned."""

STOP_SHARE = 0.96
"""The share of correct rows that makes a restart unnecessary.

It exceeds `LEARNED` by about two standard deviations of a share of `ROWS` rows.
"""

CHUNK = 32
"""The number of rows that a model reads at once in evaluation."""

IGNORED = -100  # the target that torch's loss ignores
MEASURED, ASKED, CHOOSING = range(3)
"""Seeds of three sets of rows: for reported accuracies, for deciding when the rate falls, and for choosing rates."""


class Accuracy(NamedTuple):
    """The shares of correct rows and of correct tokens."""

    rows: float
    tokens: float


class LearningResult(NamedTuple):
    """The number of steps of a training run, and the loss at the last step, in nats per token."""

    steps: int
    loss: float


class Batch(NamedTuple):
    """Rows that end with zeros as padding, and a target for each token: the next token if it counts, else `IGNORED`."""

    ids: Int[Tensor, "batch seq"]
    targets: Int[Tensor, "batch seq"]


def batch(task: Task, random: Random, lengths: Sequence[int]) -> Batch:
    """Return a batch of rows with these lengths.

    >>> from locant.lab.tasks import task
    >>> ids, targets = batch(task("copy"), Random(0), [3, 1])
    >>> ids.tolist()
    [[13, 12, 6, 16, 13, 12, 6], [4, 16, 4, 0, 0, 0, 0]]
    >>> targets.where(targets != IGNORED, -1).tolist()
    [[-1, -1, -1, 13, 12, 6, -1], [-1, 4, -1, -1, -1, -1, -1]]
    """
    rows = [task.row(random, length) for length in lengths]
    longest = max(len(row.prompt) + len(row.answer) for row in rows)
    ids, targets = [], []
    for prompt, answer, counts in rows:
        padding = longest - len(prompt) - len(answer)
        counted = answer if counts is None else [a if c else IGNORED for a, c in zip(answer, counts, strict=True)]
        ids.append([*prompt, *answer, *[0] * padding])
        targets.append([*[IGNORED] * (len(prompt) - 1), *counted, *[IGNORED] * (padding + 1)])
    return Batch(torch.tensor(ids), torch.tensor(targets))


def measured_rows(task: Task, length: int, seed: int = MEASURED) -> Batch:
    """Return the `ROWS` rows of one length that every model is measured on."""
    return batch(task, Random(f"{seed} {length}"), [length] * ROWS)


@torch.no_grad()
def accuracy(
    model: Any, candidate: Candidate, task: Task, length: int, *, longest: int, seed: int = MEASURED
) -> Accuracy:
    """Return the accuracy of a `Decoder` on rows of `length` items.

    Args:
        longest: tokens in the longest row that will be read, at any length.
    """
    rows, tokens = [], []
    model.eval()
    for ids, targets in zip(*(each.split(CHUNK) for each in measured_rows(task, length, seed)), strict=True):
        positions = candidate.positions(ids, longest, task=task, length=length)
        right, counts = model.scores(ids, positions).argmax(-1).cpu() == targets, targets != IGNORED
        rows.append((right | ~counts).all(1))
        tokens.append(right[counts])
    return Accuracy(*(float(torch.cat(each).double().mean()) for each in (rows, tokens)))


def learn(
    model: Decoder, candidate: Candidate, task: Task, *, length: int, longest: int, num_steps: int, batch_size: int,
    rate: float, seed: int, on_step: OnStep | None = None,
) -> LearningResult:  # fmt: skip
    """Train a model in place on rows of 1 to `length` items until they are learned, for at most `num_steps`.

    Args:
        longest: tokens in the longest row that will be read.
        rate: the factor of the two learning rates.
    """
    random, optimizers, losses = Random(seed), _optimizers(model, rate), list[float]()

    def step(scale: float) -> None:
        items = random.randint(1, length)
        ids, targets = batch(task, random, [items] * batch_size)
        positions = candidate.positions(ids, longest, random.getrandbits(32), task=task, length=items)
        loss = model.train().losses(ids, targets, positions).sum() / (targets != IGNORED).sum()
        loss.backward()
        update(model.parameters(), *((optimizer, highest * scale) for optimizer, highest in optimizers))
        losses.append(loss.item())
        if on_step is not None:
            on_step(len(losses), losses[-1])

    def right() -> float:
        return accuracy(model, candidate, task, length, longest=longest, seed=ASKED).rows

    def fall(highest: float, steps: int) -> None:
        for number in range(steps, 0, -1):
            step(highest * number / (steps + 1))

    for number in range(1, 1 + max(1, int(CONSTANT * num_steps))):
        step(min(1.0, number / WARMUP))
        if number % CHECK == 0 and right() >= DECAY_SHARE:
            break
    fall(1.0, min(num_steps - len(losses), max(FALLING, len(losses))))
    if len(losses) < num_steps and right() < STOP_SHARE:
        fall(RESTART_RATE, num_steps - len(losses))
    return LearningResult(len(losses), losses[-1])


def _optimizers(model: Decoder, rate: float) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return Muon for the matrices of the blocks and AdamW for the rest, each with its peak learning rate."""
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.ndim == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    return [
        (torch.optim.Muon(matrices, lr=MATRIX_RATE * rate, weight_decay=0.01), MATRIX_RATE * rate),
        (torch.optim.AdamW(others, lr=OTHER_RATE * rate, betas=(0.9, 0.95), weight_decay=0.0), OTHER_RATE * rate),
    ]
