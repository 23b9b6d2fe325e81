"""``locant neighbours``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from locant.cli.options import Place, as_json

__all__ = ["verb"]


@click.command("neighbours")
@click.argument("model")
@click.argument("words", nargs=-1, metavar="[WORD]...")
@click.option("-k", "--count", type=click.IntRange(min=1), default=10, show_default=True, help="How many tokens.")
@click.option("--figure", type=Place(), help="Of a list: a heat map of how alike the words are (.png, .svg, .pdf).")
@click.option("--map", "flat_map", type=Place(), help="Of a list: the words in two dimensions (.png, .svg, .pdf).")
@click.option("--layout", type=click.Choice(["pca", "umap"]), default="pca", show_default=True, help="Of the map.")
@click.option("--positions", type=Place(), help="Draw the model's table of positions, and how alike they are.")
@as_json
def verb(
    model: str,
    words: tuple[str, ...],
    count: int,
    figure: Path | None,
    flat_map: Path | None,
    layout: str,
    positions: Path | None,
    as_json: bool,
) -> None:
    """Show which tokens of a model are near to a word.

    \b
    king                   the tokens nearest to it
    king - man + woman     those nearest to a sum
    cat dog refrigerator   how alike any two are

    MODEL is a folder with config.json, tokenizer.json and weights in safetensors. Only its tables are read.
    """  # noqa: D301
    from locant.embedding.words import Words, terms_of
    from locant.errors import InputError
    from locant.figures.canvas import require_figure
    from locant.report.console import print_json
    from locant.report.embedding import nearest_facts, print_nearest, print_similarity, similarity_facts

    for path in (figure, flat_map, positions):
        require_figure(path)
    words = tuple(" ".join(words).split())
    if not (words or positions):
        raise InputError("got no word", f"locant neighbours {model} king")
    terms = terms_of(words) if words else None
    if (figure or flat_map) and (not words or terms):
        raise InputError("got a picture of a list, and no list of words", f"locant neighbours {model} cat dog house")
    facts: dict[str, Any] = {"model": model}
    if words:
        table = Words.from_pretrained(model)
        facts |= nearest_facts(table, terms, count) if terms else similarity_facts(table, words)
        _draw_words(table, words, figure, flat_map, layout)
    if positions:
        _draw_positions(model, positions)
    drawn = [str(path) for path in (figure, flat_map, positions) if path]
    if as_json:
        print_json({**facts, "figures": drawn})
        return
    if words:
        (print_nearest if terms else print_similarity)(facts)
    for path in drawn:
        click.echo(path)


def _draw_words(table: Any, listed: Sequence[str], figure: Path | None, flat_map: Path | None, layout: str) -> None:
    from locant.figures.canvas import save
    from locant.figures.embed import draw_flat_map, draw_similarity

    if figure:
        save(draw_similarity(listed, table.similarity(listed)), figure)
    if flat_map:
        save(draw_flat_map(listed, table.flat_map(listed, layout)), flat_map)


def _draw_positions(model: str, path: Path) -> None:
    from locant.embedding.input import InputEmbedding
    from locant.errors import InputError
    from locant.figures.canvas import save
    from locant.figures.plot import draw

    encoding = InputEmbedding.from_pretrained(model).encoding
    if "embed" not in encoding.doors():
        raise InputError(f"got {model}, which has no table of positions", "locant explain, which says what it has")
    save(draw(encoding, length=getattr(encoding, "max_seq_len", None)), path)
