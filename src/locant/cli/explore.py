"""``locant explore``: the explorer, served or written to a file."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path

import click

from locant.cli.answers import as_json
from locant.cli.options import PathOption, Whole, files


@click.command("explore")
@files
@click.option("--config", "configs", multiple=True, help="A config.json, a model's folder or a preset. Repeatable.")
@click.option("--port", type=Whole(0, 65535), default=0, help="Port of the server. Default: a free one.")
@click.option("--open/--no-open", "opens", default=True, help="Open the address in a browser, or only print it.")
@click.option(
    "--show", "address", default="compare", show_default=True, metavar="SCREEN[?NAME=VALUE&...]",
    help="The first screen and its settings: the part of an address after its #.",
)  # fmt: skip
@click.option("--export", "page", type=PathOption(), help="Write the screen to one HTML file instead of serving it.")
@as_json
def explore(
    files: tuple[str, ...], configs: tuple[str, ...], port: int, opens: bool, address: str, page: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Look at encodings, models and rows of tokens in a browser.

    FILES are texts, folders that compare wrote, and folders of models. The server accepts connections from this machine
    only, and only with the token in the address. Stop it with Ctrl-C.
    """
    from dataclasses import replace

    from locant.explore.session import Session, read_address
    from locant.extras import require
    from locant.files import write_whole

    session = Session.of(files, configs)
    screen, settings = read_address(address)
    if page is not None:
        from locant.explore.document import render_saved_page
        from locant.explore.screens import answer_for_one_screen

        write_whole(page, render_saved_page(answer_for_one_screen(screen, settings, replace(session, is_shared=True))))
        _print("page", str(page), as_json)
        return
    for package in ("uvicorn", "starlette"):
        require(package, "serving the explorer")
    from locant.explore.screens import find_screen
    from locant.explore.server import new_token, run

    find_screen(screen)
    try:
        run(session, port, new_token(), lambda start: _announce(f"{start}#{address.removeprefix('#')}", opens, as_json))
    except KeyboardInterrupt:
        click.echo("stopped", err=True)


def _print(name: str, value: str, as_json: bool) -> None:
    click.echo(json.dumps({name: value}) if as_json else value)  # flushes immediately, also into a pipe


def _announce(address: str, opens: bool, as_json: bool) -> None:
    _print("address", address, as_json)
    click.echo("Press Ctrl-C to stop.", err=True)
    if opens and not webbrowser.open(address):
        click.echo("no browser was found. Open the address in a browser on this machine.", err=True)
