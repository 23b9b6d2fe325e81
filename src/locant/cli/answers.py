"""What verbs answer, printed for people or as JSON."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and nothing else, on stdout.")


class Answer(NamedTuple):
    """Values for JSON; for people a line, or what prints it, and the files that were asked for; and the exit code."""

    facts: Any
    words: str | Callable[[], object]
    files: Sequence[Path | None] = ()
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
            for file in filter(None, answer.files):
                click.echo(file)
        if answer.code:
            raise click.exceptions.Exit(answer.code)

    return run


def draw_into(path: Path | None, draw: Callable[[], Any]) -> None:
    """Write a picture, where one is asked for."""
    from locant.figures.canvas import save

    if path is not None:
        save(draw(), path)
