"""Embeddings in a terminal: `locant embed`, from text to vectors, and `neighbours`, near tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from locant.embedding.flow import Flow
from locant.embedding.words import Term, Words
from locant.report.console import NamedRows, counted, fits, named_rows, shape, show, size, table

if TYPE_CHECKING:
    from rich.table import Table


def print_flow(flow: Flow) -> None:
    """Three short tables: the text and the shapes it takes, what the tables weigh, and the first tokens."""
    show(named_rows(_text(flow)), _tables(flow), _first(flow))
    show("")


def shapes(flow: Flow) -> str:
    """The stages in one line, as in ``[8, 4] → [8, 4, 256] + [4, 256] → [8, 4, 256]``."""
    stages = f"{shape(flow.ids)} → {shape(flow.token_vectors)}"
    if flow.position_vectors is None:
        return stages
    return f"{stages} + {shape(flow.position_vectors)} → {shape(flow.embeddings)}"


def _text(flow: Flow) -> NamedRows:
    yield "text", flow.source
    yield "characters", f"{flow.characters:,}"
    each = f"{flow.characters / flow.tokens:.2f} characters per token"
    yield "tokens", f"{flow.tokens:,}: {each}, of a vocabulary of {flow.vocab_size:,}"
    padding = f", with {counted(flow.padding, 'place')} of padding" if flow.padding else ""
    cut = f"{flow.windows:,} of {counted(flow.context, 'token')}, stride {flow.stride}"
    yield "windows", f"{cut}; embedded here: {flow.embedded_windows:,}{padding}"
    adds = flow.position_vectors is not None
    stages = "ids → token rows" + (f" + {flow.encoding} positions → embeddings" if adds else "")
    yield "shapes", (shapes(flow), stages)
    apart = f"{flow.encoding} leaves embeddings as they are: in every layer it"
    if flow.cos_sin is not None:
        of_shape = f"{shape(flow.cos_sin)} (positions, pairs)"
        yield "positions", f"{apart} rotates queries and keys, by cos and sin of {of_shape}."
    elif flow.bias is not None:
        of_shape = f"{shape(flow.bias)} (heads, queries, keys)"
        yield "positions", f"{apart} adds a bias of {of_shape} to the scores."
    elif not adds and flow.model is not None:
        yield "positions", f"they act in the layers of this model: locant explain {flow.model}"
    elif not adds:
        nothing = "tells the model nothing of positions: word order enters through the causal mask alone."
        yield "positions", f"{flow.encoding} {nothing}"


def _tables(flow: Flow) -> Table:
    dtypes = [*flow.tables[0].bytes] if flow.tables else []
    rows = table("shape", "parameters", *dtypes, name="table")
    for one in flow.tables:
        rows.add_row(one.name, shape(one.shape), f"{one.parameters:,}", *map(size, one.bytes.values()))
    if len(flow.tables) > 1:
        totals = [sum(one.bytes[dtype] for one in flow.tables) for dtype in dtypes]
        rows.add_row("together", "", f"{sum(one.parameters for one in flow.tables):,}", *map(size, totals))
    return rows


def _first(flow: Flow) -> Table:
    rows = table("position", "id")
    rows.add_column("token", overflow="fold")
    rows.add_column("its embedding begins", overflow="fold")
    for one in flow.first:
        rows.add_row(str(one.position), str(one.id), one.text, "  ".join(f"{value:+.3f}" for value in one.values))
    return rows


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


def print_neighbours(facts: Mapping[str, Any]) -> None:
    """The tokens nearest to a sum, or how alike the words of a list are."""
    if "nearest" in facts:
        show(_nearest(facts), *_notes(facts))
    elif "similarity" in facts:
        show(*_similarity(facts), *_notes(facts))


def _nearest(facts: Mapping[str, Any]) -> Table:
    rows = table("id", "cosine", name="token")
    for one in facts["nearest"]:
        rows.add_row(one["token"], str(one["id"]), f"{one['cosine']:+.3f}")
    return rows


def _similarity(facts: Mapping[str, Any]) -> list[Table | str]:
    """A table of every word with every word, if that fits into a line, and for each which other is nearest."""
    words = list(facts["words"])
    rows, nearest = table(*words, "nearest", name="cosine"), table("cosine", "nearest", name="word")
    for place, (word, row) in enumerate(zip(words, facts["similarity"], strict=True)):
        others = {other: value for number, (other, value) in enumerate(zip(words, row, strict=True)) if number != place}
        found = max(others, key=others.__getitem__, default="")
        rows.add_row(word, *(f"{value:+.3f}" for value in row), found)
        nearest.add_row(word, f"{others[found]:+.3f}" if others else "", found)
    return [rows] if fits(rows) else [nearest, "All pairs: --json, or --figure for a heat map."]


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
