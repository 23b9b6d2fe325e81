"""Write the conclusions of a comparison. Each sentence follows from the numbers of that comparison."""

from __future__ import annotations

import math

from locant.lab.settings import ENOUGH_WINDOWS
from locant.lab.summary import Summary
from locant.lab.text_learning import HELD_OUT
from locant.report.console import pluralize
from locant.spelling import spell

LEVEL = 0.02
CLEAR = 0.06
"""Limits of the relative change of the loss beyond the training length.

Up to `LEVEL`, the loss is level. Above `CLEAR`, it is much worse.
"""

LITTLE = 0.1
"""A share of the unigram loss.

A model whose loss is not lower by this share has learned little except token frequencies.
"""

NAMED = 6
"""The largest number of encodings that a sentence lists if the table next to it shows them, too."""

OVERFITTED = 1.25
"""The ratio of held-out to training loss above which a model has memorized its training text."""


def sentences(summary: Summary) -> list[str]:
    """Return the findings of a comparison, the most important first. Leave out lengths with too few windows."""
    base, longest = summary.base_length, summary.lengths[-1]
    overfitted = _describe_overfitting(summary)
    conclusions = [
        _little_learned(summary, more_steps=not overfitted),
        _too_little_text(summary),
        _winner(summary, base),
    ]
    if longest > base:
        conclusions.append(_winner(summary, longest))
        if summary.has_enough(longest):
            conclusions += [*_trends(summary), _rises(summary)]
    conclusions += [*context_sentences(summary), _bigram(summary)]
    return [sentence for sentence in [*conclusions, overfitted, _missing(summary), _caution(summary)] if sentence]


def _little_learned(summary: Summary, *, more_steps: bool) -> str:
    unigram, base = summary.unigram_loss, summary.base_length
    if unigram is None:
        return ""
    losses = {row.encoding: cell.mean for row in summary.rank_measured(base) if (cell := row.by_length[base])}
    little = [f"{name} ({loss:.3f})" for name, loss in losses.items() if loss > (1 - LITTLE) * unigram]
    if not little:
        return ""
    return (
        f"Little was learned, so the losses are weak evidence about the encoding. At {base:,} tokens "
        f"{join_and(little)} {'is' if len(little) == 1 else 'are'} "
        f"not {LITTLE:.0%} below the loss of a unigram count ({unigram:.3f}), "
        "which uses only how often each token is in the training text."
        f"{' More steps may help.' if more_steps else ''}"
    )


def _too_little_text(summary: Summary) -> str:
    few = [length for length in summary.lengths if not summary.has_enough(length)]
    if not few:
        return ""
    windows = join_and([f"{pluralize(summary.num_windows(length), 'window')} of {length:,}" for length in few])
    needed = math.ceil(ENOUGH_WINDOWS * few[-1] / HELD_OUT)
    return (
        f"There is not enough text for {join_and([f'{length:,}' for length in few])} tokens: {windows} are held out, "
        f"expected {ENOUGH_WINDOWS} of each. A text of {needed:,} tokens would be enough."
    )


def _winner(summary: Summary, length: int) -> str:
    best = summary.best(length)
    cell = best.by_length[length] if best else None
    if best is None or cell is None:
        return f"No encoding has a finite loss at {length:,} tokens."
    if not summary.has_enough(length):
        return ""
    times = length / summary.train_length
    where = "the training length" if times == 1 else f"{spell(times)} times the training length"
    where = f"At {length:,} tokens, {where}"
    perplexity = f"{math.exp(cell.mean):,.1f}" if cell.mean < 20 else "beyond measure"
    loss = f"{cell.mean:.3f} nats per token (perplexity {perplexity})"
    measured = summary.rank_measured(length)
    if len(measured) == 1:
        return f"{where}, {best.encoding} has a held-out loss of {loss}."
    leaders = summary.leaders(length)
    ties = [row.encoding for row in leaders or measured if row is not best]
    others = join_and(ties) if len(ties) <= NAMED else f"{len(ties)} other encodings"  # which the table has in bold
    tied = f"{others} {'is' if len(ties) == 1 else 'are'} within {_describe_spread(summary)}" if ties else ""
    if not leaders:
        return f"{where}, no encoding is clearly better: {best.encoding} has {loss}, and {tied}."
    lowest = "the lowest held-out loss" + (" of one seed" if summary.num_seeds == 1 else "")
    return f"{where}, {best.encoding} has {lowest}: {loss}.{tied and f' {tied}.'}"


def _describe_spread(summary: Summary) -> str:
    return "the spread of windows" if summary.num_seeds == 1 else "the spread of seeds and windows"


def _trends(summary: Summary) -> list[str]:
    """Group the encodings by how their loss changes from the training length to the longest."""
    base, longest = summary.base_length, summary.lengths[-1]
    gains, level = "falls", f"stays within {LEVEL:.0%}"
    somewhat, much, unclear = "rises somewhat", "rises a lot", f"changes by no more than {_describe_spread(summary)}"
    groups: dict[str, list[str]] = {words: [] for words in (gains, level, somewhat, much, unclear)}
    for row in summary.rows:
        if (ratio := row.ratio(longest, base)) is None:
            continue
        if abs(ratio - 1) <= LEVEL:
            words = level
        elif not row.is_clear(longest, row, base):
            words = unclear
        else:
            words = gains if ratio < 1 else somewhat if ratio <= 1 + CLEAR else much
        groups[words].append(f"{row.encoding} (×{ratio:.2f})")
    span = f"From {base:,} to {longest:,} tokens"
    return [f"{span}, the loss {words} for {join_and(names)}." for words, names in groups.items() if names]


def _rises(summary: Summary) -> str:
    """Describe the position from which the loss stays above its level within the training length."""
    places = ((row.encoding, row.rises_from(summary.train_length, CLEAR)) for row in summary.rows)
    rises = [f"{name} from about position {place:,}" for name, place in places if place is not None]
    level = f"more than {CLEAR:.0%} above its level within the training length"
    return f"By position, the loss rises {level} and stays there: {join_and(rises)}." if rises else ""


def context_sentences(summary: Summary) -> list[str]:
    """Return sentences about the losses with full context, and about the encodings that use distant tokens."""
    rows = [row for row in summary.rows if row.far]  # those whose losses are finite
    if not rows:
        return []
    contexts = rows[0].by_stretch
    fewest, most = min(contexts), max(contexts)
    losses = [f"{row.encoding} {row.in_context(most):.3f}" for row in rows]
    if len(rows) > NAMED:  # the table has them all
        ordered = sorted(rows, key=lambda row: row.in_context(most) or 0.0)
        low, high = (f"{row.in_context(most):.3f} ({row.encoding})" for row in (ordered[0], ordered[-1]))
        losses = [f"between {low}", high]
    conclusions = [
        f"With {most:,} tokens before every token, in overlapping windows, the losses are {join_and(losses)}."
    ]
    groups: dict[str, list[str]] = {"help": [], "have no clear effect on": [], "hurt": []}
    used, unclear, harmful = groups.values()
    for row in rows:
        if row.far:
            group = unclear if not row.far_is_clear else used if row.far.mean < 0 else harmful
            group.append(f"{row.encoding} ({signed(row.far.mean)})")
    if len(contexts[most]) >= ENOUGH_WINDOWS:
        far = f"Tokens more than {fewest:,} back (up to {most:,})"
        conclusions += [f"{far} {verb} {join_and(names)}." for verb, names in groups.items() if names]
    return conclusions


def _bigram(summary: Summary) -> str:
    bigram, base = summary.bigram_loss, summary.base_length
    if bigram is None:
        return ""
    losses = {row.encoding: cell.mean for row in summary.rank_measured(base) if (cell := row.by_length[base])}
    above = [name for name, loss in losses.items() if loss >= bigram]
    who = f"{join_and(above)} {'is' if len(above) == 1 else 'are'} not below it" if above else "all are below it"
    return f"A bigram count, which uses only the previous token, has a loss of {bigram:.3f}. At {base:,} tokens {who}."


def _describe_overfitting(summary: Summary) -> str:
    pairs = [
        f"{row.encoding} ({row.train_loss.mean:.2f} in training, {held_out.mean:.2f} held out)"
        for row in summary.rows
        if (held_out := row.by_length[summary.base_length])
        and row.train_loss
        and held_out.mean > OVERFITTED * row.train_loss.mean
    ]
    advice = "More text or fewer steps would help."
    return (
        f"Overfitted, so the losses are weak evidence about the encoding: {join_and(pairs)}. {advice}" if pairs else ""
    )


def _missing(summary: Summary) -> str:
    names = [row.encoding for row in summary.rows if any(row.by_length[length] is None for length in summary.lengths)]
    return f"A dash means that a loss was not finite or not measured: {join_and(names)}." if names else ""


def _caution(summary: Summary) -> str:
    if summary.num_seeds == 1:
        return "One seed was trained, so the difference between seeds is unknown. Small differences may be chance."
    return f"The spread is over {pluralize(summary.num_seeds, 'seed')} of a small model. Larger models may differ."


def signed(change: float) -> str:
    """Write a change of the loss with its sign. A change that rounds to zero has none.

    >>> signed(-0.0617), signed(-0.0002)
    ('-0.062', '0.000')
    """
    text = f"{change:+.3f}"
    return text if float(text) else text[1:]


def join_and(words: list[str]) -> str:
    """Join words as in a sentence: a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
