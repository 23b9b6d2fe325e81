"""``locant export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from locant.cli.options import Place, as_json, only_given

__all__ = ["verb"]

FORMATS = click.Choice(["locant", "nanogpt", "megatron", "datatrove"])


@click.command("export")
@click.argument("store", type=Place())
@click.option("--to", type=FORMATS, required=True, help="The format to write.")
@click.option("-o", "--output", type=Place(), required=True, help="A folder that is not there yet, or empty.")
@click.option("--format", type=FORMATS, default="locant", show_default=True, help="The format that STORE has.")
@click.option("--dtype", metavar="NAME", help="Of nanogpt's tokens, which do not say it. Default: uint16.")
@click.option("--tokenizer", metavar="NAME|PATH", help="The tokenizer of a STORE that has none of its own.")
@click.option("--end-of-text", type=int, metavar="ID", help="The id after each document of a STORE without an index.")
@as_json
def verb(store: Path, to: Any, output: Path, format: Any, as_json: bool, **options: Any) -> None:  # noqa: A002
    """Write a token store in the format of another program, or one of theirs in ours.

    \b
    nanogpt    train.bin, a file of nothing but tokens
    megatron   tokens.bin and tokens.idx
    datatrove  00000.ds with its index and metadata, for each shard
    locant     a store of our own; needs the tokenizer

    STORE stays as it is. Every id is checked against the vocabulary, and every index against its tokens.
    """  # noqa: D301
    from locant.text.store import TokenStore
    from locant.text.store.export import export_store

    opened = TokenStore(store, format=format, **only_given(options))
    with _bar(len(opened)) as bar:
        exported = export_store(opened, output, to=to, progress=lambda done: bar.update(done - bar.n))
    if as_json:
        from locant.report.console import print_json

        print_json(exported.to_dict())
    else:
        from locant.report.console import out

        files = f"{len(exported.files)} file{'s' * (len(exported.files) != 1)}"
        out().print(f"{output}: {exported.tokens:,} tokens as {exported.dtype}, {to}, {files}", soft_wrap=True)


def _bar(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, disable=None, unit="token", unit_scale=True, leave=False, dynamic_ncols=True)
