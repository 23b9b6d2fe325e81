"""``locant bench``."""

from __future__ import annotations

import click

from locant.cli.options import as_json

__all__ = ["verb"]


@click.command("bench")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@as_json
def verb(names: tuple[str, ...], as_json: bool) -> None:
    """Show what was measured against other people's code, on which device.

    NAME is a benchmark, such as rotary or attention; without one, all are shown. To measure on your own machine: make
    bench, in a checkout.
    """
    from locant.report.benchmarks import print_recorded

    print_recorded(names, as_json=as_json)
