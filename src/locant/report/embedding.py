"""Print the steps of `locant embed` and the nearest tokens of `locant neighbours`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from locant.embedding.flow import Flow
from locant.embedding.words import Term, Words
from locant.report.console import NamedRows, fits, named_rows, pluralize, shape, show, size, table
from locant.shell import shell_path

if TYPE_CHECKING:
    from rich.table import Table


def print_flow(flow: Flow) -> None:
    """Print three short tables: the text and its shapes, the size of the tables, and the first tokens."""
    show(named_rows(_text(flow)), _tables(flow), _first(flow))
    show("")


def shapes(flow: Flow) -> str:
    """Format the stages in one line, as in ``[8, 4] → [8, 4, 256] + [4, 256] → [8, 4, 256]``."""
    stages = f"{shape(flow.ids)} → {shape(flow.token_vectors)}"
    if flow.position_vectors is None:
        return stages
    return f"{stages} + {shape(flow.position_vectors)} → {shape(flow.embeddings)}"


def _text(flow: Flow) -> NamedRows:
    yield "text", flow.source
    yield "characters", f"{flow.characters:,}"
    each = f"{flow.characters / flow.tokens:.2f} characters per token"
    yield "tokens", f"{flow.tokens:,}: {each}, of a vocabulary of {flow.vocab_size:,}"
    padding = f", with {pluralize(flow.padding, 'place')} of padding" if flow.padding else ""
    cut = f"{flow.windows:,} of {pluralize(flow.context, 'token')}, stride {flow.stride}"
    yield "windows", f"{cut}; embedded here: {flow.embedded_windows:,}{padding}"
    adds = flow.position_vectors is not None
    stages = "ids → token rows" + (f" + {flow.encoding} positions → embeddings" if adds else "")
    yield "shapes", (shapes(flow), stages)
    subject = f"{flow.encoding} does not change embeddings. In every layer it"
    if flow.cos_sin is not None:
        sizes = f"{shape(flow.cos_sin)} (positions, pairs)"
        yield "positions", f"{subject} rotates queries and keys, by cos and sin of shape {sizes}."
    elif flow.bias is not None:
        sizes = f"{shape(flow.bias)} (heads, queries, keys)"
        yield "positions", f"{subject} adds a bias of shape {sizes} to the scores."
    elif not adds and flow.model is not None:
        yield "positions", f"applied in the layers of this model: locant explain {shell_path(flow.model)}"
    elif not adds:
        nothing = "gives the model no positions. Word order enters only through the causal mask."
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
    """Return the tokens nearest to a sum of words, ready for JSON."""
    nearest = words.nearest(terms, k)
    pairs = zip(nearest.ids.tolist(), nearest.scores.tolist(), strict=True)
    return {
        "words": _tokens_by_word(words, [term.word for term in terms]),
        "signs": [term.sign for term in terms],
        "nearest": [{"token": words.tokenizer.token(number), "id": number, "cosine": score} for number, score in pairs],
    }


def similarity_facts(words: Words, listed: Sequence[str]) -> dict[str, Any]:
    """Return the cosine of every pair of words in a list, ready for JSON."""
    return {"words": _tokens_by_word(words, listed), "similarity": words.similarity(listed).tolist()}


def print_neighbours(facts: Mapping[str, Any]) -> None:
    """Print the tokens nearest to a sum, or the similarities of the words in a list."""
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
    """Return a table of all pairs of words if it fits the line, else a table of the nearest word to each word."""
    words = list(facts["words"])
    rows, nearest = table(*words, "nearest", name="cosine"), table("cosine", "nearest", name="word")
    for place, (word, row) in enumerate(zip(words, facts["similarity"], strict=True)):
        others = {other: value for number, (other, value) in enumerate(zip(words, row, strict=True)) if number != place}
        neighbour = max(others, key=others.__getitem__, default="")
        rows.add_row(word, *(f"{value:+.3f}" for value in row), neighbour)
        nearest.add_row(word, f"{others[neighbour]:+.3f}" if others else "", neighbour)
    return [rows] if fits(rows) else [nearest, "For all pairs, use --json, or --figure for a heat map."]


def _tokens_by_word(words: Words, listed: Sequence[str]) -> dict[str, list[str]]:
    """Return the tokens of each word."""
    return {word: [words.tokenizer.token(number) for number in words.ids(word)] for word in listed}


def _notes(facts: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each word with several tokens, because the vector of such a word is a mean of rows."""
    return [
        f"{word} is {len(tokens)} tokens, {' '.join(tokens)}. Its vector is the mean of their rows."
        for word, tokens in facts["words"].items()
        if len(tokens) > 1
    ]
