"""`locant neighbours` in a terminal: the nearest tokens, or how alike the words of a list are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from locant.embedding.words import Term, Words
from locant.report.console import fits, show, table

__all__ = ["nearest_facts", "print_nearest", "print_similarity", "similarity_facts"]


def nearest_facts(words: Words, terms: Sequence[Term], k: int) -> dict[str, Any]:
    """The tokens nearest to a sum of words, ready for JSON."""
    found = words.nearest(terms, k)
    each = zip(found.ids.tolist(), found.scores.tolist(), strict=True)
    return {
        "words": _spelled(words, [term.word for term in terms]),
        "signs": [term.sign for term in terms],
        "nearest": [{"token": words.tokenizer.token(number), "id": number, "cosine": score} for number, score in each],
    }


def similarity_facts(words: Words, listed: Sequence[str]) -> dict[str, Any]:
    """The cosine of any two words of a list, ready for JSON."""
    return {"words": _spelled(words, listed), "similarity": words.similarity(listed).tolist()}


def print_nearest(facts: Mapping[str, Any]) -> None:
    """A table of tokens, the nearest first."""
    rows = table("id", "cosine", name="token")
    for one in facts["nearest"]:
        rows.add_row(one["token"], str(one["id"]), f"{one['cosine']:+.3f}")
    show(rows, *_notes(facts))


def print_similarity(facts: Mapping[str, Any]) -> None:
    """A table of every word with every word, if that fits into a line, and for each which other is nearest."""
    words = list(facts["words"])
    rows, nearest = table(*words, "nearest", name="cosine"), table("cosine", "nearest", name="word")
    for place, (word, row) in enumerate(zip(words, facts["similarity"], strict=True)):
        others = {other: value for number, (other, value) in enumerate(zip(words, row, strict=True)) if number != place}
        found = max(others, key=others.__getitem__, default="")
        rows.add_row(word, *(f"{value:+.3f}" for value in row), found)
        nearest.add_row(word, f"{others[found]:+.3f}" if others else "", found)
    if fits(rows):
        return show(rows, *_notes(facts))
    show(nearest, "All pairs: --json, or --figure for a heat map.", *_notes(facts))
    return None


def _spelled(words: Words, listed: Sequence[str]) -> dict[str, list[str]]:
    """The tokens of each word."""
    return {word: [words.tokenizer.token(number) for number in words.ids(word)] for word in listed}


def _notes(facts: Mapping[str, Any]) -> list[str]:
    """A sentence for each word whose vector is no row."""
    return [
        f"{word} is {len(tokens)} tokens, {' '.join(tokens)}: its vector is the mean of their rows"
        for word, tokens in facts["words"].items()
        if len(tokens) > 1
    ]
