"""What the numbers of a comparison say, in plain sentences: every one of them follows from the numbers at hand."""

from __future__ import annotations

import math

from locant.lab.summary import ENOUGH_WINDOWS, Summary
from locant.lab.text_learning import HELD_OUT
from locant.report.console import counted
from locant.spelling import spell

LEVEL = 0.02
CLEAR = 0.06
"""Shares of the loss at the training length: within the first it stays level, above the second it is much worse."""

LITTLE = 0.1
"""Share of the loss of a unigram count: who is not so far below it has learned little but which tokens are frequent."""

OVERFITTED = 1.25
"""Held-out loss over training loss, above which the models know their training text rather than the language."""


def sentences(summary: Summary) -> list[str]:
    """What a comparison found, the most important first; nothing about lengths with too few windows."""
    base, longest = summary.base_length, summary.lengths[-1]
    overfitted = _overfitted(summary)
    found = [_little_learned(summary, more_steps=not overfitted), _too_little_text(summary), _winner(summary, base)]
    if longest > base:
        found.append(_winner(summary, longest))
        if summary.has_enough(longest):
            found += [*_trends(summary), _rises(summary)]
    found += [*context_sentences(summary), _bigram(summary)]
    return [sentence for sentence in [*found, overfitted, _missing(summary), _caution(summary)] if sentence]


def _little_learned(summary: Summary, *, more_steps: bool) -> str:
    unigram, base = summary.unigram_loss, summary.base_length
    if unigram is None:
        return ""
    losses = {row.encoding: cell.mean for row in summary.measured(base) if (cell := row.by_length[base])}
    little = [f"{name} ({loss:.3f})" for name, loss in losses.items() if loss > (1 - LITTLE) * unigram]
    if not little:
        return ""
    return (
        f"Little was learned, so that the losses say little about the encoding: at {base:,} tokens {spoken(little)} "
        f"{'is' if len(little) == 1 else 'are'} not {LITTLE:.0%} below the {unigram:.3f} of a unigram count, which "
        "knows how often each token is in the training text, and nothing of what stands before it."
        f"{' More steps may help.' if more_steps else ''}"
    )


def _too_little_text(summary: Summary) -> str:
    few = [length for length in summary.lengths if not summary.has_enough(length)]
    if not few:
        return ""
    windows = spoken([f"{counted(summary.num_windows(length), 'window')} of {length:,}" for length in few])
    needed = math.ceil(ENOUGH_WINDOWS * few[-1] / HELD_OUT)
    return (
        f"Not enough text to tell at {spoken([f'{length:,}' for length in few])} tokens: {windows} are held out, "
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
    where = "the length it was trained at" if times == 1 else f"{spell(times)} times the training length"
    where = f"At {length:,} tokens, {where}"
    perplexity = f"{math.exp(cell.mean):,.1f}" if cell.mean < 20 else "beyond measure"
    loss = f"{cell.mean:.3f} nats per token (perplexity {perplexity})"
    measured = summary.measured(length)
    if len(measured) == 1:
        return f"{where}, {best.encoding} has a held-out loss of {loss}."
    leaders = summary.leaders(length)
    ties = [row.encoding for row in leaders or measured if row is not best]
    tied = f"{spoken(ties)} {'is' if len(ties) == 1 else 'are'} within {_spread(summary)}" if ties else ""
    if not leaders:
        return f"{where}, no encoding is clearly better: {best.encoding} has {loss}, and {tied}."
    lowest = "the lowest held-out loss" + (" of one seed" if summary.num_seeds == 1 else "")
    return f"{where}, {best.encoding} has {lowest}: {loss}{tied and f'; {tied}'}."


def _spread(summary: Summary) -> str:
    return "the spread of windows" if summary.num_seeds == 1 else "the spread of seeds and windows"


def _trends(summary: Summary) -> list[str]:
    """Which encodings stay level from the training length to the longest."""
    base, longest = summary.base_length, summary.lengths[-1]
    gains, level = "Gains from the longer text", f"Stays within {LEVEL:.0%} of its loss"
    somewhat, much, unclear = "Gets somewhat worse", "Gets much worse", f"Changes by no more than {_spread(summary)}"
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
    span = f"from {base:,} to {longest:,} tokens"
    return [f"{words}, {span}: {spoken(names)}." for words, names in groups.items() if names]


def _rises(summary: Summary) -> str:
    """Where, within the longest windows, the loss of an encoding leaves the level of its training length for good."""
    places = ((row.encoding, row.rises_from(summary.train_length, CLEAR)) for row in summary.rows)
    found = [f"{name} from about position {place:,}" for name, place in places if place is not None]
    level = f"more than {CLEAR:.0%} above its level within the training length"
    return f"By position, the loss rises {level} and stays there: {spoken(found)}." if found else ""


def context_sentences(summary: Summary) -> list[str]:
    """The losses where every token has its full context, and who uses what is far in it."""
    rows = [row for row in summary.rows if row.far]  # those whose losses are finite
    if not rows:
        return []
    contexts = rows[0].by_stretch
    fewest, most = min(contexts), max(contexts)
    losses = spoken([f"{row.encoding} {row.in_context(most):.3f}" for row in rows])
    found = [f"With {most:,} tokens before every token, in windows that overlap, the losses are {losses}."]
    groups: dict[str, list[str]] = {"used by": [], "without clear effect for": [], "harmful to": []}
    used, unclear, harmful = groups.values()
    for row in rows:
        if row.far:
            group = unclear if not row.far_is_clear else used if row.far.mean < 0 else harmful
            group.append(f"{row.encoding} ({row.far.mean:+.3f})")
    if len(contexts[most]) >= ENOUGH_WINDOWS:
        said = "; ".join(f"{words} {spoken(names)}" for words, names in groups.items() if names)
        found.append(f"What stands more than {fewest:,} tokens back, of {most:,}, is {said}.")
    return found


def _bigram(summary: Summary) -> str:
    bigram, base = summary.bigram_loss, summary.base_length
    if bigram is None:
        return ""
    losses = {row.encoding: cell.mean for row in summary.measured(base) if (cell := row.by_length[base])}
    above = [name for name, loss in losses.items() if loss >= bigram]
    who = f"{spoken(above)} {'is' if len(above) == 1 else 'are'} not below it" if above else "all are below it"
    return f"A bigram count, which knows the one token before, has a loss of {bigram:.3f}: at {base:,} tokens {who}."


def _overfitted(summary: Summary) -> str:
    pairs = [
        f"{row.encoding} ({row.train_loss.mean:.2f} in training, {held_out.mean:.2f} held out)"
        for row in summary.rows
        if (held_out := row.by_length[summary.base_length])
        and row.train_loss
        and held_out.mean > OVERFITTED * row.train_loss.mean
    ]
    advice = "More text or fewer steps would help."
    return f"Overfitted, so that the losses say little about the encoding: {spoken(pairs)}. {advice}" if pairs else ""


def _missing(summary: Summary) -> str:
    names = [row.encoding for row in summary.rows if any(row.by_length[length] is None for length in summary.lengths)]
    return f"A dash stands where a loss was not finite or not measured: {spoken(names)}." if names else ""


def _caution(summary: Summary) -> str:
    if summary.num_seeds == 1:
        return "One seed was trained, so the difference between seeds is not known: small differences may be chance."
    return f"The spread is over {counted(summary.num_seeds, 'seed')} of a small model; larger models may differ."


def spoken(words: list[str]) -> str:
    """A list as it is spoken: a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
