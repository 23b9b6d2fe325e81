"""``locant list``, ``plot`` and ``bench``: the encodings, their pictures and the recorded benchmarks."""

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
    """List every encoding with its properties and cost, or show one in full.

    With a NAME, the list shows its options, and its slopes or inverse frequencies for a small model or for the sizes
    that you pass.
    """
    from locant.report.console import log_line
    from locant.report.listing import encoding_facts, facts_of_all, print_all, print_encoding

    options_of_encoding = only_given(options)
    if name is not None:
        require_taken(name, options_of_encoding, "list")
        facts = encoding_facts(name, **options_of_encoding)
        return Answer(facts, lambda: print_encoding(facts))
    if options_of_encoding:
        raise click.UsageError(f"got {flag_of(next(iter(options_of_encoding)))} without the name of an encoding")
    facts_of_encodings, failures = facts_of_all()
    for failure in failures:
        log_line(f"left out: {failure}")
    return Answer(facts_of_encodings, lambda: print_all(facts_of_encodings))


@click.command("plot")
@click.argument("encoding")
@output("The picture. Its suffix (.png, .svg or .pdf) sets the format. Default: ENCODING.png.")
@click.option(
    "--length", type=Whole(2, MAX_LENGTH), help="Number of positions to draw. Default: enough to see the pattern."
)
@encoding_options
@click.option("--scaling", metavar="NAME[:FACTOR]", help="A scaling of rotary, such as yarn:8. A wrong name lists all.")
@count("--trained", default=TRAINED, help="The trained length that --scaling extends.")
@click.option("--theme", type=OneOf(("light", "dark")), default="light", show_default=True, help="Background.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Random seed of learned tables.")
@click.option("--causal/--no-causal", default=None, help="Hide or show the bias for later keys.")
@answers
def plot(
    encoding: str, output: Path | None, length: int | None, trained: int, theme: str, seed: int, causal: bool | None,
    **options: Any,
) -> Answer:  # fmt: skip
    """Draw a picture of an encoding.

    \b
    embedding tables   the table, and the similarity of its positions
    rotary encodings   each pair's angle and cosine, and how the query-key product decays with distance
    biases             the bias of each head on the scores
    rotary --scaling   each pair's wavelength, before and after

    ENCODING is a name from `locant list`. Learned tables are drawn as before training.
    """  # noqa: D301
    from locant.figures.canvas import THEMES, require_figure, save
    from locant.figures.plot import default_length, draw, encoding_to_draw
    from locant.positions.registry import name_of
    from locant.report.listing import numbers

    options_of_encoding = only_given(options)
    require_taken(encoding, options_of_encoding, "plot")
    encoding = name_of(encoding)
    path = output or Path(f"{encoding}.png")
    require_figure(path)
    built = encoding_to_draw(encoding, length=length, seed=seed, trained=trained, **options_of_encoding)
    drawn = draw(built, length=length, theme=THEMES[theme], trained=trained, causal=causal, untrained=True)
    save(drawn, path)
    length = default_length(built) if length is None else length
    facts = {"encoding": encoding, "built": repr(built), "length": length, "seed": seed, "figure": str(path)}
    return Answer({**facts, "numbers": numbers(built)}, str(path))


@click.command("bench")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@answers
def bench(names: tuple[str, ...]) -> Answer:
    """Show recorded speed comparisons with other packages, and the device of each.

    NAME is a benchmark, such as rotary or attention. Without a NAME, all are shown. To measure on your own machine, run
    `make bench` in a checkout.
    """
    from locant.report.benchmarks import print_recorded, read_benchmarks

    benchmarks = read_benchmarks(names)
    return Answer(benchmarks, lambda: print_recorded(benchmarks))
