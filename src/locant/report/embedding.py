"""`locant embed` in a terminal: the shapes from the text to its embeddings, the tables, and the first tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from locant.embedding.flow import Flow
from locant.report.console import QUIET, counted, out, show, table

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["print_flow", "shapes"]

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def print_flow(flow: Flow) -> None:
    """Three short tables: the text and the shapes it takes, what the tables weigh, and the first tokens."""
    console = out()
    for part in (_text(flow), _tables(flow), _first(flow)):
        show(console, part)
        show(console)


def shapes(flow: Flow) -> str:
    """The stages in one line, as in ``[8,4] → [8,4,256] + [4,256] → [8,4,256]``."""
    stages = f"{_shape(flow.ids)} → {_shape(flow.token_vectors)}"
    if flow.position_vectors is None:
        return stages
    return f"{stages} + {_shape(flow.position_vectors)} → {_shape(flow.embeddings)}"


def _text(flow: Flow) -> Table:
    rows = table()
    rows.show_header = False
    rows.box = None
    rows.add_column(no_wrap=True, style=QUIET)
    rows.add_column(overflow="fold")
    rows.add_row("text", flow.source)
    rows.add_row("characters", f"{flow.characters:,}")
    each = f"{flow.characters / flow.tokens:.2f} characters per token"
    rows.add_row("tokens", f"{flow.tokens:,}: {each}, of a vocabulary of {flow.vocab_size:,}")
    padding = f", with {counted(flow.padding, 'place')} of padding" if flow.padding else ""
    cut = f"{flow.windows:,} of {counted(flow.context, 'token')}, stride {flow.stride}"
    rows.add_row("windows", f"{cut}; embedded here: {flow.embedded_windows:,}{padding}")
    rows.add_row("shapes", shapes(flow))
    rows.add_row("", _legend(flow))
    if (door := _other_door(flow)) is not None:
        rows.add_row("positions", door)
    return rows


def _legend(flow: Flow) -> str:
    if flow.position_vectors is None:
        return "ids → token rows"
    return f"ids → token rows + {flow.encoding} positions → embeddings"


def _other_door(flow: Flow) -> str | None:
    """Where positions enter the model, if not in the embeddings."""
    apart = f"{flow.encoding} leaves embeddings as they are: in every layer it"
    if flow.cos_sin is not None:
        return f"{apart} rotates queries and keys, by cos and sin of {_shape(flow.cos_sin)} (positions, pairs)."
    if flow.bias is not None:
        return f"{apart} adds a bias of {_shape(flow.bias)} (heads, queries, keys) to the scores."
    if flow.position_vectors is None:
        return f"{flow.encoding} tells the model nothing of positions: word order enters through the causal mask alone."
    return None


def _tables(flow: Flow) -> Table:
    rows = table()
    rows.add_column("table", no_wrap=True)
    for heading in ("shape", "parameters", "fp32", "bf16"):
        rows.add_column(heading, justify="right", no_wrap=True)
    for one in flow.tables:
        rows.add_row(one.name, _shape(one.shape), f"{one.parameters:,}", _size(one.bytes_fp32), _size(one.bytes_bf16))
    if len(flow.tables) > 1:
        totals = [sum(getattr(one, part) for one in flow.tables) for part in ("parameters", "bytes_fp32", "bytes_bf16")]
        rows.add_row("together", "", f"{totals[0]:,}", _size(totals[1]), _size(totals[2]))
    return rows


def _first(flow: Flow) -> Table:
    rows = table()
    for heading in ("position", "id"):
        rows.add_column(heading, justify="right", no_wrap=True)
    rows.add_column("token", overflow="fold")
    rows.add_column("its embedding begins", overflow="fold")
    for one in flow.first:
        rows.add_row(str(one.position), str(one.id), one.text, "  ".join(f"{value:+.3f}" for value in one.values))
    return rows


def _shape(shape: Sequence[int]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


def _size(count: int) -> str:
    """A number of bytes in the unit that fits.

    >>> _size(32_000 * 4_096 * 2), _size(12)
    ('250.0 MiB', '12 bytes')
    """
    size = float(count)
    for unit in UNITS:
        if size < 1024 or unit == UNITS[-1]:
            return f"{count} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("the last unit holds everything")
