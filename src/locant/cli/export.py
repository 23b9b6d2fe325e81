"""``locant export``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from locant.cli.options import Place, as_json, only_given

__all__ = ["verb"]


@click.command("export")
@click.argument("store", type=Place())
@click.option("--to", metavar="FORMAT", required=True, help="The format to write.")
@click.option("-o", "--output", type=Place(), required=True, help="A folder that is not there yet, or empty.")
@click.option("--format", metavar="FORMAT", help="The format that STORE has. Default: locant.")
@click.option("--dtype", metavar="NAME", help="Of nanogpt's tokens, whose file does not state it. Default: uint16.")
@click.option("--tokenizer", metavar="NAME|PATH", help="The tokenizer of a STORE that has none of its own.")
@click.option("--end-of-text", type=int, metavar="ID", help="The id after each document of a STORE without an index.")
@as_json
def verb(store: Path, to: str, output: Path, as_json: bool, **options: Any) -> None:
    """Write a token store in the format of another program, or one of theirs as a locant store.

    \b
    nanogpt    train.bin, a file of nothing but tokens
    megatron   tokens.bin and tokens.idx
    datatrove  00000.ds with its index and metadata, for each shard
    locant     a locant store; needs the tokenizer
    or a format that an installed package offers (entry points "locant.formats")

    STORE stays as it is. Every id is checked against the vocabulary, and every index against its tokens.
    """  # noqa: D301
    from locant.report.console import print_result, progress_bar
    from locant.text.store import TokenStore, export_store

    opened = TokenStore(store, **only_given(options))
    with progress_bar("token") as progress:
        exported = export_store(opened, output, to=to, progress=lambda done: progress(done, len(opened)))
    print_result(dataclasses.asdict(exported), str(exported), as_json=as_json)
