"""``locant list``."""

from __future__ import annotations

import click

from locant.cli.options import as_json

__all__ = ["verb"]


@click.command("list")
@as_json
def verb(as_json: bool) -> None:
    """List every encoding: door, parameters, reach, users, paper."""
    from locant.report.console import print_json
    from locant.report.listing import catalog_facts, print_catalog

    if as_json:
        print_json(catalog_facts())
    else:
        print_catalog()
