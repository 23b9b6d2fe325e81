"""``locant vocabulary``."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from locant.cli.options import SEED, as_json, files, output
from locant.errors import InputError

__all__ = ["verb"]


@click.command("vocabulary")
@click.argument("model")
@files
@click.option("--keep", type=click.IntRange(min=1), help="Leave out all tokens but so many that the FILEs use most.")
@click.option("--add", multiple=True, metavar="TOKEN", help="Add a special token; may be given several times.")
@click.option(
    "--multiple-of", type=click.IntRange(min=1), default=1, show_default=True, help="With --add: rows of the tables."
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="With --add: of the new rows.")
@output("The folder to write. Default: MODEL-KEEP, or MODEL-added.")
@click.option("--force", is_flag=True, help="Replace the folder of a model that is there.")
@as_json
def verb(
    model: str,
    files: tuple[str, ...],
    keep: int | None,
    add: tuple[str, ...],
    multiple_of: int,
    seed: int,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Change the vocabulary of a model, in its tables, its head and its tokenizer together.

    MODEL is a folder with config.json, tokenizer.json and weights in safetensors; it stays as it is. Logits of the
    tokens that are kept do not change.
    """
    from dataclasses import asdict

    from locant.checkpoints.vocabulary import add_tokens, keep_tokens
    from locant.files import require_apart
    from locant.report.console import print_json
    from locant.report.embedding import print_change
    from locant.text.reading import read_texts

    if (keep is None) == (not add):
        raise InputError(
            "got neither or both of --keep and --add", f"locant vocabulary {model} corpus.txt --keep 32000"
        )
    if keep and not files:
        raise InputError("got --keep without a FILE", f"locant vocabulary {model} corpus.txt --keep {keep}")
    if files and not keep:
        raise InputError(f"got {', '.join(files)} beside --add, which reads no text", "--add without a FILE")
    written = output or Path(f"{Path(model).name}-{keep or 'added'}")
    if keep:
        _require_no_new_rows(keep)
    for file in files:
        require_apart(written, Path(file))
    if keep is None:
        change = add_tokens(model, written, add, multiple_of=multiple_of, seed=seed, force=force)
    else:
        change = keep_tokens(model, written, read_texts(files), keep, force=force)
    if as_json:
        print_json({**asdict(change), "files": files})
    else:
        print_change(change, files)


def _require_no_new_rows(keep: int) -> None:
    """Raise where an option was typed that is of the rows of added tokens."""
    context = click.get_current_context()
    sources = {name: context.get_parameter_source(name) for name in ("multiple_of", "seed")}
    typed = [name for name, source in sources.items() if source is ParameterSource.COMMANDLINE]
    if typed:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in typed)
        raise InputError(f"got {names} beside --keep, which adds no rows", f"--keep {keep} without {names}")
