"""``locant list``."""

from __future__ import annotations

from typing import Any

import click

from locant.cli.options import as_json, encoding_options, only_given, require_taken

__all__ = ["verb"]


@click.command("list")
@click.argument("name", required=False)
@encoding_options
@as_json
def verb(name: str | None, as_json: bool, **options: Any) -> None:
    """List every encoding, what it does and costs; or one in full, with its numbers.

    With a NAME, also its options, and its slopes or inverse frequencies, for a small model or for the sizes given.
    """
    from locant.report.console import print_json, talk
    from locant.report.listing import encoding_facts, facts_of_all, print_all, print_encoding

    given = only_given(options)
    if name is None:
        if given:
            raise click.UsageError(f"got --{next(iter(given)).replace('_', '-')} without the name of an encoding")
        facts, broken = facts_of_all()
        for why in broken:
            talk(f"left out: {why}")
        print_json(facts) if as_json else print_all(facts)
    else:
        require_taken(name, given, "list")
        facts = encoding_facts(name, **given)
        print_json(facts) if as_json else print_encoding(facts)
