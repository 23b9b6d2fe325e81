"""``locant prepare``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from locant.cli.options import as_json, only_given, output, tokenizer_options
from locant.errors import InputError

__all__ = ["verb"]

ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\0": "\0", r"\\": "\\"}


class Escaped(click.ParamType):
    r"""A text in which ``\n``, ``\t``, ``\r``, ``\0`` and ``\\`` stand for what cannot be typed."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value:
            self.fail("the separator is empty, expected at least one character", param, ctx)
        return re.sub(r"\\[ntr0\\]", lambda found: ESCAPES[found[0]], value)


@click.command("prepare")
@click.argument("paths", nargs=-1, type=str, metavar="PATH...")
@output("The folder of the store.")
@tokenizer_options
@click.option(
    "--separator", type=Escaped(), help=r"What stands between documents of a text, such as '\n\n'. Default: nothing."
)
@click.option("--field", help="The key (.jsonl) or column (.parquet) of the text. Default: text.")
@click.option(
    "--end-of-text/--no-end-of-text",
    "append_end_of_text",
    default=None,
    help="Whether an end-of-text id follows every document. Default: if the tokenizer has one.",
)
@click.option("--shard-size", type=click.IntRange(min=1), metavar="TOKENS", help="Of a file. Default: 67108864.")
@click.option(
    "--engine", type=click.Choice(["auto", "tokenizers", "gigatoken"]), help="What encodes. Default: auto, the faster."
)
@click.option("--workers", type=click.IntRange(min=1), help="Processes. Default: one for each core; one for a task.")
@click.option("--task", type=click.IntRange(min=0), help="Do only this share of the work, 0 to NUM_TASKS - 1.")
@click.option("--num-tasks", type=click.IntRange(min=1), help="Into how many shares the work is divided.")
@click.option("--finalize", is_flag=True, help="Join what all tasks have made.")
@click.option("--ray", metavar="ADDRESS|local", help="Do the work on a Ray cluster.")
@click.option("--restart", is_flag=True, help="Discard unfinished work in the folder, and begin anew.")
@click.option("--dry-run", is_flag=True, help="Say how many documents, tokens and bytes it would be; write nothing.")
@as_json
@click.pass_context
def verb(
    ctx: click.Context,
    paths: tuple[str, ...],
    output: Path | None,
    download: bool,
    finalize: bool,
    restart: bool,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Make a token store from files of text.

    PATH is a .txt, .md, .jsonl or .parquet file, each also .gz or .zst, a folder, a glob, or - for standard input.
    A run that was interrupted goes on when the same command is given again. A finished store is never changed.

    \b
    On many machines that see the same folder:
      locant prepare PATH... -o STORE --task I --num-tasks N      for every I from 0 to N - 1
      locant prepare --finalize -o STORE
    """  # noqa: D301  # click looks for the character, not for its name
    from locant.report.preparing import finalize_store, prepare_store, show_estimate

    if finalize:
        _require_alone(ctx)
        finalize_store(output, as_json=as_json)
    elif dry_run:
        show_estimate(paths, only_given(options), download=download, as_json=as_json)
    else:
        prepare_store(paths, output, {**only_given(options), "resume": not restart}, download=download, as_json=as_json)


def _require_alone(ctx: click.Context) -> None:
    """Nothing that says what to make stands beside ``--finalize``: the tasks were told."""
    others = [one for one in ctx.command.params if one.name not in ("finalize", "output", "as_json")]
    given = [
        _word(one, ctx) for one in others if ctx.get_parameter_source(str(one.name)) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise InputError(f"got {', '.join(given)} beside --finalize", "locant prepare --finalize -o STORE")


def _word(param: click.Parameter, ctx: click.Context) -> str:
    """A parameter as it was typed."""
    if isinstance(param, click.Argument):
        return param.human_readable_name
    return (param.secondary_opts if ctx.params[str(param.name)] is False else param.opts)[0]
