"""Options that several verbs share, and the kinds of values they take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from locant._version import __version__

__all__ = ["Factor", "Listed", "Place", "as_json", "files", "only_given", "output", "show_version", "tokenizer_options"]

F = TypeVar("F", bound=Callable[..., Any])


class Listed(click.ParamType):
    """Values between commas, such as ``0,1,2``."""

    def __init__(self, kind: type[int] | type[str]) -> None:
        self.kind = kind
        self.name = f"{'numbers' if kind is int else 'names'},..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int | str, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self.kind(part.strip()) for part in str(value).split(",") if part.strip())
        except ValueError:
            self.fail(f"{value!r} is not a list of {self.name.split(',')[0]} such as 0,1,2", param, ctx)


class Factor(click.ParamType):
    """A number, or the name of a rule that gives one."""

    name = "number|rule"
    rules = ("sqrt_d_model", "sqrt_d_model_rounded")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        if value in self.rules:
            return value
        try:
            return float(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor {' nor '.join(self.rules)}", param, ctx)


class Place(click.Path):
    """A file or folder. An empty name, as an unset variable of a shell leaves it, would mean the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty, expected the name of a file or folder", param, ctx)
        return super().convert(value, param, ctx)


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"locant {__version__}")
        ctx.exit()


show_version = click.Option(
    ["--version"],
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version and exit.",
)

as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and nothing else, on stdout.")

files = click.argument("files", nargs=-1, type=str, metavar="[FILE]...")


def output(help_text: str, default: str | None = None) -> Callable[[F], F]:
    """The place to write to."""
    return click.option("-o", "--output", type=Place(), default=default, help=help_text)


def tokenizer_options(function: F) -> F:
    """Which tokenizer reads the text, and whether one may be fetched."""
    for option in (
        click.option("--download", is_flag=True, help="Allow fetching the tokenizer from the network."),
        click.option(
            "--vocab-size",
            type=click.IntRange(min=257, max=10_000_000),
            metavar="N",
            help="Entries of the byte-level BPE that is trained on the text; more than 256.",
        ),
        click.option(
            "--tokenizer",
            metavar="NAME|PATH|bytes",
            help="A tokenizer.json, a folder that holds one, a name such as gpt2 in local caches, or bytes. "
            "Default: a BPE trained on the text.",
        ),
    ):
        function = option(function)
    return function


def only_given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, for functions that know their own defaults."""
    return {name: value for name, value in options.items() if value is not None}
