"""``locant prepare``."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource

from locant.cli.options import as_json, only_given, output, tokenizer_options
from locant.errors import InputError
from locant.text import Tokenizer
from locant.text.prepare import estimate, finalize, prepare
from locant.text.prepare.inputs import FIELD
from locant.text.prepare.request import ContentOptions
from locant.text.tokenizer.engine import EngineName

__all__ = ["verb"]

DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(prepare).parameters.items()}

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
    "--separator", type=Escaped(), help=r"The text between two documents of a file, such as '\n\n'. Default: nothing."
)
@click.option("--field", help=f"The key (.jsonl) or column (.parquet) of the text. Default: {FIELD}.")
@click.option(
    "--end-of-text/--no-end-of-text",
    "append_end_of_text",
    default=None,
    help="Whether an end-of-text id follows every document. Default: if the tokenizer has one.",
)
@click.option(
    "--shard-size", type=click.IntRange(min=1), metavar="TOKENS", help=f"Of a file. Default: {DEFAULTS['shard_size']}."
)
@click.option(
    "--engine",
    type=click.Choice(["auto", *get_args(EngineName)]),
    help=f"What encodes. Default: {DEFAULTS['engine']}, the fast one where its ids are the same.",
)
@click.option("--workers", type=click.IntRange(min=1), help="Processes. Default: one for each core; one for a task.")
@click.option("--task", type=click.IntRange(min=0), help="Do only this share of the work, 0 to NUM_TASKS - 1.")
@click.option("--num-tasks", type=click.IntRange(min=1), help="Into how many shares the work is divided.")
@click.option("--finalize", "only_join", is_flag=True, help="Join what all tasks have made.")
@click.option("--ray", metavar="ADDRESS|local", help="Do the work on a Ray cluster.")
@click.option("--restart", is_flag=True, help="Discard unfinished work in the folder, and begin anew.")
@click.option("--dry-run", is_flag=True, help="Estimate documents, tokens and bytes; write nothing.")
@as_json
@click.pass_context
def verb(
    ctx: click.Context,
    paths: tuple[str, ...],
    output: Path | None,
    download: bool,
    only_join: bool,
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
    from locant.report.preparing import print_estimate, print_store, print_task, progress_bar

    given = only_given(options)
    if download and given.get("tokenizer", "bytes") != "bytes":
        given["tokenizer"] = Tokenizer.load(given["tokenizer"], download=True)
    if dry_run and not only_join:
        content = {name: value for name, value in given.items() if name in ContentOptions.__annotations__}
        print_estimate(estimate(paths, **content), as_json=as_json)
        return
    if output is None:
        raise InputError("got no folder for the store", "-o FOLDER")
    if only_join:
        _require_alone(ctx)
        print_store(finalize(output), as_json=as_json)
        return
    with progress_bar() as progress:
        store = prepare(paths, output, resume=not restart, progress=progress, **given)
    if store is None:
        print_task(output, given["task"], given["num_tasks"], as_json=as_json)
    else:
        print_store(store, as_json=as_json)


def _require_alone(ctx: click.Context) -> None:
    """Refuse other options beside ``--finalize``: what to make was decided by the tasks."""
    others = [one for one in ctx.command.params if one.name not in ("only_join", "output", "as_json")]
    typed = [one for one in others if ctx.get_parameter_source(str(one.name)) is ParameterSource.COMMANDLINE]
    if typed:
        given = ", ".join(one.get_error_hint(ctx) for one in typed)
        raise InputError(f"got {given} beside --finalize", "locant prepare --finalize -o STORE")
