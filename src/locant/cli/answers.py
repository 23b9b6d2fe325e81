"""The results of verbs, printed for people or as JSON."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

GGUF = "locant.gguf"
"""The key in the context of a verb for its GGUF file, and for what the verb reads of it."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout, and nothing else.")


class Answer(NamedTuple):
    """The result of a verb.

    `facts` are the values for JSON. `words` are the text for people, or a function that prints it. `files` are the
    paths of the files that were written, and `code` is the exit code.
    """

    facts: Any
    words: str | Callable[[], object]
    files: Sequence[Path | None] = ()
    code: int = 0


def answers(verb: Callable[..., Answer]) -> Callable[..., None]:
    """Print the answer of a verb, as JSON with ``--json``.

    If the model of the verb is a GGUF file, a line on stderr and the field ``weights`` state what became of its
    weights.
    """

    @as_json
    @functools.wraps(verb)
    def run(*, as_json: bool, **options: Any) -> None:
        from locant.report.console import print_json

        weights = _describe_gguf(**options)
        with warnings.catch_warnings():
            for note in weights["notes"] if weights else ():  # which are written already
                warnings.filterwarnings("ignore", re.escape(note))
            answer = verb(**options)
        if as_json:
            print_json({**answer.facts, "weights": weights} if weights else answer.facts)
        else:
            click.echo(answer.words) if isinstance(answer.words, str) else answer.words()
            for file in filter(None, answer.files):
                click.echo(file)
        if answer.code:
            raise click.exceptions.Exit(answer.code)

    return run


def _describe_gguf(*, dtype: str | None = None, **_: Any) -> dict[str, Any] | None:
    """Write to stderr what becomes of the weights of a GGUF file, and return it as plain values."""
    if (gguf_call := click.get_current_context().meta.get(GGUF)) is None:
        return None
    from locant.checkpoints.gguf_model import gguf_weights
    from locant.report.console import log_line

    file, reads = gguf_call
    weights = gguf_weights(file, dtype or "auto", table_only=reads == "table")
    for line in (str(weights), *weights.notes):
        log_line(line)
    return weights._asdict()


def draw_into(path: Path | None, draw: Callable[[], Any]) -> None:
    """Draw a picture and write it to `path`, unless `path` is None."""
    from locant.figures.canvas import save

    if path is not None:
        save(draw(), path)
