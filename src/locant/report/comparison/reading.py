"""What the numbers of a comparison say, in plain sentences: every one of them follows from the numbers at hand."""

from __future__ import annotations

import math

from locant.report.comparison.summary import Cell, Row, Summary

__all__ = ["read"]

LEVEL = 0.02
CLEAR = 0.06
"""Shares of the loss at the training length: within the first it stays level, above the second it is clearly worse."""


def read(summary: Summary) -> list[str]:
    """Sentences about a comparison, the most important first."""
    longest = summary.lengths[-1]
    sentences = [_winner(summary, summary.base_length)]
    if longest > summary.base_length:
        sentences += [_winner(summary, longest), *_trends(summary, longest), *_turning_points(summary)]
    return [sentence for sentence in [*sentences, *_missing(summary), _caution(summary)] if sentence]


def _winner(summary: Summary, length: int) -> str:
    best = summary.best(length)
    cell = best.by_length[length] if best else None
    if best is None or cell is None:
        return f"No encoding has a finite loss at {length:,} tokens."
    times = length / summary.train_length
    where = "the length it was trained at" if times == 1 else f"{times:g} times the training length"
    loss = f"{cell.mean:.3f} nats per token (perplexity {_perplexity(cell.mean)})"
    if len(summary.rows) == 1:
        return f"At {length:,} tokens, {where}, {best.encoding} has a held-out loss of {loss}."
    ties = [row.encoding for row in summary.rows if row is not best and _overlap(cell, row.by_length[length])]
    close = (
        f"; {_and(ties)} {'is' if len(ties) == 1 else 'are'} no farther from it than seeds are from each other"
        if ties
        else ""
    )
    return f"At {length:,} tokens, {where}, {best.encoding} has the lowest held-out loss: {loss}{close}."


def _overlap(best: Cell, other: Cell | None) -> bool:
    """Whether the best seed of the other reaches into the spread of the best, or the two deviations do."""
    if other is None or best.deviation + other.deviation == 0:
        return False
    return other.mean - best.mean <= best.deviation + other.deviation


def _trends(summary: Summary, longest: int) -> list[str]:
    """Who stays level from the training length to the longest, and who does not."""
    ratios = {row.encoding: row.ratio(longest, summary.base_length) for row in summary.rows}
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    span = f"from {summary.base_length:,} to {longest:,} tokens"
    groups = {
        f"gains from the longer text, {span}": [name for name in known if known[name] < 1 - LEVEL],
        f"stays within {LEVEL:.0%} of its loss {span}": [name for name in known if abs(known[name] - 1) <= LEVEL],
        f"gets somewhat worse {span}": [name for name in known if 1 + LEVEL < known[name] <= 1 + CLEAR],
        f"gets clearly worse {span}": [name for name in known if known[name] > 1 + CLEAR],
    }
    return [
        f"{words[0].upper()}{words[1:]}: {_and([f'{name} (×{known[name]:.2f})' for name in names])}."
        for words, names in groups.items()
        if names
    ]


def _turning_points(summary: Summary) -> list[str]:
    """Where, within the longest windows, the loss of an encoding leaves the level of its training length for good."""
    found = {
        row.encoding: place for row in summary.rows if (place := _turning_point(row, summary.train_length)) is not None
    }
    if not found:
        return []
    places = _and([f"{name} from about position {place:,}" for name, place in found.items()])
    level = f"more than {CLEAR:.0%} above its level within the training length"
    return [f"By position, the loss rises {level} and stays there: {places}."]


def _turning_point(row: Row, train_length: int) -> int | None:
    """The first position from which on every stretch of `train_length / 4` tokens is clearly above the level.

    What lasts for less than a training length may be a few hard tokens, and is not counted.
    """
    losses = [cell.mean if cell else math.nan for cell in row.by_position]
    level = _mean(losses[train_length // 2 : train_length])
    step = max(4, train_length // 4)
    starts = range(train_length, len(losses) - step + 1, step)
    above = [_mean(losses[start : start + step]) > level * (1 + CLEAR) for start in starts]
    if not above or not above[-1]:
        return None
    below = [number for number, is_above in enumerate(above) if not is_above]
    place = starts[below[-1] + 1 if below else 0]
    return place if len(losses) - place >= train_length else None


def _missing(summary: Summary) -> list[str]:
    names = [row.encoding for row in summary.rows if any(row.by_length[length] is None for length in summary.lengths)]
    return [f"A dash stands where a loss was not finite or not measured: {_and(names)}."] if names else []


def _caution(summary: Summary) -> str:
    if summary.num_seeds == 1:
        return "One seed was trained, so there is no spread: small differences may be chance."
    return (
        f"Spread is over {summary.num_seeds} seeds of a small model: "
        "it shows what training luck does, not what a larger model would."
    )


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):,.1f}" if loss < 20 else "beyond measure"


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _and(words: list[str]) -> str:
    """A list as it is spoken.

    >>> _and(["a"]), _and(["a", "b"]), _and(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
