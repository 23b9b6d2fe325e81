"""``locant prepare`` and ``locant export``: make token stores from texts, and convert them to other formats."""

from __future__ import annotations

import dataclasses
import inspect
import re
import warnings
from pathlib import Path
from typing import Any, get_args

import click

from locant.cli.answers import Answer, answers
from locant.cli.errors import as_typed
from locant.cli.options import (
    OneOf,
    PathOption,
    Whole,
    count,
    flags_on_command_line,
    only_given,
    output,
    tokenizer_options,
)
from locant.errors import InputError, Remedy
from locant.shell import shell_path
from locant.spelling import dtype_name
from locant.text import Tokenizer
from locant.text.prepare import estimate, finalize, problems
from locant.text.prepare import prepare as prepare_store
from locant.text.prepare.plan import ContentOptions
from locant.text.prepare.sources import FIELD
from locant.text.store import TokenStore
from locant.text.tokenizer.engine import EngineName

DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(prepare_store).parameters.items()}

ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\0": "\0", r"\\": "\\"}


def _unescape(text: str) -> str:
    r"""Replace the escapes ``\n``, ``\t``, ``\r``, ``\0`` and ``\\`` with the characters that they mean."""
    return re.sub(r"\\[ntr0\\]", lambda escape: ESCAPES[escape[0]], text)


@click.command("prepare")
@click.argument("paths", nargs=-1, type=str, metavar="PATH...")
@output("The folder of the store.")
@tokenizer_options
@click.option(
    "--separator", type=_unescape, metavar="TEXT",
    help=r"The text between two documents of a file, such as '\n\n'. Default: a file is one document.",
)  # fmt: skip
@click.option("--field", help=f"The key (.jsonl) or column (.parquet) of the text. Default: {FIELD}.")
@click.option(
    "--encoding", metavar="NAME", help="Encoding of .txt, .md and .jsonl files, such as cp1252 or gbk. Default: UTF-8."
)
@click.option(
    "--skip-bad", is_flag=True, default=None,
    help="Skip and count bad lines, broken files and documents that are too long. Reads all files twice.",
)  # fmt: skip
@click.option(
    "--end-of-text/--no-end-of-text", "append_end_of_text", default=None,
    help="Append an end-of-text id to every document, or not. Default: append it if the tokenizer has one.",
)  # fmt: skip
@click.option(
    "--end-of-text-token", "end_of_text", metavar="TOKEN",
    help="The token after every document. Default: the tokenizer's, found by its usual names.",
)  # fmt: skip
@click.option(
    "--begin-of-text-token", "begin_of_text", metavar="TOKEN", help="A token before every document. Default: none.",
)  # fmt: skip
@count("--shard-size", metavar="TOKENS", help=f"Tokens per file. Default: {DEFAULTS['shard_size']}.")
@click.option(
    "--engine", type=OneOf(("auto", *get_args(EngineName))),
    help=f"The tokenizer engine. Default: {DEFAULTS['engine']}, which uses the fast one if its ids are the same.",
)  # fmt: skip
@count("--workers", help="Number of processes. Default: one per 128 MiB, at most one per core.")
@count("--task", low=0, help="Do only this share of the work, from 0 to NUM_TASKS - 1.")
@count("--num-tasks", help="Number of shares that the work is divided into.")
@click.option("--finalize", "only_join", is_flag=True, help="Join the parts of all tasks.")
@click.option("--ray", metavar="ADDRESS|local", help="Do the work on a Ray cluster.")
@click.option("--restart", is_flag=True, help="Discard unfinished work in the folder and start again.")
@click.option("--dry-run", is_flag=True, help="Estimate documents, tokens and bytes without writing anything.")
@answers
def prepare(paths: tuple[str, ...], output: Path | None, **options: Any) -> Answer:
    """Make a token store from files of text.

    PATH is a .txt, .md, .jsonl, .jsonlines, .ndjson, .json (one record per line) or .parquet file, also compressed as
    .gz, .zst, .bz2 or .xz, a folder, a glob, or - for standard input. Files of a folder with other suffixes are counted
    and named. To resume an interrupted run, run the same command again. This also works after you mend a bad file: only
    its part is made again. A finished store is never changed.

    \b
    On many machines that see the same folder:
      locant prepare PATH... -o STORE --task I --num-tasks N      for every I from 0 to N - 1
      locant prepare --finalize -o STORE
    """  # noqa: D301  # click looks for the character, not for its name
    from locant.report.console import progress_bar

    download, only_join, restart = (options.pop(each) for each in ("download", "only_join", "restart"))
    dry_run, settings = options.pop("dry_run") and not only_join, only_given(options)
    if download and settings.get("tokenizer", "bytes") != "bytes":
        settings["tokenizer"] = Tokenizer.load(settings["tokenizer"], download=True)
    if dry_run:
        content = {name: value for name, value in settings.items() if name in ContentOptions.__annotations__}
        with warnings.catch_warnings(record=True) as caught:
            estimated = estimate(paths, **content)
        return _with_warnings(Answer(dataclasses.asdict(estimated), str(estimated)), caught)
    if output is None:
        raise InputError("got no folder for the store", "-o FOLDER")
    if only_join:
        others = (name for name in click.get_current_context().params if name not in ("only_join", "output", "as_json"))
        if flags := flags_on_command_line(*others):  # the tasks have already used these options
            raise InputError(f"got {', '.join(flags)} with --finalize", "locant prepare --finalize -o STORE")
        return _describe_store(finalize(output))
    with warnings.catch_warnings(record=True) as caught, progress_bar() as progress:
        store = prepare_store(paths, output, resume=not restart, progress=progress, **settings)
    if store is not None:
        return _with_warnings(_describe_store(store), caught)
    facts = {"store": str(output), "task": settings["task"], "num_tasks": settings["num_tasks"]}
    done = f"{output}: task {settings['task']} of {settings['num_tasks']} is done"
    return _with_warnings(
        Answer(facts, f"{done}. When all are done: locant prepare --finalize -o {shell_path(output)}"), caught
    )


def _with_warnings(answer: Answer, caught: list[warnings.WarningMessage]) -> Answer:
    """Add a line for each warning to the text of an answer, and ``warnings`` to the JSON."""
    verb = click.get_current_context().command

    def spelled(message: Warning | str) -> str:
        text = message.args[0] if isinstance(message, Warning) and message.args else None
        return as_typed(text, verb) if isinstance(text, Remedy) else str(message)

    messages = [spelled(warning.message) for warning in caught]
    lines = [f"warning: {message}" for message in messages]
    return Answer({**answer.facts, "warnings": messages}, "\n".join([str(answer.words), *lines]))


def _describe_store(store: TokenStore) -> Answer:
    from locant.report.console import pluralize

    tokens, documents, shards = len(store), len(store.documents) - 1, len(store.shards)
    size, dtype = tokens * store.dtype.itemsize, store.dtype.name
    facts = {
        "store": str(store.path), "tokens": tokens, "documents": documents, "shards": shards, "dtype": dtype,
        "bytes": size, "vocab_size": store.vocab_size, "end_of_text": store.end_of_text,
        "fingerprint": store.fingerprint, **dataclasses.asdict(problems(store)),
    }  # fmt: skip
    where = f"{pluralize(documents, 'document')}, {pluralize(shards, 'shard')}, {dtype}, {pluralize(size, 'byte')}"
    return Answer(facts, f"{store.path}: {pluralize(tokens, 'token')} in {where}")


@click.command("export")
@click.argument("store", type=PathOption())
@click.option("--to", metavar="FORMAT", required=True, help="The format to write.")
@output("A new or empty folder.", required=True)
@click.option("--format", metavar="FORMAT", help="The format of STORE. Default: locant.")
@click.option(
    "--dtype",
    type=dtype_name,
    metavar="NAME",
    help="The dtype of nanogpt's tokens, because their file does not state it. Default: uint16.",
)
@click.option("--tokenizer", metavar="NAME|PATH", help="The tokenizer of a STORE that does not contain one.")
@click.option(
    "--end-of-text", type=Whole(), metavar="ID", help="The id after each document of a STORE without an index."
)
@answers
def export(store: Path, to: str, output: Path, **options: Any) -> Answer:
    """Write a token store in the format of another program, or convert such a format to a locant store.

    \b
    nanogpt    train.bin, which holds only tokens
    megatron   tokens.bin and tokens.idx
    datatrove  00000.ds with its index and metadata, for each shard
    locant     a locant store (needs --tokenizer)
    or a format from an installed package (entry points "locant.formats")

    STORE is not changed. Every id is checked against the vocabulary, and every index against its tokens.
    """  # noqa: D301
    from locant.report.console import progress_bar
    from locant.text.store import export_store

    opened = TokenStore(store, **only_given(options))
    with progress_bar("token") as progress:
        exported = export_store(opened, output, to=to, progress=lambda done: progress(done, len(opened)))
    return Answer(dataclasses.asdict(exported), str(exported))
