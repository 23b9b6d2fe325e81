"""``locant list``, ``plot`` and ``bench``: which encodings there are, how they look, and what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from locant.cli.answers import Answer, answers
from locant.cli.options import SEED, OneOf, Whole, count, encoding_options, flag_of, only_given, output, require_taken
from locant.figures import MAX_LENGTH, TRAINED


@click.command("list")
@click.argument("name", required=False)
@encoding_options
@answers
def list_(name: str | None, **options: Any) -> Answer:
    """List every encoding, what it does and costs; or one in full, with its numbers.

    With a NAME, also its options, and its slopes or inverse frequencies, for a small model or for the sizes given.
    """
    from locant.report.console import talk
    from locant.report.listing import encoding_facts, facts_of_all, print_all, print_encoding

    given = only_given(options)
    if name is not None:
        require_taken(name, given, "list")
        facts = encoding_facts(name, **given)
        return Answer(facts, lambda: print_encoding(facts))
    if given:
        raise click.UsageError(f"got {flag_of(next(iter(given)))} without the name of an encoding")
    listed, broken = facts_of_all()
    for why in broken:
        talk(f"left out: {why}")
    return Answer(listed, lambda: print_all(listed))


@click.command("plot")
@click.argument("encoding")
@output("The picture; its suffix (.png, .svg, .pdf) is the format. Default: ENCODING.png.")
@click.option("--length", type=Whole(2, MAX_LENGTH), help="Positions to draw. Default: enough to see the pattern.")
@encoding_options
@click.option("--scaling", metavar="NAME[:FACTOR]", help="Of rotary, such as yarn:8; a wrong name lists all.")
@count("--trained", default=TRAINED, help="The trained length, which --scaling stretches.")
@click.option("--theme", type=OneOf(("light", "dark")), default="light", show_default=True, help="The paper.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of the random weights of learned tables.")
@click.option("--causal/--no-causal", default=None, help="Leave out a bias for keys that come later, or draw it.")
@answers
def plot(
    encoding: str, output: Path | None, length: int | None, trained: int, theme: str, seed: int, causal: bool | None,
    **options: Any,
) -> Answer:  # fmt: skip
    """Draw a picture of an encoding.

    \b
    what embeds        the table, and how alike its positions are
    what rotates       the angle of every pair, its cosine, and what is left of a product by distance
    what biases        what each head adds to the scores
    rotary --scaling   the wavelength of every pair, before and after

    ENCODING is a name from `locant list`. Learned tables are drawn as they are before training.
    """  # noqa: D301
    from locant.figures.canvas import THEMES, require_figure, save
    from locant.figures.plot import default_length, draw, encoding_to_draw
    from locant.positions.registry import name_of
    from locant.report.listing import numbers

    given = only_given(options)
    require_taken(encoding, given, "plot")
    encoding = name_of(encoding)
    path = output or Path(f"{encoding}.png")
    require_figure(path)
    built = encoding_to_draw(encoding, length=length, seed=seed, trained=trained, **given)
    drawn = draw(built, length=length, theme=THEMES[theme], trained=trained, causal=causal, untrained=True)
    save(drawn, path)
    length = default_length(built) if length is None else length
    facts = {"encoding": encoding, "built": repr(built), "length": length, "seed": seed, "figure": str(path)}
    return Answer({**facts, "numbers": numbers(built)}, str(path))


@click.command("bench")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@answers
def bench(names: tuple[str, ...]) -> Answer:
    """Show what was measured against other people's code, on which device.

    NAME is a benchmark, such as rotary or attention; without one, all are shown. To measure on your own machine: make
    bench, in a checkout.
    """
    from locant.report.benchmarks import print_recorded, recorded

    chosen = recorded(names)
    return Answer(chosen, lambda: print_recorded(chosen))
