"""What verbs answer, printed for people or as JSON."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and nothing else, on stdout.")


class Answer(NamedTuple):
    """Values for JSON; for people a line, or what prints it, and the files that were written; and the exit code."""

    facts: Any
    words: str | Callable[[], object]
    files: Sequence[Path] = ()
    code: int = 0


def answers(verb: Callable[..., Answer]) -> Callable[..., None]:
    """A verb whose answer is printed, with ``--json`` as JSON."""

    @as_json
    @functools.wraps(verb)
    def run(*, as_json: bool, **options: Any) -> None:
        from locant.report.console import print_json

        answer = verb(**options)
        if as_json:
            print_json(answer.facts)
        else:
            click.echo(answer.words) if isinstance(answer.words, str) else answer.words()
            for file in answer.files:
                click.echo(file)
        if answer.code:
            raise click.exceptions.Exit(answer.code)

    return run


def drawn(path: Path | None, draw: Callable[[], Any]) -> list[Path]:
    """Write the picture that is asked for; returns its path, or none."""
    if path is None:
        return []
    from locant.figures.canvas import save

    save(draw(), path)
    return [path]
