"""Entries about which tokens a training run sees: resumed epochs, and the last window of a text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from locant import Windows
from tests.known_bugs.exhibit import exhibit

N, BATCH = 61, 4


class Ours:
    """`Windows.loader`, with as many workers; a window holds its own number."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def start(self, state: dict[str, Any] | None) -> Iterator[list[int]]:
        self.loader = Windows(np.arange(N + 1), 1).loader(BATCH, seed=3, num_workers=self.workers)
        if state is not None:
            self.loader.load_state_dict(state)
        return (batch["ids"].flatten().tolist() for batch in self.loader)

    def state(self) -> dict[str, Any]:
        return self.loader.state_dict()


class Counting:
    """What the twins have in common: a random order, and how many of it were seen."""

    seed_of_a_resume = 3

    def start(self, state: dict[str, Any] | None) -> Iterator[list[int]]:
        order = np.random.default_rng(3 if state is None else self.seed_of_a_resume).permutation(N).tolist()
        self.skipped, self.fetched = 0 if state is None else state["seen"], 0
        for first in range(self.skipped, N, BATCH):
            self.fetched += len(order[first : first + BATCH])
            yield order[first : first + BATCH]

    def state(self) -> dict[str, Any]:
        return {"seen": self.skipped + self.fetched}


class SinceTheResume(Counting):
    """Counts what it has read itself: right after one resume, wrong after two."""

    def state(self) -> dict[str, Any]:
        return {"seen": self.fetched}


class WhatWorkersFetched(Counting):
    """Counts two batches that were fetched ahead and never reached the caller."""

    def state(self) -> dict[str, Any]:
        return {"seen": self.skipped + self.fetched + 2 * BATCH}


class Shuffled(Counting):
    """Knows its place in the order, and makes another order when it is resumed."""

    seed_of_a_resume = 4


def epoch(run: Ours | Counting, interruptions: list[int]) -> list[list[int]]:
    """The batches of one epoch that is interrupted after so many batches, each time."""
    state, seen = None, []
    for count in interruptions:
        batches = run.start(state)
        seen += [next(batches) for _ in range(count)]
        state = json.loads(json.dumps(run.state()))
    return seen + list(run.start(state))


OFTEN = ([3], [3, 2], [1, 1, 1, 4, 2])


def resumes(run: Ours | Counting) -> None:
    whole = epoch(run, [])
    for interruptions in [[3, 2]] if isinstance(run, Ours) and run.workers else OFTEN:
        found = epoch(run, interruptions)
        counts = Counter(number for batch in found for number in batch)
        twice = sorted(number for number, count in counts.items() if count > 1)
        never = sorted(set(range(N)) - set(counts))
        assert not twice, f"after {len(interruptions)} resumes, {len(twice)} windows were seen twice"
        assert not never, f"after {len(interruptions)} resumes, {len(never)} windows were never seen"
        assert found == whole, "the order is another after a resume"


def test_84g_a_resumed_epoch_shows_every_window_once() -> None:
    """A resumed epoch repeats windows or skips them.

    mosaicml/streaming#437 and #880, KempnerForge#57 and #58, meta-pytorch/data#1439: Data was seen twice or never. A
    loader that counts from its last start is wrong after the second resume, and one that counts what its workers
    fetched ahead skips what the caller never got.

    Check: Collect the ids of all windows over two resumes, and compare with one whole epoch.

    Test: up to five resumes in one epoch, two of them with workers: every window once, in the same order.
    """
    ours = [Ours(workers=0), Ours(workers=1)]
    exhibit(resumes, *ours, twin=SinceTheResume(), because="after 2 resumes, .* windows were seen twice")
    exhibit(resumes, Ours(workers=0), twin=WhatWorkersFetched(), because="after 1 resumes, 8 windows were never seen")
    exhibit(resumes, Ours(workers=0), twin=Shuffled(), because="after 1 resumes, .* windows were seen twice")


Cut = Callable[[int, int], list[list[int]]]
"""Of n tokens and a length: the places of the targets of each window."""


def ours(n: int, length: int) -> list[list[int]]:
    windows = Windows(np.arange(n), length)
    return [[target for target in window["targets"].tolist() if target >= 0] for window in windows]


def rounded_down(n: int, length: int) -> list[list[int]]:
    """As many windows as are full."""
    return [list(range(i * length + 1, (i + 1) * length + 1)) for i in range((n - 1) // length)]


def one_too_few(n: int, length: int) -> list[list[int]]:
    """``while start + length + 1 < n``, where the last full window ends at n exactly; then a part if one is left."""
    starts = list(range(0, n - length - 1, length))
    rest = (starts[-1] + length if starts else 0) + 1
    part = [list(range(rest, n))] if (n - 1) % length else []
    return [list(range(start + 1, start + length + 1)) for start in starts] + part


def overrun(n: int, length: int) -> list[list[int]]:
    """A window wherever an input is left, also the last token, which nothing follows."""
    return [list(range(start + 1, start + length + 1)) for start in range(0, n, length)]


def every_target_once(cut: Cut) -> None:
    for length in (1, 2, 5, 8):
        for n in sorted({length, length + 1, length + 2, *(k * length + d for k in (2, 3, 7) for d in (-1, 0, 1, 2))}):
            if n < 2:
                continue
            seen = Counter(target for window in cut(n, length) for target in window)
            beyond = sorted(target for target in seen if target >= n)
            assert not beyond, f"{n} tokens, length {length}: reads past the end, at {beyond}"
            lost = sorted(set(range(1, n)) - set(seen))
            assert not lost, f"{n} tokens, length {length}: {len(lost)} targets are lost"
            assert set(seen.values()) == {1}, f"{n} tokens, length {length}: targets are seen twice"


def test_84h_the_last_window_is_neither_lost_nor_overrun() -> None:
    """The last window is lost, or read past the end.

    NVIDIA/Megatron-LM#399, NVIDIA-NeMo/Speech#5243, OpenVerifiableLLM#92, karpathy/ng-video-lecture#56: Counts of
    windows that round down lose the end of every text. A bound that is strict by mistake loses the last full window,
    and one that is too loose reads past the end.

    Check: Count the targets of a text of `2 * length + 1` tokens: there are `2 * length`.

    Test: texts of S to 7S + 2 tokens: every target once, nothing past the end.
    """
    exhibit(every_target_once, ours, twin=rounded_down, because="targets are lost")
    exhibit(every_target_once, ours, twin=one_too_few, because="targets are lost")
    exhibit(every_target_once, ours, twin=overrun, because="reads past the end")
