"""`locant embed` in a terminal: the shapes from the text to its embeddings, the tables, and the first tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from locant.embedding.flow import Flow
from locant.report.console import counted, named_rows, show, size, table

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["print_flow", "shapes"]


def print_flow(flow: Flow) -> None:
    """Three short tables: the text and the shapes it takes, what the tables weigh, and the first tokens."""
    show(_text(flow), _tables(flow), _first(flow))
    show("")


def shapes(flow: Flow) -> str:
    """The stages in one line, as in ``[8,4] → [8,4,256] + [4,256] → [8,4,256]``."""
    stages = f"{_shape(flow.ids)} → {_shape(flow.token_vectors)}"
    if flow.position_vectors is None:
        return stages
    return f"{stages} + {_shape(flow.position_vectors)} → {_shape(flow.embeddings)}"


def _text(flow: Flow) -> Table:
    rows = named_rows()
    rows.add_row("text", flow.source)
    rows.add_row("characters", f"{flow.characters:,}")
    each = f"{flow.characters / flow.tokens:.2f} characters per token"
    rows.add_row("tokens", f"{flow.tokens:,}: {each}, of a vocabulary of {flow.vocab_size:,}")
    padding = f", with {counted(flow.padding, 'place')} of padding" if flow.padding else ""
    cut = f"{flow.windows:,} of {counted(flow.context, 'token')}, stride {flow.stride}"
    rows.add_row("windows", f"{cut}; embedded here: {flow.embedded_windows:,}{padding}")
    rows.add_row("shapes", shapes(flow))
    adds = flow.position_vectors is not None
    rows.add_row("", "ids → token rows" + (f" + {flow.encoding} positions → embeddings" if adds else ""))
    apart = f"{flow.encoding} leaves embeddings as they are: in every layer it"
    if flow.cos_sin is not None:
        shape = f"{_shape(flow.cos_sin)} (positions, pairs)"
        rows.add_row("positions", f"{apart} rotates queries and keys, by cos and sin of {shape}.")
    elif flow.bias is not None:
        shape = f"{_shape(flow.bias)} (heads, queries, keys)"
        rows.add_row("positions", f"{apart} adds a bias of {shape} to the scores.")
    elif not adds and flow.model is not None:
        rows.add_row("positions", f"they act in the layers of this model: locant explain {flow.model}")
    elif not adds:
        nothing = "tells the model nothing of positions: word order enters through the causal mask alone."
        rows.add_row("positions", f"{flow.encoding} {nothing}")
    return rows


def _tables(flow: Flow) -> Table:
    rows = table("shape", "parameters", "fp32", "bf16", name="table")
    for one in flow.tables:
        rows.add_row(one.name, _shape(one.shape), f"{one.parameters:,}", size(one.bytes_fp32), size(one.bytes_bf16))
    if len(flow.tables) > 1:
        totals = [sum(getattr(one, part) for one in flow.tables) for part in ("parameters", "bytes_fp32", "bytes_bf16")]
        rows.add_row("together", "", f"{totals[0]:,}", size(totals[1]), size(totals[2]))
    return rows


def _first(flow: Flow) -> Table:
    rows = table("position", "id")
    rows.add_column("token", overflow="fold")
    rows.add_column("its embedding begins", overflow="fold")
    for one in flow.first:
        rows.add_row(str(one.position), str(one.id), one.text, "  ".join(f"{value:+.3f}" for value in one.values))
    return rows


def _shape(shape: Sequence[int]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"
